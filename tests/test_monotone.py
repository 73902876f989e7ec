"""Monotone alignments against enumeration and hand-written graphs."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from support.checks import close
from support.problems import Enumerated, for_second_order, potentials, two_kinds
from torch import Tensor

import bellmax as bx


def all_alignments(frames: int, tokens: int) -> Tensor:
    """Every alignment as an event, (K, T, J), by the first frames of the tokens."""
    events = []
    for begins in combinations(range(1, frames), tokens - 1):
        token = torch.zeros(frames, dtype=torch.int64)
        for begin in begins:
            token[begin:] += 1
        events.append(torch.eye(tokens, dtype=torch.float64)[token])
    return torch.stack(events)


def by_hand(scores: Tensor, omega: bx.Regularizer) -> tuple[Enumerated, list[tuple[int, int]]]:
    """The graph, whose node 0 is the source, and the cell of each other node."""
    frames, tokens = scores.shape
    cells = [(t, j) for t in range(frames) for j in range(min(t + 1, tokens))]
    number = {cell: 1 + n for n, cell in enumerate(cells)}
    edges, weights = [(0, 1)], [float(scores[0, 0])]
    for t, j in cells:
        for before in (j, j - 1):
            if (t - 1, before) in number:
                edges.append((number[t - 1, before], number[t, j]))
                weights.append(float(scores[t, j]))
    return Enumerated(edges, 1 + len(cells), weights, omega), cells


def test_every_omega_equals_the_graph_by_hand(omega: bx.Regularizer, backend: str) -> None:
    scores = potentials(5, 3)
    scores[2, 1] = -math.inf
    p, (wanted, cells) = bx.MonotonicAlignment(scores, omega=omega), by_hand(scores, omega)
    close(p.value, wanted.value)
    path = torch.zeros_like(scores)
    for (_, child), mass in zip(wanted.edges, wanted.expected_path, strict=True):
        path[cells[child - 1]] += float(mass)
    close(p.expected_path, path, 1e-9)
    close(p.entropy(), wanted.entropy, 1e-9)
    assert int(p.num_paths) == len(wanted.all_paths)


def test_the_value_is_the_forward_sum(backend: str) -> None:
    scores = potentials(6, 3, seed=1)
    paths = all_alignments(6, 3)
    sums = (paths * scores).sum((1, 2))
    p = bx.MonotonicAlignment(scores)
    assert int(p.num_paths) == math.comb(5, 2)
    close(p.value, sums.logsumexp(0))
    close(p.log_prob(paths), sums.log_softmax(0))
    assert p.best_path().equal(paths[sums.argmax()])
    assert p.durations().tolist() == paths[sums.argmax()].sum(0).tolist()
    close(p.topk(3)[0], sums.topk(3).values)


@two_kinds
def test_lengths_equal_pairs_without_padding(omega: bx.Regularizer, backend: str) -> None:
    scores = potentials(2, 2, 6, 3, requires_grad=True)
    frames, tokens = torch.tensor([[6, 4], [3, 1]]), torch.tensor([[3, 2], [3, 1]])
    outside = (torch.arange(6)[:, None] >= frames[..., None, None]) | (torch.arange(3) >= tokens[..., None, None])
    p = bx.MonotonicAlignment(scores.masked_fill(outside, math.nan), lengths=(frames, tokens), omega=omega)
    p.value.sum().backward()
    assert scores.grad is not None
    assert bool((scores.grad[outside] == 0).all())
    assert p.durations().sum(-1).equal(frames)
    for b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        alone = bx.MonotonicAlignment(scores.detach()[b][: frames[b], : tokens[b]], omega=omega)
        close(p.value[b].detach(), alone.value)
        close(p.expected_path[b][: frames[b], : tokens[b]].detach(), alone.expected_path)
        whole = torch.zeros(6, 3, dtype=torch.float64)
        whole[: frames[b], : tokens[b]] = alone.best_path()
        close(p[b].log_prob(whole).detach(), alone.log_prob(alone.best_path()))


def test_more_tokens_than_frames_have_no_path(backend: str) -> None:
    scores = potentials(2, 3, requires_grad=True)
    p = bx.MonotonicAlignment(scores, lengths=(2, 3))
    assert p.value == -math.inf
    p.value.backward()
    assert scores.grad is not None
    assert not scores.grad.any()
    assert p.durations().tolist() == [0, 0, 0]


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    scores = potentials(2, 5, 3, requires_grad=True)

    def value(scores: Tensor) -> Tensor:
        return bx.MonotonicAlignment(scores, lengths=([5, 4], [3, 2]), omega=omega).value

    assert torch.autograd.gradcheck(value, scores, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, scores, fast_mode=True)


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (torch.zeros(3), {}, r"scores must have shape \(..., T, J\)"),
        (torch.zeros(3, 2), {"lengths": (3, 3)}, r"lengths\[1\] must be from 1 to 2, got 3"),
        (torch.zeros(3, 2), {"lengths": 3}, "lengths must be a pair"),
        (
            torch.zeros(2, 3, 5),
            {},
            r"must have at least as many frames as tokens, got 3 frames and 5 tokens\. .*scores\.mT",
        ),
    ],
)
def test_errors_name_the_argument(scores: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.MonotonicAlignment(scores, **options)


def test_a_wrong_path_is_named() -> None:
    p = bx.MonotonicAlignment(torch.zeros(3, 2))
    for wrong in (
        [[1, 0], [0, 1], [1, 0]],
        [[1, 0], [1, 0], [1, 0]],
        [[0, 1], [0, 1], [0, 1]],
        [[1, 0], [0, 0], [0, 1]],
    ):
        with pytest.raises(ValueError, match="is not a path of the graph"):
            p.log_prob(torch.tensor(wrong, dtype=torch.float32))
