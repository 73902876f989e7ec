"""Conversion and validation of user data: arrays, lists, integers and rows of a pandas frame become tensors.

pandas is never imported: a frame is recognized by its attribute ``iloc``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmax.modes import is_readable
from bellmax.names import answers_near_misses as answers_near_misses

Numbers: TypeAlias = "Tensor | NDArray[Any] | Sequence[Any]"
"""A tensor, an array, a (nested) list of numbers, or a pandas row."""
Lengths: TypeAlias = "Tensor | NDArray[Any] | Sequence[int] | int"
Mask: TypeAlias = "Tensor | NDArray[Any] | Sequence[Any]"


def check_tensor(name: str, value: object) -> Tensor:
    """Return ``value``. Raises ``ValueError`` if it is not a tensor: a silent conversion would lose gradients."""
    if not isinstance(value, Tensor):
        if isinstance(value, str):
            raise ValueError(f"{name} must be a tensor, got a str: convert its letters to integers")
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}: pass torch.as_tensor({name})")
    return value


def check_choice(name: str, value: object, choices: Collection[str], other: str = "") -> None:
    """Raise ``ValueError`` if ``value`` is not one of the choices.

    ``other`` starts the list in the message with values that are checked elsewhere, such as "None or ".
    """
    if value not in choices:
        raise ValueError(f"{name} must be {other}one of {', '.join(map(repr, choices))}, got {value!r}")


def check_band(band: float | None) -> None:
    """Raise ``ValueError`` if ``band`` is negative, or a fraction of the length (as in the UCR archive)."""
    if band is None:
        return
    if not band >= 0:
        raise ValueError(f"band must be at least 0, got {band}")
    if 0 < band < 1:
        raise ValueError(
            f"band must be a number of steps, 0 or at least 1, got {band}: for a fraction of N steps, "
            f"pass int({band} * N)"
        )


def as_tensor(name: str, numbers: object) -> Tensor:
    """Return numbers of any kind as a tensor. Floating point keeps its dtype; integers and bools become int64.

    A tensor is returned unchanged. ``name`` is the argument's name for error messages.
    """
    if isinstance(numbers, Tensor):
        if numbers.is_complex():
            raise ValueError(f"{name} must hold real numbers, got dtype {numbers.dtype}")
        return numbers
    if isinstance(numbers, np.ma.MaskedArray):
        raise ValueError(
            f"{name} must be an array without a mask, got a masked array: fill its masked entries, or remove them"
        )
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind == "O" and numbers.ndim:
        numbers = list(numbers)
    if isinstance(numbers, list | tuple) and any(isinstance(entry, Tensor) for entry in numbers):
        return _stack(name, numbers)
    try:
        array = np.asarray(numbers)
    except ValueError:
        raise ValueError(_ragged_message(name)) from None
    except RuntimeError:  # a nested list contains tensors that require gradients
        return _stack(name, cast(Sequence[Any], numbers))
    return torch.from_numpy(_shareable_array(name, array))


def _stack(name: str, entries: Sequence[Any]) -> Tensor:
    """Stack entries, some of which are tensors, along a new first dimension. Gradients flow through."""
    tensors = [as_tensor(name, entry) for entry in entries]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise ValueError(_ragged_message(name))
    return torch.stack(as_floating(tensors))


def _ragged_message(name: str) -> str:
    """Return the error message for entries of different shapes."""
    return f"{name} must be a rectangular array, got entries of different shapes; dtw_cdist takes ragged collections"


def _shareable_array(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose memory torch can share: float or int64, writable, with nonnegative strides.

    Copies only if needed. Raises ``ValueError`` if the array contains anything but numbers.
    """
    if array.dtype.kind == "O":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must hold numbers, got {_first_non_number(array)}") from None
    if array.dtype.kind in "iub":
        array = array.astype(np.int64)
    elif array.dtype.kind != "f":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    elif array.dtype.itemsize > 8 or not array.dtype.isnative:
        array = array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32)
    is_shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return array if is_shareable else array.copy()


