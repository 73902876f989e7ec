"""Long pairs, by kernels that see one block of the cost matrix at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bellmax.autograd import Shortcut
from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for
from bellmax.programs.table import WARPING
from bellmax.regularizers import Regularizer
from bellmax.structures.dtw import DTW
from bellmax.tensors import Tensors, divide_by_gamma, multiply_by_gamma
from bellmax.transforms import needs_grad


def _shortcut(device: torch.device, omega: Regularizer) -> Any | None:
    return BACKENDS[backend_for(WARPING.name, device, omega.kernel)].shortcut("dtw.blocks")


def serves(batch: int, rows: int, columns: int, device: torch.device, omega: Regularizer) -> bool:
    """Whether pairs of such a size should be, and can be, swept in blocks."""
    shortcut = None if isinstance(omega.gamma, Tensor) else _shortcut(device, omega)
    return shortcut is not None and bool(shortcut.serves(omega.kernel, batch, rows, columns))


def value_in_blocks(
    x: Tensor, y: Tensor, cost: Callable[[Tensor, Tensor], Tensor], band: float | None, omega: Regularizer
) -> Tensor:
    """DTW_Ω, a number, of x (N, D) and y (M, D), where ``cost`` gives the costs of some of each.

    It keeps the series and a row of values for each block. The first derivative computes the blocks again, one at a
    time; the second goes through the whole matrix.
    """
    shortcut, kernel, gamma = _shortcut(x.device, omega), omega.kernel, omega.gamma
    backend = backend_for(WARPING.name, x.device, kernel)
    assert shortcut is not None
    reach = math.inf if band is None else float(band)

    def costs(x: Tensor, y: Tensor) -> Tensor:
        return divide_by_gamma(cost(x, y), gamma)

    keep = needs_grad(x, y)
    with torch.no_grad():
        value, lines, by_products = shortcut.run(kernel, x, y, costs, reach, keep)

    def vjp(inputs: Tensors, lines: Tensors, grad: Tensor) -> Tensors:
        seed = grad.reshape(1).to(inputs[0].dtype)
        gradients: Tensors = shortcut.vjp(kernel, inputs, costs, reach, lines, by_products, seed)
        return gradients

    def general(inputs: Tensors, lines: Tensors) -> Tensor:
        p = DTW(costs(inputs[0], inputs[1]), band=band, omega=omega.at_unit_gamma())
        p._solver.backend = backend  # autograd may call this in another thread, or outside of the caller's use_backend
        return p.value

    return multiply_by_gamma(Shortcut(vjp, general).attach(value, (x, y), lines), gamma)
