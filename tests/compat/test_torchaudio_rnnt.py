from __future__ import annotations

import pytest
import torch
from support.checks import close
from support.problems import potentials
from support.transducers import log_likelihood
from torch import Tensor

from bellmax.compat.torchaudio import rnnt_loss

TARGETS = torch.tensor([[2, 1, 3], [3, 2, 1]], dtype=torch.int32)
FRAMES, LABELS = torch.tensor([4, 3], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)


def by_loop(logits: Tensor, blank: int) -> Tensor:
    sizes = zip(FRAMES.tolist(), LABELS.tolist(), strict=True)
    return -torch.stack([log_likelihood(logits[b], TARGETS[b], blank, n, m) for b, (n, m) in enumerate(sizes)])


@pytest.mark.parametrize("blank", [0, -1, 4])
def test_equals_the_loop(blank: int) -> None:
    logits = potentials(2, 4, 4, 5, requires_grad=True)
    wanted = by_loop(logits, blank)
    for reduction, reduced in (("none", wanted), ("mean", wanted.mean()), ("sum", wanted.sum())):
        close(rnnt_loss(logits, TARGETS, FRAMES, LABELS, blank, reduction=reduction), reduced)
    found = rnnt_loss(logits, TARGETS, FRAMES, LABELS, blank)
    first = [torch.autograd.grad(loss, logits, create_graph=True)[0] for loss in (found, wanted.mean())]
    close(*first)
    close(*(torch.autograd.grad(g.pow(3).sum(), logits)[0] for g in first))


def test_log_probabilities_are_taken_as_they_are() -> None:
    logits = potentials(2, 4, 4, 5)
    fused = rnnt_loss(logits, TARGETS, FRAMES, LABELS, 0)
    close(rnnt_loss(logits.log_softmax(-1), TARGETS, FRAMES, LABELS, 0, fused_log_softmax=False), fused)


def test_clamp_cuts_the_gradient_of_each_sequence() -> None:
    logits = potentials(2, 4, 4, 5, requires_grad=True)
    (whole,) = torch.autograd.grad(by_loop(logits, 0).sum(), logits)
    (cut,) = torch.autograd.grad(rnnt_loss(logits, TARGETS, FRAMES, LABELS, 0, clamp=0.1, reduction="mean"), logits)
    close(cut, whole.clamp(-0.1, 0.1) / 2)


def test_equals_torchaudio() -> None:
    audio = pytest.importorskip("torchaudio.functional")
    logits = potentials(2, 4, 4, 5).float()
    close(rnnt_loss(logits, TARGETS, FRAMES, LABELS), audio.rnnt_loss(logits, TARGETS, FRAMES, LABELS), 1e-5)


def test_mistakes_are_named() -> None:
    logits = torch.zeros(2, 4, 4, 5)
    with pytest.raises(ValueError, match="blank must be from -5 to 4, got 5"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS, 5)
    with pytest.raises(ValueError, match="targets must not hold the blank 3"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS, 3)
    with pytest.raises(ValueError, match="logits must have shape"):
        rnnt_loss(logits[0], TARGETS, FRAMES, LABELS)