def _first_non_number(array: NDArray[Any]) -> str:
    """Describe the first entry of an object array that is not a number, for an error message."""
    entry = next((entry for entry in array.flat if not isinstance(entry, int | float | np.number)), None)
    return f"{entry!r}" if isinstance(entry, str | None) else f"a {type(entry).__name__}"


def as_floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Convert tensors to the widest floating point dtype among them, or to torch's default if all are integers."""
    types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    widest = reduce(torch.promote_types, types) if types else torch.get_default_dtype()
    return [tensor if tensor.dtype == widest else tensor.to(widest) for tensor in tensors]


def as_series(name: str, numbers: object) -> Tensor:
    """Return one series or a batch of series as a tensor (..., length, features). A vector has one feature."""
    series = as_tensor(name, numbers)
    if series.ndim == 1:
        series = series.unsqueeze(-1)
    if series.ndim < 2 or 0 in series.shape[-2:]:
        needed = "(length,) or (..., length, features), both at least 1"
        raise ValueError(f"{name} must have shape {needed}, got {tuple(series.shape)}")
    return series


def as_collection(name: str, series: object) -> list[Tensor]:
    """Return a list of tensors (length, features), one for each series of a collection.

    A collection is an array (K, N) or (K, N, D), a pandas frame with one series per row, or any iterable of series. In
    an array or a frame, NaN at the end of a series is padding.
    """
    if hasattr(series, "iloc"):
        series = _pandas_rows(name, series)
    if isinstance(series, Tensor) or (isinstance(series, np.ndarray) and series.dtype.kind != "O"):
        block = as_tensor(name, series)
        if block.ndim not in (2, 3):
            raise ValueError(f"{name} must have shape (K, N) or (K, N, D), got {tuple(block.shape)}")
        _warn_if_transposed(name, block)
        lengths = _unpadded_lengths(block)
        if 0 in lengths and block.numel():
            raise ValueError(f"{name}[{lengths.index(0)}] must have a value before its NaN padding, got only NaN")
        return [as_series(f"{name}[{k}]", s[:n]) for k, (s, n) in enumerate(zip(block.unbind(), lengths, strict=True))]
    if isinstance(series, str | bytes | Mapping) or not isinstance(series, Iterable):
        raise ValueError(f"{name} must be a collection of series, got a {type(series).__name__}")
    return [_one_series(f"{name}[{k}]", numbers) for k, numbers in enumerate(series)]


TRANSPOSE = "as in aeon and sktime, pass X.swapaxes(1, 2), or x.T of each series"
"""Advice in error messages for series of the layout (channels, time)."""

_MAX_SUSPICIOUS_STEPS, _SUSPICIOUS_RATIO = 16, 4  # the ratio of features to steps


def _warn_if_transposed(name: str, block: Tensor) -> None:
    """Warn if an array (K, N, D) has few steps and many more features: its layout may be (cases, channels, time)."""
    if block.ndim < 3 or not 1 < block.shape[1] <= _MAX_SUSPICIOUS_STEPS:
        return
    if block.shape[2] < _SUSPICIOUS_RATIO * block.shape[1]:
        return
    message = (
        f"{name} of shape {tuple(block.shape)} is read as series of {block.shape[1]} steps with {block.shape[2]} "
        f"features. If its layout is (cases, channels, time), {TRANSPOSE}. If it is (cases, time, features), a list of "
        f"the series, list({name}), is taken without this warning"
    )
    frame, level = sys._getframe(), 1  # attribute the warning to the first caller outside bellmax
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "bellmax":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def transposed(is_likely: bool) -> str:
    """Return a hint to append to a message about unequal numbers of features, or "" if not ``is_likely``.

    The hint suggests that the layout is (channels, time).
    """
    return f". If the layout is (channels, time), {TRANSPOSE}" if is_likely else ""


def _pandas_rows(name: str, frame: Any) -> NDArray[Any] | list[Any]:
    """Return the rows of a frame in order, ignoring its index: an array, or a list if the cells contain series."""
    array = frame.to_numpy()
    if array.dtype.kind != "O":
        return np.asarray(array)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 1:
        return list(array)
    return _shareable_array(name, np.where(frame.isna().to_numpy(), np.nan, array))


