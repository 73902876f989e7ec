"""Expectation maximization (Baum–Welch): the expected counts are the gradient of the log-likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bellmax.markov.data import Chunk, Data
from bellmax.markov.emissions import EMPTY, Emissions, Family
from bellmax.markov.process import Process


class Expected(NamedTuple):
    """The result of an E-step."""

    log_likelihood: float
    counts: dict[str, Tensor]  # of start, transitions and durations, in the layout of the scores
    statistics: list[Tensor]  # of a family of emissions
    weights: list[Tensor]  # of each chunk, for custom emissions: the posterior of the states (steps, S)


@torch.no_grad()
def e_step(process: Process, emissions: Emissions, chunks: Sequence[Chunk]) -> Expected:
    """Return the log-likelihood and the expected counts under the current parameters."""
    scores, log_likelihood = process.scores(), 0.0
    counts: dict[str, Tensor] = {}
    statistics: list[Tensor] = []
    weights = []
    for chunk in chunks:
        p = scores.distribution(chunk.log_prob(emissions), chunk.lengths)
        gradient = p.gradient  # before the value, which then needs no sweep
        log_likelihood += float(p.value.sum())
        if log_likelihood == -torch.inf:
            raise ValueError(_why_impossible(chunk, p.value))
        posterior = chunk.flatten(gradient.pop("emissions"))
        counts = {name: counts[name] + g if counts else g for name, g in gradient.items()}
        if isinstance(emissions, Family):
            terms = emissions.statistics(chunk.features, posterior)
            statistics = [a + b for a, b in zip(statistics, terms, strict=True)] if statistics else terms
        else:
            weights.append(posterior if chunk.is_known is None else posterior[chunk.is_known])
    return Expected(log_likelihood, counts, statistics, weights)


def _why_impossible(chunk: Chunk, values: Tensor) -> str:
    """Name the first series without a possible sequence of states."""
    series = min(chunk.members[n] for n in (values == -torch.inf).nonzero().flatten().tolist())
    reason = "the initial parameters" if chunk.labels is None else "its labels and the initial parameters"
    return f"X[{series}] must have a positive probability, but {reason} allow no sequence of states for it"


def m_step(process: Process, emissions: Emissions, expected: Expected, chunks: Sequence[Chunk]) -> None:
    """Update the parameters to maximize the expected log-likelihood plus the log-priors."""
    process.m_step(expected.counts)
    if isinstance(emissions, Family):
        emissions.update(expected.statistics)
    else:
        emissions.m_step(torch.cat([chunk.features for chunk in chunks]), torch.cat(expected.weights))


class Fit(NamedTuple):
    """The result of EM from one start."""

    process: Process
    emissions: Emissions
    log_likelihoods: list[float]  # of each iteration, before its M-step
    objectives: list[float]  # with the log-priors
    converged: bool = False
    interrupted: bool = False
    empty: Sequence[int] = ()  # states without expected steps in the last iteration


def fit(
    process: Process,
    emissions: Emissions,
    data: Data,
    max_iter: int,
    tol: float | None,
    report: Callable[[int, float, float | None], None],
) -> Fit:
    """Run EM from the given parameters, which are updated in place.

    ``report`` gets the number of each iteration, the objective and its increase. EM stops if the increase per step is
    at most ``tol``, and after an interrupt (Ctrl+C).
    """
    chunks = data.chunks(emissions, len(process.parameters["startprob"]))
    result = Fit(process, emissions, [], [])
    for iteration in range(max_iter):
        try:
            expected = e_step(process, emissions, chunks)
            prior = process.log_prior() + (emissions.log_prior() if isinstance(emissions, Family) else 0)
            m_step(process, emissions, expected, chunks)
        except KeyboardInterrupt:
            return result._replace(interrupted=True)
        objective = expected.log_likelihood + prior
        increase = objective - result.objectives[-1] if result.objectives else None
        result.log_likelihoods.append(expected.log_likelihood)
        result.objectives.append(objective)
        report(iteration, objective, increase)
        visits = expected.counts["start"] + expected.counts["transitions"].sum(1)
        result = result._replace(empty=(visits <= EMPTY).nonzero().flatten().tolist())
        if tol is not None and increase is not None and increase <= tol * len(data.x):
            return result._replace(converged=True)
    return result
