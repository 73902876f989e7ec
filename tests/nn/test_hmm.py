"""The layer HMM against enumeration, its filter against its distributions, and as a torch module."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from support.problems import two_kinds
from torch import Tensor

import bellmax as bx
from bellmax.nn import HMM

with_and_without_durations = pytest.mark.parametrize("longest", [None, 3], ids=["", "durations"])


class Gaussian(torch.nn.Module):
    """Log-densities (..., T, S) of normal distributions with learned means and scales."""

    def __init__(self, means: list[float]) -> None:
        super().__init__()
        self.means = torch.nn.Parameter(torch.tensor(means))
        self.log_scales = torch.nn.Parameter(torch.zeros(len(means)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(self.means, self.log_scales.exp()).log_prob(x.unsqueeze(-1))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomize(layer: HMM) -> HMM:
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed))
    return layer


def make(longest: int | None = None, states: int = 3, **options) -> HMM:
    """A layer with random parameters, in float64."""
    return randomize(HMM(states, max_duration=longest, **options).double())


def joint(layer: HMM, labels: tuple[int, ...], scores: Tensor) -> Tensor:
    """The probability of labels and observations, with scores (T, S), from the public probabilities."""
    probability = layer.startprob[labels[0]] * torch.stack([scores[t, k] for t, k in enumerate(labels)]).sum().exp()
    if layer.durations is None:
        return probability * math.prod(layer.transmat[a, b] for a, b in itertools.pairwise(labels))
    runs = [(label, len(list(run))) for label, run in itertools.groupby(labels)]
    for (a, size), (b, _) in itertools.pairwise(runs):
        probability = probability * layer.durations[a, size - 1 : size].sum() * layer.transmat[a, b]
    return probability * layer.durations[runs[-1][0], runs[-1][1] - 1 :].sum()


# --- the model


@with_and_without_durations
def test_likelihood_and_posterior_by_enumeration(longest: int | None) -> None:
    layer, scores = make(longest), random(5, 3, seed=9)
    assert layer.startprob.sum().item() == pytest.approx(1)
    torch.testing.assert_close(layer.transmat.sum(-1), torch.ones(3).double())
    if longest is not None:
        assert layer.durations is not None
        torch.testing.assert_close(layer.durations.sum(-1), torch.ones(3).double())
        assert not layer.transmat.diagonal().any()
    sequences = list(itertools.product(range(3), repeat=5))
    probabilities = torch.stack([joint(layer, labels, scores) for labels in sequences])
    p = layer(scores)
    torch.testing.assert_close(p.value, probabilities.sum().log())
    one_hot = torch.nn.functional.one_hot(torch.tensor(sequences), 3).double()
    posterior = torch.einsum("n,nts->ts", probabilities / probabilities.sum(), one_hot)
    torch.testing.assert_close(p.marginals, posterior)
    parameters = list(layer.parameters())
    grads, wanted = (torch.autograd.grad(v, parameters) for v in (p.value, probabilities.sum().log()))
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, expected)


def test_geometric_durations_equal_self_transitions() -> None:
    layer, explicit, x = make(), make(longest=6), random(2, 6, 3, seed=9)
    stay = layer.transmat.diagonal().detach().unsqueeze(-1)
    longer = stay ** torch.arange(6)
    assert explicit.duration_logits is not None
    explicit.duration_logits.data = torch.cat((longer[:, :-1] * (1 - stay), longer[:, -1:]), -1).log()
    p, q = layer(x), explicit(x)
    torch.testing.assert_close(q.value, p.value)
    torch.testing.assert_close(q.marginals, p.marginals)


@with_and_without_durations
def test_gradients_reach_all_parameters(omega: bx.Regularizer, longest: int | None) -> None:
    layer, x = make(longest, emission=torch.nn.Linear(2, 3), omega=omega), random(2, 4, 2, seed=9)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    assert set(names) >= {"start_logits", "transition_logits", "emission.weight", "emission.bias"}
    assert ("duration_logits" in names) == (longest is not None)

    def value(*parameters: Tensor) -> Tensor:
        called = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,), {"lengths": [4, 3]})
        return called.value

    if omega != bx.Hard():
        assert torch.autograd.gradcheck(value, parameters, eps=1e-7, atol=1e-5)
    layer(x, lengths=[4, 3]).value.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in parameters)
    used = [name for name, parameter in layer.named_parameters() if parameter.grad.any()]  # type: ignore[union-attr]
    assert used == list(names)


def test_gamma_is_learned() -> None:
    gamma = torch.nn.Parameter(torch.tensor(0.5))
    layer = HMM(2, omega=bx.Negentropy(gamma))
    layer(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).value.backward()
    assert gamma.grad is not None
    assert gamma.grad != 0
    state, posterior = layer.filter(torch.tensor([[1.0, 0.0]]), layer.start())
    assert not posterior.requires_grad
    torch.testing.assert_close(posterior, torch.tensor([[2.0, 0.0]]).softmax(-1))
    assert layer.forecast(state, 3).shape == (3, 2)


@with_and_without_durations
def test_forbidden_logits(longest: int | None) -> None:
    layer, x = make(longest), random(3, 3, seed=9)
    layer.start_logits.data[1] = layer.transition_logits.data[0, 2] = -math.inf
    if layer.duration_logits is not None:
        layer.duration_logits.data[0, 2] = layer.duration_logits.data[1, 0] = -math.inf
    p = layer(x)
    p.value.backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert not parameter.grad[parameter == -math.inf].any()
    assert layer.startprob[1] == layer.transmat[0, 2] == 0
    assert p.marginals[0, 1] == 0
    state, posterior = layer.filter(x, layer.start())
    assert posterior[0, 1] == 0
    assert not posterior.isnan().any()
    impossible = x.index_fill(0, torch.tensor([1]), -math.inf)
    assert layer(impossible).value == -math.inf
    state, posterior = layer.filter(impossible, layer.start())
    assert state.value == -math.inf
    assert not posterior[1:].any()
    assert not layer.forecast(state, 2).any()


# --- streams


@with_and_without_durations
def test_filter_and_forecast_equal_the_distributions_so_far(omega: bx.Regularizer, longest: int | None) -> None:
    layer, x = make(longest, emission=torch.nn.Linear(2, 3), omega=omega), random(2, 6, 2, seed=9)
    state, posteriors = layer.start(2), []
    for chunk in x.split([1, 0, 3, 2], 1):
        state, probabilities = layer.filter(chunk, state)
        posteriors.append(probabilities)
    posterior = torch.cat(posteriors, 1)
    for t in range(6):
        torch.testing.assert_close(posterior[:, t], layer(x[:, : t + 1]).marginals[:, -1])
    torch.testing.assert_close(state.value, layer(x).value)
    torch.testing.assert_close(layer.filter(x, layer.start((2,)))[1], posterior, rtol=1e-12, atol=1e-12)
    missing = torch.cat((layer.emission(x), torch.zeros(2, 2, 3)), 1)  # type: ignore[misc]
    layer.emission = None
    torch.testing.assert_close(layer.forecast(state, 2)[:, -1], layer(missing).marginals[:, -1])


def test_forecast_of_probabilities() -> None:
    layer = make()
    state, posterior = layer.filter(random(2, 4, 3, seed=9), layer.start(2))
    powers = [posterior[:, -1] @ torch.linalg.matrix_power(layer.transmat, n) for n in range(1, 4)]
    torch.testing.assert_close(layer.forecast(state, 3), torch.stack(powers, 1))


@with_and_without_durations
def test_ragged_chunks(longest: int | None) -> None:
    layer, x = make(longest), random(2, 5, 3, seed=9)
    padded = x.masked_fill(torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool().unsqueeze(-1), math.nan)
    state, posterior = layer.filter(padded, layer.start(2), lengths=[5, 3])
    torch.testing.assert_close(state.value, layer(padded, lengths=[5, 3]).value)
    state, later = layer.filter(x[:, 3:], state, lengths=[0, 2])
    whole, wanted = layer.filter(x, layer.start(2))
    torch.testing.assert_close(state.value, whole.value)
    torch.testing.assert_close(torch.cat((posterior[1, :3], later[1])), wanted[1])
    assert not posterior[1, 3:].any()
    assert not later[0].any()


# --- learning


def simulate(sequences: int, steps: int) -> tuple[Tensor, Tensor]:
    """Series and states of a hidden Markov model with three states that last about 20 steps."""
    generator = torch.Generator().manual_seed(1)
    stay = torch.rand(sequences, steps, generator=generator) < 0.95
    jumps = torch.randint(1, 3, (sequences, steps), generator=generator)
    states = (torch.where(stay, 0, jumps).cumsum(-1)) % 3
    noise = torch.randn(sequences, steps, generator=generator)
    return torch.tensor([-2.0, 0.0, 2.0])[states] + 0.8 * noise, states


@pytest.mark.parametrize(("longest", "steps"), [(None, 60), (40, 40)], ids=["", "durations"])
def test_learns_the_segments_of_simulated_series(longest: int | None, steps: int) -> None:
    x, states = simulate(16, 100)
    layer = HMM(3, emission=Gaussian([-1.0, 0.1, 1.0]), max_duration=longest)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-layer(x).value.mean() / 100).backward()
        optimizer.step()
    accuracy = (layer(x).marginals.argmax(-1) == states).float().mean()
    by_emission = (layer.emission(x).argmax(-1) == states).float().mean()  # type: ignore[misc]
    assert accuracy > 0.95
    assert accuracy > by_emission + 0.05
    if longest is None:
        assert (layer.transmat.diagonal() > 0.9).all()
    _, posterior = layer.filter(x, layer.start(16))
    assert by_emission < (posterior.argmax(-1) == states).float().mean() < accuracy


# --- as a torch module


@two_kinds
@with_and_without_durations
def test_compile(omega: bx.Regularizer, longest: int | None) -> None:
    layer, x = make(longest, emission=torch.nn.Linear(2, 3), omega=omega), random(2, 4, 2, seed=9)

    def loss(x: Tensor) -> Tensor:
        return -layer(x).value.mean()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        value = function(x)
        results.append((value, *torch.autograd.grad(value, list(layer.parameters()))))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from torch.compile
@with_and_without_durations
def test_compiled_streams(longest: int | None) -> None:
    layer, x = make(longest), random(2, 4, 3, seed=9)
    state, posterior = layer.filter(x, layer.start(2))

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state, posterior = layer.filter(x, layer.start(2))
        return state.value, posterior, layer.forecast(state, 3)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(x), (state.value, posterior, layer.forecast(state, 3)), strict=True):
        torch.testing.assert_close(got, wanted)


@with_and_without_durations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(longest: int | None, dtype: torch.dtype) -> None:
    layer, x = make(longest, emission=torch.nn.Linear(2, 3)).to(dtype), random(2, 6, 2, seed=9).to(dtype)
    same = copy.deepcopy(layer).float()
    same.emission = None
    scores = layer.emission(x).float()  # type: ignore[misc]
    torch.testing.assert_close(layer(x).value.float(), same(scores).value, rtol=1e-2, atol=1e-2)
    layer(x).value.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())
    state, posterior = layer.filter(x, layer.start(2))
    assert posterior.dtype == dtype
    torch.testing.assert_close(state.value, same.filter(scores, same.start(2))[0].value)
    assert layer.forecast(state, 2).dtype == torch.float32


@with_and_without_durations
def test_autocast(longest: int | None) -> None:
    layer, x = make(longest, emission=torch.nn.Linear(2, 3)).float(), random(2, 6, 2, seed=9).float()
    wanted = layer(x).value
    with torch.autocast("cpu", torch.bfloat16):
        value = layer(x).value
        state, posterior = layer.filter(x, layer.start(2))
        forecast = layer.forecast(state, 2)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, wanted, rtol=1e-2, atol=1e-2)
    value.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    torch.testing.assert_close(state.value.float(), value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(forecast.sum(-1), torch.ones(2, 2))
    assert posterior.dtype == torch.bfloat16


@with_and_without_durations
def test_state_dict_deepcopy_and_pickle(longest: int | None) -> None:
    layer, x = make(longest, emission=torch.nn.Linear(2, 3), omega="entmax"), random(2, 6, 2, seed=9)
    value = layer(x).value
    value.sum().backward()
    fresh = HMM(3, emission=torch.nn.Linear(2, 3), omega="entmax", max_duration=longest).double()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other(x).value.equal(value)
        assert other.filter(x, layer.start(2))[1].equal(layer.filter(x, layer.start(2))[1])


@with_and_without_durations
def test_meta_device(longest: int | None) -> None:
    with torch.device("meta"):
        layer = HMM(3, max_duration=longest)
        assert layer(torch.zeros(2, 4, 3)).value.shape == (2,)
        assert layer.startprob.is_meta
        assert layer.filter(torch.zeros(2, 4, 3), layer.start(2))[1].is_meta
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    layer.reset_parameters()
    assert not any(parameter.any() for parameter in layer.parameters())
    assert layer(torch.zeros(2, 4, 3)).value.isfinite().all()


def test_repr() -> None:
    assert repr(HMM(3)) == "HMM(3, omega=Negentropy(gamma=1.0))"
    shown = repr(HMM(3, emission=torch.nn.Linear(2, 3), omega="hard", max_duration=7))
    assert shown.startswith("HMM(\n  3, omega=Hard(), max_duration=7\n  (emission): Linear")
    assert repr(HMM(3, emission=torch.sin)) == repr(HMM(3))


# --- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HMM(0), "num_states must be at least 1, got 0"),
        (lambda: HMM(1, max_duration=3), "num_states must be at least 2 with max_duration, .*, got 1"),
        (lambda: HMM(2, max_duration=0), "max_duration must be at least 1, got 0"),
        (lambda: HMM(2, emission=3), "emission must be a module or a function, got int"),  # type: ignore[arg-type]
        (lambda: HMM(2, omega="max"), "omega must be a Regularizer or one of"),
        (lambda: HMM(2)(torch.zeros(4, 3)), r"x must have shape \(\.\.\., T, 2\), got \(4, 3\)"),
        (lambda: HMM(2)(torch.zeros(2)), r"x must have shape \(\.\.\., T, 2\), got \(2,\)"),
        (lambda: HMM(2)([[0.0, 0.0]]), "x must be a tensor, got list"),
        (
            lambda: HMM(2, emission=torch.nn.Linear(4, 3))(torch.zeros(5, 4)),
            r"emission\(x\) must have shape \(\.\.\., T, 2\), got \(5, 3\)",
        ),
        (lambda: HMM(2, emission=lambda x: None)(0), r"emission\(x\) must be a tensor, got NoneType"),  # type: ignore
        (lambda: HMM(2)(torch.zeros(3, 4, 2), lengths=[1, 2, 5]).value, "lengths must be from 0 to 4, got 5"),
        (lambda: HMM(2)(torch.full((3, 2), math.nan)).value, "emissions must be finite or -inf, got nan"),
        (lambda: HMM(2).filter(torch.zeros(3, 4, 2), HMM(2).start(2)), r"state must have scores of shape \(3, 2\)"),
        (lambda: HMM(2).filter(torch.zeros(4, 2), HMM(2, max_duration=3).start()), "state must have scores of shape"),
        (lambda: HMM(2).filter(torch.zeros(1, 2).int(), HMM(2).start()), "emissions must be floating point, got dtype"),
        (lambda: HMM(2).forecast(HMM(2).start(), -1), "steps must be at least 0, got -1"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HMM(n_components=3), "use num_states="),
        (lambda: HMM(3, emissions="gaussian"), "use emission="),
        (lambda: HMM(3)(torch.zeros(4, 3), seq_lens=[3]), "use lengths="),
    ],
)
def test_arguments_of_other_libraries(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
