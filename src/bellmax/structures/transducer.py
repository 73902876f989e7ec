"""RNN transducers (Graves, 2012) under any Ω: alignments of labels with frames by blanks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import Fault, are_integers
from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.checks import of_sequence
from bellmax.regularizers import Regularizer
from bellmax.structures.ctc import PADDED
from bellmax.structures.joint import finite, log_softmax_at, log_sum_of_products
from bellmax.structures.lattice import (
    Lattice,
    LatticePaths,
    Move,
    WalkForm,
    cell,
    check_labels,
    common_batch,
    read_lengths,
    row,
)
from bellmax.tensors import Gamma, promote_half, widen

_BLANK, _EMIT = 0, 1  # moves

# Node (t, u) has read t frames and emitted u labels. The mask "_frames" forbids labels after the last blank.
_LATTICE = Lattice(
    [Move(1, 0, score=cell("blank", -1, 0)), Move(0, 1, score=cell("emit", 0, -1), where=row("_frames"))]
)


class EmissionForm(WalkForm):
    """The frame that emits each label, (..., U) int64. Frames of labels in the padding are ignored in arguments."""

    p: Transducer
    is_complete = True

    @property
    def own_shape(self) -> Sequence[int | str]:
        return (self.p.event_shape[1] - 1,)

    def of_walks(self, walks: Tensor) -> Tensor:
        i, j, _, move = walks.unbind(-1)
        labels = self.p.event_shape[1] - 1
        frames = torch.full((*i.shape[:-1], labels + 1), -1, device=i.device)
        return frames.scatter(-1, torch.where(move == _EMIT, j - 1, labels), i)[..., :-1]

    def nodes(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        max_frames, labels = self.p.event_shape[0], decoded.shape[-1]
        num_frames, num_labels = (length.unsqueeze(-1) for length in self.p.lengths.unbind(-1))
        label = torch.arange(labels, device=decoded.device)
        is_label = (label < num_labels).expand(decoded.shape)
        is_in_order = (decoded[..., 1:] >= decoded[..., :-1]) | ~is_label[..., 1:]
        is_frame = ((decoded >= 0) & (decoded < num_frames)) | ~is_label
        steps = max_frames + labels
        # Before label u come u other labels and a blank for each earlier frame.
        step = torch.where(is_label & is_frame, decoded + label, steps)
        emits = torch.zeros((*decoded.shape[:-1], steps + 1), dtype=torch.int64, device=decoded.device)
        emitted = pad(emits.scatter(-1, step, 1)[..., :-1].cumsum(-1), (1, 0))
        number = torch.arange(steps + 1, device=decoded.device).expand(emitted.shape)
        frame = (number - emitted).masked_fill(number > num_frames + num_labels, -1)
        nodes, is_inside = self.number(frame, emitted, 0)
        return nodes, is_inside & is_frame.all(-1) & is_in_order.all(-1)

    def fault(self, decoded: Tensor) -> Fault:
        frames, labels = self.p.lengths.tolist()
        got = decoded[:labels].tolist()
        return Fault((), f"must hold frames from 0 to {frames - 1} in ascending order, got {got}")


class Transducer(LatticePaths):
    """A distribution over the alignments of U labels with T frames, as in an RNN transducer (RNN-T).

    At each frame, a path emits zero or more labels and then a blank. The blank leads to the next frame. The blank of
    the last frame ends the path. The event of a path is a 0/1 tensor (T, U + 1) ``[frame, number of labels emitted so
    far]``, with a 1 for each blank. The event contains no labels, because the blanks determine the frame of each label.
    The decoded form of a path is the frame that emits each label, (..., U), −1 in the padding. If Ω is negentropy and
    the scores are log-probabilities, ``value`` is log p(labels | frames). ``expected_path`` is the probability of each
    blank, and ``gradient["emit"]`` (..., T, U) is the probability of each label at each frame. Both are differentiable.

    Args:
        blank: The score (..., T, U + 1) of a blank ``[frame, number of labels emitted so far]``. −∞ forbids a blank.
        emit: The score (..., T, U) of emitting each label at each frame ``[frame, label]``.
        lengths: A pair (numbers of frames, numbers of labels). Each of the two is a tensor of integers with the batch
            shape, or one number. There are 1 to T frames and 0 to U labels, by default T and U. Entries beyond the
            lengths are padding: they are ignored, may contain NaN and get no gradient.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> p = bx.Transducer(torch.full((3, 2), 0.5).log(), torch.full((3, 1), 0.5).log())
    >>> int(p.num_paths), p.value.exp()             # the label is emitted at one of three frames
    (3, tensor(0.1875))
    >>> p.gradient["emit"].squeeze(-1)
    tensor([0.3333, 0.3333, 0.3333])
    """

    _form_kind = EmissionForm
    _size_argument = "lengths"
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
        sizes = read_lengths("blank", (blank, 2), lengths, (1, 0), (frames, labels))
        num_frames = torch.tensor(frames, device=blank.device) if sizes is None else sizes[0]
        is_frame = torch.arange(frames + 1, device=blank.device) < num_frames.unsqueeze(-1)
        tensors = {"blank": blank, "emit": emit, "_frames": is_frame}
        node_counts = None if sizes is None else (sizes[0] + 1, sizes[1] + 1)
        super().__init__(_LATTICE, tensors, grid=node_counts, omega=omega, gamma=gamma)

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
        """Return a transducer from the logits of its joint network.

        By default, a log-softmax over the V classes normalizes the logits. The normalized logits are not stored. The
        transducer stores the logits, their gradient, and a few numbers for each of the T · (U + 1) pairs of a frame and
        a label position.

        Args:
            logits: The output (..., T, U + 1, V) of the joint network: the score of each of V classes at each frame,
                after each number of labels.
            targets: The labels (..., U), integers without the blank. Padding may have any values.
            blank: The class of the blank, default 0.
            normalized: If True, the logits are used as they are, for example if they are log-probabilities already. If
                False (the default), a log-softmax normalizes them.
            lengths: A pair (frames, labels), as in :class:`Transducer`.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        >>> import bellmax as bx
        >>> logits = torch.zeros(4, 3, 5)                  # 4 frames, 2 labels, 5 classes
        >>> p = bx.Transducer.from_logits(logits, torch.tensor([3, 1]))
        >>> p.value                                        # 10 paths of 6 steps
        tensor(-7.3540)
        """
        labels, batch, _ = read_joint({"logits": logits}, targets, blank, lengths)
        logits = logits.expand(batch + logits.shape[-3:])
        blank_scores, label_scores = score_labels(logits, labels, blank, normalized=normalized)
        return cls(blank_scores, label_scores, lengths=lengths, omega=omega, gamma=gamma)

    @classmethod
    @answers_near_misses
    def from_pruned(
        cls,
        logits: Tensor,
        ranges: Tensor,
        targets: Tensor,
        *,
        blank: int = 0,
        normalized: bool = False,
        lengths: tuple[Lengths, Lengths] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> Transducer:
        """Return a transducer from logits at a few adjacent label positions of each frame.

        A label position is a number of emitted labels, from 0 to U. All other label positions are forbidden. This is
        the second step of a pruned transducer, as in k2. The first step is :meth:`prune`, which selects the positions.
        If ``ranges`` leave no path, ``value`` is −∞.

        Args:
            logits: The output (..., T, s, V) of the joint network at s adjacent label positions of each frame.
            ranges: The first of the s label positions of each frame, integers (..., T) from 0 to U, such as the result
                of :meth:`prune`. Positions beyond the last label are ignored.
            targets: The labels (..., U), integers without the blank. Padding may have any values.
            blank: The class of the blank, default 0.
            normalized: If True, the logits are used as they are. If False (the default), a log-softmax normalizes them.
            lengths: A pair (frames, labels), as in :class:`Transducer`.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        >>> import bellmax as bx
        >>> am, lm, targets = torch.zeros(6, 4), torch.zeros(5, 4), torch.tensor([1, 2, 3, 1])
        >>> ranges = bx.Transducer.from_additive(am, lm, targets).prune(3)
        >>> p = bx.Transducer.from_pruned(torch.zeros(6, 3, 4), ranges, targets)
        >>> int(p.num_paths)                               # 126 paths without pruning
        45
        """
        if check_tensor("logits", logits).ndim < 3 or 0 in logits.shape[-3:] or not logits.is_floating_point():
            needed = "floating point of shape (..., T, s, V)"
            raise ValueError(f"logits must be {needed}, got {logits.dtype} of shape {tuple(logits.shape)}")
        frames, width, classes = logits.shape[-3:]
        _check_ranges(ranges, logits)
        num_labels = targets.shape[-1] if check_tensor("targets", targets).ndim else 0
        sizes = read_lengths("logits", (logits, 3), lengths, (1, 0), (frames, num_labels))
        scores = {"logits": (logits, 3), "ranges": (ranges, 1)}
        labels, batch = _read_targets(targets, scores, num_labels, classes, blank, sizes)
        _check_positions(ranges, num_labels, sizes)
        positions = ranges.long().unsqueeze(-1) + torch.arange(width, device=logits.device)
        positions = positions.clamp(0, num_labels + 1).expand(*batch, frames, width)
        next_label = pad(labels, (0, 2)).unsqueeze(-2).expand(*batch, frames, num_labels + 2).gather(-1, positions)
        at_positions = _score_next(logits.expand(*batch, frames, width, classes), next_label, blank, normalized)
        # The last column takes the positions beyond the last label.
        forbidden = at_positions[0].new_full((*batch, frames, num_labels + 2), -math.inf)
        blank_scores, label_scores = (forbidden.scatter(-1, positions, at) for at in at_positions)
        return cls(blank_scores[..., :-1], label_scores[..., :-2], lengths=lengths, omega=omega, gamma=gamma)

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
        """Return a transducer with the logits ``am[t] + lm[u]``, without a tensor of all these sums, which would have
        shape (T, U + 1, V).

        A pruned transducer, as in k2, uses such a transducer first, to select the label positions at which a larger
        network is evaluated. See :meth:`prune`. The denominators of the softmax over the classes are computed by one
        matrix product, of exp(am) and exp(lm).

        Args:
            am: The score (..., T, V) of each class at each frame, from the acoustic model.
            lm: The score (..., U + 1, V) of each class after each number of labels, from the language model.
            targets: The labels (..., U), integers without the blank. Padding may have any values.
            blank: The class of the blank, default 0.
            lengths: A pair (frames, labels), as in :class:`Transducer`.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`. A log-softmax normalizes the logits whatever the Ω.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        >>> import bellmax as bx
        >>> am, lm = torch.zeros(4, 5), torch.zeros(3, 5)  # 4 frames, 2 labels, 5 classes
        >>> bx.Transducer.from_additive(am, lm, torch.tensor([3, 1])).value
        tensor(-7.3540)
        """
        if check_tensor("am", am).ndim < 2 or 0 in am.shape[-2:]:
            raise ValueError(f"am must have shape (..., T, V), got {tuple(am.shape)}")
        if check_tensor("lm", lm).ndim < 2 or not lm.shape[-2] or lm.shape[-1] != am.shape[-1]:
            raise ValueError(f"lm must have shape (..., U + 1, {am.shape[-1]}), got {tuple(lm.shape)}")
        sizes = read_lengths("am", (am, 2), lengths, (1, 0), (am.shape[-2], lm.shape[-2] - 1))
        scores = {"am": (am, 2), "lm": (lm, 2)}
        labels, batch = _read_targets(targets, scores, lm.shape[-2] - 1, am.shape[-1], blank, sizes)
        am, lm = promote_half(am), promote_half(lm)
        if sizes is not None:  # NaN in the padding must not reach other gradients
            am = am.masked_fill(_is_padding(am.shape[-2], sizes[0]), 0)
            lm = lm.masked_fill(_is_padding(lm.shape[-2], sizes[1] + 1), 0)
        norm = finite(log_sum_of_products(am, lm))
        blank_scores = am[..., blank].unsqueeze(-1) + lm[..., blank].unsqueeze(-2) - norm
        labels = labels.expand(*batch, labels.shape[-1])
        label_am = am.expand(*batch, *am.shape[-2:]).gather(-1, labels.unsqueeze(-2).expand(*batch, am.shape[-2], -1))
        label_lm = lm.expand(*batch, *lm.shape[-2:])[..., :-1, :].gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        emit = label_am + label_lm.unsqueeze(-2) - norm[..., :-1]
        return cls(blank_scores, emit, lengths=lengths, omega=omega, gamma=gamma)

    @property
    def lengths(self) -> Tensor:
        """The number of frames and the number of labels of each sequence, (..., 2) int64."""
        return self._lengths - 1

    # --- alignments

    def best_frames(self) -> Tensor:
        """Return the frame that emits each label on the best path, (..., U) int64.

        :meth:`decode` returns the same tensor.

        The result is −1 in the padding. If no path exists, all frames are −1.
        """
        return self.decode()

    @property
    def marginals(self) -> Tensor:
        """Probability that each frame emits each label, (..., T, U). Differentiable."""
        return self.gradient["emit"]

    def _most_accurate(self) -> Tensor:
        return self._decode_units({"emit": self._solver.gradient()[1]})

    def prune(self, s_range: int) -> Tensor:
        """Return the first label position to keep at each frame, (..., T) int64, for a pruned transducer.

        A label position is a number of emitted labels, from 0 to U. A pruned transducer evaluates a large joint network
        only at ``s_range`` adjacent positions of each frame. If ``start`` is the result of this method, the positions
        to keep are ``start.unsqueeze(-1) + arange(s_range)``. Pass the result to :meth:`from_pruned`.

        For each frame, the method selects the range that contains the largest part of the expected path. It then shifts
        ranges where necessary, so that they contain at least one complete path. For this purpose, the first range
        starts at 0, the ranges of adjacent frames overlap, and the last range includes position U. In the padding, all
        frames have the range of the last real frame. k2 prunes in this way (Kuang et al., 2022).

        Args:
            s_range: The number of label positions to keep at each frame.

        >>> import bellmax as bx
        >>> am, lm = torch.zeros(6, 4), torch.zeros(5, 4)
        >>> bx.Transducer.from_additive(am, lm, torch.tensor([1, 2, 3, 1])).prune(3)
        tensor([0, 0, 1, 2, 2, 2])

        """
        (frames, columns), (num_frames, num_labels) = self.event_shape, self.lengths.unbind(-1)
        needed = 1 + -(-num_labels // num_frames)  # so that ranges overlap and reach the end
        if s_range < 1 or (is_readable(needed) and bool((needed > s_range).any())):
            minimum = int(needed.max()) if needed.numel() and is_readable(needed) else 1
            raise ValueError(
                f"s_range must be at least {minimum}, so that the ranges reach the last label, got {s_range}"
            )
        with torch.no_grad():
            cumulative = {name: pad(widen(g).cumsum(-1), (1, 0)) for name, g in self.gradient.items()}
        blanks, emits = cumulative["blank"], cumulative["emit"]
        candidate = torch.arange(columns, device=self.device)
        mass = blanks.index_select(-1, (candidate + s_range).clamp(max=columns)) - blanks[..., :-1]
        mass = mass + emits.index_select(-1, (candidate + s_range - 1).clamp(max=columns - 1)) - emits
        last_start = (num_labels + 1 - s_range).clamp(min=0).unsqueeze(-1)
        start = mass.masked_fill(candidate > last_start.unsqueeze(-1), -1).argmax(-1)
        frame = torch.arange(frames, device=self.device)
        start = torch.where(frame >= (num_frames - 1).unsqueeze(-1), last_start, start).cummax(-1).values
        reach = frame * (s_range - 1)  # the largest start that overlapping ranges can have at each frame
        start = (start - reach).flip(-1).cummax(-1).values.flip(-1) + reach
        return torch.minimum(start, reach).clamp(max=last_start)


def _is_padding(size: int, length: Tensor) -> Tensor:
    """Mask (..., size, 1), True at positions from ``length`` (...) on."""
    return (torch.arange(size, device=length.device) >= length.unsqueeze(-1)).unsqueeze(-1)


def _check_ranges(ranges: Tensor, logits: Tensor) -> None:
    """Raise ``ValueError`` if ``ranges`` are not integers (..., T) on the device of logits (..., T, s, V)."""
    frames = logits.shape[-3]
    if check_tensor("ranges", ranges).shape[-1:] != (frames,) or not are_integers(ranges):
        is_of_k2 = ranges.shape[-2:] == logits.shape[-3:-1]
        hint = ". For all positions of each frame, as in k2, pass ranges[..., 0]" if is_of_k2 else ""
        needed = f"integers (..., {frames}), the first label position of each frame"
        raise ValueError(f"ranges must be {needed}, got {ranges.dtype} of shape {tuple(ranges.shape)}{hint}")
    if ranges.device != logits.device:
        raise ValueError(f"ranges must be on the device of logits, {logits.device}, got {ranges.device}")


def _check_positions(ranges: Tensor, num_labels: int, lengths: tuple[Tensor, Tensor] | None) -> None:
    """Raise an error if a frame within the lengths has a position in ``ranges`` outside of 0 to ``num_labels``."""
    if not is_checked(ranges):
        return
    frames = ranges.shape[-1]
    is_frame = torch.arange(frames) < (frames if lengths is None else lengths[0].unsqueeze(-1))
    bad = ((ranges < 0) | (ranges > num_labels)) & is_frame
    if bool(bad.any()):
        *sequence, frame = bad.nonzero()[0].tolist()
        got = int(ranges.expand(bad.shape)[(*sequence, frame)])
        where = f"frame {frame}{of_sequence(sequence)}"
        raise ValueError(f"ranges must hold positions from 0 to {num_labels}, got {got} at {where}")


def read_joint(
    tensors: dict[str, Tensor], targets: Tensor, blank: int, lengths: tuple[Lengths, Lengths] | None
) -> tuple[Tensor, torch.Size, tuple[Tensor, Tensor] | None]:
    """Return the labels (..., U) of targets, the batch shape, and ``lengths`` as two tensors.

    ``tensors`` are the named outputs (..., T, U + 1, V) of a joint network. The blank and the labels are classes of the
    first output. Raises ``ValueError`` if an argument has a wrong shape, dtype or value.
    """
    (name, first), *others = tensors.items()
    if check_tensor(name, first).ndim < 3 or 0 in first.shape[-3:]:
        raise ValueError(f"{name} must have shape (..., T, U + 1, V), got {tuple(first.shape)}")
    frames, positions, classes = first.shape[-3:]
    for other, tensor in others:
        if check_tensor(other, tensor).shape[-3:-1] != (frames, positions) or not tensor.shape[-1]:
            raise ValueError(f"{other} must have shape (..., {frames}, {positions}, D), got {tuple(tensor.shape)}")
        if tensor.device != first.device:
            raise ValueError(f"{other} must be on the device of {name}, {first.device}, got {tensor.device}")
    for any_name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{any_name} must be floating point, got dtype {tensor.dtype}")
    sizes = read_lengths(name, (first, 3), lengths, (1, 0), (frames, positions - 1))
    scores = {any_name: (tensor, 3) for any_name, tensor in tensors.items()}
    labels, batch = _read_targets(targets, scores, positions - 1, classes, blank, sizes)
    return labels, batch, sizes


def score_labels(logits: Tensor, labels: Tensor, blank: int, *, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """Return the scores of the blank, (..., T, U + 1), and of the labels (..., U), (..., T, U), from logits."""
    next_label = pad(labels, (0, 1)).unsqueeze(-2).expand(logits.shape[:-1])
    blank_scores, label_scores = _score_next(logits, next_label, blank, normalized)
    return blank_scores, label_scores[..., :-1]


def _score_next(logits: Tensor, next_label: Tensor, blank: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Return the scores (...) of the blank and of the next label (...), from logits (..., V)."""
    if normalized:
        return logits[..., blank], logits.gather(-1, next_label.unsqueeze(-1)).squeeze(-1)
    return log_softmax_at(logits, next_label, blank)


def _read_targets(
    targets: Tensor,
    scores: dict[str, tuple[Tensor, int]],
    size: int,
    classes: int,
    blank: int,
    lengths: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, torch.Size]:
    """Return the targets as int64 (..., U), with 0 in the padding, and the batch shape.

    Raises ``ValueError`` if the shape, the device or a label is wrong. ``scores`` holds the named score tensors with
    their numbers of event dimensions, ``size`` is U, and ``lengths`` holds the numbers of frames and labels.
    """
    if check_tensor("targets", targets).ndim < 1 or targets.shape[-1] != size:
        hint = f". If they are concatenated, pad them: {PADDED}" if targets.ndim == 1 else ""
        raise ValueError(
            f"targets must have shape (..., {size}), one label less than scores, got {tuple(targets.shape)}{hint}"
        )
    if not 0 <= blank < classes:
        hint = f". For the last class, pass blank={classes - 1}" if blank == -1 else ""
        raise ValueError(f"blank must be from 0 to {classes - 1}, got {blank}{hint}")
    device = next(iter(scores.values()))[0].device
    if targets.device != device:
        raise ValueError(f"targets must be on the device of the scores, {device}, got {targets.device}")
    named_lengths = {f"lengths[{n}]": (length, 0) for n, length in enumerate(lengths or ())}
    batch = common_batch(scores | {"targets": (targets, 1)} | named_lengths)
    check_labels("targets", targets, None if lengths is None else lengths[1], classes)
    is_label = torch.arange(size, device=device) < (size if lengths is None else lengths[1].unsqueeze(-1))
    if is_checked(targets):
        is_blank = (targets == blank) & is_label
        if bool(is_blank.any()):
            *sequence, position = is_blank.nonzero()[0].tolist()
            where = f"label {position}{of_sequence(sequence)}"
            raise ValueError(f"targets must not hold the blank {blank}, got it at {where}")
    return torch.where(is_label, targets, 0).to(torch.int64), batch
