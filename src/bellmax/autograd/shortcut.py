"""Results of kernels as differentiable functions: a kernel for the gradient, general sweeps for higher derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bellmax.autograd.lean import LeanFunction
from bellmax.modes import is_eager, needs_grad
from bellmax.tensors import Tensors


class Differentiable(Protocol):
    """A result of a kernel with its gradient, as functions of the inputs and of saved tensors.

    Neither function may hold scores or results. Those are saved by autograd, so that hooks for saved tensors see them.
    """

    def vjp(self, inputs: Tensors, saved: Tensors, grad: Tensor) -> Sequence[Tensor | None]:
        """Return the gradient of each input, by a kernel."""
        ...

    def general(self, inputs: Tensors, saved: Tensors) -> Tensor:
        """Return the result by the general sweeps, which are differentiable to any order."""
        ...


def attach(kernel: Differentiable, result: Tensor, inputs: Tensors, saved: Tensors = ()) -> Tensor:
    """Return the result of a kernel as a function of the inputs, of which at least one requires a gradient."""
    attached: Tensor = _Attach.apply(kernel, [result], saved, *inputs)  # tensors in a list are not inputs
    return attached


@dataclass(frozen=True, eq=False, slots=True)
class Shortcut:
    """A :class:`Differentiable` made of two functions."""

    vjp: Callable[[Tensors, Tensors, Tensor], Sequence[Tensor | None]]
    """(inputs, saved, grad) → the gradient of each input, by a kernel."""
    general: Callable[[Tensors, Tensors], Tensor]
    """(inputs, saved) → the result by the general sweeps, which are differentiable to any order."""

    def attach(self, result: Tensor, inputs: Tensors, saved: Tensors = ()) -> Tensor:
        """Return the result as a function of the inputs."""
        return attach(self, result, inputs, saved) if needs_grad(*inputs) else result


class _Attach(LeanFunction):
    @staticmethod
    def forward(ctx: Any, kernel: Differentiable, result: list[Tensor], saved: Tensors, *inputs: Tensor) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(*inputs, *saved)
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _, _, _, *needed = ctx.needs_input_grad
        tensors, count = ctx.saved_tensors, len(needed)
        inputs, saved = tensors[:count], tensors[count:]
        if torch.is_grad_enabled() or not is_eager():
            gradients = _by_general_sweeps(ctx.kernel, inputs, saved, grad, needed)
        else:
            gradients = ctx.kernel.vjp(inputs, saved, grad)
        return None, None, None, *gradients


def _by_general_sweeps(
    kernel: Differentiable, inputs: Tensors, saved: Tensors, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients that are needed, as differentiable functions."""
    with torch.enable_grad():
        # Views, since one tensor may be two inputs, or an input a function of another input.
        views = [t.view_as(t) if is_needed else t for t, is_needed in zip(inputs, needed, strict=True)]
        result = kernel.general(views, saved)
    wanted = [t for t, is_needed in zip(views, needed, strict=True) if is_needed]
    gradients = iter(torch.autograd.grad(result, wanted, grad, create_graph=torch.is_grad_enabled()))
    return [next(gradients) if is_needed else None for is_needed in needed]
