"""Trees over the words of a sentence: brackets of spans, and heads of words."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, answers_near_misses, as_lengths, check_tensor
from bellmax.layouts import LAYOUTS, charts
from bellmax.layouts.values import subscript
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.structures.hypergraph import Derivations, Hypergraph
from bellmax.tensors import Gamma, wide_dtype
from bellmax.transforms import is_checked, is_readable

if TYPE_CHECKING:
    from typing_extensions import Self


class ParseTrees(PathDistribution):
    """What spans and arcs have in common: the derivations of a chart, by the scores that they use."""

    _tape_is_large = True
    _own_tensors: ClassVar[dict[str, int]] = {"_lengths": 0}
    _lengths: Tensor
    _least_places = 1
    """The places of a sentence of one word."""

    def __init__(
        self,
        name: str,
        scores: Tensor,
        dims: int,
        lengths: Lengths | None,
        omega: str | Regularizer,
        gamma: Gamma | None,
    ) -> None:
        batch, event = scores.shape[: scores.ndim - dims], scores.shape[scores.ndim - dims :]
        super().__init__({name: (scores, dims)}, batch, event, omega, gamma)
        words = event[0] + 1 - self._least_places
        self._lengths = self._read_lengths(lengths, words)
        self._name = name

    def _read_lengths(self, given: Lengths | None, words: int) -> Tensor:
        if given is None:
            return torch.full(self.batch_shape, words, dtype=torch.int64, device=self.device)
        lengths = as_lengths("lengths", given, self.device)
        if lengths.ndim and lengths.shape != self.batch_shape:
            raise ValueError(f"lengths must have the batch shape {tuple(self.batch_shape)}, got {tuple(lengths.shape)}")
        if is_checked(lengths) and lengths.numel() and not 1 <= int(lengths.min()) <= int(lengths.max()) <= words:
            got = f"numbers from {int(lengths.min())} to {int(lengths.max())}"
            raise ValueError(f"lengths must be from 1 to {words}, got {got}")
        return lengths.expand(self.batch_shape)

    @property
    def lengths(self) -> Tensor:
        """(...) int64: the words of each sentence."""
        return self._lengths

    @property
    def marginals(self) -> Tensor:
        """The probability of each span or arc, of the scores' shape. Differentiable."""
        return self.expected_path

    # --- the expansion: one weight for each edge of the chart

    def _derivations(self) -> Derivations:
        layout = LAYOUTS[self.structure]
        assert isinstance(layout, charts.ChartLayout)
        theta = self._flat.unscaled(self._scores)
        if is_readable(theta[0]):
            layout.check([t.detach() for t in theta], self._index)
        weights = layout.weights(theta, self._index)
        graph = _hypergraph(self.structure, tuple(self.event_shape), self.device)
        found = Derivations(graph, weights.reshape(*self.batch_shape, weights.shape[-1]), omega=self.omega)
        found.backend = self.backend
        return found

    def _expanded(self) -> Derivations:
        return self._derivations().by_edge

    def _onto_event(self, edges: Tensor) -> Tensor:
        which = _hypergraph(self.structure, tuple(self.event_shape), self.device).weight_of
        assert which is not None
        total = edges.new_zeros((*edges.shape[:-1], self.event_shape.numel() + 1 + self.event_shape[0]))
        total = total.index_add(-1, which, edges)[..., : self.event_shape.numel()]
        return total.reshape(*edges.shape[:-1], *self.event_shape)

    def _from_event(self, path: Tensor) -> Tensor:
        return self._within(path > 0)._expanded()._path().to(path.dtype)

    def _within(self, allowed: Tensor) -> Self:
        """The trees of nothing but what is allowed, (..., *batch, *event), each of score 0, under the hard max."""
        batch = torch.broadcast_shapes(allowed.shape[: allowed.ndim - len(self.event_shape)], self.batch_shape)
        zeros = torch.zeros(batch + self.event_shape, dtype=wide_dtype(self.device), device=self.device)
        return self.expand(batch)._with((zeros.masked_fill(~allowed, -math.inf),), Hard())

    def _is_path(self, value: Tensor) -> Tensor:
        best = self._within(value > 0)
        return (best._path() == value).flatten(-len(self.event_shape)).all(-1) & (best._value() == 0)

    def _check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        best = self._within(allowed)
        only = best._with(best._scores, Negentropy())._value().abs() < 0.5
        if is_checked(only) and not bool(only.all()):
            place = tuple((~only).nonzero()[0].tolist())
            reason = self._member(place)._why_no_tree(allowed[place])
            raise ValueError(
                f"{name}{subscript(place)} {reason or f'must be a single tree, got {self._entries} of several'}"
            )
        self._check_possible(name, allowed)
        return best._path().to(torch.promote_types(self.dtype, torch.float32))

    _entries: ClassVar[str]
    _kind: ClassVar[str]
    """What a message calls a tree."""

    def _why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        place = tuple(impossible.nonzero()[0].tolist())
        return f"{name}{subscript(place)} {self._member(place)._why_infinite(place, allowed[place])}"

    def _why_infinite(self, place: tuple[int, ...], allowed: Tensor) -> str:
        """The reason why no tree within ``allowed`` has a finite score, as the end of a sentence.

        This distribution must have no batch; ``place`` is its index in the batch that it was taken from.
        """
        reason = self._why_no_tree(allowed)
        if not reason and bool(self._is_path(allowed.to(torch.promote_types(self.dtype, torch.float32)))):
            closed = (self._scores[0] == -math.inf) & allowed & self._is_used(self._scores[0].ndim)
            reason = f"is forbidden: {self._name}{subscript((*place, *closed.nonzero()[0].tolist()))} is -inf"
        return reason or f"must allow {self._kind} of finite score"

    def _why_no_path(self, event: Tensor) -> str:
        return self._why_no_tree(event > 0) or "is not a tree of the chart"

    @abstractmethod
    def _why_no_tree(self, allowed: Tensor) -> str:
        """The reason why ``allowed`` holds no tree at all, as the end of a sentence; "" if there is no simple one."""

    def _member(self, place: tuple[int, ...]) -> Self:
        return self.detach()[place] if place else self.detach()

    def _edges_within(self, allowed: Tensor) -> Tensor:
        which = _hypergraph(self.structure, tuple(self.event_shape), self.device).weight_of
        assert which is not None
        by_weight = pad(allowed.flatten(-len(self.event_shape)), (0, 1 + self.event_shape[0]), value=True)
        return by_weight.index_select(-1, which)

    def _unweighted(self, omega: Regularizer) -> PathDistribution:
        return self._expanded()._unweighted(omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        return (self._lengths.reshape(-1) + (self._least_places - 1),)

    @property
    def _num_choices(self) -> int:
        return 4 * self.event_shape[0]

    def _is_used(self, ndim: int) -> Tensor:
        layout = LAYOUTS[self.structure]
        assert isinstance(layout, charts.ChartLayout)
        used = layout.is_used(self._flat.unscaled(self._detached()), self._index)
        return used.reshape(*self.batch_shape, *used.shape[1:])

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, ParseTrees)
            and self.structure == other.structure
            and self.batch_shape == other.batch_shape
            and self.event_shape == other.event_shape
            and self._lengths.equal(other._lengths)
        )


