"""Random problems for the programs of examples/textbook.py, and the scores of all their solutions by exhaustive search.

The searches use no dynamic programming. They list every solution of a problem and add its scores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmax.recursions.check import list_derivations as list_derivations
from bellmax.recursions.check import smoothed as smoothed

Array = NDArray[np.float64]
Scores = Iterator[float]

PATH = Path(__file__).parents[2] / "examples" / "textbook.py"
if not PATH.exists():
    pytest.skip("not run from a checkout", allow_module_level=True)
_spec = importlib.util.spec_from_file_location("textbook", PATH)
assert _spec is not None
assert _spec.loader is not None
textbook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(textbook)


# --- sets of items


def subsets(n: int) -> Iterator[list[int]]:
    """All subsets of the numbers below n."""
    for count in range(n + 1):
        yield from map(list, combinations(range(n), count))


def compositions(n: int) -> Iterator[list[int]]:
    """All lists of positive integers with the sum n."""
    for cuts in subsets(n - 1):
        yield [b - a for a, b in pairwise([0, *(c + 1 for c in cuts), n])]


def knapsack(value: Array, sizes: tuple[int, ...], room: int) -> Scores:
    return (value[s].sum() for s in subsets(len(value)) if sum(sizes[i] for i in s) <= room)


def unbounded_knapsack(value: Array, sizes: tuple[int, ...], room: int) -> Scores:
    counts = product(*(range(room // size + 1) for size in sizes))
    return (value @ n for n in counts if np.dot(sizes, n) <= room)


def coin_change(cost: Array, coins: tuple[int, ...], amount: int) -> Scores:
    counts = product(*(range(amount // coin + 1) for coin in coins))
    return (cost @ n for n in counts if np.dot(coins, n) == amount)


def rod_cutting(price: Array, length: int) -> Scores:
    return (sum(price[piece - 1] for piece in cut) for cut in compositions(length) if max(cut) <= len(price))


def scheduling(value: Array, jobs: tuple[tuple[int, int], ...]) -> Scores:
    for s in subsets(len(jobs)):
        hours = [hour for job in s for hour in range(*jobs[job])]
        if len(hours) == len(set(hours)):
            yield value[s].sum()


def independent_set(weight: Array, parents: tuple[int, ...]) -> Scores:
    return (weight[s].sum() for s in subsets(len(weight)) if not any(parents[node] in s for node in s))


# --- sequences


def walks(rows: int, columns: int, steps: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """All walks on a grid from (0, 0) to the opposite corner, as lists of cells."""
    if (rows, columns) == (1, 1):
        yield [(0, 0)]
    for i, j in steps:
        if i < rows and j < columns:
            yield from ([*walk, (rows - 1, columns - 1)] for walk in walks(rows - i, columns - j, steps))


ALL_STEPS = [(0, 1), (1, 0), (1, 1)]


def maximum_subarray(value: Array) -> Scores:
    return (value[i:j].sum() for i, j in combinations(range(len(value) + 1), 2))


def increasing_subsequence(weight: Array, numbers: tuple[int, ...]) -> Scores:
    for s in subsets(len(weight)):
        if s and all(numbers[i] < numbers[j] for i, j in pairwise(s)):
            yield weight[s].sum()


def common_subsequence(match: Array) -> Scores:
    n, m = match.shape
    for walk in walks(n + 1, m + 1, ALL_STEPS):
        yield sum(match[i, j] for (i, j), after in pairwise(walk) if after == (i + 1, j + 1))


def edit_distance(change: Array, gap: Array) -> Scores:
    n, m = change.shape
    for walk in walks(n + 1, m + 1, ALL_STEPS):
        yield sum(change[i, j] if after == (i + 1, j + 1) else float(gap) for (i, j), after in pairwise(walk))


def time_warping(cost: Array) -> Scores:
    return (sum(cost[cell] for cell in walk) for walk in walks(*cost.shape, ALL_STEPS))


def word_segmentation(score: Array, text: str, words: tuple[str, ...]) -> Scores:
    for lengths in compositions(len(text)):
        ends = np.cumsum(lengths)
        pieces = [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        if all(piece in words for piece in pieces):
            yield sum(score[words.index(piece)] for piece in pieces)


def line_breaking(cost: Array) -> Scores:
    for lengths in compositions(len(cost)):
        ends = np.cumsum(lengths)
        yield sum(cost[end - length, end - 1] for end, length in zip(ends, lengths, strict=True))


def viterbi(emission: Array, transition: Array) -> Scores:
    for states in product(range(len(transition)), repeat=len(emission)):
        emitted = sum(scores[state] for scores, state in zip(emission, states, strict=True))
        yield emitted + sum(transition[b, a] for a, b in pairwise(states))


# --- trees


def trees(i: int, j: int) -> Iterator[list[tuple[int, int, int]]]:
    """All binary trees over the interval from i to j, as lists of (start, split, end)."""
    if j == i + 1:
        yield []
    for k in range(i + 1, j):
        yield from ([(i, k, j), *left, *right] for left in trees(i, k) for right in trees(k, j))


def matrix_chain(cost: Array) -> Scores:
    return (sum(cost[node] for node in tree) for tree in trees(0, len(cost) - 1))


def triangulation(diagonal: Array) -> Scores:
    n = len(diagonal)
    for tree in trees(0, n - 1):
        yield sum(diagonal[i, j] for i, _, j in tree if (i, j) != (0, n - 1))


def cky(span: Array) -> Scores:
    for tree in trees(0, len(span)):
        yield np.trace(span) + sum(span[i, j - 1] for i, _, j in tree)


def search_tree(frequency: Array) -> Scores:
    """Insert the keys in every order. A node is an ancestor of a key if it was inserted before all keys between."""
    n = len(frequency)
    depths = set()
    for order in permutations(range(n)):
        time = [order.index(key) for key in range(n)]
        ancestors = [[min(time[min(a, b) : max(a, b) + 1]) == time[a] for a in range(n)] for b in range(n)]
        depths.add(tuple(map(sum, ancestors)))
    return (frequency @ depth for depth in depths)


def nussinov(pair: Array, loop: int) -> Scores:
    pairs = [(i, j) for i, j in combinations(range(len(pair)), 2) if j - i > loop]
    for s in subsets(len(pairs)):
        chosen = [pairs[n] for n in s]
        bases = [base for bonded in chosen for base in bonded]
        is_nested = not any(i < k < j < m for (i, j), (k, m) in permutations(chosen, 2))
        if is_nested and len(bases) == len(set(bases)):
            yield sum(pair[bonded] for bonded in chosen)


# --- grids and graphs


def grid_path(cost: Array) -> Scores:
    return (sum(cost[cell] for cell in walk) for walk in walks(*cost.shape, ALL_STEPS[:2]))


def longest_path(length: Array, edges: tuple[tuple[int, int], ...]) -> Scores:
    goal = max(head for _, head in edges)
    for s in subsets(len(edges)):
        route = sorted(edges[n] for n in s)
        if [tail for tail, _ in route] + [goal] == [0] + [head for _, head in route]:
            yield length[s].sum()


def round_trip(distance: Array) -> Scores:
    for order in permutations(range(1, len(distance))):
        yield sum(distance[a, b] for a, b in pairwise((0, *order, 0)))


# --- problems


class Problem:
    """A program with random scores and its keyword arguments.

    Args:
        name: The name of the program.
        shapes: The shapes of the scores.
        options: The keyword arguments of the program.

    """

    def __init__(self, name: str, *shapes: tuple[int, ...], **options: Any) -> None:
        self.name, self.shapes, self.options = name, shapes, options
        self.program = getattr(textbook, name)

    def __repr__(self) -> str:
        return f"{self.name}-{'-'.join('x'.join(map(str, shape)) for shape in self.shapes)}"

    @cached_property
    def numbers(self) -> list[Array]:
        """The scores, in float64, from a generator that the name and the shapes determine."""
        rng = np.random.default_rng(list(repr(self).encode()))
        return [rng.standard_normal(shape) for shape in self.shapes]

    def tensors(self, batch: int | None = None) -> list[Tensor]:
        """Return the scores as tensors that require a gradient. With a batch, member k is shifted by k / 4."""
        tensors = [torch.tensor(array) for array in self.numbers]
        if batch:
            tensors = [torch.stack([tensor + k / 4 for k in range(batch)]) for tensor in tensors]
        return [tensor.requires_grad_() for tensor in tensors]

    def solutions(self) -> Array:
        """Return the scores of all solutions by exhaustive search, best first."""
        search: Callable[..., Scores] = globals()[self.name]
        scores = np.sort(np.array(list(search(*self.numbers, **self.options)), dtype=np.float64))
        return scores if self.program(*self.tensors(), **self.options).minimize else scores[::-1].copy()


WORDS = "no", "now", "nowhere", "where", "here", "w"
PROBLEMS = [
    Problem("knapsack", (3,), sizes=(2, 3, 1), room=4),
    Problem("knapsack", (5,), sizes=(3, 1, 2, 2, 9), room=6),
    Problem("unbounded_knapsack", (2,), sizes=(2, 3), room=5),
    Problem("unbounded_knapsack", (3,), sizes=(3, 1, 2), room=5),
    Problem("coin_change", (2,), coins=(2, 3), amount=12),
    Problem("coin_change", (3,), coins=(1, 3, 4), amount=8),
    Problem("rod_cutting", (2,), length=4),
    Problem("rod_cutting", (5,), length=5),
    Problem("scheduling", (4,), jobs=((0, 3), (2, 4), (3, 6), (5, 9))),
    Problem("scheduling", (5,), jobs=((1, 2), (0, 3), (3, 4), (2, 5), (4, 7))),
    Problem("independent_set", (4,), parents=(-1, 0, 1, 1)),
    Problem("independent_set", (6,), parents=(-1, 0, 0, 1, 1, 2)),
    Problem("maximum_subarray", (4,)),
    Problem("maximum_subarray", (1,)),
    Problem("maximum_subarray", (6,)),
    Problem("increasing_subsequence", (4,), numbers=(2, 1, 3, 3)),
    Problem("increasing_subsequence", (6,), numbers=(3, 1, 4, 1, 5, 9)),
    Problem("common_subsequence", (2, 2)),
    Problem("common_subsequence", (2, 4)),
    Problem("edit_distance", (2, 2), ()),
    Problem("edit_distance", (4, 2), ()),
    Problem("time_warping", (2, 3)),
    Problem("time_warping", (4, 3)),
    Problem("word_segmentation", (6,), text="nowhere", words=WORDS),
    Problem("word_segmentation", (4,), text="aabaab", words=("a", "b", "aab", "aa")),
    Problem("line_breaking", (3, 3)),
    Problem("line_breaking", (5, 5)),
    Problem("viterbi", (3, 2), (2, 2)),
    Problem("viterbi", (3, 3), (3, 3)),
    Problem("matrix_chain", (4, 4, 4)),
    Problem("matrix_chain", (5, 5, 5)),
    Problem("search_tree", (3,)),
    Problem("search_tree", (5,)),
    Problem("triangulation", (4, 4)),
    Problem("triangulation", (6, 6)),
    Problem("nussinov", (4, 4), loop=0),
    Problem("nussinov", (6, 6), loop=1),
    Problem("cky", (3, 3)),
    Problem("cky", (5, 5)),
    Problem("grid_path", (2, 3)),
    Problem("grid_path", (4, 3)),
    Problem("longest_path", (5,), edges=((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))),
    Problem("longest_path", (7,), edges=((0, 1), (0, 1), (1, 3), (0, 2), (2, 3), (3, 4), (1, 4))),
    Problem("round_trip", (3, 3)),
    Problem("round_trip", (5, 5)),
]
SMALLEST = list({problem.name: problem for problem in reversed(PROBLEMS)}.values())[::-1]
LARGEST = list({problem.name: problem for problem in PROBLEMS}.values())
