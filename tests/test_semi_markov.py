"""Semi-Markov models against enumeration of segmentations and hand-written graphs."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import close
from support.inside import SegmentProgram, graph
from support.problems import Enumerated, for_second_order, one_of_each_kind, potentials, two_kinds
from torch import Tensor

import bellmax as bx

Segmentation = list[tuple[int, int, int]]  # start, end, label


def all_segmentations(steps: int, longest: int, labels: int) -> list[Segmentation]:
    segmentations: list[Segmentation] = [[]] if steps == 0 else []
    for duration in range(1, min(longest, steps) + 1):
        for before in all_segmentations(steps - duration, longest, labels):
            segmentations += [[*before, (steps - duration, steps, label)] for label in range(labels)]
    return segmentations


def scores(steps: int, longest: int, labels: int, seed: int = 0) -> dict[str, Tensor]:
    shapes = {
        "segments": (steps, longest, labels),
        "transitions": (labels, labels),
        "start": (labels,),
        "end": (labels,),
    }
    return {name: potentials(*shape, seed=seed + n) for n, (name, shape) in enumerate(shapes.items())}


def model(tensors: dict[str, Tensor], **options: Any) -> bx.SemiMarkov:
    ends = {name: tensors[name] for name in ("start", "end")}
    return bx.SemiMarkov(tensors["segments"], tensors["transitions"], **ends, **options)


def score_of(segmentation: Segmentation, tensors: dict[str, Tensor]) -> Tensor:
    labels = [label for _, _, label in segmentation]
    total = tensors["start"][labels[0]] + tensors["end"][labels[-1]]
    total = total + sum(tensors["segments"][end - 1, end - start - 1, label] for start, end, label in segmentation)
    return total + sum(tensors["transitions"][b, a] for a, b in pairwise(labels))


def as_path(segmentation: Segmentation, shape: torch.Size) -> Tensor:
    path = torch.zeros(shape, dtype=torch.float64)
    for start, end, label in segmentation:
        path[end - 1, end - start - 1, label] = 1
    return path


def by_hand(tensors: dict[str, Tensor], omega: bx.Regularizer) -> tuple[Enumerated, list[tuple[str, tuple[int, ...]]]]:
    """A source, boundaries and ends of segments step by step, and a sink if there are several ends."""
    steps, longest, labels = tensors["segments"].shape
    number: dict[Any, int] = {"source": 0}
    edges, terms = [], []

    def add(parent: Any, child: Any, name: str, *index: int) -> None:
        number.setdefault(child, len(number))
        edges.append((number[parent], number[child]))
        terms.append((name, index))

    for b in range(labels):
        add("source", ("before", 0, b), "start", b)
    for i in range(1, steps + 1):
        for b, d in product(range(labels), range(1, min(i, longest) + 1)):
            add(("before", i - d, b), ("behind", i, b), "segments", i - 1, d - 1, b)
        if i < steps:
            for b, a in product(range(labels), repeat=2):
                add(("behind", i, a), ("before", i, b), "transitions", b, a)
    weights = [float(tensors[name][entry]) for name, entry in terms]
    if labels == 1:  # the last node would only add a constant
        return Enumerated(edges, len(number), weights, omega), terms
    for b in range(labels):
        add(("behind", steps, b), "sink", "end", b)
    weights += [float(end) for end in tensors["end"]]
    return Enumerated(edges, len(number), weights, omega), terms


# --- against enumeration


def test_every_omega_equals_the_graph_by_hand(omega: bx.Regularizer, backend: str) -> None:
    tensors = scores(4, 3, 2)
    tensors["segments"][2, 1, 0] = tensors["transitions"][1, 1] = -math.inf
    p, (wanted, terms) = model(tensors, omega=omega), by_hand(tensors, omega)
    close(p.value, wanted.value)
    sums = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for (name, index), mass in zip(terms, wanted.expected_path, strict=True):
        sums[name][index] += float(mass)
    assert p.gradient.keys() == sums.keys()
    for name, gradient in p.gradient.items():
        close(gradient, sums[name], 1e-9)
    close(p.entropy(), wanted.entropy, 1e-9)
    assert int(p.num_paths) == len(wanted.all_paths)


@one_of_each_kind
def test_one_label_has_one_end(omega: bx.Regularizer, backend: str) -> None:
    tensors = scores(4, 2, 1)
    close(model(tensors, omega=omega).value, by_hand(tensors, omega)[0].value + float(tensors["end"]))


def test_values_are_sums_over_segmentations(backend: str) -> None:
    tensors = scores(5, 3, 2, seed=3)
    p, every = model(tensors), all_segmentations(5, 3, 2)
    expected = torch.stack([score_of(s, tensors) for s in every])
    paths = torch.stack([as_path(s, p.event_shape) for s in every])
    assert int(p.num_paths) == len(every)
    close(p.value, expected.logsumexp(0))  # the flat form: one move for a segment and its transition
    close(p.log_prob(paths), expected.log_softmax(0))
    close(p.expected_path, (expected.softmax(0)[:, None, None, None] * paths).sum(0))
    close(p.topk(4)[0], expected.topk(4).values)
    best = every[int(expected.argmax())]
    assert p.best_segments().tolist() == [list(s) for s in best] + [[-1] * 3] * (5 - len(best))
    assert p.best_path().equal(as_path(best, p.event_shape))
    marginals = torch.zeros(5, 2, dtype=torch.float64)
    for segmentation, probability in zip(every, expected.softmax(0), strict=True):
        for start, end, label in segmentation:
            marginals[start:end, label] += probability
    close(p.marginals, marginals)
    close(p.marginals.sum(-1), torch.ones(5, dtype=torch.float64))


@two_kinds
def test_lengths_equal_sequences_without_padding(omega: bx.Regularizer, backend: str) -> None:
    tensors = scores(5, 3, 2, seed=5)
    segments = potentials(2, 2, 5, 3, 2, requires_grad=True)
    lengths = torch.tensor([[5, 3], [1, 2]])
    outside = torch.arange(5) >= lengths.unsqueeze(-1)
    padded = segments.masked_fill(outside[..., None, None], math.nan)
    p = model(tensors | {"segments": padded}, lengths=lengths, omega=omega)
    p.value.sum().backward()
    assert segments.grad is not None
    assert bool((segments.grad[outside] == 0).all())
    for b in product(range(2), repeat=2):
        n = int(lengths[b])
        alone = model(tensors | {"segments": segments.detach()[b][:n]}, omega=omega)
        close(p.value[b].detach(), alone.value)
        close(p.expected_path[b][:n].detach(), alone.expected_path)
        close(p.marginals[b].detach(), torch.nn.functional.pad(alone.marginals, (0, 0, 0, 5 - n)))
        assert p.best_segments()[b][:n].equal(alone.best_segments())
        path = torch.zeros(5, 3, 2, dtype=torch.float64)
        path[:n] = alone.best_path()
        close(p[b].log_prob(path).detach(), alone.log_prob(alone.best_path()))


@two_kinds
def test_samples_have_their_probabilities(omega: bx.Regularizer, backend: str) -> None:
    p = model(scores(4, 3, 2), omega=omega)
    torch.manual_seed(0)
    paths = p.sample((1500,))
    close(paths.mean(0), p.expected_path, 0.05)
    assert bool((p.log_prob(paths[:20]) > -20).all())
    segments = p.sample_segments((5,))
    assert segments.shape == (5, 4, 3)
    assert bool((segments[..., 1].amax(-1) == 4).all())


def test_one_step_and_longer_durations_than_steps(backend: str) -> None:
    tensors = scores(1, 4, 3)
    p = model(tensors)
    close(p.value, (tensors["segments"][0, 0] + tensors["start"] + tensors["end"]).logsumexp(0))
    assert p.best_segments().shape == (1, 3)
    with pytest.raises(ValueError, match="path is not a path of the graph"):
        p.log_prob(torch.nn.functional.one_hot(torch.tensor([5]), 12).reshape(1, 4, 3).double())


def test_sequences_without_a_path(backend: str) -> None:
    segments = torch.full((3, 2, 2), -math.inf, requires_grad=True)
    p = bx.SemiMarkov(segments, torch.zeros(2, 2))
    assert p.value == -math.inf
    p.value.backward()
    assert segments.grad is not None
    assert not segments.grad.any()
    assert bool((p.best_segments() == -1).all())


# --- derivatives


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    tensors = scores(4, 2, 2, seed=7)
    tensors["segments"] = potentials(2, 4, 2, 2)

    def value(*inputs: Tensor) -> Tensor:
        return model(dict(zip(tensors, inputs, strict=True)), lengths=[4, 3], omega=omega).value

    inputs = [tensor.requires_grad_() for tensor in tensors.values()]
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, inputs, fast_mode=True)


@two_kinds
def test_hessian_products_by_name(omega: bx.Regularizer, backend: str) -> None:
    tensors = scores(4, 2, 2, seed=7)
    z = scores(4, 2, 2, seed=20)
    p = model({name: tensor.requires_grad_() for name, tensor in tensors.items()}, omega=omega)
    slope = p.directional_derivative(z)
    wanted = torch.autograd.grad(slope, list(tensors.values()))
    for (name, product_), along in zip(p.hessian_product(z).items(), wanted, strict=True):
        close(product_.detach(), along.detach(), 1e-9)
        assert product_.shape == tensors[name].shape


# --- losses, errors


def test_the_surrogate_loss_is_the_likelihood(backend: str) -> None:
    tensors = scores(5, 3, 2, seed=3)
    p = model(tensors)
    target = as_path([(0, 2, 1), (2, 3, 0), (3, 5, 1)], p.event_shape)
    close(bx.losses.surrogate(p, target), -p.log_prob(target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": torch.zeros(3, 2)}, r"segments must have shape \(..., T, D, K\)"),
        ({"transitions": torch.zeros(3, 3)}, r"transitions must have shape \(..., 2, 2\), got \(3, 3\)"),
        ({"end": torch.zeros(3)}, r"end must have shape \(..., 2\)"),
        ({"segments": torch.full((4, 3, 2), math.nan)}, "segments must be finite or -inf, got nan"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = model(scores(4, 3, 2) | change).value


def test_lengths_out_of_range_are_named(backend: str) -> None:
    with pytest.raises(ValueError, match="lengths must be from 1 to 4, got 5"):
        _ = model(scores(4, 3, 2), lengths=5).value
    with pytest.raises(ValueError, match=r"durations must have shape \(..., D, 2\)"):
        bx.SemiMarkov.from_scores(torch.zeros(3, 2), torch.zeros(3), torch.zeros(2, 2))


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 3, 2), (4, 1, 3), (5, 3, 1), (4, 6, 2), (7, 3, 4)])
def test_levels_are_the_lengths_of_the_longest_paths(size: tuple[int, int, int]) -> None:
    parent, child, level = SegmentProgram().edges(size)
    assert level.tolist() == graph.levels(np.stack((parent, child), 1), len(level)).tolist()
