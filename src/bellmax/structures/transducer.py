"""Transducers: sequences of blanks and labels over frames (Graves, 2012) under any Ω."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.programs.values import of_sequence
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.ctc import PADDED
from bellmax.structures.joint import finite, log_softmax_at, log_sum_of_products
from bellmax.structures.lattice import Lattice, LatticePaths, Move, cell, check_labels, common_batch, read_lengths, row
from bellmax.tensors import Gamma, promote_half, widen
from bellmax.transforms import is_checked, is_readable

_BLANK, _EMIT = 0, 1  # moves

# A node (t, u) has read t frames and emitted u labels. No label follows the last blank.
_LATTICE = Lattice(
    [Move(1, 0, score=cell("blank", -1, 0)), Move(0, 1, score=cell("emit", 0, -1), where=row("_frames"))]
)


class Transducer(LatticePaths):
    """A distribution over the alignments of U labels with T frames, given the scores of blanks and of labels.

    At each frame a path emits some labels, or none, and then a blank, which leads to the next frame; the last step is
    the blank of the last frame. As an event it is a 0/1 tensor (T, U + 1) of its blanks ``[frame, labels before]``,
    which determine the labels between. Under negentropy, for normalised scores, ``value`` is log p(labels | frames).
    ``expected_path`` is the probability of each blank, and ``gradient["emit"]`` (..., T, U) that of each label at each
    frame; both are differentiable.

    Args:
        blank: (..., T, U + 1), the score of the blank at each frame after so many labels; −∞ forbids one.
        emit: (..., T, U), the score of label u at each frame.
        lengths: (frames, labels), each integers of the batch shape or a number: frames from 1 to T, labels from 0 to U.
            The rest is padding: it is ignored, may hold NaN and gets no gradient.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    >>> import bellmax as bx
    >>> p = bx.Transducer(torch.full((3, 2), 0.5).log(), torch.full((3, 1), 0.5).log())
    >>> int(p.num_paths), p.value.exp()             # the label is emitted at one of three frames
    (3, tensor(0.1875))
    >>> p.gradient["emit"].squeeze(-1)
    tensor([0.3333, 0.3333, 0.3333])
    """

    _has_unique_paths = True

    @answers_near_misses
    def __init__(
        self,
        blank: Tensor,
        emit: Tensor,
        *,
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("blank", blank).shape
        if len(shape) < 2 or 0 in shape[-2:]:
            raise ValueError(f"blank must have shape (..., T, U + 1) with T >= 1, got {tuple(shape)}")
        frames, labels = shape[-2], shape[-1] - 1
        if check_tensor("emit", emit).shape[-2:] != (frames, labels):
            raise ValueError(f"emit must have shape (..., {frames}, {labels}), got {tuple(emit.shape)}")
        own = read_lengths("blank", (blank, 2), lengths, (1, 0), (frames, labels))
        last = torch.tensor(frames, device=blank.device) if own is None else own[0]
        within = torch.arange(frames + 1, device=blank.device) < last.unsqueeze(-1)
        tensors = {"blank": blank, "emit": emit, "_frames": within}
        counted = None if own is None else (own[0] + 1, own[1] + 1)
        super().__init__(_LATTICE, tensors, lengths=counted, omega=omega, gamma=gamma)

    @classmethod
    @answers_near_misses
    def from_logits(
        cls,
        logits: Tensor,
        targets: Tensor,
        *,
        blank: int = 0,
        normalized: bool = False,
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> Transducer:
        """A transducer from the output of its joint network, normalised over the classes here.

        Beside the joint and its gradient, memory is a few numbers for each frame and label: no log-softmax is built.

        Args:
            logits: (..., T, U + 1, V).
            targets: integers (..., U), the labels, without blanks; past their length anything.
            blank: the class of the blank.
            normalized: whether logits are log-probabilities already, or scores that are taken as they are.
            lengths: (frames, labels), as in :class:`Transducer`.
            omega: of the paths, as in :class:`Transducer`; the classes are normalised by a softmax.
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.

        >>> import bellmax as bx
        >>> logits = torch.zeros(4, 3, 5)                  # 4 frames, 2 labels, 5 classes
        >>> p = bx.Transducer.from_logits(logits, torch.tensor([3, 1]))
        >>> p.value                                        # 10 paths of 6 steps
        tensor(-7.3540)
        """
        if check_tensor("logits", logits).ndim < 3 or 0 in logits.shape[-3:]:
            raise ValueError(f"logits must have shape (..., T, U + 1, V), got {tuple(logits.shape)}")
        if not logits.is_floating_point():
            raise ValueError(f"logits must be floating point, got dtype {logits.dtype}")
        frames, _, classes = logits.shape[-3:]
        own = read_lengths("logits", (logits, 3), lengths, (1, 0), (frames, logits.shape[-2] - 1))
        labels, batch = _read_targets(targets, {"logits": (logits, 3)}, logits.shape[-2] - 1, classes, blank, own)
        logits, labels = logits.expand(batch + logits.shape[-3:]), labels.expand(*batch, labels.shape[-1])
        at = pad(labels, (0, 1)).unsqueeze(-2).expand(logits.shape[:-1])
        if normalized:
            of_blank, of_label = logits[..., blank], logits.gather(-1, at.unsqueeze(-1)).squeeze(-1)
        else:
            of_blank, of_label = log_softmax_at(logits, at, blank)
        return cls(of_blank, of_label[..., :-1], lengths=lengths, omega=omega, gamma=gamma)

    @classmethod
    @answers_near_misses
    def from_additive(
        cls,
        am: Tensor,
        lm: Tensor,
        targets: Tensor,
        *,
        blank: int = 0,
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> Transducer:
        """A transducer whose joint is a sum, logits[t, u] = am[t] + lm[u], which is never built.

        Its normaliser is a product of matrices of exponentials. A first pass that finds where to prune, as in k2.

        Args:
            am: (..., T, V), of the frames.
            lm: (..., U + 1, V), of the labels before.
            targets: integers (..., U), the labels, without blanks; past their length anything.
            blank: the class of the blank.
            lengths: (frames, labels), as in :class:`Transducer`.
            omega: of the paths, as in :class:`Transducer`; the classes are normalised by a softmax.
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.

        """
        if check_tensor("am", am).ndim < 2 or 0 in am.shape[-2:]:
            raise ValueError(f"am must have shape (..., T, V), got {tuple(am.shape)}")
        if check_tensor("lm", lm).ndim < 2 or not lm.shape[-2] or lm.shape[-1] != am.shape[-1]:
            raise ValueError(f"lm must have shape (..., U + 1, {am.shape[-1]}), got {tuple(lm.shape)}")
        own = read_lengths("am", (am, 2), lengths, (1, 0), (am.shape[-2], lm.shape[-2] - 1))
        named = {"am": (am, 2), "lm": (lm, 2)}
        labels, batch = _read_targets(targets, named, lm.shape[-2] - 1, am.shape[-1], blank, own)
        am, lm = promote_half(am), promote_half(lm)
        if own is not None:  # NaN of padding must not reach the gradient of the rest
            am = am.masked_fill(_is_past(am.shape[-2], own[0]), 0)
            lm = lm.masked_fill(_is_past(lm.shape[-2], own[1] + 1), 0)
        norm = finite(log_sum_of_products(am, lm))
        of_blank = am[..., blank].unsqueeze(-1) + lm[..., blank].unsqueeze(-2) - norm
        labels = labels.expand(*batch, labels.shape[-1])
        frames = am.expand(*batch, *am.shape[-2:]).gather(-1, labels.unsqueeze(-2).expand(*batch, am.shape[-2], -1))
        before = lm.expand(*batch, *lm.shape[-2:])[..., :-1, :].gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        emit = frames + before.unsqueeze(-2) - norm[..., :-1]
        return cls(of_blank, emit, lengths=lengths, omega=omega, gamma=gamma)

    @property
    def lengths(self) -> Tensor:
        """(..., 2) int64: the frames and the labels of each sequence."""
        return self._lengths - 1

    # --- alignments

    def best_frames(self) -> Tensor:
        """The frame that emits each label on the best path, (..., U) int64; −1 past the labels, or without a path."""
        emitted = self._under(Hard()).gradient["emit"]
        return torch.where(emitted.any(-2), emitted.argmax(-2), -1)

    def prune(self, s_range: int) -> Tensor:
        """For each frame the first of ``s_range`` neighbouring numbers of labels that hold most of the expected path.

        (..., T) int64. A larger joint is then needed at ``first + arange(s_range)`` alone. The first frame has 0, the
        last one ends with all labels, and neighbouring ranges overlap, so that paths remain. After k2's pruned
        transducer (Kuang et al., 2022). Past the last frame, the range is that of the last.

        >>> import bellmax as bx
        >>> am, lm = torch.zeros(6, 4), torch.zeros(5, 4)
        >>> bx.Transducer.from_additive(am, lm, torch.tensor([1, 2, 3, 1])).prune(3)
        tensor([0, 0, 1, 2, 2, 2])
        """
        (frames, columns), (own_frames, own_labels) = self.event_shape, self.lengths.unbind(-1)
        needed = 1 + -(-own_labels // own_frames)  # so that ranges overlap and reach the end
        if s_range < 1 or (is_readable(needed) and bool((needed > s_range).any())):
            least = int(needed.max()) if needed.numel() and is_readable(needed) else 1
            raise ValueError(f"s_range must be at least {least} for so many labels to a frame, got {s_range}")
        with torch.no_grad():
            mass = {name: pad(widen(g).cumsum(-1), (1, 0)) for name, g in self.gradient.items()}
        last = (own_labels + 1 - s_range).clamp(min=0).unsqueeze(-1)
        starts = torch.arange(columns, device=self.device)
        within = mass["blank"].index_select(-1, (starts + s_range).clamp(max=columns)) - mass["blank"][..., :-1]
        between = (starts + s_range - 1).clamp(max=columns - 1)
        within = within + mass["emit"].index_select(-1, between) - mass["emit"]
        first = within.masked_fill(starts > last.unsqueeze(-1), -1).argmax(-1)
        frame = torch.arange(frames, device=self.device)
        first = torch.where(frame >= (own_frames - 1).unsqueeze(-1), last, first).cummax(-1).values
        reach = frame * (s_range - 1)
        first = (first - reach).flip(-1).cummax(-1).values.flip(-1) + reach
        return torch.minimum(first, reach).clamp(max=last)


def _is_past(size: int, length: Tensor) -> Tensor:
    """(..., size, 1): the entries past the length."""
    return (torch.arange(size, device=length.device) >= length.unsqueeze(-1)).unsqueeze(-1)


def _read_targets(
    targets: Tensor,
    scores: dict[str, tuple[Tensor, int]],
    size: int,
    classes: int,
    blank: int,
    lengths: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, torch.Size]:
    """Labels (..., U) int64, 0 past their length, each one of the classes and not the blank; and the batch shape."""
    if check_tensor("targets", targets).ndim < 1 or targets.shape[-1] != size:
        hint = f". If they are concatenated, pad them: {PADDED}" if targets.ndim == 1 else ""
        raise ValueError(
            f"targets must have shape (..., {size}), one label less than scores, got {tuple(targets.shape)}{hint}"
        )
    if not 0 <= blank < classes:
        raise ValueError(f"blank must be from 0 to {classes - 1}, got {blank}")
    device = next(iter(scores.values()))[0].device
    if targets.device != device:
        raise ValueError(f"targets must be on the device of the scores, {device}, got {targets.device}")
    of_lengths = {f"lengths[{n}]": (own, 0) for n, own in enumerate(lengths or ())}
    batch = common_batch(scores | {"targets": (targets, 1)} | of_lengths)
    check_labels("targets", targets, None if lengths is None else lengths[1], classes)
    within = torch.arange(size, device=device) < (size if lengths is None else lengths[1].unsqueeze(-1))
    if is_checked(targets):
        bad = (targets == blank) & within
        if bool(bad.any()):
            *sequence, place = bad.nonzero()[0].tolist()
            where = f"label {place}{of_sequence(sequence)}"
            raise ValueError(f"targets must not hold the blank {blank}, got it at {where}")
    return torch.where(within, targets, 0).to(torch.int64), batch
