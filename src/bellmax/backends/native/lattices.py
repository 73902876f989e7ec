"""The sweeps of a lattice, run by the kernels of any table."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bellmax.backends.native.loading import call
from bellmax.layouts.lattice import Arrays, LatticeLayout
from bellmax.layouts.table import Table
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MOST_STATES, _MOST_MOVES = 8, 16  # as in native/table/table.h


class NativeLattice:
    """Scores are read into one array for each slot that has some; kernels know arrays and moves alone."""

    check = None

    def __init__(self, layout: LatticeLayout) -> None:
        self.layout, table = layout, layout.table
        with torch._C._DisableTorchDispatch():  # the numbers are there even if torch.compile asks first
            self._moves = torch.tensor([move[:4] for move in table.moves], dtype=torch.int64).reshape(-1, 4)
        ends = (table.start, table.end)
        self._ends = [part for e in ends for part in (e.place, sum(1 << state for state in e.states))]

    @staticmethod
    def serves(layout: LatticeLayout) -> bool:
        return layout.table.states <= _MOST_STATES and len(layout.table.moves) <= _MOST_MOVES

    def _call(self, name: str, arrays: Arrays, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> Any:
        rows, columns = self.layout.size(theta, index)
        lengths, band = (t.contiguous() for t in index[:2])
        table = rows, columns, self.layout.table.states, self._moves, *self._ends, lengths, band
        assert omega.kernel is not None
        try:
            return call(name, arrays, *args, *table, *omega.kernel)
        except ValueError:
            self.layout.check_index(theta, index)  # names the argument and the value
            raise

    def _arrays(self, theta: Tensors, index: Tensors) -> Arrays:
        return _contiguous(self.layout.arrays(theta, index))

    def _empty(self, arrays: Arrays) -> Arrays:
        """Room for numbers of the slots that have scores."""
        pairs = zip(self.layout.table.terms, arrays, strict=True)
        return [torch.empty_like(a) if terms and a is not None else None for terms, a in pairs]

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        size = tape_size(self.layout.table, *self.layout.size(theta, index))
        return theta[0].new_empty((theta[0].shape[0], size), dtype=torch.float64)

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._forward(theta, theta[0].new_empty((theta[0].shape[0], 0), dtype=torch.float64), index, omega)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self.empty_tape(theta, index)
        return self._forward(theta, tape, index, omega), tape

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        value = theta[0].new_empty(theta[0].shape[0], dtype=torch.float64)
        if not self._call("lattice_forward", self._arrays(theta, index), theta, index, omega, value, tape):
            self.layout.check(theta, index)
        return value.to(theta[0].dtype)

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        arrays = self._arrays(theta, index)
        gradients, seeds = self._empty(arrays), seed.double().contiguous()
        self._call("lattice_backward", arrays, theta, index, omega, tape.contiguous(), seeds, gradients)
        return self.layout.onto_scores(gradients, theta, index)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        arrays = self._arrays(theta, index)
        pairs = zip(arrays, self.layout.changes(z, index), strict=True)
        along = _contiguous([None if a is None or d is None else _finite(d, a) for a, d in pairs])
        products, seeds = self._empty(arrays), seed.double().contiguous()
        self._call("lattice_hessian", arrays, theta, index, omega, tape.contiguous(), seeds, along, products)
        return self.layout.onto_scores(products, theta, index)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths, arrays = self.layout.empty_paths(theta, index, uniforms.shape[1]), self._arrays(theta, index)
        self._call("lattice_sample", arrays, theta, index, omega, tape.contiguous(), uniforms.contiguous(), paths)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the best paths of a lattice are found on its graph")


def _finite(direction: Tensor, array: Tensor) -> Tensor:
    """A direction, with 0 where there is no score to change."""
    return torch.where(array == -math.inf, 0, direction)


def _contiguous(arrays: Arrays) -> Arrays:
    return [None if array is None else array.contiguous() for array in arrays]


def tape_size(table: Table, rows: int, columns: int) -> int:
    """As in native/table: values of the last rows of each strip, the steps before each chunk, and the ends."""
    strip, lanes = 64, 4
    steps = [(move.di, move.dj) for move in table.moves if move.di < rows and move.dj < columns]
    reach, history = max((di for di, _ in steps), default=0), max((di + dj for di, dj in steps), default=0)
    strips, chunks = (rows + strip - 1) // strip, (columns + 2 * strip - 2) // strip
    kept = strips * table.states * (min(reach, strip) * columns + chunks * history * strip)
    by_row, by_column = (table.end.place in (place, "anywhere") for place in ("column", "row"))
    ends = (rows if by_row else 1) * (columns if by_column else 1) * len(table.end.states)
    return 1 + kept + (ends + lanes - 1) // lanes * lanes
