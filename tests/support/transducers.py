"""Transducers by a loop in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def forward_sum(blank: Tensor, emit: Tensor) -> Tensor:
    """Log-sum over all paths of one sequence, with blank (T, U + 1) and emit (T, U), by a differentiable loop."""
    frames, columns = blank.shape
    rows: list[list[Tensor]] = []
    for t in range(frames):
        row: list[Tensor] = []
        for u in range(columns):
            into = [rows[t - 1][u] + blank[t - 1, u]] if t else []
            into += [row[u - 1] + emit[t, u - 1]] if u else []
            row.append(torch.stack(into).logsumexp(0) if into else blank.new_zeros(()))
        rows.append(row)
    return rows[-1][-1] + blank[-1, -1]


def log_likelihood(logits: Tensor, targets: Tensor, blank: int, frames: int, labels: int) -> Tensor:
    """log p(targets) of one sequence, from logits (T, U + 1, V)."""
    log_probs = logits[:frames, : labels + 1].log_softmax(-1)
    return forward_sum(log_probs[..., blank], log_probs[:, torch.arange(labels), targets[:labels]])


Arc = tuple[str, int, int, int]  # "blank" or "label", the frame and the number of labels before it, the duration


def tdt_arcs(frames: int, labels: int, durations: tuple[int, ...]) -> list[Arc]:
    """Every arc of a token-and-duration transducer, by its definition."""
    arcs: list[Arc] = []
    for t in range(frames):
        for u in range(labels + 1):
            arcs += [("label", t, u, d) for d in durations if u < labels and t + d < frames]
            arcs += [("blank", t, u, d) for d in durations if d > 0 and t + d <= frames]
    return arcs


def tdt_end(arc: Arc) -> tuple[int, int]:
    """The number of frames and of labels after an arc."""
    kind, t, u, d = arc
    return t + d, u + (kind == "label")


def tdt_paths(frames: int, labels: int, durations: tuple[int, ...]) -> list[list[Arc]]:
    """Every path of a token-and-duration transducer, by depth-first search."""
    paths: list[list[Arc]] = []
    leaving: dict[tuple[int, int], list[Arc]] = {}
    for arc in tdt_arcs(frames, labels, durations):
        leaving.setdefault((arc[1], arc[2]), []).append(arc)

    def extend(node: tuple[int, int], taken: list[Arc]) -> None:
        if node == (frames, labels):
            paths.append(taken)
        for arc in leaving.get(node, []):
            extend(tdt_end(arc), [*taken, arc])

    extend((0, 0), [])
    return paths


def tdt_score(
    arc: Arc, tokens: Tensor, times: Tensor, targets: Tensor, durations: tuple[int, ...], sigma: float
) -> Tensor:
    """The score of an arc, from log-probabilities of tokens (T, U + 1, V) and of durations (T, U + 1, D)."""
    kind, t, u, d = arc
    token = int(targets[u]) if kind == "label" else 0
    return tokens[t, u, token] - sigma + times[t, u, durations.index(d)]
