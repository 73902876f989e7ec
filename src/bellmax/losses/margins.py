"""Losses that are differences of two values, convex in θ for a full path (section 5.1 of the paper)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmax.distribution import PathDistribution, check_distribution
from bellmax.losses.reductions import check_reduction, for_each_shape, reduce
from bellmax.modes import is_checked
from bellmax.names import answers_near_misses
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.tensors import without_rounding_below_zero


@answers_near_misses
@for_each_shape
def surrogate(p: PathDistribution, target: Tensor, cost: Tensor | None = None, *, reduction: str = "mean") -> Tensor:
    """Return the surrogate loss, the usual training loss for every structure and every Ω.

    Under negentropy and without the argument ``cost``, the loss is γ times the negative log-likelihood of the target.
    In general, the loss is DP_Ω(θ + C) − DP_Ω(θ restricted to the target) ≥ 0. Here DP_Ω(θ) is the value of the program
    with potentials θ, and C is ``cost``. "Restricted" means that all other paths are forbidden. If the target is one
    path, the loss is convex in θ. If it is a set of paths, the loss is in general not convex.

    For DTW, θ are costs, and the loss is DTW_Ω(θ restricted to the target) − DTW_Ω(θ − C). If the cells of a DTW target
    form one alignment, only this alignment is allowed. Shorter alignments through some of its cells, which replace two
    moves by a diagonal move, are forbidden.

    Mensch and Blondel (2018, section 5.1) define the loss for one target path Y. They subtract its score ⟨Y, θ⟩ instead
    of DP_Ω(θ restricted to the target). The two losses differ by a constant, the sum of Ω along the path. This constant
    is 0 for every Ω of bellmax except :class:`SquaredL2`. Under :class:`SquaredL2`, the minimum of the loss of bellmax
    is 0, and the minimum of their loss is not 0.

    Args:
        p: The distribution over paths. The loss uses its Ω.
        target: The target, in one of the forms described in :mod:`bellmax.losses`.
        cost: The cost C ≥ 0 of each entry, default 0. The tensor has the shape of the potentials. For chains, it can
            also have the shape (..., T, S) of the states. The cost of a path is a margin: the loss penalizes the path
            unless the score of the target exceeds the score of the path by this cost. C may contain NaN at masked
            steps. The ``step_weights`` of a DTW also multiply C.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import bellmax as bx
    >>> emissions, transitions = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 2)
    >>> p = bx.Chain.from_scores(emissions, transitions, omega="sparsemax")
    >>> surrogate(p, torch.tensor([0, 1])), surrogate(p, torch.tensor([1, 1])), surrogate(p, torch.tensor([-1, 1]))
    (tensor(0.), tensor(2.), tensor(0.))
    """
    return surrogate_of(p, target, cost, reduction, "target")


def surrogate_of(
    p: PathDistribution, target: Tensor, cost: Tensor | None, reduction: str, name: str, ignore_index: int = -100
) -> Tensor:
    """Return :func:`surrogate`, with the argument's name for error messages and the label that masks a step."""
    check_reduction(p, reduction)
    targets = p._targets
    if cost is None:
        targets, excess = targets.excess_by_kernels(target, ignore_index)
        if excess is not None:
            return reduce(targets, excess, reduction)
    targets, allowed = targets.read(name, target, ignore_index)
    best = (targets.p if cost is None else targets.augment(cost)).value
    restricted = targets.restricted_value(allowed)
    impossible = restricted.isinf()
    if is_checked(impossible) and bool(impossible.any()):
        raise ValueError(targets.why_impossible(name, allowed, impossible))
    excess = without_rounding_below_zero(p.sense * (best - restricted))
    return reduce(targets, excess.masked_fill(impossible, math.inf), reduction)


