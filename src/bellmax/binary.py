"""Chains of two states in one sweep, and their gradient in another: marginals, and weights of attention to segments.

The kernels are for negentropy and l2, and for scores that the batch shares, but for the emissions. Where they do not
serve, the general sweeps do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

import bellmax.autograd as autograd
from bellmax.backends import backend_for, native
from bellmax.backends.potentials import Tensors
from bellmax.regularizers import Regularizer


class UnservedError(Exception):
    """NaN among the scores, a step without a state, or an infinite score that is shared: see the general sweeps."""


def _is_seen_through() -> bool:
    """Whether a compiler, forward mode or functorch looks at what is computed."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return True
    return bool(torch._C._are_functorch_transforms_active())


def _call(kernel: str, tensors: Tensors, *constants: float, index: Tensors) -> Any:
    arrays = [t.detach().contiguous().numpy() for t in tensors]
    steps = [t.contiguous().numpy() for t in index]
    scale, omega = constants[:-2], constants[-2:]
    return getattr(native.kernels, kernel)(*arrays, *scale, *steps, *omega, torch.get_num_threads())


# --- marginals


def serves(program: autograd.Program, theta: Tensors) -> bool:
    """Whether there is a kernel for these scores, as the sweeps see them, and nobody looks through it."""
    if len(program) == 2 or program[1] != "native" or program[2] not in (1, 2) or theta[0].shape[-1] != 2:
        return False
    if any(score.shape[0] != 1 for score in theta[1:]) or theta[1].shape[1] != 1 or not theta[0].numel():
        return False
    return not _is_seen_through()


def marginals(program: autograd.Program, theta: Tensors, index: Tensors) -> Tensor:
    """(B, T, 2)."""
    found: Tensor = _Marginals.apply(program, index, *theta)
    return found


class _Marginals(Function):
    @staticmethod
    def forward(ctx: Any, program: autograd.Program, index: Tensors, *theta: Tensor) -> Tensor:
        found = torch.empty_like(theta[0], memory_format=torch.contiguous_format)
        if not _call("binary_marginals", (*theta, found), *program[2:], index=index):
            raise UnservedError
        ctx.program, ctx.index = program, index
        ctx.save_for_backward(*theta)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta = ctx.saved_tensors
        if torch.is_grad_enabled():  # the third derivative of the value is wanted
            _, tape = autograd.forward(ctx.program, theta, ctx.index)
            path = autograd.expected_path(ctx.program, theta, tape, ctx.index)[0]
            return None, None, *_again(path, theta, grad, ctx.needs_input_grad[2:])
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in theta]
        _call("binary_marginals_vjp", (*theta, grad, *gradients), *ctx.program[2:], index=ctx.index)
        return None, None, *gradients


def _again(result: Tensor, inputs: Tensors, grad: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """The gradients that are needed, from a result of the general sweeps, so that they have gradients in turn."""
    wanted = [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


# --- attention


def serves_weights(omega: Regularizer, scores: Tensor) -> bool:
    """Whether there is a kernel for attention with these scores (..., Q, K), and nobody looks through it."""
    if isinstance(omega.gamma, Tensor) or omega.kernel is None or omega.kernel[0] not in (1, 2) or not scores.numel():
        return False
    if scores.dtype not in (torch.float32, torch.float64) or _is_seen_through():
        return False
    return backend_for(scores.device) == "native"


def weights(
    omega: Regularizer,
    scores: Tensor,
    transitions: Tensor,
    mask: Tensor | None,
    generally: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """(..., Q, K), from scores of that shape, transitions (2, 2) and a mask (..., K).

    ``generally`` finds them by the general sweeps, from scores and transitions: derivatives of higher order are its.
    """
    rows = scores.shape[:-2].numel()
    if mask is None:
        keys = torch.full((rows,), scores.shape[-1]), torch.empty(rows, 0, dtype=torch.bool)
    else:
        flat = mask.reshape(rows, -1).contiguous()
        keys = flat.sum(-1), flat
    assert omega.kernel is not None
    constants = 1 / omega.gamma, *omega.kernel
    found: Tensor = _Weights.apply(constants, keys, generally, scores, transitions.to(scores.dtype))
    return found


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        constants: tuple[float, ...],
        keys: Tensors,
        generally: Callable[[Tensor, Tensor], Tensor],
        scores: Tensor,
        transitions: Tensor,
    ) -> Tensor:
        found = torch.empty_like(scores, memory_format=torch.contiguous_format)
        totals = scores.new_empty(scores.shape[:-1].numel())
        flat = _by_query(scores), constants[0] * transitions, _by_query(found), totals
        if not _call("binary_weights", flat, *constants, index=keys):
            raise UnservedError
        ctx.constants, ctx.keys, ctx.generally = constants, keys, generally
        ctx.save_for_backward(scores, transitions, found, totals)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        scores, transitions, found, totals = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = scores, transitions
            return None, None, None, *_again(ctx.generally(*inputs), inputs, grad, ctx.needs_input_grad[3:])
        to_scores, to_transitions = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (scores, transitions)
        )
        scale = ctx.constants[0]
        given = _by_query(scores), scale * transitions, _by_query(found), totals, _by_query(grad)
        _call("binary_weights_vjp", (*given, _by_query(to_scores), to_transitions), *ctx.constants, index=ctx.keys)
        return None, None, None, to_scores, scale * to_transitions


def _by_query(tensor: Tensor) -> Tensor:
    """(..., Q, K) as (… · Q, K)."""
    return tensor.reshape(-1, tensor.shape[-1])
