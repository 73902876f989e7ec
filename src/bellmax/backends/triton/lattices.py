"""Lattices by the kernels of :mod:`bellmax.backends.triton.table`: what they are given, and what comes back."""

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
"""The most columns of a launch, for nodes that choose from few others and from many: so that registers hold them."""
_FEW = 4
_DEEPEST = 32  # how many vectors of earlier steps a program may hold


class Lattice(PartialSweeps):
    """Sweeps of the lattices of a table."""

    program: LatticeProgram

    def __init__(self, program: LatticeProgram, others: Sweeps) -> None:
        super().__init__(program, others)
        self._plan = plan_of(program.table)
        self._has_terms = [bool(terms) for terms in program.table.terms]

    @property
    def _strip(self) -> int:
        return STRIPS[self._plan.choices[-1] > _FEW]

    def takes(self, theta: Tensors) -> bool:
        fits = 0 < self._plan.first[-1] <= _DEEPEST and self._plan.reach < self._strip
        return fits and theta[0].shape[0] > 0

    def _problem(self, theta: Tensors, index: Tensors, omega: Regularizer) -> _Problem:
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
        value = theta[0].new_empty(theta[0].shape[0])
        problem = self._problem(theta, index, omega)
        wide = getattr(tl, str(wide_dtype(value.device)).removeprefix("torch."))
        for first in problem.strips:
            problem.launch(table_forward, (value, tape), (), first, WIDE=wide, IS_LATER=first > 0)
        if tape is None or all(self._plan.end):
            return value
        assert omega.kernel is not None
        ends = self._at_ends(tape, problem.arrays, -math.inf, theta, index)
        extra = self.program.extra_nodes(theta, index)
        best: Tensor = omega.max(ends.flatten(1)).to(value.dtype) + extra * penalty_at_vertex(omega.kernel)
        return best if self._plan.sign > 0 else -best

    def _backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        problem = self._problem(theta, index, omega)
        along: Arrays = [None] * len(problem.arrays)
        return self._walk_back(problem, theta, tape.contiguous(), None, seed, along, index, omega)

    def _hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        """Tangents, then the walk back, which reads what the launches before it wrote."""
        problem, along = self._problem(theta, index, omega), _contiguous(self.program.slot_tangents(z, index))
        tape, tangents = tape.contiguous(), torch.empty_like(tape)
        dtype = getattr(tl, str(seed.dtype).removeprefix("torch."))
        for first in problem.strips:
            options = {"along": along, "DTYPE": dtype, "IS_LATER": first > 0}
            problem.launch(table_tangents, (tape, tangents), (tuple(along),), first, **options)
        return self._walk_back(problem, theta, tape, tangents, seed, along, index, omega)

    def _walk_back(
        self, problem: _Problem, theta: Tensors, tape: Tensor, tangents: Tensor | None, seed: Tensor, along: Arrays,
        index: Tensors, omega: Regularizer,
    ) -> Tensors:  # fmt: skip
        parts, seed = 1 if tangents is None else 2, seed.to(theta[0].dtype).contiguous()
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
            edges = len(seed), parts * len(self._plan.moves), rows, self._plan.reach
            before = seed.new_empty(edges) if first > 0 else None
            given = tape, tangents, seed, ends, edge, before
            problem.launch(table_backward, given, (tuple(along), tuple(gradients)), first, **options)
            edge = before
        return self.program.slots_to_theta(gradients, theta, index)

    # --- ends that are not in a corner: as many as the grid has rows, columns or cells

    def _at_ends(self, nodes: Tensor, arrays: Arrays, missing: float, theta: Tensors, index: Tensors) -> Tensor:
        """What nodes (B, states, N, M) have where paths may end, and the scores there, (B, states, N or 1, M or 1)."""
        count = self._plan.states
        total = nodes[:, self._plan.ends]
        parts = [arrays[len(arrays) - count + state] for state in self._plan.ends]
        total = torch.stack(
            [x if a is None else x + self._plan.sign * a for x, a in zip(total.unbind(1), parts, strict=True)], 1
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
        """The seed spread over the ends and, with tangents, its change, (B, parts · states, N or 1, M or 1)."""
        if all(self._plan.end):
            return None
        x = self._at_ends(tape, problem.arrays, -math.inf, theta, index)
        q = omega.argmax(x.flatten(1))
        found = [q]
        if tangents is not None:
            y = self._at_ends(tangents, along, 0.0, theta, index).flatten(1).masked_fill(q == 0, 0)
            found.append(omega.jacobian_product(q, y))
        masses = [part.reshape(x.shape) * seed.reshape(-1, 1, 1, 1) for part in found]
        return torch.cat(masses, 1).to(seed.dtype).contiguous()


class _Problem:
    """The arguments that all kernels take."""

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
        self._region = [part.contiguous() for part in index[:2]] if index else [None, None]
        block = min(power_of_two(size[1], 32), strip)
        self.strips = range(0, size[1], block)
        read = [slot for slot, array in enumerate(arrays[: len(arrays) - plan.states]) if array is not None]
        self._plan = plan._replace(omega=CODES[omega.kernel], read=tuple(read))
        self._options = {"BLOCK": block, "num_warps": min(max(block // 32, 1), 8)}

    def _kinds(self, arrays: Arrays) -> tuple[int, ...]:
        """Along which of batch, rows and columns each has numbers of its own."""
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
        plan = self._plan._replace(kinds=(self._kinds(self.arrays), self._kinds(along or [])), sums=sums)
        more = *first[1:], *self._region, tuple(self.arrays), *more, *self.size, column
        launch(kernel, self.batch, first[0], *more, PLAN=plan, **self._options, **options)


def _contiguous(arrays: Arrays) -> Arrays:
    return [None if array is None else array.contiguous() for array in arrays]
