"""Solve small examples of classical dynamic programs, each written as a bellmax.program."""

from __future__ import annotations

import argparse
import math
from bisect import bisect_right
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

import bellmax as bx

# --- choosing items


@bx.program("item")
def knapsack(value, *, sizes, room):
    """0/1 knapsack: the most valuable items that fit into a room, O(items · room)."""
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        for r in range(room, size - 1, -1):
            best[r] = bx.max(best[r], best[r - size] + value[i])
    return best[room]


@bx.program("item")
def unbounded_knapsack(value, *, sizes, room):
    """Unbounded knapsack: items can be taken many times, O(items · room)."""
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        for r in range(size, room + 1):
            best[r] = bx.max(best[r], best[r - size] + value[i])
    return best[room]


@bx.program("coin")
def coin_change(cost, *, coins, amount):
    """Coin change: the cheapest coins that add up to an amount, O(coins · amount)."""
    least = [0.0] + [math.inf] * amount
    for i, coin in enumerate(coins):
        for a in range(coin, amount + 1):
            least[a] = bx.min(least[a], least[a - coin] + cost[i])
    return least[amount]


@bx.program("length")
def rod_cutting(price, *, length):
    """Rod cutting: the most valuable division of a rod into pieces, O(length²)."""
    best = [0.0]
    for n in range(1, length + 1):
        pieces = range(1, min(n, len(price)) + 1)
        best.append(bx.max(best[n - piece] + price[piece - 1] for piece in pieces))
    return best[length]


@bx.program("job")
def scheduling(value, *, jobs):
    """Weighted interval scheduling: the best jobs that do not overlap, O(n log n)."""
    ends = [end for _, end in jobs]  # in increasing order
    best = [0.0]
    for i, (start, _) in enumerate(jobs):
        best.append(bx.max(best[i], best[bisect_right(ends, start)] + value[i]))
    return best[-1]


@bx.program("node")
def independent_set(weight, *, parents):
    """Independent set of a tree: the heaviest nodes without neighbors, O(n)."""
    taken, skipped = list(weight), [0.0] * len(parents)
    for node in range(len(parents) - 1, 0, -1):  # a parent has a smaller number
        skipped[parents[node]] += bx.max(taken[node], skipped[node])
        taken[parents[node]] += skipped[node]
    return bx.max(taken[0], skipped[0])


# --- sequences


@bx.program("step")
def maximum_subarray(value):
    """Maximum subarray (Kadane's algorithm): the run with the largest sum, O(n)."""
    ending = [value[0]]
    for v in value[1:]:
        ending.append(bx.max(0.0, ending[-1]) + v)
    return bx.max(ending)


@bx.program("item")
def increasing_subsequence(weight, *, numbers):
    """Heaviest increasing subsequence, O(n²)."""
    best = []
    for i, number in enumerate(numbers):
        smaller = [best[j] for j in range(i) if numbers[j] < number]
        best.append(bx.max(0.0, *smaller) + weight[i])
    return bx.max(best)


@bx.program("i j")
def common_subsequence(match):
    """Longest common subsequence of two strings, O(n · m)."""
    row = [0.0] * (match.shape[1] + 1)
    for scores in match:
        above, row = row, [0.0]
        for j, score in enumerate(scores):
            row.append(bx.max(above[j + 1], row[j], above[j] + score))
    return row[-1]


@bx.program("i j, ")
def edit_distance(change, gap):
    """Edit distance (Levenshtein, Wagner and Fischer), O(n · m)."""
    row = [gap * j for j in range(change.shape[1] + 1)]
    for i, costs in enumerate(change):
        above, row = row, [gap * (i + 1)]
        for j, cost in enumerate(costs):
            row.append(bx.min(above[j] + cost, above[j + 1] + gap, row[j] + gap))
    return row[-1]


@bx.program("i j")
def time_warping(cost):
    """Dynamic time warping of two series, O(n · m)."""
    row = [0.0] + [math.inf] * cost.shape[1]
    for costs in cost:
        above, row = row, [math.inf]
        for j, c in enumerate(costs):
            row.append(bx.min(above[j], above[j + 1], row[j]) + c)
    return row[-1]


@bx.program("word")
def word_segmentation(score, *, text, words):
    """Word segmentation of a text without spaces, O(characters · words)."""
    best = [0.0]
    for end in range(1, len(text) + 1):
        last = [w for w, word in enumerate(words) if text.endswith(word, 0, end)]
        best.append(bx.max(best[end - len(words[w])] + score[w] for w in last))
    return best[-1]


@bx.program("word word")
def line_breaking(cost):
    """Text justification: the cheapest division of words into lines, O(n²)."""
    least = [0.0]
    for last in range(len(cost)):
        lines = [least[first] + cost[first, last] for first in range(last + 1)]
        least.append(bx.min(lines))
    return least[-1]


@bx.program("step state, state state")
def viterbi(emission, transition):
    """Viterbi: the best sequence of hidden states, O(steps · states²)."""
    best = emission[0]
    for scores in emission[1:]:
        arriving = [bx.max(best + row) for row in transition]  # row: current state
        best = scores + arriving
    return bx.max(best)


