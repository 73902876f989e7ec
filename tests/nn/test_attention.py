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


def layer(
    omega: str | bx.Regularizer = "negentropy", bilinear: bool = True, *, key_size: int = 3, num_heads: int = 1
) -> SegmentationAttention:
    """A layer in float64 with queries of 2 features, with random transitions."""
    attention = SegmentationAttention(2, key_size, num_heads=num_heads, omega=omega, bilinear=bilinear).double()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(attention.named_parameters()):
            if name != "gamma":
                parameter.copy_(potentials(*parameter.shape, seed=seed + 10))
    return attention


def data(*batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return potentials(*batch, 4, 2), potentials(*batch, 5, 3, seed=1), potentials(*batch, 5, 6, seed=2)


def two_heads(omega: str | bx.Regularizer = "negentropy", bilinear: bool = True) -> SegmentationAttention:
    return layer(omega, bilinear, key_size=4, num_heads=2)


def data_of_heads(*batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return potentials(*batch, 4, 2), potentials(*batch, 5, 4, seed=1), potentials(*batch, 5, 6, seed=2)


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
        "SegmentationAttention(2, 3, num_heads=1, omega=SquaredL2(gamma=1.0), bilinear=True)"
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
        ({"mask": torch.ones(5).bool()}, r"mask must have shape \(3, 5\) or \(3, 4, 5\), got \(5,\)"),
        ({"mask": torch.ones(3, 1, 5).bool()}, r"mask must have shape \(3, 5\) or \(3, 4, 5\), got \(3, 1, 5\)"),
    ],
)
def test_errors(changes: dict[str, Tensor], message: str) -> None:
    attention = SegmentationAttention(2, 3)
    with pytest.raises(ValueError, match=message):
        attention(**{"queries": torch.zeros(3, 4, 2), "keys": torch.zeros(3, 5, 3), **changes})


def test_heads_must_divide_the_values() -> None:
    queries, keys, _ = data_of_heads(3)
    with pytest.raises(ValueError, match=r"values must have .* divisible by num_heads=2, got shape \(3, 5, 7\)"):
        two_heads()(queries, keys, torch.zeros(3, 5, 7))


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("attn_mask", "use mask=, True at the keys to use"),
        ("key_padding_mask", "use mask=~key_padding_mask, True at the keys to use"),
        ("causal", r"did you mean is_causal=\?"),
    ],
)
def test_arguments_of_other_libraries(argument: str, hint: str) -> None:
    queries, keys, _ = data()
    with pytest.raises(TypeError, match=f"has no argument '{argument}': {hint}"):
        layer()(queries, keys, **{argument: None})


def test_errors_of_construction() -> None:
    with pytest.raises(ValueError, match="query_size must be at least 1, got 0"):
        SegmentationAttention(0, 3)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        SegmentationAttention(2, 3, num_heads=0)
    with pytest.raises(ValueError, match="key_size must be divisible by num_heads=2, got 3"):
        SegmentationAttention(2, 3, num_heads=2)
    with pytest.raises(ValueError, match=r"omega must be a Regularizer or one of .*, got 'soft'"):
        SegmentationAttention(2, 3, omega="soft")


# --- heads


def single_head(attention: SegmentationAttention, h: int) -> SegmentationAttention:
    """A layer with one head, which equals head h: its score does not see the features of the other heads."""
    single = SegmentationAttention(
        attention.query_size, attention.key_size, omega=attention.omega, bilinear=attention.bilinear
    ).double()
    state = {name: tensor.clone() for name, tensor in attention.state_dict().items() if name != "gamma"}
    share = torch.arange(attention.key_size).reshape(attention.num_heads, -1)[h]
    state["transitions"] = state["transitions"][h]
    name = "weight" if attention.bilinear else "of_both.weight"
    weight = torch.zeros(attention.query_size if attention.bilinear else 1, attention.key_size, dtype=torch.float64)
    weight[:, share] = state[name][:, share] if attention.bilinear else state[name][h]
    single.load_state_dict(state | {name: weight})
    return single


