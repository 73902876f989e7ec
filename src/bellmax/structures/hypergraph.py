"""Dynamic programs on any acyclic hypergraph: trees, charts of parsers, and graphs as the case of one tail an edge."""

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
from bellmax.inputs import answers_near_misses, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.checks import of_sequence
from bellmax.programs.graph import GraphProgram, sort, sort_pruned
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
    reached,
)
from bellmax.targets import Targets
from bellmax.tensors import Gamma, wide_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

Hyperedges: TypeAlias = "Tensor | NDArray[np.integer[Any]] | Iterable[tuple[Hashable, Sequence[Hashable]]]"
_MOST_CHOICES = 10**8


class Hypergraph(StoredGraph):
    """An acyclic hypergraph with one goal: the node that is no edge's tail.

    A derivation of a node is one of the edges into it, and a derivation of each of the edge's tails. An edge without
    tails derives its head outright.

    Args:
        edges: rows (head, tails) in any order, with a tuple or list of tails, which may repeat. Nodes are integers, or
            names, which are any hashable objects and are numbered as they first appear. Or integers (E, 1 + A), rows of
            a head and its tails, padded with −1.
        num_nodes: N, for integers; by default one more than the largest node in ``edges``.
        weight_of: (E,) integers, the number of each edge's weight, if edges share weights; by default its own.
        goal: The node to derive, by default the only node that is not the tail of an edge.

    If ``goal`` is given, edges that do not help to derive it are pruned, such as the dead items of a chart. They keep
    their number and their weight, but every derivation has 0 of them and their gradient is 0.

    The nodes are sorted once, here, and every call reuses the order. ``nodes`` lists their names.

    Two ways to bracket three words, of which the second has the better pair:

    >>> import bellmax as bx
    >>> words = [("a", ()), ("b", ()), ("c", ())]
    >>> pairs = [("ab", ("a", "b")), ("bc", ("b", "c"))]
    >>> h = bx.Hypergraph([*words, *pairs, ("abc", ("ab", "c")), ("abc", ("a", "bc"))])
    >>> p = h.derivations(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.5, 0.0, 0.0]), omega="sparsemax")
    >>> p.expected_path
    tensor([1.0000, 1.0000, 1.0000, 0.2500, 0.7500, 0.2500, 0.7500])
    >>> h.derivation_edges(p.best_path())
    [('abc', ('a', 'bc')), ('a', ()), ('bc', ('b', 'c')), ('b', ()), ('c', ())]

    Of the same edges, those that derive "ab":

    >>> part = bx.Hypergraph(h.edges, goal="ab")
    >>> part.derivations(torch.zeros(7)).expected_path
    tensor([1., 1., 0., 1., 0., 0., 0.])

    """

    heads: Tensor  # (E,)
    tails: Tensor  # those of edge e are tails[tail_offset[e]:tail_offset[e + 1]]
    tail_offset: Tensor  # (E + 1,)
    weight_of: Tensor | None
    _tensors = ("heads", "tails", "tail_offset")

    def __init__(
        self,
        edges: Hyperedges,
        num_nodes: int | None = None,
        *,
        weight_of: Tensor | Sequence[int] | None = None,
        goal: Hashable | None = None,
    ) -> None:
        rows = _read(edges)
        used = int(max(rows.head.max(), rows.tail.max(initial=0))) + 1
        if rows.names is not None and num_nodes is not None:
            raise ValueError(f"num_nodes must be left out where edges hold names, got {num_nodes}")
        size = used if num_nodes is None else num_nodes
        _check_nodes(rows, rows.head >= size, rows.tail >= size, f"below num_nodes = {num_nodes}")
        pairs = np.stack((rows.tail, np.repeat(rows.head, rows.arity)), 1)
        self.nodes = range(size) if rows.names is None else rows.names
        if goal is None:
            level = sorting.levels(pairs, size)
            _check_graph(rows.head, pairs, level, self.nodes)
            index = sort(rows.head, rows.tail, level, rows.arity)
        else:
            is_part = reached(node_number("goal", goal, self.nodes), pairs[:, ::-1], size)
            pairs, kept = pairs[is_part[pairs[:, 1]]], is_part[rows.head]
            level = sorting.levels(pairs, size)
            check_order(pairs, level, self.nodes)
            _check_derived(rows.head, is_part, self.nodes)
            level[~is_part] = -1
            index = sort_pruned(rows.head, rows.tail, level, kept, rows.arity)
        shared = None if weight_of is None else _check_weight_of(weight_of, len(rows.head))
        if shared is not None:
            index = (*index, shared[index[2]].astype(np.int32))
        self._store(rows.head, rows.tail, rows.arity, level, index, rows.device)
        if shared is not None:
            self.weight_of, self._num_weights = torch.from_numpy(shared).to(rows.device), int(shared.max()) + 1

    def _store(
        self,
        head: NDArray[np.int64],
        tail: NDArray[np.int64],
        arity: NDArray[np.int64],
        level: NDArray[np.int64],
        index: tuple[NDArray[np.int32], ...],
        device: torch.device,
    ) -> None:
        offset = np.concatenate(([0], np.cumsum(arity)))
        parts = (head, tail, offset, level, *index)
        self.heads, self.tails, self.tail_offset, self.levels, *rest = (torch.from_numpy(p).to(device) for p in parts)
        self._index, self.weight_of, self._num_weights = tuple(rest), None, len(head)
        self.num_nodes, self.goal = len(level), self.nodes[int(level.argmax())]
        self._program = GraphProgram(self._longest_path, max_count=math.inf)

    @property
    def num_edges(self) -> int:
        return self.heads.shape[0]

    @property
    def num_weights(self) -> int:
        return self._num_weights

    @property
    def edges(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Rows (head, tails), by name."""
        offset, tails = self.tail_offset.tolist(), [self.nodes[node] for node in self.tails.tolist()]
        return [
            (self.nodes[h], tuple(tails[a:b])) for h, a, b in zip(self.heads.tolist(), offset, offset[1:], strict=False)
        ]

    @property
    def by_edge(self) -> Hypergraph:
        """The same hypergraph, where each edge has a weight of its own."""
        if self.weight_of is None:
            return self
        other = object.__new__(Hypergraph)
        vars(other).update(vars(self) | {"weight_of": None, "_index": self._index[:5], "_num_weights": self.num_edges})
        return other

    def to(self, device: torch.device | str) -> Self:
        """The same hypergraph on another device."""
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
        """The distribution over derivations of the goal, given the weights of the edges.

        Args:
            weights: (..., E) scores, or (..., W) if edges share them; −∞ removes an edge.
            omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard". Under
                :class:`SquaredL2` a node with one edge is not free; under ``"sparsemax"`` it is.
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.
            minimize: whether weights are costs, read now: then the value is a smoothed least cost, the best derivation
                has the least, ``topk`` ascends, and +∞ removes an edge.

        """
        return Derivations(self, weights, omega=omega, gamma=gamma, minimize=minimize)

    def derivation_edges(self, derivation: Tensor) -> list[Any]:
        """The edges (head, tails) of a derivation (E,), by name; nested lists for derivations (..., E).

        The goal's comes first, then all below its first tail, and so on. Where there is no derivation, for zeros, the
        list is empty.
        """
        if check_tensor("derivation", derivation).shape[-1:] != (self.num_edges,):
            raise ValueError(f"derivation must have shape (..., {self.num_edges}), got {tuple(derivation.shape)}")
        if derivation.ndim > 1:
            return [self.derivation_edges(one) for one in derivation]
        left: dict[int, list[int]] = {}
        for edge in derivation.nonzero().flatten().tolist()[::-1]:
            left.setdefault(int(self.heads[edge]), []).extend([edge] * round(float(derivation[edge])))
        found: list[Any] = []
        waiting = [int(self.levels.argmax())] if left else []
        while waiting:
            edges = left.get(waiting[-1])
            if not edges:
                raise ValueError(f"derivation must hold one derivation, got no edge to {self.nodes[waiting[-1]]}")
            edge = edges.pop()
            tails = self.tails[self.tail_offset[edge] : self.tail_offset[edge + 1]].tolist()
            found.append((self.nodes[waiting.pop()], tuple(self.nodes[tail] for tail in tails)))
            waiting += tails[::-1]
        if any(left.values()):
            raise ValueError("derivation must hold one derivation, got edges that are no part of it")
        return found

    def _longest_path(self) -> int:
        return self._largest_derivation

    @cached_property
    def _largest_derivation(self) -> int:
        """The number of edges of the largest derivation, with repetitions."""
        if self.device.type == "meta":
            return 1
        ones = torch.ones(self.num_weights, dtype=wide_dtype(self.device), device=self.device)
        most = float(self.derivations(ones, omega="hard").value)
        if most > _MOST_CHOICES:
            raise ValueError(f"derivations must have at most {_MOST_CHOICES} edges to be drawn, got up to {most:.10g}")
        return int(most)

    def _is_sum(self, counts: Tensor) -> bool:
        """True if a derivation has these counts (W,) of shared weights, or if the search for one is given up."""
        assert self.weight_of is not None
        entries = counts.nonzero().squeeze(1)
        is_live = self.levels[self.heads] >= 0
        edges = (torch.isin(self.weight_of, entries) & is_live).nonzero().squeeze(1)
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
    """Targets of a hypergraph: derivations, or sets of edges that derivations may use."""

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        p = cast("Derivations", self.p)
        edges, is_only = p._only_derivation(allowed)
        if is_checked(is_only) and not bool(is_only.all()):
            member = of_sequence((~is_only).nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be a single derivation of the goal, got a set of edges that is not one{member}"
            )
        self.check_possible(name, allowed)
        return self.solver.events_of_edges(edges).to(torch.promote_types(p.dtype, torch.float32))


class Derivations(GraphPaths):
    """The derivations of a :class:`Hypergraph`; an event is how often a derivation has each edge, (E,).

    Where edges share weights, it is how often it has each weight, (W,), and :attr:`by_edge` tells its edges.
    """

    _graph: Hypergraph
    _target_kind = DerivationTargets

    @property
    def hypergraph(self) -> Hypergraph:
        return self._graph

    @property
    def by_edge(self) -> Derivations:
        """The same distribution, where an event is how often a derivation has each edge, (E,)."""
        edge_of_weight = self._graph.weight_of
        if edge_of_weight is None:
            return self
        weights = self.weights.index_select(-1, edge_of_weight)
        fine = Derivations(self._graph.by_edge, weights, omega=self.omega, minimize=self.minimize)
        fine._solver.backend = self.backend
        return fine

    def _only_derivation(self, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges of the first derivation within what is allowed, and True if there is no other."""
        zeros = torch.zeros(allowed.shape, dtype=wide_dtype(self.device), device=self.device)
        weights = zeros.masked_fill(~allowed, -math.inf)
        log_count = Derivations(self._graph, weights, omega=Negentropy()).value
        first = Derivations(self._graph, weights, omega=Hard())._solver.expanded().expected_edges()
        return first, log_count.abs() < 0.5

    def _is_path(self, value: Tensor) -> Tensor:
        if self._graph.weight_of is None:
            return super()._is_path(value)
        edges, is_only = self._only_derivation(value > 0)
        is_path = is_only & (self._solver.events_of_edges(edges) == value).all(-1)
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
            needed = "weights that one derivation alone has (p.by_edge takes counts of edges)"
            raise ValueError(f"path must hold {needed}, got others{of_sequence((~is_only).nonzero()[0].tolist())}")
        return edges.to(event.dtype)

    def _why_no_path(self, event: Tensor) -> str:
        return "is not a derivation of the hypergraph"


# --- reading edges


class _Rows(NamedTuple):
    head: NDArray[np.int64]
    tail: NDArray[np.int64]
    arity: NDArray[np.int64]
    names: list[Hashable] | None
    device: torch.device


def _read(edges: Hyperedges) -> _Rows:
    if isinstance(edges, Tensor | np.ndarray):
        rows = _read_array(edges)
    elif isinstance(edges, str | Mapping) or not isinstance(edges, Iterable):
        raise ValueError(f"edges must be rows (head, tails), got a {type(edges).__name__}")
    else:
        rows = _read_list(list(edges))
    _check_nodes(rows, rows.head < 0, rows.tail < 0, ">= 0")
    return rows


def _read_array(edges: Any) -> _Rows:
    given = torch.as_tensor(edges)
    if given.ndim != 2 or 0 in given.shape:
        raise ValueError(f"edges must have shape (E, 1 + A) with E >= 1, got {tuple(given.shape)}")
    rows = as_integers(given, "edges").cpu().numpy()
    is_tail = rows[:, 1:] != -1
    return _Rows(rows[:, 0].copy(), rows[:, 1:][is_tail], is_tail.sum(1), None, given.device)


def _read_list(rows: list[Any]) -> _Rows:
    if not rows:
        raise ValueError("edges must have at least one row (head, tails), got none")
    for place, row in enumerate(rows):
        is_row = isinstance(row, tuple | list) and len(row) == 2 and isinstance(row[1], tuple | list)
        if not is_row or not all(isinstance(node, Hashable) for node in (row[0], *row[1])):
            needed = "(head, tails) of hashable nodes, with a tuple or list of tails"
            raise ValueError(f"edges must be rows {needed}, got {row!r} at row {place}")
    arity = np.array([len(tails) for _, tails in rows], dtype=np.int64)
    flat = [node for head, tails in rows for node in (head, *tails)]
    names = None
    if not all(isinstance(node, int | float | np.number) for node in flat):
        names = list(dict.fromkeys(flat))
        number = {name: place for place, name in enumerate(names)}
        flat = [number[name] for name in flat]
    numbers = as_integers(flat, "edges").numpy()
    is_head = np.zeros(len(flat), dtype=bool)
    is_head[np.cumsum(1 + arity) - 1 - arity] = True
    return _Rows(numbers[is_head], numbers[~is_head], arity, names, torch.device("cpu"))


def _check_nodes(rows: _Rows, is_bad_head: NDArray[np.bool_], is_bad_tail: NDArray[np.bool_], needed: str) -> None:
    owner = np.repeat(np.arange(len(rows.head)), rows.arity)
    bad = np.concatenate((np.flatnonzero(is_bad_head), owner[is_bad_tail]))
    if bad.size:
        row = int(bad.min())
        tails = tuple(rows.tail[owner == row].tolist())
        raise ValueError(f"edges must hold nodes {needed}, got ({rows.head[row]}, {tails}) at row {row}")


def _check_graph(
    head: NDArray[np.int64], pairs: NDArray[np.int64], level: NDArray[np.int64], names: Sequence[Hashable]
) -> None:
    check_order(pairs, level, names)
    is_head, is_tail = np.zeros((2, len(level)), dtype=bool)
    is_head[head], is_tail[pairs[:, 0]] = True, True
    check_touched(is_head | is_tail, names)
    _check_derived(head, np.ones(len(level), dtype=bool), names)
    hint = ". To keep the derivations of one of them, pass goal="
    check_single("goal (no edge's tail)", ~is_tail, names, hint=hint)


def _check_derived(head: NDArray[np.int64], is_part: NDArray[np.bool_], names: Sequence[Hashable]) -> None:
    """Raise a ValueError for a node of the part that has no edge into it."""
    is_underived = is_part.copy()
    is_underived[head] = False
    if is_underived.any():
        lacking = name_nodes(np.flatnonzero(is_underived), names)
        raise ValueError(f"edges must derive every node, but none leads to {lacking}: one without tails would")


def _check_weight_of(given: Any, num_edges: int) -> NDArray[np.int64]:
    weight_of = as_integers(given, "weight_of").cpu()
    if weight_of.shape != (num_edges,):
        raise ValueError(f"weight_of must have shape ({num_edges},), got {tuple(weight_of.shape)}")
    if int(weight_of.min()) < 0:
        raise ValueError(f"weight_of must hold numbers >= 0, got {int(weight_of.min())}")
    return np.asarray(weight_of.numpy())
