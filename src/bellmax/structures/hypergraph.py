"""Dynamic programs on any acyclic hypergraph, such as a parse chart: the classes Hypergraph and Derivations."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

import bellmax.backends.native.sorting as sorting
import bellmax.structures.sums as sums
from bellmax.decoded import DecodedForm, EdgeCounts, EdgeLists, Fault
from bellmax.distribution import USES_UNITS_TWICE
from bellmax.inputs import answers_near_misses, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.checks import of_sequence
from bellmax.programs.graph import GraphProgram, is_flow, prune, sum_by_weight
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.structures.graphs import (
    GraphPaths,
    StoredGraph,
    as_integers,
    check_order,
    check_single,
    check_touched,
    name_nodes,
    node_number,
)
from bellmax.targets import Targets
from bellmax.tensors import Gamma, wide_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

Hyperedges: TypeAlias = "Rows | Tensor | NDArray[np.integer[Any]] | Iterable[tuple[Hashable, Sequence[Hashable]]]"
_NO_EDGE = -2  # instead of a number that no edge has
_MAX_EDGES = 10**8  # of a derivation, since a sample has a number for each


class Hypergraph(StoredGraph):
    """An acyclic hypergraph with one goal node, for grammars and other dynamic programs whose paths are trees.

    An edge leads from any number of nodes, its tails, to one node, its head. To derive a node, choose one edge into the
    node, and then derive each tail of this edge. An edge without tails derives its head at once. The edges chosen for
    the goal node and for all nodes below it form a derivation. For a distribution over derivations, call
    :meth:`derivations` with a score or a cost for each edge.

    Args:
        edges: E pairs (head, tails) in any order. The head is a node, and the tails are a tuple or a list of nodes. The
            same node may occur several times in the tails of an edge. Nodes are integers or names. A name is any
            hashable object. Names are numbered in the order in which they first appear in ``edges``. You can also pass
            an integer tensor (E, 1 + A), where A is the largest number of tails of an edge. Each row then contains the
            head and the tails of an edge, padded with −1.
        num_nodes: The number of nodes N, by default one more than the largest node in ``edges``. Only valid if nodes
            are integers.
        weight_of: Integers (E,): for each edge, the index of its weight in the argument ``weights`` of
            :meth:`derivations`. Edges with equal indices share a weight. By default, every edge has a separate weight.
        goal: The node to derive, by default the only node that is not the tail of an edge.

    If ``goal`` is passed, edges that no derivation of the goal uses are pruned. A pruned edge keeps its number and its
    weight, but no derivation uses the edge. The edge therefore adds nothing to the gradient of its weight. The
    attribute ``nodes`` lists the names of the nodes.

    For example, there are two ways to bracket three words:

    >>> import bellmax as bx
    >>> words = [("a", ()), ("b", ()), ("c", ())]
    >>> pairs = [("ab", ("a", "b")), ("bc", ("b", "c"))]
    >>> h = bx.Hypergraph([*words, *pairs, ("abc", ("ab", "c")), ("abc", ("a", "bc"))])
    >>> p = h.derivations(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.5, 0.0, 0.0]), omega="sparsemax")
    >>> p.expected_path
    tensor([1.0000, 1.0000, 1.0000, 0.2500, 0.7500, 0.2500, 0.7500])
    >>> h.derivation_edges(p.best_path())
    [('abc', ('a', 'bc')), ('a', ()), ('bc', ('b', 'c')), ('b', ()), ('c', ())]

    To derive another node of a hypergraph, such as "ab" above, pass ``goal``:

    >>> pair = bx.Hypergraph(h.edges, goal="ab")
    >>> pair.derivations(torch.zeros(7)).expected_path
    tensor([1., 1., 0., 1., 0., 0., 0.])

    """

    heads: Tensor  # (E,)
    tails: Tensor  # edge e has the tails tails[tail_offset[e]:tail_offset[e + 1]]
    tail_offset: Tensor  # (E + 1,)
    weight_of: Tensor | None
    _tensors = ("heads", "tails", "tail_offset")

    @answers_near_misses
    def __init__(
        self,
        edges: Hyperedges,
        num_nodes: int | None = None,
        *,
        weight_of: Tensor | NDArray[np.integer[Any]] | Sequence[int] | None = None,
        goal: Hashable | None = None,
    ) -> None:
        rows = _read(edges)
        min_nodes = int(max(rows.head.max(), rows.tail.max(initial=0))) + 1
        if rows.names is not None and num_nodes is not None:
            raise ValueError(f"num_nodes must be left out if edges hold names, got {num_nodes}")
        size = min_nodes if num_nodes is None else num_nodes
        _check_nodes(rows, rows.head >= size, rows.tail >= size, f"below num_nodes = {num_nodes}")
        pairs = np.stack((rows.tail, np.repeat(rows.head, rows.arity)), 1)
        self.nodes = range(size) if rows.names is None else rows.names
        if goal is None:
            level = sorting.levels(pairs, size)
            _check_graph(rows.head, pairs, level, self.nodes)
            index = sorting.sort(rows.head, rows.tail, level, rows.arity)
        else:
            is_used = sorting.is_reachable(node_number("goal", goal, self.nodes), pairs, size, is_reversed=True)
            pairs = pairs[is_used[pairs[:, 1]]]
            level = sorting.levels(pairs, size)
            check_order(pairs, level, self.nodes)
            _check_derived(rows.head, is_used, self.nodes)
            level[~is_used] = -1
            index = sorting.sort(*prune(rows.head, rows.tail, level, is_used[rows.head], rows.arity))
        self.weight_of, self._num_weights = None, len(rows.head)
        if weight_of is not None:
            shared = _check_weight_of(weight_of, len(rows.head))
            index = (*index, shared[index[2]].astype(np.int32))
            self.weight_of, self._num_weights = torch.from_numpy(shared).to(rows.device), int(shared.max()) + 1
        tail_offset = np.concatenate(([0], np.cumsum(rows.arity)))
        arrays = (rows.head, rows.tail, tail_offset, level, *index)
        tensors = (torch.from_numpy(array).to(rows.device) for array in arrays)
        self.heads, self.tails, self.tail_offset, self.levels, *integers = tensors
        self._index, self.num_nodes, self.goal = tuple(integers), size, self.nodes[int(level.argmax())]
        self._program = GraphProgram(self._longest_path, max_count=math.inf)

    @property
    def num_edges(self) -> int:
        """The number E of edges."""
        return self.heads.shape[0]

    @property
    def num_weights(self) -> int:
        """The number W of weights. It equals the number of edges, E, unless edges share weights."""
        return self._num_weights

    @property
    def edges(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The edges as pairs (head, tails) of node names."""
        offset, tails = self.tail_offset.tolist(), [self.nodes[node] for node in self.tails.tolist()]
        return [
            (self.nodes[h], tuple(tails[a:b])) for h, a, b in zip(self.heads.tolist(), offset, offset[1:], strict=False)
        ]

    @property
    def by_edge(self) -> Hypergraph:
        """The hypergraph with the same edges in which each edge has a separate weight."""
        if self.weight_of is None:
            return self
        other = object.__new__(Hypergraph)
        vars(other).update(vars(self) | {"weight_of": None, "_index": self._index[:5], "_num_weights": self.num_edges})
        return other

    def to(self, device: torch.device | str) -> Self:
        """Return this hypergraph on another device."""
        moved = super().to(device)
        moved.weight_of = None if self.weight_of is None else self.weight_of.to(device)
        return moved

    @answers_near_misses
    def derivations(
        self,
        weights: Tensor,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> Derivations:
        """Return the distribution over derivations of the goal, given the weights of the edges.

        Args:
            weights: The score of each edge, (..., E). If edges share weights, pass the W shared weights instead, (...,
                W). −∞ removes the edges with this weight.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`. If most derivations should have probability 0, choose "sparsemax" rather than
                "l2": under "l2", larger derivations also become less probable.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
            minimize: If True, treat weights as costs. Then ``value`` is a smoothed minimum, the best derivation has the
                least cost, and ``topk`` starts with the least cost. A cost of +∞ removes the edge. Default False.

        >>> h = Hypergraph([("a", ()), ("b", ()), ("ab", ("a", "b"))])
        >>> h.derivations(torch.tensor([1.0, 2.0, 0.5])).value
        tensor(3.5000)
        """
        return Derivations(self, weights, omega=omega, gamma=gamma, minimize=minimize)

    def derivation_edges(self, derivation: Tensor | list[Any]) -> list[Any]:
        """Return the edges of a derivation as a list of pairs (head, tails) of node names.

        The list starts with the edge into the goal. Next come all edges that derive the first tail of this edge, then
        all edges that derive the second tail, and so on. For several derivations, return nested lists. If
        ``derivation`` contains no edges, since no derivation exists, the list is empty.

        Args:
            derivation: A tensor (..., E) that counts how often the derivation uses each edge, or the numbers of the
                edges in nested lists, as ``decode()`` returns them.

        """
        if isinstance(derivation, list):
            edges = self.edges
            return [self.derivation_edges(n) if isinstance(n, list) else edges[n] for n in derivation]
        if check_tensor("derivation", derivation).shape[-1:] != (self.num_edges,):
            raise ValueError(f"derivation must have shape (..., {self.num_edges}), got {tuple(derivation.shape)}")
        if derivation.ndim > 1:
            return [self.derivation_edges(member) for member in derivation]
        edges = self.edges
        return [edges[edge] for edge in self._edges_in_order(derivation)]

    def _edges_in_order(self, derivation: Tensor) -> list[int]:
        """Return the numbers of the edges of a derivation (E,) in the order of :meth:`derivation_edges`."""
        unused: dict[int, list[int]] = {}  # edges by head
        for edge in derivation.nonzero().flatten().tolist()[::-1]:
            unused.setdefault(int(self.heads[edge]), []).extend([edge] * round(float(derivation[edge])))
        listed: list[int] = []
        stack = [int(self.levels.argmax())] if unused else []
        while stack:
            head = stack.pop()
            if not unused.get(head):
                raise ValueError(f"derivation must hold one derivation, got no edge to {self.nodes[head]}")
            edge = unused[head].pop()
            tails = self.tails[self.tail_offset[edge] : self.tail_offset[edge + 1]].tolist()
            listed.append(edge)
            stack += tails[::-1]
        if any(unused.values()):
            raise ValueError("derivation must hold one derivation, got further edges")
        return listed

    @property
    def _heads(self) -> Tensor:
        return self.heads

    def _longest_path(self) -> int:
        return self._largest_derivation

    @cached_property
    def _largest_derivation(self) -> int:
        """The number of edges of the largest derivation, counted with repetitions."""
        if self.device.type == "meta":
            return 1
        ones = torch.ones(self.num_weights, dtype=wide_dtype(self.device), device=self.device)
        most = float(self.derivations(ones, omega="hard").value)
        if most > _MAX_EDGES:
            raise ValueError(f"sampled derivations must have at most {_MAX_EDGES} edges, got up to {most:.10g}")
        return int(most)

    @cached_property
    def _uses_nodes_twice(self) -> bool:
        """True if a derivation can contain two derivations of the same node, and so use an edge twice."""
        below: dict[int, int] = {}  # for each node, the set of nodes in its derivations, as bits
        offset, tails, heads = self.tail_offset.tolist(), self.tails.tolist(), self.heads.tolist()
        levels = self.levels.tolist()
        used = (edge for edge, head in enumerate(heads) if levels[head] >= 0)
        for edge in sorted(used, key=lambda edge: levels[heads[edge]]):
            nodes = 1 << heads[edge]
            for tail in tails[offset[edge] : offset[edge + 1]]:
                if nodes & below.get(tail, 0):
                    return True
                nodes |= below.get(tail, 0)
            below[heads[edge]] = below.get(heads[edge], 0) | nodes
        return False

    def _is_sum(self, counts: Tensor) -> bool:
        """True if a derivation has these counts (W,) of shared weights, or if the search is too long."""
        assert self.weight_of is not None
        entries = counts.nonzero().squeeze(1)
        is_used = self.levels[self.heads] >= 0
        edges = (torch.isin(self.weight_of, entries) & is_used).nonzero().squeeze(1)
        if sums.is_long(len(edges), len(entries)):
            return True
        heads = self.heads[edges]
        edges = edges[(self.levels[heads] * self.num_nodes + heads).argsort()]
        adds = (self.weight_of[edges].unsqueeze(1) == entries).double().cpu().numpy()
        listed = [
            sums.Edge(int(self.heads[e]), self.tails[self.tail_offset[e] : self.tail_offset[e + 1]].tolist(), row)
            for e, row in zip(edges.tolist(), adds, strict=True)
        ]
        return sums.is_sum(listed, int(self.levels.argmax()), counts[entries].double().cpu().numpy())


class DerivationTargets(Targets):
    """Targets of a hypergraph: derivations, or sets of edges that a derivation may use."""

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        p = cast("Derivations", self.p)
        edges, is_only = p._only_derivation(allowed)
        if is_checked(is_only) and not bool(is_only.all()):
            member = of_sequence((~is_only).nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be a single derivation of the goal, got a set of edges that is not one{member}"
            )
        self.check_possible(name, allowed)
        return p._event_of(edges).to(torch.promote_types(p.dtype, torch.float32))


class DerivationForm(DecodedForm):
    """Nested lists of edge numbers, one list for each member of the batch.

    The first edge of a list leads to the goal. Then come all edges below its first tail, and so on. In arguments, the
    edges of a list may be in any order. They may repeat.
    """

    p: Derivations
    is_nested_list = True

    @property
    def own_shape(self) -> Sequence[int | str]:
        return ("L",)

    @property
    def description(self) -> str:
        return "nested lists of edge numbers"

    def matches(self, value: object) -> bool:
        return isinstance(value, list | tuple)

    def of_compact(self, paths: Tensor) -> list[Any]:
        if paths.ndim > 1:
            return [self.of_compact(path) for path in paths]
        return self.p.hypergraph._edges_in_order(paths) if bool(paths.any()) else []

    def read(self, name: str, decoded: Any) -> Tensor:
        if not isinstance(decoded, list | tuple):
            needed = "a list of edge numbers, or nested lists for a batch"
            raise ValueError(f"{name} must be {needed}, got {type(decoded).__name__}")
        batch = self.p.batch_shape
        lead = _depth(decoded) - 1 if decoded or batch.numel() else len(batch)
        shape, rows = _flatten(name, decoded, lead, self.p.hypergraph.num_edges)
        longest = max(map(len, rows), default=0)
        padded = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.int64)
        return super().read(name, padded.reshape(*shape, longest).to(self.p.device))

    def edges(self, decoded: Tensor) -> EdgeLists:
        h = self.p.hypergraph
        edges = EdgeLists(decoded.clamp(min=-1), (decoded >= -1).all(-1))
        counts = edges.counts(h.num_edges).to(wide_dtype(self.p.device))
        edges.is_path = edges.is_path & is_flow(counts, h.by_edge._index)
        return edges

    def edges_of_compact(self, paths: Tensor) -> EdgeCounts:
        return EdgeCounts(paths.to(torch.promote_types(self.p.dtype, torch.float32)), paths.any(-1))

    def fault(self, decoded: Tensor) -> Fault:
        if bool((decoded == _NO_EDGE).any()):
            position = int((decoded == _NO_EDGE).nonzero()[0])
            return Fault((position,), f"must be the number of an edge, from 0 to {self.p.hypergraph.num_edges - 1}")
        return Fault((), f"is not a derivation of {self.p.hypergraph.goal!r}")


