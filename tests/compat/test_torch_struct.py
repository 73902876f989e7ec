"""compat.torch_struct: chains against torch-struct 0.5 and alignments against enumeration, in float64."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import pytest
import torch
from support.checks import close
from torch import Tensor

from bellmax.compat.torch_struct import AlignmentCRF, LinearChainCRF

pytestmark = pytest.mark.filterwarnings("ignore:.*arg_constraints:UserWarning")
BATCH, STEPS, STATES = 4, 5, 3
LENGTHS = {"full": None, "lengths": torch.tensor([5, 2, 1, 4])}
each_padding = pytest.mark.parametrize("padding", LENGTHS)


@pytest.fixture(scope="module")
def original() -> ModuleType:
    return pytest.importorskip("torch_struct", reason="torch-struct is not installed")


def both(original: ModuleType, padding: str) -> tuple[LinearChainCRF, torch.distributions.Distribution, Tensor]:
    theta = torch.randn(BATCH, STEPS - 1, STATES, STATES, dtype=torch.float64, requires_grad=True)
    lengths = LENGTHS[padding]
    return LinearChainCRF(theta, lengths=lengths), original.LinearChainCRF(theta, lengths=lengths), theta


@each_padding
@pytest.mark.parametrize("name", ["partition", "max", "entropy", "marginals", "argmax", "mode", "count"])
def test_properties(backend: str, original: ModuleType, name: str, padding: str) -> None:
    ours, theirs, theta = both(original, padding)
    actual, expected = getattr(ours, name), getattr(theirs, name)
    close(actual.detach(), expected.detach(), 1e-9)
    if name in ("partition", "max", "entropy", "marginals"):
        z = torch.randn_like(expected)
        (a,), (b,) = (torch.autograd.grad(value, theta, z) for value in (actual, expected))
        close(a, b, 1e-9)


@each_padding
def test_k_best(backend: str, original: ModuleType, padding: str) -> None:
    ours, theirs, _ = both(original, padding)
    long_enough = slice(None) if padding == "full" else [0, 1, 3]  # member 2 has three structures instead of five
    close(ours.kmax(5)[:, long_enough].detach(), theirs.kmax(5)[:, long_enough].detach())
    close(ours.topk(5)[:, long_enough], theirs.topk(5)[:, long_enough].detach())


@each_padding
def test_log_prob_and_events(backend: str, original: ModuleType, padding: str) -> None:
    ours, theirs, _ = both(original, padding)
    lengths = LENGTHS[padding]
    sequence = torch.randint(STATES, (BATCH, STEPS))
    event = ours.to_event(sequence, STATES, lengths)
    assert torch.equal(event, theirs.struct.to_parts(sequence, STATES, lengths=lengths))
    close(ours.log_prob(event).detach(), theirs.log_prob(event).detach())
    states, count = ours.from_event(event)
    assert torch.equal(states, theirs.from_event(event)[0])
    assert count == STATES
    samples = ours.sample((7,))
    assert samples.shape == theirs.sample((7,)).shape
    close(ours.log_prob(samples).detach(), theirs.log_prob(samples).detach())


def test_divergences(backend: str, original: ModuleType) -> None:
    ours, theirs, theta = both(original, "lengths")
    other = torch.randn_like(theta)
    mine, yours = LinearChainCRF(other, ours.lengths), original.LinearChainCRF(other.clone(), ours.lengths)
    close(ours.kl(mine).detach(), theirs.kl(yours).detach(), 1e-9)
    close(ours.cross_entropy(mine).detach(), theirs.cross_entropy(yours).detach(), 1e-9)


def test_samples_have_the_marginals(backend: str) -> None:
    ours = LinearChainCRF(torch.randn(2, 3, 2, 2, dtype=torch.float64), torch.tensor([4, 3]))
    close(ours.sample((20_000,)).mean(0), ours.marginals, 0.02)
    assert ours.sample((2, 3)).shape == (2, 3, 2, 3, 2, 2)
    assert ours.sample().shape == (2, 3, 2, 2)


def test_chain_where_the_original_fails(backend: str) -> None:
    theta = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    theta[0, 1] = theta[1, :, 0] = -math.inf  # a batch member without a path, and an unreachable state
    ours = LinearChainCRF(theta, torch.tensor([4, 3]))
    assert not theta.requires_grad
    assert ours.partition[0] == -math.inf
    assert torch.equal(ours.entropy.isnan(), torch.tensor([False, False]))
    assert not ours.marginals.isnan().any()
    assert not ours.marginals[0].any()
    one = LinearChainCRF(torch.zeros(2, 0, 3, 3))
    close(one.partition.exp(), torch.full((2,), 3.0), 1e-6)
    with torch.no_grad():
        first = (lazy := LinearChainCRF(theta.clone().requires_grad_())).argmax
    assert first.shape == theta.shape
    assert lazy.partition.requires_grad


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((2, 3, 2), None, r"log_potentials must have shape \(B, N - 1, C, C\), got \(2, 3, 2\)"),
        ((2, 3, 2, 4), None, r"got \(2, 3, 2, 4\)"),
        ((2, 3, 2, 2), [5, 1], r"lengths must be from 1 to 4, got \[5, 1\]"),
        ((2, 3, 2, 2), [4], r"lengths must be integers of shape \(2,\), got shape \(1,\)"),
        ((2, 3, 2, 2), [4, 0], r"lengths must be from 1 to 4, got \[4, 0\]"),
    ],
)
def test_chain_errors(shape: tuple[int, ...], lengths: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearChainCRF(torch.zeros(shape), None if lengths is None else torch.tensor(lengths))


def test_lengths_of_any_integer_type() -> None:
    theta, lengths = torch.randn(2, 3, 2, 2), torch.tensor([4, 2])
    expected = LinearChainCRF(theta, lengths)
    narrow = LinearChainCRF(theta, lengths.int())
    assert torch.equal(narrow.partition, expected.partition)
    assert torch.equal(narrow.argmax, expected.argmax)


# --- alignments


def all_alignments(rows: int, columns: int, shape: tuple[int, int]) -> Tensor:
    """Every alignment of the first ``rows`` and ``columns`` as an event (K, *shape, 3)."""
    moves = {0: (0, 1), 1: (1, 1), 2: (1, 0)}
    events: list[Tensor] = []
    for count in range(max(rows, columns) - 1, rows + columns - 1):
        for taken in itertools.product(moves, repeat=count):
            event, i, j = torch.zeros(*shape, 3, dtype=torch.float64), 0, 0
            event[0, 0, 1] = 1
            for move in taken:
                i, j = i + moves[move][0], j + moves[move][1]
                if i >= rows or j >= columns:
                    break
                event[i, j, move] = 1
            else:
                if (i, j) == (rows - 1, columns - 1):
                    events.append(event)
    return torch.stack(events)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (1, 3), (3, 1), (1, 1)], ids=str)
@each_padding
def test_alignments_equal_enumeration(backend: str, sizes: tuple[int, int], padding: str) -> None:
    rows, columns = sizes
    lengths = None if padding == "full" else torch.tensor([rows, max(rows - 1, 1)])
    theta = torch.randn(2, rows, columns, 3, dtype=torch.float64)
    if lengths is not None:
        theta[1, int(lengths[1]) :] = math.nan
    theta.requires_grad_()
    ours = AlignmentCRF(theta, lengths=lengths)
    samples = ours.sample((50,))
    for b in range(2):
        events = all_alignments(rows if lengths is None else int(lengths[b]), columns, sizes)
        scores = (events * theta[b].nan_to_num(0)).flatten(1).sum(1)
        probabilities = scores.softmax(0)
        close(ours.count[b], scores.new_tensor(float(len(events))))
        close(ours.partition[b], scores.logsumexp(0))
        close(ours.marginals[b], torch.einsum("k,knmo->nmo", probabilities, events))
        close(ours.entropy[b], -(probabilities * probabilities.log()).sum())
        close(ours.max[b], scores.max())
        assert torch.equal(ours.argmax[b], events[scores.argmax()])
        k = min(len(events), 4)
        best, places = scores.topk(k)
        close(ours.kmax(4)[:k, b], best)
        assert torch.equal(ours.topk(4)[:k, b], events[places])
        assert torch.equal(ours.kmax(4)[k:, b], best.new_full((4 - k,), -math.inf))
        close(
            AlignmentCRF(theta[b : b + 1], lengths=None if lengths is None else lengths[b : b + 1])
            .log_prob(events.unsqueeze(1))
            .squeeze(1),
            probabilities.log(),
        )
        assert all((events == sample).flatten(1).all(1).any() for sample in samples[:, b])
        (gradient,) = torch.autograd.grad(ours.entropy[b], theta, retain_graph=True)
        (expected,) = torch.autograd.grad(-(probabilities * probabilities.log()).sum(), theta)
        close(gradient[b], expected[b].nan_to_num(0))


def test_alignment_without_a_path(backend: str) -> None:
    theta = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    theta[0, 0, 0] = -math.inf
    theta.requires_grad_()
    ours = AlignmentCRF(theta)
    assert ours.partition.item() == -math.inf
    assert not ours.marginals.any()
    assert not torch.autograd.grad(ours.partition.sum(), theta)[0].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_potentials": torch.zeros(2, 3, 3)}, r"log_potentials must have shape \(B, N, M, 3\) with N, M >= 1"),
        ({"log_potentials": torch.zeros(2, 3, 3, 2)}, r"got \(2, 3, 3, 2\)"),
        ({"local": True}, "local must be False"),
        ({"max_gap": 3}, "max_gap must be None, got 3"),
        ({"lengths": torch.tensor([3, 1])}, r"lengths must be from 1 to 2, got \[3, 1\]"),
    ],
)
def test_alignment_errors(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlignmentCRF(**{"log_potentials": torch.zeros(2, 2, 3, 3), **arguments})
