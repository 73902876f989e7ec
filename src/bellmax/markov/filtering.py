"""Filtering: the distribution of the hidden state now and in the future, for streams that arrive in chunks.

Before each step, the filter has a *predicted score* for each state. It is the smoothed maximum of the scores of all
paths that reach the state at this step, without the emission of the step. With durations, there is a predicted score
for each pair of a state and the number of steps that its segment has lasted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.inputs import Lengths, as_lengths
from bellmax.modes import is_checked
from bellmax.programs.checks import check_lengths, reject_entries
from bellmax.regularizers import Regularizer, with_gamma
from bellmax.structures.chain import Chain
from bellmax.tensors import wide_dtype, widen

_LEAST = -1e30
"""A finite score in place of −∞."""


class FilterState(NamedTuple):
    """State of a filter after the steps so far: a tuple of tensors, in float64 if the device has float64.

    Pass it as the argument ``state`` together with the next chunk. To save it, use pickle, or ``torch.save`` of
    ``tuple(state)``.

    >>> from bellmax.nn import HMM
    >>> layer = HMM(2)
    >>> state, _ = layer.filter(torch.zeros(5, 2), layer.start())
    >>> state.value.exp()  # the sum of the probabilities of all sequences of states
    tensor(1.0000, dtype=torch.float64)
    """

    value: Tensor
    """The value of the distribution over the steps so far, of the batch shape, 0 before the first step. Under
    negentropy, with log-probabilities as scores, the value is the log-likelihood."""
    offset: Tensor
    """A number that is subtracted from ``scores``, of the batch shape, to keep them small in a long stream."""
    scores: Tensor
    """The predicted score of each state at the next step, (..., S), or of each elapsed duration ``[duration − 1,
    state]`` at the next step, (..., D, S)."""

    def to(self, device: torch.device | str) -> FilterState:
        """Return the state on a device."""
        device = torch.device(device)
        return FilterState(*(tensor.to(device, wide_dtype(device)) for tensor in self))


def log_survival(durations: Tensor) -> Tensor:
    """Return the log-probability (..., D, S) that a segment has at least d steps, from log-probabilities (..., D, S).

    Differentiable. Durations of −∞ get no gradient.
    """
    bounded = durations.masked_fill(durations == -math.inf, _LEAST)  # the gradient of logcumsumexp at −∞ is NaN
    survival = bounded.flip(-2).logcumsumexp(-2).flip(-2)
    return survival.masked_fill(survival < _LEAST / 2, -math.inf)


class Filter:
    """The forward recursion of a hidden process under any Ω, chunk by chunk, without gradient.

    Args:
        start: The score (S,) of each state at the first step.
        transitions: The score (S, S) of each transition ``[current, previous]``.
        omega: The regularizer Ω. If γ is a tensor, it must broadcast to the batch shape of the streams.
        durations: The score (D, S) of each duration ``[duration − 1, state]``. Default None: a state can follow itself,
            and segments have no duration.
        last_durations: The score (D, S) of each duration of the last segment so far, such as the log survival
            probability. Default ``durations``.

    """

    def __init__(
        self,
        start: Tensor,
        transitions: Tensor,
        *,
        omega: Regularizer,
        durations: Tensor | None = None,
        last_durations: Tensor | None = None,
    ) -> None:
        gamma = omega.gamma
        self.omega = with_gamma(omega, gamma.detach()) if isinstance(gamma, Tensor) else omega
        self.dtype = start.dtype
        self.first, self.transitions = widen(start.detach()), widen(transitions.detach())
        self.durations: Tensor | None = None
        if durations is not None:
            last = durations if last_durations is None else last_durations
            self.durations = torch.stack((widen(durations.detach()), widen(last.detach())))

    def start(self, batch_shape: Sequence[int] = ()) -> FilterState:
        """Return the state before the first step, for streams of a batch shape."""
        scores = self.first + self._cost_of_one_parent().unsqueeze(-1)
        if self.durations is not None:
            longer = scores.new_full((self.durations.shape[1] - 1, 1), -math.inf)
            scores = torch.cat((scores.unsqueeze(-2), longer.expand(*scores.shape[:-1], -1, scores.shape[-1])), -2)
        zero = self.first.new_zeros(tuple(batch_shape))
        return FilterState(zero, zero.clone(), scores.expand(*batch_shape, *self._own_shape).clone())

    def filter(
        self, emissions: Tensor, state: FilterState, lengths: Lengths | None = None
    ) -> tuple[FilterState, Tensor]:
        """Return the state after a chunk, and the probability of each state at each step given the steps up to it.

        The probabilities (..., T, S) at a step are the marginals of the last step of the distribution over the steps up
        to this step. They are 0 in the padding, and after a step that no path reaches.

        Args:
            emissions: The score (..., T, S) of each state at each step of the chunk. T may be 0.
            state: The state before the chunk.
            lengths: The number of steps of each stream in the chunk, integers of the batch shape from 0 to T, default
                T. The other steps are padding: they are ignored and may contain NaN.

        """
        self._check(emissions, state)
        length = _read_lengths(lengths, emissions)
        if not emissions.shape[-2]:
            return state, torch.zeros_like(emissions)
        sweep = self._by_state if self.durations is None else self._by_duration
        ends, scores = sweep(widen(emissions.detach()), state.scores, length)
        value = self._max(_at_last_step(ends, length).squeeze(-2), 0)
        top = scores.flatten(length.ndim).amax(-1)
        top = top.masked_fill(top == -math.inf, 0)
        new = FilterState(state.offset + value, state.offset + top, scores - self._like_scores(top))
        is_empty = length == 0
        kept = FilterState(
            torch.where(is_empty, state.value, new.value),
            torch.where(is_empty, state.offset, new.offset),
            torch.where(self._like_scores(is_empty), state.scores, new.scores),
        )
        return kept, self._under(1).argmax(ends).to(emissions.dtype)

    def forecast(self, state: FilterState, steps: int) -> Tensor:
        """Return the probability (..., steps, S) of each state at each of the next steps, given the steps so far."""
        _check_state(state)
        emissions = self.first.new_zeros((*state.value.shape, steps, len(self.first)), dtype=self.dtype)
        return self.filter(emissions, state)[1]

    # --- one sweep over a chunk: the value of each state at each step (..., T, S), and the next predicted scores

    def _by_state(self, emissions: Tensor, scores: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        # The first nodes of a chain have one parent each. The scores contain the cost of this already.
        start = scores - self._cost_of_one_parent().unsqueeze(-1)
        p = Chain.from_scores(emissions, self.transitions, start=start, lengths=length, omega=self.omega)
        ends = p.node_values
        return ends, self._max(self.transitions + _at_last_step(ends, length), 1)

    def _by_duration(self, emissions: Tensor, scores: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        assert self.durations is not None
        step = torch.arange(emissions.shape[-2], device=emissions.device)
        is_inside = (step < length.unsqueeze(-1)).unsqueeze(-1)
        emissions = emissions.masked_fill(~is_inside, 0)
        if is_checked(emissions):
            flat = emissions.reshape(-1, *emissions.shape[-2:])
            reject_entries("emissions", flat, ~(flat < math.inf))
        ends = []
        for emission, inside in zip(emissions.unbind(-2), is_inside.unbind(-2), strict=True):
            elapsed = scores + emission.unsqueeze(-2)
            after, last = self._max((elapsed.unsqueeze(-3) + self.durations).mT, 2).unbind(-2)
            first = self._max(self.transitions + after.unsqueeze(-2), 1)
            predicted = torch.cat((first.unsqueeze(-2), elapsed[..., :-1, :]), -2)
            scores = torch.where(inside.unsqueeze(-1), predicted, scores)
            ends.append(last.masked_fill(~inside, -math.inf))
        return torch.stack(ends, -2), scores

    # --- Ω, shapes

    def _under(self, dims: int) -> Regularizer:
        """Return Ω for results that have ``dims`` dimensions after the batch."""
        gamma = self.omega.gamma
        if isinstance(gamma, Tensor):
            return with_gamma(self.omega, gamma.reshape(gamma.shape + (1,) * dims))
        return self.omega

    def _max(self, x: Tensor, dims: int) -> Tensor:
        """Return the smoothed max along the last dimension of x, which has ``dims`` more after the batch."""
        return self._under(dims).max(x)

    def _cost_of_one_parent(self) -> Tensor:
        """Return the value of a node whose only parent has value 0: −Ω of the vector (1,), which is −γ/2 under "l2"."""
        return self._max(self.first.new_zeros(1), 0)

    @property
    def _own_shape(self) -> tuple[int, ...]:
        """The shape of the predicted scores after the batch."""
        return tuple(self.first.shape if self.durations is None else self.durations.shape[1:])

    def _like_scores(self, x: Tensor) -> Tensor:
        """Return a tensor of the batch shape with dimensions that broadcast against the predicted scores."""
        return x.reshape(x.shape + (1,) * len(self._own_shape))

    def _check(self, emissions: Tensor, state: FilterState) -> None:
        """Raise ``ValueError`` unless the emissions are floating point, and the state is for these emissions."""
        if not emissions.is_floating_point():
            raise ValueError(f"emissions must be floating point, got dtype {emissions.dtype}")
        _check_state(state)
        needed = (*emissions.shape[:-2], *self._own_shape)
        if state.scores.shape != needed:
            raise ValueError(
                f"state must have scores of shape {needed} for emissions of shape {tuple(emissions.shape)}, "
                f"got {tuple(state.scores.shape)}"
            )
        if state.scores.device != emissions.device:
            raise ValueError(
                f"state must be on the device of the emissions, {emissions.device}, got {state.scores.device}"
            )


def _check_state(state: object) -> None:
    """Raise ``ValueError`` if an argument is not the state of a filter."""
    if not isinstance(state, FilterState):
        raise ValueError(f"state must be the result of start() or filter(), got {type(state).__name__}")


def _read_lengths(lengths: Lengths | None, emissions: Tensor) -> Tensor:
    """Return the lengths of streams in a chunk, of the batch shape. Raises ``ValueError`` if they do not fit."""
    *batch, steps, _ = emissions.shape
    length = as_lengths("lengths", steps if lengths is None else lengths, emissions.device)
    if length.ndim and length.shape != tuple(batch):
        raise ValueError(f"lengths must have the batch shape {tuple(batch)}, got {tuple(length.shape)}")
    if is_checked(length):
        check_lengths("lengths", length.reshape(-1), 0, steps)
    return length.expand(batch)


def _at_last_step(ends: Tensor, length: Tensor) -> Tensor:
    """Return the values (..., 1, S) at the last step of each stream, of values (..., T, S) with lengths (...)."""
    last = (length - 1).clamp(min=0)[..., None, None]
    return ends.gather(-2, last.expand(*length.shape, 1, ends.shape[-1]))