def _depth(value: Any) -> int:
    """The number of nested lists around a number. An empty list is a list of numbers."""
    if not isinstance(value, list | tuple):
        return 0
    return 1 + max(map(_depth, value), default=0)


def _flatten(name: str, value: Any, depth: int, num_edges: int) -> tuple[list[int], list[list[int]]]:
    """Return the lengths of ``depth`` levels of nested lists, and the lists inside, with −2 for a number of no edge.

    Raises ``ValueError`` if the lists are uneven, or hold something else than integers.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must hold lists of edge numbers, got {value!r}")
    if not depth:
        for edge in value:
            if not isinstance(edge, int | np.integer) or isinstance(edge, bool):
                raise ValueError(f"{name} must hold numbers of edges, got {edge!r}")
        return [], [[int(edge) if 0 <= edge < num_edges else _NO_EDGE for edge in value]]
    parts = [_flatten(name, part, depth - 1, num_edges) for part in value]
    if any(shape != parts[0][0] for shape, _ in parts):
        raise ValueError(f"{name} must have the same number of lists for each member of the batch")
    return [len(value), *(parts[0][0] if parts else [0] * (depth - 1))], [row for _, rows in parts for row in rows]


class Derivations(GraphPaths):
    """The distribution over the derivations of a :class:`Hypergraph`, which :meth:`Hypergraph.derivations` returns.

    An event counts how often a derivation uses each edge, (E,). If edges share weights, an event counts how often the
    derivation uses each weight, (W,). To count edges in this case, use the events of :attr:`by_edge`. The decoded form
    is a list of edge numbers, or nested lists for a batch.

    >>> p = Hypergraph([("a", ()), ("a", ()), ("aa", ("a", "a"))]).derivations(torch.tensor([1.0, 0.0, 0.0]))
    >>> p.expected_path  # the two edges to "a" are used twice in total
    tensor([1.4621, 0.5379, 1.0000])
    """

    _graph: Hypergraph
    _target_kind = DerivationTargets
    _form_kind = DerivationForm

    if TYPE_CHECKING:  # lists instead of tensors

        def decode(self) -> list[Any]: ...  # type: ignore[override]

        def sample_decoded(self, sample_shape: Sequence[int] = ()) -> list[Any]: ...  # type: ignore[override]

        def topk_decoded(self, k: int) -> tuple[Tensor, list[Any]]: ...  # type: ignore[override]

        def most_accurate(self) -> list[Any]: ...  # type: ignore[override]

    def _most_accurate(self) -> Tensor:
        if self._graph._uses_nodes_twice:
            raise ValueError(USES_UNITS_TWICE)
        return self._most_accurate_by_edge()

    @property
    def hypergraph(self) -> Hypergraph:
        """The hypergraph."""
        return self._graph

    @property
    def by_edge(self) -> Derivations:
        """This distribution with a separate weight for each edge, so that an event counts edges, (E,)."""
        weight_of = self._graph.weight_of
        if weight_of is None:
            return self
        weights = self.weights.index_select(-1, weight_of)
        fine = Derivations(self._graph.by_edge, weights, omega=self.omega, minimize=self.minimize)
        fine._solver.backend = self.backend
        return fine

    def _only_derivation(self, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges (..., E) of a derivation of allowed weights, and (...), True if it is the only one."""
        zeros = torch.zeros(allowed.shape, dtype=wide_dtype(self.device), device=self.device)
        weights = zeros.masked_fill(~allowed, -math.inf)
        log_count = Derivations(self._graph, weights, omega=Negentropy()).value
        first = Derivations(self._graph, weights, omega=Hard())._solver.expanded().expected_edges()
        return first, log_count.abs() < 0.5

    def _event_of(self, edges: Tensor) -> Tensor:
        """Return the event (..., W) of a derivation (..., E)."""
        return sum_by_weight(edges, self._graph._index, self._graph.num_weights)

    def _is_path(self, value: Tensor) -> Tensor:
        if self._graph.weight_of is None:
            return super()._is_path(value)
        edges, is_only = self._only_derivation(value > 0)
        is_path = is_only & (self._event_of(edges) == value).all(-1)
        if is_readable(value):
            for member in map(tuple, (~is_only).nonzero().tolist()):
                is_path[member] = self._graph._is_sum(value[member])
        return is_path

    def _edges_of(self, path: Tensor) -> Tensor:
        event = self._check_path(path)
        if self._graph.weight_of is None:
            return event
        edges, is_only = self._only_derivation(event > 0)
        if is_readable(is_only) and not bool(is_only.all()):
            member = of_sequence((~is_only).nonzero()[0].tolist())
            raise ValueError(
                f"path must hold the weights of one derivation only, got weights of several{member}. "
                "p.by_edge takes counts of edges"
            )
        return edges.to(event.dtype)

    def _why_no_path(self, event: Tensor) -> str:
        return "is not a derivation of the hypergraph"


