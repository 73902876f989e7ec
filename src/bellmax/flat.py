"""The flat batch at γ = 1 that the sweeps see, and the way back to scores of any batch shape and any γ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import bellmax.autograd as autograd
from bellmax.autograd.operators import run
from bellmax.regularizers import Kernel
from bellmax.tensors import Gamma, Tensors, divide_by_gamma, multiply_by_gamma, promote_half

_HARD = Kernel("hard")


class Flat:
    """A program without its scores.

    Args:
        program: what to sweep.
        index: the structure's integers, flat.
        batch_shape: of the scores.
        own_dims: how many dimensions each score has beside the batch; one that has no more is shared by the batch.
        gamma: of Ω.
        is_negated: whether scores are costs, and the sweeps look for a max.

    """

    def __init__(
        self,
        program: autograd.Program,
        index: tuple[Tensor, ...],
        batch_shape: torch.Size,
        own_dims: tuple[int, ...],
        gamma: Gamma,
        is_negated: bool,
    ) -> None:
        self.program, self.index, self.batch_shape = program, index, batch_shape
        self.own_dims, self.gamma, self.is_negated = own_dims, gamma, is_negated
        self.is_hard = program.omega == _HARD

    def run(self, name: str, *args: Any) -> Any:
        """A sweep, where nobody but autograd looks."""
        structure, backend, _ = self.program
        return run(name, structure, backend, self.program.regularizer, *args, self.index)

    def flatten(self, tensor: Tensor, own_dims: int) -> Tensor:
        """(..., *own) as (B, *own), or (1, *own) if the batch shares it."""
        if tensor.ndim == own_dims:
            return tensor.unsqueeze(0)
        batch_dims = len(self.batch_shape)
        if batch_dims == 1 and tensor.shape[0] == self.batch_shape[0]:
            return tensor
        own = tensor.shape[tensor.ndim - own_dims :]
        if tensor.shape != self.batch_shape + own:
            tensor = tensor.expand(self.batch_shape + own)
        return tensor.flatten(0, batch_dims - 1) if batch_dims != 1 else tensor

    def unscaled(self, scores: Tensors) -> list[Tensor]:
        """θ, as a flat batch."""
        thetas = (promote_half(-score if self.is_negated else score) for score in scores)
        return [self.flatten(theta, dims) for theta, dims in zip(thetas, self.own_dims, strict=True)]

    def theta(self, scores: Tensors) -> tuple[Tensor, ...]:
        """θ/γ as a flat batch."""
        gamma = self.gamma
        if isinstance(gamma, Tensor):
            scores = [
                divide_by_gamma(promote_half(score), gamma.reshape(gamma.shape + (1,) * dims))
                for score, dims in zip(scores, self.own_dims, strict=True)
            ]
        elif gamma != 1:
            scores = [promote_half(score) / gamma for score in scores]
        return tuple(self.unscaled(scores))

    def direction(self, z: Tensors, theta: Tensors) -> list[Tensor]:
        """A direction of the scores' shapes, as a flat batch."""
        flat = (self.flatten(d.to(t.dtype), dims) for d, t, dims in zip(z, theta, self.own_dims, strict=True))
        return [f.expand(t.shape) for f, t in zip(flat, theta, strict=True)]

    def onto(self, flat: Sequence[Tensor], scores: Tensors) -> tuple[Tensor, ...]:
        """Of the scores' own shapes, summed where the batch shares one, from θ's."""
        return tuple([self._onto(f, s) for f, s in zip(flat, scores, strict=True)])

    def _onto(self, flat: Tensor, score: Tensor) -> Tensor:
        if flat.shape == score.shape:
            return flat
        if flat.shape[1:] == score.shape:  # shared by the batch
            return flat.squeeze(0) if flat.shape[0] == 1 else flat.sum(0)
        if flat.numel() == score.numel():
            return flat.reshape(score.shape)
        return flat.reshape(self.batch_shape + flat.shape[1:]).sum_to_size(score.shape)

    def value(self, flat: Tensor) -> Tensor:
        """The value, of the batch shape, from the one at γ = 1. A distance of 0 under the hard max is not −0."""
        shaped = flat if flat.shape == self.batch_shape else flat.reshape(self.batch_shape)
        value = multiply_by_gamma(shaped, self.gamma)
        value = -value if self.is_negated else value
        return value + 0 if self.is_hard else value

    # --- the value as a shortcut: γ cancels in its gradient

    def vjp(self, scores: Tensors, kept: Tensors, grad: Tensor) -> list[Tensor | None]:
        """The gradient of the value in the scores, by the sweeps; ``kept`` is (*θ/γ, tape)."""
        *theta, tape = kept
        gradients = self.run("backward", theta, tape, self.seed(grad, theta))
        return self.gradients(gradients, scores)

    def seed(self, grad: Tensor, theta: Tensors) -> Tensor:
        """The gradient of a loss in the value, (B,), of θ's dtype."""
        flat = grad if grad.ndim == 1 else grad.reshape(-1)
        return flat if flat.dtype == theta[0].dtype else flat.to(theta[0].dtype)

    def gradients(self, flat: Sequence[Tensor], scores: Tensors) -> list[Tensor | None]:
        """Gradients in the scores that want one, of their dtype, from those in θ/γ."""
        pairs = zip(flat, scores, strict=True)
        return [self._onto(f, s).to(s.dtype) if s.requires_grad else None for f, s in pairs]

    def general(self, scores: Tensors, kept: Tensors) -> Tensor:
        """The value as a function that is differentiable to any order. Its number is of no account."""
        *_, tape = kept
        theta = self.theta(scores)
        value = theta[0].detach().new_zeros(theta[0].shape[0])
        return self.value(autograd.value(self.program, theta, value, tape, self.index))
