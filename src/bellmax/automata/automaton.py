"""The public class Automaton, and batches of automata."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bellmax.automata.builders as builders
import bellmax.automata.operations as operations
import bellmax.automata.text as text_format
from bellmax.automata.arpa import ngram
from bellmax.automata.composition import compose
from bellmax.automata.lexicon import lexicon
from bellmax.automata.matching import Failing
from bellmax.automata.reading import Arcs, StateScores, read
from bellmax.automata.table import Names, Table
from bellmax.inputs import Lengths, Numbers, answers_near_misses, check_tensor
from bellmax.regularizers import Regularizer
from bellmax.structures.automaton import AutomatonPaths
from bellmax.tensors import Gamma


class Arced(ABC):
    """Arcs with scores, of one automaton or of a batch."""

    @property
    @abstractmethod
    def arcs(self) -> Tensor:
        """The arcs (..., A, 4) int64, rows [source, target, label, output]. −1 stands for no label or no output."""

    @property
    @abstractmethod
    def scores(self) -> Tensor:
        """The score of each arc, (..., A). Differentiable."""

    @property
    @abstractmethod
    def start(self) -> Tensor:
        """The score of starting in each state, (..., S). −∞ for states that are not start states. Differentiable."""

    @property
    @abstractmethod
    def final(self) -> Tensor:
        """The score of ending in each state, (..., S). −∞ for states that are not final. Differentiable."""

    @property
    def num_states(self) -> int:
        """The number S of states."""
        return self.start.shape[-1]

    @property
    def num_arcs(self) -> int:
        """The number A of arcs."""
        return self.arcs.shape[-2]

    @answers_near_misses
    def paths(
        self,
        log_probs: Tensor,
        *,
        scores: Tensor | None = None,
        start: Tensor | None = None,
        final: Tensor | None = None,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> AutomatonPaths:
        """Return the distribution over the paths of the automaton, given the score of each label at each frame.

        A path takes one arc with a label at each frame, and any number of arcs without a label. Its score is the sum
        of the scores of its labels and arcs, and of its start and final state.

        Args:
            log_probs: The score (..., T, V) of each label at each frame. −∞ forbids the label at that frame.
            scores: The score of each arc, (..., A), instead of :attr:`scores`.
            start: The score of starting in each state, (..., S), instead of :attr:`start`.
            final: The score of ending in each state, (..., S), instead of :attr:`final`.
            lengths: The number of frames of each batch member, from 0 to T, by default T.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        Scores are converted to the dtype of ``log_probs``.

        >>> log_probs = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7]]).log()
        >>> p = Automaton.ctc([1, 2]).paths(log_probs)
        >>> p.value.exp()
        tensor(0.5970)
        >>> p.labels(p.decode()), p.outputs(p.decode())
        (tensor([1, 0, 2]), tensor([ 1,  2, -1]))
        """
        check_tensor("log_probs", log_probs)

        def like(name: str, tensor: Tensor | None, default: Tensor) -> Tensor:
            return (default if tensor is None else check_tensor(name, tensor)).to(log_probs.device, log_probs.dtype)

        arc_scores = like("scores", scores, self.scores)
        ends = like("start", start, self.start), like("final", final, self.final)
        return AutomatonPaths(self, log_probs, arc_scores, *ends, lengths, omega, gamma)


class Automaton(Arced):
    """A finite automaton whose arcs have labels, outputs and scores: a grammar, a lexicon, CTC or a language model.

    An automaton defines a set of label sequences, each with a score. A path starts in a start state, follows arcs, and
    ends in a final state. The labels of its arcs are the sequence, and the outputs of its arcs are its translation,
    such as letters to words. An arc with label −1 takes no frame. An arc with output −1 adds nothing to the
    translation.

    To get the distribution over paths given scores of labels at frames, call :meth:`paths`. To combine automata, use
    ``left @ right``, which is the composition: it feeds the outputs of ``left`` into ``right``.

    Args:
        arcs: A rows (source, target, label) or (source, target, label, output), lists or an integer tensor. The
            default output is the label. States are integers or names. A name is any hashable object. The first name in
            ``arcs`` becomes state 0, the next new name becomes state 1, and so on. Arcs with label −1 must not form a
            cycle.
        scores: The score of each arc, (A,), by default 0. A tensor may require gradients.
        start: The score of each start state, as a mapping from states to scores, or as a tensor (S,) with −∞ for
            states that are not start states. By default, paths start in state 0, with score 0.
        final: The score of each final state, in the same format. By default, the states that no arc leaves are final,
            with score 0.

    Tensors are not copied. If an optimizer changes them, the automaton has the new scores, and so do all automata that
    were made from it. Numbers are stored as float64.

    >>> import torch, bellmax as bx
    >>> answer = bx.Automaton([("start", "end", 1), ("start", "middle", 2), ("middle", "end", 3)])
    >>> answer
    Automaton(num_states=3, num_arcs=3)
    >>> answer.states
    ['start', 'end', 'middle']
    >>> answer.final
    tensor([-inf, 0., -inf], dtype=torch.float64)

    The letters 5, 1, 7 spell the word "yes", and the letters 3, 4 spell "no". A CTC model with 8 classes reads words
    from frames:

    >>> words = bx.Automaton.lexicon({"yes": [5, 1, 7], "no": [3, 4]})
    >>> graph = bx.Automaton.ctc(vocab=8) @ words
    >>> graph
    Automaton(num_states=9, num_arcs=26)
    >>> log_probs = torch.eye(8)[[5, 5, 1, 0, 7, 3, 0, 4]].log_softmax(-1)
    >>> p = graph.paths(log_probs)
    >>> graph.names(p.outputs(p.decode()))
    ['yes', 'no']

    To train with lattice-free MMI, compare the paths of a transcript with the paths of the whole graph:

    >>> transcript = bx.Automaton.ctc(vocab=8) @ words @ bx.Automaton.linear([0, 1])
    >>> loss = p.value - transcript.paths(log_probs).value

    """

    _content: Table | Failing

    @answers_near_misses
    def __init__(
        self,
        arcs: Arcs,
        *,
        scores: Numbers | None = None,
        start: StateScores | None = None,
        final: StateScores | None = None,
    ) -> None:
        self._content = read(arcs, scores, start, final)

    @classmethod
    def _of(cls, content: Table | Failing) -> Automaton:
        automaton = object.__new__(cls)
        automaton._content = content
        return automaton

    @cached_property
    def _table(self) -> Table:
        """The arcs, without failure arcs."""
        return self._content if isinstance(self._content, Table) else self._content.resolved()

    def __repr__(self) -> str:
        if isinstance(self._content, Failing):
            return f"Automaton(num_states={self.num_states}, num_ngrams={len(self._content.table.arcs)})"
        return f"Automaton(num_states={self.num_states}, num_arcs={self.num_arcs})"

    # --- content

    @property
    def arcs(self) -> Tensor:
        """The arcs (A, 4) int64, rows [source, target, label, output]. −1 stands for no label or no output."""
        return self._arcs

    @cached_property
    def _arcs(self) -> Tensor:
        return torch.from_numpy(self._table.arcs)

    @property
    def scores(self) -> Tensor:
        """The score of each arc, (A,). Differentiable with respect to the tensors that the automaton was made of."""
        return self._table.scores.tensor()

    @property
    def start(self) -> Tensor:
        """The score of starting in each state, (S,). −∞ for states that are not start states. Differentiable."""
        return self._some_table.start.tensor()

    @property
    def final(self) -> Tensor:
        """The score of ending in each state, (S,). −∞ for states that are not final. Differentiable."""
        return self._some_table.final.tensor()

    @property
    def states(self) -> Sequence[Hashable]:
        """The names of the states, by their numbers."""
        return self._some_table.states

    @property
    def label_names(self) -> Names | None:
        """The names of the labels by their numbers, such as the words of an n-gram, or None."""
        return self._some_table.label_names

    @property
    def output_names(self) -> Names | None:
        """The names of the outputs by their numbers, such as the words of a lexicon, or None."""
        return self._some_table.output_names

    @property
    def _some_table(self) -> Table:
        """The states and names, without computing the arcs."""
        return self._content if isinstance(self._content, Table) else self._content.table

    def names(self, outputs: Tensor) -> list[Any]:
        """Return the names of outputs (..., L) as a list, or as nested lists if there are several dimensions.

        Args:
            outputs: Numbers of outputs, as :meth:`AutomatonPaths.outputs` returns them. −1 is left out.

        >>> words = Automaton.lexicon({"yes": [5, 1, 7], "no": [3, 4]})
        >>> words.names(torch.tensor([[1, 0], [0, -1]]))
        [['no', 'yes'], ['yes']]
        """
        names = self.output_names
        if names is None:
            raise ValueError("names needs an automaton whose outputs have names, such as a lexicon")
        if check_tensor("outputs", outputs).ndim > 1:
            return [self.names(row) for row in outputs]
        numbers = [output for output in outputs.tolist() if output >= 0]
        for output in numbers:
            if output >= len(names):
                raise ValueError(f"outputs must be below {len(names)}, the number of names, got {output}")
        return [names[output] for output in numbers]

    # --- builders

    @classmethod
    def linear(cls, labels: Sequence[int] | Tensor) -> Automaton:
        """Return the automaton that accepts one sequence of labels.

        Args:
            labels: The labels, (L,).

        >>> Automaton.linear([3, 1, 2])
        Automaton(num_states=4, num_arcs=3)
        """
        return cls._of(builders.linear(labels))

    @classmethod
    @answers_near_misses
    def ctc(
        cls, target: Sequence[int] | Tensor | None = None, *, vocab: int | None = None, blank: int = 0
    ) -> Automaton:
        """Return the automaton of connectionist temporal classification (CTC), which maps alignments to labels.

        An alignment assigns each frame a label or the blank. Merging equal neighbors and then removing blanks gives the
        output. With a target, the automaton accepts the alignments of this target, as :class:`bellmax.CTC` does. With
        ``vocab``, it accepts all alignments.

        Args:
            target: The labels of the target, (L,).
            vocab: The number of classes with the blank.
            blank: The class of the blank, default 0.

        >>> Automaton.ctc([1, 2])
        Automaton(num_states=5, num_arcs=10)
        >>> Automaton.ctc(vocab=3)
        Automaton(num_states=3, num_arcs=9)
        """
        if target is not None and vocab is None:
            return cls._of(builders.ctc_target(target, blank))
        if vocab is not None and target is None:
            return cls._of(builders.ctc_topology(vocab, blank))
        raise ValueError(f"ctc needs either a target or vocab=, got {'neither' if target is None else 'both'}")

    @classmethod
    def lexicon(cls, words: Mapping[str, Sequence[int] | Tensor], *, scores: Numbers | None = None) -> Automaton:
        """Return the automaton that maps letters to words. It accepts any number of words in a row.

        The spellings form a trie, so that words share arcs at their beginning. The output of a word is its number in
        the order of ``words``, and :attr:`output_names` has the words. The output and the score are on the first arc
        that only this word uses.

        Args:
            words: The labels of the letters of each word.
            scores: The score of each word, (W,), by default 0. A tensor may require gradients.

        >>> words = Automaton.lexicon({"to": [1, 2], "too": [1, 2, 2]})
        >>> words.arcs
        tensor([[ 0,  1,  1, -1],
                [ 1,  0,  2,  0],
                [ 1,  2,  2, -1],
                [ 2,  0,  2,  1]])
        """
        return cls._of(lexicon(words, scores))

    @classmethod
    def ngram(cls, path: str | Path, vocabulary: Sequence[str | None] | None = None) -> Automaton:
        r"""Return the automaton of a back-off n-gram model from an ARPA file.

        Labels and outputs are words. Scores are natural logarithms of probabilities. A sentence starts after "<s>" and
        ends with "</s>", which is in the final scores. If the model has an n-gram for a word, a path never backs off
        for this word. In a composition on the right side, only the states that are needed are made. On its own, the
        automaton has an arc for each state and word.

        If the left side of a composition has named outputs, such as a lexicon, words are matched by their names. Words
        that the model does not have are matched with "<unk>".

        Args:
            path: The ARPA file.
            vocabulary: The words in the order of their labels. None stands for a label that is not a word, such as the
                blank of CTC. By default, the words of the file without "<s>" and "</s>".

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> unigrams = "\\data\\\nngram 1=3\n\\1-grams:\n-0.5 </s>\n-0.3 yes\n-0.7 no\n\\end\\\n"
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "words.arpa"
        ...     _ = path.write_text(unigrams)
        ...     model = Automaton.ngram(path)
        >>> model.label_names, model.scores
        (('yes', 'no'), tensor([-0.6908, -1.6118], dtype=torch.float64))
        """
        return cls._of(ngram(path, vocabulary))

    # --- operations

    def union(self, *others: Automaton) -> Automaton:
        """Return the automaton with the paths of this automaton and of the others.

        >>> Automaton.linear([1]).union(Automaton.linear([2, 3]))
        Automaton(num_states=5, num_arcs=3)
        """
        return Automaton._of(operations.union(self._tables(others)))

    def concatenate(self, *others: Automaton) -> Automaton:
        """Return the automaton whose paths are a path of this automaton and then a path of each other automaton.

        Arcs without a label connect final states to start states.

        >>> Automaton.linear([1]).concatenate(Automaton.linear([2, 3]))
        Automaton(num_states=5, num_arcs=4)
        """
        first, *rest = self._tables(others)
        for table in rest:
            first = operations.concatenate(first, table)
        return Automaton._of(first)

    def closure(self) -> Automaton:
        """Return the automaton whose paths are any number of paths of this automaton in a row, also none.

        Raises ``ValueError`` if this automaton accepts the empty sequence, since arcs without a label would then form a
        cycle.

        >>> Automaton.linear([1, 2]).closure()
        Automaton(num_states=4, num_arcs=4)
        """
        return Automaton._of(operations.closure(self._table))

    def reverse(self) -> Automaton:
        """Return the automaton whose paths are the paths of this automaton from the end to the start.

        >>> Automaton.linear([1, 2]).reverse().arcs
        tensor([[1, 0, 1, 1],
                [2, 1, 2, 2]])
        """
        return Automaton._of(operations.reverse(self._table))

    def trim(self) -> Automaton:
        """Return the automaton without the states and arcs that no path from a start state to a final state uses.

        >>> Automaton([(0, 1, 5), (0, 2, 6), (2, 2, 7)], final={1: 0.0}).trim()
        Automaton(num_states=2, num_arcs=1)
        """
        return Automaton._of(self._table.trimmed())

    def __matmul__(self, other: Automaton) -> Automaton:
        """Return the composition: pairs of a path of each side, where the outputs of the left are labels of the right.

        The score of a pair is the sum of both scores. Each pair of paths is one path of the result. The result has no
        states that lead nowhere. Raises ``ValueError`` if there is no such pair.

        >>> words = Automaton.lexicon({"yes": [5, 1, 7], "no": [3, 4]})
        >>> words @ Automaton.linear([1, 0])            # the sentence "no yes"
        Automaton(num_states=6, num_arcs=5)
        """
        if not isinstance(other, Automaton):
            return NotImplemented
        return Automaton._of(compose(self._table, other._content))

    def _tables(self, others: Sequence[Automaton]) -> list[Table]:
        for other in others:
            if not isinstance(other, Automaton):
                raise ValueError(f"others must be automata, got a {type(other).__name__}")
        return [self._table, *(other._table for other in others)]

    # --- text and batches

    def to_text(self) -> str:
        r"""Return the automaton in the text format of OpenFst, with the lines of the start state first.

        A line is an arc "source target label output cost", or a final state "state cost". In this format, 0 stands for
        no label, and all other labels and outputs are one larger. A cost is a negative score. Names are not stored. If
        the automaton has several start states, or a start score that is not 0, the text has a new start state.

        >>> Automaton([(0, 1, 5), (1, 2, 6, -1)], scores=[0.0, -0.5]).to_text().splitlines()
        ['0\t1\t6\t6', '1\t2\t7\t0\t0.5', '2']
        """
        return text_format.to_text(self._table)

    @classmethod
    def from_text(cls, text: str, *, acceptor: bool = False) -> Automaton:
        r"""Return the automaton of a text in the format of OpenFst, as ``fstprint`` and :meth:`to_text` write it.

        Args:
            text: The lines of the automaton, with integers for states and labels. The first line is about the start
                state.
            acceptor: If True, arcs have one column for the label, which is also the output. Default False.

        >>> Automaton.from_text("0 1 6 6 0.5\n1").scores
        tensor([-0.5000], dtype=torch.float64)
        """
        return cls._of(text_format.from_text(text, acceptor))

    @staticmethod
    def stack(automata: Sequence[Automaton]) -> AutomatonBatch:
        """Return a batch of automata, one for each batch member.

        Args:
            automata: N automata. The batch has the size of the largest.

        >>> each = Automaton.stack([Automaton.ctc(target) for target in ([1, 2], [3])])
        >>> each.arcs.shape
        torch.Size([2, 10, 4])
        """
        return AutomatonBatch(automata)


class AutomatonBatch(Arced):
    """A batch of N automata, which :meth:`Automaton.stack` returns.

    Its tensors are padded: arcs with −1, scores with 0, start and final scores with −∞. The method :meth:`paths` takes
    ``log_probs`` (..., N, T, V).
    """

    def __init__(self, automata: Sequence[Automaton]) -> None:
        self.automata = tuple(automata)
        for n, automaton in enumerate(self.automata):
            if not isinstance(automaton, Automaton):
                raise ValueError(f"automata must be a sequence of Automaton, got a {type(automaton).__name__} at {n}")
        if not self.automata:
            raise ValueError("automata must have at least one Automaton, got none")
        self._arcs = _padded([automaton.arcs for automaton in self.automata], -1)

    def __repr__(self) -> str:
        sizes = f"num_states={self.num_states}, num_arcs={self.num_arcs}"
        return f"AutomatonBatch({len(self.automata)} automata, {sizes})"

    @property
    def arcs(self) -> Tensor:
        """The arcs (N, A, 4) int64, rows [source, target, label, output], and rows of −1 as padding."""
        return self._arcs

    @property
    def scores(self) -> Tensor:
        """The score of each arc, (N, A). Differentiable."""
        return _padded([automaton.scores for automaton in self.automata], 0)

    @property
    def start(self) -> Tensor:
        """The score of starting in each state, (N, S). Differentiable."""
        return _padded([automaton.start for automaton in self.automata], -torch.inf)

    @property
    def final(self) -> Tensor:
        """The score of ending in each state, (N, S). Differentiable."""
        return _padded([automaton.final for automaton in self.automata], -torch.inf)


def _padded(tensors: Sequence[Tensor], fill: float) -> Tensor:
    """Stack tensors of different lengths, with the widest dtype."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.nn.utils.rnn.pad_sequence([tensor.to(dtype) for tensor in tensors], True, fill)