@pytest.mark.parametrize("bilinear", [True, False])
@pytest.mark.parametrize("heads", [2, 4])
def test_heads_equal_layers_with_one_head(omega: bx.Regularizer, bilinear: bool, heads: int, backend: str) -> None:
    attention = layer(omega, bilinear, key_size=4, num_heads=heads)
    queries, keys, _ = data_of_heads(3)
    values = potentials(3, 5, 8, seed=2)
    keys[~MASK], values[~MASK] = torch.nan, torch.nan
    inputs = [tensor.requires_grad_() for tensor in (queries, keys, values)]
    singles = [single_head(attention, h) for h in range(heads)]
    context, weights = attention(*inputs, mask=MASK)
    shares = values.chunk(heads, -1)
    one_by_one = [single(queries, keys, share, mask=MASK) for single, share in zip(singles, shares, strict=True)]
    expected = torch.cat([context for context, _ in one_by_one], -1), torch.stack([w for _, w in one_by_one], -3)
    assert context.shape == (3, 4, 8)
    assert weights.shape == (3, heads, 4, 5)
    torch.testing.assert_close((context, weights), expected)

    cotangents = potentials(*context.shape, seed=3), potentials(*weights.shape, seed=4)
    gradients = torch.autograd.grad((context, weights), [*inputs, attention.transitions], cotangents)
    *of_inputs, of_transitions = gradients
    torch.testing.assert_close(of_inputs, list(torch.autograd.grad(expected, inputs, cotangents, retain_graph=True)))
    of_singles = torch.autograd.grad(expected, [single.transitions for single in singles], cotangents)
    torch.testing.assert_close(of_transitions, torch.stack(of_singles))