# --- reading edges


class Rows(NamedTuple):
    """Edges as arrays that were checked: the head of each edge, and the tails of all edges, ``arity`` of them for each
    edge in order."""

    head: NDArray[np.int64]
    tail: NDArray[np.int64]
    arity: NDArray[np.int64]
    names: list[Hashable] | None
    device: torch.device


def _read(edges: Hyperedges) -> Rows:
    """Read edges in any form. Raises ``ValueError`` if they are not rows (head, tails), or a node is negative."""
    if isinstance(edges, Rows):
        return edges
    if isinstance(edges, Tensor | np.ndarray):
        rows = _read_array(edges)
    elif isinstance(edges, str | Mapping) or not isinstance(edges, Iterable):
        raise ValueError(f"edges must be rows (head, tails), got a {type(edges).__name__}")
    else:
        rows = _read_list(list(edges))
    _check_nodes(rows, rows.head < 0, rows.tail < 0, ">= 0")
    return rows


def _read_array(edges: Any) -> Rows:
    """Read edges from an array (E, 1 + A): the head of each edge, then its tails, padded with −1."""
    tensor = torch.as_tensor(edges)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(f"edges must have shape (E, 1 + A) with E >= 1, got {tuple(tensor.shape)}")
    rows = as_integers(tensor, "edges").cpu().numpy()
    is_tail = rows[:, 1:] != -1
    return Rows(rows[:, 0].copy(), rows[:, 1:][is_tail], is_tail.sum(1), None, tensor.device)


