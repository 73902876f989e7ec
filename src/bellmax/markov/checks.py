"""Checks of the arguments of hidden Markov models: initial parameters, priors and known states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PROBABILITIES = "startprob", "transmat", "durations", "emissionprob"

Shapes = Mapping[str, tuple[int, ...]]


def check_init(init: Mapping[str, Any], shapes: Shapes, has_durations: bool, has_matrices: bool) -> None:
    """Raise ``ValueError`` if an initial parameter has a wrong name, shape or value.

    Args:
        init: Arrays by name.
        shapes: The shapes of all parameters by name.
        has_durations: True if the model has durations, and so no transition of a state to itself.
        has_matrices: True if ``covars`` has matrices, False if it has variances.

    """
    for name, value in init.items():
        if name not in shapes:
            raise ValueError(f"init must have names among {', '.join(shapes)}, got {name!r}")
        array = read_numbers(f"init[{name!r}]", value)
        if array.shape != shapes[name]:
            raise ValueError(f"init[{name!r}] must have shape {shapes[name]}, got {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"init[{name!r}] must be finite, got NaN or inf")
        if name in _PROBABILITIES and ((array < 0).any() or not np.allclose(array.sum(-1), 1, atol=1e-6)):
            raise ValueError(f"init[{name!r}] must hold probabilities that sum to 1 in each row, {_bad_row(array)}")
        if name == "transmat" and has_durations and np.diag(array).any():
            diagonal = np.diag(array).tolist()
            raise ValueError(f"init['transmat'] must be 0 on the diagonal with max_duration, got {diagonal}")
        if name == "lambdas" and (array < 0).any():
            raise ValueError(f"init['lambdas'] must be at least 0, got {array.min()}")
        if name == "covars":
            if has_matrices:
                _check_symmetric("init['covars']", array)
            least = float((np.linalg.eigvalsh(array) if has_matrices else array).min())
            if not least > 0:
                kind = "eigenvalue" if has_matrices else "variance"
                raise ValueError(f"init['covars'] must be positive definite, got the smallest {kind} {least:g}")


def read_numbers(name: str, value: Any) -> NDArray[np.float64]:
    """Return a number or an array of numbers as float64. Raises ``ValueError`` for anything else."""
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number or an array of numbers, got {value!r}") from None


def _bad_row(rows: NDArray[np.float64]) -> str:
    """Describe a row that does not hold probabilities."""
    if (rows < 0).any():
        return f"got {rows.min():g}"
    sums = np.atleast_2d(rows).sum(-1)
    row = int(abs(sums - 1).argmax())
    return f"got the sum {sums[row]:g} in row {row}"


def _check_symmetric(name: str, matrices: NDArray[np.float64]) -> None:
    difference = abs(matrices - matrices.swapaxes(-1, -2)).max()
    if difference > 1e-6 * abs(matrices).max():
        raise ValueError(f"{name} must be symmetric, got entries that differ by {difference:g}")


def check_priors(priors: Mapping[str, Any], shapes: Shapes, has_matrices: bool) -> None:
    """Raise ``ValueError`` if a prior has a wrong name, shape or value.

    Args:
        priors: Numbers or arrays by name.
        shapes: The shape to which each prior must broadcast, by name.
        has_matrices: True if ``covars`` has matrices, False if it has variances.

    """
    for name, prior in priors.items():
        if name not in shapes:
            raise ValueError(f"priors must have names among {', '.join(shapes)}, got {name!r}")
        numbers = read_numbers(f"priors[{name!r}]", prior)
        is_matrix = name == "covars" and has_matrices and numbers.ndim > 0
        least = 1 if name in _PROBABILITIES else -np.inf if name == "means" or is_matrix else 0
        if not np.isfinite(numbers).all() or not (numbers >= least).all():
            requirement = "finite" if least == -np.inf else f"at least {least}"
            raise ValueError(f"priors[{name!r}] must be {requirement}, got {prior!r}")
        if not _broadcasts(numbers.shape, shapes[name], 2 if is_matrix else 0):
            needed = f"a number or broadcast to shape {shapes[name]}" if shapes[name] else "a number"
            raise ValueError(f"priors[{name!r}] must be {needed}, got shape {numbers.shape}")
        if is_matrix:
            _check_scale(numbers)


def _check_scale(matrices: NDArray[np.float64]) -> None:
    """Raise ``ValueError`` unless scale matrices are symmetric and positive semidefinite, up to rounding."""
    _check_symmetric("priors['covars']", matrices)
    eigenvalues = np.linalg.eigvalsh(matrices)
    if (eigenvalues.min(-1) < -1e-12 * eigenvalues.max(-1)).any():
        least = eigenvalues.min()
        raise ValueError(f"priors['covars'] must be positive semidefinite, got the smallest eigenvalue {least:g}")


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...], equal: int) -> bool:
    """True if a shape broadcasts to another, and the last ``equal`` dimensions are equal."""
    if equal and shape[-equal:] != to[-equal:]:
        return False
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def read_labels(y: Any, lengths: Sequence[int], states: int) -> list[Tensor]:
    """Return the known state of each step of series with these lengths, −1 where it is unknown."""
    if len(y) != len(lengths):
        raise ValueError(f"y must hold the states of {len(lengths)} series, got {len(y)}")
    labels = []
    for k, (row, length) in enumerate(zip(y, lengths, strict=True)):
        array = np.asarray(row)
        is_padded = isinstance(y, np.ndarray) and array.ndim == 1 and len(array) >= length
        if array.ndim != 1 or (len(array) != length and not is_padded):
            raise ValueError(f"y[{k}] must have shape ({length},), one state for each step, got {array.shape}")
        if array.dtype.kind not in "iu":
            raise ValueError(f"y[{k}] must hold integers, -1 where the state is unknown, got {array.dtype}")
        array = array[:length]
        bad = np.flatnonzero((array < -1) | (array >= states))
        if len(bad):
            needed = f"y[{k}] must be from 0 to {states - 1}, or -1 where the state is unknown"
            raise ValueError(f"{needed}, got {array[bad[0]]} at step {bad[0]}")
        labels.append(torch.from_numpy(array.astype(np.int64)))
    return labels
