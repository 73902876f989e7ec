"""Parse trees of a sentence: binary bracketings (SpanTrees) and projective dependency trees (DependencyTrees)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import EventForm, Fault, are_integers
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, answers_near_misses, as_lengths, check_tensor
from bellmax.modes import is_checked
from bellmax.programs import PROGRAMS
from bellmax.programs.checks import of_sequence, subscript
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.targets import Targets
from bellmax.tensors import Gamma, wide_dtype

if TYPE_CHECKING:
    from typing_extensions import Self


class ParseTrees(PathDistribution):
    """The base class of distributions over the trees of a chart."""

    _roots: ClassVar[int] = 0
    """The number of positions of the chart for roots, in addition to the words."""
    _entries: ClassVar[str]
    """The plural noun for entries of the scores, for messages."""

    def __init__(
        self,
        program: str,
        scores: Tensor,
        dims: int,
        lengths: Lengths | None,
        omega: str | Regularizer,
        gamma: Gamma | None,
    ) -> None:
        batch, event = scores.shape[: scores.ndim - dims], scores.shape[scores.ndim - dims :]
        positions = _read_lengths(lengths, event[0] - self._roots, batch, scores.device) + self._roots
        chart = PROGRAMS[program]
        super().__init__(chart, {chart.scores[0]: (scores, dims)}, (positions,), batch, event, omega, gamma)

    @property
    def lengths(self) -> Tensor:
        """The number of words of each sentence, (...) int64."""
        return self._solver.integers[0] - self._roots

    @property
    def marginals(self) -> Tensor:
        """Probability of each span or arc, of the shape of the scores. Differentiable."""
        return self.expected_path

    def decode(self) -> Tensor:
        """Return the best tree in the decoded form.

        The tree is computed as an event, which is faster than as a sample.
        """
        decoded: Tensor = self._form.of_compact(self.best_path())
        return decoded

    def _tree_within(self, allowed: Tensor) -> Self:
        """Return the distribution over trees of allowed entries, (..., *event), with score 0, under the hard max."""
        batch = torch.broadcast_shapes(allowed.shape[: allowed.ndim - len(self.event_shape)], self.batch_shape)
        zeros = torch.zeros(batch + self.event_shape, dtype=wide_dtype(self.device), device=self.device)
        return self.expand(batch)._with((zeros.masked_fill(~allowed, -math.inf),), Hard())

    def _why_no_path(self, event: Tensor) -> str:
        return self._why_no_tree(event > 0) or "is not a tree of the chart"

    @abstractmethod
    def _why_no_tree(self, allowed: Tensor) -> str:
        """Return why the allowed entries (*event) contain no tree, or "" if no simple reason is known.

        The reason is the end of a sentence that begins with the name of the target.
        """

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The name of a tree, for messages."""


class ParseTargets(Targets):
    """Targets of parse trees: trees, or sets of spans or arcs that a tree may use."""

    reads_integers = True

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        p = cast("ParseTrees", self.p)
        best = p._tree_within(allowed)
        is_only = best._under(Negentropy()).value.abs() < 0.5
        if is_checked(is_only) and not bool(is_only.all()):
            member = tuple((~is_only).nonzero()[0].tolist())
            reason = self._member(member)._why_no_tree(allowed[member])
            raise ValueError(
                f"{name}{subscript(member)} {reason or f'must be a single tree, got {p._entries} of several'}"
            )
        self.check_possible(name, allowed)
        return best._expected_path().to(torch.promote_types(p.dtype, torch.float32))

    def why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        member = tuple(impossible.nonzero()[0].tolist())
        p, within = self._member(member), allowed[member]
        reason = p._why_no_tree(within)
        if not reason and bool(p._is_path(within.to(torch.promote_types(p.dtype, torch.float32)))):
            closed = (p.potentials == -math.inf) & within & p._targets.is_used(p.potentials.ndim)
            entry = subscript((*member, *closed.nonzero()[0].tolist()))
            reason = f"is forbidden: {p._solver.program.scores[0]}{entry} is -inf"
        return f"{name}{subscript(member)} {reason or f'must allow {p._kind} of finite score'}"

    def _member(self, member: tuple[int, ...]) -> ParseTrees:
        """Return the distribution of one member of the batch."""
        return cast("ParseTrees", self.p.detach()[member] if member else self.p.detach())


