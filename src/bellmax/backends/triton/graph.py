"""The sweeps of a graph or a hypergraph: a launch a level, a lane a node of one member of the batch.

The tape is the reference's: the values of all nodes, (B, N), in the wide dtype. Going back, a node sums what the edges
out of it carry, which launches before have written, and writes what the edges into it carry: no two lanes write to one
place. A graph where some node has more edges than a tile can hold is the reference's to sweep.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import bellmax.backends.reference.graph as reference
from bellmax.backends.triton.launching import launch, power_of_two
from bellmax.backends.triton.omega import CODES, jacobian_product, smooth_max
from bellmax.backends.triton.sweeps import PartialSweeps
from bellmax.backends.triton.table import argmax_of, changes, without_top
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MOST_EDGES = 4096
_THREADS = 128
_SIZES = ["begin", "end", "batch", "nodes", "width", "edges", "arity"]


class Levels(NamedTuple):
    """A graph as launches take it."""

    bounds: list[tuple[int, int, int]]  # of each level: its first node, the first after it, the most edges into one
    arity: int  # the most tails of an edge
    tail: Tensor
    tail_offset: Tensor | None  # None: one tail an edge
    weight: Tensor  # of a slot
    out_offset: Tensor  # of a node, in
    out: Tensor  # the edges out of it
    by_weight: tuple[Tensor, Tensor] | None  # the same of weights, where edges share them


_known = WeakTensorKeyDictionary()


def levels_of(index: Tensors) -> Levels:
    """Found once for each graph: the host reads its integers."""
    found: Levels | None = _known.get(index[0])
    if found is None:
        found = _known[index[0]] = _find_levels(index)
    return found


def _find_levels(index: Tensors) -> Levels:
    offset, tail, edge, group, *rest = (part.cpu().numpy().astype(np.int64) for part in index)
    tail_offset = rest[0] if rest else np.arange(len(tail) + 1)
    level = np.zeros(len(offset) - 1, dtype=np.int64)
    first = 0 if rest else 1  # not the start of a graph
    for a, b in pairwise(group[first:]):
        tails = tail[tail_offset[offset[a]] : tail_offset[offset[b]]]
        level[a:b] = 1 + level[tails].max() if len(tails) else 0
    rises, degree = np.flatnonzero(np.diff(level[first:], prepend=-1, append=-1)) + first, np.diff(offset)
    bounds = [(int(a), int(b), int(degree[a:b].max())) for a, b in pairwise(rises)]
    owner = np.repeat(edge, np.diff(tail_offset))
    device = index[0].device
    out_offset, out = _lists(tail, owner, len(level), device)
    return Levels(
        bounds,
        int(np.diff(tail_offset).max(initial=0)),
        index[1],
        index[4] if rest else None,
        index[5] if len(rest) > 1 else index[2],
        out_offset,
        out,
        _lists(rest[1], edge, int(rest[1].max()) + 1, device) if len(rest) > 1 else None,
    )


def _lists(
    of: np.ndarray[Any, Any], what: np.ndarray[Any, Any], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Things by what they are of: where the list of each begins, then where the last one ends; and the lists."""
    order = np.argsort(of, kind="stable")
    offset = np.searchsorted(of[order], np.arange(count + 1))
    begins, entries = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (offset, what[order]))
    return begins, entries


# --- kernels


@triton.jit
def _lanes(begin: tl.tensor, end: tl.tensor, batch: tl.tensor, LANES: tl.constexpr) -> tl.tuple:
    """The member of the batch and the node of each lane, and whether there is one."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    b = lane // (end - begin)
    return tl.minimum(b, batch - 1), begin + lane % (end - begin), b < batch


@triton.jit
def _slots(offset: tl.tensor, node: tl.tensor, real: tl.tensor, DEGREE: tl.constexpr) -> tl.tuple:
    """The slots of the edges into the node of each lane, (DEGREE, lanes), and whether there is one."""
    first = tl.load(offset + node)
    slot = first[None, :] + tl.arange(0, DEGREE)[:, None]
    return slot, (slot < tl.load(offset + node + 1)[None, :]) & real[None, :]


@triton.jit
def _arriving(
    theta: tl.tensor, values: tl.tensor, weight: tl.tensor, tail: tl.tensor, tail_offset: tl.tensor, b: tl.tensor,
    slot: tl.tensor, exists: tl.tensor, nodes: tl.tensor, width: tl.tensor, arity: tl.tensor, NONE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What edges have, and all their tails: scores and values, or the changes of these."""
    at = tl.load(weight + slot, mask=exists, other=0)
    x = tl.load(theta + b[None, :] * width + at, mask=exists, other=NONE).to(values.dtype.element_ty)
    if tail_offset is None:
        at = tl.load(tail + slot, mask=exists, other=0)
        x += tl.load(values + b[None, :] * nodes + at, mask=exists, other=0.0)
    else:
        first = tl.load(tail_offset + slot, mask=exists, other=0)
        last = tl.load(tail_offset + slot + 1, mask=exists, other=0)
        for n in range(arity):
            has_one = first + n < last
            at = tl.load(tail + first + n, mask=has_one, other=0)
            x += tl.load(values + b[None, :] * nodes + at, mask=has_one, other=0.0)
    return x


