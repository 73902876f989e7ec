"""The fused loss of label sequences, against the reference backend."""

from __future__ import annotations

import pytest
import torch
from support.kernels import needs_kernels, took
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx
from bellmax import losses

pytestmark = needs_kernels


def scores(by_step: bool = False, batched: bool = False) -> list[torch.Tensor]:
    batch = (3,) if batched or by_step else ()
    between = (*batch, 4, 3, 3) if by_step else (*batch, 3, 3)
    shapes = (3, 5, 3), between, (*batch, 3), (*batch, 3)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


STEPS = {
    "all": {},
    "lengths": {"lengths": [5, 0, 3]},
    "mask": {"mask": [[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]},
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("by_step", "batched"), [(False, False), (False, True), (True, True)])
def test_equals_the_reference(by_step: bool, batched: bool, steps: str, omega: bx.Regularizer) -> None:
    tensors, labels = scores(by_step, batched), torch.randint(3, (3, 5))

    def loss() -> torch.Tensor:
        emissions, transitions, start, end = tensors
        p = bx.Chain.from_scores(emissions, transitions, start=start, end=end, omega=omega, **STEPS[steps])
        return losses.surrogate(p, labels, reduction="none")

    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    with took("scored_chain_score", times=1), took("scored_chain_subtract", times=1):
        got = loss()
        gradients = torch.autograd.grad(got @ weights, tensors)
    with bx.use_backend("reference"):
        wanted = loss()
        expected = torch.autograd.grad(wanted @ weights, tensors)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gamma", [1.0, 0.3])
def test_derivatives_of_second_order(gamma: float) -> None:
    labels = torch.randint(3, (3, 5))

    def loss(emissions: torch.Tensor, transitions: torch.Tensor) -> torch.Tensor:
        p = bx.Chain.from_scores(emissions, transitions, lengths=[5, 2, 4], gamma=gamma)
        return losses.surrogate(p, labels, reduction="none")

    tensors = scores()[:2]
    with took("scored_chain_score"):
        assert gradcheck(loss, tensors)
    assert gradgradcheck(loss, tensors)


def test_labels_that_mask_steps_use_the_kernel() -> None:
    crf, emissions = bx.nn.CRF(3), torch.randn(2, 4, 3)
    tags = torch.tensor([[0, -100, 2, 1], [1, 1, 0, -100]])
    with took("scored_chain_score", times=1):
        got = crf(emissions, tags)
    assert got.equal(crf(emissions, tags.clamp(min=0), mask=tags >= 0))


def test_other_programs_use_the_general_sweeps() -> None:
    crf, emissions = bx.nn.CRF(3), torch.randn(2, 4, 3)
    with took("scored_chain_score", times=0):
        crf(emissions, torch.tensor([[0, -1, 2, 1], [1, 1, 0, 0]]))  # any state
    with pytest.raises(ValueError, match=r"tags must be from 0 to 2, .* got 3 at step 1 of sequence 1"):
        crf(emissions, torch.tensor([[0, 0, 0, 0], [0, 3, 0, 0]]))


@pytest.mark.parametrize("omega", ["negentropy", "l2", "sparsemax"])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_a_tensor_gamma_takes_the_kernel(omega: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    emissions, transitions = torch.randn(3, 5, 4), torch.randn(4, 4)
    tags = torch.randint(4, (3, 5))
    gamma = torch.rand(shape) + 0.5

    def loss(emissions: torch.Tensor, transitions: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        p = bx.Chain.from_scores(emissions, transitions, lengths=[5, 3, 4], omega=omega, gamma=gamma)
        return bx.losses.surrogate(p, tags, reduction="none")

    inputs = [t.double().requires_grad_() for t in (emissions, transitions, gamma)]
    with took("scored_chain_score"):
        loss(*inputs)
    torch.autograd.gradcheck(loss, inputs)
    torch.autograd.gradgradcheck(loss, inputs)
