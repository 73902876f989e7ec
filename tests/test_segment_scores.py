"""Semi-Markov models from emissions and durations, against the model with a score for each segment and enumeration."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.checks import close
from support.kernels import needs_kernels
from support.problems import for_second_order, one_of_each_kind, potentials, two_kinds
from torch import Tensor

import bellmax as bx

LENGTHS = torch.tensor([6, 4, 1])
SHAPES = {
    "emissions": (3, 6, 5),
    "durations": (4, 5),
    "transitions": (3, 5, 5),
    "start": (5,),
    "end": (3, 5),
    "last_durations": (4, 5),
}


def scores(last: bool = True, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random scores, some of them −∞, with NaN in the padding; five labels do not fill a whole number of vectors."""
    named = enumerate((SHAPES | shapes).items())
    tensors = {name: potentials(*shape, seed=n) for n, (name, shape) in named if last or name != "last_durations"}
    tensors["emissions"][0, 3, 2] = tensors["durations"][1, 0] = tensors["start"][3] = -math.inf
    tensors["emissions"][torch.arange(6) >= LENGTHS.unsqueeze(-1)] = math.nan
    return tensors


def model(tensors: dict[str, Tensor], **options: Any) -> bx.SemiMarkov:
    positional = [tensors[name] for name in ("emissions", "durations", "transitions")]
    rest = {name: tensor for name, tensor in tensors.items() if name in ("start", "end", "last_durations")}
    return bx.SemiMarkov.from_scores(*positional, **rest, **options)


def summed(tensors: dict[str, Tensor], lengths: Tensor) -> Tensor:
    """The score of each segment, added up one by one."""
    emissions, durations = tensors["emissions"], tensors["durations"]
    last = tensors.get("last_durations", durations)
    members = []
    for b, length in enumerate(lengths.tolist()):
        rows = []
        for t in range(emissions.shape[1]):
            of_duration = last if t == length - 1 else durations
            row = [emissions[b, t - d : t + 1].sum(0) + of_duration[d] for d in range(min(t + 1, len(durations)))]
            rows.append(torch.stack(row + [torch.zeros_like(row[0])] * (len(durations) - len(row))))
        members.append(torch.stack(rows))
    return torch.stack(members)


def by_segment(tensors: dict[str, Tensor], **options: Any) -> bx.SemiMarkov:
    """The same model from the score of each segment."""
    segments = summed(tensors, options["lengths"])
    return bx.SemiMarkov(segments, tensors["transitions"], start=tensors["start"], end=tensors["end"], **options)


# --- against the model with a score for each segment


@pytest.mark.parametrize("last", [False, True])
def test_every_omega_equals_the_model_by_segment(omega: bx.Regularizer, backend: str, last: bool) -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in scores(last).items()}
    options: dict[str, Any] = {"lengths": LENGTHS, "omega": omega}
    p, wanted = model(tensors, **options), by_segment(tensors, **options)
    close(p.value, wanted.value)
    close(p.potentials[0, 3], wanted.potentials[0, 3])
    seed = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    got, expected = (torch.autograd.grad(value @ seed, list(tensors.values())) for value in (p.value, wanted.value))
    for name, a, b in zip(tensors, got, expected, strict=True):
        assert a.shape == tensors[name].shape
        close(a, b, 1e-9)
    close(p.marginals, wanted.marginals, 1e-9)
    close(p.expected_path, wanted.expected_path, 1e-9)
    close(p.entropy(), wanted.entropy(), 1e-9)
    assert p.best_segments().equal(wanted.best_segments())
    close(p.topk(3)[0], wanted.topk(3)[0])
    assert p.num_paths.equal(wanted.num_paths)