def _read_list(rows: list[Any]) -> Rows:
    """Read edges from rows (head, tails). Nodes that are not numbers are numbered in the order of their appearance."""
    if not rows:
        raise ValueError("edges must have at least one row (head, tails), got none")
    for i, row in enumerate(rows):
        is_row = isinstance(row, tuple | list) and len(row) == 2 and isinstance(row[1], tuple | list)
        if not is_row or not all(isinstance(node, Hashable) for node in (row[0], *row[1])):
            needed = "(head, tails) of hashable nodes, with a tuple or list of tails"
            raise ValueError(f"edges must be rows {needed}, got {row!r} at row {i}")
    arity = np.array([len(tails) for _, tails in rows], dtype=np.int64)
    flat = [node for head, tails in rows for node in (head, *tails)]
    names = None
    if not all(isinstance(node, int | float | np.number) for node in flat):
        names = list(dict.fromkeys(flat))
        number = {name: i for i, name in enumerate(names)}
        flat = [number[name] for name in flat]
    numbers = as_integers(flat, "edges").numpy()
    is_head = np.zeros(len(flat), dtype=bool)
    is_head[np.cumsum(1 + arity) - 1 - arity] = True
    return Rows(numbers[is_head], numbers[~is_head], arity, names, torch.device("cpu"))


