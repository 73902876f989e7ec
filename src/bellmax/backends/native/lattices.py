"""The sweeps of a lattice, run by the kernels of any table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, contiguous, empty_like, padded
from bellmax.programs.lattice import Arrays, LatticeProgram
from bellmax.programs.table import Table, Term
from bellmax.programs.values import reject_overflow
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MOST_STATES, _MOST_MOVES = 8, 16  # as in native/table/table.h
_MOST_AXES, _KINDS = 3, ("i", "j", "x", "y", "at")  # as in native/rows/rows.h


class NativeLattice:
    """By strips. Scores are read into one array for each slot that has some, or are the tensor itself where it has a
    window of the cells; kernels know arrays and moves alone."""

    check = None

    def __init__(self, program: LatticeProgram) -> None:
        self.program, table = program, program.table
        with torch._C._DisableTorchDispatch():  # the numbers are there even if torch.compile asks first
            self._moves = torch.tensor([move[:4] for move in table.moves], dtype=torch.int64).reshape(-1, 4)
            self._windows = torch.tensor([(0, 0, 0) if w is None else (1, *w) for w in program.windows])
        ends = (table.start, table.end)
        self._ends = [part for e in ends for part in (e.place, sum(1 << state for state in e.states))]

    @staticmethod
    def serves(program: LatticeProgram) -> bool:
        return program.table.states <= _MOST_STATES and len(program.table.moves) <= _MOST_MOVES

    def _call(self, name: str, first: Any, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> Any:
        rows, columns = self.program.size(theta, index)
        lengths, band = padded(index[:2], 2)
        own = self.program.table
        table = own.sense, rows, columns, own.states, self._moves, *self._ends, lengths, band
        assert omega.kernel is not None
        try:
            return call(name, first, *args, *table, *omega.kernel)
        except ValueError:
            self.program.check_index(theta, index)  # names the argument and the value
            raise

    def _arrays(self, theta: Tensors, index: Tensors) -> Arrays:
        return _contiguous(self.program.arrays(theta, index, in_windows=True))

    def _empty(self, arrays: Arrays) -> Arrays:
        """Room for numbers of the slots that have scores."""
        pairs = zip(self.program.table.terms, arrays, strict=True)
        return [torch.empty_like(a) if terms and a is not None else None for terms, a in pairs]

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        size = tape_size(self.program.table, *self.program.size(theta, index))
        return theta[0].new_empty((theta[0].shape[0], size), dtype=torch.float64)

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._forward(theta, theta[0].new_empty((theta[0].shape[0], 0), dtype=torch.float64), index, omega)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self.empty_tape(theta, index)
        return self._forward(theta, tape, index, omega), tape

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        value = theta[0].new_empty(theta[0].shape[0], dtype=torch.float64)
        arrays = self._arrays(theta, index)
        if not self._call("lattice_forward", arrays, theta, index, omega, value, tape, self._windows):
            self.program.check(theta, index)
            reject_overflow(value.to(theta[0].dtype), self.program.sense)
        return value.to(theta[0].dtype)

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        arrays = self._arrays(theta, index)
        gradients, seeds = self._empty(arrays), seed.double().contiguous()
        given = tape.contiguous(), seeds, gradients, self._windows
        self._call("lattice_backward", arrays, theta, index, omega, *given)
        return self.program.onto_tensors(gradients, theta, index, in_windows=True)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        arrays = self._arrays(theta, index)
        pairs = zip(arrays, self.program.changes(z, index, in_windows=True), strict=True)
        absent = self.program.table.absent
        along = _contiguous([None if a is None or d is None else d.masked_fill(a == absent, 0) for a, d in pairs])
        products, seeds = self._empty(arrays), seed.double().contiguous()
        given = tape.contiguous(), seeds, along, products, self._windows
        self._call("lattice_hessian", arrays, theta, index, omega, *given)
        return self.program.onto_tensors(products, theta, index, in_windows=True)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths, arrays = self.program.empty_paths(theta, index, uniforms.shape[1]), self._arrays(theta, index)
        given = tape.contiguous(), uniforms.contiguous(), paths, self._windows
        self._call("lattice_sample", arrays, theta, index, omega, *given)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the best paths of a lattice are found on its graph")


class NativeRows(NativeLattice):
    """By rows, where every move leads to a later one. Kernels read scores, labels and masks themselves, and write
    gradients of θ's shapes."""

    def __init__(self, program: LatticeProgram) -> None:
        super().__init__(program)
        reads = program.table.reads
        with torch._C._DisableTorchDispatch():
            self._terms = torch.tensor([_as_numbers(*read) for read in reads]).reshape(-1, 3 + 3 * _MOST_AXES)
        self._coefficients = [term.coefficient for _, term, _ in reads]

    @staticmethod
    def serves(program: LatticeProgram) -> bool:
        return NativeLattice.serves(program) and all(move.di > 0 for move in program.table.moves)

    def _sweep(self, name: str, first: Tensor, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> Any:
        integers, labels = contiguous(index[2:]), self.program.table.labels
        read = contiguous(theta), integers[:labels], integers[labels:]
        return self._call(name, first, theta, index, omega, *read, *args, self._terms, self._coefficients)

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        size = rows_tape_size(self.program.table, *self.program.size(theta, index))
        return theta[0].new_empty((theta[0].shape[0], size), dtype=torch.float64)

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        value = theta[0].new_empty(theta[0].shape[0], dtype=torch.float64)
        if not self._sweep("rows_forward", value, theta, index, omega, tape):
            self.program.check(theta, index)
            reject_overflow(value.to(theta[0].dtype), self.program.sense)
        return value.to(theta[0].dtype)

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        gradients = empty_like(theta)
        self._sweep("rows_backward", tape.contiguous(), theta, index, omega, seed.double().contiguous(), gradients)
        return gradients

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        products, seeds = empty_like(theta), seed.double().contiguous()
        self._sweep("rows_hessian", tape.contiguous(), theta, index, omega, seeds, contiguous(z), products)
        return products

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        self._sweep("rows_sample", tape.contiguous(), theta, index, omega, uniforms.contiguous(), paths)
        return paths


def _as_numbers(slot: int, term: Term, is_mask: bool) -> list[int]:
    axes = [part for axis in term.axes for part in (_KINDS.index(axis.kind), axis.offset, axis.place)]
    return [slot, term.score, is_mask, *axes, *[-1, 0, 0] * (_MOST_AXES - len(term.axes))]


def _contiguous(arrays: Arrays) -> Arrays:
    return [None if array is None else array.contiguous() for array in arrays]


def tape_size(table: Table, rows: int, columns: int, first_row: int = 0) -> int:
    """As in native/table: values of the last rows of each strip, the steps before each chunk, and the ends.

    If these are a block of a larger lattice, its first row is ``first_row``.
    """
    strip = 64
    steps = [(move.di, move.dj) for move in table.moves if move.di < first_row + rows and move.dj < columns]
    reach, history = max((di for di, _ in steps), default=0), max((di + dj for di, dj in steps), default=0)
    strips, chunks = (rows + strip - 1) // strip, (columns + 2 * strip - 2) // strip
    kept = strips * table.states * (min(reach, strip) * columns + chunks * history * strip)
    return 1 + kept + _ends_size(table, rows, columns)


def rows_tape_size(table: Table, rows: int, columns: int) -> int:
    """As in native/rows: the rows before each block, and the ends."""
    group = 8
    reach = max((m.di for m in table.moves if m.di < rows and m.dj < columns), default=0)
    block = max(group, -(-reach // group) * group)
    kept = (rows + block - 1) // block * reach * table.states * ((columns + group - 1) // group * group)
    return 1 + kept + _ends_size(table, rows, columns)


def _ends_size(table: Table, rows: int, columns: int) -> int:
    lanes = 4
    by_row, by_column = (table.end.place in (place, "anywhere") for place in ("column", "row"))
    ends = (rows if by_row else 1) * (columns if by_column else 1) * len(table.end.states)
    return (ends + lanes - 1) // lanes * lanes
