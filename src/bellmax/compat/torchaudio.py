"""A replacement for the alignments of ``torchaudio.functional``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bellmax.layouts.values import check_lengths
from bellmax.structures.ctc import CTC
from bellmax.transforms import is_checked


def forced_align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    blank: int = 0,
) -> tuple[Tensor, Tensor]:
    """The best alignment of CTC, with the arguments and results of ``torchaudio.functional.forced_align``.

    Differences: B may be any number, with lengths that differ. Past the frames of a sequence labels are the blank, and
    scores 0. Padding of targets may hold anything. Among alignments with the same score another one may be chosen.

    Args:
        log_probs: (B, T, C).
        targets: integers (B, L), without the blank.
        input_lengths: (B,), the frames of each sequence; T by default.
        target_lengths: (B,), the labels of each sequence; L by default.
        blank: the class that stands for no label.

    Returns:
        The label of each frame (B, T), of the targets' dtype, and its log-probability (B, T).

    >>> log_probs = torch.tensor([[[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7]]]).log()
    >>> labels, scores = forced_align(log_probs, torch.tensor([[1, 2]]))
    >>> labels
    tensor([[1, 0, 2]])
    >>> merge_tokens(labels[0], scores[0].exp())
    [TokenSpan(token=1, start=0, end=1, score=0.8...), TokenSpan(token=2, start=2, end=3, score=0.69...)]
    """
    if log_probs.ndim != 3 or targets.ndim != 2:
        got = f"{tuple(log_probs.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"log_probs and targets must have shapes (B, T, C) and (B, L), got {got}")
    for name, own, most in (("input_lengths", input_lengths, log_probs), ("target_lengths", target_lengths, targets)):
        if own is not None and is_checked(own):
            check_lengths(name, own, int(most is log_probs), most.shape[1])
    frames = log_probs.shape[1] if input_lengths is None else input_lengths
    count = targets.shape[1] if target_lengths is None else target_lengths
    p = CTC(log_probs, targets, lengths=(frames, count), blank=blank, omega="hard")
    labels = p.best_labels()
    if is_checked(labels) and bool((labels[:, :1] < 0).any()):
        where = int((labels[:, 0] < 0).nonzero()[0])
        frames, count = p.lengths[where].tolist()
        given = p.targets[where, :count]
        raise ValueError(
            f"targets must have an alignment of finite score, got {count} labels, {int((given.diff() == 0).sum())} of "
            f"them equal to the one before, for {frames} frames of sequence {where}"
        )
    past = labels < 0
    labels = labels.masked_fill(past, blank)
    scores = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).masked_fill(past, 0)
    return labels.to(targets.dtype), scores


@dataclass
class TokenSpan:
    """The frames start ≤ t < end of a token, and the mean of their scores."""

    token: int
    start: int
    end: int
    score: float

    def __len__(self) -> int:
        return self.end - self.start


def merge_tokens(tokens: Tensor, scores: Tensor, blank: int = 0) -> list[TokenSpan]:
    """The tokens of an alignment with their frames, as ``torchaudio.functional.merge_tokens`` gives them.

    Args:
        tokens: (T,), the label of each frame, as from :func:`forced_align` for one sequence.
        scores: (T,), of each frame: log-probabilities, or probabilities.
        blank: the class that stands for no label.

    """
    if tokens.ndim != 1 or scores.shape != tokens.shape:
        got = f"{tuple(tokens.shape)} and {tuple(scores.shape)}"
        raise ValueError(f"tokens and scores must have one shape (T,), got {got}")
    if not len(tokens):
        return []
    values, counts = torch.unique_consecutive(tokens, return_counts=True)
    ends = counts.cumsum(0)
    runs = zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return [TokenSpan(token, a, b, scores[a:b].mean().item()) for token, a, b in runs if token != blank]
