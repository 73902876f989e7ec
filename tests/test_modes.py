"""Test of the table in :mod:`bellmax.modes`: which predicate is True in which execution mode."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from support.inside import modes
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import bellmax as bx

PREDICATES = ("is_eager", "is_readable", "is_checked", "is_plain", "is_transformed", "needs_grad")


class Subclass(Tensor):
    pass


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def flags(x: Tensor) -> list[bool]:
    """The predicates of x in the order of the columns."""
    return [
        modes.is_eager(), modes.is_readable(x), modes.is_checked(x), modes.is_plain([x]), modes.is_transformed(x),
        modes.needs_grad(x),
    ]  # fmt: skip


def flags_under(transform: Callable[..., object], *args: object) -> list[bool]:
    """The predicates inside a function that is transformed by ``transform`` and called with ``args``."""
    results: list[list[bool]] = []
    transform(lambda x: (results.append(flags(x)), x.sum())[1], *args)
    return results[0]


def trace(function: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced: Callable[..., Tensor] = torch.jit.trace(function, x, check_trace=False)
    return traced


def test_table_of_predicates() -> None:
    x, ones = torch.ones(3, requires_grad=True), torch.ones(3)
    rows = {"eager": flags(x), "meta device": flags(torch.ones(3, device="meta", requires_grad=True))}
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            rows[f"no_grad, inference_mode: {context.__name__}"] = flags(x)
    rows["torch.compile"] = torch.compile(lambda x: (flags(x), x + 1), backend="eager", fullgraph=True)(x)[0]
    rows["vmap"] = flags_under(lambda f, x: torch.vmap(f)(x), torch.ones(2, 3, requires_grad=True))
    rows["torch.func.jvp"] = flags_under(torch.func.jvp, (ones,), (ones,))
    rows["torch.func.grad"] = flags_under(lambda f, x: torch.func.grad(f)(x), x)
    with forward_ad.dual_level():
        rows["forward mode (a dual level)"] = flags(forward_ad.make_dual(x, ones))
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=True)
        rows["fake tensor in its mode"] = flags(fake)
    rows["fake tensor outside its mode"] = flags(fake)
    rows["tensor subclass"] = flags(ones.as_subclass(Subclass).requires_grad_())
    with PassThrough():
        rows["another dispatch mode"] = flags(x)
    rows["torch.jit.trace"] = flags_under(trace, x)
    assert modes.__doc__ is not None
    _, header, table, _ = re.split(r"\n=[= ]+\n", modes.__doc__)
    starts = [header.index(name) for name in PREDICATES]
    documented = {line[: starts[0]].strip(): [line[s : s + 4] == "True" for s in starts] for line in table.splitlines()}
    assert {name.partition(":")[0] for name in rows} == documented.keys()
    for name, row in rows.items():
        assert row == documented[name.partition(":")[0]], name


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: bx.Chain.from_scores(x, torch.zeros(3, 3)).value, (2, 5, 3)),
        (lambda x: bx.Chain.from_scores(x, torch.zeros(3, 3)).decode(), (2, 5, 3)),
        (lambda x: bx.Chain(x.bfloat16(), gamma=x[:, 0, 0, 0].exp()).value, (2, 5, 3, 3)),
        (lambda x: bx.CTC(x, torch.tensor([1, 2])).spans(), (2, 5, 3)),
        (lambda x: bx.DependencyTrees(x).expected_path, (2, 4, 4)),
        (lambda x: bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)]).paths(x).decode(), (9, 4)),
        (lambda x: bx.dtw(x, x.flip(1)), (2, 5, 3)),
        (lambda x: bx.dtw_cdist(x), (4, 5, 3)),
        (lambda x: bx.dtw_neighbors(x, k=1).indices, (4, 5, 3)),
    ],
    ids=["value", "decode", "bfloat16 and a tensor γ", "CTC", "trees", "graph", "dtw", "dtw_cdist", "dtw_neighbors"],
)
def test_a_traced_function_computes_new_results(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    """torch.jit.trace records operators, not kernels that write into empty tensors."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, *shape, generator=generator)
    result = trace(function, x)(y)
    torch.testing.assert_close(result, function(y))
    assert not torch.equal(result, function(x))
