"""Test of the table in :mod:`bellmax.modes`: which predicate is True in which execution mode."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from support.inside import modes
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

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
    assert modes.__doc__ is not None
    _, header, table, _ = re.split(r"\n=[= ]+\n", modes.__doc__)
    starts = [header.index(name) for name in PREDICATES]
    documented = {line[: starts[0]].strip(): [line[s : s + 4] == "True" for s in starts] for line in table.splitlines()}
    assert {name.partition(":")[0] for name in rows} == documented.keys()
    for name, row in rows.items():
        assert row == documented[name.partition(":")[0]], name