@one_of_each_kind
def test_hessian_products_equal_the_model_by_segment(omega: bx.Regularizer, backend: str) -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in scores().items()}
    z = {name: potentials(*shape, seed=20 + n) for n, (name, shape) in enumerate(SHAPES.items())}
    p = model(tensors, lengths=LENGTHS, omega=omega)
    value = by_segment(tensors, lengths=LENGTHS, omega=omega).value.sum()
    gradients = torch.autograd.grad(value, list(tensors.values()), create_graph=True)
    if isinstance(omega, bx.Hard):
        wanted = [torch.zeros_like(gradient) for gradient in gradients]
    else:
        slope = sum((g * z[name]).sum() for name, g in zip(tensors, gradients, strict=True))
        wanted = list(torch.autograd.grad(slope, list(tensors.values())))
    for (name, product), along in zip(p.hessian_product(z).items(), wanted, strict=True):
        assert product.shape == tensors[name].shape
        close(product, along, 1e-9)


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    shapes = {"emissions": (2, 4, 2), "durations": (3, 2), "transitions": (2, 2), "start": (2,), "end": (2,)}
    names = [*shapes, "last_durations"]
    inputs = [potentials(*(*shapes.values(), (2, 3, 2))[n], seed=n, requires_grad=True) for n in range(6)]

    def value(*tensors: Tensor) -> Tensor:
        return model(dict(zip(names, tensors, strict=True)), lengths=[4, 3], omega=omega).value

    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, inputs, fast_mode=True)


