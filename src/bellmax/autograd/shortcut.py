"""Kernels first, the general way for the rest: higher derivatives, and gradients that a transform looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bellmax.autograd.lean import LeanFunction
from bellmax.tensors import Tensors
from bellmax.transforms import is_eager, needs_grad


@dataclass(frozen=True, eq=False, slots=True)
class Shortcut:
    """The gradient of a result that a kernel found, as functions of its inputs and of the tensors that it kept.

    Neither function holds scores or results: those are saved, so that hooks for saved tensors see them.
    """

    vjp: Callable[[Tensors, Tensors, Tensor], Sequence[Tensor | None]]
    """(inputs, kept, grad) → the gradient of each input, by a kernel."""
    general: Callable[[Tensors, Tensors], Tensor]
    """(inputs, kept) → the result by the general sweeps, which are differentiable to any order."""

    def attach(self, found: Tensor, inputs: Tensors, kept: Tensors = ()) -> Tensor:
        """``found`` as a function of the inputs."""
        if not needs_grad(*inputs):
            return found
        result: Tensor = _Attach.apply(self, [found], len(inputs), *inputs, *kept)
        return result


class _Attach(LeanFunction):
    @staticmethod
    def forward(ctx: Any, shortcut: Shortcut, found: list[Tensor], count: int, *tensors: Tensor) -> Tensor:
        ctx.shortcut, ctx.count = shortcut, count
        ctx.save_for_backward(*tensors)
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors, count = ctx.saved_tensors, ctx.count
        inputs, kept = tensors[:count], tensors[count:]
        needed = ctx.needs_input_grad[3 : 3 + count]
        if torch.is_grad_enabled() or not is_eager():
            gradients = _by_general_sweeps(ctx.shortcut, inputs, kept, grad, needed)
        else:
            gradients = ctx.shortcut.vjp(inputs, kept, grad)
        return None, None, None, *gradients, *[None] * len(kept)


def _by_general_sweeps(
    shortcut: Shortcut, inputs: Tensors, kept: Tensors, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients that are needed, which have gradients in turn."""
    with torch.enable_grad():
        # Views, since an input may be a function of another one, or the same.
        views = [t.view_as(t) if is_needed else t for t, is_needed in zip(inputs, needed, strict=True)]
        result = shortcut.general(views, kept)
    wanted = [t for t, is_needed in zip(views, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=torch.is_grad_enabled()))
    return [next(found) if is_needed else None for is_needed in needed]
