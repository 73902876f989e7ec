"""Problems of different sizes equal the problems one by one."""

from __future__ import annotations

import pytest
import torch

import bellmax as bx


@bx.program("item, ")
def take(value, fee):
    best = 0.0
    for i in range(len(value)):
        best = bx.max(best, best + value[i] - fee)
    return best


def _values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in (3, 5, 3, 1, 5)]


FEE = torch.tensor(0.1, dtype=torch.float64)


def test_answers_equal_the_problems_one_by_one():
    values = _values()
    p = take(values, FEE, omega="entmax", gamma=0.5)
    alone = [take(v, FEE, omega="entmax", gamma=0.5) for v in values]
    assert len(p) == 5
    assert len(p.groups) == 3
    assert repr(p) == "RaggedPaths(take, problems=5, shapes=3)"
    assert torch.equal(p.value, torch.stack([q.value for q in alone]))
    assert torch.allclose(p.entropy(), torch.stack([q.entropy() for q in alone]))
    assert torch.equal(p.num_paths, torch.stack([q.num_paths for q in alone]))
    assert p.decode() == [q.decode() for q in alone]
    assert torch.allclose(p.log_prob(p.decode()), torch.stack([q.log_prob(q.decode()) for q in alone]))
    for mine, theirs in zip(p.expected_path, alone, strict=True):
        assert torch.allclose(mine, theirs.expected_path)
    for mine, theirs in zip(p.best_path(), alone, strict=True):
        assert torch.equal(mine, theirs.best_path())
    for mine, theirs in zip(p.gradient["fee"], alone, strict=True):
        assert torch.allclose(mine, theirs.gradient["fee"])
    for q, derivation in zip(p, p.sample_decoded(), strict=True):
        assert q.log_prob(derivation).isfinite()
    assert torch.equal(p[-1].value, alone[-1].value)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_take_lists_of_targets(reduction):
    values = _values()
    p = take(values, FEE)
    counts = [{"value": (v > 0).double(), "fee": -(v > 0).double().sum()} for v in values]
    for loss in (bx.losses.surrogate, bx.losses.crf_nll, bx.losses.structured_hinge, bx.losses.relaxed):
        each = torch.stack([loss(take(v, FEE), t) for v, t in zip(values, counts, strict=True)])
        expected = {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]
        assert torch.allclose(loss(p, counts, reduction=reduction), expected)
    nll = bx.losses.path_nll(p, target=p.decode(), reduction="none")
    assert torch.allclose(nll, -p.log_prob(p.decode()))
    gradients = torch.autograd.grad(bx.losses.surrogate(p, counts, reduction="sum"), values)
    for gradient, path, target in zip(gradients, p.expected_path, counts, strict=True):
        assert torch.allclose(gradient, path - target["value"])
    cost = [torch.ones(len(v), dtype=torch.float64) for v in values]
    assert torch.allclose(bx.losses.expected_cost(p, cost), torch.stack([e.sum() for e in p.expected_path]).mean())


def _targets(first):
    """Counts of five problems, with another target for the first problem, which is solved together with the third."""
    return [first, *({"value": torch.zeros(len(v)), "fee": torch.zeros(())} for v in _values()[1:])]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: take([], FEE), "value must hold at least one tensor, got an empty list"),
        (lambda p: take([1.0], FEE), r"value\[0\] must be a tensor, got float: pass one tensor, or a list of"),
        (lambda p: take([torch.zeros(2, 3)], FEE), r"value\[0\] must have shape \(item\) without batch dimensions"),
        (lambda p: take([torch.zeros(2)], [FEE, FEE]), "fee must have as many tensors as value, 1, got 2"),
        (lambda p: take([torch.zeros(2)], FEE, gamma=torch.ones(3)), "gamma must be a number for problems"),
        (lambda p: take([torch.zeros(2)], FEE, omega=bx.Negentropy(torch.ones(1))), "gamma must be a number for"),
        (lambda p: bx.losses.surrogate(p, [torch.zeros(3)]), "with an entry for each of the 5 problems, got 1 of them"),
        (lambda p: bx.losses.surrogate(p, torch.zeros(3)), "for each of the 5 problems, got a Tensor"),
        (
            lambda p: bx.losses.surrogate(p, _targets({"value": torch.zeros(3)})),
            "got the keys value and the keys fee, v",
        ),
        (lambda p: bx.losses.surrogate(p, _targets([1, 2])), r"target\[0\] and target\[2\] must have .* got a list"),
        (
            lambda p: bx.losses.surrogate(p, _targets({"value": torch.zeros(2), "fee": torch.zeros(())})),
            r"target\[0\]\['value'\] and target\[2\]\['value'\] must .* got shape \(2,\) and shape \(3,\)",
        ),
        (lambda p: bx.losses.surrogate(p, p.decode(), torch.ones(3)), "cost and weight must be left out"),
        (lambda p: bx.losses.surrogate(p, p.decode(), reduction="token_mean"), "reduction must be one of"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(take(_values(), FEE))


def test_indices_out_of_range():
    for k in (5, -6, "a"):
        with pytest.raises(IndexError, match="below 5"):
            take(_values(), FEE)[k]
