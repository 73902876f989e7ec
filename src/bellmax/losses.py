"""Losses for learning potentials from paths (section 5 of the paper): to be minimised, never below 0.

They take a distribution over paths ``p`` and a target, which is one of

- a path: a 0/1 tensor of p's potentials' shape, bool or floating point;
- a set of paths, those that stay within a 0/1 tensor of that shape: partial labels;
- for chains, states (..., T) int64, or allowed states (..., T, S), bool. A label of −100 masks its step, as if p were
  built without it; −1 stands for any state;
- for alignments, index pairs (..., L, 2) int64 padded with −1.

Targets at masked steps and in the padding are ignored. A target that p cannot take is a ``ValueError``.

``reduction`` is "none" for the batch shape, "sum", "mean" over the batch, or for chains "token_mean" over the steps
that are kept. A sequence of which no step is kept has loss 0, and is left out of the mean.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from bellmax.backends.reference.chain import first_step, last_step
from bellmax.backends.reference.dtw import grid
from bellmax.backends.reference.scores import dense
from bellmax.chain import Chain, ScoredChain
from bellmax.distribution import PathDistribution
from bellmax.dtw import DTW
from bellmax.inputs import check_tensor
from bellmax.regularizers import (
    Hard,
    Negentropy,
    Regularizer,
    divide_by_gamma,
    inner,
    is_readable,
    multiply_by_gamma,
    promote_half,
)

AnyPaths = TypeVar("AnyPaths", bound=PathDistribution)
_ANY_STATE, _IGNORED = -1, -100
_REDUCTIONS = ("none", "mean", "sum", "token_mean")


def surrogate(p: PathDistribution, target: Tensor, cost: Tensor | None = None, *, reduction: str = "mean") -> Tensor:
    """DP_Ω(θ + C) − DP_Ω(θ restricted to the target), the convex loss of section 5.1 for every Ω.

    The paper subtracts the score ⟨Y, θ⟩ of the target. For a full path that differs by a constant, what Ω adds along
    it, without which the loss would not end at 0 under :class:`SquaredL2`. It is convex in θ for full paths, and not in
    general for partial labels. For DTW, a min over costs θ, it is DTW_Ω(θ restricted) − DTW_Ω(θ − C).

    A set of cells that is an alignment is taken for that one alone, though the diagonal may cut its corners.

    Args:
        p: the distribution; Ω is its own.
        target: see the module.
        cost: C ≥ 0 of p's potentials' shape, or (..., T, S) for chains; what other paths must be worse by. None for 0.
            Where nothing counts it may hold NaN. ``step_weights`` of a DTW weigh C as they weigh its cost.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import bellmax as bx
    >>> emissions, transitions = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 2)
    >>> p = bx.Chain.from_scores(emissions, transitions, omega="l2")
    >>> surrogate(p, torch.tensor([0, 1])), surrogate(p, torch.tensor([1, 1])), surrogate(p, torch.tensor([-1, 1]))
    (tensor(0.), tensor(2.), tensor(0.))
    """
    p, allowed = _read(p, target, reduction)
    augmented = p if cost is None else _augment(p, cost)
    best, restricted = augmented._value(), _restricted_value(p, allowed)
    if _is_checked(restricted) and bool(restricted.isinf().any()):
        raise ValueError(_why_impossible(p, allowed, restricted.isinf()))
    gap = restricted - best if isinstance(p, DTW) else best - restricted
    gap = torch.where(gap < 0, gap - gap.detach(), gap)  # rounding; the gradient stays
    return _reduce(p, torch.where(restricted.isinf(), math.inf, gap), reduction)


def crf_nll(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """The loss of conditional random fields: :func:`surrogate` under :class:`Negentropy` with p's γ.

    It is γ times the negative log-likelihood of the target (of all paths within it, for partial labels).

    >>> import bellmax as bx
    >>> crf_nll(bx.Chain(torch.zeros(3, 2, 2)), torch.tensor([0, 1, 1]))  # one of eight
    tensor(2.0794)
    """
    omega = p.omega if isinstance(p.omega, Negentropy) else Negentropy(p.omega.gamma)
    return surrogate(_under(p, omega), target, reduction=reduction)


def structured_hinge(
    p: PathDistribution, target: Tensor, weight: float | Tensor = 1.0, *, reduction: str = "mean"
) -> Tensor:
    """The hinge loss with margins of :func:`hamming_cost`: :func:`surrogate` under :class:`Hard`, whatever p's Ω.

    >>> import bellmax as bx
    >>> structured_hinge(bx.Chain(torch.zeros(3, 2, 2)), torch.tensor([0, 1, 1]))  # as many as states may be wrong
    tensor(3.)
    """
    return surrogate(_under(p, Hard()), target, hamming_cost(p, target, weight), reduction=reduction)


def structured_perceptron(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """How much the best path is better than the target: :func:`surrogate` under :class:`Hard`, whatever p's Ω.

    >>> import bellmax as bx
    >>> dag = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)])
    >>> structured_perceptron(dag.paths(torch.tensor([1.0, 0.0, 1.0, 1.5])), torch.tensor([0, 1, 0, 1]))
    tensor(0.5000)
    """
    return surrogate(_under(p, Hard()), target, reduction=reduction)


def hamming_cost(p: PathDistribution, target: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """The C with ⟨C, Y⟩ = how often Y is not within the target: states (..., T, S) for chains, else edges or cells.

    Args:
        p: the distribution.
        target: see the module. Where any state is right, and at masked steps, C is 0.
        weight: of a mistake, ≥ 0; a number, or a tensor that broadcasts, such as (S,) for each wrong state.

    >>> import bellmax as bx
    >>> hamming_cost(bx.Chain(torch.zeros(3, 2, 2)), torch.tensor([0, 1, -1]))
    tensor([[0., 1.],
            [1., 0.],
            [0., 0.]])
    """
    p, allowed = _read(p, target)
    if isinstance(p, Chain):
        allowed = _states(p, allowed)
    elif isinstance(p, DTW):
        allowed = allowed | ~p._inside
    weight = torch.as_tensor(weight, device=p.device)
    dtype = torch.promote_types(p.dtype, weight.dtype) if weight.is_floating_point() and weight.ndim else p.dtype
    try:
        weight = weight.to(dtype).expand(allowed.shape)
    except RuntimeError:
        raise ValueError(f"weight must broadcast to {tuple(allowed.shape)}, got shape {tuple(weight.shape)}") from None
    return weight.masked_fill(allowed, 0)


def relaxed(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Δ(target, ∇DP_Ω(θ)): how far the expected path is from the target (sections 5.1 and 5.2). Not convex.

    - Chains: row by row on ``marginals``, summed over the steps that count: KL(target ‖ marginals) for negentropy,
      ½‖target − marginals‖² for every other Ω, where KL would be infinite. Where several states are allowed, the target
      is the nearest distribution over them; where all are, the step adds nothing.
    - Graphs: −Σ log E over the edges of the target path for negentropy, ½‖E − Y‖² for every other Ω.
    - Alignments: ½‖E − Y‖², and for negentropy Σ KL(Y ‖ E) of each cell as a coin, visited or not: an alignment may
      visit all cells of another and more, so that those of Y alone do not tell.

    For graphs and alignments the target is one path. Logarithms stay finite: a probability counts as no less than the
    smallest normal number of its dtype, and that of not visiting a cell as no less than its precision.

    Args:
        p: the distribution.
        target: see the module.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import bellmax as bx
    >>> emissions, transitions = torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2)
    >>> p = bx.Chain.from_scores(emissions, transitions, omega="l2")
    >>> p.marginals
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
    >>> relaxed(p, torch.tensor([0, 1])), relaxed(p, torch.tensor([-1, 1]))
    (tensor(0.0625), tensor(0.))
    """
    p, allowed = _read(p, target, reduction)
    entropic = isinstance(p.omega, Negentropy)
    if isinstance(p, Chain):
        _check_possible(p, allowed)
        return _reduce(p, _relaxed_rows(p, _states(p, allowed), entropic), reduction)
    y = _check_full(p, allowed)
    path = promote_half(p.expected_path)
    if not entropic:
        loss = (path - y).square() / 2
    elif isinstance(p, DTW):
        finfo = torch.finfo(path.dtype)
        loss = -torch.where(allowed, path.clamp(finfo.tiny, 1).log(), torch.log1p(-path.clamp(0, 1 - finfo.eps)))
    else:
        loss = -path.clamp(torch.finfo(path.dtype).tiny, 1).log() * y
    return _reduce(p, loss.flatten(-len(p.event_shape)).sum(-1), reduction)


