"""nn.CTCLoss: never below 0 for any Ω, and torch's loss under negentropy."""

from __future__ import annotations

import math

import pytest
import torch
from support.checks import close
from support.ctc import Alignments
from support.problems import smooth, solve
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import bellmax as bx
from bellmax.nn import CTCLoss


def batch(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Scores with NaN past the frames, targets (one too long, one empty) and lengths."""
    torch.manual_seed(seed)
    scores = 2 * torch.randn(5, 9, 4, dtype=dtype)
    targets = torch.tensor([[1, 2, 2], [3, 1, -7], [2, 2, 2], [0, 0, 0], [1, 1, 1]])
    lengths = torch.tensor([9, 6, 5, 8, 4]), torch.tensor([3, 2, 3, 0, 3])
    scores[torch.arange(9) >= lengths[0].unsqueeze(-1)] = math.nan
    return scores, targets, lengths


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_equals_torch_under_negentropy(backend: str, reduction: str, zero_infinity: bool) -> None:
    scores, targets, (frames, labels) = batch(0)
    scores.requires_grad_()
    loss = CTCLoss(0, reduction, zero_infinity)(scores, targets, lengths=(frames, labels))
    clean = scores.detach().masked_fill(scores.isnan(), 0).requires_grad_()
    log_probs = clean.log_softmax(-1).transpose(0, 1)
    theirs = functional.ctc_loss(log_probs, targets, frames, labels, 0, reduction, zero_infinity)
    close(loss, theirs)
    ours, expected = (torch.autograd.grad(x.sum(), y)[0] for x, y in ((loss, scores), (theirs, clean)))
    close(ours[:4], expected[:4])
    assert not ours[4].any()  # torch has NaN here without zero_infinity


# Proven lower bounds. Under l2 it is γ/2, its Ω at a vertex, since a path has one node more than there are frames.
PROVEN = {"negentropy": 0.0, "sparsemax": 0.0, "entmax": 0.0, "l2": 0.5, "hard": 0.0}


@pytest.mark.parametrize("name", PROVEN)
def test_is_never_below_its_proven_bound(name: str) -> None:
    """Σ_t max_Ω(θ_t) ≥ DP_Ω: given the state at t + 1, the candidates at t have different labels (and Jensen)."""
    least = math.inf
    for seed, (classes, labels) in enumerate(((2, 1), (2, 3), (3, 4), (4, 2), (7, 5))):
        torch.manual_seed(seed)
        scores = torch.logspace(-2, 1.5, 200, dtype=torch.float64)[:, None, None] * torch.randn(200, 11, classes)
        targets = torch.randint(1, classes, (200, labels))
        frames = torch.randint(2 * labels - 1, 12, (200,))
        p = bx.CTC(scores, targets, lengths=(frames, labels), omega=name)
        within = torch.arange(11) < frames.unsqueeze(-1)
        tops = (p.omega.max(scores) * within).sum(-1)
        least = min(least, float((tops - p.value).min()))
        loss = CTCLoss(reduction="none", omega=name)(scores, targets, lengths=(frames, labels))
        close(loss, (tops - p.value).clamp(min=0), 1e-9)
    assert PROVEN[name] - 1e-9 <= least
    if name != "negentropy":
        assert least < PROVEN[name] + 1e-6


def test_is_its_formula_by_enumeration(omega: bx.Regularizer) -> None:
    scores, targets, lengths = batch(1)
    loss = CTCLoss(reduction="none", omega=omega)(scores, targets, lengths=lengths)
    for n, (frames, labels) in enumerate(zip(*(side.tolist() for side in lengths), strict=True)):
        if n == 4:
            assert loss[n] == math.inf
            continue
        rows = scores[n, :frames].numpy()
        tops = sum(solve(omega, row.tolist())[0] for row in rows)
        close(loss[n], tops - Alignments(rows, targets[n, :labels].tolist(), omega).value, 1e-9)


@smooth
def test_gradient_is_argmax_less_posterior(backend: str, omega: bx.Regularizer) -> None:
    scores, targets, lengths = batch(2)
    scores, targets, lengths = scores[:4].requires_grad_(), targets[:4], (lengths[0][:4], lengths[1][:4])
    module = CTCLoss(reduction="sum", omega=omega)
    gradient = torch.autograd.grad(module(scores, targets, lengths=lengths), scores)[0]
    past = torch.arange(9) >= lengths[0].unsqueeze(-1)
    share = omega.argmax(scores.detach().masked_fill(past.unsqueeze(-1), 0)).masked_fill(past.unsqueeze(-1), 0)
    p = bx.CTC(scores.detach(), targets, lengths=lengths, omega=omega)
    close(gradient, share - p.expected_path, 1e-9)
    close(module.distribution(scores, targets, lengths=lengths).expected_path, p.expected_path, 1e-9)


@smooth
def test_derivatives(omega: bx.Regularizer) -> None:
    scores = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    targets, lengths = torch.tensor([[1, 1], [2, 1]]), ([4, 3], [2, 2])
    loss = lambda x: CTCLoss(omega=omega)(x, targets, lengths=lengths)  # noqa: E731
    assert gradcheck(loss, scores, fast_mode=True)
    assert gradgradcheck(loss, scores, fast_mode=True)


def test_gamma_is_learnt_by_sequence() -> None:
    gamma = torch.nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))
    scores, targets = torch.randn(2, 6, 4, dtype=torch.float64), torch.tensor([[1, 2], [3, 3]])
    module = CTCLoss(reduction="none", omega=bx.Tsallis(1.5, gamma))
    assert [*module.state_dict()] == ["gamma"]
    loss = module(scores, targets)
    for n in range(2):
        close(loss[n], CTCLoss(omega="entmax", gamma=float(gamma[n].detach()), reduction="sum")(scores[n], targets[n]))
    loss.sum().backward()
    assert gamma.grad is not None
    assert gamma.grad.isfinite().all()


def test_compiles() -> None:
    targets, lengths = torch.tensor([[1, 0], [2, 2]]), (torch.tensor([6, 5]), torch.tensor([2, 1]))
    module, x = CTCLoss(3), torch.randn(2, 6, 4, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    losses = [f(x, targets, lengths=lengths) for f in (compiled, module)]
    close(*losses, 1e-6)
    close(*(torch.autograd.grad(loss, x)[0] for loss in losses), 1e-6)


def test_the_loss_is_invariant_to_a_constant_per_frame_and_accurate_in_float32() -> None:
    labels = torch.tensor([0, 1, 1, 0, 2, 0] * 100)
    scores = 12 * functional.one_hot(labels, 3).double() + 50 * torch.randn(600, 1, dtype=torch.float64)
    targets = torch.tensor([1, 2] * 100)
    exact = CTCLoss(reduction="sum")(scores, targets)
    close(exact, CTCLoss(reduction="sum")(scores - scores.amax(-1, keepdim=True), targets), 1e-9)
    assert 0 < exact < 0.02
    close(CTCLoss(reduction="sum")(scores.float(), targets).double(), exact, 3e-3)


def test_frames_without_any_score(backend: str) -> None:
    scores = torch.zeros(2, 4, 3, dtype=torch.float64)
    scores[0, 1] = -math.inf
    scores.requires_grad_()
    loss = CTCLoss(reduction="none")(scores, torch.tensor([[1, 2]]))
    assert loss[0] == math.inf
    gradient = torch.autograd.grad(loss.sum(), scores)[0]
    assert not gradient[0].any()
    assert gradient[1].isfinite().all()
    assert CTCLoss(zero_infinity=True)(scores[:1], torch.tensor([1, 2])) == 0


def test_half_precision_empty_batch_and_repr() -> None:
    scores, targets, lengths = batch(3, torch.float32)
    loss = CTCLoss(zero_infinity=True)(scores.bfloat16(), targets, lengths=lengths)
    assert loss.dtype == torch.float32
    assert CTCLoss()(torch.zeros(0, 4, 3), torch.zeros(0, 2, dtype=torch.int64)) == 0
    assert repr(CTCLoss(1)) == "CTCLoss(omega=Negentropy(gamma=1.0), blank=1, reduction='mean', zero_infinity=False)"


def test_concatenated_targets_are_refused_for_a_batch() -> None:
    scores, targets = torch.randn(4, 50, 20), torch.randint(1, 20, (40,))
    message = (
        r"targets must have shape \(\.\.\., L\), padded, got \(40,\) .* bellmax\.compat\.torch\.CTCLoss .*pad_sequence"
    )
    for lengths in (None, ([50] * 4, [10] * 4)):
        with pytest.raises(ValueError, match=message):
            CTCLoss()(scores, targets, lengths=lengths)
    assert CTCLoss()(scores[:1], targets).isfinite()
    assert CTCLoss()(scores, targets.unsqueeze(0)).isfinite()  # one target for the batch


def test_time_first_scores_are_detected_by_their_lengths() -> None:
    scores, targets = torch.randn(50, 16, 20), torch.randint(1, 20, (16, 10))
    for lengths in (None, ([50] * 16, [10] * 16)):
        with pytest.raises(ValueError, match="bellmax is batch-first"):
            CTCLoss()(scores, targets, lengths=lengths)


def test_errors() -> None:
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'mean', 'sum', got 'token_mean'"):
        CTCLoss(reduction="token_mean")
    with pytest.raises(ValueError, match="blank must be at least 0, got -1"):
        CTCLoss(-1)
    with pytest.raises(ValueError, match=r"scores must be floating point of shape \(..., T, V\)"):
        CTCLoss()(torch.zeros(3), torch.tensor([1]))
    with pytest.raises(ValueError, match="targets must not hold the blank, got 0"):
        CTCLoss()(torch.zeros(3, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"must broadcast, got shapes .*'lengths\[1\]': \(2,\)"):
        CTCLoss()(torch.zeros(3, 4, 2), torch.ones(3, 1).long(), lengths=([4, 4], [1, 1]))
    with pytest.raises(TypeError, match="use gamma="):
        CTCLoss(temperature=2.0)