@needs_kernels
@pytest.mark.parametrize("omega", SMOOTH, ids=str)
@pytest.mark.parametrize("masked", ["", "keys", "queries"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_fused_kernel_takes_heads_and_masks_of_queries(
    monkeypatch: pytest.MonkeyPatch, omega: bx.Regularizer, masked: str, batch: tuple[int, ...]
) -> None:
    attention, (queries, keys, values) = two_heads(omega), data_of_heads(*batch)
    shape = {"": None, "keys": (*batch, 5), "queries": (*batch, 4, 5)}[masked]
    mask = None if shape is None else potentials(*shape, seed=5) > 0
    inputs = [queries.requires_grad_(), keys.requires_grad_(), *attention.parameters()]

    def run() -> tuple[Tensor, ...]:
        context, weights = attention(queries, keys, values, mask=mask)
        return context, weights, *torch.autograd.grad(context.square().sum() + weights.square().sum(), inputs)

    with took("two_states_weights", times=2), took("two_states_weights_vjp", times=2):
        by_kernel = run()
    monkeypatch.setattr(two_states.NativeWeights, "supports", lambda *_: False)
    torch.testing.assert_close(by_kernel, run())


@pytest.mark.parametrize("omega", SMOOTH, ids=str)
@pytest.mark.parametrize("bilinear", [True, False])
def test_gradients_of_heads(omega: bx.Regularizer, bilinear: bool, backend: str) -> None:
    omega = type(omega)(torch.nn.Parameter(torch.tensor(float(omega.gamma))))
    attention, inputs = two_heads(omega, bilinear), data_of_heads(3)
    names = [name for name, _ in attention.named_parameters()]

    def run(queries: Tensor, keys: Tensor, values: Tensor, *parameters: Tensor) -> Tensor:
        call = dict(zip(names, parameters, strict=True))
        arguments = queries, keys, values
        return torch.func.functional_call(attention, call, arguments, {"mask": MASK, "is_causal": True})

    leaves = [tensor.requires_grad_() for tensor in (*inputs, *(p.detach().clone() for p in attention.parameters()))]
    assert gradcheck(run, leaves, fast_mode=True)


def test_second_derivatives_of_heads(backend: str) -> None:
    attention = two_heads(bx.Negentropy(0.8))
    queries, keys, _ = (tensor.requires_grad_() for tensor in data_of_heads(2))
    assert torch.autograd.gradgradcheck(
        lambda *inputs: attention(*inputs, mask=MASK[[0, 2]], is_causal=True), (queries, keys), fast_mode=True
    )


def test_a_gamma_for_each_head() -> None:
    gamma = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    queries, keys, _ = data_of_heads(3)
    _, weights = two_heads(bx.Negentropy(gamma))(queries, keys, mask=MASK)
    for h in range(2):
        _, alone = two_heads(bx.Negentropy(gamma[h].item()))(queries, keys, mask=MASK)
        close(weights[:, h], alone[:, h])


@pytest.mark.parametrize("bilinear", [True, False])
def test_one_head_has_the_parameters_of_version_0_2(bilinear: bool) -> None:
    former = {"transitions": (2, 2)}
    former |= (
        {"weight": (2, 3)}
        if bilinear
        else {"of_query.weight": (3, 2), "of_key.weight": (3, 3), "of_key.bias": (3,), "of_both.weight": (1, 3)}
    )
    for attention in (layer(bilinear=bilinear), layer(bilinear=bilinear, num_heads=1)):
        assert {name: tuple(tensor.shape) for name, tensor in attention.state_dict().items()} == former
    queries, keys, _ = data()
    states = {name: potentials(*shape, seed=n) for n, (name, shape) in enumerate(former.items())}
    attention.load_state_dict(states)
    context, weights = attention(queries, keys)
    assert (context.shape, weights.shape) == ((4, 3), (4, 5))


def test_repr_has_the_number_of_heads() -> None:
    assert repr(SegmentationAttention(2, 4, num_heads=2, omega="l2", bilinear=False)).startswith(
        "SegmentationAttention(\n  2, 4, num_heads=2, omega=SquaredL2(gamma=1.0), bilinear=False\n"
    )


def test_scores_of_heads_start_with_variance_1() -> None:
    torch.manual_seed(0)
    attention = SegmentationAttention(64, 64, num_heads=8)
    assert attention.weight.std().item() == pytest.approx(8**0.5 / 64, rel=0.1)
    assert not attention.transitions.any()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("bilinear", [True, False])
@pytest.mark.parametrize(
    ("batch", "num_queries", "num_keys"), [((0,), 4, 5), ((2, 0), 4, 5), ((3,), 1, 1), ((3,), 0, 5), ((3,), 4, 0)]
)
def test_small_and_empty_shapes(
    heads: int, bilinear: bool, batch: tuple[int, ...], num_queries: int, num_keys: int, backend: str
) -> None:
    attention = layer(bilinear=bilinear, key_size=4, num_heads=heads)
    queries = potentials(*batch, num_queries, 2, requires_grad=True)
    keys = potentials(*batch, num_keys, 4, seed=1, requires_grad=True)
    of_head = () if heads == 1 else (heads,)
    for mask in (None, (*batch, num_keys), (*batch, num_queries, num_keys)):
        mask = None if mask is None else torch.ones(mask).bool()
        context, weights = attention(queries, keys, mask=mask, is_causal=True)
        assert context.shape == (*batch, num_queries, 4)
        assert weights.shape == (*batch, *of_head, num_queries, num_keys)
        gradients = torch.autograd.grad(context.sum(), [queries, keys, *attention.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)
        if (num_queries, num_keys) == (1, 1):
            torch.testing.assert_close(weights, torch.ones_like(weights))


# --- masks of queries


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["negentropy", "l2", "hard"])
def test_masks_of_queries_equal_queries_one_by_one(heads: int, name: str, backend: str) -> None:
    attention, (queries, keys, values) = layer(name, key_size=4, num_heads=heads), data_of_heads(3)
    mask = MASK.unsqueeze(1) & (potentials(3, 4, 5, seed=6) > -0.5)
    keys[~mask.any(1)], values[~mask.any(1)] = torch.nan, torch.nan
    inputs = [tensor.requires_grad_() for tensor in (queries, keys, values)]
    context, weights = attention(*inputs, mask=mask)
    one_by_one = [attention(queries[:, q : q + 1], keys, values, mask=mask[:, q]) for q in range(4)]
    expected = tuple(torch.cat(results, -2) for results in zip(*one_by_one, strict=True))
    torch.testing.assert_close((context, weights), expected)
    assert not weights.movedim(-2, 1)[~mask if heads == 1 else ~mask.unsqueeze(2).expand(3, 4, 2, 5)].any()
    gradients, wanted = (
        torch.autograd.grad(results[0].square().sum() + results[1].square().sum(), inputs, retain_graph=True)
        for results in ((context, weights), expected)
    )
    torch.testing.assert_close(gradients, wanted)
    assert not gradients[1][~mask.any(1)].any()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 5), (3, 5), (7, 5)])
