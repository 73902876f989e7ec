"""A linear-chain conditional random field as a layer, under any Ω (sections 4.1 and 5.2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import bellmax.losses as losses
from bellmax.backends.reference.chain import check_index
from bellmax.chain import Chain, ScoredChain
from bellmax.losses import _check_reduction, _reduce, _score_of, _value_alone
from bellmax.nn.pooling import Smoothed
from bellmax.nn.tags import TagConstraints
from bellmax.regularizers import Regularizer, is_readable

_LOSSES = "surrogate", "relaxed"


class CRF(Smoothed):
    """Scores of tags at each step in, a loss out: it learns which tag follows which, and decodes with it.

    A sequence of tags scores its emissions, plus ``transition_scores`` (S, S) ``[current, previous]`` for each
    neighbouring pair, plus ``start_scores`` (S,) and ``end_scores`` (S,) for the first and the last tag. All start
    at 0. With ``omega="negentropy"`` and ``loss="surrogate"`` it is the CRF that the name usually means, and the loss
    its negative log-likelihood.

    Everywhere, ``mask`` is bool (..., T), True at the steps that count: it may have holes (sub-words) and begin with
    False (left padding), and the steps that count are taken as neighbours. Or ``lengths``, int64 of the batch shape,
    says how many of the first steps count. Emissions at other steps are not looked at. The loss needs a step that
    counts in every sequence; the other methods do not.

    Args:
        num_tags: S.
        omega: a :class:`~bellmax.Regularizer`, or "negentropy", "l2", "hard". A γ that is a parameter is learnt.
        constraints: what :func:`tag_constraints` gives, or such a triple of your own: bool transitions (S, S)
            ``[current, previous]``, starts (S,) and ends (S,), True where allowed. What is forbidden is never decoded
            and has probability 0. They are buffers (``allowed_transitions``, ``allowed_starts``, ``allowed_ends``), and
            so are part of the ``state_dict``.
        loss: "surrogate" for :func:`bellmax.losses.surrogate`, "relaxed" for :func:`bellmax.losses.relaxed`.

    >>> from bellmax.nn import CRF, tag_constraints
    >>> labels = ["O", "B-PER", "I-PER"]
    >>> crf = CRF(3, constraints=tag_constraints(labels, scheme="IOB2"))
    >>> emissions = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])  # (T, S)
    >>> emissions.argmax(-1)  # I-PER after O, which IOB2 does not have
    tensor([0, 2, 0])
    >>> crf.decode(emissions)
    tensor([1, 2, 0])
    >>> crf(emissions, torch.tensor([1, 2, 0]))
    tensor(0.8374, grad_fn=...)
    """

    transition_scores: nn.Parameter
    start_scores: nn.Parameter
    end_scores: nn.Parameter
    allowed_transitions: Tensor
    allowed_starts: Tensor
    allowed_ends: Tensor

    def __init__(
        self,
        num_tags: int,
        *,
        omega: str | Regularizer = "negentropy",
        constraints: TagConstraints | Sequence[Tensor] | None = None,
        loss: str = "surrogate",
    ) -> None:
        super().__init__(omega)
        if num_tags < 1:
            raise ValueError(f"num_tags must be at least 1, got {num_tags}")
        if loss not in _LOSSES:
            raise ValueError(f"loss must be one of {', '.join(map(repr, _LOSSES))}, got {loss!r}")
        shapes = {"transitions": (num_tags, num_tags), "starts": (num_tags,), "ends": (num_tags,)}
        if constraints is None:
            constraints = [torch.ones(shape, dtype=torch.bool) for shape in shapes.values()]
        if len(constraints) != 3:
            raise ValueError(f"constraints must hold transitions, starts and ends, got {len(constraints)} entries")
        for (name, shape), allowed in zip(shapes.items(), constraints, strict=True):
            if allowed.dtype != torch.bool or allowed.shape != shape:
                got = f"{allowed.dtype} of shape {tuple(allowed.shape)}"
                raise ValueError(f"{name} of constraints must be bool of shape {shape} for {num_tags} tags, got {got}")
            self.register_buffer(f"allowed_{name}", allowed.clone())
        self.num_tags = num_tags
        self.loss = loss
        self.transition_scores = nn.Parameter(torch.zeros(num_tags, num_tags))
        self.start_scores = nn.Parameter(torch.zeros(num_tags))
        self.end_scores = nn.Parameter(torch.zeros(num_tags))

    def extra_repr(self) -> str:
        return f"{self.num_tags}, {super().extra_repr()}, loss={self.loss!r}"

    def distribution(
        self, emissions: Tensor, *, mask: Tensor | None = None, lengths: Tensor | None = None
    ) -> ScoredChain:
        """The distribution over sequences of tags, for emissions (..., T, S): to sample from, entropy, and so on."""
        if emissions.ndim < 2 or emissions.shape[-1] != self.num_tags:
            raise ValueError(f"emissions must have shape (..., T, {self.num_tags}), got {tuple(emissions.shape)}")
        return Chain.from_scores(
            emissions,
            self.transition_scores.masked_fill(~self.allowed_transitions, -math.inf),
            start=self.start_scores.masked_fill(~self.allowed_starts, -math.inf),
            end=self.end_scores.masked_fill(~self.allowed_ends, -math.inf),
            lengths=lengths,
            mask=mask,
            omega=self.omega,
        )

    def forward(
        self,
        emissions: Tensor,
        tags: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """The loss of the tags, >= 0, one number per sequence.

        Args:
            emissions: (..., T, S), the score of each tag at each step.
            tags: int64 (..., T), or for partial annotation bool (..., T, S), True for each tag that may be the right
                one: a step of nothing but True says nothing. Tags that the constraints forbid are a ValueError; while
                compiling and on a GPU, where values are not looked at, the loss is infinite instead.
            mask: bool (..., T), True at the steps that count.
            lengths: instead, int64 of the batch shape.
            ignore_index: a step of this tag does not count, exactly as if its mask were False.
            reduction: "mean" and "sum" over sequences, or "none" for the batch shape.

        >>> crf = CRF(2)
        >>> emissions = torch.tensor([[[1.0, 0.0], [0.0, 5.0], [0.0, 1.0]]])
        >>> crf(emissions, torch.tensor([[0, -100, 1]]), reduction="none")  # the step between does not count
        tensor([0.6265], grad_fn=...)
        >>> crf(emissions[:, [0, 2]], torch.tensor([[0, 1]]), reduction="none")
        tensor([0.6265], grad_fn=...)
        >>> either = torch.tensor([[[True, True], [False, True], [True, True]]])  # only the second tag is known
        >>> crf(emissions, either, reduction="none")
        tensor([0.0067], grad_fn=...)
        """
        _check_reduction(reduction)
        if not isinstance(tags, Tensor):
            raise ValueError(
                f"tags must be a tensor of shape {tuple(emissions.shape[:-1])}, got a {type(tags).__name__}"
            )
        p = self.distribution(emissions, mask=mask, lengths=lengths)
        p._check_device("tags", tags)
        readable = emissions.device.type == "cpu" and is_readable(emissions) and is_readable(tags)
        if readable:
            check_index([p._flatten(emissions, 2)], p._index)
        if tags.dtype == torch.bool:
            if tags.shape != emissions.shape:
                raise ValueError(f"tags of sets must have shape {tuple(emissions.shape)}, got {tuple(tags.shape)}")
            gold = p.constrain(tags | ~p._kept.unsqueeze(-1)).value
        else:
            if tags.dtype != torch.int64 or tags.shape != emissions.shape[:-1]:
                got = f"{tags.dtype} of shape {tuple(tags.shape)}"
                raise ValueError(f"tags must be int64 of shape {tuple(emissions.shape[:-1])} or bool sets, got {got}")
            p._set_steps(None, p._kept & (tags != ignore_index))
            outside = p._kept & ((tags < 0) | (tags >= self.num_tags))
            if readable and bool(outside.any()):
                index = outside.nonzero()[0].tolist()
                raise ValueError(
                    f"tags must be from 0 to {self.num_tags - 1}, or {ignore_index} to ignore a step, "
                    f"got {int(tags[tuple(index)])} at {_place(index)}"
                )
            score = _score_of(p, tags.masked_fill(~p._kept | outside, 0)).masked_fill(outside.any(-1), -math.inf)
            gold = _value_alone(p, score, p.lengths + (p.lengths > 0))
        if readable and bool((p.lengths == 0).any()):
            index = (p.lengths == 0).nonzero()[0].tolist()
            where = f" of sequence {index[0] if len(index) == 1 else tuple(index)}" if index else ""
            raise ValueError(f"mask, lengths and tags must leave a step to count, got none{where}")
        forbidden = gold == -math.inf
        if readable and bool(forbidden.any()):
            raise ValueError(self._why_forbidden(p, tags, forbidden))
        if self.loss == "relaxed":
            loss = losses.relaxed(p, tags, reduction="none")
        else:
            loss = p.value - gold  # as losses.surrogate, which needs a sweep to know what one sequence is worth
            loss = torch.where(loss < 0, loss - loss.detach(), loss)  # rounding; the gradient stays
        return _reduce(loss.masked_fill(forbidden, math.inf), reduction)

    def decode(self, emissions: Tensor, *, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """The tags of the highest score, (..., T) int64; −1 at steps that do not count, or if none is allowed."""
        return self.distribution(emissions, mask=mask, lengths=lengths).best_sequence()

    def topk(
        self, emissions: Tensor, k: int, *, mask: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k best sequences: scores (..., k), best first, without gradient, and tags (..., k, T) as from decode.

        Past the number of allowed sequences, scores are −∞ and tags −1.

        >>> crf = CRF(2)
        >>> scores, tags = crf.topk(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), 2)
        >>> scores, tags
        (tensor([4., 3.]), tensor([[0, 1],
                [1, 1]]))
        """
        return self.distribution(emissions, mask=mask, lengths=lengths).topk_sequences(k)

    def marginals(self, emissions: Tensor, *, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Probability of each tag at each step, (..., T, S), differentiable; 0 at steps that do not count."""
        return self.distribution(emissions, mask=mask, lengths=lengths).marginals

    def _why_forbidden(self, p: ScoredChain, tags: Tensor, forbidden: Tensor) -> str:
        """A sentence on the first step of the first forbidden sequence by which nothing is left of its ``tags``."""
        batch = tuple(forbidden.nonzero()[0].tolist())
        steps = p._kept[batch].nonzero().flatten().tolist()
        finite = p.emissions[batch] > -math.inf
        possible = self.allowed_starts
        for step in steps:
            if step > steps[0]:
                possible = (self.allowed_transitions & possible).any(-1)
            if step == steps[-1]:
                possible = possible & self.allowed_ends
            given = tags[batch][step]
            wanted = given if tags.dtype == torch.bool else torch.arange(self.num_tags) == given
            possible = possible & wanted & finite[step]
            if not bool(possible.any()):
                break
        named = f"tag {int(given)}" if tags.dtype != torch.bool else f"tags {wanted.nonzero().flatten().tolist()}"
        return (
            f"tags must be a sequence of finite score that the constraints allow, "
            f"got {named} at {_place((*batch, step))}, where none is left"
        )


def _place(index: Sequence[int]) -> str:
    *batch, step = index
    sequence = batch[0] if len(batch) == 1 else tuple(batch)
    return f"step {step} of sequence {sequence}" if batch else f"step {step}"