# --- intervals


@bx.program("matrix matrix matrix")
def matrix_chain(cost):
    """Matrix chain multiplication: the cheapest order of products, O(n³)."""
    n = len(cost) - 1
    least = {(i, i + 1): 0.0 for i in range(n)}
    for width in range(2, n + 1):
        for i in range(n - width + 1):
            j = i + width
            splits = [least[i, k] + least[k, j] + cost[i, k, j] for k in range(i + 1, j)]
            least[i, j] = bx.min(splits)
    return least[0, n]


@bx.program("key")
def search_tree(frequency):
    """Optimal binary search tree: the fewest comparisons, O(n³)."""
    n = len(frequency)
    least = {(i, i): 0.0 for i in range(n + 1)}
    for width in range(1, n + 1):
        for i in range(n - width + 1):
            j = i + width
            subtrees = [least[i, root] + least[root + 1, j] for root in range(i, j)]
            least[i, j] = bx.min(subtrees) + sum(frequency[i:j])
    return least[0, n]


@bx.program("vertex vertex")
def triangulation(diagonal):
    """Optimal triangulation of a convex polygon: the shortest diagonals, O(n³)."""
    n = len(diagonal)
    least = {(i, i + 1): 0.0 for i in range(n - 1)}
    for width in range(2, n):
        for i in range(n - width):
            j = i + width
            within = bx.min(least[i, k] + least[k, j] for k in range(i + 1, j))
            least[i, j] = within + diagonal[i, j] if width < n - 1 else within
    return least[0, n - 1]


@bx.program("base base")
def nussinov(pair, *, loop=3):
    """Nussinov folding: the best nested base pairs of an RNA molecule, O(n³)."""
    n = len(pair)
    best = [[0.0] * (n + 1) for _ in range(n + 1)]  # best[i][j]: bases i … j − 1
    for i in reversed(range(n)):
        for j in range(i + 1, n + 1):
            partners = range(i + loop + 1, j)
            folds = [best[i + 1][k] + best[k + 1][j] + pair[i, k] for k in partners]
            best[i][j] = bx.max(best[i + 1][j], *folds)
    return best[0][n]


@bx.program("word word")
def cky(span):
    """CKY parsing: the best binary tree over the words of a sentence, O(n³)."""
    n = len(span)
    best = {(i, i): span[i, i] for i in range(n)}
    for width in range(1, n):
        for i in range(n - width):
            j = i + width
            splits = [best[i, k] + best[k + 1, j] for k in range(i, j)]
            best[i, j] = bx.max(splits) + span[i, j]
    return best[0, n - 1]


# --- grids and graphs


@bx.program("row column")
def grid_path(cost):
    """Cheapest path on a grid, right and down, O(rows · columns)."""
    least = [0.0] + [math.inf] * (cost.shape[1] - 1)
    for row in cost:
        left = math.inf
        for j, c in enumerate(row):
            left = least[j] = bx.min(left, least[j]) + c
    return least[-1]


@bx.program("edge")
def longest_path(length, *, edges):
    """Longest path of an acyclic graph (critical path method), O(edges)."""
    arcs = [[] for _ in range(1 + max(head for _, head in edges))]
    for edge, (tail, head) in enumerate(edges):  # tail < head
        arcs[head].append((tail, length[edge]))
    best = [0.0]
    for incoming in arcs[1:]:
        best.append(bx.max(best[tail] + weight for tail, weight in incoming))
    return best[-1]


@bx.program("city city")
def round_trip(distance):
    """Traveling salesman (Held and Karp): the shortest round trip, O(n² · 2ⁿ)."""
    n = len(distance)
    least = {((city,), city): distance[0, city] for city in range(1, n)}
    for count in range(2, n):
        for visited in combinations(range(1, n), count):
            for last in visited:
                before = tuple(city for city in visited if city != last)
                ways = [least[before, city] + distance[city, last] for city in before]
                least[visited, last] = bx.min(ways)
    others = tuple(range(1, n))
    return bx.min(least[others, last] + distance[last, 0] for last in others)


# --- command line


def by_pair(first: str, second: str, equal: float, different: float) -> Tensor:
    """Return one of two scores for each pair of letters of two strings."""
    return torch.tensor([[equal if a == b else different for b in second] for a in first])


def line_costs(words: str, width: int) -> Tensor:
    """Return the squared space left on a line from word i to word j, and infinity if the words do not fit."""
    end = torch.tensor([len(word) + 1 for word in words.split()]).cumsum(0)
    start = torch.cat((torch.zeros(1), end[:-1]))
    left = width + 1 - (end - start[:, None])
    return left.square().masked_fill(left < 0, math.inf)


def base_pairs(rna: str) -> Tensor:
    """Return 1 for each pair of bases that bind, and −∞ for other pairs."""
    bonds = ("AU", "UA", "CG", "GC", "GU", "UG")
    return torch.tensor([[1.0 if a + b in bonds else -math.inf for b in rna] for a in rna])


