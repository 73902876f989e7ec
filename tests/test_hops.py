"""A structure that is declared in one file has all verbs, every Ω, derivatives, torch.compile and lengths."""

from __future__ import annotations

import pytest
import torch
from support.checks import close
from support.hops import Hops
from support.problems import for_second_order, potentials
from torch import Tensor

import bellmax as bx

LENGTHS = torch.tensor([5, 3])


def graph(one: Tensor, two: Tensor, omega: bx.Regularizer) -> bx.PathDistribution:
    """The same paths as a graph written by hand, whose edges are the hops by one step, by two, and the end."""
    steps = one.shape[-1]
    hops = [(t, t + 1) for t in range(steps)] + [(t, t + 2) for t in range(steps - 1)]
    return bx.DAG([*hops, (steps, steps + 1)]).paths(torch.cat((one, two, one.new_zeros(1))), omega=omega)


def scores() -> tuple[Tensor, Tensor]:
    return potentials(2, 5, seed=1), potentials(2, 4, seed=2)


def test_verbs_equal_a_graph_without_padding(omega: bx.Regularizer, backend: str) -> None:
    one, two = scores()
    p = Hops(one, two, LENGTHS, omega=omega)
    for member, length in enumerate(LENGTHS.tolist()):
        plain = graph(one[member, :length], two[member, : length - 1], omega)
        close(p.value[member], plain.value)
        close(p.expected_path[member, :length], plain.expected_path[:length])
        close(p.gradient["two"][member, : length - 1], plain.expected_path[length : 2 * length - 1])
        close(p.best_path()[member, :length], plain.best_path()[:length])
        close(p.entropy()[member], plain.entropy())
        close(p.topk(3)[0][member], plain.topk(3)[0])
        close(p.mode[member, :length], plain.mode[:length])
        assert p.num_paths[member] == plain.num_paths  # a Fibonacci number
        z = potentials(length, seed=3)
        along = torch.cat((z, torch.zeros(length)))
        products = p.hessian_product(torch.nn.functional.pad(z, (0, 5 - length)).expand(2, 5))
        close(products[member, :length], plain.hessian_product(along)[:length])


def test_samples_are_paths_and_have_their_probability(omega: bx.Regularizer, backend: str) -> None:
    p = Hops(*scores(), LENGTHS, omega=omega)
    draws = p.sample((50,))
    assert p.support.check(draws).all()
    assert not p.support.check(torch.ones(2, 5)).all()  # five hops by one step are too many for the second
    paths, probabilities = p.support_paths()
    close(probabilities.sum(0), torch.ones(2, dtype=probabilities.dtype))
    close((paths * probabilities.unsqueeze(-1)).sum(0), p.expected_path)
    close(p.log_prob(paths[0]).exp(), probabilities[0])
    other = Hops(*(s.flip(0) for s in scores()), LENGTHS, omega=bx.Negentropy())
    assert (torch.distributions.kl_divergence(p, other) >= -1e-6).all()


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    def value(one: Tensor, two: Tensor) -> Tensor:
        return Hops(one, two, LENGTHS, omega=omega).value

    inputs = [s.double().requires_grad_() for s in scores()]
    torch.autograd.gradcheck(value, inputs)
    torch.autograd.gradgradcheck(value, inputs)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_compiles(backend: str) -> None:
    def loss(one: Tensor, two: Tensor, lengths: Tensor) -> Tensor:
        p = Hops(one, two, lengths, omega="l2")
        return p.value.sum() + p.expected_path.square().sum()

    inputs = [s.requires_grad_() for s in scores()]
    eager = loss(*inputs, LENGTHS)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs, LENGTHS)
    close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled, inputs), torch.autograd.grad(eager, inputs), strict=True):
        close(a, b)


def test_targets_and_errors() -> None:
    one, two = scores()
    p = Hops(one, two, LENGTHS)
    close(bx.losses.structured_perceptron(p, p.best_path()), 0.0)
    every_hop = torch.ones(2, 5, dtype=torch.bool)
    close(bx.losses.crf_nll(p, every_hop), 0.0)
    with pytest.raises(ValueError, match=r"target\[0\] allows no path of finite score"):
        bx.losses.crf_nll(p, torch.zeros(2, 5))  # hops by two cannot cover five steps
    one[1, 3:] = float("nan")  # padding
    assert Hops(one, two, LENGTHS).value.isfinite().all()
    with pytest.raises(ValueError, match="two must be finite or -inf, got nan at event index"):
        Hops(one, two.fill_(float("nan")), LENGTHS).value.sum()