@answers_near_misses
@for_each_shape
def crf_nll(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the loss of a conditional random field (CRF): γ times the negative log-likelihood of the target.

    The loss is computed under negentropy with the γ of ``p``, even if ``p`` has another Ω. It equals :func:`surrogate`
    under negentropy. If the target is a set of paths (partial labels), the likelihood is the total probability of these
    paths.

    Args:
        p: The distribution over paths.
        target: The target, in one of the forms described in :mod:`bellmax.losses`.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import bellmax as bx
    >>> crf_nll(bx.Chain(torch.zeros(3, 2, 2)), torch.tensor([0, 1, 1]))  # one of eight
    tensor(2.0794)
    """
    check_distribution(p)
    omega = p.omega if isinstance(p.omega, Negentropy) else Negentropy(p.omega.gamma)
    return surrogate(_under(p, omega), target, reduction=reduction)


@answers_near_misses
@for_each_shape
def structured_hinge(
    p: PathDistribution, target: Tensor, weight: float | Tensor = 1.0, *, reduction: str = "mean"
) -> Tensor:
    """Return the structured hinge loss, the loss of a structured SVM with the Hamming distance as margin.

    The loss is :func:`surrogate` with the cost :func:`hamming_cost`. It is computed under :class:`Hard`, even if ``p``
    has another Ω.

    Args:
        p: The distribution over paths.
        target: The target, in one of the forms described in :mod:`bellmax.losses`.
        weight: The weight of a mistake in :func:`hamming_cost`, default 1.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import bellmax as bx
    >>> structured_hinge(bx.Chain(torch.zeros(3, 2, 2)), torch.tensor([0, 1, 1]))  # all three may be wrong
    tensor(3.)
    """
    return surrogate(_under(p, Hard()), target, hamming_cost(p, target, weight), reduction=reduction)


@answers_near_misses
@for_each_shape
def structured_perceptron(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the loss of the structured perceptron: the score of the best path minus the score of the target.

    The loss is :func:`surrogate` under :class:`Hard`, even if ``p`` has another Ω.

    Args:
        p: The distribution over paths.
        target: The target, in one of the forms described in :mod:`bellmax.losses`.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import bellmax as bx
    >>> dag = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
    >>> structured_perceptron(dag.paths(torch.tensor([1.0, 0.0, 1.0, 1.5])), torch.tensor([0, 1, 0, 1]))
    tensor(0.5000)
    """
    return surrogate(_under(p, Hard()), target, reduction=reduction)


@answers_near_misses
def hamming_cost(p: PathDistribution, target: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """Return the cost of each mistake, for the Hamming distance: 1 for each entry that is not in the target, 0 for the
    others.

    If you add up these costs over the entries of a path, you get the number of its entries that are not in the target.
    For chains, the entries are states, and the result has shape (..., T, S). For other structures, the result has the
    shape of the potentials.

    Args:
        p: The distribution over paths.
        target: The target, in one of the forms described in :mod:`bellmax.losses`. If a step of a chain allows any
            state or is masked, the cost of all its states is 0.
        weight: The weight of a mistake, default 1. Pass a number ≥ 0, or a tensor that broadcasts to the result. For
            example, a tensor (S,) has one weight for each wrong state.

    >>> import bellmax as bx
    >>> hamming_cost(bx.Chain(torch.zeros(3, 2, 2)), torch.tensor([0, 1, -1]))
    tensor([[0., 1.],
            [1., 0.],
            [0., 0.]])
    """
    check_distribution(p)
    targets, allowed = p._targets.read("target", target)
    correct = targets.correct(allowed)
    weight = torch.as_tensor(weight, device=p.device)
    dtype = torch.promote_types(p.dtype, weight.dtype) if weight.is_floating_point() and weight.ndim else p.dtype
    try:
        weight = weight.to(dtype).expand(correct.shape)
    except RuntimeError:
        raise ValueError(f"weight must broadcast to {tuple(correct.shape)}, got shape {tuple(weight.shape)}") from None
    return weight.masked_fill(correct, 0)


def _under(p: PathDistribution, omega: Regularizer) -> PathDistribution:
    """Return p under another Ω, or p itself, with its caches, if it has an Ω of this type."""
    check_distribution(p)
    return p if type(omega) is type(p.omega) else p._with(p._scores, omega)
