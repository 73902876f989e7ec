"""Fused kernel: DTW of a long pair of series, from chunks of rows. The cost matrix never exists as a whole."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bellmax.backends.native.loading as loading
from bellmax.backends.fused import LongPair, LongPairTape
from bellmax.backends.native.lattices import strip_tape_size
from bellmax.backends.native.loading import call
from bellmax.programs.checks import reject_overflow
from bellmax.programs.table import WARPING
from bellmax.tensors import Tensors

_CELLS = 2**20  # of a chunk: larger ones need fresh pages in every call, and page faults cost more than the sweeps
_STRIP = 64  # rows that the kernels sweep together; a chunk holds whole strips


class NativeLongPairs:
    """The value of one pair. The gradient computes the chunks again, one at a time."""

    def supports(self, problem: LongPair) -> bool:
        return problem.x.dtype in (torch.float32, torch.float64)

    def run(self, problem: LongPair) -> tuple[Tensor, LongPairTape]:
        sweep = _ChunkSweep(problem)
        uses_products = problem.omega.name == "negentropy" and problem.x.dtype == torch.float32
        value, tape, greatest = sweep.forward(uses_products)
        assert loading.kernels is not None
        if uses_products and not loading.kernels.dtw_fits_products(greatest, sweep.rows + sweep.columns):
            value, tape, _ = sweep.forward(uses_products=False)
        return value, tape

    def vjp(self, problem: LongPair, saved: LongPairTape, grad: Tensor) -> Tensors:
        """Gradients in x, y and each parameter."""
        return _ChunkSweep(problem).backward(saved, grad.reshape(1).to(problem.x.dtype))


class _Chunk(NamedTuple):
    """Consecutive rows of a cost matrix, and the columns that the band leaves of them."""

    rows: slice
    columns: slice


class _ChunkSweep:
    """The sweeps over the chunks of one pair, which pass a halo row of values on to each other."""

    def __init__(self, problem: LongPair) -> None:
        self._problem = problem
        self.rows, self.columns = len(problem.x), len(problem.y)

    def forward(self, uses_products: bool) -> tuple[Tensor, LongPairTape, float]:
        """Return the value, the tape and the greatest magnitude of a cost."""
        x, y, costs, parameters, _, saves, _ = self._problem
        value, chunk_greatest, greatest = x.new_empty(1), x.new_empty(1), 0.0
        no_tape = torch.empty((1, 0), dtype=torch.float64, device="cpu")
        above, below, halo_rows = self._halo_row(), self._halo_row(), []
        for chunk in self._chunks:
            cost = costs(x[chunk.rows], y[chunk.columns], *parameters).unsqueeze(0).contiguous()
            if saves:
                halo_rows.append(above)
                below = self._halo_row()
            outputs = value, chunk_greatest, no_tape, above, below
            if not self._call("dtw_forward_block", chunk, cost, *outputs, uses_products):
                _reject_bad_cost(cost[0], chunk)
                reject_overflow(value, -1)
            greatest = max(greatest, float(chunk_greatest))
            above, below = below, above
        return value[0], LongPairTape(halo_rows, uses_products), greatest

    def backward(self, saved: LongPairTape, seed: Tensor) -> Tensors:
        """Return the gradients in x, y and each parameter."""
        x, y, costs, parameters, *_ = self._problem
        gradients = [torch.zeros_like(tensor) for tensor in (x, y, *parameters)]
        mass_below, mass_above = self._halo_row(), self._halo_row()
        for chunk, halo_row in zip(reversed(self._chunks), reversed(saved.halo_rows), strict=True):
            inputs = [tensor.detach().requires_grad_() for tensor in (x[chunk.rows], y[chunk.columns], *parameters)]
            with torch.enable_grad():
                cost = costs(*inputs)
            block = cost.detach().unsqueeze(0).contiguous()
            tape = self._tape(chunk, block, halo_row, saved.uses_products)
            path = torch.empty_like(block)
            self._call("dtw_backward_block", chunk, block, tape, seed, path, halo_row, mass_below, mass_above)
            totals = gradients[0][chunk.rows], gradients[1][chunk.columns], *gradients[2:]
            for total, gradient in zip(totals, torch.autograd.grad(cost, inputs, path[0]), strict=True):
                total += gradient
            mass_below, mass_above = mass_above, mass_below
        return gradients

    def _tape(self, chunk: _Chunk, block: Tensor, halo_row: Tensor, uses_products: bool) -> Tensor:
        """Sweep a chunk forward again, for the tape that :meth:`forward` did not save."""
        size = strip_tape_size(WARPING, block.shape[1], chunk.columns.stop, chunk.rows.start)
        tape = torch.empty((1, size), dtype=torch.float64, device="cpu")
        outputs = block.new_empty(1), block.new_empty(1), tape, halo_row, self._halo_row()
        self._call("dtw_forward_block", chunk, block, *outputs, uses_products)
        return tape

    def _call(self, name: str, chunk: _Chunk, *args: Any) -> Any:
        geometry = self.rows, self.columns, self._problem.band, chunk.rows.start, chunk.columns.start
        return call(name, *args, *geometry, *self._problem.omega)

    def _halo_row(self) -> Tensor:
        """Room for the numbers that a chunk passes on to the next one."""
        return torch.empty(self.columns, dtype=torch.float64, device="cpu")

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        """All chunks from the first row to the last, as large as ``_CELLS`` permits."""

        def cells(height: int) -> int:
            middle = self._columns_of((self.rows - height) // 2, height)
            return height * len(range(self.columns)[middle])

        height = _STRIP
        while height < self.rows and cells(2 * height) <= _CELLS:
            height *= 2
        return [
            _Chunk(slice(row, min(row + height, self.rows)), self._columns_of(row, height))
            for row in range(0, self.rows, height)
        ]

    def _columns_of(self, first: int, height: int) -> slice:
        """The columns that the band leaves of some rows."""
        last = min(first + height, self.rows) - 1
        return slice(self._band_limit(first, -1), self._band_limit(last, 1) + 1)

    def _band_limit(self, row: int, side: int) -> int:
        """The first (side −1) or the last (side 1) column of a row within the band; a conservative estimate."""
        band = self._problem.band
        if self.rows == 1 or self.columns == 1 or math.isinf(band):
            return 0 if side < 0 else self.columns - 1
        reach = max(band, 0.5) * (max(self.rows, self.columns) - 1)
        column = (row * (self.columns - 1) + side * reach) / (self.rows - 1) + 2 * side
        return int(min(max(column, 0), self.columns - 1))


def _reject_bad_cost(cost: Tensor, chunk: _Chunk) -> None:
    """Raise a ValueError that names the first cell whose cost is NaN or −∞, if there is one."""
    for i, j in (~(cost > -math.inf)).nonzero()[:1].tolist():
        cell = chunk.rows.start + i, chunk.columns.start + j
        raise ValueError(f"cost must be finite or +inf, got {cost[i, j].item()} at cell {cell}")
