"""Segmentation attention against enumeration of segmentations."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
from support.checks import close
from support.inside import attention_weights, two_states
from support.kernels import needs_kernels, took
from support.problems import potentials
from torch import Tensor
from torch.autograd import gradcheck

import bellmax as bx
from bellmax.nn import SegmentationAttention

SMOOTH = [bx.Negentropy(0.8), bx.SquaredL2(6.0)]
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()


def layer(omega: str | bx.Regularizer = "negentropy", bilinear: bool = True) -> SegmentationAttention:
    """A layer in float64 from 2 to 3 features, with random transitions."""
    attention = SegmentationAttention(2, 3, omega=omega, bilinear=bilinear).double()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(attention.named_parameters()):
            if name != "gamma":
                parameter.copy_(potentials(*parameter.shape, seed=seed + 10))
    return attention


def data(*batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return potentials(*batch, 4, 2), potentials(*batch, 5, 3, seed=1), potentials(*batch, 5, 6, seed=2)


def score(attention: SegmentationAttention, query: Tensor, key: Tensor) -> Tensor:
    if attention.bilinear:
        return query @ attention.weight @ key
    return attention.of_both(torch.tanh(attention.of_query(query) + attention.of_key(key)))[0]


@pytest.mark.parametrize("bilinear", [True, False])
def test_equals_the_list_of_all_segmentations(bilinear: bool, backend: str) -> None:
    omega = bx.Negentropy(0.8)
    attention, (queries, keys, values) = layer(omega, bilinear), data()
    context, weights = attention(queries, keys, values)
    every = torch.cartesian_prod(*[torch.arange(2)] * 5)
    for query, got in zip(queries, weights, strict=True):
        energies = torch.zeros(len(every), dtype=torch.float64)
        for n, states in enumerate(every.tolist()):
            previous = 0
            for key, state in zip(keys, states, strict=True):
                energies[n] += state * score(attention, query, key) + attention.transitions[state, previous]
                previous = state
        marginals = (energies / omega.gamma).softmax(0) @ every.double()
        torch.testing.assert_close(got, marginals / marginals.sum())
    torch.testing.assert_close(context, weights @ values)


@pytest.mark.parametrize("name", ["negentropy", "l2", "hard"])
def test_masked_keys_equal_removed_keys(name: str, backend: str) -> None:
    attention, (queries, keys, values) = layer(name), data(3)
    keys[~MASK], values[~MASK] = torch.nan, torch.nan
    context, weights = attention(queries, keys, values, mask=MASK)
    for b in (0, 2):
        context_alone, weights_alone = attention(queries[b], keys[b, MASK[b]], values[b, MASK[b]])
        torch.testing.assert_close(context[b], context_alone)
        torch.testing.assert_close(weights[b][:, MASK[b]], weights_alone)
    assert not weights.masked_select(~MASK.unsqueeze(1)).any()
    assert not context[1].any()


@pytest.mark.parametrize("bilinear", [True, False])
def test_masked_keys_get_no_gradient(bilinear: bool, backend: str) -> None:
    attention, inputs = layer("l2", bilinear), data(3)
    for tensor in inputs[1:]:
        tensor[~MASK] = torch.nan
    leaves = [tensor.requires_grad_() for tensor in inputs]
    context, weights = attention(*leaves, mask=MASK)
    grads = torch.autograd.grad(context.sum() + weights.square().sum(), [*leaves, *attention.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][1].any()
    assert not grads[1][~MASK].any()
    assert not grads[2][~MASK].any()


@needs_kernels
@pytest.mark.parametrize("omega", [*SMOOTH, bx.Negentropy(0.01), bx.Tsallis(2.0, gamma=0.3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_kernel_equals_the_general_sweeps(
    monkeypatch: pytest.MonkeyPatch, omega: bx.Regularizer, dtype: torch.dtype, masked: bool
) -> None:
    attention = SegmentationAttention(1, 1, omega=omega).to(dtype)
    torch.manual_seed(0)
    scores = (3 * torch.randn(3, 7, 33, dtype=dtype)).requires_grad_()
    mask = torch.rand(3, 33) < torch.tensor([[1.0], [0.5], [0.0]]) if masked else None
    torch.nn.init.normal_(attention.transitions)
    cotangent = torch.randn_like(scores)

    def run() -> tuple[Tensor, ...]:
        weights = attention_weights(attention, scores, mask)
        return weights, *torch.autograd.grad(weights, (scores, attention.transitions), cotangent)

    with took("two_states_weights", times=1), took("two_states_weights_vjp", times=1):
        by_kernel = run()
    monkeypatch.setattr(two_states.NativeWeights, "supports", lambda *_: False)
    with took("two_states_weights", times=0):
        generally = run()
    tolerance = {"rtol": 1e-3, "atol": 1e-4 / omega.gamma} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(by_kernel, generally, **tolerance)


@needs_kernels
@pytest.mark.parametrize(("dtype", "low"), [(torch.float32, -60.0), (torch.float64, -500.0)])
def test_scores_far_below_zero_keep_their_proportions(dtype: torch.dtype, low: float) -> None:
    attention = SegmentationAttention(1, 1).to(dtype)
    scores = low + torch.tensor([[[0.0, 5.0, 2.0]]], dtype=dtype)
    with took("two_states_weights"):
        torch.testing.assert_close(attention_weights(attention, scores, None), scores.softmax(-1), rtol=1e-4, atol=0)


@needs_kernels
@pytest.mark.parametrize("shift", [0.0, 3.9, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_far_from_zero_are_finite(dtype: torch.dtype, shift: float) -> None:
    attention = SegmentationAttention(1, 1).to(dtype)
    with torch.no_grad():
        attention.transitions.copy_(torch.tensor([[shift, 0.0], [0.0, shift]]))
    scores = torch.linspace(-1e4, 1e4, 64, dtype=dtype)[torch.randperm(64)].reshape(1, 2, 32).requires_grad_()
    with took("two_states_weights"), took("two_states_weights_vjp"):
        weights = attention_weights(attention, scores, None)
        (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, dtype=dtype))
    assert gradient.isfinite().all()


def test_second_derivatives() -> None:
    attention = layer(bx.Negentropy(0.8))
    scores = potentials(3, 4, 5, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s: attention_weights(attention, s, MASK), scores, fast_mode=True)


@needs_kernels
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("omega", [bx.Negentropy, bx.SquaredL2])
def test_gamma_as_a_tensor_takes_the_kernel(omega: type[bx.Negentropy], shape: tuple[int, ...]) -> None:
    attention = layer(omega(torch.nn.Parameter(torch.full(shape, 0.8))))
    queries, keys, _ = data(3)
    inputs = queries.requires_grad_(), attention.transitions, attention.gamma

    def run(queries: Tensor, transitions: Tensor, gamma: Tensor) -> Tensor:
        parameters = {"transitions": transitions, "gamma": gamma}
        return torch.func.functional_call(attention, parameters, (queries, keys), {"mask": MASK})[1]

    with took("two_states_weights"), took("two_states_weights_vjp"):
        assert gradcheck(run, inputs)
    if omega is bx.Negentropy:  # l2 has kinks
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    same = layer(omega(attention.gamma.item()))
    same.load_state_dict(attention.state_dict(), strict=False)
    close(run(*inputs), same(queries, keys, mask=MASK)[1])


@needs_kernels
def test_a_gamma_for_each_query_takes_the_general_sweeps() -> None:
    gamma = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
    scores = potentials(3, 4, 5, requires_grad=True)
    with took("two_states_weights", times=0):
        weights = attention_weights(layer(bx.Negentropy(gamma)), scores, MASK)
    close(weights[:, 2], attention_weights(layer(bx.Negentropy(1.5)), scores[:, 2:3], MASK)[:, 0])


@needs_kernels
def test_second_derivatives_keep_the_backend_of_the_weights() -> None:
    scores = potentials(3, 4, 5, requires_grad=True)
    weights = attention_weights(layer(), scores, MASK)
    with bx.use_backend("reference"), took("scored_chain_hessian"):
        torch.autograd.grad(weights.square().sum(), scores, create_graph=True)


def test_queries_without_keys(backend: str) -> None:
    queries = potentials(4, 2, requires_grad=True)
    context, weights = layer()(queries, torch.zeros(0, 3, dtype=torch.float64))
    assert weights.shape == (4, 0)
    assert torch.equal(context, torch.zeros(4, 3, dtype=torch.float64))
    assert not torch.autograd.grad(context.sum(), queries)[0].any()


@pytest.mark.parametrize(
    ("name", "low"),
    [
        ("negentropy", -10.0),
        ("negentropy", -80.0),
        ("negentropy", -95.0),
        ("negentropy", -2e3),
        ("l2", -10.0),
        ("hard", -10.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_that_attend_to_no_segment_get_zero_weights(
    name: str, dtype: torch.dtype, low: float, backend: str
) -> None:
    attention = SegmentationAttention(1, 1, omega=name).to(dtype)
    torch.nn.init.ones_(attention.weight)
    with torch.no_grad():
        attention.transitions.copy_(torch.tensor([[0.0, 0.0], [0.0, -low]]))  # extending a segment costs nothing
    queries = torch.tensor([[low], [1.0]], dtype=dtype, requires_grad=True)
    keys = torch.ones(6, 1, dtype=dtype, requires_grad=True)
    context, weights = attention(queries, keys)
    total = weights.sum(-1)
    assert set(total.round(decimals=5).tolist()) <= {0.0, 1.0}
    assert total[1] > 0
    grads = torch.autograd.grad(1e3 * (context.sum() + weights[:, 0].sum()), [queries, keys, *attention.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    if low == -2e3 or (name != "negentropy" and low == -10):
        assert total[0] == 0
        assert grads[0][0] == 0


@pytest.mark.parametrize("omega", SMOOTH, ids=str)
@pytest.mark.parametrize("bilinear", [True, False])
def test_gradients(omega: bx.Regularizer, bilinear: bool, backend: str) -> None:
    attention, inputs = layer(omega, bilinear), data(3)
    names = [name for name, _ in attention.named_parameters()]

    def run(queries: Tensor, keys: Tensor, values: Tensor, *parameters: Tensor) -> Tensor:
        call = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(attention, call, (queries, keys, values), {"mask": MASK})

    leaves = [tensor.requires_grad_() for tensor in (*inputs, *(p.detach().clone() for p in attention.parameters()))]
    assert gradcheck(run, leaves, fast_mode=True)


def test_batches_queries_and_values(omega: bx.Regularizer, backend: str) -> None:
    attention, (queries, keys, values) = layer(omega), data(2, 3)
    context, weights = attention(queries, keys, values)
    assert context.shape == (2, 3, 4, 6)
    assert weights.shape == (2, 3, 4, 5)
    torch.testing.assert_close(context, weights @ values)
    alone = attention(queries[1, 2, 3:], keys[1, 2], values[1, 2])
    torch.testing.assert_close(alone, (context[1, 2, 3:], weights[1, 2, 3:]))
    torch.testing.assert_close(attention(queries, keys)[0], weights @ keys)


def test_zero_transitions_make_keys_independent() -> None:
    attention = SegmentationAttention(2, 3).double()
    queries, keys, _ = data()
    sigmoid = (queries @ attention.weight @ keys.mT).sigmoid()
    torch.testing.assert_close(attention(queries, keys)[1], sigmoid / sigmoid.sum(-1, keepdim=True))


@pytest.mark.parametrize("bilinear", [True, False])
def test_saves_loads_and_copies(bilinear: bool) -> None:
    attention = layer(bx.SquaredL2(torch.nn.Parameter(torch.tensor(2.0))), bilinear)
    file = io.BytesIO()
    torch.save(attention.state_dict(), file)
    file.seek(0)
    other = SegmentationAttention(2, 3, omega=bx.SquaredL2(torch.nn.Parameter(torch.tensor(1.0))), bilinear=bilinear)
    other.double().load_state_dict(torch.load(file, weights_only=True))
    queries, keys, values = data()
    for same in (other, deepcopy(attention)):
        torch.testing.assert_close(same(queries, keys, values), attention(queries, keys, values), rtol=0, atol=0)
    assert repr(SegmentationAttention(2, 3, omega="l2")) == (
        "SegmentationAttention(2, 3, omega=SquaredL2(gamma=1.0), bilinear=True)"
    )


def test_learns_gamma(backend: str) -> None:
    attention = layer(bx.Negentropy(torch.nn.Parameter(torch.tensor(2.0))))
    context, _ = attention(*data())
    (grad,) = torch.autograd.grad(context.square().sum(), attention.gamma)
    assert grad.abs() > 1e-3


@pytest.mark.parametrize(
    "omega", [*SMOOTH, bx.Negentropy(torch.nn.Parameter(torch.tensor(2.0)))], ids=["negentropy", "l2", "learnt"]
)
def test_compiles_and_exports(omega: bx.Regularizer, backend: str) -> None:
    attention, (queries, keys, values) = layer(omega), data(3)
    queries.requires_grad_()
    expected = attention(queries, keys, values, mask=MASK)
    got = torch.compile(attention, fullgraph=True, backend="aot_eager")(queries, keys, values, mask=MASK)
    torch.testing.assert_close(got, expected)
    grads = (torch.autograd.grad(context.sum(), [queries, attention.weight]) for context, _ in (got, expected))
    torch.testing.assert_close(*grads)
    exported = torch.export.export(attention, (queries.detach(), keys, values), {"mask": MASK}).module()
    torch.testing.assert_close(exported(queries.detach(), keys, values, mask=MASK), expected)


@pytest.mark.parametrize("bilinear", [True, False])
def test_half_precision(bilinear: bool, backend: str) -> None:
    attention = layer("negentropy", bilinear).float()
    inputs = [tensor.float() for tensor in data(3)]
    expected = attention(*inputs, mask=MASK)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = attention(*inputs, mask=MASK)
    half = attention.bfloat16()(*(tensor.bfloat16() for tensor in inputs), mask=MASK)
    for got in (automatic, half):
        assert all(tensor.dtype == torch.bfloat16 for tensor in got)
        torch.testing.assert_close(got, expected, check_dtype=False, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.zeros(3, 4, 3)}, r"queries must have shape \(..., Q, 2\), got \(3, 4, 3\)"),
        ({"queries": torch.zeros(2)}, r"queries must have shape \(..., Q, 2\), got \(2,\)"),
        ({"keys": torch.zeros(3, 5, 2)}, r"keys must have shape \(..., K, 3\), got \(3, 5, 2\)"),
        ({"keys": torch.zeros(5, 3)}, r"same batch dimensions, got shapes \(3, 4, 2\) and \(5, 3\)"),
        ({"values": torch.zeros(3, 4, 3)}, r"values must have shape \(3, 5, V\), got \(3, 4, 3\)"),
        ({"mask": torch.ones(3, 5)}, "mask must be bool, or integers 0 and 1, .* got dtype torch.float32"),
        ({"mask": torch.ones(3, 4, 5).bool()}, r"mask must have shape \(3, 5\), got \(3, 4, 5\)"),
    ],
)
def test_errors(changes: dict[str, Tensor], message: str) -> None:
    attention = SegmentationAttention(2, 3)
    with pytest.raises(ValueError, match=message):
        attention(**{"queries": torch.zeros(3, 4, 2), "keys": torch.zeros(3, 5, 3), **changes})


def test_errors_of_construction() -> None:
    with pytest.raises(ValueError, match="query_size must be at least 1, got 0"):
        SegmentationAttention(0, 3)
    with pytest.raises(ValueError, match=r"omega must be a Regularizer or one of .*, got 'soft'"):
        SegmentationAttention(2, 3, omega="soft")
