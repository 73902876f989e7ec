"""Comparison with installed peers: chains under negentropy in float64, and soft-DTW to the precision of the peer."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from support.peers import without_numba
from torch import Tensor

import bellmax as bx

BATCH, STEPS, STATES = 5, 7, 3
LENGTHS = torch.tensor([7, 2, 5, 7, 3])


@pytest.fixture
def torchcrf() -> ModuleType:
    return pytest.importorskip("torchcrf", reason="pytorch-crf is not installed")


@pytest.fixture
def torch_struct() -> ModuleType:
    return pytest.importorskip("torch_struct", reason="torch-struct is not installed")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def crf_of(module: ModuleType, transitions: Tensor, start: Tensor, end: Tensor) -> torch.nn.Module:
    crf = module.CRF(STATES, batch_first=True).double()
    crf.transitions.data = transitions.detach().T.contiguous()  # [previous, current]
    crf.start_transitions.data, crf.end_transitions.data = start.detach(), end.detach()
    return crf


def mask_of(kind: str) -> Tensor:
    """Masks (BATCH, STEPS). pytorch-crf requires that every sequence begins with True."""
    if kind == "full":
        return torch.ones(BATCH, STEPS, dtype=torch.bool)
    mask = torch.arange(STEPS) < LENGTHS.unsqueeze(-1)
    if kind == "holes":
        mask[0, 2:4] = mask[3, 5] = mask[4, 1] = False
    return mask


@pytest.mark.parametrize("kind", ["full", "lengths", "holes"])
def test_from_scores_has_value_and_gradient_of_pytorch_crf(backend: str, torchcrf: ModuleType, kind: str) -> None:
    emissions, transitions = leaf(BATCH, STEPS, STATES), leaf(STATES, STATES)
    start, end = leaf(STATES), leaf(STATES)
    mask, weights = mask_of(kind), torch.randn(BATCH, dtype=torch.float64)
    if kind == "lengths":
        p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, lengths=LENGTHS)
    else:
        p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, mask=mask)
    crf = crf_of(torchcrf, transitions, start, end)
    value = crf._compute_normalizer(emissions.transpose(0, 1), mask.T)
    assert_equal(p.value, value)

    of_crf = (emissions, crf.transitions, crf.start_transitions, crf.end_transitions)
    expected = list(torch.autograd.grad((value * weights).sum(), of_crf))
    expected[1] = expected[1].T
    actual = torch.autograd.grad((p.value * weights).sum(), (emissions, transitions, start, end))
    for ours, theirs in zip(actual, expected, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["full", "lengths"])
def test_dense_chain_has_value_and_gradient_of_pytorch_crf(backend: str, torchcrf: ModuleType, kind: str) -> None:
    emissions, transitions = leaf(BATCH, STEPS, STATES), leaf(STATES, STATES)
    start, mask = leaf(STATES), mask_of(kind)
    crf = crf_of(torchcrf, transitions, start, torch.zeros_like(start))
    first = (emissions[:, :1] + start).unsqueeze(-1).expand(-1, -1, -1, STATES)
    theta = torch.cat((first, emissions[:, 1:].unsqueeze(-1) + transitions), 1)
    p = bx.Chain(theta, lengths=mask.sum(-1))
    value = crf._compute_normalizer(emissions.transpose(0, 1), mask.T)
    assert_equal(p.value, value)

    (expected,) = torch.autograd.grad(value.sum(), emissions)
    (actual,) = torch.autograd.grad(p.value.sum(), emissions)
    assert_equal(actual, expected)
    assert_equal(p.marginals, expected)


@pytest.mark.parametrize("kind", ["full", "lengths"])
def test_log_prob_and_best_sequence_equal_pytorch_crf(backend: str, torchcrf: ModuleType, kind: str) -> None:
    emissions, transitions = leaf(BATCH, STEPS, STATES), leaf(STATES, STATES)
    start, end, mask = leaf(STATES), leaf(STATES), mask_of(kind)
    tags = torch.randint(STATES, (BATCH, STEPS))
    p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, mask=mask)
    crf = crf_of(torchcrf, transitions, start, end)
    path = p.sequence_to_path(tags.masked_fill(~mask, -1))
    assert_equal(p.log_prob(path), crf(emissions, tags, mask, reduction="none"))
    best = [[tag for tag in sequence if tag >= 0] for sequence in p.best_sequence().tolist()]
    assert best == crf.decode(emissions, mask)


@pytest.mark.filterwarnings("ignore:.*arg_constraints:UserWarning")
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("form", ["dense", "scores"])
def test_value_gradient_and_hessian_product_equal_torch_struct(
    backend: str, torch_struct: ModuleType, form: str, lengths: Tensor | None
) -> None:
    """torch-struct has no separate first step: its scores are added to the second step."""
    if form == "dense":
        inputs = (leaf(BATCH, STEPS, STATES, STATES),)
        p = bx.Chain(*inputs, lengths=lengths)
    else:
        inputs = (leaf(BATCH, STEPS, STATES), leaf(STATES, STATES))
        p = bx.Chain.from_scores(*inputs, lengths=lengths)
    theta = p.potentials
    starting = torch.nn.functional.pad(theta[:, :1, None, :, 0], (0, 0, 0, 0, 0, STEPS - 2))
    value = torch_struct.LinearChainCRF(theta[:, 1:] + starting, lengths=lengths).partition
    assert_equal(p.value, value)

    z = [torch.randn_like(x) for x in inputs]
    actual = torch.autograd.grad(p.value.sum(), inputs, create_graph=True)
    expected = torch.autograd.grad(value.sum(), inputs, create_graph=True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_equal(ours, theirs)
    products = (torch.autograd.grad(gradient, inputs, grad_outputs=z) for gradient in (actual, expected))
    for ours, theirs in zip(*products, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("name", ["tslearn", "pysdtw"])
def test_soft_dtw_agrees(name):
    peer = without_numba("tslearn.metrics" if name == "tslearn" else name)
    torch.manual_seed(0)
    x, y = torch.randn(3, 20, 2, requires_grad=True), torch.randn(3, 30, 2, requires_grad=True)
    if name == "tslearn":
        value = peer.SoftDTWLossPyTorch(gamma=1.0)(x, y)
    else:
        value = peer.SoftDTW(gamma=1.0, use_cuda=False)(x, y)
    ours = bx.dtw(x, y)
    torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-4)
    of_ours, of_value = (torch.autograd.grad(v.sum(), (x, y)) for v in (ours, value))
    torch.testing.assert_close(of_ours, of_value, rtol=1e-3, atol=1e-3)
