"""The sweeps of a graph or a hypergraph: one launch per level, one lane for each node of each batch element.

As in the reference backend, the tape contains the values of all nodes, (B, N), in the wide dtype. The flow of an edge
is the mass that it carries. In the backward sweep, a lane sums the flows of the edges that leave its node, which
earlier launches have written, and writes the flows of the edges that enter it. So no two lanes write to the same
address. If a node has more edges than a tile can contain, the reference backend sweeps the graph.
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
from bellmax.backends.triton.table import probabilities, relative_tangents, subtract_max
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

_MAX_EDGES = 4096
_THREADS = 128
_SIZES = ["begin", "end", "batch", "nodes", "width", "edges", "arity"]


class Levels(NamedTuple):
    """The levels of a graph, and the edges that leave each node, as the kernels need them."""

    bounds: list[tuple[int, int, int]]  # for each level, its range of nodes and the maximum number of edges into one
    arity: int  # the maximum number of tails of an edge
    tail: Tensor
    tail_offset: Tensor | None  # None if each edge has one tail
    weight: Tensor  # the index of each slot's weight
    out_offset: Tensor  # for each node, where its edges begin in ``out``
    out: Tensor  # the edges that leave each node
    by_weight: tuple[Tensor, Tensor] | None  # offsets and edges of each weight, if edges share weights


_LEVELS = WeakTensorKeyDictionary()


def levels_of(index: Tensors) -> Levels:
    """Return the levels of a graph. They are cached, since computing them copies the index to the host.

    A graph whose edges share weights and the graph of its edges have the same first tensors. Their lengths differ.
    """
    cached: dict[int, Levels] = _LEVELS.setdefault(index[0], {})
    if len(index) not in cached:
        cached[len(index)] = _compute_levels(index)
    return cached[len(index)]


def _compute_levels(index: Tensors) -> Levels:
    """Return the levels of a graph, from a copy of its index on the host."""
    offset, tail, edge, group, *rest = (tensor.cpu().numpy().astype(np.int64) for tensor in index)
    tail_offset = rest[0] if rest else np.arange(len(tail) + 1)
    level = np.zeros(len(offset) - 1, dtype=np.int64)
    first = 0 if rest else 1  # skip the start of a graph
    for a, b in pairwise(group[first:]):
        tails = tail[tail_offset[offset[a]] : tail_offset[offset[b]]]
        level[a:b] = 1 + level[tails].max() if len(tails) else 0
    borders, degree = np.flatnonzero(np.diff(level[first:], prepend=-1, append=-1)) + first, np.diff(offset)
    bounds = [(int(a), int(b), int(degree[a:b].max())) for a, b in pairwise(borders)]
    owner = np.repeat(edge, np.diff(tail_offset))
    device = index[0].device
    out_offset, out = _group_by(tail, owner, len(level), device)
    return Levels(
        bounds,
        int(np.diff(tail_offset).max(initial=0)),
        index[1],
        index[4] if rest else None,
        index[5] if len(rest) > 1 else index[2],
        out_offset,
        out,
        _group_by(rest[1], edge, int(rest[1].max()) + 1, device) if len(rest) > 1 else None,
    )


def _group_by(
    keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any], num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sort values by their keys, integers below num_keys. Return offsets (num_keys + 1,) and the sorted values, int32.

    The values of key k are ``values[offsets[k]:offsets[k + 1]]``.
    """
    order = np.argsort(keys, kind="stable")
    offset = np.searchsorted(keys[order], np.arange(num_keys + 1))
    offsets, entries = (torch.from_numpy(array.astype(np.int32)).to(device) for array in (offset, values[order]))
    return offsets, entries


# --- kernels


@triton.jit
def _node_of_lane(begin: tl.tensor, end: tl.tensor, batch: tl.tensor, LANES: tl.constexpr) -> tl.tuple:
    """Return the batch element and the node of each lane, and a mask of the lanes that have a node.

    The nodes of a level are from ``begin`` to ``end`` − 1.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    b = lane // (end - begin)
    return tl.minimum(b, batch - 1), begin + lane % (end - begin), b < batch


@triton.jit
def _incoming_slots(offset: tl.tensor, node: tl.tensor, has_node: tl.tensor, DEGREE: tl.constexpr) -> tl.tuple:
    """Return the slots of the edges into the node of each lane, (DEGREE, lanes), and a mask of those that exist."""
    first = tl.load(offset + node)
    slot = first[None, :] + tl.arange(0, DEGREE)[:, None]
    return slot, (slot < tl.load(offset + node + 1)[None, :]) & has_node[None, :]


@triton.jit
def _local_scores(
    theta: tl.tensor, values: tl.tensor, weight: tl.tensor, tail: tl.tensor, tail_offset: tl.tensor, b: tl.tensor,
    slot: tl.tensor, exists: tl.tensor, nodes: tl.tensor, width: tl.tensor, arity: tl.tensor, NONE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return θ_e + Σ v over the tails of each edge e, (DEGREE, lanes), and NONE where no edge exists.

    With the tangents of θ and v as arguments, it returns the tangents of these sums.
    """
    column = tl.load(weight + slot, mask=exists, other=0)
    x = tl.load(theta + b[None, :] * width + column, mask=exists, other=NONE).to(values.dtype.element_ty)
    if tail_offset is None:
        node = tl.load(tail + slot, mask=exists, other=0)
        x += tl.load(values + b[None, :] * nodes + node, mask=exists, other=0.0)
    else:
        first = tl.load(tail_offset + slot, mask=exists, other=0)
        end = tl.load(tail_offset + slot + 1, mask=exists, other=0)
        for n in range(arity):
            has_tail = first + n < end
            node = tl.load(tail + first + n, mask=has_tail, other=0)
            x += tl.load(values + b[None, :] * nodes + node, mask=has_tail, other=0.0)
    return x