def _one_series(name: str, numbers: object) -> Tensor:
    """Return one series of a collection as (length, features). Unlike :func:`as_series`, reject a batch."""
    series = as_tensor(name, numbers)
    if series.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (length,) or (length, features), got {tuple(series.shape)}")
    return as_series(name, series)


def _unpadded_lengths(block: Tensor) -> list[int]:
    """Return the length of each series of (K, N) or (K, N, D) without the NaN padding at its end."""
    is_nan = block.detach().isnan()
    is_number = ~(is_nan.all(-1) if block.ndim == 3 else is_nan)
    if not block.shape[1] or bool(is_number[:, -1].all()):
        return [block.shape[1]] * len(block)
    steps = torch.arange(1, block.shape[1] + 1, device=block.device)
    lengths: list[int] = (is_number * steps).amax(1).tolist()
    return lengths


def as_lengths(name: str, lengths: object, device: torch.device) -> Tensor:
    """Return lengths, in any form and of any integer type, as an int64 tensor on ``device``."""
    if isinstance(lengths, int):
        return torch.full((), lengths, dtype=torch.int64, device=device)
    tensor = _integers(name, lengths)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got dtype {tensor.dtype}")
    return _move_to_device(name, tensor, lengths, device).to(torch.int64)


def _integers(name: str, numbers: object) -> Tensor:
    """Return integers or bools as a tensor. Unlike :func:`as_tensor`, torch.compile can trace it for lists."""
    if isinstance(numbers, list | tuple) and (torch.compiler.is_compiling() or not numbers):
        return torch.as_tensor(numbers or torch.empty(0, dtype=torch.int64))
    return as_tensor(name, numbers)


def as_pair(sizes: object, name: str = "lengths", needed: str = "(lengths_a, lengths_b)") -> tuple[Any, Any]:
    """Return the two entries of an argument. Raises ``ValueError`` if it is not a tuple or list of two."""
    if not isinstance(sizes, tuple | list) or len(sizes) != 2:
        raise ValueError(f"{name} must be a pair {needed}, got {type(sizes).__name__}")
    return sizes[0], sizes[1]


def as_sample_shape(sample_shape: object) -> torch.Size:
    """Return the shape of samples. Raises ``ValueError`` if it is a number or contains anything but integers."""
    if isinstance(sample_shape, int):
        raise ValueError(
            f"sample_shape must be a tuple, got {sample_shape}: for {sample_shape} samples, pass ({sample_shape},)"
        )
    try:
        return torch.Size(cast(Sequence[int], sample_shape))
    except TypeError:
        raise ValueError(f"sample_shape must be a tuple of integers, got {sample_shape!r}") from None


def as_mask(name: str, mask: object, device: torch.device) -> Tensor:
    """Return a mask of bools, or of integers 0 and 1, as a bool tensor on ``device``."""
    tensor = _move_to_device(name, _integers(name, mask), mask, device)
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        needed = "bool, or integers 0 and 1, True where a step is kept"
        raise ValueError(f"{name} must be {needed}, got dtype {tensor.dtype}")
    if tensor.is_cpu and is_readable(tensor):
        is_invalid = (tensor != 0) & (tensor != 1)
        if bool(is_invalid.any()):
            position = tuple(is_invalid.nonzero()[0].tolist())
            raise ValueError(f"{name} must hold 0 and 1, got {int(tensor[position])} at {position}")
    return tensor != 0


def _move_to_device(name: str, tensor: Tensor, argument: object, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, if the user's ``argument`` was a list or an array.

    Raises ``ValueError`` if the argument was a tensor on another device: a silent copy in each call would be slow.
    """
    if tensor.device == device:
        return tensor
    if isinstance(argument, Tensor):
        raise ValueError(f"{name} must be on the device of the scores, {device}, got {tensor.device}")
    return tensor.to(device)
