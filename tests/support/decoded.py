"""Every path of small structures in the decoded form, with its score: plain recursions over lists and floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement, groupby, product
from typing import Any

from torch import Tensor

from support.structures import DAG, HYPER, LABELS, MATRIX, TREE

Paths = dict[Any, float]
"""The score of each path, by its decoded form as nested tuples."""


def _chain(x: list[Any]) -> Paths:
    steps, states = len(x), len(x[0])
    paths = {}
    for tags in product(range(states), repeat=steps):
        paths[tags] = sum(x[t][tag][tags[t - 1] if t else 0] for t, tag in enumerate(tags))
    return paths


def _scored_chain(x: list[Any]) -> Paths:
    transitions = MATRIX.tolist()
    return {
        tags: sum(x[t][tag] + (transitions[tag][tags[t - 1]] if t else 0) for t, tag in enumerate(tags))
        for tags in product(range(2), repeat=len(x))
    }


def _warping(x: list[Any], band: float = float("inf")) -> Paths:
    def extend(path: tuple[Any, ...], cost: float) -> Iterator[tuple[Any, float]]:
        i, j = path[-1]
        if (i, j) == (len(x) - 1, len(x[0]) - 1):
            yield path, cost
        for k, m in ((i + 1, j + 1), (i + 1, j), (i, j + 1)):
            if k < len(x) and m < len(x[0]) and abs(k - m) <= band:
                yield from extend((*path, (k, m)), cost + x[k][m])

    return dict(extend(((0, 0),), x[0][0]))


def _ctc(x: list[Any]) -> Paths:
    paths = {}
    for labels in product(range(len(x[0])), repeat=len(x)):
        if [label for label, _ in groupby(labels) if label] == LABELS.tolist():
            paths[labels] = sum(x[t][label] for t, label in enumerate(labels))
    return paths


def _durations(x: list[Any]) -> Paths:
    frames, tokens = len(x), len(x[0])
    paths = {}
    for durations in product(range(1, frames + 1), repeat=tokens):
        if sum(durations) == frames:
            token = [j for j, duration in enumerate(durations) for _ in range(duration)]
            paths[durations] = sum(x[t][j] for t, j in enumerate(token))
    return paths


def _transducer(x: list[Any]) -> Paths:
    blank, emit = [row[:3] for row in x], [row[3:] for row in x]
    paths = {}
    for frames in combinations_with_replacement(range(len(x)), 2):
        score = sum(emit[t][u] for u, t in enumerate(frames))
        paths[frames] = score + sum(blank[t][sum(f <= t for f in frames)] for t in range(len(x)))
    return paths


def _alignment(x: list[Any], is_local: bool = False) -> Paths:
    """Gaps open at −1; they extend at −0.5, or at −1 in local alignments. Rows of a gap come before columns."""
    rows, columns, extends = len(x), len(x[0]), -1.0 if is_local else -0.5
    paths: Paths = {}

    def extend(path: tuple[Any, ...], i: int, j: int, score: float) -> None:
        before = path[-1] if path else (0, 0)
        if is_local and path and min(before) >= 0:
            paths[path] = score
        if not is_local and (i, j) == (rows, columns):
            paths[path] = score
        if i < rows and j < columns:
            extend((*path, (i, j)), i + 1, j + 1, score + x[i][j])
        if (path or not is_local) and i < rows and before[0] >= 0:
            extend((*path, (i, -1)), i + 1, j, score + (extends if before[1] < 0 else -1.0))
        if (path or not is_local) and j < columns:
            extend((*path, (-1, j)), i, j + 1, score + (extends if before[0] < 0 else -1.0))

    for i, j in product(range(rows), range(columns)) if is_local else [(0, 0)]:
        if is_local:
            extend(((i, j),), i + 1, j + 1, x[i][j])
        else:
            extend((), i, j, 0.0)
    return paths


def _segments(score: Callable[[int, int, int], float], steps: int, longest: int) -> Paths:
    """``score(first, end, label)``: the score of a segment."""
    transitions, paths = MATRIX.tolist(), Paths()

    def extend(path: tuple[Any, ...], total: float) -> None:
        first = path[-1][1] if path else 0
        if first == steps:
            paths[path] = total
        for end, label in product(range(first + 1, min(first + longest, steps) + 1), range(2)):
            link = transitions[label][path[-1][2]] if path else 0
            extend((*path, (first, end, label)), total + link + score(first, end, label))

    extend((), 0.0)
    return paths


def _semi_markov(x: list[Any]) -> Paths:
    return _segments(lambda first, end, label: x[end - 1][end - first - 1][label], len(x), len(x[0]))


def _scored_semi_markov(x: list[Any]) -> Paths:
    durations = MATRIX.tolist()
    return _segments(
        lambda first, end, label: sum(x[t][label] for t in range(first, end)) + durations[end - first - 1][label],
        len(x),
        2,
    )


def _brackets(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the spans of each binary tree over some words, in the order of their first word, wide spans first."""
    if first == last:
        yield ((first, first),)
    for split in range(first, last):
        for left, right in product(_brackets(first, split), _brackets(split + 1, last)):
            yield ((first, last), *left, *right)


