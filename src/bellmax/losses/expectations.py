"""Losses of the expected path, and of probabilities (sections 5.1 and 5.2 of the paper)."""

from __future__ import annotations

import math

from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.losses.margins import surrogate
from bellmax.losses.reductions import check_reduction, reduce
from bellmax.modes import is_checked
from bellmax.regularizers import Negentropy
from bellmax.tensors import divide_by_gamma, without_rounding_below_zero


def relaxed(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Δ(target, ∇DP_Ω(θ)): how far the expected path is from the target (sections 5.1 and 5.2). Not convex.

    - Chains: row by row on ``marginals``, summed over the steps that count: KL(target ‖ marginals) for negentropy,
      ½‖target − marginals‖² for every other Ω, where KL would be infinite. Where several states are allowed, the target
      is the nearest distribution over them; where all are, the step adds nothing.
    - Graphs: −Σ log E over the edges of the target path for negentropy, ½‖E − Y‖² for every other Ω.
    - Alignments: ½‖E − Y‖², and for negentropy Σ KL(Y ‖ E) of each cell as a coin, visited or not: an alignment may
      visit all cells of another and more, so that those of Y alone do not tell.

    For graphs and alignments the target is one path. Logarithms stay finite: a probability is taken as no less than the
    smallest normal number of its dtype, and that of not visiting a cell as no less than its precision.

    Args:
        p: the distribution.
        target: see the module.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import torch, bellmax as bx
    >>> emissions, transitions = torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2)
    >>> p = bx.Chain.from_scores(emissions, transitions, omega="l2")
    >>> p.marginals
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
    >>> relaxed(p, torch.tensor([0, 1])), relaxed(p, torch.tensor([-1, 1]))
    (tensor(0.0625), tensor(0.))
    """
    return relaxed_of(p, target, reduction, "target")


def relaxed_of(p: PathDistribution, target: Tensor, reduction: str, name: str, ignore_index: int = -100) -> Tensor:
    """:func:`relaxed` of a target that errors call ``name``, and where another label than −100 may mask a step."""
    check_reduction(p, reduction)
    targets, allowed = p._targets.read(name, target, ignore_index)
    loss = targets.distance(name, allowed)
    if not is_checked(allowed):
        loss = loss.masked_fill(targets.restricted_value(allowed).isinf(), math.inf)
    return reduce(targets, loss, reduction)


def expected_cost(p: PathDistribution, cost: Tensor, *, reduction: str = "mean") -> Tensor:
    """⟨∇DP_Ω(θ), C⟩: the mean cost of a path drawn from p, the risk for a cost that is linear in the path.

    Args:
        p: the distribution.
        cost: C of p's potentials' shape, or (..., T, S) for chains. What p never takes may cost anything, even ∞.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import torch, bellmax as bx
    >>> p = bx.Chain(torch.zeros(3, 2, 2))
    >>> expected_cost(p, bx.losses.hamming_cost(p, torch.tensor([0, 1, -1])))
    tensor(1.)
    """
    check_reduction(p, reduction)
    targets = p._targets
    return reduce(targets, targets.expected_cost(targets.check_cost(cost)), reduction)


def path_nll(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """−log p_{θ,Ω}(target), with the sum of the probabilities of all paths within the target.

    It is :func:`surrogate` divided by γ under negentropy. Under another Ω it is another loss, not convex, and +∞
    without gradient where a sparse Ω gives the target probability 0: then start from :func:`surrogate`.

    Args:
        p: the distribution.
        target: see the module.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import torch, bellmax as bx
    >>> p = bx.Chain.from_scores(torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2), omega="l2")
    >>> path_nll(p, torch.tensor([0, 1])).neg().exp(), path_nll(p, torch.tensor([0, 0]))
    (tensor(0.7500), tensor(inf))
    """
    check_reduction(p, reduction)
    if isinstance(p.omega, Negentropy):
        loss = divide_by_gamma(surrogate(p, target, reduction="none"), p.omega.gamma)
        return reduce(p._targets.read("target", target)[0], loss, reduction)
    targets, allowed = p._targets.read("target", target)
    fine = targets.solver.expanded()
    log_q = fine.log_transitions().masked_fill(~targets.edges_within(allowed), -math.inf)
    loss = -fine.with_edge_weights(log_q, Negentropy()).value()
    if is_checked(loss) and bool((loss == math.inf).any()):
        impossible = (loss == math.inf) & targets.restricted_value(allowed).isinf()
        if bool(impossible.any()):
            raise ValueError(targets.why_impossible("target", allowed, impossible))
    return reduce(targets, without_rounding_below_zero(loss), reduction)
