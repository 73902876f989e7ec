"""nn.TransducerLoss: the usual loss, its reductions, and FastEmit."""

from __future__ import annotations

import math

import pytest
import torch
from support.checks import close
from support.problems import potentials
from support.transducers import log_likelihood
from torch import Tensor

import bellmax as bx
from bellmax.nn import TDTLoss, TransducerLoss

TARGETS = torch.tensor([[2, 1, 3], [3, 3, 1], [3, 3, 1]], dtype=torch.int32)
LENGTHS = torch.tensor([4, 3, 2]), torch.tensor([3, 2, 0])


def test_under_negentropy_it_is_the_usual_loss() -> None:
    logits = potentials(3, 4, 4, 5)
    sizes = [(int(n), int(m)) for n, m in zip(*LENGTHS, strict=True)]
    wanted = -torch.stack([log_likelihood(logits[b], TARGETS[b], 0, n, m) for b, (n, m) in enumerate(sizes)])
    reduced = {"none": wanted, "sum": wanted.sum(), "mean_batch": wanted.mean(), "mean_volume": wanted.sum() / 5}
    for reduction, value in reduced.items():
        close(TransducerLoss(reduction=reduction)(logits, TARGETS, lengths=LENGTHS), value)
    close(TransducerLoss()(logits, TARGETS, lengths=LENGTHS), wanted.mean())


def test_means_without_labels_or_without_a_batch() -> None:
    empty = torch.empty(2, 0, dtype=torch.int64)
    logits = potentials(2, 4, 1, 5)
    total = TransducerLoss(reduction="sum")(logits, empty)
    close(TransducerLoss(reduction="mean_volume")(logits, empty), total)
    for reduction in ("mean_batch", "mean_volume"):
        assert TransducerLoss(reduction=reduction)(logits[:0], empty[:0]) == 0


@pytest.mark.parametrize("omega", ["l2", "sparsemax", "entmax", "hard", "negentropy"])
@pytest.mark.parametrize("gamma", [0.3, 1.0])
def test_for_gamma_up_to_one_it_bounds_the_usual_loss_from_above(omega: str, gamma: float) -> None:
    usual = bx.nn.TransducerLoss(reduction="none")
    other = bx.nn.TransducerLoss(reduction="none", omega=omega, gamma=None if omega == "hard" else gamma)
    for seed in range(10):
        logits = 2 * potentials(2, 4, 4, 5, seed=seed)
        least, loss = usual(logits, TARGETS[:2]), other(logits, TARGETS[:2])
        assert bool((loss >= least - 1e-9).all())
        assert bool((least >= 0).all())


def test_it_is_a_module() -> None:
    loss = bx.nn.TransducerLoss(blank=4, reduction="sum", fastemit=0.01, gamma=0.5)
    assert repr(loss) == "TransducerLoss(blank=4, reduction='sum', fastemit=0.01, omega=Negentropy(gamma=0.5))"
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'sum', 'mean_batch', 'mean_volume', got"):
        bx.nn.TransducerLoss(reduction="average")


def test_the_former_name_of_the_mean_is_explained() -> None:
    with pytest.raises(ValueError, match=r"reduction must be 'mean_batch' .* called 'mean' before bellmax 0\.3"):
        TransducerLoss(reduction="mean")


# --- FastEmit


def test_fastemit_equals_the_published_rule_by_hand() -> None:
    """Two frames, one label, two classes. By hand: the label is emitted at frame 0 or at frame 1.

    With p = P(label | t, 0), the paths have probabilities p₀ b₀₁ b₁₁ and b₀₀ p₁ b₁₁, where b are blanks, and let q be
    the share of the first. The gradient of −log p(targets) in the log-probability of the label is −q at frame 0 and
    −(1 − q) at frame 1. FastEmit multiplies both by 1 + λ. The log-softmax then turns gradients g of log-probabilities
    into g − softmax Σ g.
    """
    p = torch.tensor([[0.2, 0.3], [0.6, 0.1]], dtype=torch.float64)  # the label's, [frame, labels so far]
    probabilities = torch.stack((1 - p, p), -1)
    logits = probabilities.log().requires_grad_()
    first, second = 0.2 * 0.7 * 0.9, 0.8 * 0.6 * 0.9
    q, fast = first / (first + second), 1.5
    loss = TransducerLoss(fastemit=0.5)(logits, torch.tensor([1]))
    close(loss.detach(), -math.log(first + second))
    of_log_probs = -torch.tensor(
        [[[1 - q, fast * q], [q, 0.0]], [[0.0, fast * (1 - q)], [1.0, 0.0]]], dtype=torch.float64
    )
    wanted = of_log_probs - probabilities * of_log_probs.sum(-1, keepdim=True)
    close(torch.autograd.grad(loss, logits)[0], wanted)
    assert float(wanted[0, 0, 1]) == pytest.approx(-fast * q * 0.8 + (1 - q) * 0.2)


def test_fastemit_of_tdt_scales_labels_and_no_durations() -> None:
    tokens, times = potentials(2, 5, 3, 4, requires_grad=True), potentials(2, 5, 3, 3, seed=1, requires_grad=True)
    targets = torch.tensor([[1, 2], [3, 3]])
    plain, fast = TDTLoss((0, 1, 2)), TDTLoss((0, 1, 2), fastemit=0.25)
    losses = [module(tokens, times, targets) for module in (plain, fast)]
    close(*losses)
    (_, of_times), (of_tokens, fast_times) = (torch.autograd.grad(loss, (tokens, times)) for loss in losses)
    close(fast_times, of_times)
    gradient = plain.distribution(tokens, times, targets).gradient
    label = torch.nn.functional.pad(gradient["emit"], (0, 1)) * 1.25
    log_probs = tokens.log_softmax(-1)
    following = torch.nn.functional.pad(targets, (0, 1))[:, None, :, None].expand(2, 5, 3, 1)
    scores = (log_probs[..., 0] * gradient["blank"].detach()).sum()
    scores = scores + (log_probs.gather(-1, following).squeeze(-1) * label.detach()).sum()
    close(of_tokens, torch.autograd.grad(-scores / 2, tokens)[0])


@pytest.mark.parametrize("omega", ["negentropy", "entmax"])
def test_fastemit_refuses_second_derivatives(omega: str) -> None:
    logits = potentials(2, 4, 4, 5, requires_grad=True)
    loss = TransducerLoss(fastemit=0.01, omega=omega)(logits, TARGETS[:2])
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="fastemit changes gradients only, so it has no second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("fastemit", [-0.01, math.nan, math.inf])
def test_fastemit_must_not_be_negative(fastemit: float) -> None:
    with pytest.raises(ValueError, match="fastemit must be a number of at least 0, got"):
        TransducerLoss(fastemit=fastemit)


def test_fastemit_keeps_impossible_labels_at_zero() -> None:
    logits = potentials(2, 4, 4, 5).masked_fill(torch.arange(5) == 3, -math.inf).requires_grad_()
    loss: Tensor = TransducerLoss(reduction="none", fastemit=0.1)(logits, torch.tensor([[1, 2, 1], [1, 3, 1]]))
    assert loss.isinf().tolist() == [False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert bool(gradient.isfinite().all())
    assert not gradient[1].any()
