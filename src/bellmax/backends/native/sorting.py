"""The order of nodes and edges of a graph, computed by kernels if the kernels are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import bellmax.backends.native.loading as loading
import bellmax.programs.graph as graph

if TYPE_CHECKING:
    from numpy.typing import NDArray


def levels(pairs: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Return the same levels as :func:`bellmax.programs.graph.levels`, faster."""
    if loading.kernels is None:
        return graph.levels(pairs, num_nodes)
    level = np.empty(num_nodes, dtype=np.int64)
    loading.kernels.dag_levels(_tensor(pairs), torch.from_numpy(level))
    return level


def is_reachable(source: int, pairs: NDArray[np.int64], num_nodes: int, is_reversed: bool = False) -> NDArray[np.bool_]:
    """Return the same nodes as :func:`bellmax.programs.graph.is_reachable`, faster.

    If ``is_reversed``, the edges are [to, from].
    """
    if loading.kernels is None:
        return graph.is_reachable(source, pairs[:, ::-1] if is_reversed else pairs, num_nodes)
    reachable = np.empty(num_nodes, dtype=bool)
    loading.kernels.dag_reachable(_tensor(pairs), int(is_reversed), source, torch.from_numpy(reachable))
    return reachable


def sort(
    head: NDArray[np.int64], tail: NDArray[np.int64], level: NDArray[np.int64], arity: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int32], ...]:
    """Return the same index as :func:`bellmax.programs.graph.sort`, faster."""
    if loading.kernels is None:
        return graph.sort(head, tail, level, arity)
    num_nodes, num_edges = len(level), len(head)
    offset, sorted_tail, edge = (np.empty(size, dtype=np.int32) for size in (num_nodes + 1, len(tail), num_edges))
    begins_group = np.empty(num_nodes, dtype=bool)
    tail_offset = [] if arity is None else [np.empty(num_edges + 1, dtype=np.int32)]
    results = map(torch.from_numpy, (offset, sorted_tail, edge, begins_group, *tail_offset))
    optional = None if arity is None else _tensor(arity)
    loading.kernels.dag_sort(_tensor(head), _tensor(tail), _tensor(level), optional, *results)
    group = np.append(np.flatnonzero(begins_group), num_nodes).astype(np.int32)
    return (offset, sorted_tail, edge, group, *tail_offset)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
