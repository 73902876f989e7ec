"""Labels of frames: connectionist temporal classification (Graves et al., 2006) under any Ω."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.modes import cached_when_eager, is_checked
from bellmax.programs.checks import of_sequence
from bellmax.regularizers import Regularizer
from bellmax.structures.lattice import (
    Lattice,
    LatticePaths,
    Move,
    Score,
    along_row,
    cell,
    column,
    corner,
    gather,
    one_of,
    read_lengths,
    row,
)
from bellmax.tensors import Gamma

PADDED = "torch.nn.utils.rnn.pad_sequence(targets.split(target_lengths.tolist()), batch_first=True)"
"""How to pad concatenated targets, for messages."""

_BLANK, _LABEL = 0, 1  # states
# Numbers of moves, in the order of the table. The move to a blank from a label, and so to a label, is the next one.
_TO_BLANK, _STAY, _BEGIN = 0, 2, 3


def _declare(of_blank: Score, of_label: Score) -> Lattice:
    """Rows are frames, columns j = 0 … L count the labels that have begun."""
    return Lattice(
        [
            Move(1, 0, (_BLANK, _LABEL), _BLANK),
            Move(1, 0, _LABEL, _LABEL),
            Move(1, 1, _BLANK, _LABEL),
            Move(1, 1, _LABEL, _LABEL, where=column("_differs", -2)),
        ],
        states=2,
        node={_BLANK: of_blank, _LABEL: of_label},
        start=along_row({_BLANK: column("_begin_blank"), _LABEL: column("_begin_label")}),
        end=corner(_BLANK, _LABEL),
    )


def _by_class(blank: int) -> Lattice:
    return _declare(one_of("log_probs", blank), gather("log_probs", "targets", 0, -1))


_LATTICES = {0: _by_class(0)}  # torch.compile can look a lattice up, but not declare one
_BY_POSITION = _declare(row("blanks"), cell("labels", 0, -1))  # a score for each position of the target at each frame


def lattice_of(blank: int) -> Lattice:
    """The lattice of CTC with this class as the blank."""
    if blank not in _LATTICES:
        _LATTICES[blank] = _by_class(blank)
    return _LATTICES[blank]


class CTC(LatticePaths):
    """A distribution over the alignments of a target sequence with frames.

    An alignment gives each frame a label, or the blank. Without its repetitions, and then without its blanks, it is the
    target; so equal neighbours of the target have a blank between them. As a path it is a 0/1 tensor (T, V) with a 1
    for each frame. Under negentropy ``value`` is log p(target), and ``expected_path`` (..., T, V) the posterior
    probability of each label at each frame; both are differentiable, in ``log_probs`` itself. A target that is too long
    for its frames, with one frame for each label and one between equal neighbours, has value −∞ and no gradient. If a
    batch is given without ``lengths`` and all of its targets have more labels than frames, a ``ValueError`` is raised.

    Args:
        log_probs: (..., T, V), the score of each label at each frame, usually from ``log_softmax``; −∞ forbids one.
        targets: Integers (..., L) from 0 to V − 1, without the blank. Its batch dimensions and those of ``log_probs``
            broadcast, so (L,) is one target for the whole batch. Pad targets that are concatenated, as torch's
            ``ctc_loss`` takes them. On a GPU and under ``torch.compile`` the values are not checked.
        lengths: (frames, labels), each integers of the batch shape or a number: frames from 1 to T, labels from 0 to L.
            The rest is padding: it is ignored, may hold anything, NaN too, and gets no gradient.
        blank: the class that stands for no label.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

    >>> import bellmax as bx
    >>> probabilities = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7]])
    >>> p = bx.CTC(probabilities.log(), torch.tensor([1, 2]))
    >>> p.value.exp()                               # 1·2, 112, 122, ·12, 12·
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
        most = targets.shape[-1]
        own = read_lengths("log_probs", (log_probs, 2), lengths, (1, 0), (log_probs.shape[-2], most))
        if own is not None and targets.ndim == 1:
            _check_shared(targets, own[1].expand(log_probs.shape[:-2]))
        of_blank, of_label = _begins(most, log_probs.dtype, log_probs.device)
        tensors = {
            "log_probs": log_probs,
            "targets": targets,
            "_differs": targets[..., 1:] != targets[..., :-1],
            "_begin_blank": of_blank,
            "_begin_label": of_label,
        }
        grid: tuple[Lengths, Lengths] | None = None if own is None else (own[0], own[1] + 1)
        if most == 0:  # the mask has place for a column more
            grid = log_probs.shape[-2] if own is None else own[0], 1
        super().__init__(lattice_of(blank), tensors, lengths=grid, omega=omega, gamma=gamma)
        if own is None:
            _check_frames(self.log_probs, most)
        if is_checked(self.targets):
            self._check_labels()

    def _check_labels(self) -> None:
        """Raise a ValueError for a label that is not one of the classes, or the blank; padding may be."""
        targets, classes = self.targets, self.event_shape[1]
        if not targets.numel():
            return
        least, most = (int(bound) for bound in targets.aminmax())
        if least >= 0 and most < classes and not least <= self.blank <= most:
            return
        within = torch.arange(targets.shape[-1]) < self.lengths[..., 1:]
        bad = within & ((targets < 0) | (targets >= classes) | (targets == self.blank))
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            found = int(targets[place])
            needed = "must not hold the blank" if found == self.blank else f"must be from 0 to {classes - 1}"
            raise ValueError(f"targets {needed}, got {found} at label {place[-1]}{of_sequence(place[:-1])}")

    # --- what was given

    @property
    def log_probs(self) -> Tensor:
        """(..., T, V)."""
        return self._scores[0]

    @property
    def targets(self) -> Tensor:
        """(..., L) int64."""
        return self._solver.integers[2]

    @property
    def lengths(self) -> Tensor:
        """(..., 2) int64: the frames and the labels of each sequence."""
        return self._lengths - torch.tensor([0, 1], device=self.device)

    # --- alignments as labels

    def best_labels(self) -> Tensor:
        """The label of each frame on the best path, (..., T) int64, blanks included.

        It is −1 past the frames of a sequence, and throughout where no path exists.

        >>> import bellmax as bx
        >>> bx.CTC(torch.zeros(2, 4, 3), torch.tensor([1, 1]), lengths=([4, 3], 2)).best_labels()[1]
        tensor([ 1,  0,  1, -1])
        """
        return self._labels_of(self.best_walk())

    def sample_labels(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Labels of frames drawn from the distribution, (*sample_shape, ..., T), as in :meth:`best_labels`."""
        return self._labels_of(self.sample_walks(sample_shape))

    def spans(self) -> Tensor:
        """The frames of each label of the target on the best path, (..., L, 2) int64 [start, end).

        A span is (−1, −1) past the labels of a sequence, and throughout where no path exists.
        """
        start, count, _ = self._runs(self.best_labels())
        return torch.stack((start, torch.where(start < 0, -1, start + count)), -1)

    @property
    def confidence(self) -> Tensor:
        """Posterior probability of each position of the target, averaged over its span, (..., L). Differentiable.

        Spans are taken from the best path. A repeated label has a posterior for each of its positions, so the two l of
        "hello" do not count for each other. The confidence is 0 where there is no span.

        >>> import bellmax as bx
        >>> p = bx.CTC(torch.tensor([0.0, 1.0]).expand(5, 2), torch.tensor([1, 1]))
        >>> p.spans()
        tensor([[0, 1],
                [2, 5]])
        >>> p.expected_path[:, 1]                      # of the label at each frame
        tensor([0.8103, 0.6217, 0.4995, 0.6217, 0.8103])
        >>> p.confidence                               # of its first and second position
        tensor([0.8103, 0.5606])
        """
        _, count, position = self._runs(self.best_labels())
        posterior = pad(self._positions(), (1, 0)).gather(-1, position.unsqueeze(-1)).squeeze(-1)
        total = posterior.new_zeros((*position.shape[:-1], count.shape[-1] + 1)).scatter_add(-1, position, posterior)
        return (total[..., 1:] / count.clamp(min=1)).to(self.dtype)

    def _positions(self) -> Tensor:
        """Posterior probability of each position of the target at each frame, (..., T, L)."""
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
        p = LatticePaths(_BY_POSITION, tensors, lengths=(frames, columns), omega=self.omega)
        p._solver.backend = self._solver.backend_under(self.omega.kernel)
        return p._solver.gradient()[_BY_POSITION.scores.index("labels")]

    def _labels_of(self, walks: Tensor) -> Tensor:
        """Walks (..., longest, 4), which have a node for each frame, as labels (..., T)."""
        i, j, state, _ = walks[..., : self.event_shape[0], :].unbind(-1)
        return torch.where(i < 0, -1, torch.where(state == _BLANK, self.blank, self._target_at(j)))

    def _target_at(self, number: Tensor) -> Tensor:
        """The label of the target by its number, counted from 1, (..., T)."""
        shape = torch.broadcast_shapes(number.shape[:-1], self.batch_shape)
        places = number.clamp(0, self.targets.shape[-1]).expand(*shape, -1)
        return pad(self.targets, (1, 0)).expand(*shape, -1).gather(-1, places)

    def _begins(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a frame of labels (..., T) has a label, and whether this label begins there."""
        has_label = (labels != self.blank) & (labels >= 0)
        before = pad(labels[..., :-1], (1, 0), value=self.blank)
        return has_label, has_label & (labels != before)

    def _runs(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where each label of the target begins, or −1, and its number of frames, (..., L) each; the label of each
        frame, counted from 1, or 0, (..., T)."""
        has_label, begins = self._begins(labels)
        number = begins.cumsum(-1)
        place = number * has_label
        slots = *labels.shape[:-1], self.targets.shape[-1] + 1
        frame = torch.arange(labels.shape[-1], device=self.device).expand(labels.shape)
        start = torch.full(slots, -1, device=self.device).scatter(-1, number * begins, frame)
        count = torch.zeros(slots, dtype=torch.int64, device=self.device).scatter_add(-1, place, torch.ones_like(place))
        return start[..., 1:], count[..., 1:], place


@cached_when_eager
def _begins(most: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The scores of beginning with the blank and with a label, by column: at 0 and at 1 alone."""
    begin = torch.zeros(1, dtype=dtype, device=device)
    return pad(begin, (0, most), value=-torch.inf), pad(begin, (1, most), value=-torch.inf)[: most + 1]


def _check_frames(log_probs: Tensor, labels: int) -> None:
    """Raise a ValueError for a batch whose targets all have more labels than frames."""
    frames, is_batch = log_probs.shape[-2], log_probs.shape[:-2].numel() > 1
    # torch.export would take the comparison of two sizes for a constraint on them.
    if not torch.compiler.is_compiling() and is_batch and labels > frames:
        raise ValueError(
            f"targets must have at most as many labels as there are frames, got {labels} labels and {frames} frames. "
            "If targets are padded, pass lengths=(frames, labels)"
        )


def _check_shared(targets: Tensor, labels: Tensor) -> None:
    """Raise a ValueError for targets (L,) that the numbers of labels divide among the members of a batch."""
    if labels.numel() > 1 and is_checked(labels) and int(labels.sum()) == len(targets):
        raise ValueError(concatenated(targets, labels.numel()))


def concatenated(targets: Tensor, batch: int) -> str:
    """A message about targets (L,), if each member of the batch should have its own."""
    return (
        f"targets must have shape (..., L), padded, got {tuple(targets.shape)} for a batch of {batch}. Concatenated "
        f"targets are supported by bellmax.compat.torch.CTCLoss and ctc_loss; to pad them, use {PADDED}. For one "
        "target that the batch shares, pass targets.unsqueeze(0)"
    )


def _check_shapes(log_probs: Tensor, targets: Tensor, blank: int) -> None:
    shape = check_tensor("log_probs", log_probs).shape
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"log_probs must have shape (..., T, V) with T, V >= 1, got {tuple(shape)}")
    if not log_probs.is_floating_point():
        raise ValueError(f"log_probs must be floating point, got dtype {log_probs.dtype}")
    if check_tensor("targets", targets).is_floating_point() or targets.dtype == torch.bool or targets.ndim < 1:
        raise ValueError(f"targets must hold integers (..., L), got {targets.dtype} of shape {tuple(targets.shape)}")
    if not 0 <= blank < shape[-1]:
        raise ValueError(f"blank must be a class of log_probs, from 0 to {shape[-1] - 1}, got {blank}")
