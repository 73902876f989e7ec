"""Conversion of user data to tensors.

Arrays, lists, integers and the rows of a pandas frame become tensors here. pandas is never imported: a frame is
recognised by its ``iloc``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce, wraps
from inspect import Parameter, signature
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmax.transforms import is_readable

Numbers: TypeAlias = "Tensor | NDArray[Any] | Sequence[Any]"
"""A tensor, an array, a list (of lists) of numbers, a pandas row."""
Lengths: TypeAlias = "Tensor | NDArray[Any] | Sequence[int] | int"
Mask: TypeAlias = "Tensor | NDArray[Any] | Sequence[Any]"


def check_tensor(name: str, given: object) -> Tensor:
    """``given``, which must be a tensor: inputs that need gradients are not converted silently."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(given).__name__}: torch.as_tensor({name}) makes one")
    return given


def check_choice(name: str, given: object, choices: Collection[str], other: str = "") -> None:
    """Raise a ValueError for an argument that is none of the choices; ``other`` names what else it may be."""
    if given not in choices:
        raise ValueError(f"{name} must be {other}one of {', '.join(map(repr, choices))}, got {given!r}")


def check_band(band: float | None) -> None:
    """Raise a ValueError for what is no width of a band; a share of the length, as in the UCR archive, is none."""
    if band is None:
        return
    if not band >= 0:
        raise ValueError(f"band must be at least 0, got {band}")
    if 0 < band < 1:
        raise ValueError(
            f"band must be a number of steps, 0 or at least 1, got {band}: for a share of N steps give int({band} * N)"
        )


def as_tensor(name: str, given: object) -> Tensor:
    """Numbers of any kind as a tensor: floating point as it was given, integers and bools as int64."""
    if isinstance(given, Tensor):
        if given.is_complex():
            raise ValueError(f"{name} must hold real numbers, got dtype {given.dtype}")
        return given
    if isinstance(given, np.ma.MaskedArray):
        raise ValueError(f"{name} must be an array without a mask, got a masked array: fill it or cut it")
    if isinstance(given, np.ndarray) and given.dtype.kind == "O" and given.ndim:
        given = list(given)
    if isinstance(given, list | tuple) and any(isinstance(entry, Tensor) for entry in given):
        return _stacked(name, given)
    try:
        array = np.asarray(given)
    except ValueError:
        raise ValueError(_ragged(name)) from None
    except RuntimeError:  # tensors further inside that require gradients
        return _stacked(name, cast(Sequence[Any], given))
    return torch.from_numpy(_plain(name, array))


def _stacked(name: str, given: Sequence[Any]) -> Tensor:
    """Stack entries of which some are tensors; gradients are kept."""
    entries = [as_tensor(name, entry) for entry in given]
    if len({entry.shape for entry in entries}) > 1:
        raise ValueError(_ragged(name))
    return torch.stack(as_floating(entries))


def _ragged(name: str) -> str:
    return f"{name} must be a rectangular array, got entries of different shapes; dtw_cdist takes ragged collections"


def _plain(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """An array that torch can share: at most float64, or int64; writable, with positive strides."""
    if array.dtype.kind == "O":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must hold numbers, got {_first_of_others(array)}") from None
    if array.dtype.kind in "iub":
        array = array.astype(np.int64)
    elif array.dtype.kind != "f":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    elif array.dtype.itemsize > 8 or not array.dtype.isnative:
        array = array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32)
    is_shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return array if is_shareable else array.copy()


def _first_of_others(array: NDArray[Any]) -> str:
    other = next((entry for entry in array.flat if not isinstance(entry, int | float | np.number)), None)
    return f"{other!r}" if isinstance(other, str | None) else f"a {type(other).__name__}"


def as_floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in the widest floating point type among them; torch's default dtype if all hold integers."""
    types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    widest = reduce(torch.promote_types, types) if types else torch.get_default_dtype()
    return [tensor.to(widest) for tensor in tensors]


