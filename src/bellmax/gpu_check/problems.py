"""Programs that have GPU kernels, with random scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import bellmax as bx

Shape = tuple[int, ...]
Omega = str | bx.Regularizer


class Problem(NamedTuple):
    """A program to check and to time.

    Args:
        name: Name in the report.
        sizes: Meaning of the numbers of a shape.
        scores: Function that creates random scores of a shape, in float64 on the CPU.
        values: Function from scores and Ω to values (B,).
        small: Shape for checks.
        large: Shape for times.

    """

    name: str
    sizes: str
    scores: Callable[[Shape], list[Tensor]]
    values: Callable[[list[Tensor], Omega], Tensor]
    small: Shape
    large: Shape


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def _lengths(scores: Tensor, dim: int = 1) -> Tensor:
    """Lengths of a batch along a dimension: the first has full length, the others down to half of it."""
    longest = scores.shape[dim]
    return longest - torch.arange(scores.shape[0], device=scores.device) % max(longest // 2, 1)


def _chain_scores(shape: Shape) -> list[Tensor]:
    """Return random scores of a chain, with one forbidden transition."""
    batch, steps, states = shape
    transitions = _random(states, states)
    transitions[0, -1] = -math.inf if states > 1 else 0.0
    return [_random(batch, steps, states), transitions, _random(states, seed=1), _random(states, seed=2)]


def _from_scores(scores: list[Tensor], omega: Omega) -> Tensor:
    """Return the value of a chain of sequences with different lengths."""
    emissions, transitions, start, end = scores
    lengths = _lengths(emissions)
    return bx.Chain.from_scores(emissions, transitions, start=start, end=end, lengths=lengths, omega=omega).value


def _dense(scores: list[Tensor], omega: Omega) -> Tensor:
    (theta,) = scores
    return bx.Chain(theta, lengths=_lengths(theta), omega=omega).value


def _dtw(scores: list[Tensor], omega: Omega) -> Tensor:
    (cost,) = scores
    return bx.DTW(cost, lengths=(_lengths(cost, 1), _lengths(cost, 2)), omega=omega).value


def _ctc(scores: list[Tensor], omega: Omega) -> Tensor:
    """Return the value of CTC for targets that use each label in turn."""
    (logits,) = scores
    batch, frames, classes = logits.shape
    labels = max(frames // 7, 1)
    targets = torch.arange(batch * labels, device=logits.device).reshape(batch, labels) % (classes - 1) + 1
    return bx.CTC(logits, targets, omega=omega).value


def _monotone(scores: list[Tensor], omega: Omega) -> Tensor:
    frames, tokens = scores[0].shape[-2:]
    return bx.MonotonicAlignment(scores[0], lengths=(frames, min(frames, tokens)), omega=omega).value


def _gaps(scores: list[Tensor], omega: Omega) -> Tensor:
    match, gap_open, gap_extend = scores
    return bx.SequenceAlignment(match, gap_open=gap_open - 3, gap_extend=gap_extend - 1, omega=omega).value


def _transducer(scores: list[Tensor], omega: Omega) -> Tensor:
    blank, emit = scores
    return bx.Transducer(blank, emit, omega=omega).value


def _graph(scores: list[Tensor], omega: Omega) -> Tensor:
    """Return the value of a graph of levels in which each node leads to all nodes of the next level."""
    (weights,) = scores
    batch, levels, width, _ = weights.shape
    nodes = torch.arange(levels * width).reshape(levels, width) + 1
    steps = torch.cartesian_prod(torch.arange(levels - 1), torch.arange(width), torch.arange(width))
    between = torch.stack((nodes[steps[:, 0], steps[:, 1]], nodes[steps[:, 0] + 1, steps[:, 2]]), 1)
    first = torch.stack((torch.zeros(width, dtype=torch.int64), nodes[0]), 1)
    last = torch.stack((nodes[-1], torch.full((width,), levels * width + 1)), 1)
    edges = torch.cat((first, between, last))
    edge_weights = weights.reshape(batch, -1)[:, : len(edges)]
    return bx.DAG(edges).to(weights.device).paths(edge_weights, omega=omega).value


def _trees(scores: list[Tensor], omega: Omega) -> Tensor:
    (spans,) = scores
    return bx.SpanTrees(spans, lengths=_lengths(spans), omega=omega).value


def _one(shape: Shape) -> list[Tensor]:
    return [_random(*shape)]


def _gap_scores(shape: Shape) -> list[Tensor]:
    return [_random(*shape), _random(1)[0], _random(1, seed=1)[0]]


def _span_scores(shape: Shape) -> list[Tensor]:
    batch, words, _ = shape
    return [_random(batch, words, words)]


def _transducer_scores(shape: Shape) -> list[Tensor]:
    batch, frames, labels = shape
    return [_random(batch, frames, labels + 1), _random(batch, frames, labels)]


PROBLEMS = (
    Problem("chain from scores", "B, T, S", _chain_scores, _from_scores, (3, 5, 5), (64, 128, 32)),
    Problem("chain of two states", "B, T, S", _chain_scores, _from_scores, (3, 7, 2), (3200, 50, 2)),
    Problem("dense chain", "B, T, S, S", _one, _dense, (3, 4, 5, 5), (64, 128, 32, 32)),
    Problem("soft-DTW", "B, N, M", _one, _dtw, (2, 4, 5), (32, 256, 256)),
    Problem("CTC", "B, T, V", _one, _ctc, (2, 7, 5), (32, 400, 32)),
    Problem("monotone alignment", "B, N, M", _one, _monotone, (2, 6, 4), (16, 800, 200)),
    Problem("alignment with gaps", "B, N, M", _gap_scores, _gaps, (2, 3, 4), (8, 500, 500)),
    Problem("transducer", "B, T, U", _transducer_scores, _transducer, (2, 4, 3), (8, 150, 30)),
    Problem("graph", "B, levels, width, width", _one, _graph, (2, 3, 3, 3), (8, 64, 16, 16)),
    Problem("trees of words", "B, words, words", _span_scores, _trees, (2, 4, 4), (32, 40, 40)),
)
OMEGAS: dict[str, Omega] = {
    "negentropy": "negentropy",
    "l2": "l2",
    "Tsallis 1.5": bx.Tsallis(1.5),
    "hard": "hard",
}
