"""Sequences of states, whatever scores them: kept and masked steps, states, labels as targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, Mask, as_lengths, as_mask, check_tensor
from bellmax.layouts.steps import first_step, is_used, previous_states
from bellmax.layouts.values import of_sequence, subscript
from bellmax.regularizers import Negentropy
from bellmax.targets import Targets
from bellmax.tensors import inner, promote_half, wide_dtype
from bellmax.transforms import is_checked, is_readable

if TYPE_CHECKING:
    from typing_extensions import Self

_ANY_STATE = -1
_SHOWN = 4  # states in a message


class Gap(NamedTuple):
    """The first step that no path reaches, and the kept step before it."""

    before: int
    """The kept step before, −1 if there is none."""
    step: int
    is_last: bool


class Tags(Protocol):
    """Names of states for messages, and advice about a sequence that constraints forbid."""

    def show(self, tag: int) -> str: ...

    def advice(self, tags: Sequence[int] | None, rule: str) -> str: ...


class SequencePaths(PathDistribution):
    """A distribution over sequences of T states out of S; an event is an indicator (T, S, S) over transitions.

    The first score has the dimensions (..., T, S) of the states, or (..., T, S, S) of the transitions.
    """

    _own_tensors: ClassVar[dict[str, int]] = {"_lengths": 0, "_mask": 1}
    _has_steps = True
    _lengths: Tensor | None
    _mask: Tensor | None
    _tags: Tags | None = None
    """The names of the states, if −∞ stands for constraints on tags."""

    def _set_steps(self, lengths: Lengths | None, mask: Mask | None) -> None:
        """Which steps are kept: all if both are None."""
        self._lengths = self._mask = None
        if mask is not None and lengths is not None:
            raise ValueError("pass either lengths or mask, not both")
        if mask is not None:
            kept = as_mask("mask", mask, self.device)
            if kept.shape != (*self.batch_shape, self.event_shape[0]):
                needed = (*self.batch_shape, self.event_shape[0])
                raise ValueError(f"mask must have shape {needed}, got {tuple(kept.shape)}")
            self._mask = kept.clone()  # the tape is made for these steps, whatever becomes of the caller's tensor
            self._lengths = kept.sum(-1)
        elif lengths is not None:
            given = as_lengths("lengths", lengths, self.device)
            if not given.ndim:
                given = given.expand(self.batch_shape)
            if given.shape != self.batch_shape:
                needed = tuple(self.batch_shape)
                raise ValueError(f"lengths must have the batch shape {needed}, got {tuple(given.shape)}")
            self._lengths = given.clone()

    @property
    def lengths(self) -> Tensor:
        """How many steps of each sequence are kept, int64 of the batch shape."""
        if self._lengths is None:
            return torch.full(self.batch_shape, self.event_shape[0], dtype=torch.int64, device=self.device)
        return self._lengths

    # --- states

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 at masked steps. Differentiable."""
        return self._path().sum(-1).to(self.dtype)

    @property
    def pairwise_marginals(self) -> Tensor:
        """Joint probability of the states at two neighbouring steps, (..., T−1, S, S). Differentiable.

        The axes are ``[t, state of t + 1, state of t]``, in the order of the transitions. With a mask, t stands for the
        last kept step before t + 1. Entries are 0 if step t + 1 is masked or has no kept step before it.

        >>> import bellmax as bx
        >>> p = bx.Chain.from_scores(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2))
        >>> p.pairwise_marginals[0]                     # [state of step 1, state of step 0]
        tensor([[0.0871, 0.0321],
                [0.6439, 0.2369]])
        >>> p.marginals
        tensor([[0.7311, 0.2689],
                [0.1192, 0.8808]])
        """
        first = first_step(self._kept)[..., None, None]
        return self.expected_path.masked_fill(first, 0)[..., 1:, :, :]

    def best_sequence(self) -> Tensor:
        """The states of the highest-scoring path, (..., T) int64; −1 at masked steps and where no path exists."""
        return self.topk_sequences(1)[1].squeeze(-2)

    def topk_sequences(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best paths under θ: scores (..., k), best first, and states (..., k, T), −1 at masked steps.

        Past the number of paths, scores are −∞ and states −1. Scores have no gradient; those of :meth:`topk` do.
        """
        scores, sequences = self._topk(k)
        return scores.reshape(*self.batch_shape, k), sequences.reshape(*self.batch_shape, k, self.event_shape[0])

    def sample_sequences(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """States drawn from the distribution, (*sample_shape, ..., T) int64; −1 at masked steps."""
        shape = torch.Size(sample_shape)
        drawn = self._sample(shape.numel()).movedim(1, 0)
        return drawn.reshape(shape + self.batch_shape + self.event_shape[:1])

    def sequence_to_path(self, sequence: Tensor) -> Tensor:
        """The path (..., T, S, S) of states (..., T): an indicator of the potentials' dtype, 0 where a state is −1."""
        steps, states = self.event_shape[:2]
        if check_tensor("sequence", sequence).shape[-1:] != (steps,) or sequence.is_floating_point():
            got = f"{sequence.dtype} of shape {tuple(sequence.shape)}"
            raise ValueError(f"sequence must be integer of shape (..., {steps}), got {got}")
        if is_readable(sequence) and sequence.numel() and not -1 <= int(sequence.min()) <= int(sequence.max()) < states:
            worst = sequence.max() if int(sequence.max()) >= states else sequence.min()
            raise ValueError(f"sequence must hold states from 0 to {states - 1}, or -1, got {int(worst)}")
        current, previous = sequence.unsqueeze(-1), previous_states(sequence, sequence >= 0).unsqueeze(-1)
        state = torch.arange(states, device=sequence.device)
        return ((current == state).unsqueeze(-1) & (previous == state).unsqueeze(-2)).to(self.dtype)

    def path_to_sequence(self, path: Tensor) -> Tensor:
        """The states (..., T) int64 of a path (..., T, S, S); −1 at steps that it does not take."""
        current = path.any(-1)
        return torch.where(current.any(-1), current.long().argmax(-1), -1)

    def constrain(self, allowed: Tensor) -> Self:
        """The same program on the allowed states alone, ``allowed`` (..., T, S) bool: partial labels, prefixes.

        Under negentropy it is the distribution given that every state is allowed; under another Ω it is not, since the
        entries that remain of a vector are solved anew.
        """
        needed = (*self.batch_shape, *self.event_shape[:2])
        if check_tensor("allowed", allowed).dtype != torch.bool:
            raise ValueError(f"allowed must be bool, got dtype {allowed.dtype}")
        try:
            forbidden = ~allowed.expand(needed)
        except RuntimeError:
            raise ValueError(f"allowed must broadcast to {tuple(needed)}, got shape {tuple(allowed.shape)}") from None
        first, *rest = self._scores
        forbidden = forbidden.reshape(needed + (1,) * (self._own_dims[0] - 2))
        return self._with((first.masked_fill(forbidden, -math.inf), *rest), self.omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        if self._lengths is None:
            return ()
        lengths = self._lengths.reshape(-1)
        if self._mask is None:
            return (lengths,)
        return lengths, self._mask.reshape(lengths.numel(), self.event_shape[0])

    @property
    def _kept(self) -> Tensor:
        """(..., T): the steps that are not masked."""
        if self._mask is not None:
            return self._mask
        steps = self.event_shape[0]
        if self._lengths is None:
            return torch.ones((*self.batch_shape, steps), dtype=torch.bool, device=self.device)
        return torch.arange(steps, device=self.device) < self._lengths.unsqueeze(-1)

    @property
    def _num_choices(self) -> int:
        return self.event_shape[0]

    def _to_paths(self, found: Tensor) -> Tensor:
        return self.sequence_to_path(found)

    def _without(self, ignored: Tensor) -> Self:
        """The same scores on fewer steps: those of ``ignored`` (..., T) are masked as well."""
        other = copy(self)
        other._forget()
        other._set_steps(None, self._kept & ~ignored)
        return other

    def _is_path(self, value: Tensor) -> Tensor:
        sequence = self.path_to_sequence(value)
        whole = ((sequence >= 0) == self._kept).all(-1)
        return whole & (self.sequence_to_path(sequence) == value).flatten(-3).all(-1)

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, SequencePaths)
            and self.batch_shape == other.batch_shape
            and self.event_shape == other.event_shape
            and self._kept.equal(other._kept)
        )

    # --- targets

    def _masked_by(self, name: str, target: Tensor, ignore_index: int) -> Self:
        if not self._holds_labels(target):
            return self
        ignored = self._expand(name, target, self.event_shape[:1]) == ignore_index
        if self._lengths is not None:
            ignored = ignored & self._kept
        return self._without(ignored) if not is_checked(ignored) or bool(ignored.any()) else self

    def _holds_labels(self, target: object) -> bool:
        if not isinstance(target, Tensor) or target.ndim != len(self.batch_shape) + 1:
            return False
        return not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)

    def _allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if self._holds_labels(target):
            return self._allowed_by_labels(name, target, ignore_index)
        if target.dtype == torch.bool and target.ndim == len(self.batch_shape) + 2:
            return self._check_rows(name, self._expand(name, target, self.event_shape[:2]))
        return super()._allowed(name, target, ignore_index)

    def _allowed_by_labels(self, name: str, labels: Tensor, ignore_index: int) -> Tensor:
        states = self.event_shape[1]
        labels = self._expand(name, labels, self.event_shape[:1])
        free = ~self._kept | (labels == _ANY_STATE)
        if is_checked(labels):
            bad = ~free & ((labels < 0) | (labels >= states))
            if bool(bad.any()):
                *batch, step = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"{name} must be from 0 to {states - 1}, -1 for any, or {ignore_index} to mask a step, "
                    f"got {labels[(*batch, step)].item()} at step {step}{of_sequence(batch)}"
                )
        state = torch.arange(states, device=labels.device)
        return (labels.unsqueeze(-1) == state) | free.unsqueeze(-1)

    def _target_forms(self) -> list[str]:
        steps, states = self.event_shape[:2]
        labels, sets = (*self.batch_shape, steps), (*self.batch_shape, steps, states)
        return [*super()._target_forms(), f"{labels} int64", f"{sets} bool"]

    def _check_rows(self, name: str, states: Tensor) -> Tensor:
        """Allowed states, all of them at masked steps."""
        states = states | ~self._kept.unsqueeze(-1)
        if is_checked(states):
            empty = ~states.any(-1)
            if bool(empty.any()):
                *batch, step = empty.nonzero()[0].tolist()
                place = f"step {step}{of_sequence(batch)}"
                raise ValueError(f"{name} must allow a state at every step that is kept, got none at {place}")
        return states

    def _is_of_states(self, tensor: Tensor) -> bool:
        return tensor.ndim == len(self.batch_shape) + 2

    def _right(self, allowed: Tensor) -> Tensor:
        """The states (..., T, S) that a target allows: all at masked steps."""
        if self._is_of_states(allowed):
            return allowed
        first = first_step(self._kept).unsqueeze(-1)
        return self._check_rows("target", torch.where(first, allowed[..., 0], allowed.any(-1)))

    def _is_used(self, ndim: int) -> Tensor:
        if ndim == len(self.batch_shape) + 2:
            return self._kept.unsqueeze(-1)
        return is_used(self._kept, self.event_shape[1])

    def _restricted_value(self, allowed: Tensor) -> Tensor:
        if not self._is_of_states(allowed):
            return super()._restricted_value(allowed)
        single = (allowed.sum(-1) == 1) | ~self._kept
        if is_readable(single) and bool(single.all()):
            lengths = self.lengths
            score = self._score(allowed.to(torch.uint8).argmax(-1))
            return self._value_alone(score, lengths + (lengths > 0))
        return self.constrain(allowed)._value()

    def _edges_within(self, allowed: Tensor) -> Tensor:
        return allowed.unsqueeze(-1) if self._is_of_states(allowed) else allowed

    def _score(self, sequence: Tensor) -> Tensor:
        """⟨Y, θ⟩ of states (..., T), whatever they are at masked steps; of the wide dtype."""
        kept = self._kept
        sequence = sequence.masked_fill(~kept, 0)
        edge = sequence * self.event_shape[1] + previous_states(sequence, kept)
        picked = self.potentials.flatten(-2).gather(-1, edge.unsqueeze(-1)).squeeze(-1)
        return picked.masked_fill(~kept, 0).sum(-1, dtype=wide_dtype(self.device))

    def _cost_forms(self) -> list[torch.Size]:
        return [*super()._cost_forms(), self.batch_shape + self.event_shape[:2]]

    def _add(self, cost: Tensor) -> Targets:
        first, *rest = self._scores
        return self._with((first + (cost.unsqueeze(-1) if first.ndim > cost.ndim else cost), *rest), self.omega)

    def _expected(self, cost: Tensor) -> Tensor:
        if not self._is_of_states(cost):
            return super()._expected(cost)
        return inner(promote_half(self.marginals), promote_half(cost), 2)

    def _distance(self, name: str, allowed: Tensor) -> Tensor:
        """Row by row on the marginals: KL for negentropy, else half the squared distance; 0 where all are allowed."""
        self._check_possible(name, allowed)
        states = self._right(allowed)
        marginals = promote_half(self.marginals)
        right = marginals.masked_fill(~states, 0).sum(-1)
        if isinstance(self.omega, Negentropy):
            loss = -right.clamp(torch.finfo(right.dtype).tiny, 1).log()
        else:
            # The nearest distribution over the allowed states spreads what lies elsewhere evenly over them.
            wrong = marginals.masked_fill(states, 0).square().sum(-1)
            loss = (wrong + (1 - right).square() / states.sum(-1).clamp(min=1)) / 2
        return loss.masked_fill(states.all(-1), 0).sum(-1)

    @property
    def _num_kept(self) -> Tensor | None:
        return None if self._lengths is None and self.event_shape[0] else self.lengths

    def _why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        batch = tuple(impossible.nonzero()[0].tolist())
        p = self.detach()[batch] if batch else self.detach()
        within = (allowed.unsqueeze(-1) if self._is_of_states(allowed) else allowed)[batch]
        exists = (p.potentials > -math.inf) & within
        kept = p._kept.nonzero().flatten().tolist()
        reached = torch.arange(self.event_shape[1], device=self.device) == 0
        before = -1
        for step in kept:
            now = (exists[step] & reached).any(-1)
            if not bool(now.any()):
                break
            before, reached = step, now
        place = f"{name}{subscript((*batch, step))}"
        states, sources = (mask.nonzero().flatten().tolist() for mask in (within[step].any(-1), reached))
        if not states:
            return f"{place} allows no state"
        if not bool((within[step] & reached).any()):
            return f"{place} does not go on from {self._show(sources)}, where the path so far ends"
        is_label = len(states) == 1 and self._is_of_states(allowed)
        place = f"{place} = {states[0]} is forbidden" if is_label else f"{place} is forbidden"
        rule, reason = p._why_forbidden(batch, Gap(before, step, step == kept[-1]), sources, states)
        if self._tags is None or not rule:
            return f"{place}: {reason}"
        gold = [within[t].any(-1).nonzero().flatten().tolist() for t in kept]
        tags = [tag for (tag,) in gold] if all(len(tags) == 1 for tags in gold) else None
        return f"{place}: {reason}. {self._tags.advice(tags, rule)}"

    def _why_forbidden(
        self, batch: tuple[int, ...], gap: Gap, sources: list[int], states: list[int]
    ) -> tuple[str, str]:
        """Return the rule that forbids the states after the sources, and a sentence about it.

        The rule is "starts", "transitions", "ends", or "" if constraints are not the cause. This program must be a
        single one; ``batch`` is its index in the batch that it was taken from.
        """
        if len(sources) == len(states) == 1:
            return "", f"potentials{subscript((*batch, gap.step, *states, *sources))} is -inf"
        return "", f"the potentials from {self._show(sources)} to {self._show(states)} are -inf"

    def _show(self, states: Sequence[int]) -> str:
        shown = [f"state {state}" if self._tags is None else self._tags.show(state) for state in states]
        return (
            " or ".join(shown)
            if len(shown) <= _SHOWN
            else f"{' or '.join(shown[:_SHOWN])} or {len(shown) - _SHOWN} more"
        )
