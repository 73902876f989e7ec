"""Dynamic programs on any directed acyclic graph: the classes DAG and DAGPaths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import bellmax.backends.native.sorting as sorting
from bellmax.decoded import DecodedForm, EdgeLists, Fault, are_integers
from bellmax.inputs import answers_near_misses, check_tensor
from bellmax.programs.graph import GraphProgram, prune
from bellmax.regularizers import Regularizer
from bellmax.structures.graphs import (
    GraphPaths,
    StoredGraph,
    as_integers,
    check_order,
    check_single,
    check_touched,
    node_number,
)
from bellmax.tensors import Gamma

if TYPE_CHECKING:
    import networkx as nx
    from numpy.typing import NDArray

Edges: TypeAlias = "Tensor | NDArray[np.integer[Any]] | Sequence[tuple[Hashable, Hashable]]"


class DAG(StoredGraph):
    """A directed acyclic graph (DAG) with one start node and one end node.

    To find best paths or to get a distribution over paths, call :meth:`paths` with a score or a cost for each edge.

    Args:
        edges: E pairs (parent, child) of nodes, in any order. An edge leads from the parent to the child. Pass integers
            (E, 2) to identify nodes by number, or pairs of names. A name is any hashable object. The first name in
            ``edges`` becomes node 0, the next new name becomes node 1, and so on. Two edges may connect the same two
            nodes, and each of them then has a separate weight.
        num_nodes: The number of nodes N, by default one more than the largest node in ``edges``. Only valid if nodes
            are integers.
        start: The node where paths start, by default the only node without parents.
        end: The node where paths end, by default the only node without children.

    If ``start`` or ``end`` is passed, edges that no path from start to end uses are pruned. A pruned edge still has an
    entry in the weights and in the events. No path uses a pruned edge, so the gradient of its weight is 0. The edges
    that are not pruned must not form a cycle. The attribute ``nodes`` lists the names of the nodes.

    >>> import bellmax as bx
    >>> dag = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
    >>> p = dag.paths(torch.tensor([1.0, 0.0, 1.0, 1.5]), omega="sparsemax")
    >>> p.value
    tensor(2.0625)
    >>> p.expected_path
    tensor([0.7500, 0.2500, 0.7500, 0.2500])
    >>> p.best_path()
    tensor([1., 0., 1., 0.])

    Nodes can have names, and weights can be costs instead of scores:

    >>> trip = bx.DAG([("home", "bus"), ("home", "bike"), ("bus", "work"), ("bike", "work")])
    >>> p = trip.paths(torch.tensor([5.0, 1.0, 10.0, 12.0]), omega="hard", minimize=True)
    >>> p.value, trip.path_nodes(p.best_path())
    (tensor(13.), ['home', 'bike', 'work'])

    To use only the paths between two nodes of a larger graph, pass ``start`` and ``end``:

    >>> roads = bx.DAG([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("x", "b")], start="a", end="c")
    >>> roads.paths(torch.zeros(5)).expected_path
    tensor([0.5000, 0.5000, 0.5000, 0.0000, 0.0000])

    """

    edges: Tensor
    _tensors = ("edges",)

    @answers_near_misses
    def __init__(
        self,
        edges: Edges,
        num_nodes: int | None = None,
        *,
        start: Hashable | None = None,
        end: Hashable | None = None,
    ) -> None:
        numbers, names = _number_nodes(edges)
        self.edges = _check_edges(numbers)
        pairs = self.edges.cpu().numpy()
        min_nodes = int(pairs.max()) + 1
        self.num_nodes = min_nodes if num_nodes is None else num_nodes
        self.nodes = range(self.num_nodes) if names is None else names
        if names is not None and num_nodes is not None:
            raise ValueError(f"num_nodes must be left out if edges hold names, got {num_nodes}")
        if self.num_nodes < min_nodes:
            row = int((pairs >= self.num_nodes).any(1).argmax())
            raise ValueError(f"edges must hold nodes below num_nodes = {num_nodes}, got {_show_row(pairs, row)}")
        is_used = None if start is None and end is None else _is_between(start, end, pairs, self.nodes)
        used_pairs = pairs if is_used is None else pairs[is_used]
        level = sorting.levels(used_pairs, self.num_nodes)
        is_touched = _check_graph(used_pairs, level, self.nodes, is_pruned=is_used is not None)
        if is_used is None:
            index = sorting.sort(pairs[:, 1], pairs[:, 0], level)
        else:
            level[~is_touched] = -1
            index = sorting.sort(*prune(pairs[:, 1], pairs[:, 0], level, is_used))
        self.levels, *tensors = (torch.from_numpy(array).to(self.edges.device) for array in (level, *index))
        self._index = tuple(tensors)
        self._depth = int(level.max())
        self._program = GraphProgram(self._longest_path)

    @classmethod
    def from_matrix(cls, theta: Tensor, *, start: int | None = None, end: int | None = None) -> DAG:
        """Return the graph whose edges are the entries above −∞ of a matrix (..., N, N) ``[child, parent]``.

        Entry ``[i, j]`` becomes an edge from node j to node i if it is above −∞ for at least one batch member. Edges
        are numbered in the order of the entries, row by row. To get the weights of the edges from the matrix, call
        :meth:`matrix_to_edges`.

        Args:
            theta: The matrix of weights (..., N, N).
            start: The node where paths start, by default the only node without parents.
            end: The node where paths end, by default the only node without children.

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
        """Convert a networkx DiGraph or MultiDiGraph to a DAG with the same nodes, names and edges.

        Nodes are numbered in the order of ``graph.nodes``, and edges are numbered in the order of ``graph.edges``.
        Weights stored in the networkx graph are not read. Pass them to :meth:`paths`, as in the example.

        Args:
            graph: The networkx graph.
            start: The node where paths start, by default the only node without parents.
            end: The node where paths end, by default the only node without children.

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
        """Return a graph of edges (E, 2) [parent, child] that are already sorted, without checks.

        ``levels`` is (N,), and ``index`` holds the integers of :func:`bellmax.programs.graph.sort`.
        """
        dag = object.__new__(cls)
        dag.edges, dag.levels, dag._index = edges, levels, index
        dag.num_nodes, dag.nodes = len(levels), range(len(levels))
        dag._depth = dag.num_nodes - 1 if levels.is_meta else int(levels[-1])
        dag._program = GraphProgram(dag._longest_path)
        return dag

    @property
    def num_edges(self) -> int:
        """The number E of edges."""
        return self.edges.shape[0]

    @property
    def _heads(self) -> Tensor:
        return self.edges[:, 1]

    def _longest_path(self) -> int:
        return self._depth

    def matrix_to_edges(self, matrix: Tensor) -> Tensor:
        """Convert a matrix (..., N, N) ``[child, parent]`` to a value for each edge (..., E)."""
        if matrix.shape[-2:] != (self.num_nodes, self.num_nodes):
            raise ValueError(
                f"matrix must have shape (..., {self.num_nodes}, {self.num_nodes}), got {tuple(matrix.shape)}"
            )
        parent, child = self.edges.unbind(1)
        values: Tensor = matrix[..., child, parent]
        return values

    def edges_to_matrix(self, values: Tensor) -> Tensor:
        """Convert a value for each edge (..., E) to a matrix (..., N, N) ``[child, parent]``.

        If there is no edge from a parent to a child, their entry is 0. If there are several, their values are added.
        """
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
        """Return the distribution over paths from start to end, given the weights of the edges.

        Args:
            weights: The scores (..., E) of the edges. −∞ removes an edge.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`. If most paths should have probability 0, choose "sparsemax" rather than "l2":
                under "l2", longer paths also become less probable.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
            minimize: If True, treat weights as costs. Then ``value`` is a smoothed minimum, the best path has the least
                cost, and ``topk`` starts with the least cost. A cost of +∞ removes the edge. Default False.

        >>> dag = DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
        >>> dag.paths(torch.zeros(4)).expected_path
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        return DAGPaths(self, weights, omega=omega, gamma=gamma, minimize=minimize)

    def _are_edge_numbers(self, path: Tensor) -> bool:
        """True for integers, unless they have one entry for each edge, and no path has so many edges."""
        has_fewer = path.shape[-1:] != (self.num_edges,) or self.num_edges <= self._longest_path()
        return are_integers(path) and has_fewer

    def path_nodes(self, path: Tensor) -> list[Any]:
        """Return the list of the names of the nodes that a path visits, from start to end.

        For several paths, return nested lists. If ``path`` contains no edges, since no path exists, the list is empty.

        Args:
            path: An event (..., E), or the numbers of the edges (..., L), as ``decode()`` returns them.

        >>> dag = DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
        >>> dag.path_nodes(torch.tensor([0, 1, 0, 1])), dag.path_nodes(torch.tensor([1, 3]))
        ([0, 2, 3], [0, 2, 3])
        """
        is_decoded = self._are_edge_numbers(check_tensor("path", path))
        if not is_decoded and path.shape[-1:] != (self.num_edges,):
            raise ValueError(f"path must have shape (..., {self.num_edges}), got {tuple(path.shape)}")
        if path.ndim > 1:
            return [self.path_nodes(member) for member in path]
        edges = self.edges[path[path >= 0] if is_decoded else path > 0]
        if not len(edges):
            return []
        by_level = edges[self.levels[edges[:, 1]].argsort()]
        if not by_level[1:, 0].equal(by_level[:-1, 1]):
            raise ValueError("path must hold one path, got edges that do not follow each other")
        return [self.nodes[int(by_level[0, 0])], *(self.nodes[node] for node in by_level[:, 1].tolist())]


class EdgeForm(DecodedForm):
    """The numbers of the edges of a path, from start to end, (..., L) int64."""

    p: DAGPaths

    @property
    def own_shape(self) -> Sequence[int | str]:
        return ("L",)

    def matches(self, value: object) -> bool:
        return isinstance(value, Tensor) and self.p.dag._are_edge_numbers(value)

    def of_compact(self, paths: Tensor) -> Tensor:
        dag = self.p.dag
        last = dag.num_nodes  # the level of edges that are not on the path
        order = torch.where(paths > 0, dag.levels[dag.edges[:, 1]], last).sort(-1)
        longest = dag._longest_path()
        return torch.where(order.values == last, -1, order.indices)[..., :longest]

    def edges(self, decoded: Tensor) -> EdgeLists:
        dag = self.p.dag
        exists = decoded >= 0
        is_edge = exists & (decoded < dag.num_edges)
        edge = decoded.masked_fill(~is_edge, 0)
        parent, child = dag.edges[edge].unbind(-1)
        level, child_level = dag.levels[parent], dag.levels[child]
        if not decoded.shape[-1]:
            return EdgeLists(decoded, torch.zeros(decoded.shape[:-1], dtype=torch.bool, device=decoded.device))
        follows = ~exists[..., 1:] | (exists[..., :-1] & (parent[..., 1:] == child[..., :-1]))
        is_last = exists & ~pad(exists[..., 1:], (0, 1))
        reaches_end = (is_last & (child_level == dag._depth)).any(-1)
        is_live = is_edge & (level >= 0) & (child_level >= 0)
        is_path = exists[..., 0] & (level[..., 0] == 0) & reaches_end & follows.all(-1)
        is_path = is_path & (is_live | ~exists).all(-1) & (decoded >= -1).all(-1)
        return EdgeLists(edge.masked_fill(~is_edge, -1), is_path)

    def fault(self, decoded: Tensor) -> Fault:
        dag, rows = self.p.dag, decoded.tolist()
        numbers = list(takewhile(lambda edge: edge != -1, rows))
        if any(edge != -1 for edge in rows[len(numbers) :]):
            return Fault((len(numbers),), "is padding, but another edge follows it")
        for n, edge in enumerate(numbers):
            if not 0 <= edge < dag.num_edges:
                return Fault((n,), f"must be the number of an edge, from 0 to {dag.num_edges - 1}, got {edge}")
        ends = [[dag.nodes[node] for node in pair] for pair in dag.edges[numbers].tolist()] if numbers else []
        for n, (one, other) in enumerate(pairwise(ends), 1):
            if one[1] != other[0]:
                return Fault((n,), f"is an edge from {other[0]!r}, but the edge before it leads to {one[1]!r}")
        shown = f"a path from {ends[0][0]!r} to {ends[-1][1]!r}" if ends else "no edges"
        return Fault((), f"must lead from the start of the graph to its end, got {shown}")


class DAGPaths(GraphPaths):
    """The distribution over the paths of a :class:`DAG` from start to end, which :meth:`DAG.paths` returns.

    An event is a 0/1 tensor (E,) of the edges. The decoded form is the numbers of the edges from start to end,
    (..., L), padded with −1, where L is the number of edges of the longest path. With ``minimize=True``, the weights
    are costs, and ``value`` is a smoothed minimum.

    >>> p = DAG([(0, 1), (0, 2), (1, 3), (2, 3)]).paths(torch.tensor([1.0, 0.0, 1.0, 1.5]))
    >>> p.decode()
    tensor([0, 2])
    """

    _graph: DAG
    _form_kind = EdgeForm

    @property
    def marginals(self) -> Tensor:
        """Probability of each edge, (..., E). Differentiable."""
        return self.expected_path

    @property
    def dag(self) -> DAG:
        """The graph."""
        return self._graph


# --- making the graph


def _number_nodes(edges: Edges) -> tuple[Any, list[Hashable] | None]:
    """Return edges between numbers, and the names of the nodes, or None if the nodes are numbers already."""
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
    for i, row in enumerate(rows):
        if len(row) != 2 or not all(isinstance(node, Hashable) for node in row):
            raise ValueError(f"edges must be pairs (parent, child) of hashable names, got {row!r} at row {i}")
    number: dict[Hashable, int] = {}
    return [[number.setdefault(node, len(number)) for node in row] for row in rows], list(number)


def _check_edges(rows: Any) -> Tensor:
    """Return the edges as int64 (E, 2). Raises ``ValueError`` if they are not pairs of integers >= 0."""
    tensor = torch.as_tensor(rows)
    if tensor.ndim != 2 or tensor.shape[1] != 2 or tensor.shape[0] == 0:
        raise ValueError(f"edges must have shape (E, 2) with E >= 1, got {tuple(tensor.shape)}")
    edges = as_integers(tensor, "edges")
    if bool((edges < 0).any()):
        pairs = edges.cpu().numpy()
        raise ValueError(f"edges must hold nodes >= 0, got {_show_row(pairs, int((pairs < 0).any(1).argmax()))}")
    return edges


def _show_row(pairs: NDArray[np.int64], row: int) -> str:
    return f"({pairs[row, 0]}, {pairs[row, 1]}) at row {row}"


def _is_between(
    start: Hashable | None, end: Hashable | None, pairs: NDArray[np.int64], names: Sequence[Hashable]
) -> NDArray[np.bool_]:
    """(E,): True for each edge on a path from ``start`` to ``end``, where None stands for any node.

    Raises ``ValueError`` if there is no such path.
    """
    is_between = np.ones(len(pairs), dtype=bool)
    if start is not None:
        is_between &= sorting.is_reachable(node_number("start", start, names), pairs, len(names))[pairs[:, 0]]
    if end is not None:
        reaches_end = sorting.is_reachable(node_number("end", end, names), pairs, len(names), is_reversed=True)
        is_between &= reaches_end[pairs[:, 1]]
    if not is_between.any():
        ends = [f"{word} {node!r}" for word, node in (("from start", start), ("to end", end)) if node is not None]
        raise ValueError(f"edges must have a path {' '.join(ends)}, got none")
    return is_between


def _check_graph(
    pairs: NDArray[np.int64], level: NDArray[np.int64], names: Sequence[Hashable], is_pruned: bool
) -> NDArray[np.bool_]:
    """Return (N,), True for each node that has an edge.

    Raises ``ValueError`` if the edges form a cycle, if there are several start or end nodes, or, unless ``is_pruned``,
    if a node has no edge.
    """
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
