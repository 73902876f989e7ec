"""Sweeps of lattices by the native kernels."""

from __future__ import annotations

from array import array
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import bellmax.backends.native.loading as loading
from bellmax.backends.native.loading import call, contiguous, empty_like
from bellmax.backends.native.sweeps import unit_of
from bellmax.programs.checks import overflow_error, reject_overflow
from bellmax.programs.lattice import LatticeProgram
from bellmax.programs.table import PLACES, Table, Term
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MAX_STATES, _MAX_MOVES, _MAX_AXES = 8, 16, 3  # as in native/lattice/lattice.h
_KINDS = "i", "j", "x", "y", "at"  # the order of Follows there


_NO_INTEGERS: tuple[None, None, list[Tensor], list[Tensor]] = (None, None, [], [])


class NativeLattice:
    """Sweeps of lattices with one table.

    The kernels read scores, labels and masks themselves, and write gradients in the shapes of θ. They sweep row by row
    if every move leads to a later row, else by strips of rows.
    """

    check = None

    def __init__(self, program: LatticeProgram) -> None:
        self.program = program
        size = row_tape_size if all(move.di > 0 for move in program.table.moves) else strip_tape_size
        self._tape_size = lru_cache(maxsize=256)(partial(size, program.table))
        coefficients = tuple(float(term.coefficient) for _, term, _ in program.table.reads)
        assert loading.kernels is not None
        self._prepared = loading.kernels.prepare_lattice(table_bytes(program.table), coefficients)

    @staticmethod
    def serves(program: LatticeProgram) -> bool:
        """True if the kernels support the table."""
        return program.table.states <= _MAX_STATES and len(program.table.moves) <= _MAX_MOVES

    def _call(self, name: str, theta: Tensors, index: Tensors, omega: Regularizer, *args: Any) -> Any:
        """Call a kernel with the scores, the index and Ω, and then ``args``."""
        kernel = omega.kernel
        assert kernel is not None
        size = self.program.size(theta, index)
        lengths, band, labels, masks = self._integers(index) if index else _NO_INTEGERS
        scores = [t.contiguous() for t in theta]
        try:
            return call(name, self._prepared, *size, lengths, band, *kernel, scores, labels, masks, *args)
        except ValueError:
            self.program.check_index(theta, index)  # raises a message with the argument and the value
            raise

    def _integers(self, index: Tensors) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Return lengths, bands, labels and masks."""
        lengths, band, *others = contiguous(index)
        count = self.program.table.labels
        return lengths, band, others[:count], others[count:]

    def empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        rows, columns = self.program.size(theta, index)
        is_known = type(rows) is type(columns) is int  # torch.compile has symbols, which cannot be keys
        size = self._tape_size if is_known else self._tape_size.__wrapped__
        return _new_tape(theta, size(rows, columns))

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._forward(theta, _new_tape(theta, 0), index, omega)

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self.empty_tape(theta, index)
        return self._forward(theta, tape, index, omega), tape

    def _forward(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        """Compute the value (B,) and fill the tape, unless it is empty. Raises ``ValueError`` for invalid scores."""
        value = theta[0].new_empty(theta[0].shape[0])
        if not self._call("lattice_forward", theta, index, omega, value, tape):
            self.program.check(theta, index)
            reject_overflow(value, self.program.sense)
        return value

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        gradients = empty_like(theta)
        self._call("lattice_backward", theta, index, omega, tape.contiguous(), seed, gradients)
        return gradients

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        products = empty_like(theta)
        self._call("lattice_hessian", theta, index, omega, tape.contiguous(), seed, contiguous(z), products)
        return products

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        paths = self.program.empty_paths(theta, index, uniforms.shape[1])
        self._call("lattice_sample", theta, index, omega, tape.contiguous(), uniforms.contiguous(), paths)
        return paths

    def topk(self, theta: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the best paths of a lattice are found on its graph")

    @cached_property
    def _open_ended(self) -> NativeLattice:
        return NativeLattice(self.program.open_ended)

    def node_values(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Return the values of all nodes as ends of the lattice in which paths may end at any node."""
        (rows, columns), table = self.program.size(theta, index), self._open_ended.program.table
        values = _new_tape(theta, _ends_size(table, rows, columns))
        if not self._open_ended._call("lattice_end_values", theta, index, omega, values):
            self.program.check(theta, index)
            raise overflow_error(theta[0].dtype)  # all scores were valid, so a sum of scores overflowed
        by_state: Tensor = values[:, : table.states * rows * columns].unflatten(1, (table.states, rows * columns))
        by_node = by_state.mT.reshape(len(values), *self.program.node_shape(theta, index))
        return (by_node * (table.sense / unit_of(omega))).to(theta[0].dtype)

    def max_marginals(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        best = empty_like(theta[:1])
        if not self._call("lattice_max_marginals", theta, index, omega, best):
            self.program.check(theta, index)
            raise overflow_error(best[0].dtype)  # all scores were valid, so a sum of scores overflowed
        return best[0]


def table_bytes(table: Table) -> bytes:
    """Return a table and its terms as native/bind/lattice.cpp reads them."""
    ends = [n for e in (table.start, table.end) for n in (PLACES.index(e.place), sum(1 << k for k in e.states))]
    integers = [table.sense, table.states, *ends, len(table.moves), *(n for move in table.moves for n in move[:4])]
    for slot, term, is_mask in table.reads:
        integers += _read_as_integers(slot, term, is_mask)
    return array("q", integers).tobytes()


def _new_tape(theta: Tensors, size: int) -> Tensor:
    """An uninitialized tape (B, size). Size 0 asks a kernel for the value only."""
    return theta[0].new_empty((theta[0].shape[0], size), dtype=torch.float64)


def _read_as_integers(slot: int, term: Term, is_mask: bool) -> list[int]:
    """A read of a tensor as 3 + 3 · _MAX_AXES integers, see native/bind/lattice.cpp."""
    axes = [n for axis in term.axes for n in (_KINDS.index(axis.kind), axis.offset, axis.place)]
    return [slot, term.score, is_mask, *axes, *[0, 0, 0] * (_MAX_AXES - len(term.axes))]


def strip_tape_size(table: Table, rows: int, columns: int, first_row: int = 0) -> int:
    """Numbers on the tape of one member, as the kernels count them for sweeps by strips.

    The tape holds one number in front, the last rows of each strip, the steps before each chunk, and the ends. If the
    grid is a block of a larger lattice, ``first_row`` is the row where it begins.
    """
    strip = 64
    steps = [(move.di, move.dj) for move in table.moves if move.di < first_row + rows and move.dj < columns]
    reach, history = max((di for di, _ in steps), default=0), max((di + dj for di, dj in steps), default=0)
    strips, chunks = (rows + strip - 1) // strip, (columns + 2 * strip - 2) // strip
    numbers = strips * table.states * (min(reach, strip) * columns + chunks * history * strip)
    return 1 + numbers + _ends_size(table, rows, columns)


def row_tape_size(table: Table, rows: int, columns: int) -> int:
    """Numbers on the tape of one member, as the kernels count them for sweeps by rows.

    The tape holds one number in front, the rows before each block, and the ends.
    """
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
