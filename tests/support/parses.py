"""Parse trees over few words by enumeration, and chart recursions as plain loops, independent of the library."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

import bellmax as bx


def brackets(first: int, last: int) -> list[list[tuple[int, int]]]:
    """The spans of every binary tree over words."""
    if first == last:
        return [[(first, last)]]
    return [
        [(first, last), *left, *right]
        for split in range(first, last)
        for left in brackets(first, split)
        for right in brackets(split + 1, last)
    ]


def projective(words: int, single_root: bool) -> list[tuple[int, ...]]:
    """Heads of the words 1 … n in every projective tree."""
    return [heads for heads in itertools.product(range(words + 1), repeat=words) if _is_tree(heads, single_root)]


def _is_tree(heads: tuple[int, ...], single_root: bool) -> bool:
    if single_root and heads.count(0) != 1:
        return False
    for word in range(1, len(heads) + 1):
        above = word
        for _ in heads:
            above = heads[above - 1] if above else 0
        if above:
            return False
    arcs = [(min(word, head), max(word, head)) for word, head in enumerate(heads, 1)]
    return not any(a < c < b < d for a, b in arcs for c, d in arcs)


def all_trees(kind: str, words: int, places: int, labels: int | None = None) -> Tensor:
    """Every tree as an event, (trees, *event), 0/1, padded to the event's size."""
    if kind != "spans":
        heads = projective(words, kind == "one root")
        trees = torch.zeros(len(heads), places, places, dtype=torch.float64)
        for tree, head in zip(trees, heads, strict=True):
            tree[list(head), list(range(1, words + 1))] = 1
        return trees
    events = []
    for spans in brackets(0, words - 1):
        for names in itertools.product(range(labels or 1), repeat=len(spans)):
            tree = torch.zeros(places, places, labels or 1, dtype=torch.float64)
            for (first, last), label in zip(spans, names, strict=True):
                tree[first, last, label] = 1
            events.append(tree if labels else tree.squeeze(-1))
    return torch.stack(events)


def value(kind: str, scores: Tensor, words: int, omega: bx.Regularizer) -> Tensor:
    """DP_Ω of one sentence, by the recursion itself."""
    return _of_spans(scores, words, omega) if kind == "spans" else _of_arcs(scores, words, omega, kind == "one root")


def _of_spans(scores: Tensor, words: int, omega: bx.Regularizer) -> Tensor:
    weights = scores if scores.ndim == 2 else omega.max(scores)
    vertex = omega.max(scores.new_zeros(1))
    inside: dict[tuple[int, int], Tensor] = {}
    for i in range(words):
        inside[i, i] = weights[i, i] + vertex if scores.ndim == 2 else weights[i, i]
    for width in range(1, words):
        for i in range(words - width):
            j = i + width
            splits = [inside[i, k] + inside[k + 1, j] for k in range(i, j)]
            inside[i, j] = weights[i, j] + omega.max(torch.stack(splits))
    return inside[0, words - 1]


def _of_arcs(scores: Tensor, words: int, omega: bx.Regularizer, single_root: bool) -> Tensor:
    vertex, last = omega.max(scores.new_zeros(1)), words
    none = scores.new_full((), -math.inf)
    right = {(i, i): vertex for i in range(last + 1)}
    left, forth, back = dict(right), {}, {}
    for width in range(1, last + 1):
        for i in range(last + 1 - width):
            j = i + width
            halves = omega.max(torch.stack([right[i, k] + left[k + 1, j] for k in range(i, j)]))
            forth[i, j], back[i, j] = scores[i, j] + halves, scores[j, i] + halves if i else none
            left[i, j] = omega.max(torch.stack([left[i, k] + back[k, j] for k in range(i, j)]))
            right[i, j] = omega.max(torch.stack([forth[i, k] + right[k, j] for k in range(i + 1, j + 1)]))
            if single_root and i == 0 and j < last:
                right[i, j] = none
    return right[0, last]


def model(kind: str, scores: Tensor, **options: Any) -> bx.SpanTrees | bx.DependencyTrees:
    if kind == "spans":
        return bx.SpanTrees(scores, labels=scores.shape[-1] != scores.shape[-2], **options)
    return bx.DependencyTrees(scores, single_root=kind == "one root", **options)