def as_series(name: str, given: object) -> Tensor:
    """One series or a batch of series, (..., length, features), from such a shape or from a vector (length,)."""
    series = as_tensor(name, given)
    if series.ndim == 1:
        series = series.unsqueeze(-1)
    if series.ndim < 2 or 0 in series.shape[-2:]:
        needed = "(length,) or (..., length, features), both at least 1"
        raise ValueError(f"{name} must have shape {needed}, got {tuple(series.shape)}")
    return series


def as_collection(name: str, given: object) -> list[Tensor]:
    """The series of a collection, each (length, features).

    A collection is an array (K, N) or (K, N, D), where NaN at the end of a series is padding; a pandas frame with one
    series per row; or any iterable of series.
    """
    if hasattr(given, "iloc"):
        given = _of_pandas(name, given)
    if isinstance(given, Tensor) or (isinstance(given, np.ndarray) and given.dtype.kind != "O"):
        block = as_tensor(name, given)
        if block.ndim not in (2, 3):
            raise ValueError(f"{name} must have shape (K, N) or (K, N, D), got {tuple(block.shape)}")
        _warn_if_transposed(name, block)
        lengths = _lengths(block)
        return [as_series(f"{name}[{k}]", s[:n]) for k, (s, n) in enumerate(zip(block.unbind(), lengths, strict=True))]
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"{name} must be a collection of series, got a {type(given).__name__}")
    return [_one_series(f"{name}[{k}]", series) for k, series in enumerate(given)]


TRANSPOSE = "as in aeon and sktime, give X.swapaxes(1, 2), or x.T of each series"
"""What to do with series of the layout (channels, time), for messages."""

_FEW_STEPS, _MANY_FEATURES = 16, 4  # at most so many steps, and at least so many features for each of them


def _warn_if_transposed(name: str, block: Tensor) -> None:
    """Warn if an array (K, N, D) has few steps and many more features: it may be (cases, channels, time)."""
    if block.ndim < 3 or not 1 < block.shape[1] <= _FEW_STEPS or block.shape[2] < _MANY_FEATURES * block.shape[1]:
        return
    message = (
        f"{name} of shape {tuple(block.shape)} is read as series of {block.shape[1]} steps with {block.shape[2]} "
        f"features. If its layout is (cases, channels, time), {TRANSPOSE}. If it is (cases, time, features), a list of "
        f"the series, list({name}), is taken without this warning"
    )
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "bellmax":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def transposed(is_likely: bool) -> str:
    """A hint for the end of a message on different numbers of features, if (channels, time) may explain them."""
    return f". If the layout is (channels, time), {TRANSPOSE}" if is_likely else ""


def _of_pandas(name: str, given: Any) -> NDArray[Any] | list[Any]:
    """The rows of a frame, by position, not by index: an array, or a list if cells hold series."""
    array = given.to_numpy()
    if array.dtype.kind != "O":
        return np.asarray(array)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 1:
        return list(array)
    return _plain(name, np.where(given.isna().to_numpy(), np.nan, array))


def _one_series(name: str, given: object) -> Tensor:
    series = as_tensor(name, given)
    if series.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (length,) or (length, features), got {tuple(series.shape)}")
    return as_series(name, series)


def _lengths(block: Tensor) -> list[int]:
    """How long each series of (K, N) or (K, N, D) is without the NaN at its end."""
    padding = block.detach().isnan()
    filled = ~(padding.all(-1) if block.ndim == 3 else padding)
    if not block.shape[1] or bool(filled[:, -1].all()):
        return [block.shape[1]] * len(block)
    steps = torch.arange(1, block.shape[1] + 1, device=block.device)
    lengths: list[int] = (filled * steps).amax(1).tolist()
    return lengths


def as_lengths(name: str, given: object, device: torch.device) -> Tensor:
    """Lengths of any integer type as int64."""
    if isinstance(given, int):
        return torch.full((), given, dtype=torch.int64, device=device)
    lengths = _listed(name, given)
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got dtype {lengths.dtype}")
    return _on_device(name, lengths, given, device).to(torch.int64)


def _listed(name: str, given: object) -> Tensor:
    """Integers in any form. torch.compile traces lists of numbers, but not NumPy."""
    if isinstance(given, list | tuple) and (torch.compiler.is_compiling() or not given):
        return torch.as_tensor(given or torch.empty(0, dtype=torch.int64))
    return as_tensor(name, given)


