"""Sweeps of lattices on a GPU: arguments and launches of the kernels in :mod:`bellmax.backends.triton.table`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bellmax.backends.protocol import Sweeps
from bellmax.backends.triton.launching import launch, power_of_two
from bellmax.backends.triton.omega import CODES
from bellmax.backends.triton.sweeps import PartialSweeps
from bellmax.backends.triton.table import Plan, plan_of, table_backward, table_forward, table_tangents
from bellmax.programs.lattice import Arrays, LatticeProgram
from bellmax.regularizers import Regularizer, penalty_at_vertex
from bellmax.tensors import Tensors, wide_dtype

STRIPS = 1024, 256
"""Maximum columns of one launch, so that registers hold a row: for nodes with few incoming edges, and with many."""
_FEW_CHOICES = 4  # incoming edges of a node
_MAX_HISTORY = 32  # maximum number of vectors of earlier steps that a Triton program keeps in registers


class Lattice(PartialSweeps):
    """Sweeps of the lattices of a table."""

    program: LatticeProgram

    def __init__(self, program: LatticeProgram, others: Sweeps) -> None:
        super().__init__(program, others)
        self._plan = plan_of(program.table)
        self._has_terms = [bool(terms) for terms in program.table.terms]

    @property
    def _strip(self) -> int:
        """Maximum number of columns of one launch."""
        return STRIPS[self._plan.choices[-1] > _FEW_CHOICES]

    def takes(self, theta: Tensors) -> bool:
        """True if the kernels support the table and the batch is not empty."""
        fits = 0 < self._plan.first[-1] <= _MAX_HISTORY and self._plan.reach < self._strip
        return fits and theta[0].shape[0] > 0

    def _problem(self, theta: Tensors, index: Tensors, omega: Regularizer) -> _Problem:
        """Gather the scores of all slots by cell, with the arguments that all kernels share."""
        arrays, size = self.program.slot_scores(theta, index), self.program.size(theta, index)
        return _Problem(arrays, size, index, theta[0].shape[0], self._plan, self._strip, omega)

    # --- sweeps

    def _empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        shape = theta[0].shape[0], self._plan.states, *self.program.size(theta, index)
        return theta[0].new_empty(shape, dtype=wide_dtype(theta[0].device))

    def _value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        if all(self._plan.end) and self.program.size(theta, index)[1] <= self._strip:
            return self._values(theta, None, index, omega)
        return self._forward(theta, index, omega)[0]

    def _forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        tape = self._empty_tape(theta, index)
        return self._values(theta, tape, index, omega), tape

    def _values(self, theta: Tensors, tape: Tensor | None, index: Tensors, omega: Regularizer) -> Tensor:
        """Compute the value (B,) strip by strip, and fill the tape if it is not None.

        If paths end in a corner, the kernel writes the value; else Ω chooses among the ends on the tape.
        """
        value = theta[0].new_empty(theta[0].shape[0])
        problem = self._problem(theta, index, omega)
        wide = getattr(tl, str(wide_dtype(value.device)).removeprefix("torch."))
        for first in problem.strips:
            problem.launch(table_forward, (value, tape), (), first, WIDE=wide, IS_LATER=first > 0)
        if tape is None or all(self._plan.end):
            return value
        assert omega.kernel is not None
        ends = self._gather_ends(tape, problem.arrays, -math.inf, theta, index)
        extra = self.program.extra_nodes(theta, index)
        best: Tensor = omega.max(ends.flatten(1)).to(value.dtype) + extra * penalty_at_vertex(omega.kernel)
        return best if self._plan.sign > 0 else -best

    def _backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        problem = self._problem(theta, index, omega)
        along: Arrays = [None] * len(problem.arrays)
        return self._propagate_back(problem, theta, tape.contiguous(), None, seed, along, index, omega)

    def _hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Compute tangents of all nodes from left to right, then propagate masses and their changes back."""
        problem, along = self._problem(theta, index, omega), _contiguous(self.program.slot_tangents(z, index))
        tape, tangents = tape.contiguous(), torch.empty_like(tape)
        dtype = getattr(tl, str(seed.dtype).removeprefix("torch."))
        for first in problem.strips:
            options = {"along": along, "DTYPE": dtype, "IS_LATER": first > 0}
            problem.launch(table_tangents, (tape, tangents), (tuple(along),), first, **options)
        return self._propagate_back(problem, theta, tape, tangents, seed, along, index, omega)

    def _propagate_back(
        self, problem: _Problem, theta: Tensors, tape: Tensor, tangents: Tensor | None, seed: Tensor, along: Arrays,
        index: Tensors, omega: Regularizer,
    ) -> Tensors:  # fmt: skip
        """Propagate the seed from the ends to the start, and return gradients of θ or, with tangents, Hessian products.

        Strips run from right to left. ``edge`` passes the masses of moves that cross from a strip into the one before.
        If a score does not depend on the row, its gradient is summed over rows inside the kernel (``sums``).
        """
        orders, seed = 1 if tangents is None else 2, seed.to(theta[0].dtype).contiguous()
        rows, columns = problem.size
        gradients: Arrays = []
        sums, summed = [], 0
        for array, has_terms in zip(problem.arrays, self._has_terms, strict=True):
            is_sum = has_terms and array is not None and array.shape[1] < rows
            sums.append(summed if is_sum else -1)
            summed += is_sum
            shape = len(seed), 1 if is_sum else rows, columns
            gradients.append(seed.new_empty(shape) if has_terms and array is not None else None)
        ends = self._end_masses(problem, tape, tangents, seed, along, theta, index, omega)
        edge = None
        options: dict[str, Any] = {"along": along, "sums": (*sums, summed)}
        for first in reversed(problem.strips):
            edges = len(seed), orders * len(self._plan.moves), rows, self._plan.reach
            before = seed.new_empty(edges) if first > 0 else None
            tensors = tape, tangents, seed, ends, edge, before
            problem.launch(table_backward, tensors, (tuple(along), tuple(gradients)), first, **options)
            edge = before
        return self.program.slots_to_theta(gradients, theta, index)

    # --- ends that are not in a corner: as many as the grid has rows, columns or cells

    def _gather_ends(self, nodes: Tensor, arrays: Arrays, missing: float, theta: Tensors, index: Tensors) -> Tensor:
        """Numbers of nodes (B, states, N, M) plus end scores, at the ends of paths: (B, end states, N or 1, M or 1).

        A side has size 1 if paths end in its last row or column. Other cells get ``missing``.
        """
        count = self._plan.states
        total = nodes[:, self._plan.ends]
        scores = [arrays[len(arrays) - count + state] for state in self._plan.ends]
        total = torch.stack(
            [x if a is None else x + self._plan.sign * a for x, a in zip(total.unbind(1), scores, strict=True)], 1
        )
        total = total.masked_fill(~self.program.is_end(theta, index).unsqueeze(1), missing)
        for dim, is_last in enumerate(self._plan.end):
            if is_last:
                last = (self.program.lengths(theta, index)[:, dim] - 1).reshape(-1, 1, 1, 1)
                total = total.take_along_dim(last, 2 + dim)
        return total

    def _end_masses(
        self, problem: _Problem, tape: Tensor, tangents: Tensor | None, seed: Tensor, along: Arrays, theta: Tensors,
        index: Tensors, omega: Regularizer,
    ) -> Tensor | None:  # fmt: skip
        """Mass of each end: seed · q and, with tangents, its derivative, (B, 1 or 2 · end states, N or 1, M or 1).

        None if paths end in a corner, where the kernel reads the seed.
        """
        if all(self._plan.end):
            return None
        x = self._gather_ends(tape, problem.arrays, -math.inf, theta, index)
        q = omega.argmax(x.flatten(1))
        factors = [q]
        if tangents is not None:
            y = self._gather_ends(tangents, along, 0.0, theta, index).flatten(1).masked_fill(q == 0, 0)
            factors.append(omega.jacobian_product(q, y))
        masses = [factor.reshape(x.shape) * seed.reshape(-1, 1, 1, 1) for factor in factors]
        return torch.cat(masses, 1).to(seed.dtype).contiguous()


