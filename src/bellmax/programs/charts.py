"""Charts of trees over a sentence, as hypergraphs: brackets of spans (CKY) and projective arcs (Eisner).

θ is one tensor, (B, n, n) or (B, n, n, L): scores of spans [first word, last word(, label)], or of arcs
[head, modifier] between n positions, of which 0 is the root. ``index`` is (lengths,), (B,) int64: the number of
positions of each sentence. All sentences share the chart of the longest: the goal has an edge from the item of every
length, and only the edge of the sentence's length has weight 0 instead of −∞.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

import bellmax.programs.graph as graph
from bellmax.modes import outside_modes
from bellmax.programs.checks import check_lengths
from bellmax.programs.program import Program
from bellmax.tensors import Tensors

Integers = NDArray[np.int64]


class Chart(NamedTuple):
    """The hypergraph of a chart: rows (head, tails), padded with −1, and the number of each edge's weight.

    Weights are the flat scores, a 0 for edges without a score, and the weight of the goal's edge from each length.
    """

    rows: Integers  # (E, 4)
    weight: Integers
    level: Integers  # (N,), the level of each node


class ChartProgram(Program):
    """The trees of a chart: "spans", "arcs" or "arcs_of_one_root"."""

    index_dims = (0,)
    tape_is_large = True

    def __init__(self, name: str) -> None:
        self.name, self.scores = name, ("scores" if name == "spans" else "arcs",)

    def _graph(self, theta: Tensors) -> _Graph:
        return _sorted_chart(self.name, tuple(theta[0].shape[1:]), theta[0].device)

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """The items and the goal. They are counted by formula: a sweep in exp space needs no graph of n³ edges."""
        n = theta[0].shape[1]
        if self.name != "spans":  # items to the right of each position, and to the left of each but the root
            return (n * n + (n - 1) ** 2 + 1,)
        return (n * (n + 1) // 2 + 1 if theta[0].ndim == 3 else n * n + 1,)

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return 4 * theta[0].shape[1]

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        check_lengths("lengths", index[0], 1, theta[0].shape[1])

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        return [self.in_sentence(theta, index)]

    def in_sentence(self, theta: Tensors, index: Tensors) -> Tensor:
        """True at the spans or arcs of each sentence, (B, n, n) or (B, n, n, 1)."""
        position = torch.arange(theta[0].shape[1], device=theta[0].device)
        row, column = position.unsqueeze(-1), position
        within = position < index[0].unsqueeze(-1)
        both = within.unsqueeze(-1) & within.unsqueeze(-2)
        used = both & ((row <= column) if self.name == "spans" else (row != column) & (column > 0))
        return used.unsqueeze(-1) if theta[0].ndim == 4 else used

    # --- the expansion: a hypergraph whose edges share the weights of spans or arcs

    def extra_nodes(self, theta: Tensors, index: Tensors) -> int:
        """One: the goal, which has a single edge of finite weight."""
        return 1

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return self._graph(theta).integers

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        (scores,) = theta
        position = torch.arange(scores.shape[1], device=scores.device)
        ends = scores.new_zeros(()).masked_fill(position != index[0].unsqueeze(-1) - 1, -math.inf)
        used = scores.masked_fill(~self.in_sentence(theta, index), -math.inf).flatten(1)
        return torch.cat((used, scores.new_zeros((len(scores), 1)), ends), 1)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        (scores,) = z
        return pad(scores.flatten(1), (0, 1 + scores.shape[1]))

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        (scores,) = theta
        return [edges[:, : scores.shape[1:].numel()].reshape(edges.shape[0], *scores.shape[1:])]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return self.onto_scores(edges, theta, index)[0]

    # --- trees

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return self.event_of(edges, theta, index)

    def event_of(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Trees (..., E) of the hypergraph as 0/1 tensors (..., *event)."""
        event = theta[0].shape[1:]
        totals = edges.new_zeros((*edges.shape[:-1], event.numel() + 1 + event[0]))
        totals = totals.index_add(-1, self._graph(theta).weight, edges)
        return totals[..., : event.numel()].reshape(*edges.shape[:-1], *event)


# --- charts


def chart(name: str, event: tuple[int, ...]) -> Chart:
    """Return the hypergraph of a program for events of this shape, (n, n) or (n, n, L)."""
    return _spans(*event) if name == "spans" else _arcs(event[0], single_root=name == "arcs_of_one_root")


class _Graph(NamedTuple):
    integers: tuple[Tensor, ...]  # the index of the graph engine, see bellmax.programs.graph
    weight: Tensor  # (E,), the number of each edge's weight


@lru_cache(maxsize=8)
def _sorted_chart(name: str, event: tuple[int, ...], device: torch.device) -> _Graph:
    """Return the sorted chart on a device, cached because it depends on shapes only."""
    rows, weight, level = chart(name, event)
    is_tail = rows[:, 1:] >= 0
    index = graph.sort(rows[:, 0], rows[:, 1:][is_tail], level, is_tail.sum(1))
    arrays = (*index, weight[index[2]].astype(np.int32), weight)
    with outside_modes():
        *integers, by_edge = (torch.from_numpy(array).to(device) for array in arrays)
    return _Graph(tuple(integers), by_edge)


