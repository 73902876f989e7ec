"""Series in chunks that fit in the cache, for the forward and backward sweeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bellmax.markov.emissions import Emissions, Family

_ENTRIES_IN_CACHE = 2**18
_MAX_ENTRIES = 2**24
_SERIES_OF_A_THREAD = 8
"""The kernels sweep so many series at a time. Fewer series take as long."""


class Data:
    """Observations of series, one after the other, with increasing lengths.

    Args:
        series: Tensors (T, D) float64, NaN where a value is missing.
        labels: The known state of each step, tensors (T,) int64, −1 where it is unknown, or None.

    """

    def __init__(self, series: Sequence[Tensor], labels: Sequence[Tensor] | None) -> None:
        self.order = sorted(range(len(series)), key=lambda k: len(series[k]))
        self.lengths = [len(series[k]) for k in self.order]
        self.x = torch.cat([series[k] for k in self.order])
        self.labels = None if labels is None else torch.cat([labels[k] for k in self.order])

    def split(self, values: Tensor) -> list[Tensor]:
        """Divide values (N, ...) of all steps into the values of each series, in the order of the arguments."""
        parts = values.split(self.lengths)
        return [parts[place] for place in sorted(range(len(parts)), key=self.order.__getitem__)]

    def chunks(self, emissions: Emissions, states: int) -> list[Chunk]:
        """Return the series in chunks. Their memory is bounded, unless a single series has more steps."""
        least = _SERIES_OF_A_THREAD * torch.get_num_threads()
        chunks, first, step = [], 0, 0
        while first < len(self.lengths):
            count = 1
            while first + count < len(self.lengths):
                entries = (count + 1) * self.lengths[first + count] * states
                if entries > (_ENTRIES_IN_CACHE if count >= least else _MAX_ENTRIES):
                    break
                count += 1
            lengths = self.lengths[first : first + count]
            steps = slice(step, step + sum(lengths))
            labels = None if self.labels is None else self.labels[steps]
            chunks.append(Chunk(self.order[first : first + count], lengths, self.x[steps], labels, emissions, states))
            first, step = first + count, steps.stop
        return chunks


class Chunk:
    """Some series of the data.

    Args:
        members: The numbers of the series.
        lengths: Their numbers of steps.
        x: Their observations (steps, D).
        labels: The known state of each step (steps,), or None.
        emissions: The emissions for which the observations are prepared.
        states: The number of states.

    """

    def __init__(
        self,
        members: list[int],
        lengths: list[int],
        x: Tensor,
        labels: Tensor | None,
        emissions: Emissions,
        states: int,
    ) -> None:
        self.members, self.x, self.labels, self.states = members, x, labels, states
        self.shape = len(lengths), max(lengths)
        self.lengths = None if min(lengths) == max(lengths) else torch.tensor(lengths)
        self.rows: Tensor | None = None
        if self.lengths is not None:
            rows = torch.arange(len(x)).split(lengths)
            self.rows = pad_sequence(rows, batch_first=True)
            self.is_step = torch.arange(self.shape[1]) < self.lengths.unsqueeze(-1)
        self.is_known: Tensor | None = None  # for custom emissions: the steps with a value
        if isinstance(emissions, Family):
            self.features = emissions.prepare(x)
        else:
            is_known = ~x.isnan().all(-1)
            self.is_known = None if bool(is_known.all()) else is_known
            self.features = x if self.is_known is None else x[is_known]

    def log_prob(self, emissions: Emissions) -> Tensor:
        """Return the log-probability (n, T, S) of each step in each state, −∞ for states that the labels exclude."""
        log_prob = emissions.log_prob(self.features)
        if not isinstance(emissions, Family):
            log_prob = self._of_custom(log_prob)
        if self.labels is not None:
            state = torch.arange(log_prob.shape[1])
            is_allowed = (self.labels.unsqueeze(-1) == state) | (self.labels.unsqueeze(-1) < 0)
            log_prob = log_prob.masked_fill(~is_allowed, -torch.inf)
        return log_prob.unflatten(0, self.shape) if self.rows is None else log_prob[self.rows]

    def _of_custom(self, log_prob: Tensor) -> Tensor:
        """Check the log-probabilities of custom emissions, and add 0 for steps without a value."""
        needed, x = (len(self.features), self.states), tuple(self.features.shape)
        if not isinstance(log_prob, Tensor) or log_prob.shape != needed:
            got = tuple(log_prob.shape) if isinstance(log_prob, Tensor) else f"a {type(log_prob).__name__}"
            raise ValueError(f"log_prob of emissions must return shape {needed} for x of shape {x}, got {got}")
        if bool((log_prob.isnan() | (log_prob == torch.inf)).any()):
            raise ValueError("log_prob of emissions must return numbers or -inf, got NaN or inf")
        log_prob = log_prob.detach().to(torch.float64)
        if self.is_known is None:
            return log_prob
        return log_prob.new_zeros(len(self.x), log_prob.shape[1]).index_put((self.is_known,), log_prob)

    def flatten(self, values: Tensor) -> Tensor:
        """Return values (n, T, ...) of the steps one after the other, (steps, ...)."""
        return values.flatten(0, 1) if self.rows is None else values[self.is_step]