@lru_cache(maxsize=8)
def _hypergraph(structure: str, event: tuple[int, ...], device: torch.device) -> Hypergraph:
    with torch._C._DisableFuncTorch(), torch.device("cpu"):
        rows, weight, _ = charts.chart(structure, event)
        return Hypergraph(torch.from_numpy(rows), weight_of=torch.from_numpy(weight)).to(device)


class SpanTrees(ParseTrees):
    """A distribution over the binary trees of n words: all ways to bracket a sentence.

    A tree has a span for each word, and one for each pair of neighbours that it joins, up to the whole sentence: 2n − 1
    spans. Its score is the sum of theirs. As an event it is a 0/1 tensor (n, n) ``[first word, last word]``. With
    labels, every span has one of L, and a tree is (n, n, L). This is the algorithm of Cocke, Kasami and Younger (CKY),
    in O(n³); labels are chosen for each span on its own, in O(n² L).

    Args:
        scores: (..., n, n), or with ``labels=True`` (..., n, n, L), of spans ``[first word, last word(, label)]``; −∞
            forbids one. Entries below the diagonal are ignored.
        labels: If True, the last dimension of ``scores`` is the labels of a span. Default False.
        lengths: integers of the batch shape, or a number, from 1 to n: words of each sentence. Later ones are ignored,
            may hold NaN and get no gradient.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    >>> import bellmax as bx
    >>> scores = torch.zeros(3, 3)
    >>> scores[1, 2] = 0.5                               # the last two words belong together
    >>> t = bx.SpanTrees(scores, omega="sparsemax")
    >>> t.marginals
    tensor([[1.0000, 0.2500, 1.0000],
            [0.0000, 1.0000, 0.7500],
            [0.0000, 0.0000, 1.0000]])
    >>> t.best_tree()                                    # [first word, last word], parents first
    tensor([[0, 2],
            [0, 0],
            [1, 2],
            [1, 1],
            [2, 2]])
    """

    structure = "spans"
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
        super().__init__("scores", scores, dims, lengths, omega, gamma)

    def best_tree(self) -> Tensor:
        """The spans of the best tree, (..., 2n − 1, 2) int64 [first word, last word], padded with −1.

        A span comes before those inside it, and otherwise in the order of the sentence. With labels there are three
        columns, the last of which is the label.
        """
        return _listed(self.best_path(), len(self.event_shape))

    def sample_trees(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Trees drawn from the distribution, (*sample_shape, ..., 2n − 1, 2 or 3), as in :meth:`best_tree`."""
        return _listed(self.sample(sample_shape), len(self.event_shape))

    def _why_no_tree(self, allowed: Tensor) -> str:
        words = int(self._lengths)
        by_span = (allowed.any(-1) if allowed.ndim == 3 else allowed)[:words, :words].triu()
        spans = {(first, last) for first, last in by_span.nonzero().tolist()}
        for first, last in ((0, words - 1), *((word, word) for word in range(words))):
            if (first, last) not in spans:
                what = "of a word" if first == last else "of the whole sentence"
                return f"is not a tree: it lacks the span [{first}, {last}] {what}"
        if len(spans) >= 2 * words:  # more than one tree has
            return ""
        for (i, j), (k, m) in combinations(sorted(spans), 2):
            if i < k <= j < m:
                return f"is not a tree: the spans [{i}, {j}] and [{k}, {m}] overlap"
        for i, j in sorted(spans, key=lambda span: span[1] - span[0]):
            if i < j and not any({(i, k), (k + 1, j)} <= spans for k in range(i, j)):
                return f"is not a binary tree: no two of its spans make up the span [{i}, {j}]; binarize it first"
        return ""

    # --- targets: trees, or lists of spans

    def _target_forms(self) -> list[str]:
        batch = "".join(f"{size}, " for size in self.batch_shape)
        return [*super()._target_forms(), f"({batch}S, {len(self.event_shape)}) of spans, padded with -1"]

    def _allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        batch, event, columns = self.batch_shape, self.event_shape, len(self.event_shape)
        is_list = target.shape[len(batch) + 1 :] == (columns,) and target.shape != batch + event
        if target.dtype != torch.int64 or not is_list:
            return super()._allowed(name, target, ignore_index)
        spans = self._expand(name, target, target.shape[-2:])
        if is_checked(spans):
            bad = ((spans < -1) | (spans >= torch.tensor(event))).any(-1) | (spans[..., 0] > spans[..., 1])
            if bool(bad.any()):
                where = tuple(bad.nonzero()[0].tolist())
                needed = f"[first word, last word{', label' * (columns == 3)}] below {list(event)}"
                raise ValueError(f"{name} must hold spans {needed}, got {spans[where].tolist()} at {where}")
        number = torch.zeros_like(spans[..., 0])
        for column, size in zip(spans.unbind(-1), event, strict=True):
            number = number * size + column
        number = torch.where((spans < 0).any(-1), event.numel(), number)
        found = torch.zeros((*batch, event.numel() + 1), dtype=torch.bool, device=self.device)
        allowed = found.scatter(-1, number, True)[..., :-1].reshape(batch + event)
        # Every tree has the words: without labels, a list may leave them out.
        return allowed if columns == 3 else allowed | torch.eye(event[0], dtype=torch.bool, device=self.device)


def _listed(trees: Tensor, dims: int) -> Tensor:
    """(..., n, n) or (..., n, n, L) of 0 and 1 as lists of spans."""
    event = trees.shape[trees.ndim - dims :]
    words, labels = event[0], event[2:].numel()
    in_order = trees.flip(1 - dims).flatten(-dims)  # the widest of those that begin with a word first
    place = (in_order == 0).long().argsort(dim=-1, stable=True)[..., : 2 * words - 1]
    columns = [place // (words * labels), words - 1 - place // labels % words]
    spans = torch.stack([*columns, place % labels] if dims == 3 else columns, -1)
    return torch.where(in_order.gather(-1, place).unsqueeze(-1) == 0, -1, spans)


class DependencyTrees(ParseTrees):
    """A distribution over the projective dependency trees of n words, each of which has a head: a word, or the root.

    No two arcs cross. As an event a tree is a 0/1 tensor (n + 1, n + 1) ``[head, modifier]``, where 0 is the root and
    words count from 1; its score is the sum of its arcs'. This is Eisner's algorithm, in O(n³).

    Args:
        arcs: (..., n + 1, n + 1) ``[head, modifier]``, the score of each arc; −∞ forbids one. The first column and the
            diagonal are ignored.
        single_root: whether the root has one modifier; without, it may have any number.
        lengths: integers of the batch shape, or a number, from 1 to n: words of each sentence, without the root. Later
            ones are ignored, may hold NaN and get no gradient.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    >>> import bellmax as bx
    >>> arcs = torch.zeros(4, 4)                         # root, "she", "eats", "fish"
    >>> arcs[0, 2] = arcs[2, 1] = arcs[2, 3] = 2.0
    >>> d = bx.DependencyTrees(arcs)
    >>> d.best_heads()
    tensor([2, 0, 2])
    >>> d.marginals[0]                                   # of being the root's modifier
    tensor([0.0000, 0.0222, 0.9555, 0.0222])
    """

    structure = "arcs"
    _entries = "arcs"

    @property
    def _kind(self) -> str:  # type: ignore[override]
        return "a projective tree" + " with a single root" * self.single_root

    _least_places = 2

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
        self.structure = "arcs_of_one_root" if single_root else "arcs"
        super().__init__("arcs", arcs, 2, lengths, omega, gamma)

    @property
    def single_root(self) -> bool:
        return self.structure == "arcs_of_one_root"

    def best_heads(self) -> Tensor:
        """The head of each word in the best tree, (..., n) int64, 0 for the root; −1 past the length."""
        return _heads(self.best_path())

    def sample_heads(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Heads drawn from the distribution, (*sample_shape, ..., n), as in :meth:`best_heads`."""
        return _heads(self.sample(sample_shape))

    def _why_no_tree(self, allowed: Tensor) -> str:
        words = int(self._lengths)
        found = [allowed[: words + 1, word].nonzero().flatten().tolist() for word in range(1, words + 1)]
        for word, heads in enumerate(found, 1):
            if not heads:
                return f"is not a tree: word {word} has no head"
            if heads == [word]:
                return f"is not a tree: word {word} is its own head"
        if any(len(heads) > 1 for heads in found):
            return ""
        head_of = {word: head for word, (head,) in enumerate(found, 1)}
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

    # --- targets: trees, or heads

    def _target_forms(self) -> list[str]:
        words = (*self.batch_shape, self.event_shape[0] - 1)
        return [*super()._target_forms(), f"{words} of heads, int64, -1 where any will do"]

    def _allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if target.dtype != torch.int64 or target.ndim >= len(self.batch_shape) + 2:
            return super()._allowed(name, target, ignore_index)
        places = self.event_shape[0]
        heads = self._expand(name, target, torch.Size((places - 1,)))
        place = torch.arange(places, device=self.device)
        if is_checked(heads):
            bad = (heads > self._lengths.unsqueeze(-1)) & (place[1:] <= self._lengths.unsqueeze(-1))
            if bool(bad.any()):
                where = tuple(bad.nonzero()[0].tolist())
                raise ValueError(f"{name} must hold heads up to the length, got {int(heads[where])} at {where}")
        allowed = (heads.unsqueeze(-2) == place.unsqueeze(-1)) | (heads < 0).unsqueeze(-2)
        return torch.cat((allowed.new_zeros((*allowed.shape[:-1], 1)), allowed), -1)


def _heads(trees: Tensor) -> Tensor:
    """(..., n + 1, n + 1) of 0 and 1 as heads (..., n)."""
    by_word = trees[..., 1:]
    return torch.where(by_word.any(-2), by_word.argmax(-2), -1)