def alignment_area(p: DTW, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """‖L(Y − Y_true)ᵀ‖²_F with L the lower triangular matrix of ones and Y the soft alignment (section 5.3).

    Row by row, it compares how much of Y and of Y_true lies up to each column. For two alignments with one cell in each
    row it is the area between them, N times their :func:`mean_absolute_deviation`. It is convex in Y.

    Args:
        p: the alignment.
        target: a path (..., N, M) or index pairs (..., L, 2).
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import bellmax as bx
    >>> p = bx.DTW(torch.tensor([[0.0, 9.0], [0.0, 9.0], [9.0, 0.0]]), omega="hard")
    >>> alignment_area(p, torch.tensor([[0, 0], [1, 1], [2, 1]]))
    tensor(1.)
    """
    if not isinstance(p, DTW):
        raise ValueError(f"p must be a DTW, got {type(p).__name__}")
    y = _check_full(*_read(p, target, reduction))
    beside = (promote_half(p.expected_path) - y).cumsum(-1)
    columns = torch.arange(p.event_shape[1], device=p.device)
    past = columns >= p.lengths[..., 1, None, None]  # where a row's sum would be counted once more
    return _reduce(p, beside.masked_fill(past, 0).square().flatten(-2).sum(-1), reduction)


def mean_absolute_deviation(a: Tensor, b: Tensor) -> Tensor:
    """The mean over rows of \\|column of a − column of b\\|, between alignments of the same pairs; of the batch shape.

    The column of a row is the mean over its cells. Where each row of both has one cell (frames of a recording, each
    given one note of the score), it is the area between the alignments divided by the number of rows, and so is
    :func:`alignment_area`. Otherwise the two differ, since the latter also counts how many cells a row has.

    Args:
        a: a path (..., N, M), hard or soft, or index pairs (..., L, 2) int64 padded with −1.
        b: the other, in either form. Rows that neither has, past the end, do not count.

    >>> mean_absolute_deviation(torch.tensor([[0, 0], [1, 0], [2, 1]]), torch.tensor([[0, 0], [1, 1], [2, 1]]))
    tensor(0.3333)
    """
    rows = max(_num_rows("a", a), _num_rows("b", b))
    (column_a, has_a), (column_b, has_b) = _columns(a, rows), _columns(b, rows)
    if column_a.shape != column_b.shape:
        raise ValueError(
            f"a and b must be of the same batch, got {tuple(column_a.shape[:-1])} and {tuple(column_b.shape[:-1])}"
        )
    if is_readable(has_a) and is_readable(has_b) and bool((has_a != has_b).any()):
        *batch, row = (has_a != has_b).nonzero()[0].tolist()
        lacking = "b" if bool(has_a[(*batch, row)]) else "a"
        raise ValueError(f"a and b must have the same rows, but {lacking} has no cell in row {row}{_of(batch)}")
    return (column_a - column_b).abs().sum(-1) / has_a.sum(-1).clamp(min=1)


def expected_cost(p: PathDistribution, cost: Tensor, *, reduction: str = "mean") -> Tensor:
    """⟨∇DP_Ω(θ), C⟩: the mean cost of a path drawn from p, the risk for a cost that is linear in the path.

    Args:
        p: the distribution.
        cost: C of p's potentials' shape, or (..., T, S) for chains. What p never takes may cost anything, even ∞.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import bellmax as bx
    >>> p = bx.Chain(torch.zeros(3, 2, 2))
    >>> expected_cost(p, hamming_cost(p, torch.tensor([0, 1, -1])))
    tensor(1.)
    """
    _check_reduction(p, reduction)
    cost = _check_cost(p, cost)
    by_state = cost.ndim < len(p.batch_shape) + len(p.event_shape)
    path = p.marginals if isinstance(p, Chain) and by_state else p.expected_path
    risk = inner(promote_half(path), promote_half(cost), 2 if by_state else len(p.event_shape))
    return _reduce(p, risk, reduction)


def path_nll(p: PathDistribution, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """−log p_{θ,Ω}(target), with the sum of the probabilities of all paths within the target.

    It is :func:`surrogate` divided by γ under negentropy. Under another Ω it is another loss, not convex, and +∞
    without gradient where a sparse Ω gives the target probability 0: then start from :func:`surrogate`.

    Args:
        p: the distribution.
        target: see the module.
        reduction: "none", "mean", "sum" or "token_mean": see the module.

    >>> import bellmax as bx
    >>> p = bx.Chain.from_scores(torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2), omega="l2")
    >>> path_nll(p, torch.tensor([0, 1])).neg().exp(), path_nll(p, torch.tensor([0, 0]))
    (tensor(0.7500), tensor(inf))
    """
    p, allowed = _read(p, target, reduction)
    if isinstance(p.omega, Negentropy):
        return _reduce(p, divide_by_gamma(surrogate(p, target, reduction="none"), p.omega.gamma), reduction)
    edges: PathDistribution = p._edges() if isinstance(p, DTW) else p._dense() if isinstance(p, ScoredChain) else p
    within = _moves_within(p, allowed) if isinstance(p, DTW) else _over_edges(p, allowed)
    log_q = edges._log_transitions().masked_fill(~within, -math.inf)
    loss = -edges._with((log_q,), Negentropy()).value
    if _is_checked(loss) and bool((loss == math.inf).any()):
        impossible = (loss == math.inf) & _restricted_value(p, allowed).isinf()
        if bool(impossible.any()):
            raise ValueError(_why_impossible(p, allowed, impossible))
    return _reduce(p, torch.where(loss < 0, loss - loss.detach(), loss), reduction)


# --- targets


def _is_checked(tensor: Tensor) -> bool:
    """Whether values are looked at: on a GPU the host would have to wait for them."""
    return tensor.device.type == "cpu" and is_readable(tensor)


def _read(p: AnyPaths, target: Tensor, reduction: str = "none") -> tuple[AnyPaths, Tensor]:
    """p without the steps whose label says so, and what the target allows: see :func:`_allowed`."""
    _check_reduction(p, reduction)
    p._check_device("target", check_tensor("target", target))
    if isinstance(p, Chain) and _holds_labels(p, target):
        ignored = (_expand(p, target, p.event_shape[:1]) == _IGNORED) & p._kept
        if not _is_checked(ignored) or bool(ignored.any()):
            p = p._without(ignored)
    return p, _allowed(p, target)


def _holds_labels(p: Chain, target: Tensor) -> bool:
    return target.dtype == torch.int64 and target.ndim == len(p.batch_shape) + 1


def _allowed(p: PathDistribution, target: Tensor) -> Tensor:
    """What the target allows, bool: (..., T, S) where a chain's target speaks of states, else (..., *event)."""
    batch_dims = len(p.batch_shape)
    if isinstance(p, Chain) and _holds_labels(p, target):
        return _allowed_by_labels(p, target)
    if isinstance(p, Chain) and target.dtype == torch.bool and target.ndim == batch_dims + 2:
        return _check_rows(p, _expand(p, target, p.event_shape[:2]) | ~p._kept.unsqueeze(-1))
    if isinstance(p, DTW) and target.dtype == torch.int64 and target.shape[-1:] == (2,):
        if target.shape[:-2] != p.batch_shape or target.ndim < 2:
            needed = f"({', '.join(map(str, p.batch_shape))}{', ' if batch_dims else ''}L, 2)"
            raise ValueError(f"target must have shape {needed} for index pairs, got {tuple(target.shape)}")
        return _within_lengths(p, p.alignment_to_path(target) > 0)
    allowed = _expand(p, target, p.event_shape)
    if allowed.dtype == torch.bool:
        return _within_lengths(p, allowed)
    if _is_checked(allowed):
        bad = (allowed != 0) & (allowed != 1) & _counts(p, allowed.ndim)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"target must hold 0 and 1, got {allowed[place].item()} at {place}")
    return _within_lengths(p, allowed == 1)


def _within_lengths(p: PathDistribution, allowed: Tensor) -> Tensor:
    """Without the cells of a DTW's target that are not looked at. Those outside of its band are."""
    if not isinstance(p, DTW):
        return allowed
    rows, columns = (torch.arange(size, device=p.device) for size in p.event_shape)
    of_x, of_y = (own[..., None, None] for own in p.lengths.unbind(-1))
    return allowed & (rows.unsqueeze(-1) < of_x) & (columns < of_y)


def _expand(p: PathDistribution, target: Tensor, own: torch.Size) -> Tensor:
    needed = p.batch_shape + own
    if target.ndim == len(needed) or len(own) == len(p.event_shape) <= target.ndim:
        try:
            return target.expand(needed)
        except RuntimeError:
            pass
    forms = [f"{tuple(p.batch_shape + p.event_shape)} of 0 and 1"]
    if isinstance(p, Chain):
        steps, states = p.event_shape[:2]
        forms += [f"{(*p.batch_shape, steps)} int64", f"{(*p.batch_shape, steps, states)} bool"]
    elif isinstance(p, DTW):
        forms.append("(..., L, 2) int64")
    raise ValueError(f"target must have shape {' or '.join(forms)}, got {tuple(target.shape)} {target.dtype}")


def _allowed_by_labels(p: Chain, labels: Tensor) -> Tensor:
    states = p.event_shape[1]
    labels = _expand(p, labels, p.event_shape[:1])
    free = ~p._kept | (labels == _ANY_STATE)
    if _is_checked(labels):
        bad = ~free & ((labels < 0) | (labels >= states))
        if bool(bad.any()):
            *batch, step = bad.nonzero()[0].tolist()
            raise ValueError(
                f"target must hold states from 0 to {states - 1}, -1 for any, or -100 to mask a step, "
                f"got {labels[(*batch, step)].item()} at step {step}{_of(batch)}"
            )
    state = torch.arange(states, device=labels.device)
    return (labels.unsqueeze(-1) == state) | free.unsqueeze(-1)


def _check_rows(p: Chain, states: Tensor) -> Tensor:
    if _is_checked(states):
        empty = ~states.any(-1)
        if bool(empty.any()):
            *batch, step = empty.nonzero()[0].tolist()
            raise ValueError(
                f"target must allow a state at every step that is kept, got none at step {step}{_of(batch)}"
            )
    return states


def _states(p: Chain, allowed: Tensor) -> Tensor:
    """The states (..., T, S) that a chain's target allows: all where a step does not count."""
    if allowed.ndim == len(p.batch_shape) + 2:
        return allowed
    first = first_step(p._kept).unsqueeze(-1)
    return _check_rows(p, torch.where(first, allowed[..., 0], allowed.any(-1)) | ~p._kept.unsqueeze(-1))


def _over_edges(p: PathDistribution, allowed: Tensor) -> Tensor:
    """Allowed states as allowed edges; edges as they are."""
    return allowed.unsqueeze(-1) if allowed.ndim < len(p.batch_shape) + len(p.event_shape) else allowed


def _moves_within(p: DTW, allowed: Tensor) -> Tensor:
    """The moves (..., E) within the allowed cells: those of the alignment, where they are one."""
    cells = allowed.flatten(-2).index_select(-1, grid(*p.event_shape, p.device).cell)
    within = torch.cat((cells, allowed.flatten(-2)), -1)
    return torch.where(p._is_path(allowed.float()).unsqueeze(-1), p._edges_of(allowed.float()) > 0, within)


def _check_full(p: PathDistribution, allowed: Tensor) -> Tensor:
    """The target as a 0/1 path in the computing dtype."""
    path = allowed.to(torch.promote_types(p.dtype, torch.float32))
    if _is_checked(path):
        whole = p._is_path(path)
        if not bool(whole.all()):
            batch = (~whole).nonzero()[0].tolist()
            raise ValueError(f"target must be one path from start to end, got another set{_of(batch)}")
    _check_possible(p, allowed)
    return path


def _check_possible(p: PathDistribution, allowed: Tensor) -> None:
    if _is_checked(allowed) and is_readable(p._scores[0]):
        with torch.no_grad():
            impossible = _restricted_value(p._with(p._detached(), Hard()), allowed).isinf()
        if bool(impossible.any()):
            raise ValueError(_why_impossible(p, allowed, impossible))


def _counts(p: PathDistribution, ndim: int) -> Tensor:
    """Where a tensor of ``ndim`` dimensions, the potentials' or a chain's (..., T, S), is looked at; it broadcasts."""
    if isinstance(p, DTW):
        return p._inside
    if not isinstance(p, Chain):
        return torch.ones((), dtype=torch.bool, device=p.device)
    if ndim == len(p.batch_shape) + 2:
        return p._kept.unsqueeze(-1)
    state = torch.arange(p.event_shape[1], device=p.device)
    return p._kept[..., None, None] & ~(first_step(p._kept)[..., None, None] & (state > 0))


# --- programs


def _under(p: PathDistribution, omega: Regularizer) -> PathDistribution:
    return p if type(omega) is type(p.omega) else p._with(p._scores, omega)


def _check_cost(p: PathDistribution, cost: Tensor) -> Tensor:
    """C, of the batch shape and p's event shape or (T, S)."""
    p._check_device("cost", check_tensor("cost", cost))
    forms = [p.batch_shape + p.event_shape]
    if isinstance(p, Chain):
        forms.append(p.batch_shape + p.event_shape[:2])
    for needed in forms:
        if cost.ndim == len(needed) or len(forms) == 1:
            try:
                return cost.expand(needed)
            except RuntimeError:
                pass
    raise ValueError(f"cost must have shape {' or '.join(str(tuple(f)) for f in forms)}, got {tuple(cost.shape)}")


def _augment(p: PathDistribution, cost: Tensor) -> PathDistribution:
    """p with potentials θ + C, for DTW θ − C."""
    cost = _check_cost(p, cost)
    if _is_checked(cost):
        bad = ~((cost >= 0) & (cost < math.inf)) & _counts(p, cost.ndim)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"cost must be finite and at least 0, got {cost[place].item()} at {place}")
    if isinstance(p, DTW):
        return p._with((p.cost - cost,), p.omega)
    by_state = cost.ndim < len(p.batch_shape) + len(p.event_shape)
    if isinstance(p, ScoredChain) and not by_state:
        p = p._dense()
    first, *rest = p._scores
    return p._with((first + (cost.unsqueeze(-1) if by_state and first.ndim > cost.ndim else cost), *rest), p.omega)


