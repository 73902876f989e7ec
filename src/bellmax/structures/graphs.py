"""The base classes of graphs and hypergraphs, and of their distributions; checks of edges."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.inputs import check_tensor
from bellmax.programs import Program
from bellmax.regularizers import Regularizer
from bellmax.tensors import Gamma

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

_SHOWN = 10


class StoredGraph:
    """Edges, and the integers that describe them to the sweeps, sorted once."""

    num_nodes: int
    nodes: Sequence[Hashable]
    levels: Tensor  # (N,): number of edges on the longest way to each node; −1 for a node that is pruned
    _index: tuple[Tensor, ...]
    _tensors: ClassVar[tuple[str, ...]]
    """The names of the tensors that hold the edges."""
    _program: Program

    @property
    @abstractmethod
    def num_edges(self) -> int: ...

    @property
    def num_weights(self) -> int:
        return self.num_edges

    @property
    def device(self) -> torch.device:
        return self.levels.device

    def to(self, device: torch.device | str) -> Self:
        """The same graph on another device."""
        moved = copy(self)
        for name in ("levels", *self._tensors):
            setattr(moved, name, getattr(self, name).to(device))
        moved._index = tuple(tensor.to(device) for tensor in self._index)
        return moved

    @abstractmethod
    def _longest_path(self) -> int:
        """Return the largest number of edges of a path, or of a derivation."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_edges={self.num_edges})"


class GraphPaths(PathDistribution):
    """The paths of a stored graph, or the derivations of a hypergraph. One engine sweeps both."""

    def __init__(
        self,
        graph: StoredGraph,
        weights: Tensor,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> None:
        if check_tensor("weights", weights).ndim < 1 or weights.shape[-1] != graph.num_weights:
            raise ValueError(f"weights must have shape (..., {graph.num_weights}), got {tuple(weights.shape)}")
        if weights.device != graph.device:
            raise ValueError(f"weights must be on the graph's device {graph.device}, got {weights.device}")
        scores = {"weights": (weights, 1)}
        shape = weights.shape
        super().__init__(graph._program, scores, graph._index, shape[:-1], shape[-1:], omega, gamma, minimize)
        self._graph = graph

    @property
    def weights(self) -> Tensor:
        """(..., E), as they were given."""
        return self._scores[0]

    @property
    def minimize(self) -> bool:
        """True if the weights are costs."""
        return self.sense < 0

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same distribution, and its graph, on another device or in another floating point type."""
        moved = super().to(*args, **kwargs)
        moved._graph = self._graph.to(moved.device)
        moved._solver.integers = moved._graph._index
        return moved


# --- reading and checking edges


def as_integers(given: Any, name: str) -> Tensor:
    """A copy in int64."""
    numbers = torch.as_tensor(given)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got dtype {numbers.dtype}")
    return numbers.to(torch.int64, copy=True)


def name_nodes(nodes: Iterable[int], names: Sequence[Hashable]) -> str:
    listed = [names[int(node)] for node in nodes]
    return ", ".join(map(str, listed[:_SHOWN])) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")


def check_order(
    pairs: NDArray[np.int64], level: NDArray[np.int64], names: Sequence[Hashable], given: str = "edges"
) -> None:
    """Raise a ValueError if edges (tail, head), by whose levels their nodes were sorted, go round in a circle."""
    if (level < 0).any():
        cycle = [names[node] for node in _find_cycle(pairs, level)]
        shown = cycle if len(cycle) <= _SHOWN else [*cycle[: _SHOWN - 1], "…", cycle[-1]]
        raise ValueError(f"{given} must not form a cycle, got {' → '.join(map(str, shown))}")


def _find_cycle(pairs: NDArray[np.int64], level: NDArray[np.int64]) -> list[int]:
    """A cycle i, j, …, i, found by walking from parent to parent among the nodes that could not be sorted."""
    stuck = pairs[(level[pairs] < 0).all(1)]
    parent_of = dict(zip(stuck[:, 1].tolist(), stuck[:, 0].tolist(), strict=True))
    node = int(stuck[0, 1])
    seen: dict[int, int] = {}
    walk: list[int] = []
    while node not in seen:
        seen[node] = len(walk)
        walk.append(node)
        node = parent_of[node]
    return [node, *reversed(walk[seen[node] :])]


def node_number(name: str, node: Hashable, names: Sequence[Hashable]) -> int:
    """The number of a node that an argument names."""
    try:
        return names.index(node)
    except ValueError:
        raise ValueError(f"{name} must be a node of the edges, got {node!r}") from None


def reached(source: int, pairs: NDArray[np.int64], num_nodes: int) -> NDArray[np.bool_]:
    """(N,): True for the nodes that edges (from, to) lead to from a node, and for the node itself."""
    order = np.argsort(pairs[:, 0], kind="stable")
    first = np.searchsorted(pairs[order, 0], np.arange(num_nodes + 1)).tolist()
    neighbours = pairs[order, 1].tolist()
    seen, waiting = {source}, [source]
    while waiting:
        node = waiting.pop()
        for other in neighbours[first[node] : first[node + 1]]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    found = np.zeros(num_nodes, dtype=bool)
    found[list(seen)] = True
    return found


def check_touched(is_touched: NDArray[np.bool_], names: Sequence[Hashable]) -> None:
    """Raise a ValueError for nodes that no edge touches."""
    lonely = np.flatnonzero(~is_touched)
    if lonely.size:
        raise ValueError(
            f"edges must reach every node, but none touches {name_nodes(lonely, names)} (num_nodes is {len(names)})"
        )


def check_single(
    which: str, is_one: NDArray[np.bool_], names: Sequence[Hashable], given: str = "edges", hint: str = ""
) -> None:
    """Raise a ValueError for several nodes of which a graph has exactly one."""
    found = np.flatnonzero(is_one)
    if found.size > 1:
        got = f"{found.size}: nodes {name_nodes(found, names)}"
        raise ValueError(f"{given} must have exactly one {which}, got {got}{hint}")