@pytest.mark.parametrize("masked", ["", "keys", "queries"])
def test_causal_queries_do_not_see_later_keys(
    heads: int, num_queries: int, num_keys: int, masked: str, backend: str
) -> None:
    attention = layer(bx.SquaredL2(6.0), key_size=4, num_heads=heads)
    queries, keys = potentials(3, num_queries, 2, requires_grad=True), potentials(3, num_keys, 4, seed=1)
    keys[:, num_queries:] = torch.nan
    keys.requires_grad_()
    mask = {"": None, "keys": MASK, "queries": potentials(3, num_queries, num_keys, seed=2) > -0.5}[masked]
    context, weights = attention(queries, keys, mask=mask, is_causal=True)
    for q in range(num_queries):
        own = None if mask is None else mask[:, : q + 1] if masked == "keys" else mask[:, q, : q + 1]
        alone = attention(queries[:, q : q + 1], keys[:, : q + 1], mask=own)
        torch.testing.assert_close((context[:, q : q + 1], weights[..., q : q + 1, : q + 1]), alone)
        assert not weights[..., q, q + 1 :].any()
        (gradient,) = torch.autograd.grad(context[:, q].sum(), keys, retain_graph=True)
        assert not gradient[:, q + 1 :].any()
        assert gradient.isfinite().all()


def test_causal_masks_of_a_key_before_all_queries() -> None:
    queries, keys, values = data(3)
    mask = torch.ones(3, 5).bool()
    mask[:, 0] = False
    context, weights = layer()(queries, keys, values, mask=mask, is_causal=True)
    assert not context[:, 0].any()
    torch.testing.assert_close(weights[:, 1, 1], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("bilinear", [True, False])
def test_causal_heads_compile_and_export(bilinear: bool, backend: str) -> None:
    attention, (queries, keys, values) = two_heads(bilinear=bilinear), data_of_heads(3)
    queries.requires_grad_()
    options = {"mask": MASK, "is_causal": True}
    expected = attention(queries, keys, values, **options)
    got = torch.compile(attention, fullgraph=True, backend="aot_eager")(queries, keys, values, **options)
    torch.testing.assert_close(got, expected)
    parameters = [queries, *attention.parameters()]
    grads = (torch.autograd.grad(context.square().sum(), parameters) for context, _ in (got, expected))
    torch.testing.assert_close(*grads)
    exported = torch.export.export(attention, (queries.detach(), keys, values), options).module()
    torch.testing.assert_close(exported(queries.detach(), keys, values, **options), expected)


@pytest.mark.parametrize("bilinear", [True, False])
def test_half_precision_of_causal_heads(bilinear: bool, backend: str) -> None:
    attention = two_heads("negentropy", bilinear).float()
    inputs = [tensor.float() for tensor in data_of_heads(3)]
    expected = attention(*inputs, mask=MASK, is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = attention(*inputs, mask=MASK, is_causal=True)
    half = attention.bfloat16()(*(tensor.bfloat16() for tensor in inputs), mask=MASK, is_causal=True)
    for got in (automatic, half):
        assert all(tensor.dtype == torch.bfloat16 for tensor in got)
        torch.testing.assert_close(got, expected, check_dtype=False, rtol=0.1, atol=0.1)


def test_heads_of_inputs_that_are_not_contiguous() -> None:
    attention, (queries, keys, values) = two_heads(), data_of_heads(3)
    strided = queries.mT.contiguous().mT, keys.transpose(0, 1).contiguous().transpose(0, 1), values.flip(-1).flip(-1)
    mask = MASK.mT.contiguous().mT
    torch.testing.assert_close(attention(*strided, mask=mask), attention(queries, keys, values, mask=MASK))