def _check_nodes(rows: Rows, is_bad_head: NDArray[np.bool_], is_bad_tail: NDArray[np.bool_], needed: str) -> None:
    """Raise ``ValueError`` for the first edge with a bad head or tail."""
    if not is_bad_head.any() and not is_bad_tail.any():
        return
    edge_of_tail = np.repeat(np.arange(len(rows.head)), rows.arity)
    bad = np.concatenate((np.flatnonzero(is_bad_head), edge_of_tail[is_bad_tail]))
    row = int(bad.min())
    tails = tuple(rows.tail[edge_of_tail == row].tolist())
    raise ValueError(f"edges must hold nodes {needed}, got ({rows.head[row]}, {tails}) at row {row}")


def _check_graph(
    head: NDArray[np.int64], pairs: NDArray[np.int64], level: NDArray[np.int64], names: Sequence[Hashable]
) -> None:
    """Raise ``ValueError`` if there is a cycle, a node without an edge or a derivation, or more than one goal."""
    check_order(pairs, level, names)
    is_head, is_tail = np.zeros((2, len(level)), dtype=bool)
    is_head[head], is_tail[pairs[:, 0]] = True, True
    check_touched(is_head | is_tail, names)
    _check_derived(head, np.ones(len(level), dtype=bool), names)
    hint = ". To keep the derivations of one of them, pass goal="
    check_single("goal (no edge's tail)", ~is_tail, names, hint=hint)


def _check_derived(head: NDArray[np.int64], is_used: NDArray[np.bool_], names: Sequence[Hashable]) -> None:
    """Raise ``ValueError`` if a used node has no incoming edge."""
    is_underived = is_used.copy()
    is_underived[head] = False
    if is_underived.any():
        nodes = np.flatnonzero(is_underived)
        leaf = name_nodes(nodes[:1], names)
        raise ValueError(
            f"edges must derive every node, but no edge leads to {name_nodes(nodes, names)}. "
            f"If {leaf} is a leaf, add the edge ({leaf}, ())"
        )


def _check_weight_of(numbers: Any, num_edges: int) -> NDArray[np.int64]:
    """Return the number of each edge's weight, (E,)."""
    weight_of = as_integers(numbers, "weight_of").cpu()
    if weight_of.shape != (num_edges,):
        raise ValueError(f"weight_of must have shape ({num_edges},), got {tuple(weight_of.shape)}")
    if int(weight_of.min()) < 0:
        raise ValueError(f"weight_of must hold numbers >= 0, got {int(weight_of.min())}")
    return np.asarray(weight_of.numpy())
