"""Gradients through a hard solver, by noise on its scores (Berthet et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from bellmax.distribution import PathDistribution, check_distribution
from bellmax.inputs import answers_near_misses, check_choice, check_tensor
from bellmax.regularizers import Hard
from bellmax.tensors import Tensors, promote_half

_EULER = 0.5772156649015329  # mean of the standard Gumbel distribution


class PerturbedPaths(NamedTuple):
    """The result of :class:`Perturbed`: the mean value and the mean best path over random perturbations of the scores.

    >>> import torch, bellmax as bx
    >>> layer = bx.nn.Perturbed(lambda cost: bx.DTW(cost, omega="hard"), samples=20)
    >>> value, expected_path = layer(torch.rand(5, 4, 3))
    >>> value.shape, expected_path.shape
    (torch.Size([5]), torch.Size([5, 4, 3]))
    """

    value: Tensor
    """Mean of the hard values under noise, of the batch shape."""
    expected_path: Any
    """Mean of the best paths under noise, of the shape of the scores. If the layer was called with several tensors,
    a tuple with one mean for each."""


class Perturbed(nn.Module):
    """Differentiate through a hard solver by noise on its scores: a layer of Berthet et al. (2020).

    The layer adds noise to the scores several times, solves all these problems in one batch, and returns the mean value
    and the mean best path. Both are random estimates of smooth functions of the scores, with these derivatives:

    - The gradient of the mean value is the mean best path. It is the exact gradient of the returned value.
    - The derivative of the mean best path is an unbiased estimate. Let B be the best path, and let s be the slope of
      the noise, which is −∇log density. The estimated Jacobian is the mean of B sᵀ / σ. To reduce its variance, the
      layer subtracts from B the mean over the other samples. The estimate is also the second derivative of the value.
    - Further derivatives raise ``NotImplementedError``.

    The path is the gradient of the value of ``make(scores)`` with respect to the scores, so it always has the shape of
    the scores, for each structure. If ``make`` negates its argument, the path is negated, too. For a structure of
    costs, pass the costs to the layer.

    The noise is independent for each entry and has mean 0. It is added to scores, and subtracted from costs. Each call
    draws new noise, also in evaluation mode. ``torch.manual_seed`` makes it reproducible. A score of −∞ (+∞ for costs)
    stays infinite.

    Args:
        make: A function from scores to a distribution under ``omega="hard"``, such as
            ``lambda cost: bx.DTW(cost, omega="hard")``. The scores are one or several tensors. The layer calls ``make``
            with one more leading dimension, which the structure reads as a batch dimension.
        noise: "gumbel" (the default) or "normal". "gumbel" is the standard Gumbel distribution minus its mean. For a
            choice among options with one score each, the mean value is then σ times the log-sum-exp of the scores / σ,
            and the mean path is a softmax.
        samples: The number of perturbations, default 10.
        sigma: The factor σ of the noise, default 1. It has the unit of the scores, as γ of a smoothing Ω.

    >>> import torch, bellmax as bx
    >>> _ = torch.manual_seed(0)
    >>> cost = torch.tensor([[0.0, 2.0, 5.0], [3.0, 1.0, 0.0]], requires_grad=True)
    >>> layer = Perturbed(lambda cost: bx.DTW(cost, omega="hard"), samples=1000)
    >>> value, path = layer(cost)
    >>> path.detach()
    tensor([[1.0000, 0.2760, 0.0060],
            [0.0300, 0.7340, 1.0000]])
    >>> torch.equal(torch.autograd.grad(value, cost)[0], path)
    True
    """

    @answers_near_misses
    def __init__(
        self,
        make: Callable[..., PathDistribution],
        noise: str = "gumbel",
        samples: int = 10,
        sigma: float = 1.0,
    ) -> None:
        super().__init__()
        if not callable(make):
            raise ValueError(
                f"make must be a function from scores to a distribution, got {type(make).__name__}: "
                'pass for example lambda cost: bx.DTW(cost, omega="hard")'
            )
        check_choice("noise", noise, ("gumbel", "normal"))
        if not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples must be an integer of at least 1, got {samples!r}")
        if isinstance(sigma, Tensor) or not 0 < sigma < math.inf:
            raise ValueError(f"sigma must be a finite number > 0, got {sigma}")
        self.make, self.noise, self.samples, self.sigma = make, noise, samples, float(sigma)

    def forward(self, scores: Tensor, *more: Tensor) -> PerturbedPaths:
        """Return the mean value, of the batch shape, and the mean best path, of the shape of the scores.

        Args:
            scores: The first argument of ``make``, a floating point tensor.
            *more: The other arguments of ``make``. Each tensor must have all batch dimensions. Use ``expand`` for a
                tensor that is shared by the batch.

        """
        arguments = (scores, *more)
        wide = [promote_half(_check_scores(arguments, n)) for n in range(len(arguments))]
        draws = self._draw([score.detach() for score in wide])
        means = _ExpectedPath.apply(draws, *wide)
        value = _Value.apply(draws, *means, *wide)
        paths = tuple(mean.to(score.dtype) for mean, score in zip(means, arguments, strict=True))
        return PerturbedPaths(value, paths if len(paths) > 1 else paths[0])

    def _draw(self, scores: Tensors) -> _Draws:
        """Solve one problem for each perturbation of the scores."""
        p = self._checked_distribution(scores)
        noises, slopes = zip(*(self._noise(score) for score in scores), strict=True)
        with torch.inference_mode(False), torch.enable_grad():
            moved = [
                torch.add(score, noise, alpha=p.sense * self.sigma).requires_grad_()
                for score, noise in zip(scores, noises, strict=True)
            ]
            solved = self.make(*moved)
            if solved.batch_shape != (self.samples, *p.batch_shape):
                raise ValueError(
                    "make must keep leading dimensions as batch dimensions: for scores of shape "
                    f"{tuple(moved[0].shape)}, it must return the batch shape {(self.samples, *p.batch_shape)}, "
                    f"got {tuple(solved.batch_shape)}"
                )
            values = solved.value
            paths = torch.autograd.grad(values.sum(), moved, allow_unused=True)
        used = [_check_used(path, n) for n, path in enumerate(paths)]
        return _Draws(values.detach(), used, slopes, p.sense * self.sigma, len(p.batch_shape))

    def _noise(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """Return noise (samples, *shape) and its slopes −∇log density. The slopes are 0 where the score is infinite."""
        with torch.inference_mode(False):
            slopes = score.new_empty(self.samples, *score.shape)
            if self.noise == "normal":
                noise = slopes.normal_()
            else:  # −log(e) is a Gumbel variable, and e = −log(u) is exponential; exponential_() is much slower
                finfo = torch.finfo(score.dtype)
                exponential = slopes.uniform_().clamp_(finfo.tiny, 1 - finfo.eps / 2).log_().neg_()
                noise = exponential.log().add_(_EULER).neg_()
                exponential.neg_().add_(1)
            return noise, slopes.masked_fill_(score.isinf(), 0)

    def _checked_distribution(self, scores: Tensors) -> PathDistribution:
        """Return ``make(*scores)``, without noise, or raise ValueError if its batch or its Ω does not fit."""
        p = self.make(*scores)
        check_distribution(p, "the result of make")
        if not isinstance(p.omega, Hard):
            raise ValueError(f'make must return a distribution under omega="hard", got {p.omega}')
        batch = tuple(p.batch_shape)
        for n, score in enumerate(scores):
            if score.shape[: len(batch)] != batch:
                raise ValueError(
                    f"scores[{n}] must start with the batch shape {batch}, got shape {tuple(score.shape)}: expand it"
                )
        for name, score in p.scores.items():
            if score.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"make must get all tensors that require grad as arguments, but {name} depends on another one: "
                    "pass it to the layer as a further score, or detach it"
                )
        return p

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        return f"noise={self.noise!r}, samples={self.samples}, sigma={self.sigma:g}"


def _check_scores(scores: Sequence[Tensor], n: int) -> Tensor:
    score = check_tensor(f"scores[{n}]", scores[n])
    if not score.is_floating_point():
        raise ValueError(f"scores[{n}] must be floating point, got dtype {score.dtype}")
    return score


def _check_used(path: Tensor | None, n: int) -> Tensor:
    if path is None:
        raise ValueError(f"make must use each of its arguments, but the value does not depend on scores[{n}]")
    return path


# --- derivatives


@dataclass(frozen=True)
class _Draws:
    """Solved perturbations: their values and paths, and what the Jacobian of the mean path needs."""

    values: Tensor  # (samples, *batch)
    paths: Tensors  # (samples, *batch, ...), one for each score
    slopes: Tensors  # of the noise, as the paths
    scale: float  # σ, negative for costs
    batch_dims: int

    def jacobian_products(self, z: Tensors) -> list[Tensor]:
        """Estimate the products of the Jacobian of the mean paths with z, which has the shapes of the scores.

        The Jacobian is symmetric, so E[B (sᵀz)] / σ equals E[s (Bᵀz)] / σ. The first form is exactly 0 at entries that
        no path uses, such as padding.
        """
        start = 1 + self.batch_dims
        products = (slope * direction for slope, direction in zip(self.slopes, z, strict=True))
        inner = torch.stack([p.unsqueeze(-1).flatten(start).sum(-1) for p in products]).sum(0)
        if len(inner) > 1:
            # Subtract from each B the mean of the others: less variance, and still no bias.
            inner = (inner - inner.mean(0)) * len(inner) / (len(inner) - 1)
        return [(_align(inner / self.scale, path) * path).mean(0) for path in self.paths]


def _align(x: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of size 1 to x (..., *batch), so that it broadcasts to ``like`` (..., *batch, ...)."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


class _ExpectedPath(Function):
    """(draws, *scores) → the mean of the best paths, as a function of the scores."""

    @staticmethod
    def forward(ctx: Any, draws: _Draws, *scores: Tensor) -> tuple[Tensor, ...]:
        ctx.draws = draws
        return tuple(path.mean(0) for path in draws.paths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_JacobianProduct.apply(ctx.draws, *grads)


class _JacobianProduct(Function):
    """(draws, *z) → the estimated product of the Jacobian of the mean path with z. It has no derivative."""

    @staticmethod
    def forward(ctx: Any, draws: _Draws, *z: Tensor) -> tuple[Tensor, ...]:
        return tuple(draws.jacobian_products(z))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "Perturbed has two derivatives of the value and one of the expected path: "
            "for further derivatives, use a structure under negentropy"
        )


class _Value(Function):
    """(draws, *mean paths, *scores) → the mean value, as a function of the scores, whose gradients are the paths."""

    @staticmethod
    def forward(ctx: Any, draws: _Draws, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[: len(draws.paths)])
        return draws.values.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        paths = ctx.saved_tensors
        gradients = [_align(grad, path) * path for path in paths]
        return None, *[None] * len(paths), *gradients