@triton.jit(do_not_specialize=_SIZES)
def graph_forward(
    values: tl.tensor, theta: tl.tensor, offset: tl.tensor, tail: tl.tensor, tail_offset: tl.tensor,
    weight: tl.tensor, begin: tl.tensor, end: tl.tensor, batch: tl.tensor, nodes: tl.tensor, width: tl.tensor,
    arity: tl.tensor, OMEGA: tl.constexpr, DEGREE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Write the values of the nodes of a level."""
    b, node, has_node = _node_of_lane(begin, end, batch, LANES)
    slot, exists = _incoming_slots(offset, node, has_node, DEGREE)
    x = _local_scores(theta, values, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, float("-inf"))
    top, r = subtract_max(x, theta.dtype.element_ty)
    tl.store(values + b * nodes + node, top + smooth_max(r, OMEGA, 0).to(top.dtype), mask=has_node)


@triton.jit(do_not_specialize=_SIZES)
def graph_tangents(
    tangents: tl.tensor, values: tl.tensor, theta: tl.tensor, z: tl.tensor, offset: tl.tensor, tail: tl.tensor,
    tail_offset: tl.tensor, weight: tl.tensor, begin: tl.tensor, end: tl.tensor, batch: tl.tensor, nodes: tl.tensor,
    width: tl.tensor, arity: tl.tensor, OMEGA: tl.constexpr, DEGREE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Write the derivatives along z of the values of a level. They are 0 at nodes that no path reaches."""
    b, node, has_node = _node_of_lane(begin, end, batch, LANES)
    slot, exists = _incoming_slots(offset, node, has_node, DEGREE)
    x = _local_scores(theta, values, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, float("-inf"))
    q = probabilities(x, OMEGA, theta.dtype.element_ty)
    y = _local_scores(z, tangents, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, 0.0)
    top, _, y = relative_tangents(q, y)
    tl.store(tangents + b * nodes + node, top + tl.sum(q * y, 0).to(top.dtype), mask=has_node)


@triton.jit
def _sum_flows(
    flows: tl.tensor, lists: tl.tensor, entries: tl.tensor, b: tl.tensor, n: tl.tensor, has_list: tl.tensor,
    edges: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the sum of the flows of the edges in the n-th list, always in the same order.

    ``lists`` and ``entries`` are the results of :func:`_group_by`.
    """
    first = tl.load(lists + n, mask=has_list, other=0)
    count = tl.load(lists + n + 1, mask=has_list, other=0) - first
    total = tl.zeros(n.shape, flows.dtype.element_ty)
    for step in range(tl.max(count, 0)):
        edge = tl.load(entries + first + step, mask=step < count, other=0)
        total += tl.load(flows + b * edges + edge, mask=step < count, other=0.0)
    return total


@triton.jit(do_not_specialize=_SIZES)
def graph_backward(
    values: tl.tensor, theta: tl.tensor, seed: tl.tensor, tangents: tl.tensor, z: tl.tensor, flows: tl.tensor,
    flow_tangents: tl.tensor, edge: tl.tensor, out_offset: tl.tensor, out: tl.tensor, offset: tl.tensor,
    tail: tl.tensor, tail_offset: tl.tensor, weight: tl.tensor, begin: tl.tensor, end: tl.tensor, batch: tl.tensor,
    nodes: tl.tensor, width: tl.tensor, edges: tl.tensor, arity: tl.tensor, OMEGA: tl.constexpr,
    DEGREE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Write the flows of the edges into the nodes of a level, times the seed, and their derivatives if ``tangents``."""
    b, node, has_node = _node_of_lane(begin, end, batch, LANES)
    slot, exists = _incoming_slots(offset, node, has_node, DEGREE)
    x = _local_scores(theta, values, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, float("-inf"))
    q = probabilities(x, OMEGA, theta.dtype.element_ty)
    column = b[None, :] * edges + tl.load(edge + slot, mask=exists, other=0)
    mass = tl.load(seed + b)
    mass = tl.where(node == nodes - 1, mass, _sum_flows(flows, out_offset, out, b, node, has_node, edges))
    tl.store(flows + column, q * mass[None, :], mask=exists)
    if tangents is not None:
        y = _local_scores(z, tangents, weight, tail, tail_offset, b, slot, exists, nodes, width, arity, 0.0)
        _, _, y = relative_tangents(q, y)
        mass_tangent = _sum_flows(flow_tangents, out_offset, out, b, node, has_node, edges)
        flow_tangent = jacobian_product(q, y, OMEGA, 0) * mass[None, :] + q * mass_tangent[None, :]
        tl.store(flow_tangents + column, flow_tangent, mask=exists)


@triton.jit(do_not_specialize=_SIZES)
def graph_onto_weights(
    sums: tl.tensor, flows: tl.tensor, lists: tl.tensor, entries: tl.tensor, end: tl.tensor, batch: tl.tensor,
    width: tl.tensor, edges: tl.tensor, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sum of the flows of the edges that share each weight. Weights from ``end`` on have no edge."""
    b, n, has_weight = _node_of_lane(tl.zeros((), tl.int32), width, batch, LANES)
    total = _sum_flows(flows, lists, entries, b, n, has_weight & (n < end), edges)
    tl.store(sums + b * width + n, total, mask=has_weight)


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
        launcher = _Launcher(theta, index, omega)
        if launcher.is_too_wide:
            return reference.forward(theta, index, omega)
        tape = launcher.empty_nodes(index)
        for level in launcher.levels.bounds:
            launcher.launch(graph_forward, level, (tape, launcher.theta), {})
        return tape[:, -1].to(theta[0].dtype, copy=True), tape

    def _backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        launcher = _Launcher(theta, index, omega)
        if launcher.is_too_wide:
            return reference.backward(theta, tape, seed, index, omega)
        return launcher.propagate_back(tape.contiguous(), seed, None, None)

    def _hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        launcher = _Launcher(theta, index, omega)
        if launcher.is_too_wide:
            return reference.hessian(theta, tape, seed, z, index, omega)
        tape, direction, tangents = tape.contiguous(), z[0].contiguous(), launcher.empty_nodes(index)
        for level in launcher.levels.bounds:
            launcher.launch(graph_tangents, level, (tangents, tape, launcher.theta, direction), {})
        return launcher.propagate_back(tape, seed, tangents, direction)


class _Launcher:
    """Launches of kernels for one graph, θ and Ω: the arguments that all kernels have in common."""

    def __init__(self, theta: Tensors, index: Tensors, omega: Regularizer) -> None:
        assert omega.kernel is not None
        self.theta, self.levels = theta[0].contiguous(), levels_of(index)
        self.is_too_wide = max(degree for _, _, degree in self.levels.bounds) > _MAX_EDGES
        self._omega, self._offset, self._edge = CODES[omega.kernel], index[0], index[2]
        self.batch, self.nodes = theta[0].shape[0], index[0].shape[0] - 1

    def empty_nodes(self, index: Tensors) -> Tensor:
        """Return an uninitialized tensor (B, N), with 0 at the start of a graph, which no kernel writes."""
        numbers = reference.empty_tape([self.theta], index)
        if self.levels.tail_offset is None:
            numbers[:, 0] = 0
        return numbers

    def launch(self, kernel: Any, level: tuple[int, int, int], first: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        """Launch a kernel for a level. ``first`` are its first arguments, ``sizes`` its additional sizes by name."""
        begin, end, max_degree = level
        degree = power_of_two(max_degree)
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

    def propagate_back(self, tape: Tensor, seed: Tensor, tangents: Tensor | None, direction: Tensor | None) -> Tensors:
        """Return the expected path times the seed or, with tangents along a direction, the Hessian product."""
        edges, seed = len(self._edge), seed.to(self.theta.dtype).contiguous()
        flows = seed.new_empty((self.batch, edges))
        flow_tangents = None if tangents is None else torch.empty_like(flows)
        out = self._edge, self.levels.out_offset, self.levels.out
        for level in reversed(self.levels.bounds):
            args = tape, self.theta, seed, tangents, direction, flows, flow_tangents, *out
            self.launch(graph_backward, level, args, {"edges": edges})
        return [self._sum_onto_weights(flows if flow_tangents is None else flow_tangents)]

    def _sum_onto_weights(self, flows: Tensor) -> Tensor:
        """Sum the flows (B, E) of edges that share a weight, (B, W)."""
        if self.levels.by_weight is None:
            return flows
        sums, (offset, entries) = torch.empty_like(self.theta), self.levels.by_weight
        programs = triton.cdiv(sums.numel(), _THREADS)
        sizes = len(offset) - 1, self.batch, sums.shape[1], flows.shape[1]
        launch(graph_onto_weights, programs, sums, flows, offset, entries, *sizes, LANES=_THREADS)
        return sums
