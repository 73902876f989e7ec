"""The named programs alike: under transforms and compilers, for members of a batch, for what is copied and moved."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from support.checks import close
from support.problems import potentials
from torch import Tensor

import bellmax as bx

Program = Callable[[Tensor], bx.PathDistribution]
PAIR = torch.tensor([3, 2]), torch.tensor([2, 1])
TARGETS = torch.tensor([[1, 2], [3, 1]])
PROGRAMS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "global": (lambda x: bx.Alignment(x, gap_open=-1.0, lengths=PAIR), (2, 3, 4)),
    "local": (lambda x: bx.Alignment(x, gap_open=-1.0, mode="local"), (2, 3, 4)),
    "semiglobal": (lambda x: bx.Alignment(x, gap_open=-1.0, mode="semiglobal", lengths=PAIR), (2, 3, 4)),
    "monotone": (lambda x: bx.Monotone(x, lengths=PAIR), (2, 5, 3)),
    "transducer": (lambda x: bx.Transducer.from_logits(x, TARGETS, lengths=PAIR), (2, 3, 3, 4)),
    "additive": (lambda x: bx.Transducer.from_additive(x, x[:, :3], TARGETS), (2, 4, 4)),
    "semi_markov": (lambda x: bx.SemiMarkov(x, torch.eye(2).to(x), lengths=torch.tensor([5, 3])), (2, 5, 3, 2)),
}
of_all = pytest.mark.parametrize("name", PROGRAMS)


def total(program: Program) -> Callable[[Tensor], Tensor]:
    return lambda x: program(x).value.sum()


@of_all
def test_transforms_agree_with_autograd(name: str) -> None:
    program, shape = PROGRAMS[name]
    x, z = potentials(*shape, requires_grad=True), potentials(*shape, seed=1)
    value = total(program)
    (gradient,) = torch.autograd.grad(value(x), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * z).sum(), x)
    plain = x.detach()
    close(torch.func.grad(value)(plain), gradient.detach())
    close(torch.func.jvp(value, (plain,), (z,))[1], (gradient * z).sum().detach())
    close(torch.func.jvp(torch.func.grad(value), (plain,), (z,))[1], product, 1e-9)
    close(torch.func.vmap(value)(torch.stack((plain, z))), torch.stack((value(plain), value(z))))


@pytest.mark.parametrize("name", ["semiglobal", "transducer", "semi_markov"])
def test_compiled_without_a_break(name: str) -> None:
    program, shape = PROGRAMS[name]
    x = potentials(*shape, requires_grad=True)
    compiled = torch.compile(total(program), fullgraph=True, backend="aot_eager")
    value, wanted = compiled(x), total(program)(x)
    close(value, wanted)
    close(torch.autograd.grad(value, x)[0], torch.autograd.grad(wanted, x)[0])


@of_all
def test_members_copies_and_types(name: str, backend: str) -> None:
    program, shape = PROGRAMS[name]
    p = program(potentials(*shape))
    for b, one in enumerate(p):
        close(one.value, p.value[b])
    close(p.expand((3, 2)).value, p.value.expand(3, 2))
    close(copy.deepcopy(p).value, p.value)
    close(pickle.loads(pickle.dumps(p)).value, p.value)
    single = p.to(torch.float32)
    assert single.value.dtype == torch.float32
    close(single.value.double(), p.value, 1e-4)
    close(torch.distributions.kl_divergence(p, p), [0.0, 0.0])


@of_all
def test_gamma_is_learnt(name: str, backend: str) -> None:
    program, shape = PROGRAMS[name]
    p = program(potentials(*shape))
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def value(gamma: Tensor) -> Tensor:
        return p._with(p._scores, bx.Negentropy(gamma)).value

    close(value(gamma)[1].detach(), p._with(p._scores, bx.Negentropy(2.0)).value[1])
    assert torch.autograd.gradcheck(value, gamma, fast_mode=True)
