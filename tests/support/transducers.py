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