class _Problem:
    """The arguments that all kernels share, and the launches over strips of columns."""

    def __init__(
        self,
        arrays: Arrays,
        size: tuple[int, int],
        index: Tensors,
        batch: int,
        plan: Plan,
        strip: int,
        omega: Regularizer,
    ) -> None:
        assert omega.kernel is not None
        self.arrays, self.size, self.batch = _contiguous(arrays), size, batch
        self._region = [tensor.contiguous() for tensor in index[:2]] if index else [None, None]
        block = min(power_of_two(size[1], 32), strip)
        self.strips = range(0, size[1], block)
        read = [slot for slot, array in enumerate(arrays[: len(arrays) - plan.states]) if array is not None]
        self._plan = plan._replace(omega=CODES[omega.kernel], read=tuple(read))
        self._options = {"BLOCK": block, "num_warps": min(max(block // 32, 1), 8)}

    def _varying_dims(self, arrays: Arrays) -> tuple[int, ...]:
        """Bit set for each array: 4 if it varies along the batch, 2 along rows, 1 along columns; 0 if it is None."""
        shape = self.batch, *self.size
        bits = [0 if a is None else sum(4 >> d for d in range(3) if a.shape[d] == shape[d]) for a in arrays]
        return tuple(bits)

    def launch(
        self,
        kernel: Any,
        first: tuple[Any, ...],
        more: tuple[Any, ...],
        column: int,
        along: Arrays | None = None,
        sums: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        """Run a kernel on the strip that begins at ``column``: ``first``, the shared arguments, ``more``."""
        plan = self._plan._replace(kinds=(self._varying_dims(self.arrays), self._varying_dims(along or [])), sums=sums)
        more = *first[1:], *self._region, tuple(self.arrays), *more, *self.size, column
        launch(kernel, self.batch, first[0], *more, PLAN=plan, **self._options, **options)


def _contiguous(arrays: Arrays) -> Arrays:
    return [None if array is None else array.contiguous() for array in arrays]