def examples() -> list[tuple[Any, list[Tensor], dict[str, Any]]]:
    """Return a small problem for each program: the program, its scores and its keyword arguments."""
    tensor = torch.tensor
    series, copy = tensor([0.0, 1.0, 3.0, 1.0]), tensor([0.0, 0.0, 1.0, 3.0, 3.0, 1.0])
    emission = tensor([[0.3, 0.04], [0.4, 0.3], [0.1, 0.6]])  # healthy or fever: normal, cold, dizzy
    transition = tensor([[0.7, 0.4], [0.3, 0.6]])  # current state, previous state
    sizes = tensor([30.0, 35.0, 15.0, 5.0, 10.0, 20.0, 25.0])
    corners = tensor([[0.0, 0.0], [4.0, 0.0], [6.0, 2.0], [5.0, 5.0], [1.0, 4.0]])
    diagonal = torch.cdist(corners, corners)
    span = torch.zeros(4, 4)
    span[1, 3] = span[2, 3] = 1.0
    ride = tensor([[0.0, 10, 15, 20], [10, 0, 35, 25], [15, 35, 0, 30], [20, 25, 30, 0]])
    words = ("no", "now", "nowhere", "where", "here")
    return [
        (knapsack, [tensor([2.0, 3.0, 1.0, 4.0])], {"sizes": (3, 4, 2, 5), "room": 9}),
        (unbounded_knapsack, [tensor([2.0, 3.2, 5.0])], {"sizes": (2, 3, 4), "room": 9}),
        (coin_change, [tensor([1.0, 1.0, 1.0])], {"coins": (1, 3, 4), "amount": 6}),
        (rod_cutting, [tensor([1.0, 5.0, 8.0, 9.0])], {"length": 5}),
        (scheduling, [tensor([3.0, 4.0, 2.0, 5.0])], {"jobs": ((0, 3), (2, 5), (4, 6), (5, 9))}),
        (independent_set, [tensor([4.0, 3.0, 1.0, 2.0, 2.0])], {"parents": (-1, 0, 0, 1, 1)}),
        (maximum_subarray, [tensor([-2.0, 1, -3, 4, -1, 2, 1, -5, 4])], {}),
        (increasing_subsequence, [torch.ones(6)], {"numbers": (3, 1, 4, 1, 5, 9)}),
        (common_subsequence, [by_pair("ABCBDAB", "BDCABA", 1.0, -math.inf)], {}),
        (edit_distance, [by_pair("kitten", "sitting", 0.0, 1.0), tensor(1.0)], {}),
        (time_warping, [(series[:, None] - copy).square()], {}),
        (word_segmentation, [tensor([-1.0, -2.0, -5.0, -2.0, -1.5])], {"text": "nowhere", "words": words}),
        (line_breaking, [line_costs("aaa bb cc ddddd", 6)], {}),
        (viterbi, [emission.log(), transition.log()], {}),
        (matrix_chain, [sizes[:, None, None] * sizes[:, None] * sizes], {}),
        (search_tree, [tensor([34.0, 8.0, 50.0])], {}),
        (triangulation, [diagonal], {}),
        (nussinov, [base_pairs("GGGAAAUCC")], {}),
        (cky, [span], {}),
        (grid_path, [tensor([[1.0, 3.0, 1.0], [1.0, 5.0, 1.0], [4.0, 2.0, 1.0]])], {}),
        (longest_path, [tensor([3.0, 2.0, 4.0, 1.0, 5.0])], {"edges": ((0, 1), (0, 2), (1, 3), (2, 3), (1, 2))}),
        (round_trip, [ride], {}),
    ]


def show(program: Any, scores: list[Tensor], options: dict[str, Any], omega: str) -> None:
    """Print the optimum of a problem, the scores that it uses, and the value and the number of derivations."""
    best, p = (program(*scores, omega=name, **options) for name in ("hard", omega))
    counts = {
        f"{name}{index or ''}": float(used[tuple(index)])
        for name, used in best.gradient.items()
        for index in used.nonzero().tolist()
    }
    entries = ", ".join(entry if count == 1 else f"{count:g} × {entry}" for entry, count in counts.items())
    print(f"{program.__name__}: {program.function.__doc__}")
    print(f"    optimum {best.value:g}: {entries}")
    print(f"    value under {omega} {p.value:.4g}, {p.num_paths:g} derivations\n")


def main() -> None:
    problems = {program.__name__: (program, scores, options) for program, scores, options in examples()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(problems)}")
    omegas = ("negentropy", "sparsemax", "entmax", "l2", "hard")
    parser.add_argument("--omega", choices=omegas, default="negentropy", help="default: negentropy")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in problems]
    if unknown:
        parser.error(f"there is no program {unknown[0]!r}: choose from {', '.join(problems)}")
    for name in arguments.names or problems:
        show(*problems[name], arguments.omega)


if __name__ == "__main__":
    main()
