"""DTW_Ω of a long pair from its series, by blocks of rows: the cost matrix never exists as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bellmax.backends import backend_for, native
from bellmax.dtw import DTW
from bellmax.regularizers import Regularizer, multiply_by_gamma

_CELLS = 2**20  # of a block: larger ones are fresh pages for every call, which cost more than the sweeps
_STRIP = 64  # rows that the kernels sweep together; a block holds whole strips
_LARGE = 2**22, 2**18  # cells of a batch, and of each of its pairs, from which blocks are faster than the matrix


def is_worthwhile(batch: int, rows: int, columns: int, device: torch.device, omega: Regularizer) -> bool:
    """Whether pairs of such a size should be, and can be, swept in blocks."""
    large, each = _LARGE
    size = rows * columns
    if size < each or batch * size < large or isinstance(omega.gamma, Tensor) or omega.kernel is None:
        return False
    return backend_for(device) == "native"


def value_in_blocks(
    x: Tensor, y: Tensor, costs: Callable[[Tensor, Tensor], Tensor], band: float | None, omega: Regularizer
) -> Tensor:
    """DTW_Ω, a number, of x (N, D) and y (M, D), where ``costs`` gives the block of the cost matrix of some of each.

    It keeps the series and a row of values for each block. The first derivative computes the blocks again, one at a
    time; the second goes through the whole matrix.
    """
    assert not isinstance(omega.gamma, Tensor)
    assert omega.kernel is not None
    blocks = _Blocks(x.shape[0], y.shape[0], math.inf if band is None else float(band), omega, costs)
    value: Tensor = _Value.apply(x, y, blocks)
    return multiply_by_gamma(value, omega.gamma)


@dataclass(frozen=True)
class _Blocks:
    rows: int
    columns: int
    band: float
    omega: Regularizer
    costs: Callable[[Tensor, Tensor], Tensor]

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

    def scaled_costs(self, x: Tensor, y: Tensor) -> Tensor:
        """Costs over γ."""
        costs = self.costs(x, y)
        return costs if self.omega.gamma == 1 else costs / self.omega.gamma

    def cost(self, x: Tensor, y: Tensor, place: tuple[slice, slice]) -> Tensor:
        return self.scaled_costs(x[place[0]], y[place[1]]).unsqueeze(0).contiguous()

    def line(self) -> Tensor:
        """Room for what a block passes on to its neighbour."""
        return torch.empty(self.columns, dtype=torch.float64)

    def call(self, kernel: str, place: tuple[slice, slice], *args: Any) -> Any:
        arrays = [a.detach().numpy() if isinstance(a, Tensor) else a for a in args]
        where = self.rows, self.columns, self.band, place[0].start, place[1].start
        assert self.omega.kernel is not None
        return getattr(native.kernels, kernel)(*arrays, *where, *self.omega.kernel, torch.get_num_threads())

    def sweep(self, x: Tensor, y: Tensor, by_products: bool, keep: bool) -> tuple[Tensor, list[Tensor], float]:
        """The value, the lines above each block if they are to be kept, and the greatest magnitude of a cost."""
        value, greatest = x.new_empty(1), x.new_empty(1)
        no_tape = torch.empty((1, 0), dtype=torch.float64)
        above, spare, lines, most = self.line(), self.line(), [], 0.0
        for place in self.places:
            cost = self.cost(x, y, place)
            if keep:
                lines.append(above)
                spare = self.line()
            if not self.call("dtw_forward_block", place, cost, value, greatest, no_tape, above, spare, by_products):
                self.reject(cost[0], place)
            most = max(most, float(greatest))
            above, spare = spare, above
        return value[0], lines, most

    def reject(self, cost: Tensor, place: tuple[slice, slice]) -> None:
        i, j = (~(cost > -math.inf)).nonzero()[0].tolist()
        cell = place[0].start + i, place[1].start + j
        raise ValueError(f"cost must be finite or +inf, got {cost[i, j].item()} at cell {cell}")

    def gradients(self, x: Tensor, y: Tensor, seed: Tensor, lines: list[Tensor], by_products: bool) -> Iterator[Tensor]:
        """The gradients in x and y, of all blocks."""
        of_x, of_y = torch.zeros_like(x), torch.zeros_like(y)
        below, above = self.line(), self.line()
        value, greatest = x.new_empty(1), x.new_empty(1)
        kernels = native.kernels
        assert kernels is not None
        for place, line in zip(reversed(self.places), reversed(lines), strict=True):
            rows, columns = (part.detach().requires_grad_() for part in (x[place[0]], y[place[1]]))
            with torch.enable_grad():
                cost = self.scaled_costs(rows, columns)
            block = cost.unsqueeze(0).contiguous()
            size = kernels.dtw_tape_size(block.shape[1], place[1].stop)
            tape = torch.empty((1, size), dtype=torch.float64)
            self.call("dtw_forward_block", place, block, value, greatest, tape, line, self.line(), by_products)
            path = torch.empty_like(block)
            self.call("dtw_backward_block", place, block, tape, seed, path, line, below, above)
            for total, where, part in zip(
                (of_x, of_y), place, torch.autograd.grad(cost, (rows, columns), path[0]), strict=True
            ):
                total[where] += part
            below, above = above, below
        yield of_x
        yield of_y


class _Value(Function):
    """(x, y, blocks) → DTW_Ω at γ = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, blocks: _Blocks) -> Tensor:
        alpha, _ = blocks.omega.kernel or (0.0, 0.0)
        ctx.by_products = alpha == 1 and x.dtype == torch.float32
        keep = any(ctx.needs_input_grad[:2])
        value, lines, greatest = blocks.sweep(x, y, ctx.by_products, keep)
        assert native.kernels is not None
        if ctx.by_products and not native.kernels.dtw_fits_products(greatest, blocks.rows + blocks.columns):
            ctx.by_products = False
            value, lines, _ = blocks.sweep(x, y, False, keep)
        ctx.blocks = blocks
        ctx.lines = lines
        ctx.save_for_backward(x, y)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        blocks = ctx.blocks
        if torch.is_grad_enabled():
            band = None if math.isinf(blocks.band) else blocks.band
            value = DTW(blocks.scaled_costs(x, y), band=band, omega=blocks.omega.at_unit_gamma()).value
            wanted = [t for t, needed in zip((x, y), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(value, wanted, grad, create_graph=True))
            return *[next(found) if needed else None for needed in ctx.needs_input_grad[:2]], None
        return *blocks.gradients(x, y, grad.reshape(1).to(x.dtype), ctx.lines, ctx.by_products), None
