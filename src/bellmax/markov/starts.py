"""Initial parameters of hidden Markov models, from a clustering of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bellmax.markov.data import Data
from bellmax.markov.emissions import Categorical, Family, Poisson
from bellmax.markov.gaussian import covariance_shape, gaussian

_MAX_STEPS = 20_000
"""The number of steps, drawn at random, that k-means looks at."""
_ROUNDS = 20


def emissions_of(
    kind: str, covariance: str, states: int, data: Data, priors: Mapping[str, Any], variance_floor: float
) -> Family:
    """Return emissions with parameters that fit all steps alike, for the scale of the observations."""
    x = data.x
    known = ~x.isnan()
    count = known.sum(0).clamp(min=1)
    mean = x.masked_fill(~known, 0).sum(0) / count
    variance = (x - mean).masked_fill(~known, 0).square().sum(0) / count
    if kind == "categorical":
        size = int(x[known].max()) + 1
        frequency = torch.bincount(x[known].long(), minlength=size).double() / int(known.sum())
        return Categorical({"emissionprob": frequency.expand(states, -1).clone()}, priors)
    if kind == "poisson":
        return Poisson({"lambdas": mean.expand(states, -1).clone()}, priors)
    spread = torch.where(variance > 0, variance, 1)
    covars = {"full": torch.diag(spread), "diag": spread, "spherical": spread.mean(), "tied": torch.diag(spread)}
    parameters = {
        "means": mean.expand(states, -1).clone(),
        "covars": covars[covariance].expand(covariance_shape(covariance, states, len(mean))).clone(),
    }
    return gaussian(covariance, parameters, priors, mean, variance_floor * spread)


def assign(family: Family, data: Data, rng: Any) -> Tensor:
    """Return a first guess of the state of each step, (N,): the labels if known, else the nearest cluster."""
    points = _points(family, data.x)
    labels = torch.full((len(points),), -1) if data.labels is None else data.labels
    chosen = rng.choice(len(points), min(len(points), _MAX_STEPS), replace=False)
    centers = _k_means(points[chosen], labels[chosen], family.num_states, rng)
    return torch.where(labels >= 0, labels, torch.cdist(points, centers).argmin(1))


def _points(family: Family, x: Tensor) -> Tensor:
    """Return the steps as points (N, D) with features of comparable scale, at the mean where a value is missing."""
    if isinstance(family, Poisson):
        x = x.sqrt()  # the variance of the square root does not depend on the rate
    known = ~x.isnan()
    count = known.sum(0).clamp(min=1)
    centred = x - x.masked_fill(~known, 0).sum(0) / count
    scale = (centred.masked_fill(~known, 0).square().sum(0) / count).sqrt()
    return (centred / torch.where(scale > 0, scale, 1)).masked_fill(~known, 0)


def _k_means(points: Tensor, labels: Tensor, states: int, rng: Any) -> Tensor:
    """Return centers (S, D). The centers of states with labels are the means of their steps."""
    is_labelled = torch.zeros(states, dtype=torch.bool)
    is_labelled[labels[labels >= 0].unique()] = True
    centers = torch.zeros(states, points.shape[1], dtype=points.dtype)
    centers[is_labelled] = _means(points, labels, states)[is_labelled]
    for state in range(states):  # k-means++
        if is_labelled[state]:
            continue
        others = torch.cat((centers[is_labelled], centers[:state][~is_labelled[:state]]))
        distance = torch.cdist(points, others).amin(1).square() if len(others) else torch.zeros(len(points))
        total = float(distance.sum())
        probability = (distance / total).numpy() if total > 0 else None
        centers[state] = points[int(rng.choice(len(points), p=probability))]
    for _ in range(_ROUNDS):
        nearest = torch.where(labels >= 0, labels, torch.cdist(points, centers).argmin(1))
        moved = _means(points, nearest, states)
        moved = torch.where(torch.isnan(moved), centers, moved)
        if moved.equal(centers):
            break
        centers = moved
    return centers


def _means(points: Tensor, labels: Tensor, states: int) -> Tensor:
    """Return the mean of the points with each label, (S, D), NaN if there is none."""
    of = (labels.unsqueeze(-1) == torch.arange(states)).to(points.dtype)
    return (of.T @ points) / of.sum(0).unsqueeze(-1)


def initial_emissions(family: Family, data: Data, states: Tensor) -> dict[str, Tensor]:
    """Return parameters for a first guess of the states. Each state also gets a part of the other steps."""
    count = family.num_states
    weights = 0.9 * (states.unsqueeze(-1) == torch.arange(count)).double() + 0.1 / count
    start = family.with_parameters(family.parameters)
    start.m_step(data.x, weights)
    return start.parameters


def random_symbols(family: Categorical, data: Data, rng: Any) -> dict[str, Tensor]:
    """Return random symbol probabilities around the frequencies; of labelled steps, the counts."""
    frequency = family.parameters["emissionprob"]
    table = (frequency + 1 / frequency.shape[1]) * torch.from_numpy(rng.exponential(size=tuple(frequency.shape)))
    if data.labels is not None:
        weights = (data.labels.unsqueeze(-1) == torch.arange(len(frequency))).double()
        table = table / table.sum(1, keepdim=True) + family.statistics(family.prepare(data.x), weights)[0]
    return {"emissionprob": table / table.sum(1, keepdim=True)}


def initial_process(
    states: int, max_duration: int | None, guess: Tensor | None, data: Data, rng: Any
) -> dict[str, Tensor]:
    """Return start, transition and duration probabilities, for a first guess of the states or at random."""
    if guess is None:
        start = torch.from_numpy(rng.dirichlet(np.full(states, 5.0)))
        transmat = torch.from_numpy(rng.dirichlet(np.full(states, 5.0), states))
        runs = torch.ones(states, dtype=torch.float64)
    else:
        pieces = guess.split(data.lengths)
        start = 1 + torch.bincount(torch.stack([piece[0] for piece in pieces]), minlength=states).double()
        pairs = torch.cat([piece[:-1] * states + piece[1:] for piece in pieces])
        transmat = 1 + torch.bincount(pairs, minlength=states * states).double().reshape(states, states)
        runs = 1 / (1 - transmat.diagonal() / transmat.sum(1))
    if max_duration is None:
        return {"startprob": _rows(start), "transmat": _rows(transmat)}
    transmat = transmat - torch.diag(transmat.diagonal())
    longer = (1 - 1 / runs.clamp(min=1.5)).unsqueeze(-1)
    durations = _rows(longer ** torch.arange(max_duration)) + 1 / max_duration  # geometric, and a uniform part
    return {"startprob": _rows(start), "transmat": _rows(transmat), "durations": _rows(durations)}


def _rows(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
