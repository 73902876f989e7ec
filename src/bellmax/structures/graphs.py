"""Base classes of graphs and hypergraphs and of the distributions over their paths; checks of edges."""

from __future__ import annotations

import math
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
from bellmax.programs.graph import node_numbers
from bellmax.regularizers import Regularizer
from bellmax.tensors import Gamma

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

_MAX_SHOWN = 10  # nodes in a message


class StoredGraph:
    """The base class of graphs, which sort their edges once for all sweeps."""

    num_nodes: int
    nodes: Sequence[Hashable]
    levels: Tensor  # (N,): the number of edges on the longest path to each node, −1 if the node is pruned
    _index: tuple[Tensor, ...]
    """The integers that describe the sorted edges to the sweeps."""
    _tensors: ClassVar[tuple[str, ...]]
    """The names of the attributes that hold the edges, which :meth:`to` moves."""
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
        """Return the same graph on another device."""
        moved = copy(self)
        for name in ("levels", *self._tensors):
            setattr(moved, name, getattr(self, name).to(device))
        moved._index = tuple(tensor.to(device) for tensor in self._index)
        return moved

    @property
    @abstractmethod
    def _heads(self) -> Tensor:
        """(E,): the node that each edge enters."""

    @abstractmethod
    def _longest_path(self) -> int:
        """Return the largest number of edges of a path, or of a derivation."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_edges={self.num_edges})"


class GraphPaths(PathDistribution):
    """The base class of distributions over the paths of a graph, or the derivations of a hypergraph."""

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
        """The weights that were passed, (..., E)."""
        return self._scores[0]

    @property
    def node_values(self) -> Tensor:
        graph = self._graph
        number = node_numbers(graph._index, graph._heads, graph.levels)
        values = self._solver.node_values()
        return values[..., number].masked_fill(number < 0, -self.sense * math.inf)

    @property
    def minimize(self) -> bool:
        """True if the weights are costs."""
        return self.sense < 0

    def _shown_options(self) -> dict[str, object]:
        return {"minimize": True} if self.minimize else {}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same distribution, and its graph, on another device or in another floating point type."""
        moved = super().to(*args, **kwargs)
        moved._graph = self._graph.to(moved.device)
        moved._solver.integers = moved._graph._index
        return moved


# --- reading and checking edges


def as_integers(values: Any, name: str) -> Tensor:
    """Copy an argument into an int64 tensor. Raises ``ValueError`` if its values are not integers."""
    numbers = torch.as_tensor(values)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got dtype {numbers.dtype}")
    return numbers.to(torch.int64, copy=True)


def name_nodes(nodes: Iterable[int], names: Sequence[Hashable]) -> str:
    """Return the names of nodes as a list for a message, the first ten if there are more."""
    listed = [names[int(node)] for node in nodes]
    more = f" and {len(listed) - _MAX_SHOWN} more" if len(listed) > _MAX_SHOWN else ""
    return ", ".join(map(str, listed[:_MAX_SHOWN])) + more


def check_order(
    pairs: NDArray[np.int64], level: NDArray[np.int64], names: Sequence[Hashable], argument: str = "edges"
) -> None:
    """Raise ``ValueError`` if edges (E, 2) [parent, child] form a cycle, that is, if a node has level −1."""
    if (level < 0).any():
        cycle = [names[node] for node in _find_cycle(pairs, level)]
        shown = cycle if len(cycle) <= _MAX_SHOWN else [*cycle[: _MAX_SHOWN - 1], "…", cycle[-1]]
        raise ValueError(f"{argument} must not form a cycle, got {' → '.join(map(str, shown))}")


def _find_cycle(pairs: NDArray[np.int64], level: NDArray[np.int64]) -> list[int]:
    """Return a cycle i, j, …, i among the nodes of level −1, each of which has a parent of level −1."""
    unsorted = pairs[(level[pairs] < 0).all(1)]
    parent_of = dict(zip(unsorted[:, 1].tolist(), unsorted[:, 0].tolist(), strict=True))
    node = int(unsorted[0, 1])
    seen: dict[int, int] = {}
    walk: list[int] = []
    while node not in seen:
        seen[node] = len(walk)
        walk.append(node)
        node = parent_of[node]
    return [node, *reversed(walk[seen[node] :])]


def node_number(name: str, node: Hashable, names: Sequence[Hashable]) -> int:
    """Return the number of the node that the argument ``name`` refers to. Raises ``ValueError`` if there is none."""
    try:
        return names.index(node)
    except ValueError:
        raise ValueError(f"{name} must be a node of the edges, got {node!r}") from None


def check_touched(is_touched: NDArray[np.bool_], names: Sequence[Hashable]) -> None:
    """Raise ``ValueError`` if a node has no edge. ``is_touched`` (N,) is True for the nodes that have one."""
    isolated = np.flatnonzero(~is_touched)
    if isolated.size:
        raise ValueError(
            f"edges must reach every node, but none touches {name_nodes(isolated, names)} (num_nodes is {len(names)})"
        )


def check_single(
    role: str, has_role: NDArray[np.bool_], names: Sequence[Hashable], argument: str = "edges", hint: str = ""
) -> None:
    """Raise ``ValueError`` if several nodes have a role, such as "root", that only one node may have."""
    nodes = np.flatnonzero(has_role)
    if nodes.size > 1:
        got = f"{nodes.size}: nodes {name_nodes(nodes, names)}"
        raise ValueError(f"{argument} must have exactly one {role}, got {got}{hint}")
