"""Transducers against enumeration, a plain loop and hand-written graphs."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from support.checks import close
from support.inside import log_sum_of_products, set_limit
from support.problems import Enumerated, for_second_order, potentials, two_kinds
from support.transducers import forward_sum, log_likelihood
from torch import Tensor

import bellmax as bx

TARGETS = torch.tensor([[2, 1, 3], [3, 3, 0], [1, 0, 0]])
LENGTHS = torch.tensor([4, 3, 4]), torch.tensor([3, 2, 0])


def joints(seed: int = 0, classes: int = 4) -> Tensor:
    return potentials(3, 4, 4, classes, seed=seed)


def all_paths(frames: int, labels: int) -> Tensor:
    """Every path as an event, (K, T, U + 1): the number of labels before the blank of each frame."""
    counts = combinations_with_replacement(range(labels + 1), frames - 1)
    return torch.stack([torch.eye(labels + 1, dtype=torch.float64)[[*count, labels]] for count in counts])


def by_hand(blank: Tensor, emit: Tensor, omega: bx.Regularizer) -> tuple[Enumerated, list[tuple[str, int, int]]]:
    """The graph over nodes (t, u) with a source, its weights, and the terms of each edge."""
    frames, labels = emit.shape
    nodes = [(t, u) for t in range(frames) for u in range(labels + 1)] + [(frames, labels)]
    number = {node: 1 + n for n, node in enumerate(nodes)}
    edges, weights, terms = [(0, 1)], [0.0], [("", 0, 0)]
    for t, u in nodes:
        for name, tensor, parent, index in (
            ("blank", blank, (t - 1, u), (t - 1, u)),
            ("emit", emit, (t, u - 1), (t, u - 1)),
        ):
            if parent in number and (name == "blank" or t < frames):
                edges.append((number[parent], number[t, u]))
                weights.append(float(tensor[index]))
                terms.append((name, *index))
    return Enumerated(edges, 1 + len(nodes), weights, omega), terms


# --- against enumeration


def test_every_omega_equals_the_graph_by_hand(omega: bx.Regularizer, backend: str) -> None:
    blank, emit = potentials(3, 3), potentials(3, 2, seed=1)
    emit[1, 0] = -math.inf
    p, (wanted, terms) = bx.Transducer(blank, emit, omega=omega), by_hand(blank, emit, omega)
    close(p.value, wanted.value)
    sums = {"blank": torch.zeros_like(blank), "emit": torch.zeros_like(emit)}
    for (name, *index), mass in zip(terms, wanted.expected_path, strict=True):
        if name:
            sums[name][tuple(index)] += float(mass)
    for name, gradient in p.gradient.items():
        close(gradient, sums[name], 1e-9)
    close(p.entropy(), wanted.entropy, 1e-9)
    assert int(p.num_paths) == len(wanted.all_paths)


def test_values_are_sums_over_paths(backend: str) -> None:
    blank, emit = potentials(4, 3), potentials(4, 2, seed=1)
    p, paths = bx.Transducer(blank, emit), all_paths(4, 2)
    assert int(p.num_paths) == len(paths) == math.comb(4 + 2 - 1, 2)
    scores = []
    for path in paths:
        before = path.argmax(-1)
        emitted = [(t, u) for u in range(2) for t in [int((before <= u).sum())]]
        scores.append((path * blank).sum() + sum(emit[index] for index in emitted))
    expected = torch.stack(scores)
    close(p.value, expected.logsumexp(0))
    close(p.value, forward_sum(blank, emit))
    close(p.log_prob(paths), expected.log_softmax(0))
    close(p.topk(4)[0], expected.topk(4).values)
    best = paths[expected.argmax()]
    assert p.best_path().equal(best)
    assert p.best_frames().tolist() == [int((best.argmax(-1) <= u).sum()) for u in range(2)]


@two_kinds
def test_lengths_equal_sequences_without_padding(omega: bx.Regularizer, backend: str) -> None:
    logits = joints().requires_grad_()
    frames, labels = LENGTHS
    outside = (torch.arange(4)[:, None] >= frames[:, None, None]) | (torch.arange(4) > labels[:, None, None])
    padded = logits.masked_fill(outside.unsqueeze(-1), math.nan)
    p = bx.Transducer.from_logits(padded, TARGETS, lengths=LENGTHS, omega=omega)
    p.value.sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[outside] == 0).all())
    for b in range(3):
        n, m = int(frames[b]), int(labels[b])
        alone = bx.Transducer.from_logits(logits.detach()[b, :n, : m + 1], TARGETS[b, :m], omega=omega)
        close(p.value[b].detach(), alone.value)
        close(p.expected_path[b, :n, : m + 1].detach(), alone.expected_path)
        assert p.best_frames()[b].tolist() == [*alone.best_frames().tolist(), *[-1] * (3 - m)]
        path = torch.zeros(4, 4, dtype=torch.float64)
        path[:n, : m + 1] = alone.best_path()
        close(p[b].log_prob(path).detach(), alone.log_prob(alone.best_path()))


def test_samples_have_their_probabilities(backend: str) -> None:
    p = bx.Transducer(potentials(3, 3), potentials(3, 2, seed=1))
    torch.manual_seed(0)
    paths = p.sample((1500,))
    close(paths.mean(0), p.expected_path, 0.05)
    assert bool((p.log_prob(paths[:20]) < 0).all())


# --- from logits


def test_logits_equal_the_loop_to_second_order(backend: str) -> None:
    logits = joints(seed=2).requires_grad_()
    z = joints(seed=3)
    p = bx.Transducer.from_logits(logits, TARGETS, lengths=LENGTHS)
    sizes = [(int(n), int(m)) for n, m in zip(*LENGTHS, strict=True)]
    loop = torch.stack([log_likelihood(logits[b], TARGETS[b], 0, n, m) for b, (n, m) in enumerate(sizes)])
    close(p.value, loop)
    gradients = [torch.autograd.grad(v.sum(), logits, create_graph=True)[0] for v in (p.value, loop)]
    close(*gradients)
    products = [torch.autograd.grad((g * z).sum(), logits)[0] for g in gradients]
    close(*products)


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    blank, emit = potentials(2, 3, 3, requires_grad=True), potentials(2, 3, 2, seed=1, requires_grad=True)

    def value(blank: Tensor, emit: Tensor) -> Tensor:
        return bx.Transducer(blank, emit, lengths=([3, 2], [2, 1]), omega=omega).value

    assert torch.autograd.gradcheck(value, (blank, emit), fast_mode=True)
    assert torch.autograd.gradgradcheck(value, (blank, emit), fast_mode=True)

    def of_logits(logits: Tensor) -> Tensor:
        return bx.Transducer.from_logits(logits, TARGETS[:1], omega=omega).value

    logits = joints(seed=4)[:1].requires_grad_()
    assert torch.autograd.gradcheck(of_logits, logits, fast_mode=True)
    assert torch.autograd.gradgradcheck(of_logits, logits, fast_mode=True)


def test_normalisation_in_chunks_and_third_order(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = joints(seed=5).requires_grad_()
    value = bx.Transducer.from_logits(logits, TARGETS, lengths=LENGTHS).value.sum()
    (gradient,) = torch.autograd.grad(value, logits)
    set_limit(monkeypatch, "numbers in a chunk of joint scores", 12)
    again = bx.Transducer.from_logits(logits, TARGETS, lengths=LENGTHS).value.sum()
    close(again, value)
    close(torch.autograd.grad(again, logits)[0], gradient)

    def direction(logits: Tensor) -> Tensor:
        value = bx.Transducer.from_logits(logits, TARGETS[:1, :1]).value
        return torch.autograd.grad(value.sum(), logits, create_graph=True)[0]

    small = potentials(1, 2, 2, 4, requires_grad=True)
    assert torch.autograd.gradgradcheck(direction, small, fast_mode=True)


def test_half_precision_and_impossible_classes(backend: str) -> None:
    logits = joints(seed=8).half().requires_grad_()
    p = bx.Transducer.from_logits(logits, TARGETS, lengths=LENGTHS)
    assert p.value.dtype == torch.float32
    p.value.sum().backward()
    exact = bx.Transducer.from_logits(logits.detach().double(), TARGETS, lengths=LENGTHS).value
    close(p.value.detach().double(), exact, 1e-4)
    assert logits.grad is not None
    assert logits.grad.dtype == torch.float16
    closed = joints().masked_fill(torch.arange(4) == 3, -math.inf).requires_grad_()
    value = bx.Transducer.from_logits(closed, TARGETS, lengths=LENGTHS).value
    assert value.isinf().tolist() == [True, True, False]
    (gradient,) = torch.autograd.grad(value[2], closed)
    assert bool(gradient.isfinite().all())
    nothing = torch.full((2, 2, 3), -math.inf, requires_grad=True)
    value = bx.Transducer.from_logits(nothing, torch.tensor([1])).value
    assert value == -math.inf
    value.backward()
    assert nothing.grad is not None
    assert not nothing.grad.any()


def test_no_labels(backend: str) -> None:
    logits = potentials(2, 3, 1, 4, requires_grad=True)
    p = bx.Transducer.from_logits(logits, torch.empty(2, 0, dtype=torch.int64))
    close(p.value, logits.log_softmax(-1)[..., 0].sum((1, 2)))
    p.value.sum().backward()
    assert p.best_frames().shape == (2, 0)


# --- additive joint networks


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_a_sum_equals_its_logits(spread: float, backend: str) -> None:
    am, lm = (spread * potentials(*shape, seed=seed) for seed, shape in enumerate(((3, 4, 4), (3, 4, 4))))
    am, lm = am.requires_grad_(), lm.requires_grad_()
    p = bx.Transducer.from_additive(am, lm, TARGETS, lengths=LENGTHS)
    q = bx.Transducer.from_logits(am.unsqueeze(-2) + lm.unsqueeze(-3), TARGETS, lengths=LENGTHS)
    close(p.value, q.value)
    for gradient, wanted in zip(*(torch.autograd.grad(x.value.sum(), (am, lm)) for x in (p, q)), strict=True):
        close(gradient, wanted)


def test_peaks_far_apart() -> None:
    a = torch.tensor([[0.0, -400.0, -900.0]], requires_grad=True)
    b = torch.tensor([[-700.0, -350.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    close(log_sum_of_products(a, b), (a[:, None] + b).logsumexp(-1), 1e-6)
    assert torch.autograd.gradcheck(log_sum_of_products, (a.detach().double().requires_grad_(), b.detach().double()))


# --- pruning


def test_pruned_ranges_keep_paths() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        frames, labels = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        p = bx.Transducer(
            3 * potentials(2, frames, labels + 1, seed=seed), 3 * potentials(2, frames, labels, seed=seed)
        )
        least = 1 + -(-labels // frames)
        for s_range in (least, least + 1, labels + 1):
            first = p.prune(s_range)
            at = torch.arange(labels + 1)
            in_range = (at >= first.unsqueeze(-1)) & (at < first.unsqueeze(-1) + s_range)
            blank, emit = p.scores["blank"], p.scores["emit"]
            both = in_range[..., 1:] & in_range[..., :-1]
            pruned = bx.Transducer(blank.masked_fill(~in_range, -math.inf), emit.masked_fill(~both, -math.inf))
            assert bool(pruned.value.isfinite().all())
            assert bool((first[..., 0] == 0).all())
            assert bool((first[..., -1] == max(labels + 1 - s_range, 0)).all())
            if s_range == labels + 1:
                close(pruned.value, p.value)


def test_pruning_keeps_the_likely_path_and_respects_lengths() -> None:
    path = torch.tensor([0, 0, 1, 3, 3, 4])
    blank = torch.where(torch.arange(6)[:5] == path[:, None], 0.0, -20.0).expand(2, 6, 5)
    p = bx.Transducer(blank, torch.zeros(2, 6, 4), lengths=([6, 5], [4, 3]))
    first = p.prune(3)
    assert bool(((path >= first[0]) & (path < first[0] + 3)).all())
    assert first[1, 4:].tolist() == [1, 1]
    with pytest.raises(ValueError, match="s_range must be at least 2"):
        p.prune(1)


def pruned_problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Logits (B, T, s, V) with NaN in the padding of frames, ranges, targets and lengths."""
    targets, lengths = (
        torch.tensor([[2, 1, 3], [3, 3, 0], [1, 0, 0]]),
        (torch.tensor([5, 3, 4]), torch.tensor([3, 2, 0])),
    )
    am, lm = potentials(3, 5, 4, seed=seed), potentials(3, 4, 4, seed=seed + 1)
    ranges = bx.Transducer.from_additive(am, lm, targets, lengths=lengths).prune(2)
    logits = potentials(3, 5, 2, 4, seed=seed + 2)
    logits[torch.arange(5) >= lengths[0].unsqueeze(-1)] = math.nan
    return logits.requires_grad_(), ranges, targets, lengths