def _read_lengths(lengths: Lengths | None, words: int, batch: torch.Size, device: torch.device) -> Tensor:
    """Return the argument ``lengths`` as int64 of the batch shape; by default ``words``."""
    if lengths is None:
        return torch.full(batch, words, dtype=torch.int64, device=device)
    length = as_lengths("lengths", lengths, device)
    if length.ndim and length.shape != batch:
        raise ValueError(f"lengths must have the batch shape {tuple(batch)}, got {tuple(length.shape)}")
    if is_checked(length) and length.numel() and not 1 <= int(length.min()) <= int(length.max()) <= words:
        member = ((length < 1) | (length > words)).nonzero()[0].tolist()
        raise ValueError(f"lengths must be from 1 to {words}, got {int(length[tuple(member)])}{of_sequence(member)}")
    return length.expand(batch)


class SpanTargets(ParseTargets):
    """Targets of bracketings: trees, lists of spans, or sets of spans that a tree may use."""

    def forms(self) -> list[str]:
        batch = "".join(f"{size}, " for size in self.batch_shape)
        return [*super().forms(), f"({batch}S, {len(self.event_shape)}) of spans, padded with -1"]

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if not are_integers(target):
            return super().allowed(name, target, ignore_index)
        spans = self.read_decoded(name, target)
        event, are_spans = cast("SpanForm", self.p._form).events_of(spans)
        if is_checked(are_spans) and not bool(are_spans.all()):
            member = tuple((~are_spans).nonzero()[0].tolist())
            position, reason = self._member(member)._form.fault(spans[member])
            raise ValueError(f"{name}{subscript((*member, *position))} {reason}")
        return event > 0


