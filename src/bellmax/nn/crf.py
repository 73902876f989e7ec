"""A linear-chain conditional random field as a layer, under any Ω (sections 4.1 and 5.2 of the paper)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bellmax.inputs import Lengths, Mask, answers_near_misses, check_choice, check_tensor
from bellmax.losses.expectations import relaxed_of
from bellmax.losses.margins import surrogate_of
from bellmax.nn.smoothed import Smoothed
from bellmax.nn.tags import TagConstraints, TagNames
from bellmax.regularizers import Regularizer
from bellmax.structures.chain import Chain, ScoredChain
from bellmax.tensors import Gamma

_LOSSES = "surrogate", "relaxed"


class CRF(Smoothed):
    """A linear-chain CRF layer, which learns transition scores, computes a loss and decodes tags.

    The score of a sequence of tags is the sum of its emissions and of the scores in three parameters.
    ``transition_scores`` (S, S) ``[current, previous]`` scores adjacent tags. ``start_scores`` (S,) and ``end_scores``
    (S,) score the first and the last tag. The parameters are initialized to 0. By default, the layer is the usual CRF,
    and its loss is the negative log-likelihood.

    In all methods, ``mask`` is a tensor (..., T), bool or 0/1 integers, True at the steps to keep. False values may be
    between True values (for sub-words) or at the beginning (for left padding). The layer removes masked steps, so the
    steps before and after them become neighbors. Instead of a mask, you can pass ``lengths``, integers of the batch
    shape. The layer then keeps that many steps at the beginning of each sequence. Emissions at masked steps are
    ignored.

    Args:
        num_tags: The number S of tags.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`~bellmax.Regularizer`. If γ of the regularizer is an ``nn.Parameter``, it is learned.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        constraints: The result of :func:`tag_constraints`, or your own triple of bool tensors, True where allowed:
            transitions (S, S) ``[current, previous]``, first tags (S,) and last tags (S,). Forbidden sequences are
            never decoded and have probability 0. ``state_dict`` does not contain the constraints. Pass them again if
            you load a model. Default None: all sequences are allowed.
        loss: "surrogate" (the default) for :func:`bellmax.losses.surrogate`, or "relaxed" for
            :func:`bellmax.losses.relaxed`.

    >>> from bellmax.nn import CRF, tag_constraints
    >>> labels = ["O", "B-PER", "I-PER"]
    >>> crf = CRF(3, constraints=tag_constraints(labels, scheme="IOB2"))
    >>> emissions = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])  # (T, S)
    >>> emissions.argmax(-1)  # I-PER after O, which IOB2 forbids
    tensor([0, 2, 0])
    >>> crf.decode(emissions)
    tensor([1, 2, 0])
    >>> crf(emissions, torch.tensor([1, 2, 0]))
    tensor(0.8374, grad_fn=...)
    """

    transition_scores: nn.Parameter
    start_scores: nn.Parameter
    end_scores: nn.Parameter

    @answers_near_misses
    def __init__(
        self,
        num_tags: int,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        constraints: TagConstraints | Sequence[Tensor] | None = None,
        loss: str = "surrogate",
    ) -> None:
        super().__init__(omega, gamma)
        if num_tags < 1:
            raise ValueError(f"num_tags must be at least 1, got {num_tags}")
        check_choice("loss", loss, _LOSSES)
        self.num_tags = num_tags
        self.loss = loss
        self._allowed = _check_constraints(constraints, num_tags)
        self._tags = None if constraints is None else TagNames(constraints)
        self.transition_scores = nn.Parameter(torch.zeros(num_tags, num_tags))
        self.start_scores = nn.Parameter(torch.zeros(num_tags))
        self.end_scores = nn.Parameter(torch.zeros(num_tags))

    def reset_parameters(self) -> None:
        """Set all transition, start and end scores to 0 and γ to its initial value.

        You need this method if the layer was built on the meta device, as in models of the library ``transformers``. If
        a checkpoint does not contain the weights of the layer, ``transformers`` calls the method ``_init_weights`` of
        the model. Define it as follows:

            def _init_weights(self, module):
                super()._init_weights(module)
                if isinstance(module, CRF):
                    module.reset_parameters()
        """
        super().reset_parameters()
        for parameter in (self.transition_scores, self.start_scores, self.end_scores):
            nn.init.zeros_(parameter)

    @property
    def allowed_transitions(self) -> Tensor:
        """Mask (S, S) ``[current, previous]``, True if the current tag may follow the previous tag."""
        return self._allowed.transitions.to(self.transition_scores.device)

    @property
    def allowed_starts(self) -> Tensor:
        """Mask (S,), True for each tag with which a sequence may start."""
        return self._allowed.starts.to(self.transition_scores.device)

    @property
    def allowed_ends(self) -> Tensor:
        """Mask (S,), True for each tag with which a sequence may end."""
        return self._allowed.ends.to(self.transition_scores.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state, without the constraints that versions before 0.2 saved. Warn if they differ from this CRF's."""
        saved = {name: state_dict.pop(f"{prefix}allowed_{name}", None) for name in TagConstraints._fields}
        ignored = [
            f"{prefix}allowed_{name}"
            for name, allowed in saved.items()
            if allowed is not None and not allowed.is_meta and not allowed.cpu().equal(getattr(self._allowed, name))
        ]
        if ignored:
            warnings.warn(
                f"{', '.join(ignored)} of the state_dict are ignored: the CRF keeps the constraints it was built with",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        constraints = "" if self._tags is None else f", constraints={self._tags.scheme or 'custom'!r}"
        return f"{self.num_tags}, {super().extra_repr()}, loss={self.loss!r}{constraints}"

    @answers_near_misses
    def distribution(
        self, emissions: Tensor, *, mask: Mask | None = None, lengths: Lengths | None = None
    ) -> ScoredChain:
        """Return the distribution over tag sequences, a :class:`bellmax.Chain`, for emissions (..., T, S)."""
        if check_tensor("emissions", emissions).ndim < 2 or emissions.shape[-1] != self.num_tags:
            raise ValueError(f"emissions must have shape (..., T, {self.num_tags}), got {tuple(emissions.shape)}")
        scores: tuple[Tensor, ...] = self.transition_scores, self.start_scores, self.end_scores
        if self._tags is not None:
            masks = self.allowed_transitions, self.allowed_starts, self.allowed_ends
            scores = tuple(score.masked_fill(~allowed, -math.inf) for score, allowed in zip(scores, masks, strict=True))
        transitions, start, end = scores
        p = Chain.from_scores(
            emissions, transitions, start=start, end=end, lengths=lengths, mask=mask, omega=self.omega
        )
        p._tags = self._tags
        return p

    @answers_near_misses
    def forward(
        self,
        emissions: Tensor,
        tags: Tensor,
        *,
        mask: Mask | None = None,
        lengths: Lengths | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the loss of the gold tags, which is at least 0.

        Each sequence has one loss, and ``reduction`` combines them. Raises ``ValueError`` if the constraints forbid the
        tags. On a GPU or under ``torch.compile``, the tags are not checked. Forbidden tags then have an infinite loss.

        Args:
            emissions: The score (..., T, S) of each tag at each step.
            tags: The gold (correct) tags, integers (..., T), −1 where the tag is unknown. Alternatively, a bool tensor
                (..., T, S) that is True for each tag that may be right.
            mask: A mask of the steps to keep, bool or 0/1 integers (..., T). Default None: all steps.
            lengths: The number of steps to keep at the beginning of each sequence, integers of the batch shape. Pass
                ``lengths`` or ``mask``, not both.
            ignore_index: The integer in ``tags`` that masks a step, as a ``mask`` that is False there. Default −100.
            reduction: "none" for one loss per sequence, "mean" (the default) or "sum" over the sequences, or
                "token_mean" for the sum divided by the number of unmasked steps. If all steps of a sequence are masked,
                its loss is 0, and the sequence does not count in the mean.

        >>> crf = CRF(2)
        >>> emissions = torch.tensor([[[1.0, 0.0], [0.0, 5.0], [0.0, 1.0]]])
        >>> crf(emissions, torch.tensor([[0, -100, 1]]), reduction="none")  # the second step is masked
        tensor([0.6265], grad_fn=...)
        >>> crf(emissions[:, [0, 2]], torch.tensor([[0, 1]]), reduction="none")
        tensor([0.6265], grad_fn=...)
        >>> crf(emissions, torch.tensor([[-1, 1, -1]]), reduction="none")  # only the second tag is known
        tensor([0.0067], grad_fn=...)
        """
        p = self.distribution(emissions, mask=mask, lengths=lengths)
        self._check_tags(emissions, tags)
        if self.loss == "relaxed":
            return relaxed_of(p, tags, reduction, "tags", ignore_index)
        return surrogate_of(p, tags, None, reduction, "tags", ignore_index)

    def _check_tags(self, emissions: Tensor, tags: Tensor) -> None:
        """Raise ``ValueError`` if dtype and shape of the tags do not match the emissions."""
        shape = check_tensor("tags", tags).shape
        if tags.dtype == torch.bool:
            if shape != emissions.shape:
                raise ValueError(
                    f"bool tags must have the shape of the emissions, {tuple(emissions.shape)}, got {tuple(shape)}"
                )
        elif tags.is_floating_point() or tags.is_complex() or shape != emissions.shape[:-1]:
            needed = f"integers of shape {tuple(emissions.shape[:-1])} or bool of shape {tuple(emissions.shape)}"
            raise ValueError(f"tags must be {needed}, got {tags.dtype} of shape {tuple(shape)}")

    @answers_near_misses
    def decode(self, emissions: Tensor, *, mask: Mask | None = None, lengths: Lengths | None = None) -> Tensor:
        """Return the highest-scoring sequence of tags, (..., T) int64.

        Tags are −1 at masked steps. If the constraints forbid every sequence, all tags are −1.
        """
        return self.distribution(emissions, mask=mask, lengths=lengths).decode()

    @answers_near_misses
    def topk(
        self, emissions: Tensor, k: int, *, mask: Mask | None = None, lengths: Lengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the k best sequences, best first: scores (..., k), without gradient, and tags (..., k, T) int64.

        Tags are −1 at masked steps. If fewer than k sequences are allowed, the remaining entries of the scores are −∞,
        and the remaining tags are −1.

        >>> crf = CRF(2)
        >>> scores, tags = crf.topk(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), 2)
        >>> scores, tags
        (tensor([4., 3.]), tensor([[0, 1],
                [1, 1]]))
        """
        return self.distribution(emissions, mask=mask, lengths=lengths).topk_decoded(k)

    @answers_near_misses
    def marginals(self, emissions: Tensor, *, mask: Mask | None = None, lengths: Lengths | None = None) -> Tensor:
        """Return the probability of each tag at each step, (..., T, S), 0 at masked steps. Differentiable."""
        return self.distribution(emissions, mask=mask, lengths=lengths).marginals


def _check_constraints(constraints: TagConstraints | Sequence[Tensor] | None, num_tags: int) -> TagConstraints:
    """Return a copy of the constraints on the CPU, all True if ``constraints`` is None.

    Raises ``ValueError`` if they are not three bool tensors for ``num_tags`` tags.
    """
    shapes = {"transitions": (num_tags, num_tags), "starts": (num_tags,), "ends": (num_tags,)}
    if constraints is None:
        return TagConstraints(*(torch.ones(shape, dtype=torch.bool, device="cpu") for shape in shapes.values()))
    if not isinstance(constraints, tuple | list) or len(constraints) != 3:
        got = f"{len(constraints)} entries" if isinstance(constraints, tuple | list) else f"{constraints!r}"
        raise ValueError(f"constraints must be a triple (transitions, starts, ends), got {got}")
    for (name, shape), allowed in zip(shapes.items(), constraints, strict=True):
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != shape:
            is_tensor = isinstance(allowed, Tensor)
            got = f"{allowed.dtype} of shape {tuple(allowed.shape)}" if is_tensor else f"a {type(allowed).__name__}"
            raise ValueError(
                f"{name} of constraints must be a bool tensor of shape {shape} for {num_tags} tags, got {got}"
            )
        if allowed.is_meta:
            raise ValueError(
                f"{name} of constraints must have values, got a tensor on the meta device: make it with device='cpu'"
            )
    return TagConstraints(*(allowed.detach().to("cpu", copy=True) for allowed in constraints))
