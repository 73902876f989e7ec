"""Emission distributions of hidden Markov models: the interface, and categorical and Poisson emissions.

Observations x are (N, D) float64, one row for each step, and NaN where a value is missing. S is the number of states.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

EMPTY = 1e-8
"""A state with fewer expected steps than this is empty: its parameters cannot be estimated."""
_LEAST = 1e-130
"""The smallest positive probability. The kernels of chains need more time if a probability is smaller or 0."""


class CustomEmissions(Protocol):
    """An emission distribution of the user, with the methods that EM calls."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-probability (N, S) of each row of x (N, D) in each state."""
        ...

    def m_step(self, x: Tensor, weights: Tensor) -> None:
        """Update the parameters to maximize the sum of weights (N, S) times log-probabilities."""
        ...


class Family(ABC):
    """An emission distribution with parameters by name.

    Args:
        parameters: Tensors. The first one has a row for each state.
        priors: Numbers or tensors by name, which the families define.

    """

    def __init__(self, parameters: Mapping[str, Tensor], priors: Mapping[str, Any]) -> None:
        self.parameters = dict(parameters)
        self.priors = priors

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> Self:
        """Return the same family with other parameters."""
        other = copy(self)
        other.parameters = dict(parameters)
        return other

    @property
    @abstractmethod
    def prior_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape to which each prior broadcasts, by name."""

    @property
    def num_states(self) -> int:
        return len(next(iter(self.parameters.values())))

    @property
    def num_free(self) -> int:
        """The number of free parameters."""
        return sum(int(mask.sum()) for mask in self.free().values())

    @staticmethod
    @abstractmethod
    def check(name: str, x: Tensor) -> None:
        """Raise ``ValueError`` if a value of the observations of one series cannot occur."""

    @abstractmethod
    def prepare(self, x: Tensor) -> Any:
        """Return what the other methods need of observations (N, D). It does not depend on the parameters."""

    @abstractmethod
    def log_prob(self, features: Any) -> Tensor:
        """Return the log-probability (N, S) of each row in each state, 0 for a row without values. Differentiable.

        ``features`` is the result of :meth:`prepare`.
        """

    @abstractmethod
    def statistics(self, features: Any, weights: Tensor) -> list[Tensor]:
        """Return sums over the rows with weights (N, S), which :meth:`update` needs."""

    @abstractmethod
    def update(self, statistics: Sequence[Tensor]) -> None:
        """Maximize the expected log-likelihood, given by sums of statistics, plus the log-prior."""

    def m_step(self, x: Tensor, weights: Tensor) -> None:
        """Maximize the expected log-likelihood under the weights (N, S) plus the log-prior."""
        self.update(self.statistics(self.prepare(x), weights))

    @abstractmethod
    def log_prior(self) -> float:
        """Return the logarithm of the density of the priors, up to a constant."""

    @abstractmethod
    def free(self) -> dict[str, Tensor]:
        """Return a mask for each parameter, True for entries that determine the others."""

    @abstractmethod
    def complete(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters with the entries that the free entries determine. Differentiable."""

    @abstractmethod
    def is_on_boundary(self) -> dict[str, Tensor]:
        """Return a mask for each parameter, True for entries at the end of their range."""

    @abstractmethod
    def draw(self, states: Any, rng: Any) -> Any:
        """Return a random row for each of the states (T,), an array (T, D)."""

    @abstractmethod
    def mean(self, weights: Tensor) -> Tensor:
        """Return the mean (..., D) of the mixture of states with weights (..., S)."""

    @abstractmethod
    def quantiles(self, weights: Tensor, levels: Tensor) -> Tensor | None:
        """Return quantiles (Q, ..., D) of the mixture of states with weights (..., S), None if there is no order."""


Emissions: TypeAlias = "Family | CustomEmissions"


def keep_empty(new: Tensor, old: Tensor, is_empty: Tensor) -> Tensor:
    """Return the new parameters, with the old rows for empty states."""
    return torch.where(is_empty.reshape(-1, *[1] * (new.ndim - 1)), old, new)


def normalized(counts: Tensor, concentration: Any, old: Tensor) -> Tensor:
    """Return the most probable rows of probabilities for counts and a Dirichlet prior.

    A row without counts keeps its old probabilities. Entries that are 0 stay 0, and positive entries stay positive,
    although their counts can underflow.
    """
    if isinstance(concentration, Tensor) or concentration != 1:
        counts = counts + (torch.as_tensor(concentration, dtype=counts.dtype) - 1) * (old > 0)
    total = counts.sum(-1, keepdim=True)
    new = (counts / total.clamp(min=EMPTY)).clamp(min=_LEAST) * (old > 0)
    return torch.where(total > EMPTY, new, old)