def as_pair(lengths: object) -> tuple[Any, Any]:
    """The lengths of both series of a pair."""
    if not isinstance(lengths, tuple | list) or len(lengths) != 2:
        raise ValueError(f"lengths must be a pair (lengths_a, lengths_b), got {type(lengths).__name__}")
    return lengths[0], lengths[1]


def as_mask(name: str, given: object, device: torch.device) -> Tensor:
    """A mask as bool, from bools or from integers 0 and 1."""
    mask = _listed(name, given)
    mask = _on_device(name, mask, given, device)
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{name} must be bool, or integers 0 and 1, True where a step is kept, got dtype {mask.dtype}")
    if mask.device.type == "cpu" and is_readable(mask):
        other = (mask != 0) & (mask != 1)
        if bool(other.any()):
            place = tuple(other.nonzero()[0].tolist())
            raise ValueError(f"{name} must hold 0 and 1, got {int(mask[place])} at {place}")
    return mask != 0


def _on_device(name: str, tensor: Tensor, given: object, device: torch.device) -> Tensor:
    """Data that was not a tensor is moved to the device of the scores; a tensor must be there already."""
    if tensor.device == device:
        return tensor
    if isinstance(given, Tensor):
        raise ValueError(f"{name} must be on the device of the scores, {device}, got {tensor.device}")
    return tensor.to(device)


# --- argument names of other libraries

_F = TypeVar("_F", bound=Callable[..., Any])

_WORDS = {
    "temperature": "gamma",
    "tau": "gamma",
    "smoothing": "gamma",
    "regularizer": "omega",
    "window": "band",
    "bandwidth": "band",
    "radius": "band",
    "sakoe_chiba_radius": "band",
    "metric": "cost",
    "n_neighbors": "k",
    "dist_func": "cost",
    "attention_mask": "mask",
    "ignore_label": "ignore_index",
    "dist": "cost",
    "gap_penalty": "gap_open",
    "gap_extension": "gap_extend",
    "num_labels": "num_tags",
    "labels": "tags",
}
_LENGTHS = ("input_lengths", "target_lengths", "logit_lengths", "label_lengths", "sequence_lengths")
_PAIR = "lengths=(input_lengths, target_lengths)"
_HINTS = {
    "n_jobs": "use torch.set_num_threads(n)",
    "batch_first": "inputs are always batch-first, (batch, time, ...). Leave it out, and swap the dimensions of "
    "time-first inputs with x.transpose(0, 1)",
}


def answers_near_misses(function: _F) -> _F:
    """Decorate a function so that the TypeError for another library's arguments says how bellmax spells them."""
    known = signature(function).parameters
    hints = dict(_HINTS)
    takes_a_pair = "lengths" in known and "tuple" in str(known["lengths"].annotation)
    if "lengths" in known:
        hints |= dict.fromkeys(_LENGTHS, f"use {_PAIR if takes_a_pair else 'lengths='}")
    if "mask" in known:
        hints["padding_mask"] = "use mask=~padding_mask, True at the steps to keep"
    hints |= {word: f"use {ours}=" for word, ours in _WORDS.items() if ours in known}
    hints = {word: hint for word, hint in hints.items() if word not in known}
    named = [name for name, parameter in known.items() if parameter.kind is Parameter.KEYWORD_ONLY]
    positional = [name for name in known if name not in named]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for word in kwargs:
            if word in hints:
                raise TypeError(f"{function.__qualname__}() has no argument {word!r}: {hints[word]}")
        if named and len(args) > len(positional):
            is_bound = positional[:1] in (["self"], ["cls"])
            own = positional[is_bound:]
            spelled = {"lengths": _PAIR} if takes_a_pair else {}
            raise TypeError(
                f"{function.__qualname__}() takes {len(own)} positional arguments ({', '.join(own)}), got "
                f"{len(args) - is_bound}: pass the others as {', '.join(spelled.get(n, f'{n}=') for n in named)}"
            )
        return function(*args, **kwargs)

    return cast(_F, call)
