"""Gradients through a hard solver by noise on its scores."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from support.problems import potentials
from support.structures import STRUCTURES
from torch import Tensor
from torch.autograd import grad, gradcheck

import bellmax as bx
from bellmax.nn import Perturbed

NOISES = ["gumbel", "normal"]
EDGES = bx.DAG([(0, 1)] * 4)  # four parallel edges: the best path is an argmax
TRANSITIONS = torch.tensor([[0.3, -0.2, 0.0], [0.1, 0.4, -1.0], [0.5, 0.0, 0.2]], dtype=torch.float64)


def choice(scores: Tensor) -> bx.PathDistribution:
    return EDGES.paths(scores, omega="hard")


def chain(emissions: Tensor, transitions: Tensor = TRANSITIONS) -> bx.PathDistribution:
    return bx.Chain.from_scores(emissions, transitions, omega="hard")


def warping(cost: Tensor) -> bx.PathDistribution:
    return bx.DTW(cost, omega="hard")


@bx.program("item")
def knapsack(value, *, sizes=(1, 2, 2, 3), room=5):
    best = [0.0] * (room + 1)
    for i, size in enumerate(sizes):
        best = [bx.max(best[r], best[r - size] + value[i]) if r >= size else best[r] for r in range(room + 1)]
    return best[room]


def packing(value: Tensor) -> bx.PathDistribution:
    return knapsack(value, omega="hard")


PROBLEMS: dict[str, tuple[Callable[..., bx.PathDistribution], tuple[int, ...]]] = {
    "chain": (chain, (4, 3)),
    "DTW": (warping, (3, 4)),
    "program": (packing, (4,)),
}


def seeded(layer: Perturbed, *scores: Tensor) -> Any:
    """Call the layer with common random numbers."""
    torch.manual_seed(3)
    return layer(*scores)


def differences(function: Callable[[Tensor], Tensor], x: Tensor, step: float) -> Tensor:
    """Central differences of a scalar function for each entry of x."""
    numbers = []
    for n in range(x.numel()):
        move = torch.zeros(x.numel(), dtype=x.dtype)
        move[n] = step
        move = move.reshape(x.shape)
        numbers.append((function(x + move) - function(x - move)) / (2 * step))
    return torch.stack(numbers).reshape(x.shape)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradient_of_the_value_equals_finite_differences(name: str, noise: str) -> None:
    make, shape = PROBLEMS[name]
    layer = Perturbed(make, noise, samples=20, sigma=0.5)
    x = potentials(2, *shape, requires_grad=True)  # with common random numbers, the value is piecewise linear
    value, path = seeded(layer, x)
    (gradient,) = grad(value.sum(), x)
    assert torch.equal(gradient, path.detach())
    with torch.no_grad():
        expected = differences(lambda x: seeded(layer, x).value.sum(), x.detach(), 1e-6)
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_derivative_of_the_path_equals_finite_differences(name: str, noise: str) -> None:
    make, shape = {"chain": (lambda s: chain(s, TRANSITIONS[:2, :2]), (3, 2)), "DTW": (warping, (2, 3))}.get(
        name, PROBLEMS[name]
    )
    layer = Perturbed(make, noise, samples=20_000)
    x, z = potentials(*shape, requires_grad=True), potentials(*shape, seed=1)
    (estimate,) = grad((seeded(layer, x).expected_path * z).sum(), x)
    with torch.no_grad():
        expected = differences(lambda x: (seeded(layer, x).expected_path * z).sum(), x.detach(), 0.1)
    assert (estimate - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("noise", NOISES)
def test_noise_of_the_estimate_shrinks_with_samples(noise: str) -> None:
    x, z = potentials(4, 3, requires_grad=True), potentials(4, 3, seed=1)

    def spread(samples: int) -> Tensor:
        layer = Perturbed(chain, noise, samples)
        members = x.expand(400, 4, 3)  # 400 independent estimates
        (estimates,) = grad((layer(members).expected_path * z).sum(), members)
        return estimates.var(0).sum()

    torch.manual_seed(0)
    assert spread(5) / spread(80) == pytest.approx(16, rel=0.35)


def test_gumbel_noise_on_a_choice_is_negentropy() -> None:
    scores, z = potentials(4, requires_grad=True), potentials(4, seed=1)
    samples, sigma = 200_000, 0.7
    value, path = seeded(Perturbed(choice, "gumbel", samples, sigma), scores)
    smooth = EDGES.paths(scores, gamma=sigma)
    error = sigma * math.pi / math.sqrt(6 * samples)  # the maximum has the variance of the noise
    assert abs(value - smooth.value) < 4 * error
    torch.testing.assert_close(path, smooth.expected_path, atol=4 * 0.5 / math.sqrt(samples), rtol=0)
    (jacobian_product,) = grad((path * z).sum(), scores)
    torch.testing.assert_close(jacobian_product, smooth.hessian_product(z), atol=0.02, rtol=0)


def test_normal_noise_on_two_options_is_a_probit() -> None:
    scores = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    two, sigma = bx.DAG([(0, 1), (0, 1)]), 0.5
    layer = Perturbed(lambda s: two.paths(s, omega="hard"), "normal", samples=200_000, sigma=sigma)
    value, path = seeded(layer, scores)
    spread = sigma * math.sqrt(2)  # of the difference of two options
    normal = torch.distributions.Normal(0.0, 1.0)
    gap = torch.tensor(0.7 / spread)
    first, density = float(normal.cdf(gap)), float(normal.log_prob(gap).exp())
    assert value.item() == pytest.approx(0.3 * first - 0.4 * (1 - first) + spread * density, abs=0.005)
    assert path[0].item() == pytest.approx(first, abs=0.005)
    (slope,) = grad(path[0], scores)
    torch.testing.assert_close(slope, density / spread * torch.tensor([1.0, -1.0]).double(), atol=0.01, rtol=0)


@pytest.mark.parametrize("noise", NOISES)
def test_costs_mirror_scores(noise: str) -> None:
    scores = potentials(2, 4, requires_grad=True)
    edges = bx.DAG([(0, 1)] * 4)
    by_cost = Perturbed(lambda cost: edges.paths(cost, minimize=True, omega="hard"), noise, samples=50)
    by_score = Perturbed(choice, noise, samples=50)
    (value, path), (negative, negative_path) = seeded(by_score, scores), seeded(by_cost, -scores)
    assert torch.equal(value, -negative)
    assert torch.equal(path, negative_path)
    z = potentials(2, 4, seed=1)
    first, second = (grad((p * z).sum(), scores)[0] for p in (path, negative_path))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("noise", NOISES)
def test_second_derivatives_of_the_value_are_the_first_of_the_path(noise: str) -> None:
    x, z = potentials(3, 4, 3, requires_grad=True), potentials(3, 4, 3, seed=1)
    value, path = seeded(Perturbed(chain, noise, samples=30), x)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (gradient,) = grad(value @ weights, x, create_graph=True)
    (second,) = grad((gradient * z).sum(), x, retain_graph=True)
    (first,) = grad((path * z * weights[:, None, None]).sum(), x)
    assert first.any()
    torch.testing.assert_close(second, first)


def test_further_derivatives_raise() -> None:
    x = potentials(4, 3, requires_grad=True)
    value, path = Perturbed(chain)(x)
    for result, order in ((value, 2), (path.square().sum(), 1)):
        derivative = result
        for _ in range(order):
            (derivative,) = grad(derivative, x, create_graph=True)
            derivative = derivative.square().sum()
        with pytest.raises(NotImplementedError, match="two derivatives of the value and one of the expected path"):
            grad(derivative, x)


def test_fenchel_young_loss_is_zero_at_the_expected_path() -> None:
    x = potentials(2, 4, 3, requires_grad=True)
    layer, target = Perturbed(warping, samples=40), warping(potentials(2, 4, 3, seed=1)).best_path()
    value, path = seeded(layer, x)
    loss = ((x * target).sum((-2, -1)) - value).sum()
    torch.testing.assert_close(grad(loss, x)[0], target - path.detach())


def test_every_structure() -> None:
    assert len(STRUCTURES) > 15
    for name, structure in STRUCTURES.items():
        x = potentials(2, *structure.shape, requires_grad=True)
        layer = Perturbed(lambda x, s=structure: s.make(x, omega="hard"), "normal", samples=3)
        value, path = seeded(layer, x)
        torch.manual_seed(3)
        noise = torch.randn(3, *x.shape, dtype=x.dtype)
        moved = (x.detach() + structure.sense * noise).requires_grad_()
        values = structure.make(moved, omega="hard").value
        torch.testing.assert_close(value, values.mean(0), msg=name)
        torch.testing.assert_close(path, grad(values.sum(), moved)[0].mean(0), msg=name)
        assert grad(path.square().sum(), x)[0].isfinite().all(), name


def test_several_scores() -> None:
    emissions, transitions = potentials(2, 3, 2, requires_grad=True), potentials(2, 2, seed=1, requires_grad=True)
    layer = Perturbed(chain, samples=10_000)
    value, (labels, pairs) = seeded(layer, emissions, transitions.expand(2, 2, 2))
    assert value.shape == (2,)
    torch.testing.assert_close(labels.sum((-2, -1)), torch.full((2,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(pairs.sum((-2, -1)), torch.full((2,), 2.0, dtype=torch.float64))
    gradients = grad(value.sum(), (emissions, transitions), retain_graph=True)
    torch.testing.assert_close(gradients, (labels.detach(), pairs.detach().sum(0)))
    z = potentials(2, 2, 2, seed=2)
    estimate = grad((pairs * z).sum(), (emissions, transitions))

    def moved(emissions: Tensor, transitions: Tensor) -> Tensor:
        return (seeded(layer, emissions, transitions.expand(2, 2, 2)).expected_path[1] * z).sum()

    with torch.no_grad():
        first = differences(lambda x: moved(x, transitions), emissions.detach(), 0.2)
        second = differences(lambda x: moved(emissions, x), transitions.detach(), 0.2)
    assert (estimate[0] - first).norm() < 0.2 * first.norm()
    assert (estimate[1] - second).norm() < 0.2 * second.norm()


def test_scalar_scores() -> None:
    @bx.program("i, ")
    def skip(value, penalty):
        best = 0.0
        for i in range(3):
            best = bx.max(best + value[i], best + penalty)
        return best

    layer = Perturbed(lambda v, s: skip(v, s, omega="hard"), samples=200)
    values, penalty = potentials(2, 3, requires_grad=True), potentials(2, seed=1, requires_grad=True)
    value, (used, skipped) = layer(values, penalty)
    torch.testing.assert_close(used.sum(-1) + skipped, torch.full((2,), 3.0, dtype=torch.float64))
    gradients = grad(value.sum() + skipped.square().sum(), (values, penalty))
    assert [g.shape for g in gradients] == [(2, 3), (2,)]
    assert all(g.isfinite().all() and g.any() for g in gradients)


def test_batch_members_are_independent() -> None:
    x = potentials(2, 5, 4, 3, requires_grad=True)
    value, path = Perturbed(chain, samples=7)(x)
    assert value.shape == (2, 5)
    assert path.shape == x.shape
    derivative = grad(path[1, 2].square().sum(), x)[0]
    assert derivative[1, 2].any()
    derivative[1, 2] = 0
    assert not derivative.any()
    empty = torch.zeros(0, 4, 3, requires_grad=True)
    value, path = Perturbed(chain, samples=7)(empty)
    assert value.shape == (0,)
    assert grad(path.square().sum() + value.sum(), empty)[0].shape == (0, 4, 3)


def test_tensors_of_the_batch_that_are_not_perturbed() -> None:
    log_probs, targets = potentials(2, 6, 3).log_softmax(-1).requires_grad_(), torch.tensor([[1, 2], [2, 0]])
    lengths = (torch.tensor([6, 4]), torch.tensor([2, 1]))
    layer = Perturbed(lambda s: bx.CTC(s, targets, lengths=lengths, omega="hard"), samples=30)
    value, path = layer(log_probs)
    torch.testing.assert_close(path.sum((-2, -1)), torch.tensor([6.0, 4.0], dtype=torch.float64))
    derivative = grad(path.square().sum() + value.sum(), log_probs)[0]
    assert not path[1, 4:].any()
    assert not derivative[1, 4:].any()  # padding
    assert derivative[0].any()


@pytest.mark.parametrize("noise", NOISES)
def test_infinite_scores_stay_infinite(noise: str) -> None:
    x = potentials(3, 4, 3)
    x[0, 1, 2] = -math.inf  # a forbidden state
    x[1, 2] = -math.inf  # no path
    x.requires_grad_()
    value, path = Perturbed(chain, noise, samples=50)(x)
    assert value[1] == -math.inf
    assert value[[0, 2]].isfinite().all()
    assert not path[1].any()
    assert path[0, 1, 2] == 0
    derivative = grad((path * potentials(3, 4, 3, seed=1)).sum() + value[[0, 2]].sum(), x)[0]
    assert derivative.isfinite().all()
    assert derivative[0, 1, 2] == 0
    assert not derivative[1].any()
    cost = torch.rand(3, 3)
    cost[1, 1] = math.inf
    value, path = Perturbed(warping, noise, samples=50)(cost)
    assert value.isfinite()
    assert path[1, 1] == 0


def test_one_sample() -> None:
    x = potentials(4, requires_grad=True)
    layer = Perturbed(choice, "normal", samples=1)
    members = x.expand(100_000, 4)
    path = seeded(layer, members).expected_path
    assert set(path.unique().tolist()) == {0.0, 1.0}
    z = potentials(4, seed=1)
    mean = grad((path * z).sum(), x)[0] / 100_000
    other = grad((seeded(Perturbed(choice, "normal", samples=100_000), x).expected_path * z).sum(), x)[0]
    torch.testing.assert_close(mean, other, atol=0.03, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    x = potentials(4, 3).to(dtype).requires_grad_()
    value, path = Perturbed(chain, samples=5)(x)
    assert value.dtype == torch.promote_types(dtype, torch.float64)  # the transitions are float64
    assert path.dtype == dtype
    value, path = Perturbed(lambda s: chain(s, torch.zeros(3, 3, dtype=dtype)), samples=5)(x)
    assert value.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert grad(value + path.square().sum(), x)[0].dtype == dtype


def test_without_gradients() -> None:
    x = potentials(4, 3)
    layer = Perturbed(chain)
    expected = seeded(layer, x)
    assert not expected.value.requires_grad
    assert not expected.expected_path.requires_grad
    parameter = x.clone().requires_grad_()
    assert seeded(layer, parameter).value.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for tensor in (x, parameter, x.clone()):
                result = seeded(layer, tensor)
                assert torch.equal(result.value, expected.value)
                assert torch.equal(result.expected_path, expected.expected_path)
                assert not result.value.requires_grad
    assert parameter.grad is None


def test_non_contiguous_scores_are_not_modified() -> None:
    x = potentials(3, 4).mT
    copy = x.clone()
    layer = Perturbed(chain)
    assert torch.equal(seeded(layer, x).expected_path, seeded(layer, copy).expected_path)
    assert torch.equal(x, copy)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # warnings of dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles() -> None:
    layer, x = Perturbed(warping, samples=5), torch.rand(2, 3, 4, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager")
    results = []
    for run in (layer, compiled):
        value, path = seeded(run, x)
        results.append((value, path, grad(value.sum() + path.square().sum(), x)[0]))
    torch.testing.assert_close(*results)


def test_is_a_module() -> None:
    layer = Perturbed(choice, "normal", samples=3, sigma=0.5)
    assert repr(layer) == "Perturbed(noise='normal', samples=3, sigma=0.5)"
    assert not layer.state_dict()
    other = pickle.loads(pickle.dumps(layer))
    x = potentials(4)
    assert torch.equal(seeded(other, x).value, seeded(layer, x).value)
    first, second = layer.eval()(x).value, layer(x).value
    assert first != second  # new noise in each call


def test_errors() -> None:
    with pytest.raises(ValueError, match="make must be a function from scores to a distribution, got DAG"):
        Perturbed(EDGES)
    with pytest.raises(ValueError, match="noise must be one of 'gumbel', 'normal', got 'uniform'"):
        Perturbed(choice, "uniform")
    for samples in (0, 2.0):
        with pytest.raises(ValueError, match=f"samples must be an integer of at least 1, got {samples}"):
            Perturbed(choice, samples=samples)
    for sigma in (0, -1.0, math.inf, math.nan, torch.tensor(1.0)):
        with pytest.raises(ValueError, match=re.escape(f"sigma must be a finite number > 0, got {sigma}")):
            Perturbed(choice, sigma=sigma)
    with pytest.raises(ValueError, match=r"scores\[0\] must be floating point, got dtype torch\.int64"):
        Perturbed(choice)(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"scores\[1\] must be a tensor, got list"):
        Perturbed(chain)(torch.zeros(4, 3), [[0.0]])
    with pytest.raises(ValueError, match=r"the result of make must be a distribution such as bx\.Chain, got Tensor"):
        Perturbed(torch.sum)(torch.zeros(4))
    with pytest.raises(ValueError, match='make must return a distribution under omega="hard", got Negentropy'):
        Perturbed(EDGES.paths)(torch.zeros(4))
    message = r"scores\[1\] must start with the batch shape \(2,\), got shape \(3, 3\): expand it"
    with pytest.raises(ValueError, match=message):
        Perturbed(chain)(torch.zeros(2, 5, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"the batch shape \(10, 2\), got \(2,\)"):
        Perturbed(lambda s: choice(s if s.ndim == 2 else s.sum(0)))(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"the value does not depend on scores\[1\]"):
        Perturbed(lambda s, other: choice(s))(torch.zeros(4), torch.zeros(4))
    transitions = torch.zeros(3, 3, requires_grad=True)
    hidden = Perturbed(lambda s: chain(s, transitions))
    with pytest.raises(ValueError, match="make must get all tensors that require grad as arguments, but transitions"):
        hidden(torch.zeros(4, 3))
    with torch.no_grad():
        assert hidden(torch.zeros(4, 3)).value > 0
    with pytest.raises(TypeError, match="has no argument 'n_samples'"):
        Perturbed(choice, n_samples=3)


def test_gumbel_noise_and_its_slopes() -> None:
    scores = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    moved = []

    def make(s: Tensor) -> bx.PathDistribution:
        moved.append(s.detach())
        return bx.DAG([(0, 1), (1, 2)]).paths(s, omega="hard")  # one path

    value, path = seeded(Perturbed(make, "gumbel", samples=100_000), scores)
    noise = moved[1].flatten().numpy()
    assert stats.kstest(noise, stats.gumbel_r(loc=-0.5772156649).cdf).pvalue > 0.01
    assert value.item() == pytest.approx(noise.sum() / 100_000)
    assert torch.equal(path, torch.ones(2, dtype=torch.float64))
    assert grad(path.sum(), scores)[0].abs().max() < 1e-12  # no estimate is better than 0 for a constant path


def test_gradcheck_of_the_value() -> None:
    layer = Perturbed(warping, samples=4)
    assert gradcheck(lambda x: seeded(layer, x).value, potentials(2, 3, 4, requires_grad=True))
