"""Losses that compare the expected path, or the probability of a target, with the target (sections 5.1 and 5.2)."""

from __future__ import annotations

import math

from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.losses.margins import surrogate
from bellmax.losses.reductions import check_reduction, for_each_shape, reduce
from bellmax.modes import is_checked
from bellmax.names import answers_near_misses
from bellmax.regularizers import Negentropy
from bellmax.targets import PathTargets
from bellmax.tensors import divide_by_gamma, without_rounding_below_zero


@answers_near_misses
@for_each_shape
def relaxed(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the distance of the expected path from the target.

    The loss is not convex. It is from sections 5.1 and 5.2 of Mensch and Blondel (2018). Its formula depends on the
    structure. In the formulas, E is the expected path, and Y is the target path:

    - Chains: a sum over the unmasked steps. Each step adds a distance between its target, a distribution over the
      states, and its marginals. For negentropy, the distance is the Kullback–Leibler divergence KL(target ‖ marginals).
      For every other Ω, KL could be infinite, and the distance is ½‖target − marginals‖². If a step allows several
      states, its target is the distribution over these states that is nearest to the marginals. If a step allows all
      states, it adds 0.
    - :class:`DTW`: for negentropy, a sum over all cells. A cell adds −log E if Y visits the cell, and −log(1 − E) if Y
      does not. For every other Ω, the loss is ½‖E − Y‖².
    - All other structures: for negentropy, the sum of −log E over the entries that Y uses. For every other Ω, the loss
      is ½‖E − Y‖².

    For structures other than chains, the target must be one path. The logarithms are always finite, because smaller
    arguments are replaced by a minimum. For E, the minimum is the smallest normal number of its dtype. For 1 − E, it is
    the machine epsilon.

    Args:
        p: The distribution over paths.
        target: The target, in one of the forms described in :mod:`bellmax.losses`.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import torch, bellmax as bx
    >>> emissions, transitions = torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2)
    >>> p = bx.Chain.from_scores(emissions, transitions, omega="sparsemax")
    >>> p.marginals
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
    >>> relaxed(p, torch.tensor([0, 1])), relaxed(p, torch.tensor([-1, 1]))
    (tensor(0.0625), tensor(0.))
    """
    return relaxed_of(p, target, reduction, "target")


def relaxed_of(p: PathDistribution, target: Tensor, reduction: str, name: str, ignore_index: int = -100) -> Tensor:
    """Return :func:`relaxed`, with the argument's name for error messages and the label that masks a step."""
    check_reduction(p, reduction)
    targets, allowed = p._targets.read(name, target, ignore_index)
    loss = targets.distance(name, allowed)
    if not is_checked(allowed):
        loss = loss.masked_fill(targets.restricted_value(allowed).isinf(), math.inf)
    return reduce(targets, loss, reduction)


@answers_near_misses
@for_each_shape
def expected_cost(p: PathDistribution, cost: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the expected cost of a random path of p, for minimum risk training.

    The expected cost is ⟨E, C⟩, where E is the expected path of p. For a cost that is not a sum over the entries of a
    path, such as an edit distance, use :func:`risk`.

    Args:
        p: The distribution over paths.
        cost: The cost C of each entry, a tensor of the shape of the potentials. For chains, also the cost of each state
            (..., T, S). The cost of an entry may be ∞ if p uses this entry with probability 0.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import torch, bellmax as bx
    >>> p = bx.Chain(torch.zeros(3, 2, 2))
    >>> expected_cost(p, bx.losses.hamming_cost(p, torch.tensor([0, 1, -1])))
    tensor(1.)
    """
    check_reduction(p, reduction)
    targets = p._targets
    return reduce(targets, targets.expected_cost(targets.check_cost(cost)), reduction)


@answers_near_misses
@for_each_shape
def path_nll(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the negative log-likelihood of the target under p, −log p(target).

    If the target is a set of paths (partial labels), p(target) is the total probability of these paths. Under
    negentropy, the loss is :func:`surrogate` divided by γ. Under another Ω, the loss is not convex. Under a sparse Ω,
    the target can have probability 0. The loss is then +∞ and gives no gradient. To avoid infinite losses, train with
    :func:`surrogate` until the targets have positive probability.

    Args:
        p: The distribution over paths.
        target: The target, in one of the forms described in :mod:`bellmax.losses`.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    >>> import torch, bellmax as bx
    >>> p = bx.Chain.from_scores(torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2), omega="sparsemax")
    >>> path_nll(p, torch.tensor([0, 1])).neg().exp(), path_nll(p, torch.tensor([0, 0]))
    (tensor(0.7500), tensor(inf))
    """
    check_reduction(p, reduction)
    if isinstance(p.omega, Negentropy):
        loss = divide_by_gamma(surrogate(p, target, reduction="none"), p.omega.gamma)
        return reduce(p._targets.read("target", target)[0], loss, reduction)
    targets, allowed = p._targets.read("target", target)
    if isinstance(targets, PathTargets):
        loss = -targets.log_prob("target")
    else:
        fine = targets.solver.expanded()
        log_q = fine.log_transitions().masked_fill(~targets.edges_within(allowed), -math.inf)
        loss = -fine.with_edge_weights(log_q, Negentropy()).value()
    if is_checked(loss) and bool((loss == math.inf).any()):
        impossible = (loss == math.inf) & targets.restricted_value(allowed).isinf()
        if bool(impossible.any()):
            raise ValueError(targets.why_impossible("target", allowed, impossible))
    return reduce(targets, without_rounding_below_zero(loss), reduction)
