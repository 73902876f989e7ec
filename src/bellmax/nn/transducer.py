"""The losses of transducers as modules, under any Ω: RNN-T and TDT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bellmax.inputs import Lengths, answers_near_misses, check_choice
from bellmax.losses.reductions import reduce_by_labels
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.structures.tdt import TDTPaths, check_durations, lattice_of
from bellmax.structures.transducer import Transducer
from bellmax.tensors import Gamma

_REDUCTIONS = ("none", "sum", "mean_batch", "mean_volume")


class _JointLoss(Smoothed):
    """A loss for the output of a joint network: −log p(targets) with FastEmit and a reduction."""

    _reductions: ClassVar[tuple[str, ...]] = _REDUCTIONS

    def __init__(
        self, blank: int, reduction: str, fastemit: float, omega: str | Regularizer, gamma: Gamma | None
    ) -> None:
        super().__init__(omega, gamma)
        check_choice("reduction", reduction, self._reductions)
        if not 0 <= fastemit < math.inf:
            raise ValueError(f"fastemit must be a number of at least 0, got {fastemit}")
        self.blank, self.reduction, self.fastemit = blank, reduction, fastemit

    def _loss(self, p: Transducer | TDTPaths) -> Tensor:
        """Return minus the value of p, reduced."""
        if self.fastemit:
            scores = dict(zip(p.lattice.scores, p._scores, strict=True))
            scores["emit"] = _ScaledGradient.apply(scores["emit"], 1 + self.fastemit)
            p = p._with([*scores.values()], p.omega)
        return reduce_by_labels(-p.value, p.lengths[..., 1], self.reduction)

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        fastemit = f", fastemit={self.fastemit}" if self.fastemit else ""
        return f"blank={self.blank}, reduction={self.reduction!r}{fastemit}, {super().extra_repr()}"


class TransducerLoss(_JointLoss):
    """RNN transducer loss (RNN-T) of target labels, for the logits (..., T, U + 1, V) of the joint network.

    A log-softmax turns the logits into log-probabilities. The loss is minus the value of the
    :class:`bellmax.Transducer` with these scores. Under negentropy with γ = 1, the loss is the usual −log p(targets |
    frames). Under every Ω of bellmax with γ ≤ 1, the loss is greater than or equal to −log p(targets | frames), and
    thus at least 0. Under negentropy with γ > 1, the loss can be negative.

    Args:
        blank: The class of the blank, default 0.
        reduction: The reduction over the batch: "none", "sum", "mean_batch" (the default) or "mean_volume".
            "mean_batch" is the mean of the losses. "mean_volume" is the sum of the losses divided by the total number
            of labels.
        fastemit: The weight λ of FastEmit (Yu et al., 2021), default 0. The loss does not change. Its gradient with
            respect to the log-probability of each label is multiplied by 1 + λ, so that labels are emitted earlier.
            NeMo recommends values from 0.0001 to 0.01. If λ > 0, second derivatives raise ``RuntimeError``, and forward
            mode is not supported.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import torch, bellmax as bx
    >>> loss = bx.nn.TransducerLoss()
    >>> logits = torch.zeros(2, 4, 3, 5, requires_grad=True)        # (B, T, U + 1, V)
    >>> targets = torch.tensor([[3, 1], [2, 0]])
    >>> loss(logits, targets, lengths=([4, 3], [2, 1]))
    tensor(6.3466, grad_fn=...)
    """

    @answers_near_misses
    def __init__(
        self,
        blank: int = 0,
        reduction: str = "mean_batch",
        *,
        fastemit: float = 0.0,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        if reduction == "mean":
            raise ValueError(
                "reduction must be 'mean_batch' for the mean over the batch, which was called 'mean' before "
                "bellmax 0.3, got 'mean'"
            )
        super().__init__(blank, reduction, fastemit, omega, gamma)

    @answers_near_misses
    def forward(self, logits: Tensor, targets: Tensor, *, lengths: tuple[Lengths, Lengths] | None = None) -> Tensor:
        """Return the loss: a scalar, or a tensor of the batch shape if ``reduction`` is "none".

        Args:
            logits: The output (..., T, U + 1, V) of the joint network, before log-softmax.
            targets: The target labels, integers (..., U) without the blank.
            lengths: A pair (numbers of frames, numbers of labels). Each of the two is a tensor of integers with the
                batch shape, or one number. By default T and U.

        """
        return self._loss(Transducer.from_logits(logits, targets, blank=self.blank, lengths=lengths, omega=self.omega))


class TDTLoss(_JointLoss):
    """Loss of a token-and-duration transducer (TDT), for the token logits and duration logits of the joint network.

    At each step, the model emits a label or a blank, and a duration d from ``durations``. Then it advances by d frames.
    A blank has d ≥ 1. The last step is a blank that ends exactly after the last frame. The loss is −log of the total
    probability of all sequences of steps that emit the targets. Two log-softmaxes turn the logits into
    log-probabilities. Other Ω replace the log-sum over sequences of steps, as in :class:`TransducerLoss`.

    If no sequence of steps emits the targets within the frames, the loss is infinite and its gradient is 0.

    Args:
        durations: The number of frames of each duration class, different integers of at least 0, default (0, 1, 2, 3,
            4). With more than 8 durations, other kernels are used, which need much more time and memory.
        blank: The class of the blank, default 0.
        sigma: The undernormalization σ, default 0. It is subtracted from the log-probability of each label and blank,
            so that sequences with few steps are preferred. Log-probabilities of durations do not change.
        reduction: The reduction over the batch: "none", "sum", "mean_batch" (the default), "mean_volume" or "mean".
            "mean_batch" is the mean of the losses. "mean_volume" is the sum of the losses divided by the total number
            of labels. "mean" is the mean of the losses, each divided by the number of its labels (by 1 if it has none),
            which is the default in transformers.
        fastemit: The weight λ of FastEmit (Yu et al., 2021), default 0, as in :class:`TransducerLoss`. Gradients with
            respect to the log-probabilities of durations are not multiplied, as in NeMo.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import torch, bellmax as bx
    >>> loss = bx.nn.TDTLoss(durations=(0, 1, 2))
    >>> token_logits, duration_logits = torch.zeros(2, 4, 3, 5), torch.zeros(2, 4, 3, 3)
    >>> targets = torch.tensor([[3, 1], [2, 0]])
    >>> loss(token_logits, duration_logits, targets, lengths=([4, 3], [2, 1]))
    tensor(5.3759)
    """

    _reductions: ClassVar[tuple[str, ...]] = (*_REDUCTIONS, "mean")

    @answers_near_misses
    def __init__(
        self,
        durations: Sequence[int] = (0, 1, 2, 3, 4),
        blank: int = 0,
        sigma: float = 0.0,
        reduction: str = "mean_batch",
        *,
        fastemit: float = 0.0,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        super().__init__(blank, reduction, fastemit, omega, gamma)
        if not math.isfinite(sigma):
            raise ValueError(f"sigma must be a finite number, got {sigma}")
        self.durations, self.sigma = check_durations(durations), sigma
        lattice_of(self.durations)  # fill the cache: torch.compile cannot trace the construction

    @answers_near_misses
    def distribution(
        self,
        token_logits: Tensor,
        duration_logits: Tensor,
        targets: Tensor,
        *,
        lengths: tuple[Lengths, Lengths] | None = None,
    ) -> TDTPaths:
        """Return the distribution over alignments, for example to decode the frame and the duration of each label.

        See :meth:`forward` for the arguments.
        """
        return TDTPaths(
            token_logits,
            duration_logits,
            targets,
            durations=self.durations,
            blank=self.blank,
            sigma=self.sigma,
            lengths=lengths,
            omega=self.omega,
        )

    @answers_near_misses
    def forward(
        self,
        token_logits: Tensor,
        duration_logits: Tensor,
        targets: Tensor,
        *,
        lengths: tuple[Lengths, Lengths] | None = None,
    ) -> Tensor:
        """Return the loss: a scalar, or a tensor of the batch shape if ``reduction`` is "none".

        Args:
            token_logits: The scores (..., T, U + 1, V) of the classes, before log-softmax.
            duration_logits: The scores (..., T, U + 1, D) of the D durations, before log-softmax.
            targets: The target labels, integers (..., U) without the blank.
            lengths: A pair (numbers of frames, numbers of labels). Each of the two is a tensor of integers with the
                batch shape, or one number. By default T and U.
        """
        return self._loss(self.distribution(token_logits, duration_logits, targets, lengths=lengths))

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        return f"durations={self.durations}, sigma={self.sigma}, {super().extra_repr()}"


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor. It has no second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _WithoutDerivative.apply(grad * ctx.factor), None


class _WithoutDerivative(torch.autograd.Function):
    """The identity, which cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("fastemit changes gradients only, so it has no second derivatives: pass fastemit=0")