class SpanForm(EventForm):
    """The spans of a tree, (..., L, 2) int64 [first word, last word], or (..., L, 3) with labels.

    Without labels, single words are left out of answers, and may be left out of arguments.
    """

    p: SpanTrees

    @property
    def own_shape(self) -> Sequence[int | str]:
        return "L", len(self.p.event_shape)

    def of_compact(self, paths: Tensor) -> Tensor:
        return _list_spans(paths, len(self.p.event_shape))

    def events_of(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        event = self.p.event_shape
        is_padding = (decoded == -1).all(-1)
        is_span = ((decoded >= 0) & (decoded < torch.tensor(event, device=decoded.device))).all(-1)
        is_span &= decoded[..., 0] <= decoded[..., 1]
        number = torch.where(is_span, _numbers_of(decoded, event), event.numel())
        listed = torch.zeros((*decoded.shape[:-2], event.numel() + 1), dtype=torch.bool, device=decoded.device)
        spans = listed.scatter(-1, number, True)[..., :-1].reshape(*decoded.shape[:-2], *event)
        if len(event) == 2:
            word = torch.arange(event[0], device=decoded.device)
            spans = spans | ((word.unsqueeze(-1) == word) & (word < self.p.lengths[..., None, None]))
        return spans.to(torch.promote_types(self.p.dtype, torch.float32)), (is_span | is_padding).all(-1)

    def fault(self, decoded: Tensor) -> Fault:
        event = self.p.event_shape
        for n, span in enumerate(decoded.tolist()):
            is_span = all(0 <= k < size for k, size in zip(span, event, strict=True)) and span[0] <= span[1]
            if not is_span and any(k != -1 for k in span):
                needed = f"[first word, last word{', label' * (len(event) == 3)}] below {list(event)}"
                return Fault((n,), f"must be a span {needed}, got {span}")
        return Fault((), self.p._why_no_path(self.events_of(decoded)[0]))


def _numbers_of(spans: Tensor, event: torch.Size) -> Tensor:
    """Return the flat index of spans (..., 2 or 3) in an event of this shape."""
    number = torch.zeros_like(spans[..., 0])
    for column, size in zip(spans.unbind(-1), event, strict=True):
        number = number * size + column
    return number


class SpanTrees(ParseTrees):
    """A distribution over binary constituency trees of n words: all ways to bracket a sentence.

    A span is a range of adjacent words. A tree has 2n − 1 spans: n single words, and n − 1 spans that each join two
    smaller adjacent spans. The largest span is the whole sentence. The score of a tree is the sum of the scores of its
    spans. The event of a tree is a 0/1 tensor (n, n) ``[first word, last word]``. With labels, each span has one of L
    labels, and the event is (n, n, L). The decoded form is the list of spans of the tree, see :meth:`best_tree`. The
    algorithm is CKY (Cocke, Kasami and Younger), which takes time O(n³). With labels, it takes time O(n³ + n² L),
    because the label of a span does not depend on the labels of other spans.

    Args:
        scores: The score (..., n, n) of each span ``[first word, last word]``. With ``labels=True``, the score (..., n,
            n, L) of each span and label ``[first word, last word, label]``. −∞ forbids a span. Entries below the
            diagonal are ignored.
        labels: If True, the last dimension of ``scores`` runs over the L labels. Default False.
        lengths: The number of words of each sentence, from 1 to n: a tensor of integers with the batch shape, or one
            number. Default n. Scores beyond the length are padding: they are ignored, may contain NaN and get no
            gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> scores = torch.zeros(3, 3)
    >>> scores[1, 2] = 0.5                               # the last two words belong together
    >>> t = bx.SpanTrees(scores, omega="sparsemax")
    >>> t.marginals
    tensor([[1.0000, 0.2500, 1.0000],
            [0.0000, 1.0000, 0.7500],
            [0.0000, 0.0000, 1.0000]])
    >>> t.decode()                                       # [first word, last word], parents first
    tensor([[0, 2],
            [1, 2]])
    """

    _target_kind = SpanTargets
    _form_kind = SpanForm
    _entries = "spans"
    _kind = "a binary tree"

    @answers_near_misses
    def __init__(
        self,
        scores: Tensor,
        *,
        labels: bool = False,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        if not isinstance(labels, bool):
            raise ValueError(
                f"labels must be True or False, got {labels!r}: for labels, pass labels=True and scores (..., n, n, L)"
            )
        shape, dims = check_tensor("scores", scores).shape, 3 if labels else 2
        event = shape[len(shape) - dims :] if len(shape) >= dims else (0, 0)
        if 0 in event or event[0] != event[1]:
            needed = "(..., n, n, L)" if labels else "(..., n, n)"
            raise ValueError(f"scores must have shape {needed}, each at least 1, got {tuple(shape)}")
        super().__init__("spans", scores, dims, lengths, omega, gamma)

    def best_tree(self) -> Tensor:
        """Return the spans of the best tree, (..., n − 1, 2) int64 [first word, last word].

        :meth:`decode` returns the same tensor.

        Spans are sorted by their first word. If several spans have the same first word, longer spans come first. The
        padding is −1. Spans of a single word are left out, since every tree has them. With labels, the result has shape
        (..., 2n − 1, 3), contains [first word, last word, label], and includes spans of a single word.
        """
        return self.decode()

    def sample_trees(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the spans of random trees, (*sample_shape, ..., n − 1, 2) int64, or (*sample_shape, ..., 2n − 1, 3)
        with labels."""
        return self.sample_decoded(sample_shape)

    def _why_no_tree(self, allowed: Tensor) -> str:
        words = int(self.lengths)
        by_span = (allowed.any(-1) if allowed.ndim == 3 else allowed)[:words, :words].triu()
        spans = {(first, last) for first, last in by_span.nonzero().tolist()}
        for first, last in ((0, words - 1), *((word, word) for word in range(words))):
            if (first, last) not in spans:
                what = "of a word" if first == last else "of the whole sentence"
                return f"is not a tree: it lacks the span [{first}, {last}] {what}"
        if len(spans) >= 2 * words:  # more than the spans of one tree
            return ""
        for (i, j), (k, m) in combinations(sorted(spans), 2):
            if i < k <= j < m:
                return f"is not a tree: the spans [{i}, {j}] and [{k}, {m}] overlap"
        for i, j in sorted(spans, key=lambda span: span[1] - span[0]):
            if i < j and not any({(i, k), (k + 1, j)} <= spans for k in range(i, j)):
                return f"is not a binary tree: no two of its spans make up the span [{i}, {j}]; binarize it first"
        return ""


def _list_spans(trees: Tensor, dims: int) -> Tensor:
    """Convert 0/1 trees to lists of spans, padded with −1.

    Trees (..., n, n, L) become (..., 2n − 1, 3). Trees (..., n, n) become (..., n − 1, 2), without single words.
    """
    event = trees.shape[trees.ndim - dims :]
    words, labels = event[0], event[2:].numel()
    if dims == 2:
        trees = trees.triu(1)
    in_order = trees.flip(1 - dims).flatten(-dims)  # of the spans with the same first word, the widest comes first
    most = 2 * words - 1 if dims == 3 else words - 1
    position = (in_order == 0).long().argsort(dim=-1, stable=True)[..., :most]
    columns = [position // (words * labels), words - 1 - position // labels % words]
    spans = torch.stack([*columns, position % labels] if dims == 3 else columns, -1)
    return torch.where(in_order.gather(-1, position).unsqueeze(-1) == 0, -1, spans)


class ArcTargets(ParseTargets):
    """Targets of dependency trees: trees, heads of words, or sets of arcs that a tree may use."""

    def forms(self) -> list[str]:
        words = (*self.batch_shape, self.event_shape[0] - 1)
        return [*super().forms(), f"{words} of heads, int64, -1 where any will do"]

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if not are_integers(target) or target.ndim >= len(self.batch_shape) + 2:
            return super().allowed(name, target, ignore_index)
        positions = self.event_shape[0]
        heads = self.expand(name, target, torch.Size((positions - 1,)))
        position = torch.arange(positions, device=self.p.device)
        if is_checked(heads):
            length = self.solver.integers[0].unsqueeze(-1) - 1
            bad = ((heads > length) | (heads < -1)) & (position[1:] <= length)
            if bool(bad.any()):
                *member, word = bad.nonzero()[0].tolist()
                head, most = int(heads[(*member, word)]), int(length[tuple(member)])
                needed = f"a head from 0, the root, to {most}, or -1 for any"
                raise ValueError(f"{name}{subscript((*member, word))} must be {needed}, got {head}")
        allowed = (heads.unsqueeze(-2) == position.unsqueeze(-1)) | (heads < 0).unsqueeze(-2)
        return torch.cat((allowed.new_zeros((*allowed.shape[:-1], 1)), allowed), -1)


class HeadForm(EventForm):
    """The head of each word, (..., n) int64, 0 for the root. Heads in the padding are ignored in arguments."""

    p: DependencyTrees

    @property
    def own_shape(self) -> Sequence[int | str]:
        return (self.p.event_shape[0] - 1,)

    def of_compact(self, paths: Tensor) -> Tensor:
        by_word = paths[..., 1:]
        return torch.where(by_word.any(-2), by_word.argmax(-2), -1)

    def events_of(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(self.p.event_shape[0], device=decoded.device)
        is_word = position[1:] <= self.p.lengths.unsqueeze(-1)
        heads = decoded.masked_fill(~is_word, -1)
        arcs = pad(heads.unsqueeze(-2) == position.unsqueeze(-1), (1, 0))
        is_head = (decoded >= 0) & (decoded < len(position))
        return arcs.to(torch.promote_types(self.p.dtype, torch.float32)), (is_head | ~is_word).all(-1)

    def fault(self, decoded: Tensor) -> Fault:
        words = int(self.p.lengths)
        for n, head in enumerate(decoded[:words].tolist()):
            if not 0 <= head <= words:
                return Fault((n,), f"must be a head from 0, the root, to {words}, got {head}")
        return Fault((), self.p._why_no_path(self.events_of(decoded)[0]))


class DependencyTrees(ParseTrees):
    """A distribution over the projective dependency trees of n words.

    Each word has a head, which is another word or an artificial root node. An arc leads from the head to the word,
    which is the modifier of the arc. A tree is projective if no two arcs cross when all arcs are drawn above the
    sentence. The event of a tree is a 0/1 tensor (n + 1, n + 1). Its entry ``[head, modifier]`` is 1 if the tree has
    this arc. Index 0 stands for the root, and indices 1 to n stand for the words. The decoded form of a tree is the
    head of each word, integers (..., n): 0 for the root, and −1 in the padding. The score of a tree is the sum of the
    scores of its arcs. The computation uses Eisner's algorithm, which takes O(n³) time.

    Args:
        arcs: The score (..., n + 1, n + 1) of each arc ``[head, modifier]``. −∞ forbids an arc. Column 0 and the
            diagonal are ignored: the root has no head, and no word is its own head.
        single_root: If True (the default), exactly one word has the root as its head. If False, one or more words have
            the root as their head.
        lengths: The number of words of each sentence, from 1 to n, not counting the root. Pass integers of the batch
            shape, or one number for all sentences. The default is n. Scores of words beyond the length are padding.
            Padding is ignored, may contain NaN and gets no gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> arcs = torch.zeros(4, 4)                         # root, "she", "eats", "fish"
    >>> arcs[0, 2] = arcs[2, 1] = arcs[2, 3] = 2.0
    >>> d = bx.DependencyTrees(arcs)
    >>> d.best_heads()
    tensor([2, 0, 2])
    >>> d.marginals[0]                                   # arcs from the root
    tensor([0.0000, 0.0222, 0.9555, 0.0222])
    """

    _target_kind = ArcTargets
    _form_kind = HeadForm
    _entries = "arcs"
    _roots = 1

    @property
    def _kind(self) -> str:
        return "a projective tree" + " with a single root" * self.single_root

    @answers_near_misses
    def __init__(
        self,
        arcs: Tensor,
        *,
        single_root: bool = True,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("arcs", arcs).shape
        if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2:
            raise ValueError(f"arcs must have shape (..., n + 1, n + 1) with n >= 1, got {tuple(shape)}")
        super().__init__("arcs_of_one_root" if single_root else "arcs", arcs, 2, lengths, omega, gamma)

    @property
    def single_root(self) -> bool:
        """True if exactly one word has the root as its head."""
        return self._solver.program.name == "arcs_of_one_root"

    def _shown_options(self) -> dict[str, object]:
        return {"single_root": self.single_root}

    def best_heads(self) -> Tensor:
        """Return the head of each word in the best tree, 0 for the root, (..., n) int64.

        The result equals the result of :meth:`decode`.
        """
        return self.decode()

    def sample_heads(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the head of each word in random trees, 0 for the root, (*sample_shape, ..., n) int64."""
        return self.sample_decoded(sample_shape)

    def _why_no_tree(self, allowed: Tensor) -> str:
        words = int(self.lengths)
        heads_by_word = [allowed[: words + 1, word].nonzero().flatten().tolist() for word in range(1, words + 1)]
        for word, heads in enumerate(heads_by_word, 1):
            if not heads:
                return f"is not a tree: word {word} has no head"
            if heads == [word]:
                return f"is not a tree: word {word} is its own head"
        if any(len(heads) > 1 for heads in heads_by_word):
            return ""
        head_of = {word: head for word, (head,) in enumerate(heads_by_word, 1)}
        for start in head_of:
            cycle = [start]
            while head_of.get(cycle[-1], 0) and head_of[cycle[-1]] not in cycle:
                cycle.append(head_of[cycle[-1]])
            if head_of.get(cycle[-1]) == start:
                return f"is not a tree: the arcs {'→'.join(map(str, [start, *reversed(cycle)]))} form a cycle"
        roots = [word for word, head in head_of.items() if head == 0]
        if self.single_root and len(roots) > 1:
            return f"has several roots, the words {' and '.join(map(str, roots))}: pass single_root=False to allow them"
        arcs = sorted((min(arc), max(arc), arc) for arc in ((head, word) for word, head in head_of.items()))
        for (i, j, one), (k, m, other) in combinations(arcs, 2):
            if i < k < j < m:
                shown = " and ".join(f"{head}→{word}" for head, word in (one, other))
                return f"is not a projective tree: the arcs {shown} cross"
        return ""
