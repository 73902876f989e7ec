"""DTW_Ω of a long pair from its series, by blocks of rows: the cost matrix never exists as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import bellmax.backends.native.loading as loading
from bellmax.backends.native.lattices import tape_size
from bellmax.backends.native.loading import call
from bellmax.programs.table import WARPING
from bellmax.programs.values import reject_overflow
from bellmax.regularizers import Kernel
from bellmax.tensors import Tensors

_CELLS = 2**20  # of a block: larger ones are fresh pages for every call, which cost more than the sweeps
_STRIP = 64  # rows that the kernels sweep together; a block holds whole strips
_LARGE = 2**22, 2**18  # cells of a batch, and of each of its pairs, from which blocks are faster than the matrix

Costs = Callable[[Tensor, Tensor], Tensor]


class Blocks:
    """The shortcut: it keeps the series and a row of values for each block, and computes the blocks again, one at a
    time, for the gradient."""

    def serves(self, kernel: Kernel | None, batch: int, rows: int, columns: int) -> bool:
        """Whether pairs of such a size should be, and can be, swept in blocks."""
        large, each = _LARGE
        size = rows * columns
        return kernel is not None and size >= each and batch * size >= large

    def run(
        self, kernel: Kernel, x: Tensor, y: Tensor, costs: Costs, band: float, keep: bool
    ) -> tuple[Tensor, list[Tensor], bool]:
        """The value at γ = 1 of x (N, D) and y (M, D), the lines above each block if they are to be kept, and whether
        values are products. ``costs`` gives the block of the cost matrix, over γ, of some of each."""
        pair = _Pair(x, y, costs, band, kernel)
        by_products = kernel.name == "negentropy" and x.dtype == torch.float32
        value, lines, greatest = pair.sweep(by_products, keep)
        assert loading.kernels is not None
        if by_products and not loading.kernels.dtw_fits_products(greatest, pair.rows + pair.columns):
            by_products = False
            value, lines, _ = pair.sweep(False, keep)
        return value, lines, by_products

    def vjp(
        self,
        kernel: Kernel,
        inputs: Tensors,
        costs: Costs,
        band: float,
        lines: Tensors,
        by_products: bool,
        seed: Tensor,
    ) -> Tensors:
        """The gradients in x and y."""
        return _Pair(inputs[0], inputs[1], costs, band, kernel).gradients(seed, lines, by_products)


@dataclass(frozen=True)
class _Pair:
    x: Tensor
    y: Tensor
    costs: Costs
    band: float
    kernel: Kernel

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.y.shape[0]

    def _column(self, row: int, side: int) -> int:
        """About the first (side −1) or the last (side 1) column of a row within the band, rather too far than not."""
        if self.rows == 1 or self.columns == 1 or math.isinf(self.band):
            return 0 if side < 0 else self.columns - 1
        reach = max(self.band, 0.5) * (max(self.rows, self.columns) - 1)
        column = (row * (self.columns - 1) + side * reach) / (self.rows - 1) + 2 * side
        return int(min(max(column, 0), self.columns - 1))

    def _range(self, first: int, height: int) -> slice:
        """The columns of some rows."""
        last = min(first + height, self.rows) - 1
        return slice(self._column(first, -1), self._column(last, 1) + 1)

    @cached_property
    def places(self) -> list[tuple[slice, slice]]:
        """Rows and columns of each block."""

        def cells(height: int) -> int:
            middle = self._range((self.rows - height) // 2, height)
            return height * len(range(self.columns)[middle])

        height = _STRIP
        while height < self.rows and cells(2 * height) <= _CELLS:
            height *= 2
        return [
            (slice(row, min(row + height, self.rows)), self._range(row, height)) for row in range(0, self.rows, height)
        ]

    def _line(self) -> Tensor:
        """Room for the numbers that a block passes on to its neighbour."""
        return torch.empty(self.columns, dtype=torch.float64, device="cpu")

    def _call(self, name: str, place: tuple[slice, slice], *args: Any) -> Any:
        where = self.rows, self.columns, self.band, place[0].start, place[1].start
        return call(name, *args, *where, *self.kernel)

    def sweep(self, by_products: bool, keep: bool) -> tuple[Tensor, list[Tensor], float]:
        """The value, the lines above each block if they are to be kept, and the greatest magnitude of a cost."""
        value, greatest = self.x.new_empty(1), self.x.new_empty(1)
        no_tape = torch.empty((1, 0), dtype=torch.float64, device="cpu")
        above, spare, lines, most = self._line(), self._line(), [], 0.0
        for place in self.places:
            cost = self.costs(self.x[place[0]], self.y[place[1]]).unsqueeze(0).contiguous()
            if keep:
                lines.append(above)
                spare = self._line()
            if not self._call("dtw_forward_block", place, cost, value, greatest, no_tape, above, spare, by_products):
                _reject(cost[0], place)
                reject_overflow(value, -1)
            most = max(most, float(greatest))
            above, spare = spare, above
        return value[0], lines, most

    def gradients(self, seed: Tensor, lines: Tensors, by_products: bool) -> Tensors:
        """The gradients in x and y, of all blocks."""
        x, y = self.x, self.y
        of_x, of_y = torch.zeros_like(x), torch.zeros_like(y)
        below, above = self._line(), self._line()
        value, greatest = x.new_empty(1), x.new_empty(1)
        for place, line in zip(reversed(self.places), reversed(lines), strict=True):
            rows, columns = (part.detach().requires_grad_() for part in (x[place[0]], y[place[1]]))
            with torch.enable_grad():
                cost = self.costs(rows, columns)
            block = cost.unsqueeze(0).contiguous()
            size = tape_size(WARPING, block.shape[1], place[1].stop, place[0].start)
            tape = torch.empty((1, size), dtype=torch.float64, device="cpu")
            self._call("dtw_forward_block", place, block, value, greatest, tape, line, self._line(), by_products)
            path = torch.empty_like(block)
            self._call("dtw_backward_block", place, block, tape, seed, path, line, below, above)
            for total, where, part in zip(
                (of_x, of_y), place, torch.autograd.grad(cost, (rows, columns), path[0]), strict=True
            ):
                total[where] += part
            below, above = above, below
        return of_x, of_y


def _reject(cost: Tensor, place: tuple[slice, slice]) -> None:
    for i, j in (~(cost > -math.inf)).nonzero()[:1].tolist():
        cell = place[0].start + i, place[1].start + j
        raise ValueError(f"cost must be finite or +inf, got {cost[i, j].item()} at cell {cell}")
