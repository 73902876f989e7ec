"""Paths of automata over frames: the class AutomatonPaths and its decoded form."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import DecodedForm, EdgeLists, Fault
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, as_lengths, check_tensor
from bellmax.modes import is_checked
from bellmax.programs import AUTOMATON
from bellmax.programs.automaton import check_labels
from bellmax.programs.checks import batch_first_hint, check_lengths
from bellmax.regularizers import Hard, Negentropy, Regularizer, SquaredL2
from bellmax.structures.lattice import common_batch
from bellmax.targets import PathTargets, Targets
from bellmax.tensors import Gamma, divide_by_gamma, widen

if TYPE_CHECKING:
    from typing_extensions import Self


class Automaton(Protocol):
    """An automaton, or a stack of N automata, as its paths see it."""

    @property
    def arcs(self) -> Tensor:
        """Rows [source, target, label, output], (A, 4) or (N, A, 4) int64."""
        ...

    @property
    def num_states(self) -> int: ...


class Walk(NamedTuple):
    """K paths of each member of a flat batch."""

    arcs: Tensor
    """(K, B, L): the arcs, padded with −1."""
    labels: Tensor
    """(K, B, L): their labels."""
    first: Tensor
    """(K, B): the state in which the path begins."""
    last: Tensor
    """(K, B): the state in which it ends."""
    is_path: Tensor
    """(K, B): True if it is a path, whatever the scores of its arcs."""


class ArcPaths(EdgeLists):
    """Paths whose scores need no edges. The numbers of the edges are found when they are asked for."""

    def __init__(self, p: AutomatonPaths, walk: Walk, shape: torch.Size) -> None:
        self.p, self.walk, self.shape = p, walk, shape
        self.is_path = walk.is_path.reshape(shape)

    @cached_property
    def numbers(self) -> Tensor:  # type: ignore[override]
        numbers = AUTOMATON.edge_numbers(self.walk.arcs, self.walk.first, self.walk.last, *self.p._flat_inputs())
        return numbers.masked_fill(~self.walk.is_path.unsqueeze(-1), -1).reshape(*self.shape, -1)

    def num_edges(self) -> Tensor:
        return (self.walk.arcs >= 0).sum(-1).reshape(self.shape) + 2

    def score(self) -> Tensor:
        """Return the scores of the paths, (..., *batch), in the wide dtype. Differentiable."""
        scores = [widen(t) for t in self.p._solver.batch.unscaled(self.p._scores)]
        log_probs, arcs, start, final = (t.flatten(1).expand(len(scores[0]), -1) for t in scores)
        classes, is_emitting = self.p.event_shape[1], self.walk.labels >= 0
        entries = (is_emitting.cumsum(-1) - 1) * classes + self.walk.labels
        entries = entries.clamp(max=max(log_probs.shape[1] - 1, 0)).masked_fill(~is_emitting, -1)
        terms = (
            (entries, pad(log_probs, (0, 1))),  # there may be no frames
            (self.walk.arcs, arcs),
            (self.walk.first.unsqueeze(-1), start),
            (self.walk.last.unsqueeze(-1), final),
        )
        sums = [EdgeLists(numbers, self.walk.is_path).sum_of(values) for numbers, values in terms]
        return (sums[0] + sums[1] + sums[2] + sums[3]).reshape(self.shape)


class ArcTargets(PathTargets):
    """A target that is a path, as arcs."""

    paths: ArcPaths

    def _score(self) -> Tensor:
        return self.paths.score()


class AutomatonTargets(Targets):
    """Targets of automata: arcs, or the labels that paths may have."""

    def _of_path(self, name: str, target: Any) -> ArcTargets:
        decoded = self.read_decoded(name, target)
        self.p._form.check(name, decoded)
        return ArcTargets(self.p, decoded, self.p._form.edges(decoded))


class ArcForm(DecodedForm):
    """The numbers of the arcs of a path, (..., L) int64, padded with −1."""

    p: AutomatonPaths

    @property
    def own_shape(self) -> Sequence[int | str]:
        return ("L",)

    def of_compact(self, paths: Tensor) -> Tensor:
        return paths

    def edges(self, decoded: Tensor) -> ArcPaths:
        """Return paths that find the numbers of their edges when they are asked for."""
        (_, _, start, final), (lengths, arcs) = self.p._flat_inputs()
        shape, batch, count = decoded.shape, len(lengths), arcs.shape[1]
        lead = shape[: decoded.ndim - 1 - len(self.p.batch_shape)].numel()
        paths = decoded.reshape(lead, batch, shape[-1])
        rows = pad(arcs.long(), (0, 0, 0, 1), value=-1)  # the last row is padding
        exists = paths != -1
        number = torch.where((paths < 0) | (paths >= count), count, paths)
        columns = rows.gather(1, number.movedim(0, 1).reshape(batch, lead * shape[-1], 1).expand(-1, -1, 3))
        source, target, label = columns.reshape(batch, lead, shape[-1], 3).movedim(1, 0).unbind(-1)
        is_start, is_final = (score.expand(batch, -1) > -math.inf for score in (start, final))
        at_rest = (is_start & is_final).long().argmax(-1)  # a path without arcs begins and ends in the same state
        is_empty = ~exists.any(-1)
        first = torch.where(is_empty, at_rest, pad(source, (0, 1))[..., 0].clamp(min=0))
        last = torch.where(exists & ~pad(exists[..., 1:], (0, 1)), target, -1)
        last = torch.where(is_empty, at_rest, pad(last, (0, 1), value=-1).amax(-1).clamp(min=0))
        follows = ~exists[..., 1:] | (exists[..., :-1] & (source[..., 1:] == target[..., :-1]))
        is_path = ((source >= 0) | ~exists).all(-1) & follows.all(-1) & (exists[..., :1].all(-1) | is_empty)
        member = torch.arange(batch, device=paths.device)
        is_path &= ((label >= 0).sum(-1) == lengths) & is_start[member, first] & is_final[member, last]
        walk = Walk(torch.where(number == count, -1, number), label, first, last, is_path)
        return ArcPaths(self.p, walk, shape[:-1])

    def check_unique(self, name: str, decoded: Tensor) -> None:
        start, final = self.p._scores[2:]
        is_ambiguous = ((start > -math.inf) & (final > -math.inf)).sum(-1) > 1
        if is_checked(decoded) and bool(((decoded == -1).all(-1) & is_ambiguous).any()):
            raise ValueError(
                f"{name} must have arcs if several states are both start and final, got a path without arcs"
            )

    def events(self, decoded: Tensor) -> Tensor:
        labels = self.p._packed_labels(decoded)
        classes = torch.arange(self.p.event_shape[1], device=decoded.device)
        return (labels.unsqueeze(-1) == classes).to(torch.promote_types(self.p.dtype, torch.float32))

    def fault(self, decoded: Tensor) -> Fault:
        arcs, numbers = self.p._solver.integers[1], decoded.tolist()
        count = int((arcs[:, 0] >= 0).sum())
        path = [arc for arc in numbers if arc != -1]
        if numbers[: len(path)] != path:
            return Fault((numbers.index(-1),), "is padding, but another arc follows it")
        for n, arc in enumerate(path):
            if not 0 <= arc < count:
                return Fault((n,), f"must be the number of an arc, from 0 to {count - 1}, got {arc}")
        rows = arcs[path].tolist()
        for n in range(1, len(rows)):
            if rows[n][0] != rows[n - 1][1]:
                left, reached = self.p._name(rows[n][0]), self.p._name(rows[n - 1][1])
                return Fault((n,), f"is an arc from {left!r}, but the arc before it leads to {reached!r}")
        frames, needed = sum(label >= 0 for *_, label in rows), int(self.p.lengths)
        if frames != needed:
            return Fault((), f"must have one arc with a label for each of {needed} frames, got {frames}")
        if rows and not bool(self.p._scores[2][rows[0][0]] > -math.inf):
            return Fault((0,), f"is an arc from {self.p._name(rows[0][0])!r}, which is not a start state")
        if rows:
            return Fault((len(rows) - 1,), f"is an arc to {self.p._name(rows[-1][1])!r}, which is not a final state")
        return Fault((), "has no arcs, but no state is both start and final")


class AutomatonPaths(PathDistribution):
    """The distribution over the paths of an automaton through T frames, which :meth:`Automaton.paths` returns.

    A path is a walk from a start state to a final state. Each arc with a label takes one frame, and an ε-arc (label −1)
    takes none. The score of a path is the sum of ``log_probs[t, label]`` at each frame t, of the scores of its arcs,
    and of the scores of its first and last state. Under negentropy, ``value`` is the logarithm of the sum over all
    paths.

    - An event is a 0/1 tensor (T, V) with the label of each frame. Different paths can have the same labels, so
      :meth:`log_prob` needs the decoded form.
    - The decoded form is the numbers of the arcs along the path, (..., L), padded with −1. Without ε-arcs, L is T.
      :meth:`labels` and :meth:`outputs` translate arcs.

    ``gradient`` has the expected counts of "log_probs", "arcs", "start" and "final". Some methods store a number for
    each arc and frame: ``entropy``, ``topk``, ``support_paths``, ``arc_marginals``, ``most_accurate`` and, unless Ω is
    negentropy, ``log_prob``.

    Under a sparse Ω, the value depends on how the automaton is written, for example on ε-arcs. Use "sparsemax" or
    "entmax" on trimmed, deterministic automata.

    Args:
        automaton: The automaton, or a stack of N automata for a batch whose last dimension is N.
        log_probs: The score (..., T, V) of each class at each frame. −∞ forbids the class at that frame.
        scores: The score (..., A) of each arc. −∞ removes the arc.
        start: The score (..., S) of each start state, −∞ for the other states.
        final: The score (..., S) of each final state, −∞ for the other states.
        lengths: The number of frames of each batch member, from 0 to T: an integer tensor of the batch shape, or one
            number. Default T. Later frames are padding: they are ignored, may contain NaN and get no gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "hard", or a :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> automaton = bx.Automaton([("a", "a", 0), ("a", "b", 1), ("b", "b", 1)], final={"b": 0.0})
    >>> p = automaton.paths(torch.zeros(3, 2))          # label 0 any number of times, then label 1 at least once
    >>> p.num_paths, p.decode(), p.labels(p.decode())
    (tensor(3., dtype=torch.float64), tensor([0, 0, 1]), tensor([0, 0, 1]))
    >>> p.expected_path
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667],
            [0.0000, 1.0000]])
    """

    _target_kind = AutomatonTargets
    _form_kind = ArcForm

    def __init__(
        self,
        automaton: Automaton,
        log_probs: Tensor,
        scores: Tensor,
        start: Tensor,
        final: Tensor,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        arcs = automaton.arcs.to(check_tensor("log_probs", log_probs).device)
        _check_shapes(log_probs, arcs, automaton.num_states, {"scores": scores, "start": start, "final": final})
        event = log_probs.shape[-2:]
        if is_checked(arcs):
            check_labels((arcs if arcs.ndim > 2 else arcs.unsqueeze(0))[..., 2], event[1])
        length = _read_lengths(log_probs, lengths)
        rest = {"scores": (scores, 1), "start": (start, 1), "final": (final, 1)}
        batch = common_batch({"log_probs": (log_probs, 2), **rest, "automata": (arcs, 2), "lengths": (length, 0)})
        names = dict(zip(AUTOMATON.scores, [(log_probs.expand(batch + event), 2), *rest.values()], strict=True))
        rows = arcs[..., :3].to(torch.int32, memory_format=torch.contiguous_format)
        index = length.expand(batch), rows.expand(batch + rows.shape[-2:])
        super().__init__(AUTOMATON, names, index, batch, event, omega, gamma)
        _check_omega(self.omega)
        self.automaton = automaton
        """The automaton."""
        self._outputs = arcs[..., 3]

    def _shown_options(self) -> dict[str, object]:
        return {"num_states": self._scores[2].shape[-1], "num_arcs": self._scores[1].shape[-1]}

    # --- the arguments

    @property
    def log_probs(self) -> Tensor:
        """The score of each class at each frame, (..., T, V)."""
        return self._scores[0]

    @property
    def lengths(self) -> Tensor:
        """The number of frames of each batch member, an int64 tensor of the batch shape."""
        return self._solver.integers[0]

    def _name(self, state: int) -> Hashable:
        """The name of a state. The states of a stack are numbers."""
        names = getattr(self.automaton, "states", None)
        return state if names is None else cast(Hashable, names[state])

    # --- arcs

    def labels(self, arcs: Tensor) -> Tensor:
        """Return the label of each frame of paths, (..., T) int64, −1 in the padding.

        Args:
            arcs: Paths in the decoded form.

        >>> import bellmax as bx
        >>> p = bx.Automaton([(0, 1, 2), (1, 2, -1), (2, 3, 0)]).paths(torch.zeros(2, 3))
        >>> p.decode(), p.labels(p.decode())
        (tensor([ 0,  1,  2, -1, -1]), tensor([2, 0]))
        """
        p, decoded = self._read_arcs(arcs)
        return p._packed_labels(decoded)

    def outputs(self, arcs: Tensor) -> Tensor:
        """Return the outputs of paths in order, (..., L) int64, without the arcs that have none, padded with −1.

        Args:
            arcs: Paths in the decoded form.

        >>> import bellmax as bx
        >>> p = bx.Automaton([(0, 1, 2, 7), (1, 2, 1, -1), (2, 3, 0, 8)]).paths(torch.zeros(3, 3))
        >>> p.outputs(p.decode())
        tensor([ 7,  8, -1])
        """
        p, decoded = self._read_arcs(arcs)
        outputs = p._outputs.expand(*decoded.shape[:-1], -1)
        return _packed(_gather(outputs, decoded))

    def _read_arcs(self, arcs: Tensor) -> tuple[Self, Tensor]:
        """Read paths. Raises ``ValueError`` if a number is not the number of an arc."""
        p, decoded = self._read_decoded("arcs", arcs)
        source = _gather(p._solver.integers[1][..., 0].long().expand(*decoded.shape[:-1], -1), decoded)
        bad = (source < 0) & (decoded != -1)
        if is_checked(decoded) and bool(bad.any()):
            raise ValueError(f"arcs must be paths, such as decode() returns, got the arc {int(decoded[bad][0])}")
        return p, decoded

    def _packed_labels(self, decoded: Tensor) -> Tensor:
        """Return the label of each frame, (..., T)."""
        labels = self._solver.integers[1][..., 2].long().expand(*decoded.shape[:-1], -1)
        packed, steps = _packed(_gather(labels, decoded)), self.event_shape[0]
        return pad(packed, (0, max(steps - packed.shape[-1], 0)), value=-1)[..., :steps]

    @property
    def marginals(self) -> Tensor:
        """Probability of each class at each frame, (..., T, V). Differentiable."""
        return self.expected_path

    def arc_marginals(self) -> Tensor:
        """Return the probability that each frame takes each arc, (..., T, A). It is 0 for ε-arcs. Differentiable.

        This method stores a number for each arc and frame. ``gradient["arcs"]`` has the sums over the frames.
        """
        edges = self._solver.expanded().expected_edges()
        theta, index = self._flat_inputs()
        counts = AUTOMATON.arc_counts(edges.flatten(0, -2) if edges.ndim > 1 else edges.unsqueeze(0), theta, index)
        return counts.reshape(*self.batch_shape, *counts.shape[1:]).to(self.dtype)

    # --- the members of a batch

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Self:
        other = super().expand(batch_shape)
        if self._outputs.ndim > 1:
            other._outputs = self._outputs.expand(*batch_shape, -1)
        return other

    def __getitem__(self, index: Any) -> Self:
        other = super().__getitem__(index)
        if self._outputs.ndim > 1:
            other._outputs = self._outputs.expand(*self.batch_shape, -1)[index]
        return other

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same distribution on another device or in another floating point type."""
        other = super().to(*args, **kwargs)
        other._outputs = self._outputs.to(other.device)
        return other

    # --- paths and labels

    def _most_accurate(self) -> Tensor:
        theta, index = self._flat_inputs()
        is_arc = torch.zeros(self._solver.edge_shape, dtype=torch.bool, device=self.device)
        is_arc[AUTOMATON.arc_edges(theta, index)] = True
        return self._most_accurate_by_edge(is_arc)

    def _log_prob_of_decoded(self, name: str, decoded: Tensor) -> Tensor:
        """Return the log-probability of arcs; under negentropy without a number for each arc and frame."""
        if type(self.omega) is not Negentropy:
            return super()._log_prob_of_decoded(name, decoded)
        form = self._form
        form.check_unique(name, decoded)
        form.check(name, decoded)
        score = cast("ArcPaths", form.edges(decoded)).score()
        log_prob = divide_by_gamma(score - self.value, self.omega.gamma)
        return log_prob.masked_fill(score == -math.inf, -math.inf).to(self.value.dtype)

    def _edges_of(self, path: Tensor) -> Tensor:
        raise ValueError(
            "path must hold arcs, such as p.decode(), got an event: several paths can have the same labels"
        )

    def _is_path(self, value: Tensor) -> Tensor:
        frame = torch.arange(self.event_shape[0], device=self.device)
        needed = (frame < self.lengths.unsqueeze(-1)).to(value.dtype)
        has_labels = ((value == 0) | (value == 1)).flatten(-2).all(-1) & (value.sum(-1) == needed).all(-1)
        batch = torch.broadcast_shapes(value.shape[:-2], self.batch_shape)
        solver = self._solver.expand(batch)
        within = torch.zeros_like(value).masked_fill(value == 0, -math.inf).expand(batch + self.event_shape)
        arcs, *ends = (torch.zeros_like(s).masked_fill(s.isinf(), -math.inf) for s in solver.detached()[1:])
        return has_labels & (solver.with_scores([within, torch.zeros_like(arcs), *ends], Hard()).value() > -math.inf)

    def _why_no_path(self, event: Tensor) -> str:
        return "must have the labels of a path of the automaton"


