from __future__ import annotations

import pytest
import torch
from support.checks import close
from support.problems import potentials
from support.transducers import log_likelihood
from torch import Tensor

from bellmax.compat.torchaudio import RNNTLoss, rnnt_loss

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
    actual = rnnt_loss(logits, TARGETS, FRAMES, LABELS, blank)
    first = [torch.autograd.grad(loss, logits, create_graph=True)[0] for loss in (actual, wanted.mean())]
    close(*first)
    close(*(torch.autograd.grad(g.pow(3).sum(), logits)[0] for g in first))


def test_log_probabilities_are_not_normalised_again() -> None:
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


def test_errors_name_the_argument() -> None:
    logits = torch.zeros(2, 4, 4, 5)
    with pytest.raises(RuntimeError, match="blank must be from -5 to 4, got 5"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS, 5)
    with pytest.raises(ValueError, match="targets must not hold the blank 3"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS, 3)
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'mean', 'sum', got 'max'"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS, reduction="max")
    with pytest.raises(RuntimeError, match="logits must have shape"):
        rnnt_loss(logits[0], TARGETS, FRAMES, LABELS)
    with pytest.raises(RuntimeError, match=r"logits must be floating point, got dtype torch.int64"):
        rnnt_loss(logits.long(), TARGETS, FRAMES, LABELS)
    with pytest.raises(RuntimeError, match=r"targets must have shape \(B, U\) = \(2, 3\), got \(2, 2\)"):
        rnnt_loss(logits, TARGETS[:, :2], FRAMES, LABELS)
    with pytest.raises(RuntimeError, match=r"targets must hold integers, got dtype torch.float32"):
        rnnt_loss(logits, TARGETS.float(), FRAMES, LABELS)
    with pytest.raises(RuntimeError, match=r"logit_lengths must have shape \(B,\) with B = 2, got \(2, 1\)"):
        rnnt_loss(logits, TARGETS, FRAMES[:, None], LABELS)
    with pytest.raises(RuntimeError, match="logit_lengths must be from 1 to 4, got 5 for batch element 0"):
        rnnt_loss(logits, TARGETS, FRAMES + 1, LABELS)
    with pytest.raises(RuntimeError, match="target_lengths must be from 0 to 3, got 4 for batch element 0"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS + 1)
    with pytest.raises(RuntimeError, match=r"target_lengths must hold integers, got dtype torch.float32"):
        rnnt_loss(logits, TARGETS, FRAMES, LABELS.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("clamp", [-1, 0.1])
def test_the_loss_has_the_dtype_of_the_logits(dtype: torch.dtype, clamp: float) -> None:
    logits = potentials(2, 4, 4, 5).to(dtype).requires_grad_()
    for reduction in ("none", "mean", "sum"):
        loss = rnnt_loss(logits, TARGETS, FRAMES, LABELS, 0, clamp, reduction)
        assert loss.dtype == dtype
        assert torch.autograd.grad(loss.sum(), logits)[0].dtype == dtype
    close(loss.double(), by_loop(logits.detach().double(), 0).sum(), 2 * torch.finfo(dtype).eps)


def test_the_layer_has_the_arguments_of_the_function() -> None:
    logits, z = potentials(2, 4, 4, 5, requires_grad=True), potentials(2, 4, 4, 5, seed=1)
    close(RNNTLoss()(logits, TARGETS, FRAMES, LABELS), rnnt_loss(logits, TARGETS, FRAMES, LABELS))
    options = {"blank": 0, "clamp": 0.1, "reduction": "sum", "fused_log_softmax": False}
    layer = RNNTLoss(**options)
    assert {name: getattr(layer, name) for name in options} == options
    losses = layer(logits + z, TARGETS, FRAMES, LABELS), rnnt_loss(logits + z, TARGETS, FRAMES, LABELS, **options)
    close(*losses)
    close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))