def _restricted_value(p: PathDistribution, allowed: Tensor) -> Tensor:
    """DP_Ω over the paths that are allowed; infinite where there is none."""
    if isinstance(p, DTW):
        return _restricted_cost(p, allowed)
    if isinstance(p, Chain) and allowed.ndim == len(p.batch_shape) + 2:
        single = (allowed.sum(-1) == 1) | ~p._kept
        if is_readable(single) and bool(single.all()):
            return _value_alone(p, _score_of(p, allowed.to(torch.uint8).argmax(-1)), p.lengths + (p.lengths > 0))
        return p.constrain(allowed).value
    if isinstance(p, ScoredChain):
        p = p._dense()
    return p._with((p.potentials.masked_fill(~allowed, -math.inf),), p.omega).value


def _value_alone(p: PathDistribution, score: Tensor, nodes: Tensor) -> Tensor:
    """DP_Ω over a single path: its score less what Ω adds at each of its nodes, which have one parent each."""
    vertex = p.omega.penalty(torch.ones(1, dtype=torch.float64, device=p.device))
    return (score - multiply_by_gamma(nodes * vertex, p.omega.gamma)).to(torch.promote_types(p.dtype, torch.float32))


def _score_of(p: Chain, sequence: Tensor) -> Tensor:
    """⟨Y, θ⟩ of states (..., T), whatever they are at masked steps; float64."""
    kept = p._kept
    steps, states = p.event_shape[:2]
    step = torch.arange(steps, device=p.device)
    seen = torch.where(kept, step, -1).cummax(-1).values if steps else step.expand(kept.shape)
    before = torch.cat((torch.full_like(seen[..., :1], -1), seen[..., :-1]), -1)
    previous = torch.where(before >= 0, sequence.gather(-1, before.clamp(min=0)), 0)
    edge = sequence * states + previous
    if not isinstance(p, ScoredChain):
        picked = p.potentials.flatten(-2).gather(-1, edge.unsqueeze(-1)).squeeze(-1)
        return picked.masked_fill(~kept, 0).sum(-1, dtype=torch.float64)
    emissions, transitions, start, end = p._scores
    state, first, last = sequence.unsqueeze(-1), first_step(kept), last_step(kept)
    transitions = transitions.flatten(-2).expand(*p.batch_shape, -1, -1)
    if p._by_step:
        moved = transitions.gather(-1, edge[..., 1:].unsqueeze(-1)).squeeze(-1)
    else:
        moved = transitions.squeeze(-2).gather(-1, edge[..., 1:])
    terms = [(emissions.gather(-1, state).squeeze(-1), kept), (moved, (kept & ~first)[..., 1:])]
    for score, at in ((start, first), (end, last)):
        terms.append((score.expand(*p.batch_shape, states).gather(-1, sequence), at))
    return torch.stack([term.masked_fill(~at, 0).sum(-1, dtype=torch.float64) for term, at in terms]).sum(0)