def _spans(words: int, _: int, labels: int | None = None) -> Chart:
    """The CKY chart: a span is one word, or joins two adjacent spans.

    With labels, a span of several words has an extra node for the choice of its label. Otherwise each split would need
    an edge for each label.
    """
    first, split, last = _splits(words)
    i, j = np.triu_indices(words, 1)
    word, number = np.arange(words), _by_width(words)
    scores, goal = words * words * (labels or 1), words * (words + 1) // 2
    ends = _rows(np.full(words, goal), number[0]), scores + 1 + word
    halves = number[first, split], number[split + 1, last]
    if labels is None:
        edges = [
            (_rows(number[word, word]), word * words + word),
            (_rows(number[first, last], *halves), first * words + last),
        ]
        return _chart([*edges, ends], [*_widths(words), words])
    label, kind = np.arange(labels), np.zeros((words, words), dtype=np.int64)
    kind[i, j] = goal + 1 + np.arange(len(i))
    kind[word, word] = number[word, word]
    i, j = np.triu_indices(words)
    weight = ((i * words + j)[:, None] * labels + label).ravel()
    edges = [
        (_rows(kind[i, j].repeat(labels)), weight),
        (_rows(number[first, last], *halves, kind[first, last]), np.full(len(first), scores)),
    ]
    return _chart([*edges, ends], [*_widths(words), words, *np.zeros(len(i) - words, dtype=np.int64)])


def _arcs(positions: int, single_root: bool) -> Chart:
    """Eisner's chart. An incomplete item adds an arc to two complete items; a complete item joins one of each kind.

    ``forth`` and ``back`` are incomplete items, with an arc to the last or to the first position. ``right`` and
    ``left`` are complete items, with their head at the first or at the last position.
    """
    first, split, last = _splits(positions)
    scores, table = positions * positions, np.arange(positions * positions).reshape(positions, positions)
    forth, back, right, left = (table + kind * scores for kind in range(4))
    none = np.int64(scores)
    inner = first > 0  # the root has no head
    allowed = (first > 0) | (split == 0) if single_root else np.ones_like(inner)
    position = np.arange(positions)
    halves = right[first, split], left[split + 1, last]
    edges = [
        (_rows(right[position, position]), np.full(positions, none)),
        (_rows(left[position, position][1:]), np.full(positions - 1, none)),
        (_rows(forth[first, last], *halves)[allowed], (first * positions + last)[allowed]),
        (_rows(back[first, last], *halves)[inner], (last * positions + first)[inner]),
        (_rows(right[first, last], forth[first, split + 1], right[split + 1, last]), np.full(len(first), none)),
        (_rows(left[first, last], left[first, split], back[split, last])[inner], np.full(int(inner.sum()), none)),
        (_rows(np.full(positions - 1, 4 * scores), right[0, 1:]), scores + position[1:] + 1),
    ]
    width = (table % positions - table // positions).ravel()
    levels = np.concatenate((2 * width - 1, 2 * width - 1, 2 * width, 2 * width, [2 * positions]))
    used = np.unique(np.concatenate([rows[:, 0] for rows, _ in edges]))
    number = np.full(len(levels) + 1, -1)  # number[−1] = −1: padding stays −1
    number[used] = np.arange(len(used))
    return _chart([(number[rows], weight) for rows, weight in edges], levels[used])


def _splits(positions: int) -> tuple[Integers, Integers, Integers]:
    """All triples first ≤ split < last in lexicographic order, as three arrays.

    They are built for one ``first`` after another, so that Ctrl-C is handled in between.
    """
    pairs = [np.triu_indices(positions - first, 1) for first in range(positions)]
    counts = [len(split) for split, _ in pairs]
    first = np.repeat(np.arange(positions), counts)
    split, last = (np.concatenate(arrays) + first for arrays in zip(*pairs, strict=True))
    return first, split, last


def _by_width(words: int) -> Integers:
    """Number of the node of each span [first, last], (words, words). Narrow spans come first."""
    i, j = np.ogrid[:words, :words]
    width = np.maximum(j - i, 0)
    return np.asarray(width * words - width * (width - 1) // 2 + i)


def _widths(words: int) -> Integers:
    """Width − 1 of each span in the order of :func:`_by_width`: the levels of the nodes."""
    return np.repeat(np.arange(words), np.arange(words, 0, -1))


def _rows(head: Integers, *tails: Integers) -> Integers:
    """Rows (E, 4) of edges: the head and up to three tails, padded with −1."""
    rows = np.full((len(head), 4), -1)
    for column, nodes in enumerate((head, *tails)):
        rows[:, column] = nodes
    return rows


def _chart(edges: list[tuple[Integers, Integers]], level: Integers | list[int]) -> Chart:
    """Join groups of edges (rows, weight) into a chart."""
    rows, weight = (np.concatenate(arrays) for arrays in zip(*edges, strict=True))
    return Chart(rows, weight, np.asarray(level))
