"""Marginals of chains of two states in one sweep, and their gradient in another: what attention over segments needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

import bellmax.autograd as autograd
from bellmax.backends import native
from bellmax.backends.potentials import Tensors


class UnservedError(Exception):
    """NaN among the scores, a step without a state, or an infinite score that is shared: see the general sweeps."""


def serves(program: autograd.Program, theta: Tensors) -> bool:
    """Whether there is a kernel for these scores, as the sweeps see them, and nobody looks through it.

    It is for two states under negentropy or l2, where the batch shares all but the emissions.
    """
    if len(program) == 2 or program[1] != "native" or program[2] not in (1, 2) or theta[0].shape[-1] != 2:
        return False
    if any(score.shape[0] != 1 for score in theta[1:]) or theta[1].shape[1] != 1 or not theta[0].numel():
        return False
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return not torch._C._are_functorch_transforms_active()


def marginals(program: autograd.Program, theta: Tensors, index: Tensors) -> Tensor:
    """(B, T, 2)."""
    found: Tensor = _Marginals.apply(program, index, *theta)
    return found


def _call(kernel: str, program: autograd.Program, tensors: Tensors, index: Tensors) -> Any:
    arrays = [t.detach().contiguous().numpy() for t in (*tensors, *index)]
    return getattr(native.kernels, kernel)(*arrays, *program[2:], torch.get_num_threads())


class _Marginals(Function):
    @staticmethod
    def forward(ctx: Any, program: autograd.Program, index: Tensors, *theta: Tensor) -> Tensor:
        found = torch.empty_like(theta[0], memory_format=torch.contiguous_format)
        if not _call("binary_marginals", program, (*theta, found), index):
            raise UnservedError
        ctx.program, ctx.index = program, index
        ctx.save_for_backward(*theta)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta = ctx.saved_tensors
        if torch.is_grad_enabled():  # the third derivative of the value is wanted
            _, tape = autograd.value(ctx.program, theta, ctx.index)
            path = autograd.expected_path(ctx.program, theta, tape, ctx.index)[0]
            wanted = [t for t, needed in zip(theta, ctx.needs_input_grad[2:], strict=True) if needed]
            found = iter(torch.autograd.grad(path, wanted, grad, create_graph=True))
            return None, None, *[next(found) if needed else None for needed in ctx.needs_input_grad[2:]]
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in theta]
        _call("binary_marginals_vjp", ctx.program, (*theta, grad, *gradients), ctx.index)
        return None, None, *gradients
