"""Sweeps of lattices by the native kernels, which take any table: by strips of rows, or row by row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bellmax.backends.native.loading import call, contiguous, empty_like
from bellmax.modes import cached_when_eager
from bellmax.programs.checks import reject_overflow
from bellmax.programs.lattice import Arrays, LatticeProgram
from bellmax.programs.table import PLACES, Table, Term
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MAX_STATES, _MAX_MOVES = 8, 16  # as in native/table/table.h
_MAX_AXES, _KINDS = 3, ("i", "j", "x", "y", "at")  # as in native/rows/rows.h


class NativeLattice:
    """Sweeps by strips of rows.

    The kernels read one array of scores for each slot. If every slot reads one tensor by cell, the arrays are θ
    itself. Otherwise the terms of each slot are summed into a new array.
    """

    check = None

    def __init__(self, program: LatticeProgram) -> None:
        self.program = program
        tensors = _tensors_of_slots(program)
        self._reads_theta = tensors is not None
        self._table = table_bytes(program.table, tensors or range(len(program.windows)), program.windows)
        self._has_move_scores = any(move.terms for move in program.table.moves)

    @staticmethod
    def serves(program: LatticeProgram) -> bool:
        """True if the kernels support the table."""
        return program.table.states <= _MAX_STATES and len(program.table.moves) <= _MAX_MOVES

    def _call(self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> Any:
        """Call a kernel: ``args``, then the table, the grid and Ω. θ and the index give the size of the grid."""
        kernel = omega.kernel
        assert kernel is not None
        rows, columns = self.program.size(theta, index)
        lengths, band = contiguous(index[:2]) if index else (None, None)
        try:
            return call(name, *args, self._table, rows, columns, lengths, band, *kernel)
        except ValueError:
            self.program.check_index(theta, index)  # raises a message with the argument and the value
            raise

    def _arrays(self, theta: Tensors, index: Tensors) -> Arrays:
        """The arrays that the kernels read: θ, or the score of each slot by cell."""
        if self._reads_theta:
            return [t.contiguous() for t in theta]
        return _contiguous(self.program.slot_scores(theta, index, in_windows=True))

    def _tangents(self, z: Tensors, arrays: Arrays, index: Tensors) -> Arrays:
        """The derivative of :meth:`_arrays` along z; 0 where a move is forbidden."""
        if self._reads_theta and not self._has_move_scores:
            return [t.contiguous() for t in z]
        tangents = z if self._reads_theta else self.program.slot_tangents(z, index, in_windows=True)
        absent = self.program.table.absent
        pairs = zip(arrays, tangents, strict=True)
        return _contiguous([None if a is None or d is None else d.masked_fill(a == absent, 0) for a, d in pairs])

    def _empty_gradients(self, arrays: Arrays) -> Arrays:
        """Uninitialized arrays for gradients, in the shapes of ``arrays``; None for a slot without terms."""
        if self._reads_theta:
            return [torch.empty_like(a) for a in arrays if a is not None]
        pairs = zip(self.program.table.terms, arrays, strict=True)
        return [torch.empty_like(a) if terms and a is not None else None for terms, a in pairs]

    def _onto_theta(self, gradients: Arrays, theta: Tensors, index: Tensors) -> Tensors:
        """Convert gradients of the arrays to gradients of θ."""
        if self._reads_theta:
            return [gradient for gradient in gradients if gradient is not None]
        return self.program.slots_to_theta(gradients, theta, index, in_windows=True)

    @cached_when_eager
    def _tape_size(self, rows: int, columns: int) -> int:
        return tape_size(self.program.table, rows, columns)

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        return _new_tape(theta, self._tape_size(*self.program.size(theta, index)))

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._forward(theta, _new_tape(theta, 0), index, omega)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self.empty_tape(theta, index)
        return self._forward(theta, tape, index, omega), tape

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        """Compute the value (B,) and fill the tape, unless it is empty. Raises ``ValueError`` for invalid scores."""
        value = theta[0].new_empty(theta[0].shape[0])
        if not self._run_forward(theta, value, tape, index, omega):
            self.program.check(theta, index)
            reject_overflow(value, self.program.sense)
        return value

    def _run_forward(self, theta: Tensors, value: Tensor, tape: Tensor, index: Tensors, omega: Regularizer) -> Any:
        return self._call("lattice_forward", theta, index, omega, self._arrays(theta, index), value, tape)

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        arrays = self._arrays(theta, index)
        gradients = self._empty_gradients(arrays)
        args = arrays, tape.contiguous(), seed, gradients
        self._call("lattice_backward", theta, index, omega, *args)
        return self._onto_theta(gradients, theta, index)

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        arrays = self._arrays(theta, index)
        products = self._empty_gradients(arrays)
        args = arrays, tape.contiguous(), seed, self._tangents(z, arrays, index), products
        self._call("lattice_hessian", theta, index, omega, *args)
        return self._onto_theta(products, theta, index)

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        args = self._arrays(theta, index), tape.contiguous(), uniforms.contiguous(), paths
        self._call("lattice_sample", theta, index, omega, *args)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the best paths of a lattice are found on its graph")


class NativeRows(NativeLattice):
    """Sweeps row by row, for tables whose moves all lead to a later row.

    The kernels read scores, labels and masks themselves, and write gradients of θ's shapes.
    """

    def __init__(self, program: LatticeProgram) -> None:
        self.program, reads = program, program.table.reads
        self._table = table_bytes(program.table)
        with torch._C._DisableTorchDispatch():  # a real tensor even if torch.compile creates this object
            self._terms = torch.tensor([_read_as_integers(*read) for read in reads]).reshape(-1, 3 + 3 * _MAX_AXES)
        self._coefficients = [term.coefficient for _, term, _ in reads]

    @staticmethod
    def serves(program: LatticeProgram) -> bool:
        """True if the kernels support the table and no move stays in its row."""
        return NativeLattice.serves(program) and all(move.di > 0 for move in program.table.moves)

    def _sweep(self, name: str, first: Tensor, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> Any:
        """Call a kernel that reads θ, labels and masks by the terms of the table."""
        integers, labels = contiguous(index[2:]), self.program.table.labels
        tensors = contiguous(theta), integers[:labels], integers[labels:]
        return self._call(name, theta, index, omega, first, *tensors, *args, self._terms, self._coefficients)

    @cached_when_eager
    def _tape_size(self, rows: int, columns: int) -> int:
        return rows_tape_size(self.program.table, rows, columns)

    def _run_forward(self, theta: Tensors, value: Tensor, tape: Tensor, index: Tensors, omega: Regularizer) -> Any:
        return self._sweep("rows_forward", value, theta, index, omega, tape)

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        gradients = empty_like(theta)
        self._sweep("rows_backward", tape.contiguous(), theta, index, omega, seed, gradients)
        return gradients

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        products = empty_like(theta)
        args = seed, contiguous(z), products
        self._sweep("rows_hessian", tape.contiguous(), theta, index, omega, *args)
        return products

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        self._sweep("rows_sample", tape.contiguous(), theta, index, omega, uniforms.contiguous(), paths)
        return paths


def table_bytes(
    table: Table, arrays: Sequence[int | None] = (), windows: Sequence[tuple[int, int] | None] = ()
) -> bytes:
    """A table as native/bind/lattice.cpp reads it.

    Args:
        table: The table.
        arrays: The number of the array that each slot reads, or None; empty for kernels that read terms.
        windows: The first cell of each slot whose array is a window of the cells, or None.

    """
    ends = [n for e in (table.start, table.end) for n in (PLACES.index(e.place), sum(1 << k for k in e.states))]
    integers = [table.sense, table.states, *ends, len(table.moves), *(n for move in table.moves for n in move[:4])]
    for number, window in zip(arrays, windows, strict=True):
        integers += [-1 if number is None else number, *((0, 0, 0) if window is None else (1, *window))]
    return array("q", integers).tobytes()


def _tensors_of_slots(program: LatticeProgram) -> list[int | None] | None:
    """The number of the tensor that each slot reads as it is, None for a slot without a score.

    The result is None if scores of a slot must be added up or masked, or if two slots read the same tensor.
    """
    tensors: list[int | None] = []
    for terms, window in zip(program.table.terms, program.windows, strict=True):
        if terms and window is None:
            return None
        tensors.append(terms[0].score if terms else None)
    has_masks = any(move.where is not None for move in program.table.moves)
    once = sorted(n for n in tensors if n is not None) == list(range(len(program.table.scores)))
    return tensors if once and not has_masks else None


def _new_tape(theta: Tensors, size: int) -> Tensor:
    """An uninitialized tape (B, size). Size 0 asks a kernel for the value only."""
    return theta[0].new_empty((theta[0].shape[0], size), dtype=torch.float64)


def _read_as_integers(slot: int, term: Term, is_mask: bool) -> list[int]:
    """A read of a tensor as 3 + 3 · _MAX_AXES integers, see native/rows/rows.h."""
    axes = [n for axis in term.axes for n in (_KINDS.index(axis.kind), axis.offset, axis.place)]
    return [slot, term.score, is_mask, *axes, *[-1, 0, 0] * (_MAX_AXES - len(term.axes))]


def _contiguous(arrays: Arrays) -> Arrays:
    return [None if array is None else array.contiguous() for array in arrays]


def tape_size(table: Table, rows: int, columns: int, first_row: int = 0) -> int:
    """Numbers on the tape of one member, as native/table counts them.

    The tape holds one number in front, the last rows of each strip, the steps before each chunk, and the ends. If the
    grid is a block of a larger lattice, ``first_row`` is the row where it begins.
    """
    strip = 64
    steps = [(move.di, move.dj) for move in table.moves if move.di < first_row + rows and move.dj < columns]
    reach, history = max((di for di, _ in steps), default=0), max((di + dj for di, dj in steps), default=0)
    strips, chunks = (rows + strip - 1) // strip, (columns + 2 * strip - 2) // strip
    numbers = strips * table.states * (min(reach, strip) * columns + chunks * history * strip)
    return 1 + numbers + _ends_size(table, rows, columns)


def rows_tape_size(table: Table, rows: int, columns: int) -> int:
    """Numbers on the tape of one member, as native/rows counts them: one, the rows before each block, and the ends."""
    group = 8
    reach = max((m.di for m in table.moves if m.di < rows and m.dj < columns), default=0)
    block = max(group, -(-reach // group) * group)
    numbers = (rows + block - 1) // block * reach * table.states * ((columns + group - 1) // group * group)
    return 1 + numbers + _ends_size(table, rows, columns)


def _ends_size(table: Table, rows: int, columns: int) -> int:
    """Numbers on a tape for the ends, rounded up to whole vectors. It must equal EndList::size() in C++."""
    lanes = 4
    by_row, by_column = (table.end.place in (place, "anywhere") for place in ("column", "row"))
    ends = (rows if by_row else 1) * (columns if by_column else 1) * len(table.end.states)
    return (ends + lanes - 1) // lanes * lanes
