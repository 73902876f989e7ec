"""compat.torch against torch itself, argument by argument, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import close
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from bellmax.compat.torch import CTCLoss, ctc_loss

STEPS, BATCH, CLASSES = 12, 4, 5
TARGETS = torch.tensor([[1, 1, 2], [4, 3, 9], [2, 0, 0], [3, 3, 3]])
LABELS = torch.tensor([3, 2, 0, 3])
FRAMES = torch.tensor([12, 7, 5, 6])
FLAT = torch.tensor([1, 1, 2, 4, 3, 3, 3, 3])

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "padded": (TARGETS, FRAMES, LABELS),
    "flat": (FLAT, FRAMES, LABELS),
    "tuples": (FLAT, tuple(FRAMES.tolist()), tuple(LABELS.tolist())),
    "lists": (TARGETS, FRAMES.tolist(), LABELS.tolist()),
    "int32": (TARGETS.int(), FRAMES.int(), LABELS.int()),
}


def logits(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(STEPS, BATCH, CLASSES, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(backend: str, layout: str, reduction: str) -> None:
    x = logits()
    both = [loss(x.log_softmax(-1), *LAYOUTS[layout], reduction=reduction) for loss in (ctc_loss, functional.ctc_loss)]
    close(*both, 1e-9)
    close(*(torch.autograd.grad(loss.sum(), x)[0] for loss in both), 1e-9)


@pytest.mark.parametrize("target", [torch.tensor([2, 1]), torch.tensor([[2, 1]])])
@pytest.mark.parametrize("lengths", [((9,), (2,)), (torch.tensor(9), torch.tensor(2))])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_sequence(target: Tensor, lengths: tuple[Any, Any], reduction: str) -> None:
    x = logits()[:, 0].log_softmax(-1)
    close(*(loss(x, target, *lengths, 0, reduction) for loss in (ctc_loss, functional.ctc_loss)), 1e-9)


def test_another_blank_and_the_module() -> None:
    x = logits().log_softmax(-1)
    targets = torch.where(TARGETS == 2, 0, TARGETS)
    ours, theirs = CTCLoss(2, "sum"), torch.nn.CTCLoss(2, "sum")
    close(ours(x, targets, FRAMES, LABELS), theirs(x, targets, FRAMES, LABELS), 1e-9)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_targets_without_an_alignment(backend: str, reduction: str, zero_infinity: bool) -> None:
    x = logits()
    frames = torch.tensor([3, 7, 5, 4])  # in the first and last sequence, frames are too few
    options = 0, reduction, zero_infinity
    both = [loss(x.log_softmax(-1), TARGETS, frames, LABELS, *options) for loss in (ctc_loss, functional.ctc_loss)]
    close(*both, 1e-9)
    ours, theirs = (torch.autograd.grad(loss.sum(), x)[0] for loss in both)
    close(ours[:, 1:3], theirs[:, 1:3], 1e-9)
    assert not ours[:, [0, 3]].any()


def test_no_labels_and_no_frames(backend: str) -> None:
    x = logits()
    for targets in (torch.zeros(BATCH, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)):
        both = [f(x.log_softmax(-1), targets, FRAMES, 0 * LABELS) for f in (ctc_loss, functional.ctc_loss)]
        close(*both, 1e-9)
    frames = torch.tensor([0, 7, 0, 6])
    with torch.no_grad():
        x[:, [0, 2]] = math.nan
    loss = ctc_loss(x, TARGETS, frames, LABELS, reduction="none")
    close(loss, functional.ctc_loss(x.nan_to_num(), TARGETS, frames, LABELS, reduction="none"), 1e-9)
    assert loss[0] == math.inf
    assert loss[2] == 0
    assert not torch.autograd.grad(loss.sum(), x)[0][:, [0, 2]].any()


def test_the_gradient_is_with_respect_to_the_log_probabilities() -> None:
    log_probs = logits().detach().log_softmax(-1).requires_grad_()
    loss: Callable[[Tensor], Tensor] = lambda x: ctc_loss(x, TARGETS, FRAMES, LABELS, reduction="sum")  # noqa: E731
    assert gradcheck(loss, log_probs, fast_mode=True)
    assert gradgradcheck(loss, log_probs, fast_mode=True)
    right = torch.autograd.grad(loss(log_probs), log_probs)[0]
    theirs = functional.ctc_loss(log_probs, TARGETS, FRAMES, LABELS, reduction="sum")
    wrong = torch.autograd.grad(theirs, log_probs)[0]
    past = torch.arange(STEPS).unsqueeze(1) >= FRAMES
    # Torch returns the gradient of the logits.
    close(wrong, right + log_probs.detach().exp().masked_fill(past.unsqueeze(-1), 0), 1e-9)


def test_entries_of_minus_infinity(backend: str) -> None:
    log_probs = logits().detach().log_softmax(-1)
    log_probs[3, :, 1] = log_probs[2, 2] = -math.inf
    log_probs.requires_grad_()
    loss = ctc_loss(log_probs, TARGETS, FRAMES, LABELS, reduction="none")
    assert loss.isinf().tolist() == [False, False, True, False]
    large = log_probs.detach().clamp(min=-1e4)
    close(loss[:2], functional.ctc_loss(large, TARGETS, FRAMES, LABELS, reduction="none")[:2], 1e-9)
    gradient = torch.autograd.grad(loss.sum(), log_probs)[0]
    assert gradient.isfinite().all()
    assert not gradient[3, :, 1].any()
    assert not gradient[:, 2].any()


ERRORS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "blank": (lambda x: ctc_loss(x, TARGETS, FRAMES, [3, 2, 2, 3]), "targets must not hold the blank"),
    "label": (lambda x: ctc_loss(x, TARGETS, FRAMES, [3, 3, 0, 3]), "targets must be from 0 to 4, got 9"),
    "flat": (lambda x: ctc_loss(x, FLAT[1:], FRAMES, LABELS), r"targets must have shape \(4, S\), or \(8,\)"),
    "lengths": (lambda x: ctc_loss(x, TARGETS, (12, 12), LABELS), "input_lengths must be 4 numbers"),
    "frames": (lambda x: ctc_loss(x, TARGETS, [12, 13, 5, 6], LABELS), "input_lengths must be from 0 to 12, got 13"),
    "labels": (lambda x: ctc_loss(x, TARGETS, FRAMES, [3, 2, 0, 4]), "target_lengths must be from 0 to 3, got 4"),
    "shape": (lambda x: ctc_loss(x[0, 0], TARGETS, FRAMES, LABELS), r"log_probs must have shape \(T, N, C\)"),
    "reduction": (lambda x: ctc_loss(x, TARGETS, FRAMES, LABELS, 0, "avg"), "reduction must be one of"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(logits())
