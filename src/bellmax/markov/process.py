"""The hidden states of a hidden Markov model: their start, transition and duration probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.markov.emissions import complete_rows, free_of_rows, is_at_bounds, log_dirichlet, normalized
from bellmax.markov.filtering import log_survival
from bellmax.regularizers import Regularizer
from bellmax.structures.chain import Chain
from bellmax.structures.semi_markov import SemiMarkov


class Scores(NamedTuple):
    """Log-probabilities in the layout of :class:`bellmax.Chain` and :class:`bellmax.SemiMarkov`."""

    start: Tensor  # (S,)
    transitions: Tensor  # (S, S) [current, previous]
    durations: Tensor | None = None  # (D, S)
    last_durations: Tensor | None = None  # (D, S)

    def distribution(
        self, emissions: Tensor, lengths: Tensor | None = None, omega: str | Regularizer = "negentropy"
    ) -> PathDistribution:
        """Return the distribution over the states of steps with log-probabilities (..., T, S)."""
        if self.durations is None:
            return Chain.from_scores(emissions, self.transitions, start=self.start, lengths=lengths, omega=omega)
        return SemiMarkov.from_scores(
            emissions,
            self.durations,
            self.transitions,
            start=self.start,
            last_durations=self.last_durations,
            lengths=lengths,
            omega=omega,
        )


class Process:
    """Start, transition and duration probabilities.

    Args:
        parameters: ``startprob`` (S,), ``transmat`` (S, S) [from, to], and for explicit durations ``durations`` (S, D),
            the probability of each duration from 1 to D.
        priors: Concentrations of Dirichlet priors by the same names, default 1.

    """

    def __init__(self, parameters: Mapping[str, Tensor], priors: Mapping[str, Any]) -> None:
        self.parameters, self.priors = dict(parameters), priors

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Process:
        """Return the same process with other parameters."""
        return Process(parameters, self.priors)

    def scores(self) -> Scores:
        """Return the log-probabilities. Differentiable."""
        start, transitions = self.parameters["startprob"].log(), self.parameters["transmat"].T.log()
        durations = self.parameters.get("durations")
        if durations is None:
            return Scores(start, transitions)
        return Scores(start, transitions, durations.T.log(), log_survival(durations.T.log()))

    def m_step(self, counts: Mapping[str, Tensor]) -> None:
        """Maximize the expected log-likelihood for expected counts, named as the scores, plus the log-prior."""
        totals = {"startprob": counts["start"], "transmat": counts["transitions"].T}
        if "durations" in self.parameters:
            totals["durations"] = self._all_durations(counts["durations"].T, counts["last_durations"].T)
        self.parameters = {
            name: normalized(total, self.priors.get(name, 1), self.parameters[name]) for name, total in totals.items()
        }

    def _all_durations(self, counts: Tensor, censored: Tensor) -> Tensor:
        """Add the expected durations of segments that were observed for at least d steps, ``censored`` (S, D)."""
        durations = self.parameters["durations"]
        survival = log_survival(durations.T.log()).T.exp()
        rates = torch.where(censored > 0, censored / survival.clamp(min=1e-300), 0)
        return counts + durations * rates.cumsum(-1)

    def log_prior(self) -> float:
        """Return the logarithm of the density of the priors, up to a constant."""
        return sum(log_dirichlet(p, self.priors.get(name, 1)) for name, p in self.parameters.items())

    def free(self) -> dict[str, Tensor]:
        """Return a mask for each parameter, True for entries that determine the others."""
        return {name: free_of_rows(p) for name, p in self.parameters.items()}

    def complete(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters with the entries that the free entries determine. Differentiable."""
        return {name: complete_rows(p) for name, p in parameters.items()}

    @property
    def num_free(self) -> int:
        """The number of free parameters: each row of probabilities sums to 1."""
        states, durations = len(self.parameters["startprob"]), self.parameters.get("durations")
        if durations is None:
            return states - 1 + states * (states - 1)
        return states - 1 + states * (states - 2) + durations.numel() - states

    def is_on_boundary(self) -> dict[str, Tensor]:
        """Return a mask for each parameter, True for probabilities of 0 or 1."""
        masks = {name: is_at_bounds(p) for name, p in self.parameters.items()}
        if "durations" in self.parameters:  # transitions of a state to itself are 0 by definition
            transmat = self.parameters["transmat"]
            is_between = ~torch.eye(len(transmat), dtype=torch.bool)
            others = is_at_bounds(transmat[is_between].reshape(len(transmat), -1))
            masks["transmat"] = torch.zeros_like(is_between).masked_scatter(is_between, others)
        return masks
