"""compat.torchaudio against every alignment of small targets, and against torchaudio where it is installed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import close
from support.ctc import Alignments, collapse
from torch import Tensor

import bellmax as bx
from bellmax.compat.torchaudio import TokenSpan, forced_align, merge_tokens

BLANK = 1


@pytest.fixture
def original() -> ModuleType:
    """Import torchaudio, whose wheels do not load without the GPU libraries that they were built for."""
    try:
        return importlib.import_module("torchaudio.functional")
    except (ImportError, OSError):
        pytest.skip("torchaudio is not installed, or does not load")


def batch() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    log_probs = torch.randn(3, 6, 4).log_softmax(-1)
    targets = torch.tensor([[0, 0, 2], [3, 2, 1], [2, -1, 77]], dtype=torch.int32)
    lengths = {"input_lengths": torch.tensor([6, 4, 5]), "target_lengths": torch.tensor([3, 2, 1])}
    return log_probs, targets, lengths


def test_best_of_all_alignments_in_a_batch(backend: str) -> None:
    log_probs, targets, lengths = batch()
    labels, scores = forced_align(log_probs, targets, **lengths, blank=BLANK)
    assert (labels.dtype, scores.dtype) == (targets.dtype, log_probs.dtype)
    for n, (frames, count) in enumerate(zip(*(length.tolist() for length in lengths.values()), strict=True)):
        rows, target = log_probs[n, :frames].numpy().astype(np.float64), targets[n, :count].tolist()
        best = Alignments(rows, target, bx.Hard(), BLANK).best
        assert labels[n].tolist() == best + [BLANK] * (6 - frames)
        close(scores[n, :frames], log_probs[n, range(frames), best])
        assert not scores[n, frames:].any()
        spans = merge_tokens(labels[n], scores[n], BLANK)
        assert [span.token for span in spans] == collapse(best, BLANK) == target
        for span in spans:
            assert {best[t] for t in range(span.start, span.end)} == {span.token}
            assert span.score == pytest.approx(float(scores[n, span.start : span.end].mean()))


def test_spans_of_tokens() -> None:
    tokens, scores = torch.tensor([0, 3, 3, 0, 3, 1, 0]), torch.tensor([0.0, 0.5, 0.25, 0.0, 1.0, 2.0, 0.0])
    spans = merge_tokens(tokens, scores)
    assert spans == [TokenSpan(3, 1, 3, 0.375), TokenSpan(3, 4, 5, 1.0), TokenSpan(1, 5, 6, 2.0)]
    assert [len(span) for span in spans] == [2, 1, 1]
    assert merge_tokens(tokens[:0], scores[:0]) == []
    assert merge_tokens(tokens[:1], scores[:1]) == []


@pytest.mark.parametrize("seed", range(20))
def test_equals_torchaudio(original: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    frames, classes, blank = draw(5, 60), draw(2, 12), draw(0, 2)
    log_probs = torch.randn(1, frames, classes, generator=generator).log_softmax(-1)
    targets = torch.randint(classes - 1, (1, draw(1, frames // 2 + 1)), generator=generator)
    targets = targets + (targets >= blank)
    (labels, scores), (theirs, of_theirs) = (
        module.forced_align(log_probs, targets, blank=blank) for module in (bx.compat.torchaudio, original)
    )
    assert labels.equal(theirs)
    assert scores.equal(of_theirs)
    ours, expected = (module.merge_tokens(labels[0], scores[0], blank) for module in (bx.compat.torchaudio, original))
    assert [vars(span) for span in ours] == [vars(span) for span in expected]


def test_errors() -> None:
    log_probs, targets, lengths = batch()
    with pytest.raises(ValueError, match=r"targets must not hold the blank, got 1 at label 2 of sequence 1"):
        forced_align(log_probs, targets, blank=BLANK)
    with pytest.raises(ValueError, match="targets must be from 0 to 3, got 77 at label 2 of sequence 2"):
        forced_align(log_probs, targets.clamp(min=2))
    too_long = "targets length is too long for CTC: got 3 labels with 1 adjacent repeats for 3 frames of sequence 0"
    with pytest.raises(RuntimeError, match=too_long):
        forced_align(log_probs, targets, torch.tensor([3, 4, 5]), lengths["target_lengths"], BLANK)
    with pytest.raises(RuntimeError, match="input_lengths must be from 1 to 6, got 0 for batch element 1"):
        forced_align(log_probs, targets, torch.tensor([6, 0, 5]), lengths["target_lengths"], BLANK)
    with pytest.raises(RuntimeError, match=r"log_probs must have shape \(B, T, C\), got \(6, 4\)"):
        forced_align(log_probs[0], targets[0])
    with pytest.raises(RuntimeError, match=r"targets must have shape \(B, L\) with B = 3, got \(3,\)"):
        forced_align(log_probs, targets[0])
    with pytest.raises(RuntimeError, match=r"targets must have shape \(B, L\) with B = 3, got \(2, 3\)"):
        forced_align(log_probs, targets[:2])
    with pytest.raises(RuntimeError, match=r"targets must hold integers, got dtype torch.float32"):
        forced_align(log_probs, targets.float())
    with pytest.raises(RuntimeError, match=r"log_probs must be floating point, got dtype torch.int64"):
        forced_align(log_probs.long(), targets)
    for blank in (-1, 4):
        with pytest.raises(RuntimeError, match=f"blank must be from 0 to 3, got {blank}"):
            forced_align(log_probs, targets, blank=blank)
    with pytest.raises(RuntimeError, match=r"input_lengths must have shape \(B,\) with B = 3, got \(3, 1\)"):
        forced_align(log_probs, targets, torch.tensor([[6], [4], [5]]), lengths["target_lengths"], BLANK)
    with pytest.raises(RuntimeError, match=r"target_lengths must have shape \(B,\) with B = 3, got \(2,\)"):
        forced_align(log_probs, targets, lengths["input_lengths"], torch.tensor([3, 2]), BLANK)
    with pytest.raises(ValueError, match=r"must both have shape \(T,\)"):
        merge_tokens(torch.zeros(3), torch.zeros(4))
