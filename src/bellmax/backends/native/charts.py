"""Sweeps of charts: inside–outside kernels in exp space for negentropy, the graph engine for other Ω."""

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
    """Sweeps of charts without a graph if Ω is negentropy and exp space does not overflow; else by the graph engine.

    Under negentropy the tape is the expected tree, whoever computed it. Under other Ω it is the tape of the graph
    engine. The kernels have no labels: a span's score is the logsumexp over its labels, and then its probability
    is divided among the labels.
    """

    program: ChartProgram

    @property
    def check(self) -> None:
        """None: the kernels check scores while they read them."""
        return None

    def _call(self, name: str, theta: Tensor, index: Tensors, *args: Tensor | None) -> bool:
        """Call the kernel of spans or arcs. True if all numbers stayed in the range of exp space."""
        prefix = "spans" if self.program.name == "spans" else "arcs"
        single_root = int(self.program.name == "arcs_of_one_root")
        lengths = index[0].contiguous()
        return bool(call(f"{prefix}_{name}", theta.contiguous(), *args, lengths, single_root))

    def _solve(self, theta: Tensors, index: Tensors, omega: Regularizer, expected: Tensor | None) -> Tensor | None:
        """Compute the value (B,) in exp space, and the expected tree at the beginning of the rows of ``expected``.

        Return None if exp space cannot be used. Raises ValueError if the scores are invalid.
        """
        if isinstance(omega, Negentropy):
            scores, value = _without_labels(theta[0]), theta[0].new_empty(theta[0].shape[0])
            if self._call("forward", scores, index, value, expected):
                return value
        self.program.check(theta, index)
        return None

    def _label_probabilities(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        """Label probabilities of each span, (B, n, n, L); 0 for invalid spans."""
        return omega.argmax(theta[0].masked_fill(~self.program.in_sentence(theta, index), -math.inf))

    def value(self, theta: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
        value = self._solve(theta, index, omega, None)
        return super().value(theta, index, omega) if value is None else value

    def forward(self, theta: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        if not isinstance(omega, Negentropy):
            self.program.check(theta, index)
            return super().forward(theta, index, omega)
        tape = self.empty_tape(theta, index)
        value = self._solve(theta, index, omega, _rows(tape, theta))
        if value is None:
            value, graph_tape = super().forward(theta, index, omega)
            (expected,) = super().backward(theta, graph_tape, torch.ones_like(value), index, omega)
            _expected_tree(tape, theta).copy_(expected.sum(-1) if expected.ndim == 4 else expected)
        return value, tape

    def backward(self, theta: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
        if not isinstance(omega, Negentropy):
            return super().backward(theta, tape, seed, index, omega)
        product = _expected_tree(tape, theta) * seed.reshape(-1, 1, 1)
        if theta[0].ndim == 3:
            return [product]
        return [product.unsqueeze(-1) * self._label_probabilities(theta, index, omega)]

    def hessian(
        self, theta: Tensors, tape: Tensor, seed: Tensor, z: Tensors, index: Tensors, omega: Regularizer
    ) -> Tensors:
        if not isinstance(omega, Negentropy):
            return super().hessian(theta, tape, seed, z, index, omega)
        scores, along = theta[0], z[0]
        label_probability = self._label_probabilities(theta, index, omega) if scores.ndim == 4 else None
        if label_probability is not None:
            along = (label_probability * along.masked_fill(label_probability == 0, 0)).sum(-1)
        product = scores.new_empty(scores.shape[:3])
        if not self._call("hessian", _without_labels(scores), index, seed, along.contiguous(), product):
            graph_tape = super().forward(theta, index, omega)[1]
            return super().hessian(theta, graph_tape, seed, z, index, omega)
        if label_probability is None:
            return [product]
        change = omega.hessian_product(label_probability, z[0])
        share = _expected_tree(tape, theta) * seed.reshape(-1, 1, 1)
        return [product.unsqueeze(-1) * label_probability + share.unsqueeze(-1) * change]

    def sample(self, theta: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
        if isinstance(omega, Negentropy):
            tape = super().forward(theta, index, omega)[1]
        return super().sample(theta, tape, uniforms, index, omega)


def _without_labels(scores: Tensor) -> Tensor:
    """Scores of spans or arcs (B, n, n), summed over the labels in log space."""
    return scores.logsumexp(-1) if scores.ndim == 4 else scores


def _rows(tape: Tensor, theta: Tensors) -> Tensor:
    """The numbers of each sentence on the tape in the dtype of θ, (B, at least n²), as a view."""
    return tape.flatten(1).view(theta[0].dtype)


def _expected_tree(tape: Tensor, theta: Tensors) -> Tensor:
    """The expected tree (B, n, n) on the tape of negentropy, as a view."""
    shape = theta[0].shape[:3]
    return _rows(tape, theta)[:, : shape[1:].numel()].view(shape)
