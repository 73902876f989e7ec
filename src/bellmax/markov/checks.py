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
        array = np.asarray(value, dtype=np.float64)
        if array.shape != shapes[name]:
            raise ValueError(f"init[{name!r}] must have shape {shapes[name]}, got {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"init[{name!r}] must be finite, got NaN or inf")
        if name in _PROBABILITIES and ((array < 0).any() or not np.allclose(array.sum(-1), 1, atol=1e-6)):
            raise ValueError(f"init[{name!r}] must hold probabilities that sum to 1 in each row, got {array.tolist()}")
        if name == "transmat" and has_durations and np.diag(array).any():
            raise ValueError(f"init['transmat'] must be 0 on the diagonal with max_duration, got {array.tolist()}")
        if name == "lambdas" and (array < 0).any():
            raise ValueError(f"init['lambdas'] must be at least 0, got {array.min()}")
        if name == "covars" and not _are_positive(array, has_matrices):
            raise ValueError(f"init['covars'] must be positive definite, got {array.tolist()}")


def _are_positive(covars: NDArray[np.float64], has_matrices: bool) -> bool:
    """True if variances are positive, or covariance matrices positive definite."""
    if not has_matrices:
        return bool((covars > 0).all())
    return np.allclose(covars, covars.swapaxes(-1, -2)) and bool((np.linalg.eigvalsh(covars) > 0).all())


def check_priors(priors: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise ``ValueError`` if a prior has a wrong name, shape or value.

    Args:
        priors: Numbers or arrays by name.
        shapes: The shape to which each prior must broadcast, by name.

    """
    for name, prior in priors.items():
        if name not in shapes:
            raise ValueError(f"priors must have names among {', '.join(shapes)}, got {name!r}")
        numbers = np.asarray(prior, dtype=np.float64)
        least = 1 if name in _PROBABILITIES else -np.inf if name == "means" else 0
        if not np.isfinite(numbers).all() or not (numbers >= least).all():
            requirement = "finite" if least == -np.inf else f"at least {least}"
            raise ValueError(f"priors[{name!r}] must be {requirement}, got {prior!r}")
        if not _broadcasts(numbers.shape, shapes[name]):
            needed = f"a number or broadcast to shape {shapes[name]}" if shapes[name] else "a number"
            raise ValueError(f"priors[{name!r}] must be {needed}, got shape {numbers.shape}")


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
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
