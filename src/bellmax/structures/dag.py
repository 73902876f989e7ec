"""Dynamic programs on any directed acyclic graph: the definition of every other structure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

import bellmax.backends.native.sorting as sorting
from bellmax.inputs import answers_near_misses, check_tensor
from bellmax.programs.graph import GraphProgram, sort, sort_pruned
from bellmax.regularizers import Regularizer
from bellmax.structures.graphs import (
    GraphPaths,
    StoredGraph,
    as_integers,
    check_order,
    check_single,
    check_touched,
    node_number,
    reached,
)
from bellmax.tensors import Gamma

if TYPE_CHECKING:
    import networkx as nx
    from numpy.typing import NDArray

Edges: TypeAlias = "Tensor | NDArray[np.integer[Any]] | Sequence[tuple[Hashable, Hashable]]"


class DAG(StoredGraph):
    """A directed acyclic graph with one start node and one end node.

    Args:
        edges: rows (parent, child) in any order: (E, 2) integers, or pairs of names, which are any hashable objects and
            are numbered as they first appear. Parallel edges are kept apart.
        num_nodes: N, for integers; by default one more than the largest node in ``edges``.
        start: The node where paths start, by default the only node without parents.
        end: The node where paths end, by default the only node without children.

    If ``start`` or ``end`` is given, edges that are on no path between them are pruned. They keep their number and
    their weight, but every path has 0 of them and their gradient is 0. The part that is left must have no cycle.

    The nodes are sorted once, here, and every call reuses the order. ``nodes`` lists their names.

    >>> import bellmax as bx
    >>> dag = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
    >>> p = dag.paths(torch.tensor([1.0, 0.0, 1.0, 1.5]), omega="l2")
    >>> p.value
    tensor(1.0625)
    >>> p.expected_path
    tensor([0.7500, 0.2500, 0.7500, 0.2500])
    >>> p.best_path()
    tensor([1., 0., 1., 0.])

    Names, and costs instead of scores:

    >>> trip = bx.DAG([("home", "bus"), ("home", "bike"), ("bus", "work"), ("bike", "work")])
    >>> p = trip.paths(torch.tensor([5.0, 1.0, 10.0, 12.0]), omega="hard", minimize=True)
    >>> p.value, trip.path_nodes(p.best_path())
    (tensor(13.), ['home', 'bike', 'work'])

    A part of a larger graph:

    >>> roads = bx.DAG([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("x", "b")], start="a", end="c")
    >>> roads.paths(torch.zeros(5)).expected_path
    tensor([0.5000, 0.5000, 0.5000, 0.0000, 0.0000])

    """

    edges: Tensor
    _tensors = ("edges",)

    def __init__(
        self,
        edges: Edges,
        num_nodes: int | None = None,
        *,
        start: Hashable | None = None,
        end: Hashable | None = None,
    ) -> None:
        numbered, names = _numbered(edges)
        self.edges = _check_edges(numbered)
        pairs = self.edges.cpu().numpy()
        used = int(pairs.max()) + 1
        self.num_nodes = used if num_nodes is None else num_nodes
        self.nodes = range(self.num_nodes) if names is None else names
        if names is not None and num_nodes is not None:
            raise ValueError(f"num_nodes must be left out where edges hold names, got {num_nodes}")
        if self.num_nodes < used:
            row = int((pairs >= self.num_nodes).any(1).argmax())
            raise ValueError(f"edges must hold nodes below num_nodes = {num_nodes}, got {_row(pairs, row)}")
        kept = None if start is None and end is None else _between(start, end, pairs, self.nodes)
        own = pairs if kept is None else pairs[kept]
        level = sorting.levels(own, self.num_nodes)
        is_touched = _check_graph(own, level, self.nodes, is_pruned=kept is not None)
        if kept is None:
            index = sort(pairs[:, 1], pairs[:, 0], level)
        else:
            level[~is_touched] = -1
            index = sort_pruned(pairs[:, 1], pairs[:, 0], level, kept)
        self.levels, *rest = (torch.from_numpy(part).to(self.edges.device) for part in (level, *index))
        self._index = tuple(rest)
        self._depth = int(level.max())
        self._program = GraphProgram(self._longest_path)

    @classmethod
    def from_matrix(cls, theta: Tensor, *, start: int | None = None, end: int | None = None) -> DAG:
        """The graph of a matrix of weights (..., N, N) ``[child, parent]``, −∞ (in the whole batch) where no edge is.

        Edges are numbered row by row; :meth:`matrix_to_edges` reads their weights. ``start`` and ``end`` prune the
        graph, as in :class:`DAG`.

        >>> theta = torch.full((3, 3), -torch.inf)
        >>> theta[1, 0], theta[2, 0], theta[2, 1] = 1.0, 2.5, 1.0
        >>> dag = DAG.from_matrix(theta)
        >>> dag.paths(dag.matrix_to_edges(theta), omega="hard").value
        tensor(2.5000)
        """
        if theta.ndim < 2 or theta.shape[-1] != theta.shape[-2]:
            raise ValueError(f"theta must have shape (..., N, N), got {tuple(theta.shape)}")
        exists = (theta != -math.inf).flatten(0, -3).any(0) if theta.ndim > 2 else theta != -math.inf
        return cls(exists.nonzero().flip(1), theta.shape[-1], start=start, end=end)

    @classmethod
    def from_networkx(
        cls, graph: nx.DiGraph[Any], *, start: Hashable | None = None, end: Hashable | None = None
    ) -> DAG:
        """The graph of a networkx DiGraph or MultiDiGraph, with its names.

        Nodes are numbered as in ``graph.nodes``, edges as in ``graph.edges``. ``start`` and ``end`` prune the graph, as
        in :class:`DAG`.

        >>> import networkx as nx
        >>> graph = nx.DiGraph()
        >>> graph.add_weighted_edges_from([("home", "bus", 1.0), ("bus", "work", 2.0), ("home", "work", 2.5)])
        >>> weights = torch.tensor([weight for _, _, weight in graph.edges(data="weight")])
        >>> dag = DAG.from_networkx(graph)
        >>> dag.path_nodes(dag.paths(weights, omega="hard").best_path())
        ['home', 'bus', 'work']
        """
        if not graph.is_directed():
            raise ValueError("graph must be directed: a networkx DiGraph or MultiDiGraph")
        number = {node: i for i, node in enumerate(graph.nodes)}
        ends = {name: node for name, node in (("start", start), ("end", end)) if node is not None}
        for name, node in ends.items():
            if node not in number:
                raise ValueError(f"{name} must be a node of the graph, got {node!r}")
        edges = [(number[edge[0]], number[edge[1]]) for edge in graph.edges]
        dag = cls(edges, len(number), **{name: number[node] for name, node in ends.items()})
        dag.nodes = list(number)
        return dag

    @classmethod
    def _of_sorted(cls, edges: Tensor, levels: Tensor, index: tuple[Tensor, ...]) -> DAG:
        """Make a graph from edges (E, 2) [parent, child] that are sorted already."""
        dag = object.__new__(cls)
        dag.edges, dag.levels, dag._index = edges, levels, index
        dag.num_nodes, dag.nodes = len(levels), range(len(levels))
        dag._depth = dag.num_nodes - 1 if levels.is_meta else int(levels[-1])
        dag._program = GraphProgram(dag._longest_path)
        return dag

    @property
    def num_edges(self) -> int:
        return self.edges.shape[0]

    def _longest_path(self) -> int:
        return self._depth

    def matrix_to_edges(self, matrix: Tensor) -> Tensor:
        """Entries of (..., N, N) ``[child, parent]`` at the edges, (..., E)."""
        if matrix.shape[-2:] != (self.num_nodes, self.num_nodes):
            raise ValueError(
                f"matrix must have shape (..., {self.num_nodes}, {self.num_nodes}), got {tuple(matrix.shape)}"
            )
        parent, child = self.edges.unbind(1)
        picked: Tensor = matrix[..., child, parent]
        return picked

    def edges_to_matrix(self, values: Tensor) -> Tensor:
        """(..., E) as (..., N, N) ``[child, parent]``: 0 where no edge is, the sum of parallel edges."""
        if values.shape[-1:] != (self.num_edges,):
            raise ValueError(f"values must have shape (..., {self.num_edges}), got {tuple(values.shape)}")
        parent, child = self.edges.unbind(1)
        flat = values.new_zeros((*values.shape[:-1], self.num_nodes**2))
        flat = flat.index_add(-1, child * self.num_nodes + parent, values)
        return flat.reshape(*values.shape[:-1], self.num_nodes, self.num_nodes)

    @answers_near_misses
    def paths(
        self,
        weights: Tensor,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> DAGPaths:
        """The distribution over paths from start to end, given the weights of the edges.

        Args:
            weights: (..., E) scores; −∞ removes an edge.
            omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard". Under
                :class:`SquaredL2` a node with one parent is not free; under ``"sparsemax"`` it is.
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.
            minimize: whether weights are costs, read now: then the value is a smoothed least cost, the best path has
                the least, ``topk`` ascends, and +∞ removes an edge.

        """
        return DAGPaths(self, weights, omega=omega, gamma=gamma, minimize=minimize)

    def path_nodes(self, path: Tensor) -> list[Any]:
        """The nodes that a path (E,) visits, from start to end, by name; nested lists for paths (..., E).

        Where there is no path, for zeros, the list is empty.

        >>> DAG([(0, 1), (0, 2), (1, 3), (2, 3)]).path_nodes(torch.tensor([0, 1, 0, 1]))
        [0, 2, 3]
        """
        if check_tensor("path", path).shape[-1:] != (self.num_edges,):
            raise ValueError(f"path must have shape (..., {self.num_edges}), got {tuple(path.shape)}")
        if path.ndim > 1:
            return [self.path_nodes(one) for one in path]
        taken = self.edges[path > 0]
        if not len(taken):
            return []
        by_level = taken[self.levels[taken[:, 1]].argsort()]
        if not by_level[1:, 0].equal(by_level[:-1, 1]):
            raise ValueError("path must hold one path, got edges that do not follow each other")
        return [self.nodes[int(by_level[0, 0])], *(self.nodes[node] for node in by_level[:, 1].tolist())]


class DAGPaths(GraphPaths):
    """The paths of a :class:`DAG` from its start to its end; an event is an indicator (E,) over its edges.

    With ``minimize`` the weights are costs, and the program is a min.
    """

    _graph: DAG

    @property
    def dag(self) -> DAG:
        return self._graph


# --- making the graph


def _numbered(edges: Edges) -> tuple[Any, list[Hashable] | None]:
    """Edges between numbers, and the names of the nodes, or None where numbers were given."""
    if isinstance(edges, np.ndarray) and edges.dtype.kind not in "iuf":
        edges = edges.tolist()
    if isinstance(edges, Tensor | np.ndarray):
        return edges, None
    if isinstance(edges, str | Mapping) or not isinstance(edges, Iterable):
        raise ValueError(f"edges must be rows (parent, child), got a {type(edges).__name__}")
    rows = [tuple(row) if isinstance(row, Iterable) and not isinstance(row, str) else (row,) for row in edges]
    are_numbers = all(isinstance(node, int | float | np.number | Tensor) for row in rows for node in row)
    if are_numbers and len({len(row) for row in rows}) <= 1:
        return rows, None
    for place, row in enumerate(rows):
        if len(row) != 2 or not all(isinstance(node, Hashable) for node in row):
            raise ValueError(f"edges must be pairs (parent, child) of hashable names, got {row!r} at row {place}")
    number: dict[Hashable, int] = {}
    return [[number.setdefault(node, len(number)) for node in row] for row in rows], list(number)


def _check_edges(given: Any) -> Tensor:
    given = torch.as_tensor(given)
    if given.ndim != 2 or given.shape[1] != 2 or given.shape[0] == 0:
        raise ValueError(f"edges must have shape (E, 2) with E >= 1, got {tuple(given.shape)}")
    edges = as_integers(given, "edges")
    if bool((edges < 0).any()):
        pairs = edges.cpu().numpy()
        raise ValueError(f"edges must hold nodes >= 0, got {_row(pairs, int((pairs < 0).any(1).argmax()))}")
    return edges


def _row(pairs: NDArray[np.int64], row: int) -> str:
    return f"({pairs[row, 0]}, {pairs[row, 1]}) at row {row}"


def _between(
    start: Hashable | None, end: Hashable | None, pairs: NDArray[np.int64], names: Sequence[Hashable]
) -> NDArray[np.bool_]:
    """(E,): True for the edges on a path from the start, if it is given, to the end, if it is given."""
    kept = np.ones(len(pairs), dtype=bool)
    if start is not None:
        kept &= reached(node_number("start", start, names), pairs, len(names))[pairs[:, 0]]
    if end is not None:
        kept &= reached(node_number("end", end, names), pairs[:, ::-1], len(names))[pairs[:, 1]]
    if not kept.any():
        given = [f"{word} {node!r}" for word, node in (("from start", start), ("to end", end)) if node is not None]
        raise ValueError(f"edges must have a path {' '.join(given)}, got none")
    return kept


def _check_graph(
    pairs: NDArray[np.int64], level: NDArray[np.int64], names: Sequence[Hashable], is_pruned: bool
) -> NDArray[np.bool_]:
    """(N,): True for the nodes of edges, which must be all nodes if nothing was pruned."""
    check_order(pairs, level, names)
    has_parent, has_child = np.zeros((2, len(level)), dtype=bool)
    has_parent[pairs[:, 1]], has_child[pairs[:, 0]] = True, True
    is_touched = has_parent | has_child
    if not is_pruned:
        check_touched(is_touched, names)
    hint = ". To keep the paths of one of them, pass "
    check_single("start node (no parents)", is_touched & ~has_parent, names, hint=f"{hint}start=")
    check_single("end node (no children)", is_touched & ~has_child, names, hint=f"{hint}end=")
    return is_touched
