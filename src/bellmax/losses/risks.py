"""The expected value of any cost of a path, a Python function, by samples or by the most probable paths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.inputs import as_tensor
from bellmax.losses.reductions import check_ragged_reduction, check_reduction, reduce, reduce_problems
from bellmax.modes import is_checked
from bellmax.names import answers_near_misses
from bellmax.recursions.ragged import RaggedPaths

Cost: TypeAlias = Callable[[Any], Any]


@answers_near_misses
def risk(
    p: PathDistribution | RaggedPaths,
    cost: Cost,
    *,
    samples: int | None = None,
    topk: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the expected cost of a random path, for any cost that a Python function computes from a path.

    The loss is known as the risk. Its minimization is minimum risk training, or minimum word error rate (MWER) training
    if the cost counts wrong words. The cost need not be differentiable. If the cost of a path is a sum over the entries
    of its event, such as the Hamming distance, use :func:`expected_cost` instead. It is exact and has no variance.

    Pass either ``samples`` or ``topk``:

    - With ``samples=K``, the loss is the mean cost of K random paths. The mean and its gradient are unbiased estimates
      of the risk and of its gradient. The gradient is the score-function estimate, also known as REINFORCE. The
      baseline of each sample is the mean cost of the other samples.
    - With ``topk=K``, the loss is the mean cost of the K most probable paths, weighted by their probabilities. The
      probabilities are divided by their sum. The loss has no variance. It is the exact risk if there are no other paths
      of positive probability. Otherwise, the loss and its gradient are biased.

    The loss has a gradient in the scores and in γ. It has another gradient in the parameters of the cost, if the cost
    is differentiable. Derivatives of higher order are right as well. With ``samples``, they are unbiased estimates. If
    Ω is "hard", the gradient in the scores is 0.

    The function ``cost`` is called once, with all paths in the decoded form. See :meth:`PathDistribution.decode` for
    the decoded form of each structure. The paths have an additional first dimension of size K. So the paths of a chain
    are a tensor (K, ..., T) of tags, padded with −1. The derivations of a hypergraph or a program are nested lists. The
    function returns one cost for each path: a tensor (K, ...), an array or nested lists. If fewer than K paths exist,
    the other paths are padding, and the loss ignores their costs. If a batch member has no path, its loss is 0.

    A cost may be +∞. If a path of a batch member has the cost +∞, the loss of the member is +∞ and has no gradient.

    Args:
        p: The distribution over paths. For programs of problems of different sizes, ``cost`` receives lists (K,
            problems).
        cost: The function that returns the cost of each path.
        samples: The number of random paths for each batch member, at least 2.
        topk: The number of most probable paths for each batch member, at least 1.
        reduction: "none", "mean" (the default), "sum" or "token_mean", as described in :mod:`bellmax.losses`.

    In the example, the cost is the number of times that the tag changes. With three steps and two tags, eight sequences
    are equally probable.

    >>> import torch, bellmax as bx
    >>> p = bx.Chain.from_scores(torch.zeros(3, 2), torch.zeros(2, 2))
    >>> def changes(tags):
    ...     return (tags[..., 1:] != tags[..., :-1]).sum(-1)
    >>> bx.losses.risk(p, changes, topk=8)
    tensor(1.)
    >>> _ = torch.manual_seed(0)
    >>> bx.losses.risk(p, changes, samples=1000)
    tensor(1.0030)

    """
    _check_options(cost, samples, topk)

    def draw(q: PathDistribution) -> tuple[Any, Tensor]:
        return q._most_probable_paths(cast(int, topk)) if samples is None else q._random_paths(samples)

    estimate = _by_weights if samples is None else _by_samples
    if isinstance(p, RaggedPaths):
        check_ragged_reduction(reduction)
        return reduce_problems(_of_problems(p, cost, draw, estimate), reduction)
    check_reduction(p, reduction)
    paths, log_prob = draw(p)
    loss = estimate(_costs_of(cost, paths, log_prob), log_prob)
    steps = p._targets.num_steps
    return reduce(p._targets, loss if steps is None else loss.masked_fill(steps == 0, 0), reduction)


def _check_options(cost: object, samples: object, topk: object) -> None:
    if isinstance(cost, Tensor):
        raise ValueError("cost must be a function of paths, got a Tensor: for a cost of each entry, use expected_cost")
    if not callable(cost):
        raise ValueError(f"cost must be a function of paths, got {type(cost).__name__}")
    if (samples is None) == (topk is None):
        raise ValueError(f"pass either samples or topk, got samples={samples!r} and topk={topk!r}")
    if topk is not None:
        if not isinstance(topk, int) or topk < 1:
            raise ValueError(f"topk must be an integer of at least 1, got {topk!r}")
    elif not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples must be an integer of at least 2, got {samples!r}")


def _of_problems(p: RaggedPaths, cost: Cost, draw: Callable[..., Any], estimate: Callable[..., Tensor]) -> Tensor:
    """Return the loss of each problem. The cost is a function of nested lists (K, problems) of edge numbers."""
    drawn = {q: (indices, *draw(q)) for indices, q in p.groups}
    columns = p.listed(lambda q: list(zip(*drawn[q][1], strict=True)))
    log_prob = p.join(lambda q: drawn[q][2].movedim(0, 1)).movedim(1, 0)
    costs = _costs_of(cost, [list(row) for row in zip(*columns, strict=True)], log_prob)
    return estimate(costs, log_prob)


def _costs_of(cost: Cost, paths: Any, log_prob: Tensor) -> Tensor:
    """Return the costs of paths in the dtype of their log-probabilities (K, *batch); 0 for padding."""
    costs = as_tensor("the result of cost", cost(paths))
    if costs.shape != log_prob.shape:
        needed = f"{tuple(log_prob.shape)}, with a cost of each path"
        raise ValueError(f"cost must return a tensor of shape {needed}, got {tuple(costs.shape)}")
    costs = costs.to(log_prob).masked_fill(log_prob == -math.inf, 0)
    if is_checked(costs):
        bad = costs.isnan() | (costs == -math.inf)
        if bool(bad.any()):
            position = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"cost must return numbers or +inf, got {costs[position].item()} at {position}")
    return costs


def _by_samples(costs: Tensor, log_prob: Tensor) -> Tensor:
    """Return the mean cost of random paths, (K, *batch), whose derivatives are unbiased."""
    infinite, costs = _without_infinity(costs)
    log_prob = log_prob.masked_fill(log_prob == -math.inf, 0)
    # The importance weight of each path is exp(log_prob − log_prob.detach()) = 1. All of its derivatives are right.
    excess = (log_prob - log_prob.detach()).expm1()
    advantage = (costs - costs.mean(0)) * (len(costs) / (len(costs) - 1))  # over the mean of the other samples
    return (costs + advantage * excess).mean(0).masked_fill(infinite, math.inf)


def _by_weights(costs: Tensor, log_prob: Tensor) -> Tensor:
    """Return the mean cost of distinct paths, (K, *batch), weighted by their probabilities."""
    infinite, costs = _without_infinity(costs)
    has_path = (log_prob > -math.inf).any(0)
    weights = log_prob.masked_fill(~has_path, 0).softmax(0)
    return (weights * costs).sum(0).masked_fill(infinite, math.inf)


def _without_infinity(costs: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a cost is +∞, (*batch), and the costs (K, *batch) with 0 instead of +∞."""
    infinite = costs == math.inf
    return infinite.any(0), costs.masked_fill(infinite, 0)
