"""Gaussian emissions with full, diagonal, spherical or tied covariances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bellmax.markov.emissions import EMPTY, Family, find_quantiles, keep_empty

COVARIANCES = "full", "diag", "spherical", "tied"
_ROWS = 2**15
"""The number of rows whose deviations from all means are in memory at a time."""


def covariance_shape(covariance: str, states: int, features: int) -> tuple[int, ...]:
    """Return the shape of the parameter ``covars``."""
    square = features, features
    return {"full": (states, *square), "diag": (states, features), "spherical": (states,), "tied": square}[covariance]


def gaussian(
    covariance: str, parameters: Mapping[str, Tensor], priors: Mapping[str, Any], center: Tensor, floor: Tensor
) -> Gaussian:
    """Return Gaussian emissions.

    Args:
        covariance: "full", "diag", "spherical" or "tied".
        parameters: ``means`` (S, D) and ``covars``, see :func:`covariance_shape`.
        priors: The prior of the emissions, see :class:`Gaussian`.
        center: A point (D,) near the observations. Sums of squares are relative to it, which avoids cancellation.
        floor: The smallest variance (D,) of each feature.

    """
    kind = FullGaussian if covariance in ("full", "tied") else DiagonalGaussian
    return kind(covariance, parameters, priors, center, floor)


class Gaussian(Family):
    """Base class of Gaussian emissions with parameters ``means`` (S, D) and ``covars``.

    The prior of each mean is a normal density. Its mean is ``means``, and its covariance is the covariance of the state
    divided by ``means_weight``. The prior of each covariance is an inverse Wishart density. In the M-step, its scale
    matrix ``covars`` is added to the sum of squares, and ``covars_weight`` to the number of steps. All are 0 by
    default.
    """

    def __init__(
        self,
        covariance: str,
        parameters: Mapping[str, Tensor],
        priors: Mapping[str, Any],
        center: Tensor,
        floor: Tensor,
    ) -> None:
        super().__init__(parameters, priors)
        self.covariance, self.center, self.floor = covariance, center, floor

    @staticmethod
    def check(name: str, x: Tensor) -> None:
        """Accept all finite values."""

    @property
    def prior_shapes(self) -> dict[str, tuple[int, ...]]:
        states, features = self.parameters["means"].shape
        scale = {"full": (states, features, features), "diag": (states, features), "spherical": (features,)}
        return {
            "means": (states, features),
            "means_weight": (),
            "covars": scale.get(self.covariance, (features, features)),
            "covars_weight": (),
        }

    @property
    def _means(self) -> Tensor:
        """The means (S, D), relative to the center."""
        return self.parameters["means"] - self.center

    def _prior(self) -> tuple[Tensor, float]:
        """Return the mean of the prior of the means (S, D), relative to the center, and its weight."""
        means = self.parameters["means"]
        prior = torch.as_tensor(self.priors.get("means", 0), dtype=means.dtype)
        return prior.expand_as(means) - self.center, float(self.priors.get("means_weight", 0))

    def _prior_degrees(self) -> float:
        return float(self.priors.get("covars_weight", 0))

    def covariances(self) -> Tensor:
        """Return the covariance matrix of each state, (S, D, D)."""
        covars, (states, features) = self.parameters["covars"], self.parameters["means"].shape
        if self.covariance == "diag":
            return torch.diag_embed(covars)
        if self.covariance == "spherical":
            return covars[:, None, None] * torch.eye(features, dtype=covars.dtype)
        return covars.expand(states, features, features)

    def draw(self, states: Any, rng: Any) -> Any:
        means, factors = self.parameters["means"].numpy(), torch.linalg.cholesky(self.covariances()).numpy()
        noise = rng.standard_normal((len(states), means.shape[1]))
        return means[states] + np.einsum("tij,tj->ti", factors[states], noise)

    def mean(self, weights: Tensor) -> Tensor:
        return weights @ self.parameters["means"]

    def quantiles(self, weights: Tensor, levels: Tensor) -> Tensor:
        means = self.parameters["means"].T  # (D, S)
        deviations = self.covariances().diagonal(dim1=-2, dim2=-1).sqrt().T
        reach = 40 * deviations
        bounds = float((means - reach).min()), float((means + reach).max())

        def cdf(x: Tensor) -> Tensor:
            below: Tensor = torch.special.ndtr((x.unsqueeze(-1) - means) / deviations)
            return (below * weights.unsqueeze(-2)).sum(-1)

        return find_quantiles(cdf, (*weights.shape[:-1], len(means)), levels, bounds)


class _Moments(NamedTuple):
    """Squares and values relative to the center, and 1 for known values, (N, 3 D).

    If all values are known, the last D columns are one column.
    """

    values: Tensor
    is_complete: bool


class DiagonalGaussian(Gaussian):
    """Gaussian emissions with independent features: covariance "diag" or "spherical"."""

    def _variances(self) -> Tensor:
        """Return the variances (S, D)."""
        covars = self.parameters["covars"]
        return covars.unsqueeze(-1).expand_as(self.parameters["means"]) if self.covariance == "spherical" else covars

    def prepare(self, x: Tensor) -> _Moments:
        z, is_known = x - self.center, ~x.isnan()
        if bool(is_known.all()):
            return _Moments(torch.cat((z * z, z, z.new_ones(len(z), 1)), 1), is_complete=True)
        z = z.masked_fill(~is_known, 0)
        return _Moments(torch.cat((z * z, z, is_known.to(z.dtype)), 1), is_complete=False)

    def log_prob(self, features: _Moments) -> Tensor:
        means, variances = self._means, self._variances()
        constants = -(means.square() / variances + variances.log() + math.log(2 * math.pi)) / 2
        factors = torch.cat((-0.5 / variances, means / variances), 1).T.contiguous()
        if features.is_complete:  # faster than a product with a column of ones
            return torch.addmm(constants.sum(1), features.values[:, :-1], factors)
        return torch.mm(features.values, torch.cat((factors, constants.T)))

    def statistics(self, features: _Moments, weights: Tensor) -> list[Tensor]:
        sums = torch.mm(features.values.T, weights).T
        size = len(self.center)
        return [sums[:, :size], sums[:, size : 2 * size], sums[:, 2 * size :].expand(-1, size)]

    def update(self, statistics: Sequence[Tensor]) -> None:
        squares, sums, total = statistics
        prior, weight = self._prior()
        means = (sums + weight * prior) / (total + weight).clamp(min=EMPTY)
        means = torch.where(total + weight > EMPTY, means, self._means)
        deviations = squares - 2 * means * sums + means.square() * total + weight * (means - prior).square()
        deviations = deviations + torch.as_tensor(self.priors.get("covars", 0), dtype=means.dtype)
        degrees, floor = total + self._prior_degrees(), self.floor
        if self.covariance == "spherical":
            deviations, degrees, floor = deviations.sum(1), degrees.sum(1), self.floor.mean()
        covars = torch.maximum(deviations / degrees.clamp(min=EMPTY), floor)
        is_empty = total.amax(1) <= EMPTY
        covars = torch.where(degrees > EMPTY, covars, self.parameters["covars"])
        self.parameters = {
            "means": keep_empty(means + self.center, self.parameters["means"], is_empty),
            "covars": keep_empty(covars, self.parameters["covars"], is_empty),
        }

    def log_prior(self) -> float:
        if not self.priors:
            return 0.0
        variances, (prior, weight) = self._variances(), self._prior()
        scale = torch.as_tensor(self.priors.get("covars", 0), dtype=variances.dtype)
        squares = weight * (self._means - prior).square() + scale
        return float(-(squares / variances + self._prior_degrees() * variances.log()).sum() / 2)

    def free(self) -> dict[str, Tensor]:
        return {name: torch.ones_like(p, dtype=torch.bool) for name, p in self.parameters.items()}

    def complete(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(parameters)

    def is_on_boundary(self) -> dict[str, Tensor]:
        covars = self.parameters["covars"]
        floor = self.floor.mean() if self.covariance == "spherical" else self.floor
        is_floored = covars <= floor * (1 + 1e-9)
        return {"means": torch.zeros_like(self.parameters["means"], dtype=torch.bool), "covars": is_floored}


class _Pattern(NamedTuple):
    """Rows with values for the same features."""

    rows: Tensor | None  # None for all rows
    known: Tensor  # (D,) bool
    values: Tensor  # of these rows and features, relative to the center


class _Patterns(NamedTuple):
    """Observations by the features that have values, without the rows that have none."""

    num_rows: int
    patterns: list[_Pattern]


class FullGaussian(Gaussian):
    """Gaussian emissions with covariance matrices, one for each state ("full") or one for all states ("tied")."""

    def prepare(self, x: Tensor) -> _Patterns:
        z, is_known = x - self.center, ~x.isnan()
        if bool(is_known.all()):
            return _Patterns(len(x), [_Pattern(None, is_known.new_ones(x.shape[1]), z)])
        kinds, kind, counts = is_known.unique(dim=0, return_inverse=True, return_counts=True)
        patterns = []
        for known, rows in zip(kinds, kind.argsort(stable=True).split(counts.tolist()), strict=True):
            if bool(known.any()):
                patterns.append(_Pattern(rows, known, z[rows][:, known]))
        return _Patterns(len(x), patterns)

    def log_prob(self, features: _Patterns) -> Tensor:
        covariances, means = self.covariances(), self._means
        blocks, places = [], []
        for rows, known, values in features.patterns:
            within = covariances[:, known][:, :, known]
            factors = torch.linalg.cholesky(within)
            scales = torch.linalg.solve_triangular(factors, torch.eye(values.shape[1], dtype=means.dtype), upper=False)
            log_det = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            constants = log_det + values.shape[1] * math.log(2 * math.pi) / 2
            for part in values.split(_ROWS):
                squares = ((part - means[:, None, known]) @ scales.mT).square().sum(-1).T
                blocks.append(-squares / 2 - constants)
            if rows is not None:
                places.append(rows)
        block = torch.cat(blocks) if blocks else means.new_zeros(0, len(means))
        if len(block) == features.num_rows and not places:
            return block
        place = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
        return means.new_zeros(features.num_rows, len(means)).index_copy(0, place, block)

    def statistics(self, features: _Patterns, weights: Tensor) -> list[Tensor]:
        """Return the numbers of steps, and the sums of deviations from the present means and of their products."""
        means, covariances = self._means, self.covariances()
        total, sums, squares = weights.new_zeros(len(means)), torch.zeros_like(means), torch.zeros_like(covariances)
        for rows, known, values in features.patterns:
            mass, (fill, rest) = weights if rows is None else weights[rows], _regression(covariances, known)
            for part, weight in zip(values.split(_ROWS), mass.split(_ROWS), strict=True):
                deviations = part - means[:, None, known]
                weighted = deviations * weight.T.unsqueeze(-1)
                sums += (fill @ weighted.sum(1).unsqueeze(-1)).squeeze(-1)
                squares += fill @ (weighted.mT @ deviations) @ fill.mT
            total += mass.sum(0)
            squares += mass.sum(0)[:, None, None] * rest
        return [total, sums, squares]

    def update(self, statistics: Sequence[Tensor]) -> None:
        (total, sums, squares), means = statistics, self._means
        (prior, weight), divisor = self._prior(), total.clamp(min=EMPTY).unsqueeze(-1)
        moved = (sums + weight * (prior - means)) / (divisor + weight)
        products = moved.unsqueeze(-1) * sums.unsqueeze(-2)
        squares = squares - products - products.mT + total[:, None, None] * moved.unsqueeze(-1) * moved.unsqueeze(-2)
        off = means + moved - prior
        squares = squares + weight * off.unsqueeze(-1) * off.unsqueeze(-2)
        is_empty = total <= EMPTY
        updated = keep_empty(means + moved + self.center, self.parameters["means"], is_empty)
        self.parameters = {"means": updated, "covars": self._new_covariances(squares, total, is_empty)}

    def _prior_scale(self) -> Tensor:
        """Return the scale matrix of the prior of the covariances, (D, D) or (S, D, D). A number is its diagonal."""
        scale = torch.as_tensor(self.priors.get("covars", 0), dtype=self.center.dtype)
        return scale if scale.ndim else torch.diag(scale.expand_as(self.center))

    def _new_covariances(self, squares: Tensor, total: Tensor, is_empty: Tensor) -> Tensor:
        scale, degrees = self._prior_scale(), self._prior_degrees()
        if self.covariance == "tied":
            squares, total = squares[~is_empty].sum(0), total[~is_empty].sum()
            return self._floored((squares + scale) / (total + degrees).clamp(min=EMPTY))
        covars = (squares + scale) / (total + degrees).clamp(min=EMPTY)[:, None, None]
        covars = torch.where(is_empty[:, None, None], self.parameters["covars"], covars)
        return torch.stack([old if empty else self._floored(old) for old, empty in zip(covars, is_empty, strict=True)])

    def _floored(self, covariance: Tensor) -> Tensor:
        """Return the most probable covariance for an empirical one, if variances in all directions have a floor."""
        scale = self.floor.sqrt()
        values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2 / (scale * scale.unsqueeze(-1)))
        least = max(1.0, 1e-13 * float(values[-1]))  # keeps the matrix positive definite in spite of rounding
        if float(values[0]) >= least:
            return (covariance + covariance.T) / 2
        vectors = vectors * scale.unsqueeze(-1)
        floored: Tensor = (vectors * values.clamp(min=least)) @ vectors.T
        return floored

    def log_prior(self) -> float:
        covars, (prior, weight) = self.parameters["covars"], self._prior()
        off = self._means - prior
        squares = weight * off.unsqueeze(-1) * off.unsqueeze(-2)
        if self.covariance == "tied":
            squares = squares.sum(0)
        inverse = torch.linalg.inv(covars)
        trace = (inverse * (squares + self._prior_scale())).sum()
        return float(-(trace + self._prior_degrees() * torch.linalg.slogdet(covars).logabsdet.sum()) / 2)

    def free(self) -> dict[str, Tensor]:
        means, covars = self.parameters["means"], self.parameters["covars"]
        return {
            "means": torch.ones_like(means, dtype=torch.bool),
            "covars": torch.ones_like(covars, dtype=torch.bool).tril(),
        }

    def complete(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        covars = parameters["covars"]
        return {"means": parameters["means"], "covars": covars.tril() + covars.tril(-1).mT}

    def is_on_boundary(self) -> dict[str, Tensor]:
        covars, scale = self.parameters["covars"], self.floor.sqrt()
        least = torch.linalg.eigvalsh(covars / (scale * scale.unsqueeze(-1)))[..., 0]
        is_floored = (least <= 1 + 1e-6)[..., None, None].expand_as(covars)
        return {"means": torch.zeros_like(self.parameters["means"], dtype=torch.bool), "covars": is_floored}


def _regression(covariances: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices (S, D, K) from K known deviations to all expected deviations, and the covariances of the rest."""
    fill, rest = covariances.new_zeros(*covariances.shape[:2], int(known.sum())), torch.zeros_like(covariances)
    fill[:, known] = torch.eye(fill.shape[2], dtype=fill.dtype)
    if not bool(known.all()):
        missing, present = (mask.nonzero().squeeze(1) for mask in (~known, known))
        between = covariances[:, missing.unsqueeze(-1), present]
        slopes = torch.linalg.solve(covariances[:, present.unsqueeze(-1), present], between, left=False)
        fill[:, missing] = slopes
        within = covariances[:, missing.unsqueeze(-1), missing]
        rest[:, missing.unsqueeze(-1), missing] = within - slopes @ between.mT
    return fill, rest