def _check_shapes(log_probs: Tensor, arcs: Tensor, states: int, scores: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` if a tensor does not fit the arcs (A, 4) or (N, A, 4), or the number of states."""
    shape = tuple(log_probs.shape)
    if arcs.ndim > 2 and (len(shape) < 3 or shape[-3] != len(arcs)):
        raise ValueError(f"log_probs must have shape (..., {len(arcs)}, T, V) for {len(arcs)} automata, got {shape}")
    if len(shape) < 2 or not shape[-1]:
        raise ValueError(f"log_probs must have shape (..., T, V) with V >= 1, got {shape}")
    for (name, tensor), size in zip(scores.items(), (arcs.shape[-2], states, states), strict=True):
        if check_tensor(name, tensor).shape[-1:] != (size,):
            raise ValueError(f"{name} must have shape (..., {size}), got {tuple(tensor.shape)}")


def _read_lengths(log_probs: Tensor, lengths: Lengths | None) -> Tensor:
    """Return the number of frames as int64, of the batch shape or one that broadcasts to it."""
    steps = log_probs.shape[-2]
    if lengths is None:
        return torch.full((), steps, dtype=torch.int64, device=log_probs.device)
    tensor = as_lengths("lengths", lengths, log_probs.device).clone()  # the caller may modify them later
    if is_checked(tensor) and tensor.numel():
        is_swapped = log_probs.ndim == 3 and tensor.numel() in (1, steps) and int(tensor.max()) <= len(log_probs)
        check_lengths("lengths", tensor.reshape(-1), 0, steps, batch_first_hint("log_probs", is_swapped))
    return tensor


def _check_omega(omega: Regularizer) -> None:
    """Raise ``ValueError`` if a choice without alternatives changes the value."""
    is_costly = isinstance(omega, SquaredL2)
    if omega.kernel is None:
        is_costly = bool(omega.penalty(torch.ones(1, dtype=torch.float64)) != 0)
    if is_costly:
        raise ValueError(
            f"omega must not charge for a state with a single way to reach it, as {type(omega).__name__} does, because "
            "the value would depend on how the graph is written: use 'sparsemax' or 'entmax' on a trimmed, "
            "deterministic automaton"
        )


def _gather(values: Tensor, arcs: Tensor) -> Tensor:
    """Return the values (..., A) of arcs (..., L), −1 for padding and numbers of no arc."""
    count = values.shape[-1]
    if not count:
        return torch.full_like(arcs, -1)
    return values.gather(-1, arcs.clamp(0, count - 1)).masked_fill((arcs < 0) | (arcs >= count), -1)


def _packed(numbers: Tensor) -> Tensor:
    """Move negative numbers of (..., L) behind the others, and return −1 for them."""
    order = (numbers < 0).long().argsort(dim=-1, stable=True)
    return numbers.gather(-1, order).clamp(min=-1)