def everywhere(logits: Tensor, ranges: Tensor, positions: int) -> Tensor:
    """Logits (B, T, U + 1, V) with −∞ outside of the ranges, entry by entry."""
    rows = [[[logits.new_full((logits.shape[-1],), -math.inf)] * positions for _ in row] for row in ranges.tolist()]
    for b, starts in enumerate(ranges.tolist()):
        for t, start in enumerate(starts):
            for n in range(logits.shape[2]):
                if 0 <= start + n < positions:
                    rows[b][t][start + n] = logits[b, t, n]
    return torch.stack([torch.stack([torch.stack(row) for row in member]) for member in rows])


@pytest.mark.parametrize("normalized", [False, True])
@two_kinds
def test_pruned_logits_equal_logits_that_are_forbidden_elsewhere(
    omega: bx.Regularizer, normalized: bool, backend: str
) -> None:
    logits, ranges, targets, lengths = pruned_problem()
    options: dict[str, Any] = {"lengths": lengths, "omega": omega, "normalized": normalized}
    p = bx.Transducer.from_pruned(logits, ranges, targets, **options)
    q = bx.Transducer.from_logits(everywhere(logits, ranges, 4), targets, **options)
    assert bool(p.value.isfinite().all())
    close(p.value, q.value)
    gradients = [torch.autograd.grad(x.value.sum(), logits, create_graph=True)[0] for x in (p, q)]
    close(*gradients)
    products = [torch.autograd.grad(g.nan_to_num().square().sum(), logits)[0] for g in gradients]
    close(*(x.nan_to_num() for x in products))
    assert bool(gradients[0].isfinite().all())
    close(p.expected_path, q.expected_path)


