"""Chains in JAX: a `lax.scan` of logsumexp, compiled by `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.scipy.special import logsumexp
from measuring import Run
from torch import Tensor


def dense(theta: Any) -> Any:
    """(B, T, S, S) [t, current, previous] → (B,)."""

    def step(v: Any, potentials: Any) -> tuple[Any, None]:
        return logsumexp(potentials + v[:, None, :], axis=-1), None

    v, _ = jax.lax.scan(step, theta[:, 0, :, 0], theta[:, 1:].swapaxes(0, 1))
    return logsumexp(v, axis=-1)


def scored(emissions: Any, transitions: Any, start: Any, end: Any) -> Any:
    def step(v: Any, scores: Any) -> tuple[Any, None]:
        return scores + logsumexp(transitions + v[:, None, :], axis=-1), None

    v, _ = jax.lax.scan(step, emissions[:, 0] + start, emissions[:, 1:].swapaxes(0, 1))
    return logsumexp(v + end, axis=-1)


class Jitted:
    """A function of arrays, compiled once for each task."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self.inputs = tuple(jax.numpy.asarray(x.detach().numpy()) for x in inputs)
        self.function = function

    def runs(self) -> dict[str, Run]:
        def total(*arrays: Any) -> Any:
            return self.function(*arrays).sum()

        places = tuple(range(len(self.inputs)))
        gradient = jax.grad(total, places)
        z = tuple(jax.numpy.asarray(np.random.default_rng(0).normal(size=x.shape).astype(x.dtype)) for x in self.inputs)
        value = jax.jit(self.function)
        both = jax.jit(jax.value_and_grad(total, places))
        product = jax.jit(lambda arrays: jax.jvp(gradient, arrays, z)[1])
        return {
            "value": lambda: torch.from_numpy(np.array(value(*self.inputs))),
            "value and gradient": lambda: jax.block_until_ready(both(*self.inputs)),
            "Hessian product": lambda: jax.block_until_ready(product(self.inputs)),
        }