@needs_kernels
@two_kinds
@pytest.mark.parametrize(("steps", "longest", "labels"), [(1, 1, 1), (7, 1, 3), (5, 9, 1), (20, 6, 4), (9, 3, 9)])
def test_native_equals_reference(omega: bx.Regularizer, steps: int, longest: int, labels: int) -> None:
    """Values, gradients and samples of a batch, in both precisions."""
    shapes = (2, steps, labels), (longest, labels), (labels, labels)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        tensors = [potentials(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
        p = bx.SemiMarkov.from_scores(*tensors, omega=omega)
        with bx.use_backend("reference"):
            q = bx.SemiMarkov.from_scores(*tensors, omega=omega)
        close(p.value, q.value, tolerance)
        for name, gradient in p.gradient.items():
            close(gradient, q.gradient[name], tolerance)
        torch.manual_seed(0)
        segments = p.sample_segments((20,))
        torch.manual_seed(0)
        assert segments.equal(q.sample_segments((20,)))


@two_kinds
def test_hessian_matrix_by_transforms(omega: bx.Regularizer, backend: str) -> None:
    """torch.func.hessian maps Hessian products over directions, with one tape for all of them."""
    emissions, durations, transitions = potentials(4, 3), potentials(3, 3, seed=1), potentials(3, 3, seed=2)

    def value(x: Tensor) -> Tensor:
        return bx.SemiMarkov.from_scores(x, durations, transitions, omega=omega).value

    matrix = torch.func.hessian(value)(emissions)
    p = bx.SemiMarkov.from_scores(emissions, durations, transitions, omega=omega)
    for z in torch.eye(12).double().reshape(12, 4, 3):
        close((matrix * z).sum((-1, -2)), p.hessian_product(z), 1e-9)


def test_exported_with_any_number_of_steps() -> None:
    class Value(torch.nn.Module):
        def forward(self, emissions: Tensor) -> Tensor:
            return bx.SemiMarkov.from_scores(emissions, torch.zeros(3, 2), torch.zeros(2, 2)).value

    steps = torch.export.Dim("steps", min=2, max=100)
    program = torch.export.export(Value(), (torch.zeros(2, 6, 2),), dynamic_shapes={"emissions": {1: steps}})
    emissions = potentials(2, 9, 2).float()
    close(program.module()(emissions), Value()(emissions), 1e-6)


# --- against enumeration


def all_segmentations(steps: int, longest: int, labels: int) -> list[list[tuple[int, int, int]]]:
    segmentations: list[list[tuple[int, int, int]]] = [[]] if steps == 0 else []
    for duration in range(1, min(longest, steps) + 1):
        for before in all_segmentations(steps - duration, longest, labels):
            segmentations += [[*before, (steps - duration, steps, label)] for label in range(labels)]
    return segmentations


def test_values_are_sums_over_segmentations(backend: str) -> None:
    shapes = {"emissions": (5, 2), "durations": (3, 2), "transitions": (2, 2), "start": (2,), "end": (2,)}
    tensors = {name: potentials(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    tensors["last_durations"] = potentials(3, 2, seed=9)
    every = all_segmentations(5, 3, 2)

    def score(segmentation: list[tuple[int, int, int]]) -> Tensor:
        labels = [label for _, _, label in segmentation]
        total = tensors["start"][labels[0]] + tensors["end"][labels[-1]]
        for first, end, label in segmentation:
            durations = tensors["last_durations" if end == 5 else "durations"]
            total = total + tensors["emissions"][first:end, label].sum() + durations[end - first - 1, label]
        return total + sum(tensors["transitions"][b, a] for a, b in pairwise(labels))

    p, expected = model(tensors), torch.stack([score(s) for s in every])
    close(p.value, expected.logsumexp(0))
    padded = torch.tensor([s + [(-1, -1, -1)] * (5 - len(s)) for s in every])
    close(p.log_prob(padded), expected.log_softmax(0))
    assert p.best_segments().equal(padded[expected.argmax()])
    torch.manual_seed(0)
    frequency = (p.sample_segments((4000,)).unsqueeze(1) == padded).flatten(2).all(-1).double().mean(0)
    close(frequency, expected.softmax(0), 0.03)


def test_survival_of_the_last_segment() -> None:
    """With survival functions, the probabilities of all ways to be in some segment at the last step add up to 1."""
    durations = potentials(3, 1).log_softmax(0)
    survival = durations.flip(-2).logcumsumexp(-2).flip(-2)
    p = bx.SemiMarkov.from_scores(torch.zeros(5, 1).double(), durations, torch.zeros(1, 1), last_durations=survival)
    close(p.value, 0.0)


# --- segments as arguments


@one_of_each_kind
def test_segments_are_targets(omega: bx.Regularizer, backend: str) -> None:
    p = model(scores(), lengths=LENGTHS, omega=omega)
    segments = p.best_segments()
    path = p.best_path()
    close(p.log_prob(segments), p.log_prob(path))
    for loss in (bx.losses.surrogate, bx.losses.crf_nll, bx.losses.path_nll, bx.losses.structured_hinge):
        close(loss(p, segments), loss(p, path), 1e-9)
    close(bx.losses.relaxed(p, segments), bx.losses.relaxed(p, path), 1e-9)
    wanted = by_segment(scores(), lengths=LENGTHS, omega=omega)
    close(wanted.log_prob(segments), wanted.log_prob(path))
    close(bx.losses.surrogate(wanted, segments), bx.losses.surrogate(p, segments))


def test_gradients_of_log_prob_of_segments(backend: str) -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in scores().items()}
    gamma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    p = model(tensors, lengths=LENGTHS, gamma=gamma)
    inputs = [*tensors.values(), gamma]
    got = torch.autograd.grad(p.log_prob(p.best_segments()).sum(), inputs)
    wanted = torch.autograd.grad(p.log_prob(p.best_path()).sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        close(a, b, 1e-9)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[0, 2, 0], [3, 4, 0]], r"path\[1\] starts at 3, but must start at 2"),
        ([[0, 4, 0]], r"path\[0\] has a duration of 4, which must be from 1 to 3"),
        ([[0, 2, 0], [2, 4, 5]], r"path\[1\] has label 5, which must be from 0 to 1"),
        ([[0, 2, 0], [2, 3, 1]], "path ends at 3, but the sequence has 4 steps"),
        ([[-1, -1, -1], [-1, 4, 0]], r"path\[0\] is padding, but a segment follows it"),
    ],
)
def test_invalid_segments_are_named(segments: list[list[int]], message: str) -> None:
    p = bx.SemiMarkov.from_scores(torch.zeros(4, 2), torch.zeros(3, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=message):
        p.log_prob(torch.tensor(segments))


def test_in_place_changes_of_lengths_have_no_effect(backend: str) -> None:
    emissions, lengths = potentials(3, 5, 2).requires_grad_(), torch.tensor([2, 2, 2])
    p = bx.SemiMarkov.from_scores(emissions, potentials(4, 2, seed=1), potentials(2, 2, seed=2), lengths=lengths)
    value = p.value.sum()
    (before,) = torch.autograd.grad(value, emissions, retain_graph=True)
    lengths.fill_(5)
    (after,) = torch.autograd.grad(value, emissions)
    assert torch.equal(after, before)
    assert torch.equal(p.lengths, torch.tensor([2, 2, 2]))


def test_ties_are_broken_alike_by_every_verb(backend: str) -> None:
    """With one label, segmentations with the same durations in another order have the same score."""
    emissions = potentials(5, 3, 1).requires_grad_()
    for seed in range(20):
        scores = emissions, potentials(2, 1, seed=seed), potentials(1, 1, seed=seed + 20)
        p = bx.SemiMarkov.from_scores(*scores, omega="hard")
        best, paths = p.best_path(), p.enumerate_support()
        assert torch.equal(p.sample((2,)), best.expand(2, *best.shape))
        assert not p.log_prob(p.best_segments()).any()
        assert torch.equal(p.log_prob(paths) == 0, (paths == best).flatten(-3).all(-1))
    (p.log_prob(best).sum() + p.expected_path.sum()).backward()
    assert emissions.grad is not None
    assert not emissions.grad.any()


def test_best_segments_draw_no_random_numbers(backend: str) -> None:
    emissions, durations, transitions = potentials(3, 5, 2), potentials(4, 2, seed=1), potentials(2, 2, seed=2)
    state = torch.get_rng_state()
    best = bx.SemiMarkov.from_scores(emissions, durations, transitions).best_segments()
    assert torch.equal(torch.get_rng_state(), state)
    each = torch.vmap(lambda x: bx.SemiMarkov.from_scores(x, durations, transitions).best_segments())(emissions)
    assert torch.equal(each, best)


# --- scores without a path, invalid scores, sizes


@pytest.mark.parametrize("labels", [1, 3])
def test_sequences_without_a_path(labels: int, omega: bx.Regularizer, backend: str) -> None:
    emissions = torch.zeros(2, 5, labels, requires_grad=True)
    closed = emissions.masked_fill(torch.tensor([[False], [True]]).unsqueeze(-1), -math.inf)
    p = bx.SemiMarkov.from_scores(closed, torch.zeros(2, labels), torch.zeros(labels, labels), omega=omega)
    assert p.value.isfinite().tolist() == [True, False]
    (gradient,) = torch.autograd.grad(p.value[1], emissions)
    assert not gradient.any()
    assert bool((p.best_segments()[1] == -1).all())
    assert bool((p.sample_segments()[1] == -1).all())
    for product in p.hessian_product({"emissions": torch.ones_like(closed)}).values():
        assert bool(product.isfinite().all())


@pytest.mark.parametrize("name", SHAPES)
def test_invalid_scores_are_named(name: str, backend: str) -> None:
    tensors = scores()
    tensors[name][(0,) * tensors[name].ndim] = math.nan
    with pytest.raises(ValueError, match=f"{name} must be finite or -inf, got nan"):
        _ = model(tensors, lengths=LENGTHS).value


def test_scores_past_the_longest_sequence_are_ignored(backend: str) -> None:
    tensors = scores(emissions=(3, 6, 5), durations=(9, 5), last_durations=(9, 5))
    wanted = model(tensors, lengths=LENGTHS).value
    tensors["durations"][5:] = tensors["last_durations"][6:] = math.nan
    close(model(tensors, lengths=LENGTHS).value, wanted)


def test_errors_name_the_argument(backend: str) -> None:
    with pytest.raises(ValueError, match=r"last_durations must have shape \(..., 4, 5\), got \(3, 5\)"):
        model(scores() | {"last_durations": torch.zeros(3, 5)})
    with pytest.raises(ValueError, match="lengths must be from 1 to 6, got 0"):
        _ = model(scores(), lengths=0).value


def test_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="overflow"):
        _ = bx.SemiMarkov.from_scores(
            torch.full((9, 1), 1e308, dtype=torch.float64), torch.zeros(9, 1), torch.zeros(1, 1)
        ).value


@pytest.mark.parametrize("ask", [lambda p: p.expected_path, lambda p: p.potentials, lambda p: p.topk(2)])
def test_large_tensors_are_refused_with_their_size(ask: Any) -> None:
    p = bx.SemiMarkov.from_scores(torch.zeros(100_000, 8), torch.zeros(1000, 8), torch.zeros(8, 8))
    with pytest.raises(ValueError, match=r"shape \(1, 100000, 1000, 8\), 3.2 GB"):
        ask(p)


_MEMORY = """
import torch
from pathlib import Path
import bellmax as bx

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))

def train(steps):
    emissions = torch.zeros(steps, 4, requires_grad=True)
    p = bx.SemiMarkov.from_scores(emissions, torch.zeros(500, 4), torch.zeros(4, 4))
    bx.losses.surrogate(p, p.best_segments()).backward()
    p.hessian_product(torch.ones(steps, 4))

train(10)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
before = peak()
train(20_000)
print(peak() - before)
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_depend_on_the_longest_duration() -> None:
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 40 * 20_000 * 4 * 8  # 40 doubles for each step and label; D is 500