def _restricted_cost(p: DTW, allowed: Tensor) -> Tensor:
    whole = p._is_path(allowed.float())
    cost = promote_half(p.cost).masked_fill(~p._inside, math.inf).masked_fill(~allowed, 0)
    if p._has_own_moves:
        paid = inner(p._edges_of(allowed.to(cost.dtype)), p._moves(cost, constant=True)).double()
    else:
        paid = cost.flatten(-2).sum(-1, dtype=torch.float64)
    alone = -_value_alone(p, -paid, allowed.flatten(-2).sum(-1) + p.open_end)
    if is_readable(whole) and bool(whole.all()):
        return alone
    return torch.where(whole, alone, p._with((p.cost.masked_fill(~allowed, math.inf),), p.omega).value)


# --- numbers


def _relaxed_rows(p: Chain, states: Tensor, entropic: bool) -> Tensor:
    marginals = promote_half(p.marginals)
    right = marginals.masked_fill(~states, 0).sum(-1)
    if entropic:
        loss = -right.clamp(torch.finfo(right.dtype).tiny, 1).log()
    else:
        # The nearest distribution over the allowed states spreads what lies elsewhere evenly over them.
        wrong = marginals.masked_fill(states, 0).square().sum(-1)
        loss = (wrong + (1 - right).square() / states.sum(-1).clamp(min=1)) / 2
    return loss.masked_fill(states.all(-1), 0).sum(-1)