def log_dirichlet(probabilities: Tensor, concentration: Any) -> float:
    """Return the log-density of rows of probabilities, up to a constant. Entries of 0 are left out."""
    if isinstance(concentration, int) and concentration == 1:
        return 0.0
    weights = torch.as_tensor(concentration, dtype=probabilities.dtype) - 1
    return float(torch.where(probabilities > 0, weights * probabilities.clamp(min=1e-300).log(), 0).sum())


def free_of_rows(probabilities: Tensor) -> Tensor:
    """Return a mask that is True for the positive entries of rows of probabilities, but the largest of each row."""
    return (probabilities > 0).scatter(-1, probabilities.argmax(-1, keepdim=True), False)


def complete_rows(probabilities: Tensor) -> Tensor:
    """Return rows of probabilities whose largest entry is 1 minus the others. Differentiable in the others."""
    is_largest = torch.zeros_like(probabilities, dtype=torch.bool).scatter(
        -1, probabilities.argmax(-1, keepdim=True), True
    )
    others = probabilities.masked_fill(is_largest, 0)
    return torch.where(is_largest, 1 - others.sum(-1, keepdim=True), others)


class Categorical(Family):
    """One symbol from 0 to K − 1 in each step. The parameter is ``emissionprob`` (S, K)."""

    @property
    def prior_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"emissionprob": tuple(self.parameters["emissionprob"].shape)}

    @staticmethod
    def check(name: str, x: Tensor) -> None:
        if x.shape[1] != 1:
            raise ValueError(f"{name} must have one symbol in each step, got {x.shape[1]} features")
        bad = ~x.isnan() & ((x < 0) | (x != x.round()))
        if bool(bad.any()):
            step = int(bad.nonzero()[0, 0])
            raise ValueError(f"{name} must hold symbols 0, 1, 2, ..., got {x[step, 0]:g} at step {step}")

    def prepare(self, x: Tensor) -> Tensor:
        """Return the symbols (N,), K where the symbol is missing."""
        return x[:, 0].nan_to_num(self.parameters["emissionprob"].shape[1]).long()

    def log_prob(self, features: Tensor) -> Tensor:
        table = self.parameters["emissionprob"].T.log()
        return torch.cat((table, table.new_zeros(1, table.shape[1]))).index_select(0, features)

    def statistics(self, features: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the expected number (S, K) of each symbol in each state."""
        total = weights.new_zeros(self.parameters["emissionprob"].shape[1] + 1, weights.shape[1])
        return [total.index_add_(0, features, weights)[:-1].T]

    def update(self, statistics: Sequence[Tensor]) -> None:
        concentration, old = self.priors.get("emissionprob", 1), self.parameters["emissionprob"]
        self.parameters["emissionprob"] = normalized(statistics[0], concentration, old)

    def log_prior(self) -> float:
        return log_dirichlet(self.parameters["emissionprob"], self.priors.get("emissionprob", 1))

    def free(self) -> dict[str, Tensor]:
        return {"emissionprob": free_of_rows(self.parameters["emissionprob"])}

    @property
    def num_free(self) -> int:
        table = self.parameters["emissionprob"]
        return table.numel() - len(table)

    def complete(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"emissionprob": complete_rows(parameters["emissionprob"])}

    def is_on_boundary(self) -> dict[str, Tensor]:
        return {"emissionprob": is_at_bounds(self.parameters["emissionprob"])}

    def draw(self, states: Any, rng: Any) -> Any:
        return draw_from_rows(self.parameters["emissionprob"].numpy()[states], rng)[:, None].astype(np.float64)

    def mean(self, weights: Tensor) -> Tensor:
        """Return the probability (..., K) of each symbol."""
        return weights @ self.parameters["emissionprob"]

    def quantiles(self, weights: Tensor, levels: Tensor) -> None:
        return None


def check_symbols(name: str, x: Tensor, count: int) -> None:
    """Raise ``ValueError`` if a symbol is not below the number of symbols of the model."""
    bad = x >= count
    if bool(bad.any()):
        step = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{name} must hold symbols from 0 to {count - 1}, as in fit, got {x[step, 0]:g} at step {step}"
        )


class Poisson(Family):
    """Counts, independent for each feature. The parameter is ``lambdas`` (S, D), the expected counts.

    The prior is a gamma density with shape 1 + ``lambdas`` and rate ``lambdas_weight``, which are 0 by default.
    """

    @property
    def prior_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = tuple(self.parameters["lambdas"].shape)
        return {"lambdas": shape, "lambdas_weight": shape}

    @staticmethod
    def check(name: str, x: Tensor) -> None:
        bad = ~x.isnan() & ((x < 0) | (x != x.round()))
        if bool(bad.any()):
            step, feature = bad.nonzero()[0].tolist()
            raise ValueError(f"{name} must hold counts 0, 1, 2, ..., got {x[step, feature]:g} at step {step}")

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return counts and a mask of the known ones (N, 2 D), and the constants of the log-probability (N, 1)."""
        is_known = ~x.isnan()
        values = x.masked_fill(~is_known, 0)
        return torch.cat((values, is_known.to(x.dtype)), 1), torch.lgamma(values + 1).sum(1, keepdim=True)

    def log_prob(self, features: tuple[Tensor, Tensor]) -> Tensor:
        (counts, constants), rates = features, self.parameters["lambdas"]
        positive = rates.clamp(min=torch.finfo(rates.dtype).tiny)
        log_prob = counts @ torch.cat((positive.log(), -rates), 1).T - constants
        is_zero = (rates == 0).to(rates.dtype)
        if not bool(is_zero.any()):
            return log_prob
        is_impossible = counts[:, : rates.shape[1]] @ is_zero.T > 0
        return log_prob.masked_fill(is_impossible, -math.inf)

    def statistics(self, features: tuple[Tensor, Tensor], weights: Tensor) -> list[Tensor]:
        return [torch.mm(features[0].T, weights).T]

    def _prior(self) -> tuple[Any, Any]:
        return self.priors.get("lambdas", 0), self.priors.get("lambdas_weight", 0)

    def update(self, statistics: Sequence[Tensor]) -> None:
        (shape, rate), (sums, total) = self._prior(), statistics[0].chunk(2, 1)
        means = (sums + shape) / (total + rate).clamp(min=EMPTY)
        self.parameters["lambdas"] = torch.where(total + rate > EMPTY, means, self.parameters["lambdas"])

    def log_prior(self) -> float:
        rates, (shape, rate) = self.parameters["lambdas"], self._prior()
        shape, rate = (torch.as_tensor(prior, dtype=rates.dtype) for prior in (shape, rate))
        return float((torch.special.xlogy(shape, rates) - rate * rates).sum())

    def free(self) -> dict[str, Tensor]:
        return {"lambdas": torch.ones_like(self.parameters["lambdas"], dtype=torch.bool)}

    def complete(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(parameters)

    def is_on_boundary(self) -> dict[str, Tensor]:
        return {"lambdas": self.parameters["lambdas"] <= EMPTY}

    def draw(self, states: Any, rng: Any) -> Any:
        return rng.poisson(self.parameters["lambdas"].numpy()[states]).astype(np.float64)

    def mean(self, weights: Tensor) -> Tensor:
        return weights @ self.parameters["lambdas"]

    def quantiles(self, weights: Tensor, levels: Tensor) -> Tensor:
        rates = self.parameters["lambdas"].T  # (D, S)
        most = float(rates.max())
        bounds = -1.0, math.ceil(most + 40 * math.sqrt(most + 1) + 40)

        def cdf(x: Tensor) -> Tensor:
            counts = x.floor().clamp(min=-1).unsqueeze(-1)
            below = torch.special.gammaincc(counts.clamp(min=0) + 1, rates.clamp(min=1e-300).expand(*x.shape, -1))
            total: Tensor = (below.masked_fill(counts < 0, 0) * weights.unsqueeze(-2)).sum(-1)
            return total

        points: Tensor = find_quantiles(cdf, (*weights.shape[:-1], len(rates)), levels, bounds)
        return points.floor()


def is_at_bounds(probabilities: Tensor) -> Tensor:
    """True for probabilities that are 0, or 1 because all others in their row are 0. A row of one entry is known."""
    if probabilities.shape[-1] == 1:
        return torch.zeros_like(probabilities, dtype=torch.bool)
    is_zero = probabilities <= EMPTY
    return is_zero | (is_zero.sum(-1, keepdim=True) >= probabilities.shape[-1] - 1)


def draw_from_rows(probabilities: Any, rng: Any) -> Any:
    """Return a random column for each row of probabilities (N, K), integers (N,)."""
    cumulative = probabilities.cumsum(-1)
    draws = rng.uniform(size=len(probabilities)) * cumulative[:, -1]
    return (cumulative <= draws[:, None]).sum(-1).clip(max=probabilities.shape[-1] - 1)


def find_quantiles(cdf: Any, shape: tuple[int, ...], levels: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return the points (Q, *shape) where a distribution function reaches each level, by bisection."""
    points = []
    for level in levels:
        low, high = (torch.full(shape, bound, dtype=torch.float64) for bound in bounds)
        for _ in range(100):
            middle = (low + high) / 2
            is_above = cdf(middle) >= level
            low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
        points.append(high)
    return torch.stack(points) if points else torch.empty((0, *shape), dtype=torch.float64)
