"""Standard errors of the parameters of a hidden Markov model, from the observed information."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bellmax.markov.data import Chunk, Data
from bellmax.markov.emissions import Family
from bellmax.markov.process import Process


class _Coordinates:
    """The free parameters of a process and its emissions, as one vector.

    Parameters on the boundary of their range, and the entries that depend on them, are constant.
    """

    def __init__(self, process: Process, emissions: Family) -> None:
        self.process, self.emissions = process, emissions
        self.values = {**process.parameters, **emissions.parameters}
        bounds = process.is_on_boundary() | emissions.is_on_boundary()
        free = process.free() | emissions.free()
        self.free = {name: mask & ~bounds[name] for name, mask in free.items()}
        self.bounds = bounds

    @property
    def vector(self) -> Tensor:
        return torch.cat([self.values[name][mask] for name, mask in self.free.items()])

    def parameters(self, vector: Tensor) -> dict[str, Tensor]:
        """Return all parameters by name. Differentiable."""
        entries = vector.split([int(mask.sum()) for mask in self.free.values()])
        parts = {
            name: self.values[name].masked_scatter(mask, entry)
            for (name, mask), entry in zip(self.free.items(), entries, strict=True)
        }
        own = self.process.parameters.keys()
        process = self.process.complete({name: p for name, p in parts.items() if name in own})
        return process | self.emissions.complete({name: p for name, p in parts.items() if name not in own})

    def log_likelihood(self, vector: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Return the log-likelihood of the data, without priors. Differentiable."""
        parameters, own = self.parameters(vector), self.process.parameters.keys()
        process = self.process.with_parameters({name: p for name, p in parameters.items() if name in own})
        emissions = self.emissions.with_parameters({name: p for name, p in parameters.items() if name not in own})
        scores = process.scores()
        values = [scores.distribution(chunk.log_prob(emissions), chunk.lengths).value.sum() for chunk in chunks]
        return torch.stack(values).sum()


def observed_information(coordinates: _Coordinates, chunks: Sequence[Chunk]) -> Tensor:
    """Return the Hessian of the log-likelihood in the free parameters, multiplied by −1."""
    vector = coordinates.vector.requires_grad_()
    (gradient,) = torch.autograd.grad(coordinates.log_likelihood(vector, chunks), vector, create_graph=True)
    rows = [torch.autograd.grad(entry, vector, retain_graph=True)[0] for entry in gradient]
    information = -torch.stack(rows)
    return (information + information.T) / 2


def standard_errors(process: Process, emissions: Family, data: Data) -> tuple[dict[str, Tensor], list[str]]:
    """Return the standard error of each parameter, NaN on the boundary, and reasons why entries are NaN."""
    coordinates = _Coordinates(process, emissions)
    chunks = data.chunks(emissions, len(process.parameters["startprob"]))
    information = observed_information(coordinates, chunks)
    reasons = []
    is_bound = {name: mask for name, mask in coordinates.bounds.items() if bool(mask.any())}
    if is_bound:
        reasons.append(f"{' and '.join(is_bound)} {'has' if len(is_bound) == 1 else 'have'} entries on the boundary")
    factor, failed = torch.linalg.cholesky_ex(information)
    if int(failed):
        reasons.append("the observed information is not positive definite, so the fit is not at a maximum")
        errors = {name: torch.full_like(value, torch.nan) for name, value in coordinates.values.items()}
        return errors, reasons
    covariance = torch.cholesky_inverse(factor) if len(information) else information
    jacobians = torch.autograd.functional.jacobian(
        lambda vector: tuple(coordinates.parameters(vector).values()), coordinates.vector
    )
    errors = {
        name: _deviations(jacobian, covariance) for name, jacobian in zip(coordinates.values, jacobians, strict=True)
    }
    return _without_bounds(errors, coordinates.bounds), reasons


def _deviations(jacobian: Tensor, covariance: Tensor) -> Tensor:
    return ((jacobian @ covariance) * jacobian).sum(-1).clamp(min=0).sqrt()


def _without_bounds(errors: Mapping[str, Tensor], bounds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: error.masked_fill(bounds[name], torch.nan) for name, error in errors.items()}
