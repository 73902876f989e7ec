"""The sweeps of charts: in exp space under negentropy, by their graphs otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmax.backends.native.loading import call
from bellmax.backends.reference.expanded import Expanded
from bellmax.programs.charts import ChartProgram
from bellmax.regularizers import Negentropy, Regularizer
from bellmax.tensors import Tensors


class NativeCharts(Expanded):
    """A tape is the expected tree and, at its end, NaN; or the graph's own, where numbers leave exp space.

    Labels of spans are summed out before, and given their shares after.
    """

    program: ChartProgram

    @property
    def check(self) -> None:
        """The kernels look at the scores as they read them."""
        return None

    def _call(self, name: str, theta: Tensor, index: Tensors, *args: Tensor | None) -> bool:
        prefix = "spans" if self.program.name == "spans" else "arcs"
        single_root = int(self.program.name == "arcs_of_one_root")
        lengths = index[0].contiguous()
        return bool(call(f"{prefix}_{name}", theta.contiguous(), *args, lengths, single_root))

    def _solve(self, theta: Tensors, index: Tensors, omega: Regularizer, expected: Tensor | None) -> Tensor | None:
        """The value, if it can be had in exp space, and the expected tree."""
        if isinstance(omega, Negentropy):
            scores, value = _without_labels(theta[0]), theta[0].new_empty(theta[0].shape[0])
            if self._call("forward", scores, index, value, expected):
                return value
        self.program.check(theta, index)
        return None

    def _shares(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Which share of a span each of its labels has: none where no span can be, whatever its scores are."""
        return omega.argmax(theta[0].masked_fill(~self.program.in_sentence(theta, index), -math.inf))

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        value = self._solve(theta, index, omega, None)
        return super().value(theta, index, omega) if value is None else value

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        expected = theta[0].new_empty(theta[0].shape[:3])
        value = self._solve(theta, index, omega, expected)
        if value is None:
            value, tape = super().forward(theta, index, omega)
            tape[:, -1, -1] = 0
            return value, tape
        tape = self.empty_tape(theta, index)
        tape[:, -1, -1] = math.nan
        tape.flatten(1)[:, : expected.shape[1:].numel()] = expected.flatten(1)
        return value, tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        expected = _expected(theta, tape, omega)
        if expected is None:
            return super().backward(theta, tape, seed, index, omega)
        product = expected * seed.reshape(-1, 1, 1)
        if theta[0].ndim == 3:
            return [product]
        return [product.unsqueeze(-1) * self._shares(theta, index, omega)]

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        expected = _expected(theta, tape, omega)
        if expected is None:
            return super().hessian(theta, tape, seed, z, index, omega)
        scores, along = theta[0], z[0]
        share = self._shares(theta, index, omega) if scores.ndim == 4 else None
        if share is not None:
            along = (share * along.masked_fill(share == 0, 0)).sum(-1)
        product = torch.empty_like(expected)
        self._call("hessian", _without_labels(scores), index, seed.contiguous(), along.contiguous(), product)
        if share is None:
            return [product]
        change = omega.hessian_product(share, z[0])
        return [product.unsqueeze(-1) * share + (expected * seed.reshape(-1, 1, 1)).unsqueeze(-1) * change]

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        if _expected(theta, tape, omega) is not None:
            tape = super().forward(theta, index, omega)[1]
        return super().sample(theta, tape, uniforms, index, omega)


def _without_labels(scores: Tensor) -> Tensor:
    return scores.logsumexp(-1) if scores.ndim == 4 else scores


def _expected(theta: Tensors, tape: Tensor, omega: Regularizer) -> Tensor | None:
    """The expected tree of a tape that has one, (B, n, n)."""
    if not isinstance(omega, Negentropy) or not len(tape) or not bool(tape[0, -1, -1].isnan()):
        return None
    shape = theta[0].shape[:3]
    return tape.flatten(1)[:, : shape[1:].numel()].reshape(shape).to(theta[0].dtype)