def _spans(x: list[Any]) -> Paths:
    trees = list(_brackets(0, len(x) - 1))
    return {tuple(s for s in tree if s[0] < s[1]): sum(x[i][j] for i, j in tree) for tree in trees}


def _labelled_spans(x: list[Any]) -> Paths:
    paths = {}
    for tree in _brackets(0, len(x) - 1):
        for labels in product(range(len(x[0][0])), repeat=len(tree)):
            spans = tuple((i, j, label) for (i, j), label in zip(tree, labels, strict=True))
            paths[spans] = sum(x[i][j][label] for i, j, label in spans)
    return paths


def _heads(x: list[Any]) -> Paths:
    words, paths = len(x) - 1, Paths()
    for heads in product(range(words + 1), repeat=words):
        arcs = [(head, word) for word, head in enumerate(heads, 1)]
        if sum(head == 0 for head in heads) == 1 and all(_reaches_root(heads, word) for word in range(1, words + 1)):
            spans = [tuple(sorted(arc)) for arc in arcs]
            if not any(i < k < j < m for i, j in spans for k, m in spans):
                paths[heads] = sum(x[head][word] for head, word in arcs)
    return paths


def _reaches_root(heads: tuple[int, ...], word: int) -> bool:
    for _ in heads:
        word = heads[word - 1] if word else 0
    return word == 0


def _labels(x: list[Any]) -> Paths:
    pairwise, parents = MATRIX.tolist(), TREE.parents.tolist()
    return {
        labels: sum(x[v][k] + (pairwise[labels[parents[v]]][k] if parents[v] >= 0 else 0) for v, k in enumerate(labels))
        for labels in product(range(2), repeat=len(x))
    }


def _dag(x: list[float]) -> Paths:
    edges, paths = DAG.edges.tolist(), Paths()

    def extend(path: tuple[int, ...], node: int, score: float) -> None:
        if node == DAG.num_nodes - 1:
            paths[path] = score
        for edge, (parent, child) in enumerate(edges):
            if parent == node:
                extend((*path, edge), child, score + x[edge])

    extend((), 0, 0.0)
    return paths


def _derivations(x: list[float]) -> Paths:
    def derive(node: str) -> Iterator[tuple[int, ...]]:
        for edge, (head, tails) in enumerate(HYPER.edges):
            if head == node:
                for parts in product(*(list(derive(tail)) for tail in tails)):
                    yield (edge, *(e for part in parts for e in part))

    return {edges: sum(x[edge] for edge in edges) for edges in derive("c")}


def _walks(x: list[Any]) -> Paths:
    paths = Paths()

    def extend(walk: tuple[Any, ...], score: float) -> None:
        i, j = walk[-1][:2]
        if (i, j) == (len(x) - 1, len(x[0]) - 1):
            paths[walk] = score
        for move, (k, m) in enumerate(((i + 1, j + 1), (i + 1, j), (i, j + 1))):
            if k < len(x) and m < len(x[0]):
                extend((*walk, (k, m, 0, move)), score + (x[k][m] if move < 2 else 0))

    extend(((0, 0, 0, -1),), 0.0)
    return paths


ENUMERATE: dict[str, Callable[[Any], Paths]] = {
    "Chain": _chain,
    "ScoredChain": _scored_chain,
    "DAG": _dag,
    "Hypergraph": _derivations,
    "DTW": _warping,
    "DTW, band": lambda x: _warping(x, band=1),
    "Lattice": _walks,
    "CTC": _ctc,
    "MonotonicAlignment": _durations,
    "SequenceAlignment": _alignment,
    "SequenceAlignment, local": lambda x: _alignment(x, is_local=True),
    "Transducer": _transducer,
    "SemiMarkov": _semi_markov,
    "ScoredSemiMarkov": _scored_semi_markov,
    "SpanTrees": _spans,
    "SpanTrees, labels": _labelled_spans,
    "DependencyTrees": _heads,
    "TreeModel": _labels,
}
"""For each structure of :mod:`support.structures`, its paths for scores as nested lists."""


def as_tuples(decoded: Any) -> Any:
    """One path in the decoded form, a tensor or a list, as nested tuples without padding."""
    if isinstance(decoded, Tensor):
        decoded = decoded.tolist()
    rows = [tuple(row) if isinstance(row, list) else row for row in decoded]
    return tuple(row for row in rows if row != -1 and (isinstance(row, int) or set(row) != {-1}))


def units(name: str, path: Any) -> set[Any]:
    """The units of a path in the decoded form, of which :meth:`most_accurate` gets as few as possible wrong."""
    if name == "MonotonicAlignment":
        return set(enumerate(token for token, duration in enumerate(path) for _ in range(duration)))
    if name.startswith("SequenceAlignment"):
        return {pair for pair in path if min(pair) >= 0}
    if name.startswith(("DTW", "Lattice", "SemiMarkov", "ScoredSemiMarkov", "SpanTrees", "DAG", "Hypergraph")):
        return set(path)
    return set(enumerate(path))