def test_ranges_may_reach_beyond_the_last_label(backend: str) -> None:
    logits, targets = potentials(2, 4, 5, 4), torch.tensor([[1, 3], [2, 0]])
    ranges = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 99]])  # the last one is in the padding
    lengths = [4, 3], [2, 1]
    p = bx.Transducer.from_pruned(logits, ranges, targets, lengths=lengths)
    close(p.value, bx.Transducer.from_logits(everywhere(logits, ranges, 3), targets, lengths=lengths).value)
    one = bx.Transducer.from_pruned(logits[0].half(), ranges[0].int(), targets[0])
    assert one.value.dtype == torch.float32
    close(one.value.double(), p.value[0], 1e-2)


def test_ranges_without_a_path_have_no_value_and_no_gradient(backend: str) -> None:
    logits = potentials(4, 2, 4, requires_grad=True)
    value = bx.Transducer.from_pruned(logits, torch.tensor([0, 0, 3, 3]), torch.tensor([1, 2, 3, 1])).value
    assert value == -math.inf
    assert not torch.autograd.grad(value, logits)[0].any()


@pytest.mark.parametrize(
    ("logits", "ranges", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(4).long(), r"logits must be floating point of shape \(..., T, s, V\), got"),
        (torch.zeros(4, 2, 3), torch.zeros(4), r"ranges must be integers \(..., 4\), the first label position of each"),
        (
            torch.zeros(4, 2, 3),
            torch.zeros(3).long(),
            r"ranges must be integers \(..., 4\), .* got torch.int64 of shape",
        ),
        (torch.zeros(4, 2, 3), torch.zeros(4, 2).long(), r"as in k2, pass ranges\[..., 0\]"),
        (torch.zeros(1, 4, 2, 3), torch.tensor([[0, 1, 3, 1]]), "from 0 to 2, got 3 at frame 2 of sequence 0"),
        (
            torch.zeros(4, 2, 3),
            torch.tensor([0, -1, 1, 1]),
            "ranges must hold positions from 0 to 2, got -1 at frame 1",
        ),
    ],
)
def test_errors_of_pruned_logits_name_the_argument(logits: Tensor, ranges: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.Transducer.from_pruned(logits, ranges, torch.tensor([1, 2]))


# --- errors


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (TARGETS[:, :2], {}, r"targets must have shape \(..., 3\)"),
        (TARGETS.clamp(min=1), {"blank": 1}, "targets must not hold the blank 1, got it at label 1 of sequence 0"),
        (TARGETS.flatten(), {}, r"targets must have shape \(..., 3\), .*, got \(9,\)\. .*concatenated.*pad_sequence"),
        (TARGETS + 2, {}, r"targets must hold labels from 0 to 3, got 4 at \(0, 0\)"),
        (TARGETS.float(), {}, "targets must hold integers"),
        (TARGETS, {"blank": 4}, "blank must be from 0 to 3, got 4"),
        (TARGETS, {"blank": -1}, "blank must be from 0 to 3, got -1. For the last class, pass blank=3"),
        (TARGETS, {"lengths": ([4, 4, 0], [1, 1, 1])}, r"lengths\[0\] must be from 1 to 4, got 0"),
        (TARGETS, {"lengths": ([4, 4, 4], [1, 4, 1])}, r"lengths\[1\] must be from 0 to 3, got 4"),
    ],
)
def test_errors_name_the_argument(targets: Tensor, options: dict[str, Any], message: str) -> None:
    options = {"lengths": LENGTHS} | options
    with pytest.raises(ValueError, match=message):
        bx.Transducer.from_logits(joints(), targets, **options)