def _num_rows(name: str, alignment: Tensor) -> int:
    if alignment.ndim < 2:
        needed = "(..., N, M), or (..., L, 2) int64"
        raise ValueError(f"{name} must have shape {needed}, got {tuple(alignment.shape)}")
    if not (alignment.is_floating_point() or alignment.dtype in (torch.bool, torch.int64)):
        needed = "floating point or bool for paths, int64 for index pairs"
        raise ValueError(f"{name} must be {needed}, got dtype {alignment.dtype}")
    if alignment.dtype == torch.int64 and alignment.shape[-1] == 2:
        return int(alignment[..., 0].max()) + 1 if alignment.numel() else 0
    return alignment.shape[-2]


def _columns(alignment: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The mean column of each row (..., rows), and whether the row has any cell."""
    if alignment.dtype == torch.int64 and alignment.shape[-1] == 2:
        i, j = alignment.unbind(-1)
        at = torch.where(i < 0, rows, i)
        zeros = torch.zeros((*i.shape[:-1], rows + 1), dtype=torch.get_default_dtype(), device=i.device)
        weight = zeros.scatter_add(-1, at, torch.ones_like(j, dtype=zeros.dtype))[..., :-1]
        total = zeros.scatter_add(-1, at, j.to(zeros.dtype))[..., :-1]
    else:
        cells = promote_half(alignment if alignment.is_floating_point() else alignment.to(torch.get_default_dtype()))
        cells = torch.nn.functional.pad(cells, (0, 0, 0, rows - cells.shape[-2]))
        weight = cells.sum(-1)
        total = (cells * torch.arange(cells.shape[-1], dtype=cells.dtype, device=cells.device)).sum(-1)
    has = weight > 0
    return total / weight.masked_fill(~has, 1), has


def _check_reduction(p: PathDistribution, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")
    if reduction == "token_mean" and not isinstance(p, Chain):
        raise ValueError(f"reduction='token_mean' is for chains, got a {type(p).__name__}")


def _reduce(p: PathDistribution, loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if not isinstance(p, Chain):
        return loss.mean()
    count = p.lengths.sum() if reduction == "token_mean" else (p.lengths > 0).sum()
    return loss.sum() / count.clamp(min=1)


# --- messages


def _of(batch: list[int]) -> str:
    """Which element of the batch, by its index."""
    return f" of sequence {batch[0] if len(batch) == 1 else tuple(batch)}" if batch else ""


def _why_impossible(p: PathDistribution, allowed: Tensor, impossible: Tensor) -> str:
    """A sentence on the first target that p cannot take."""
    batch = impossible.nonzero()[0].tolist()
    place = _of(batch)
    if isinstance(p, Chain):
        place = f" at step {_dead_end(p, allowed, batch)}" + place
        return f"target must be a path that p can take, but none of its paths has a finite score{place}"
    if isinstance(p, DTW):
        closed = allowed & (~p._inside | (p.cost == math.inf))
        at = closed[tuple(batch)].nonzero().tolist()
        place = (f" at cell {tuple(at[0])}" if at else "") + place
        return f"target must be an alignment that p can take, but it has none of finite cost{place}"
    return f"target must be a path that p can take, but none of its paths has a finite score{place}"


def _dead_end(p: Chain, allowed: Tensor, batch: list[int]) -> int:
    """The first step of one sequence that no allowed path reaches."""
    flat = sum(i * math.prod(p.batch_shape[d + 1 :]) for d, i in enumerate(batch))
    scores = [p._flatten(score.detach(), dims) for score, dims in zip(p._scores, p._own_dims, strict=True)]
    one = [score[flat : flat + 1] if score.shape[0] > 1 else score for score in scores]
    theta = dense(one, [i[flat : flat + 1] for i in p._index]) if isinstance(p, ScoredChain) else one[0]
    exists = (theta.squeeze(0) > -math.inf) & _over_edges(p, allowed)[tuple(batch)]
    kept = p._kept[tuple(batch)].nonzero().flatten().tolist()
    reached = torch.arange(exists.shape[-1], device=p.device) == 0
    for step in kept:
        reached = (exists[step] & reached).any(-1)
        if not bool(reached.any()):
            return int(step)
    return int(kept[-1])
