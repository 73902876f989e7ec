"""Connectionist temporal classification (Graves et al., 2006) under any Ω: alignments of labels with frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import Fault
from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.modes import cached_when_eager, is_checked
from bellmax.programs.checks import of_sequence
from bellmax.regularizers import Regularizer
from bellmax.structures.lattice import (
    Lattice,
    LatticePaths,
    Move,
    Score,
    WalkForm,
    along_row,
    at_class,
    cell,
    column,
    corner,
    gather,
    read_lengths,
    row,
)
from bellmax.tensors import Gamma

PADDED = "torch.nn.utils.rnn.pad_sequence(targets.split(target_lengths.tolist()), batch_first=True)"
"""Code that pads concatenated targets, for messages."""

_BLANK, _LABEL = 0, 1  # states


def _declare(blank_score: Score, label_score: Score) -> Lattice:
    """Return the lattice of CTC. Rows are frames, columns j = 0 … L count the labels that have begun."""
    return Lattice(
        [
            Move(1, 0, (_BLANK, _LABEL), _BLANK),
            Move(1, 0, _LABEL, _LABEL),
            Move(1, 1, _BLANK, _LABEL),
            Move(1, 1, _LABEL, _LABEL, where=column("_differs", -2)),
        ],
        states=2,
        node={_BLANK: blank_score, _LABEL: label_score},
        start=along_row({_BLANK: column("_begin_blank"), _LABEL: column("_begin_label")}),
        end=corner(_BLANK, _LABEL),
    )


def _declare_by_class(blank: int) -> Lattice:
    """Return the lattice that reads the score of each class at each frame."""
    return _declare(at_class("log_probs", blank), gather("log_probs", "targets", 0, -1))


_LATTICES = {0: _declare_by_class(0)}  # by blank; torch.compile can look a lattice up, but not declare one
_BY_POSITION = _declare(row("blanks"), cell("labels", 0, -1))  # reads a score for each target position and frame


def lattice_of(blank: int) -> Lattice:
    """Return the lattice of CTC with this class as the blank, declared at most once."""
    if blank not in _LATTICES:
        _LATTICES[blank] = _declare_by_class(blank)
    return _LATTICES[blank]


class FrameForm(WalkForm):
    """The label or blank of each frame, (..., T) int64. Labels of frames in the padding are ignored in arguments."""

    p: CTC
    is_complete = True

    @property
    def own_shape(self) -> Sequence[int | str]:
        return self.p.event_shape[:1]

    def of_walks(self, walks: Tensor) -> Tensor:
        return self.p._labels_of(walks)

    def nodes(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        num_frames, num_labels = self.p.lengths.unbind(-1)
        frame = torch.arange(decoded.shape[-1], device=decoded.device)
        is_frame = (frame < num_frames.unsqueeze(-1)).expand(decoded.shape)
        labels = decoded.masked_fill(~is_frame, self.p.blank)
        has_label = labels != self.p.blank
        position = (has_label & (labels != pad(labels[..., :-1], (1, 0), value=self.p.blank))).cumsum(-1)
        is_target = labels == self.p._target_at(position)
        nodes = 2 * (frame * self.p._size[1] + position) + has_label
        may_be_path = (is_target | ~has_label).all(-1) & (position[..., -1] == num_labels)
        return nodes.masked_fill(~is_frame, -1), may_be_path

    def events(self, decoded: Tensor) -> Tensor:
        frames, classes = self.p.event_shape
        is_frame = torch.arange(frames, device=decoded.device) < self.p.lengths[..., :1]
        labels = decoded.masked_fill(~is_frame, classes).unsqueeze(-1)
        dtype = torch.promote_types(self.p.dtype, torch.float32)
        return (labels == torch.arange(classes, device=decoded.device)).to(dtype)

    def fault(self, decoded: Tensor) -> Fault:
        frames, count = self.p.lengths.tolist()
        labels = decoded[:frames].tolist()
        merged = [label for label, before in zip(labels, [None, *labels], strict=False) if label != before]
        got = [label for label in merged if label != self.p.blank]
        needed = self.p.targets[:count].tolist()
        return Fault((), f"must give the labels {needed} if repeats are merged and blanks are removed, but gives {got}")


class CTC(LatticePaths):
    """A distribution over alignments of T frames with a target: connectionist temporal classification (CTC).

    The target is a sequence of labels, such as the letters of a word. An alignment assigns each frame a label or the
    blank, a special class that means "no label". An alignment is valid if two steps turn it into the target: first
    merge equal neighbors, then remove the blanks. For example, with the blank written as ·, both aa·b and ·abb are
    alignments of the target ab. If the target contains a label twice in a row, a blank must separate the two, since
    equal neighbors are merged. The event of an alignment is a 0/1 tensor (T, V), where V is the number of classes. Row
    t has a single 1, at the class of frame t. The decoded form of an alignment is the class of each frame, integers
    (..., T), with −1 in the padding. Under negentropy with γ = 1, ``value`` is the log-probability of the target.
    ``expected_path`` (..., T, V) is the posterior probability of each class at each frame. ``value`` and
    ``expected_path`` are differentiable with respect to ``log_probs``.

    A target needs at least one frame for each label. If a label is repeated directly, the target needs one more frame
    for the blank between the two labels. If a batch member has fewer frames than its target needs, its value is −∞ and
    its gradient is 0. If the targets of a batch have more labels than there are frames (L > T), they are probably
    padded. The constructor then raises ``ValueError`` unless ``lengths`` is passed.

    Args:
        log_probs: The score (..., T, V) of each class at each frame, usually from ``log_softmax``. A score of −∞
            forbids the class at that frame.
        targets: The target labels, integers (..., L) from 0 to V − 1. The blank is not allowed in a target. If
            ``targets`` has the shape (L,), the whole batch shares this target. Pad targets of different lengths to the
            shape (..., L). Unlike torch's ``ctc_loss``, this class does not accept the targets of a batch concatenated
            into one dimension. On a GPU and under ``torch.compile``, invalid labels raise no error, since the labels
            are not checked.
        lengths: A pair (frames, labels): the number of frames of each batch member, from 1 to T, and the number of its
            labels, from 0 to L. By default, these numbers are T and L. Each item of the pair is an integer tensor of
            the batch shape, or one number for the whole batch. Frames and labels beyond these lengths are padding.
            Padding is ignored, may contain NaN and gets no gradient.
        blank: The class of the blank, default 0.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> probabilities = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7]])
    >>> p = bx.CTC(probabilities.log(), torch.tensor([1, 2]))
    >>> p.value.exp()                               # of 1·2, 112, 122, ·12 and 12·, where · is the blank
    tensor(0.5970)
    >>> p.best_labels()
    tensor([1, 0, 2])
    >>> p.spans()
    tensor([[0, 1],
            [2, 3]])
    >>> p.expected_path
    tensor([[0.0352, 0.9648, 0.0000],
            [0.5628, 0.3166, 0.1206],
            [0.0268, 0.0000, 0.9732]])
    """

    _form_kind = FrameForm
    _size_argument = "lengths"
    _has_unique_paths = True

    @answers_near_misses
    def __init__(
        self,
        log_probs: Tensor,
        targets: Tensor,
        *,
        lengths: tuple[Lengths, Lengths] | None = None,
        blank: int = 0,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        _check_shapes(log_probs, targets, blank)
        self.blank = blank
        max_labels = targets.shape[-1]
        sizes = read_lengths("log_probs", (log_probs, 2), lengths, (1, 0), (log_probs.shape[-2], max_labels))
        if sizes is not None and targets.ndim == 1:
            _check_shared(targets, sizes[1].expand(log_probs.shape[:-2]))
        begin_blank, begin_label = _begin_scores(max_labels, log_probs.dtype, log_probs.device)
        tensors = {
            "log_probs": log_probs,
            "targets": targets,
            "_differs": targets[..., 1:] != targets[..., :-1],
            "_begin_blank": begin_blank,
            "_begin_label": begin_label,
        }
        grid: tuple[Lengths, Lengths] | None = None if sizes is None else (sizes[0], sizes[1] + 1)
        if max_labels == 0:  # the empty mask also fits a grid of two columns
            grid = log_probs.shape[-2] if sizes is None else sizes[0], 1
        super().__init__(lattice_of(blank), tensors, grid=grid, omega=omega, gamma=gamma)
        if sizes is None:
            _check_frames(self.log_probs, max_labels)
        if is_checked(self.targets):
            self._check_labels()

    def _shown_options(self) -> dict[str, object]:
        return {"blank": self.blank}

    def _check_labels(self) -> None:
        """Raise ``ValueError`` if a label outside the padding is the blank or not a class."""
        targets, classes = self.targets, self.event_shape[1]
        if not targets.numel():
            return
        least, most = (int(bound) for bound in targets.aminmax())
        if least >= 0 and most < classes and not least <= self.blank <= most:
            return
        within = torch.arange(targets.shape[-1]) < self.lengths[..., 1:]
        bad = within & ((targets < 0) | (targets >= classes) | (targets == self.blank))
        if bool(bad.any()):
            *batch, position = bad.nonzero()[0].tolist()
            label = int(targets[(*batch, position)])
            needed = "must not hold the blank" if label == self.blank else f"must be from 0 to {classes - 1}"
            raise ValueError(f"targets {needed}, got {label} at label {position}{of_sequence(batch)}")

    # --- the arguments

    @property
    def log_probs(self) -> Tensor:
        """The score of each class at each frame, (..., T, V)."""
        return self._scores[0]

    @property
    def targets(self) -> Tensor:
        """The target labels, (..., L) int64."""
        return self._solver.integers[2]

    @property
    def lengths(self) -> Tensor:
        """The number of frames and the number of labels of each batch member, (..., 2) int64."""
        return self._lengths - torch.tensor([0, 1], device=self.device)

    # --- alignments as labels

    def best_labels(self) -> Tensor:
        """Return the class of each frame, a label or the blank, on the best path.

        The result (..., T) int64 equals the result of :meth:`decode`. It is −1 in the padding. If no path exists, all
        entries are −1.

        >>> import bellmax as bx
        >>> bx.CTC(torch.zeros(2, 4, 3), torch.tensor([1, 1]), lengths=([4, 3], 2)).best_labels()[1]
        tensor([ 1,  0,  1, -1])
        """
        return self.decode()

    def sample_labels(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the class of each frame, a label or the blank, on random paths.

        The result (*sample_shape, ..., T) int64 is −1 in the padding.
        """
        return self.sample_decoded(sample_shape)

    @property
    def marginals(self) -> Tensor:
        """Probability of each class at each frame, (..., T, V). Differentiable."""
        return self.expected_path

    def spans(self) -> Tensor:
        """Return the span ``[start, end]`` of frames of each target label on the best path, (..., L, 2) int64.

        On the best path, frames ``start`` to ``end`` − 1 have the label. In the padding of the target, the span is (−1,
        −1). If no path exists, all spans are (−1, −1).

        >>> import bellmax as bx
        >>> bx.CTC(torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([1, 2])).spans()
        tensor([[0, 2],
                [2, 3]])
        """
        start, count, _ = self._runs(self.best_labels())
        return torch.stack((start, torch.where(start < 0, -1, start + count)), -1)

    @property
    def confidence(self) -> Tensor:
        """Posterior probability of each target position, averaged over its span, (..., L). Differentiable.

        At each frame, the posterior is the probability that the frame has the label at this position of the target. The
        average is over the frames of the span, which :meth:`spans` returns. If a target contains a label twice, such as
        the l of "hello", the probabilities of the two positions are computed separately. In the padding, and if no path
        exists, the confidence is 0.

        >>> import bellmax as bx
        >>> p = bx.CTC(torch.tensor([0.0, 1.0]).expand(5, 2), torch.tensor([1, 1]))
        >>> p.spans()
        tensor([[0, 1],
                [2, 5]])
        >>> p.expected_path[:, 1]                      # posterior of the label
        tensor([0.8103, 0.6217, 0.4995, 0.6217, 0.8103])
        >>> p.confidence                               # of the two positions
        tensor([0.8103, 0.5606])
        """
        _, count, position = self._runs(self.best_labels())
        posterior = pad(self._position_posteriors(), (1, 0)).gather(-1, position.unsqueeze(-1)).squeeze(-1)
        total = posterior.new_zeros((*position.shape[:-1], count.shape[-1] + 1)).scatter_add(-1, position, posterior)
        return (total[..., 1:] / count.clamp(min=1)).to(self.dtype)

    def _position_posteriors(self) -> Tensor:
        """Posterior probability of each target position at each frame, (..., T, L)."""
        log_probs, (frames, columns) = self.log_probs, self._lengths.unbind(-1)
        if not self.targets.shape[-1]:
            return log_probs[..., :0]
        classes = self.targets.clamp(0, self.event_shape[1] - 1).unsqueeze(-2)
        tensors = {
            "labels": log_probs.gather(-1, classes.expand(*log_probs.shape[:-1], -1)),
            "blanks": log_probs[..., self.blank],
            "_differs": self._solver.integers[3],
            "_begin_blank": self._scores[1],
            "_begin_label": self._scores[2],
        }
        p = LatticePaths(_BY_POSITION, tensors, grid=(frames, columns), omega=self.omega)
        p._solver.backend = self._solver.backend_under(self.omega.kernel)
        return p._solver.gradient()[_BY_POSITION.scores.index("labels")]

    def _labels_of(self, walks: Tensor) -> Tensor:
        """Convert walks (..., longest, 4), which have a node for each frame, to labels (..., T)."""
        i, j, state, _ = walks[..., : self.event_shape[0], :].unbind(-1)
        return torch.where(i < 0, -1, torch.where(state == _BLANK, self.blank, self._target_at(j)))

    def _target_at(self, position: Tensor) -> Tensor:
        """Return the target labels (..., T) at positions (..., T), which count from 1."""
        shape = torch.broadcast_shapes(position.shape[:-1], self.batch_shape)
        position = position.clamp(0, self.targets.shape[-1]).expand(*shape, -1)
        return pad(self.targets, (1, 0)).expand(*shape, -1).gather(-1, position)

    def _runs(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the run of frames of each target position, given the labels (..., T) of frames.

        Returns:
            start: The first frame of each run, (..., L); −1 if there is none.
            count: The number of frames of each run, (..., L).
            position: The target position of each frame, (..., T), counted from 1; 0 for blanks and padding.

        """
        has_label = (labels != self.blank) & (labels >= 0)
        begins = has_label & (labels != pad(labels[..., :-1], (1, 0), value=self.blank))
        num_begun = begins.cumsum(-1)
        position = num_begun * has_label
        shape = *labels.shape[:-1], self.targets.shape[-1] + 1  # slot 0 collects the other frames
        frame = torch.arange(labels.shape[-1], device=self.device).expand(labels.shape)
        start = torch.full(shape, -1, device=self.device).scatter(-1, num_begun * begins, frame)
        zeros = torch.zeros(shape, dtype=torch.int64, device=self.device)
        count = zeros.scatter_add(-1, position, torch.ones_like(position))
        return start[..., 1:], count[..., 1:], position


@cached_when_eager
def _begin_scores(max_labels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scores (L + 1,) by column of starting in the blank state and in the label state.

    They are 0 in column 0 and in column 1, respectively, and −∞ elsewhere: a path starts with a blank or the first
    label.
    """
    zero = torch.zeros(1, dtype=dtype, device=device)
    by_label = pad(zero, (1, max_labels), value=-torch.inf)[: max_labels + 1]
    return pad(zero, (0, max_labels), value=-torch.inf), by_label


def _check_frames(log_probs: Tensor, labels: int) -> None:
    """Raise ``ValueError`` if all targets of a batch have more labels than frames, which suggests padding."""
    frames, is_batch = log_probs.shape[-2], log_probs.shape[:-2].numel() > 1
    # torch.export would record the comparison of two sizes as a constraint on them.
    if not torch.compiler.is_compiling() and is_batch and labels > frames:
        raise ValueError(
            f"targets must have at most as many labels as there are frames, got {labels} labels and {frames} frames. "
            "If targets are padded, pass lengths=(frames, labels)"
        )


def _check_shared(targets: Tensor, labels: Tensor) -> None:
    """Raise ``ValueError`` if targets (L,) look concatenated: the numbers of labels (...) add up to L."""
    if labels.numel() > 1 and is_checked(labels) and int(labels.sum()) == len(targets):
        raise ValueError(concatenated(targets, labels.numel()))


def concatenated(targets: Tensor, batch: int) -> str:
    """Return the message for concatenated targets (L,) of a batch."""
    return (
        f"targets must have shape (..., L), padded, got {tuple(targets.shape)} for a batch of {batch}. Concatenated "
        f"targets are supported by bellmax.compat.torch.CTCLoss and ctc_loss; to pad them, use {PADDED}. For one "
        "target that the batch shares, pass targets.unsqueeze(0)"
    )


def _check_shapes(log_probs: Tensor, targets: Tensor, blank: int) -> None:
    """Raise ``ValueError`` unless shapes and dtypes of log_probs and targets are valid and blank is a class."""
    shape = check_tensor("log_probs", log_probs).shape
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"log_probs must have shape (..., T, V) with T, V >= 1, got {tuple(shape)}")
    if not log_probs.is_floating_point():
        raise ValueError(f"log_probs must be floating point, got dtype {log_probs.dtype}")
    if check_tensor("targets", targets).is_floating_point() or targets.dtype == torch.bool or targets.ndim < 1:
        raise ValueError(f"targets must hold integers (..., L), got {targets.dtype} of shape {tuple(targets.shape)}")
    if not 0 <= blank < shape[-1]:
        raise ValueError(f"blank must be a class of log_probs, from 0 to {shape[-1] - 1}, got {blank}")