@triton.jit(do_not_specialize=_SIZES)
def graph_forward(
    values: tl.tensor, theta: tl.tensor, offset: tl.tensor, tail: tl.tensor, tail_offset: tl.tensor,
    weight: tl.tensor, begin: tl.tensor, end: tl.tensor, batch: tl.tensor, nodes: tl.tensor, width: tl.tensor,
    arity: tl.tensor, OMEGA: tl.constexpr, DEGREE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """The values of the nodes of a level."""
    b, node, real = _lanes(begin, end, batch, LANES)
    slot, exists = _slots(offset, node, real, DEGREE)
    x = _arriving(theta, values, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, float("-inf"))
    top, r = without_top(x, theta.dtype.element_ty)
    tl.store(values + b * nodes + node, top + smooth_max(r, OMEGA, 0).to(top.dtype), mask=real)


@triton.jit(do_not_specialize=_SIZES)
def graph_tangents(
    tangents: tl.tensor, values: tl.tensor, theta: tl.tensor, z: tl.tensor, offset: tl.tensor, tail: tl.tensor,
    tail_offset: tl.tensor, weight: tl.tensor, begin: tl.tensor, end: tl.tensor, batch: tl.tensor, nodes: tl.tensor,
    width: tl.tensor, arity: tl.tensor, OMEGA: tl.constexpr, DEGREE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """The change of the values of a level for a change z of the weights; 0 where no path leads."""
    b, node, real = _lanes(begin, end, batch, LANES)
    slot, exists = _slots(offset, node, real, DEGREE)
    x = _arriving(theta, values, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, float("-inf"))
    q = argmax_of(x, OMEGA, theta.dtype.element_ty)
    y = _arriving(z, tangents, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, 0.0)
    top, _, y = changes(q, y)
    tl.store(tangents + b * nodes + node, top + tl.sum(q * y, 0).to(top.dtype), mask=real)


@triton.jit
def _sum(
    flows: tl.tensor, lists: tl.tensor, entries: tl.tensor, b: tl.tensor, n: tl.tensor, real: tl.tensor,
    edges: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """What the edges of the n-th list carry, in order."""
    first = tl.load(lists + n, mask=real, other=0)
    count = tl.load(lists + n + 1, mask=real, other=0) - first
    total = tl.zeros(n.shape, flows.dtype.element_ty)
    for step in range(tl.max(count, 0)):
        edge = tl.load(entries + first + step, mask=step < count, other=0)
        total += tl.load(flows + b * edges + edge, mask=step < count, other=0.0)
    return total


@triton.jit(do_not_specialize=_SIZES)
def graph_backward(
    values: tl.tensor, theta: tl.tensor, seed: tl.tensor, tangents: tl.tensor, z: tl.tensor, flows: tl.tensor,
    flow_changes: tl.tensor, edge: tl.tensor, out_offset: tl.tensor, out: tl.tensor, offset: tl.tensor,
    tail: tl.tensor, tail_offset: tl.tensor, weight: tl.tensor, begin: tl.tensor, end: tl.tensor, batch: tl.tensor,
    nodes: tl.tensor, width: tl.tensor, edges: tl.tensor, arity: tl.tensor, OMEGA: tl.constexpr,
    DEGREE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """What the edges into the nodes of a level carry of the seed and, with ``tangents``, the change of that."""
    b, node, real = _lanes(begin, end, batch, LANES)
    slot, exists = _slots(offset, node, real, DEGREE)
    x = _arriving(theta, values, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, float("-inf"))
    q = argmax_of(x, OMEGA, theta.dtype.element_ty)
    at = b[None, :] * edges + tl.load(edge + slot, mask=exists, other=0)
    mass = tl.load(seed + b)
    mass = tl.where(node == nodes - 1, mass, _sum(flows, out_offset, out, b, node, real, edges))
    tl.store(flows + at, q * mass[None, :], mask=exists)
    if tangents is not None:
        y = _arriving(z, tangents, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, 0.0)
        _, _, y = changes(q, y)
        change = _sum(flow_changes, out_offset, out, b, node, real, edges)
        flow = jacobian_product(q, y, OMEGA, 0) * mass[None, :] + q * change[None, :]
        tl.store(flow_changes + at, flow, mask=exists)


@triton.jit(do_not_specialize=_SIZES)
def graph_onto_weights(
    found: tl.tensor, flows: tl.tensor, lists: tl.tensor, entries: tl.tensor, end: tl.tensor, batch: tl.tensor,
    width: tl.tensor, edges: tl.tensor, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """What edges carry, summed over those that share a weight; 0 for weights that none has, which come last."""
    b, n, real = _lanes(tl.zeros((), tl.int32), width, batch, LANES)
    tl.store(found + b * width + n, _sum(flows, lists, entries, b, n, real & (n < end), edges), mask=real)


# --- sweeps


class Graph(PartialSweeps):
    """Sweeps of graphs and hypergraphs."""

    def takes(self, theta: Tensors) -> bool:
        return theta[0].shape[0] > 0

    def _empty_tape(self, theta: Tensors, index: Tensors) -> Tensor:
        return reference.empty_tape(theta, index)

    def _value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        return self._forward(theta, index, omega)[0]

    def _forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        problem = _Problem(theta, index, omega)
        if problem.is_too_wide:
            return reference.forward(theta, index, omega)
        tape = problem.empty_nodes(index)
        for level in problem.levels.bounds:
            problem.launch(graph_forward, level, (tape, problem.theta), {})
        return tape[:, -1].to(theta[0].dtype, copy=True), tape

    def _backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        problem = _Problem(theta, index, omega)
        if problem.is_too_wide:
            return reference.backward(theta, tape, seed, index, omega)
        return problem.walk_back(tape.contiguous(), seed, None, None, index)

    def _hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        problem = _Problem(theta, index, omega)
        if problem.is_too_wide:
            return reference.hessian(theta, tape, seed, z, index, omega)
        tape, along, tangents = tape.contiguous(), z[0].contiguous(), problem.empty_nodes(index)
        for level in problem.levels.bounds:
            problem.launch(graph_tangents, level, (tangents, tape, problem.theta, along), {})
        return problem.walk_back(tape, seed, tangents, along, index)


class _Problem:
    """The arguments that all kernels take."""

    def __init__(self, theta: Tensors, index: Tensors, omega: Regularizer) -> None:
        assert omega.kernel is not None
        self.theta, self.levels = theta[0].contiguous(), levels_of(index)
        self.is_too_wide = max(most for _, _, most in self.levels.bounds) > _MOST_EDGES
        self._omega, self._offset, self._edge = CODES[omega.kernel], index[0], index[2]
        self.batch, self.nodes = theta[0].shape[0], index[0].shape[0] - 1

    def empty_nodes(self, index: Tensors) -> Tensor:
        """Room for a number of each node; 0 at the start of a graph."""
        found = reference.empty_tape([self.theta], index)
        if self.levels.tail_offset is None:
            found[:, 0] = 0
        return found

    def launch(self, kernel: Any, level: tuple[int, int, int], first: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        begin, end, most = level
        degree = power_of_two(most)
        lanes = min(_THREADS, max(1, 16 * _THREADS // degree))
        launch(
            kernel,
            triton.cdiv(self.batch * (end - begin), lanes),
            *first,
            self._offset,
            self.levels.tail,
            self.levels.tail_offset,
            self.levels.weight,
            begin,
            end,
            self.batch,
            self.nodes,
            self.theta.shape[1],
            **sizes,
            arity=self.levels.arity,
            OMEGA=self._omega,
            DEGREE=degree,
            LANES=lanes,
            num_warps=_THREADS // 32,
        )

    def walk_back(
        self, tape: Tensor, seed: Tensor, tangents: Tensor | None, along: Tensor | None, index: Tensors
    ) -> Tensors:
        edges, seed = len(self._edge), seed.to(self.theta.dtype).contiguous()
        flows = seed.new_empty((self.batch, edges))
        flow_changes = None if tangents is None else torch.empty_like(flows)
        out = self._edge, self.levels.out_offset, self.levels.out
        for level in reversed(self.levels.bounds):
            given = tape, self.theta, seed, tangents, along, flows, flow_changes, *out
            self.launch(graph_backward, level, given, {"edges": edges})
        return [self._onto_weights(flows if flow_changes is None else flow_changes)]

    def _onto_weights(self, flows: Tensor) -> Tensor:
        if self.levels.by_weight is None:
            return flows
        found, (offset, entries) = torch.empty_like(self.theta), self.levels.by_weight
        programs = triton.cdiv(found.numel(), _THREADS)
        sizes = len(offset) - 1, self.batch, found.shape[1], flows.shape[1]
        launch(graph_onto_weights, programs, found, flows, offset, entries, *sizes, LANES=_THREADS)
        return found
