"""bx.CTC against the usual recursion over 2L + 1 positions, enumeration of label sequences, and torch's loss."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.checks import close
from support.ctc import Alignments, collapse, least_frames, listed
from support.problems import potentials, smooth, two_kinds
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.functional import ctc_loss

import bellmax as bx

# Targets with repeats, without repeats, empty, of one label, and one that just fits its frames.
TARGETS = [[1, 1], [3, 0, 3], [], [3], [1, 0, 0, 1]]
FRAMES = [5, 6, 3, 4, 5]
BLANK, CLASSES = 2, 4


def batch(seed: int = 0, missing: float = 0.0) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Log-probabilities with NaN past the frames, padded targets, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(FRAMES), max(FRAMES), CLASSES, generator=generator, dtype=torch.float64)
    scores[torch.rand(scores.shape, generator=generator) < missing] = -math.inf
    targets = torch.randint(-50, 50, (len(TARGETS), 4), generator=generator)
    for n, (target, frames) in enumerate(zip(TARGETS, FRAMES, strict=True)):
        targets[n, : len(target)] = torch.tensor(target, dtype=torch.int64)
        scores[n, frames:] = math.nan
    return scores, targets, (torch.tensor(FRAMES), torch.tensor([len(target) for target in TARGETS]))


def solved(scores: Tensor, omega: bx.Regularizer) -> list[Alignments]:
    members = zip(scores, FRAMES, TARGETS, strict=True)
    return [Alignments(rows[:frames].numpy(), target, omega, BLANK) for rows, frames, target in members]


def by_position(one: Alignments) -> np.ndarray:
    """Probability of each target position at each frame, (T, L)."""
    labels = np.array([path.argmax(-1) for path in one.paths])  # (paths, T)
    begins = (labels != BLANK) & (labels != np.pad(labels, ((0, 0), (1, 0)), constant_values=BLANK)[:, :-1])
    position = np.where(labels == BLANK, -1, begins.cumsum(1) - 1)
    number = max(int(position.max()) + 1, 0)
    return np.einsum("p,ptl->tl", one.probabilities, position[..., None] == np.arange(number))


def padded(rows: np.ndarray) -> Tensor:
    """Pad (..., frames, V) with zeros to the longest number of frames."""
    return torch.nn.functional.pad(torch.from_numpy(rows), (0, 0, 0, max(FRAMES) - rows.shape[-2]))


# --- the definition


def test_layers_equal_the_usual_recursion(backend: str, omega: bx.Regularizer) -> None:
    scores, targets, lengths = batch(3, missing=0.05)
    p = bx.CTC(scores, targets, lengths=lengths, blank=BLANK, omega=omega)
    z = torch.from_numpy(np.random.default_rng(0).normal(size=tuple(scores.shape)))
    value, path, products, slopes = p.value, p.expected_path, p.hessian_product(z), p.directional_derivative(z)
    entropy, counts = p.entropy(), p.num_paths
    for n, one in enumerate(solved(scores, omega)):
        close(value[n], one.value, 1e-9)
        assert counts[n] == len(one.paths) > 0
        posterior = padded(one.posterior)
        close(path[n], posterior, 1e-9)
        close(slopes[n], (posterior * z[n]).sum(), 1e-9)
        close(entropy[n], one.graph.entropy, 1e-9)
        product = one.hessian_product(z[n].numpy())
        assert product is not None, "no score is at a kink"
        close(products[n], padded(product), 1e-5)


def test_every_sequence_of_labels_that_collapses_to_the_target_counts() -> None:
    scores, targets, lengths = batch(1)
    value = bx.CTC(scores, targets, lengths=lengths, blank=BLANK).value
    for n, (target, frames) in enumerate(zip(TARGETS, FRAMES, strict=True)):
        close(value[n], listed(scores[n, :frames].numpy(), target, BLANK), 1e-10)


@two_kinds
def test_probabilities_of_paths_and_support(backend: str, omega: bx.Regularizer) -> None:
    scores, targets, lengths = batch(2, 0.1)
    p = bx.CTC(scores, targets, lengths=lengths, blank=BLANK, omega=omega)
    (paths, probabilities), modes = p.support_paths(), p.mode
    for n, one in enumerate(solved(scores, omega)):
        assert len(one.paths)
        order = np.sort(one.probabilities[one.probabilities > 0])[::-1]
        close(probabilities[: len(order), n], order.copy(), 1e-9)
        assert not probabilities[len(order) :, n].any()
        listed_paths = torch.stack([padded(path) for path in one.paths])
        densities = p[n].log_prob(torch.cat((listed_paths, paths[: len(order), n], modes[n : n + 1]))).exp()
        close(densities, np.concatenate((one.probabilities, order, order[:1])), 1e-9)


def test_best_paths(backend: str) -> None:
    scores, targets, lengths = batch(4)
    p = bx.CTC(scores, targets, lengths=lengths, blank=BLANK)
    labels, spans, confidence = p.best_labels(), p.spans(), p.confidence
    scores_of_paths, paths = p.topk(3)
    best_path = p.best_path()
    for n, one in enumerate(solved(scores, p.omega)):
        best = one.best
        assert labels[n].tolist() == best + [-1] * (max(FRAMES) - len(best))
        close(best_path[n], padded(one.paths[one.graph.scores.argmax()]))
        runs, start = [], 0
        for label, run in itertools.groupby(best):
            end = start + len(list(run))
            if label != BLANK:
                runs.append((label, start, end))
            start = end
        assert [label for label, *_ in runs] == TARGETS[n]
        rest = targets.shape[1] - len(runs)
        assert spans[n].tolist() == [[a, b] for _, a, b in runs] + [[-1, -1]] * rest
        positions = by_position(one)
        means = [positions[a:b, position].mean() for position, (_, a, b) in enumerate(runs)]
        close(confidence[n], means + [0.0] * rest)
        ranks = np.sort(one.graph.scores)[::-1][:3]
        close(scores_of_paths[n, : len(ranks)], ranks.copy())
        assert (scores_of_paths[n, len(ranks) :] == -math.inf).all()
        close(paths[n, 0], best_path[n])


def test_confidence_is_by_position_in_the_target(backend: str, omega: bx.Regularizer) -> None:
    """Two equal labels have separate confidences."""
    target, frames = [1, 1], 8
    scores = torch.zeros(frames, CLASSES, dtype=torch.float64)
    scores[:, 1] += torch.linspace(0.3, 0.5, frames)
    p = bx.CTC(scores, torch.tensor(target), blank=BLANK, omega=omega)
    positions = by_position(Alignments(scores.numpy(), target, p.omega, BLANK))
    expected = [positions[start:end, position].mean() for position, (start, end) in enumerate(p.spans().tolist())]
    close(p.confidence, expected)


@two_kinds
def test_samples_follow_the_probabilities(backend: str, omega: bx.Regularizer) -> None:
    scores, targets, lengths = batch(5)
    p = bx.CTC(scores[1], targets[1], lengths=(lengths[0][1], lengths[1][1]), blank=BLANK, omega=omega)
    one, draws = solved(scores, omega)[1], 1000
    labels = p.sample_labels((draws,))
    assert labels.shape == (draws, max(FRAMES))
    assert all(collapse(each, BLANK) == TARGETS[1] for each in labels.tolist())
    counts = Counter(map(tuple, labels.tolist()))
    for path, probability in zip(one.paths, one.probabilities, strict=True):
        share = counts[tuple(path.argmax(-1).tolist())] / draws
        assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / draws) + 5 / draws
    assert p.support.check(p.sample((3, 2))).all()


def test_tensors_that_are_not_paths(backend: str) -> None:
    p = bx.CTC(torch.zeros(5, 3), torch.tensor([1, 1]), lengths=(4, 2))
    one_hot = torch.nn.functional.one_hot
    good = [[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1]]
    bad = [[1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 0, 1, 0, 0], [1, 0, 1]]
    for labels in good + bad:
        path = torch.zeros(5, 3)
        path[: len(labels)] = one_hot(torch.tensor(labels), 3)
        assert bool(p.support.check(path)) == (labels in good)
    with pytest.raises(ValueError, match=r"path.* is not a path of the graph"):
        p.log_prob(torch.full((5, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"path must have event shape \(5, 3\)"):
        p.log_prob(torch.zeros(4, 3))


# --- torch


@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_torch(backend: str, seed: int) -> None:
    torch.manual_seed(seed)
    n, steps, classes, most = 7, 30, (2, 3, 9)[seed % 3], 9
    logits = torch.randn(n, steps, classes, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, classes, (n, most))
    labels = torch.randint(0, most + 1, (n,))
    frames = torch.tensor([int(torch.randint(max(1, 2 * length), steps + 1, ())) for length in labels.tolist()])
    log_probs = logits.log_softmax(-1)
    value = bx.CTC(log_probs, targets, lengths=(frames, labels)).value
    theirs = ctc_loss(log_probs.transpose(0, 1), targets, frames, labels, reduction="none")
    close(-value, theirs, 1e-9)
    close(*(torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (-value, theirs)), 1e-9)


def test_float32_keeps_its_digits_over_800_frames() -> None:
    logits = torch.randn(2, 800, 16, dtype=torch.float64)
    targets = torch.randint(1, 16, (2, 60))
    exact = bx.CTC(logits.log_softmax(-1), targets)
    p = bx.CTC(logits.log_softmax(-1).float(), targets)
    assert p.value.dtype == torch.float32
    close(p.value.double(), exact.value, 2e-5)
    error = (p.expected_path.double() - exact.expected_path).norm() / exact.expected_path.norm()
    assert error < 2e-5


# --- derivatives


@smooth
def test_derivatives(backend: str, omega: bx.Regularizer) -> None:
    targets, lengths = torch.tensor([[1, 1], [2, 1]]), ([4, 3], [2, 2])

    def value(log_probs: Tensor) -> Tensor:
        return bx.CTC(log_probs, targets, lengths=lengths, omega=omega).value

    log_probs = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(value, log_probs, fast_mode=True)
    assert gradgradcheck(value, log_probs, fast_mode=True)
    path = bx.CTC(log_probs, targets, lengths=lengths).best_path()
    for layer in (lambda p: p.confidence, lambda p: p.entropy(), lambda p: p.log_prob(path), lambda p: p.topk(2)[0]):
        of_scores = lambda x, f=layer: f(bx.CTC(x, targets, lengths=lengths, omega=omega))  # noqa: E731
        assert gradcheck(of_scores, log_probs, fast_mode=True)


def test_forward_mode_and_vmap() -> None:
    log_probs, z = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    targets = torch.tensor([[1, 2], [3, 3], [1, 3]])
    value = lambda x, y: bx.CTC(x, y).value  # noqa: E731
    p = bx.CTC(log_probs, targets)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(value(forward_ad.make_dual(log_probs, z), targets)).tangent
    close(tangent, p.directional_derivative(z))
    close(torch.func.vmap(value)(log_probs, targets), p.value)
    close(torch.func.vmap(torch.func.grad(value))(log_probs, targets), p.expected_path)
    hessian = torch.func.hessian(value)(log_probs[0], targets[0])
    close(torch.einsum("tvsw,sw->tv", hessian, z[0]), p.hessian_product(z)[0])


def test_gamma_per_sequence_is_learnt() -> None:
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    log_probs = torch.randn(2, 5, 3, dtype=torch.float64)
    log_probs[1, 4] = math.nan
    targets = torch.tensor([[1, 2], [2, 2]])
    value = lambda g: bx.CTC(log_probs, targets, lengths=([5, 4], 2), gamma=g).value  # noqa: E731
    assert gradcheck(value, gamma)
    close(value(gamma)[0], bx.CTC(log_probs[0], targets[0], gamma=0.5).value)


@two_kinds
def test_losses_take_alignments(backend: str, omega: bx.Regularizer) -> None:
    scores, targets, lengths = batch(7)
    p = bx.CTC(scores, targets, lengths=lengths, blank=BLANK, omega=omega)
    path = p.best_path()
    loss = bx.losses.surrogate(p, path, reduction="none")
    assert (loss >= 0).all()
    if isinstance(omega, bx.Negentropy):
        close(loss, -omega.gamma * p.log_prob(path), 1e-9)
    cost = 1 - path
    close(bx.losses.expected_cost(p, cost, reduction="none"), (p.expected_path * cost).sum((-2, -1)))


# --- shapes and edge cases


def test_batches_broadcast(backend: str) -> None:
    log_probs, targets = torch.randn(2, 1, 7, 5, dtype=torch.float64), torch.tensor([[1, 2], [3, 3], [4, 1]])
    frames, labels = torch.tensor([[7], [4]]), torch.tensor([2, 2, 1], dtype=torch.int32)
    p = bx.CTC(log_probs, targets.short(), lengths=(frames, labels))
    assert p.batch_shape == (2, 3)
    assert p.targets.shape == (2, 3, 2)
    assert p.lengths[1].tolist() == [[4, 2], [4, 2], [4, 1]]
    assert p.best_labels().shape == (2, 3, 7)
    assert p.sample_labels((4,)).shape == (4, 2, 3, 7)
    assert p.spans().shape == (2, 3, 2, 2)
    assert p.confidence.shape == (2, 3, 2)
    for a, b in itertools.product(range(2), range(3)):
        one = bx.CTC(log_probs[a, 0], targets[b], lengths=(int(frames[a]), int(labels[b])))
        close(p.value[a, b], one.value)
        close(p.expected_path[a, b], one.expected_path)
        assert p[a, b].spans().equal(one.spans())


@pytest.mark.parametrize("target", [[1, 1, 2], [1, 2, 1, 2]])
def test_too_few_frames(backend: str, omega: bx.Regularizer, target: list[int]) -> None:
    least = least_frames(target)
    log_probs = torch.randn(2, least, 3, dtype=torch.float64, requires_grad=True)
    frames = torch.tensor([least, least - 1])
    p = bx.CTC(log_probs, torch.tensor(target), lengths=(frames, len(target)), omega=omega)
    assert p.num_paths.tolist() == [1, 0]
    assert p.value[0].isfinite()
    assert p.value[1] == -math.inf
    gradient = torch.autograd.grad(p.value.sum(), log_probs)[0]
    close(gradient[0], p.best_path()[0])
    for zero in (gradient, p.expected_path, p.hessian_product(torch.ones_like(log_probs)), p.best_path(), p.sample()):
        assert not zero[1].any()
    assert (p.best_labels()[1] == -1).all()
    assert (p.spans()[1] == -1).all()
    assert not p.confidence[1].any()
    assert p.entropy().tolist() == [0, 0]


def test_no_labels_one_class_one_frame(backend: str) -> None:
    none = torch.empty(0, dtype=torch.int64)
    p = bx.CTC(torch.tensor([[-1.0, 0.0], [-2.0, 0.0]]), none)
    assert (p.value, p.best_labels().tolist()) == (-3, [0, 0])
    assert p.expected_path.tolist() == [[1, 0], [1, 0]]
    assert p.spans().shape == (0, 2)
    assert p.confidence.shape == (0,)
    assert bx.CTC(torch.full((3, 1), -0.5), none).value == -1.5
    one = bx.CTC(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]))
    assert (one.value, one.spans().tolist()) == (-2, [[0, 1]])
    empty = bx.CTC(torch.randn(0, 4, 3), torch.zeros(0, 2, dtype=torch.int64))
    assert empty.value.shape == (0,)
    assert empty.expected_path.shape == (0, 4, 3)


def test_padding_may_hold_any_number_and_gets_no_gradient(backend: str) -> None:
    scores, targets, lengths = batch(6)
    filled = scores.masked_fill(scores.isnan(), 7.0).requires_grad_()
    scores.requires_grad_()
    other = torch.where(torch.arange(4) < lengths[1].unsqueeze(-1), targets, BLANK)
    p, q = (bx.CTC(x, y, lengths=lengths, blank=BLANK) for x, y in ((scores, targets), (filled, other)))
    assert p.value.equal(q.value)
    assert p.expected_path.equal(q.expected_path)
    for x, r in ((scores, p), (filled, q)):
        gradient = torch.autograd.grad(r.value.sum(), x)[0]
        assert not gradient[torch.arange(max(FRAMES)) >= lengths[0].unsqueeze(-1)].any()


def test_half_precision_is_computed_in_float32() -> None:
    log_probs, targets = torch.randn(6, 4).log_softmax(-1), torch.tensor([1, 2])
    p = bx.CTC(log_probs.bfloat16(), targets)
    assert (p.value.dtype, p.expected_path.dtype, p.confidence.dtype) == (torch.float32, *[torch.bfloat16] * 2)
    close(p.value, bx.CTC(log_probs.bfloat16().float(), targets).value, 1e-6)


ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "blank in targets": (lambda x, y: bx.CTC(x, y, blank=2), "targets must not hold the blank, got 2 at label 1"),
    "of a batch": (
        lambda x, y: bx.CTC(x, torch.tensor([[1, 1], [1, 0]])),
        "targets must not hold the blank, got 0 at label 1 of sequence 1",
    ),
    "label": (lambda x, y: bx.CTC(x, y + 7), "targets must be from 0 to 3, got 8 at label 0"),
    "negative label": (lambda x, y: bx.CTC(x, y - 2), "targets must be from 0 to 3, got -1 at label 0"),
    "blank": (lambda x, y: bx.CTC(x, y, blank=-1), "blank must be a class of log_probs, from 0 to 3, got -1"),
    "frames": (lambda x, y: bx.CTC(x, y, lengths=(6, 2)), r"lengths\[0\] must be from 1 to 5, got 6"),
    "no frames": (lambda x, y: bx.CTC(x, y, lengths=(0, 2)), r"lengths\[0\] must be from 1 to 5, got 0"),
    "labels": (lambda x, y: bx.CTC(x, y, lengths=(5, 3)), r"lengths\[1\] must be from 0 to 2, got 3"),
    "one length": (lambda x, y: bx.CTC(x, y, lengths=5), r"lengths must be a pair"),
    "float targets": (lambda x, y: bx.CTC(x, y.float()), r"targets must hold integers \(..., L\), got torch.float32"),
    "no tensor": (lambda x, y: bx.CTC(x, [1, 2]), "targets must be a tensor, got list"),
    "integers": (lambda x, y: bx.CTC(x.long(), y), "log_probs must be floating point"),
    "shape": (lambda x, y: bx.CTC(x[0], y), r"log_probs must have shape \(..., T, V\)"),
    "no frame at all": (lambda x, y: bx.CTC(x[:0], y), "with T, V >= 1"),
    "batches": (
        lambda x, y: bx.CTC(x.expand(2, 5, 4), y.expand(3, 2)),
        r"must broadcast, got shapes \{'log_probs': \(2, 5, 4\), 'targets': \(3, 2\)\}",
    ),
    "batch of lengths": (
        lambda x, y: bx.CTC(x, y.expand(3, 2), lengths=([5, 5], [2, 2])),
        r"must broadcast, got shapes .*'targets': \(3, 2\), 'lengths\[0\]': \(2,\)",
    ),
    "time first": (
        lambda x, y: bx.CTC(x.expand(9, 5, 4), y.expand(5, 2)),
        r"must broadcast, .*\. bellmax is batch-first: if log_probs is \(time, batch, \.\.\.\), pass "
        r"log_probs\.transpose\(0, 1\)",
    ),
    "time first with long targets": (
        lambda x, y: bx.CTC(x.expand(9, 5, 4), torch.ones(5, 6).long()),
        r"must broadcast, .*\. bellmax is batch-first",
    ),
    "time first with lengths": (
        lambda x, y: bx.CTC(x.expand(9, 5, 4), y.expand(5, 2), lengths=([9] * 5, [2] * 5)),
        r"lengths\[0\] must be from 1 to 5, got 9 .*\. bellmax is batch-first: .* pass log_probs\.transpose\(0, 1\)",
    ),
    "concatenated targets": (
        lambda x, y: bx.CTC(x.expand(3, 5, 4), torch.tensor([1, 2, 1, 3, 2]), lengths=([5, 5, 4], [2, 1, 2])),
        r"targets must have shape \(\.\.\., L\), padded, got \(5,\) .*Concatenated.*bellmax\.compat\.torch",
    ),
    "concatenated targets of one length": (
        lambda x, y: bx.CTC(x.expand(3, 5, 4), torch.tensor([1, 2, 1, 3, 2, 1]), lengths=(5, 2)),
        r"targets must have shape \(\.\.\., L\), padded, got \(6,\) .*Concatenated",
    ),
    "too few frames for the whole batch": (
        lambda x, y: bx.CTC(x.expand(3, 5, 4), torch.ones(3, 6).long()),
        r"targets must have at most as many labels as there are frames, got 6 labels and 5 frames",
    ),
    "NaN": (lambda x, y: bx.CTC(x.masked_fill(x == x, math.nan), y).value, "log_probs must be finite or -inf, got nan"),
}


def test_one_target_may_be_shared_by_a_batch() -> None:
    log_probs, target = torch.randn(3, 5, 4).log_softmax(-1), torch.tensor([1, 2])
    for lengths in (None, (5, 2), ([5, 4, 3], 2), ([5, 4, 3], [2, 2, 1])):
        shared = bx.CTC(log_probs, target, lengths=lengths)
        assert shared.value.equal(bx.CTC(log_probs, target.expand(3, 2), lengths=lengths).value)


def test_one_target_that_is_too_long_for_its_frames_stays_impossible() -> None:
    assert bx.CTC(torch.zeros(2, 3), torch.tensor([1, 2, 1])).value == -math.inf
    assert bx.CTC(torch.zeros(1, 2, 3), torch.tensor([[1, 2, 1]])).value == -math.inf
    assert (bx.CTC(torch.zeros(3, 2, 3), torch.tensor([1, 2, 1]), lengths=(2, 3)).value == -math.inf).all()


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(5, 4), torch.tensor([1, 2]))


def test_probability_is_conserved_over_100_000_frames() -> None:
    """The rounding error in float32 grows with the square root of the number of frames."""
    frames = 100_000
    log_probs = torch.randn(1, frames, 5).log_softmax(-1).requires_grad_()
    (path,) = torch.autograd.grad(bx.CTC(log_probs, torch.randint(1, 5, (1, 20))).value.sum(), log_probs)
    close(path.sum(-1), torch.ones(1, frames), 2e-5)


def test_in_place_changes_of_targets_have_no_effect(backend: str) -> None:
    log_probs, targets = potentials(2, 6, 4).requires_grad_(), torch.tensor([[1, 2], [3, 1]])
    p = bx.CTC(log_probs, targets)
    value = p.value.sum()
    (before,) = torch.autograd.grad(value, log_probs, retain_graph=True)
    targets.fill_(3)
    (after,) = torch.autograd.grad(value, log_probs)
    assert torch.equal(after, before)
    assert torch.equal(p.targets, torch.tensor([[1, 2], [3, 1]]))
