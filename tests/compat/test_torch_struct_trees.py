"""compat.torch_struct: trees, segments and hidden Markov models against torch-struct 0.5 and enumeration."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from support.checks import close
from support.parses import all_trees
from torch import Tensor

from bellmax.compat import torch_struct
from bellmax.compat.torch_struct import HMM, DependencyCRF, LinearChainCRF, SemiMarkovCRF, StructDistribution, TreeCRF

pytestmark = pytest.mark.filterwarnings("ignore:.*arg_constraints:UserWarning")
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "trees": ("TreeCRF", (4, 4, 2), {}),
    "roots": ("DependencyCRF", (4, 4), {}),
    "one root": ("DependencyCRF", (4, 4), {"multiroot": False}),
    "segments": ("SemiMarkovCRF", (4, 4, 2, 2), {}),
}
FULL = {"segments": 5}
of_cases = pytest.mark.parametrize("case", CASES)
SHORTER = torch.tensor([4, 3, 1])


@pytest.fixture(scope="module")
def original() -> ModuleType:
    return pytest.importorskip("torch_struct", reason="torch-struct is not installed")


def make(module: ModuleType, case: str, theta: Tensor, lengths: Tensor | None = None) -> Any:
    name, _, options = CASES[case]
    return getattr(module, name)(theta, lengths=lengths, **options)


def problem(case: str, batch: int = 3) -> Tensor:
    return torch.randn(batch, *CASES[case][1], dtype=torch.float64)


def all_events(case: str, length: int) -> Tensor:
    """Every structure as an event (K, *event)."""
    event = CASES[case][1]
    if case == "trees":
        return all_trees("spans", length, event[0], event[2])
    if case == "segments":
        return all_segments(length, event)
    trees = all_trees(case, length, event[0] + 1)
    return trees[:, 1:, 1:] + torch.diag_embed(trees[:, 0, 1:])


def all_segments(length: int, shape: tuple[int, ...]) -> Tensor:
    events = []
    for states in itertools.product(range(-1, shape[-1]), repeat=length):
        event = torch.zeros(shape, dtype=torch.float64)
        taken = [position for position in range(1, length) if states[position] >= 0]
        steps = list(itertools.pairwise([0, *taken]))
        if states[0] < 0 or states[-1] < 0 or any(after - before >= shape[1] for before, after in steps):
            continue
        for before, position in steps:
            event[before, position - before, states[position], states[before]] = 1
        events.append(event)
    return torch.stack(events)


# --- against enumeration


@of_cases
@pytest.mark.parametrize("padding", ["full", "lengths"])
def test_everything_against_enumeration(backend: str, case: str, padding: str) -> None:
    theta = problem(case)
    lengths = None if padding == "full" else SHORTER
    if lengths is not None:
        theta[2, 1:] = math.nan
    theta.requires_grad_()
    ours = make(torch_struct, case, theta, lengths)
    partition, marginals, entropy, count = ours.partition, ours.marginals, ours.entropy, ours.count
    scores, best, samples = ours.kmax(4), ours.topk(4), ours.sample((20,))
    (gradient,) = torch.autograd.grad(entropy.sum(), theta)
    for b in range(3):
        events = all_events(case, FULL.get(case, 4) if lengths is None else int(lengths[b]))
        totals = (events * theta[b].nan_to_num(0)).flatten(1).sum(1)
        p = totals.softmax(0)
        expected = -(p * p.log()).sum()
        close(count[b], float(len(events)))
        close(partition[b], totals.logsumexp(0))
        close(marginals[b], torch.einsum("k,k...->...", p, events))
        close(entropy[b], expected)
        close(gradient[b], torch.autograd.grad(expected, theta)[0][b].nan_to_num(0))
        close(ours.max[b], totals.max())
        k = min(len(events), 4)
        close(scores[:k, b], totals.topk(k).values)
        assert torch.equal(best[:k, b], events[totals.topk(k).indices])
        assert torch.equal(ours.argmax[b], best[0, b])
        assert all((events == sample).flatten(1).all(1).any() for sample in samples[:, b])
        log_prob = make(torch_struct, case, theta[b : b + 1], None if lengths is None else lengths[b : b + 1]).log_prob
        if events.any():  # a single state leaves no trace in its event
            close(log_prob(events.unsqueeze(1)).squeeze(1), p.log())


@of_cases
def test_samples_have_the_marginals(case: str) -> None:
    ours = make(torch_struct, case, problem(case), SHORTER)
    close(ours.sample((3000,)).mean(0), ours.marginals, 0.05)
    assert ours.sample((2, 3)).shape == (2, 3, 3, *CASES[case][1])


@of_cases
def test_forbidden_parts(case: str, backend: str) -> None:
    events = all_events(case, FULL.get(case, 4))
    theta = problem(case, 2)
    theta[0, events[len(events) // 2] != 0] = -math.inf
    theta[1] = -math.inf
    theta.requires_grad_()
    ours = make(torch_struct, case, theta)
    scores = torch.where(events == 0, 0, theta[0]).flatten(1).sum(1)
    close(ours.partition[0], scores.logsumexp(0))
    close(ours.entropy[0], torch.special.entr(scores.softmax(0)).sum())
    close(ours.count, [float(scores.isfinite().sum()), 0.0])
    assert ours.partition[1] == -math.inf
    assert not ours.marginals[1].any()
    assert torch.autograd.grad(ours.marginals[0].square().sum(), theta)[0].isfinite().all()


# --- against the original


@of_cases
@pytest.mark.parametrize("name", ["partition", "max", "entropy", "marginals", "argmax", "mode", "count"])
def test_properties(original: ModuleType, case: str, name: str) -> None:
    lengths = None if case == "segments" else SHORTER  # for unequal lengths see the test below
    theta = problem(case).requires_grad_()
    if name == "count" and case in ("roots", "one root"):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            _ = make(original, case, theta, lengths).count
        return
    actual, expected = (getattr(make(module, case, theta, lengths), name) for module in (torch_struct, original))
    close(actual.detach(), expected.detach(), 1e-9)
    if name in ("partition", "max", "entropy", "marginals"):
        z = torch.randn_like(expected)
        (a,), (b,) = (torch.autograd.grad(value, theta, z) for value in (actual, expected))
        close(a, b, 1e-8)


@of_cases
def test_methods(original: ModuleType, case: str) -> None:
    theta, other = problem(case).requires_grad_(), problem(case).requires_grad_()
    ours, theirs = (make(module, case, theta) for module in (torch_struct, original))
    close(ours.kmax(3).detach(), theirs.kmax(3).detach())
    close(ours.topk(3), theirs.topk(3).detach())
    event = ours.sample((5,))
    assert event.shape == theirs.sample((5,)).shape
    close(ours.log_prob(event).detach(), theirs.log_prob(event).detach())
    if case == "trees":  # for the others the original raises an error
        mine, yours = (make(module, case, other) for module in (torch_struct, original))
        close(ours.kl(mine).detach(), theirs.kl(yours).detach(), 1e-9)
        close(ours.cross_entropy(mine).detach(), theirs.cross_entropy(yours).detach(), 1e-9)


@of_cases
def test_events(original: ModuleType, case: str) -> None:
    event = make(torch_struct, case, problem(case)).sample()
    ours, theirs = (make(module, case, problem(case)) for module in (torch_struct, original))
    (compact, extra), (expected, size) = ours.from_event(event), theirs.from_event(event)
    assert torch.equal(compact, expected)
    assert extra == size
    assert torch.equal(ours.to_event(compact, extra), theirs.to_event(expected, size))
    assert torch.equal(ours.to_event(compact, extra), event)


def test_events_within_lengths(original: ModuleType) -> None:
    heads, lengths = torch.tensor([[2, 0, 2, 2], [0, 1, -1, -1]]), torch.tensor([4, 2])
    expected = original.DepTree.to_parts(heads, lengths=lengths)
    assert torch.equal(DependencyCRF.to_event(heads, None, lengths), expected)
    states = torch.tensor([[0, -1, 1, 0], [1, 0, 1, 1]])
    event = SemiMarkovCRF.to_event(states, (2, 3), lengths)
    assert event[0].nonzero().tolist() == [[0, 2, 1, 0], [2, 1, 0, 1]]
    assert event[1].nonzero().tolist() == [[0, 1, 0, 1]]
    with pytest.raises(
        ValueError, match="sequence must have a state at least every K - 1 = 1 positions, got a distance of 2"
    ):
        SemiMarkovCRF.to_event(states, (2, 2))
    with pytest.raises(ValueError, match=r"sequence must begin with a state, got \[-1\]"):
        SemiMarkovCRF.to_event(torch.tensor([[-1, 0]]), (2, 2))


def test_the_original_is_wrong_for_segments_of_unequal_lengths(original: ModuleType) -> None:
    theta, lengths = problem("segments"), torch.tensor([5, 4, 2])
    exact = torch.stack(
        [
            (all_events("segments", int(n)) * scores).flatten(1).sum(1).logsumexp(0)
            for scores, n in zip(theta, lengths, strict=True)
        ]
    )
    close(SemiMarkovCRF(theta, lengths).partition, exact)
    theirs = original.SemiMarkovCRF(theta.clone(), lengths).partition.detach()
    assert ((theirs - exact).abs() > 0.1).tolist() == [True, True, False]


def test_the_original_shares_its_roots(original: ModuleType) -> None:
    theta = torch.zeros(1, 3, 3, dtype=torch.float64, requires_grad=True)
    for module, count in ((torch_struct, 12.0), (original, 7.0)):
        many = module.DependencyCRF(theta)
        module.DependencyCRF(theta, multiroot=False)  # must not change the first one
        close(many.partition.exp().detach(), [count])


def test_the_original_gives_nan_for_forbidden_arcs(original: ModuleType) -> None:
    theta = problem("roots", 1)
    theta[0, 0, 1] = -math.inf
    theta.requires_grad_()
    ours, theirs = DependencyCRF(theta), original.DependencyCRF(theta)
    close(ours.partition.detach(), theirs.partition.detach())
    assert theirs.marginals[0, 0, 1].isnan()
    assert ours.marginals[0, 0, 1] == 0
    assert theirs.entropy.isnan().all()


# --- hidden Markov models


def hidden(batch: int, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    transition, emission = torch.randn(2, 2), torch.randn(3, 2)
    tables = transition.log_softmax(0), emission.log_softmax(0), torch.randn(2).log_softmax(0)
    return (*(x.double().requires_grad_() for x in tables), torch.randint(3, (batch, steps)))


@pytest.mark.parametrize("sizes", [None, [4, 2]])
def test_hidden_markov_models(original: ModuleType, backend: str, sizes: list[int] | None) -> None:
    tables = hidden(2, 4)
    lengths = None if sizes is None else torch.tensor(sizes)
    ours, theirs = HMM(*tables, lengths=lengths), original.HMM(*tables, lengths=lengths)
    for name in ("log_potentials", "partition", "marginals", "argmax", "entropy"):
        close(getattr(ours, name).detach(), getattr(theirs, name).detach(), 1e-9)
    gradients = (torch.autograd.grad(d.partition.sum(), tables[:3]) for d in (ours, theirs))
    for ours_gradient, other in zip(*gradients, strict=True):
        close(ours_gradient, other)


def test_probability_of_symbols() -> None:
    transition, emission, init, observations = hidden(1, 3)
    total = torch.zeros((), dtype=torch.float64)
    for states in itertools.product(range(2), repeat=3):
        score = init[states[0]] + sum(emission[observations[0, t], states[t]] for t in range(3))
        total = total + (score + sum(transition[states[t], states[t - 1]] for t in (1, 2))).exp()
    close(HMM(transition, emission, init, observations).partition[0].exp().detach(), total.detach())


# --- errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TreeCRF(torch.zeros(2, 3, 3)), r"log_potentials must have shape \(B, N, N, NT\), .* got \(2, 3, 3\)"),
        (lambda: TreeCRF(torch.zeros(2, 3, 4, 1)), r"got \(2, 3, 4, 1\)"),
        (lambda: TreeCRF([[0.0]]), "log_potentials must be a tensor, got list"),  # type: ignore[arg-type]
        (lambda: TreeCRF(torch.zeros(2, 3, 3, 1), [4, 1]), r"lengths must be from 1 to 3, got \[4, 1\]"),
        (lambda: DependencyCRF(torch.zeros(2, 3, 3, 4)), r"\(B, N, N\) .* got \(2, 3, 3, 4\): sum over the labels"),
        (lambda: DependencyCRF(torch.zeros(2, 3, 2)), r"got \(2, 3, 2\)$"),
        (lambda: DependencyCRF(torch.zeros(2, 3, 3), [1.5, 1.0]), "lengths must hold integers, got dtype"),
        (
            lambda: SemiMarkovCRF(torch.zeros(2, 3, 1, 2, 2)),
            r"\(B, N - 1, K, C, C\) with K >= 2, got \(2, 3, 1, 2, 2\)",
        ),
        (lambda: SemiMarkovCRF(torch.zeros(2, 3, 2, 2, 2), [5, 1]), r"lengths must be from 1 to 4, got \[5, 1\]"),
        (lambda: SemiMarkovCRF(torch.zeros(2, 3, 2, 2, 2), [3]), r"lengths must be integers of shape \(2,\)"),
        (lambda: _hmm(emission=torch.zeros(3)), r"emission must have shape \(V, C\), each at least 1, got \(3,\)"),
        (lambda: _hmm(transition=torch.zeros(2, 3)), r"transition must have shape \(2, 2\), got \(2, 3\)"),
        (lambda: _hmm(init=torch.zeros(3)), r"init must have shape \(2,\), got \(3,\)"),
        (lambda: _hmm(observations=torch.tensor([[0]])), r"observations must have shape \(B, N\) with N >= 2"),
        (lambda: _hmm(observations=torch.zeros(1, 2)), "observations must be int64, got torch.float32"),
        (lambda: _hmm(observations=torch.tensor([[0, 3]])), "observations must be from 0 to 2, got 3"),
        (lambda: _hmm(lengths=[1]), r"lengths must be from 2 to 2, got \[1\]"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def _hmm(**changed: Any) -> HMM:
    tables = {"transition": torch.zeros(2, 2), "emission": torch.zeros(3, 2), "init": torch.zeros(2)}
    return HMM(**{**tables, "observations": torch.tensor([[0, 1]]), **changed})


def test_small_problems() -> None:
    close(SemiMarkovCRF(torch.zeros(2, 0, 2, 3, 3)).partition.exp(), [3.0, 3.0], 1e-6)
    assert TreeCRF(torch.zeros(0, 3, 3, 2)).marginals.shape == (0, 3, 3, 2)
    assert DependencyCRF(torch.zeros(0, 3, 3)).argmax.shape == (0, 3, 3)
    assert SemiMarkovCRF(torch.zeros(0, 3, 2, 2, 2)).sample((4,)).shape == (4, 0, 3, 2, 2, 2)
    assert isinstance(HMM(*hidden(2, 3)), LinearChainCRF)
    assert all(issubclass(kind, StructDistribution) for kind in (TreeCRF, DependencyCRF, SemiMarkovCRF))