def test_time_first_logits_are_detected_by_their_lengths() -> None:
    logits, targets = joints().transpose(0, 1), TARGETS
    assert logits.shape[:2] == (4, 3)
    for lengths in (None, LENGTHS):
        with pytest.raises(ValueError, match=r"bellmax is batch-first: .*logits\.transpose\(0, 1\)"):
            bx.Transducer.from_logits(logits, targets, lengths=lengths)


def test_errors_in_shapes_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"emit must have shape \(..., 3, 2\), got \(3, 3\)"):
        bx.Transducer(torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"lm must have shape \(..., U \+ 1, 4\)"):
        bx.Transducer.from_additive(torch.zeros(3, 4), torch.zeros(3, 5), torch.tensor([1, 1]))


def test_infinite_padding_gets_no_gradient_and_targets_broadcast() -> None:
    logits = torch.zeros(3, 3, 4)
    logits[2] = math.inf
    logits.requires_grad_()
    value = bx.Transducer.from_logits(logits, torch.tensor([1, 2]), lengths=(2, 2)).value
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.isfinite().all()
    assert not gradient[2].any()
    both = bx.Transducer.from_logits(torch.zeros(3, 3, 4), torch.tensor([[1, 2], [2, 3]])).value
    assert both.shape == (2,)


def test_an_additive_joint_without_a_class_in_a_frame_gets_no_gradient() -> None:
    am, lm = (torch.zeros(3, 4, dtype=torch.float64) for _ in range(2))
    am[1] = -math.inf
    am.requires_grad_()
    lm.requires_grad_()
    value = bx.Transducer.from_additive(am, lm, torch.tensor([1, 2])).value
    assert value == -math.inf
    assert not any(gradient.any() for gradient in torch.autograd.grad(value, (am, lm)))
