"""Token-and-duration transducers (Xu et al., 2023) under any Ω: transducers whose labels and blanks have durations."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from bellmax.inputs import Lengths
from bellmax.modes import is_checked
from bellmax.regularizers import Regularizer
from bellmax.structures.joint import log_softmax_all
from bellmax.structures.lattice import Lattice, LatticePaths, Move, cell, cell_class, row
from bellmax.structures.transducer import read_joint, score_labels

_LATTICES: dict[tuple[int, ...], Lattice] = {}  # torch.compile can look a lattice up, but not declare one


def check_durations(durations: Sequence[int]) -> tuple[int, ...]:
    """Return durations as a tuple.

    Raises ``ValueError`` unless they are different integers of at least 0, with one of at least 1.
    """
    try:
        numbers = tuple(map(index, durations))
    except TypeError:
        numbers = ()
    if min(numbers, default=-1) < 0 or max(numbers) < 1 or len({*numbers}) < len(numbers):
        raise ValueError(
            f"durations must be different integers of at least 0, with one of at least 1, got {durations!r}"
        )
    return numbers


def lattice_of(durations: tuple[int, ...]) -> Lattice:
    """Return the lattice of these durations, declared at most once.

    Node (t, u) has read t frames and emitted u labels. The score of a move is read at the node where it starts. The
    mask "_frames" forbids labels that leave no frame for the last blank.
    """
    if durations not in _LATTICES:
        blanks, labels = [], []
        for n, d in enumerate(durations):
            if d:
                blanks.append(Move(d, 0, score=cell("blank", -d) + cell_class("durations", n, -d)))
            score = cell("emit", -d, -1) + cell_class("durations", n, -d, -1)
            labels.append(Move(d, 1, score=score, where=row("_frames")))
        _LATTICES[durations] = Lattice(blanks + labels)
    return _LATTICES[durations]


class TDTPaths(LatticePaths):
    """The distribution over alignments that :meth:`bellmax.nn.TDTLoss.distribution` returns.

    A path reads T frames and emits U labels. Each of its moves is a label or a blank, and has a duration: the number of
    frames that it advances. The decoded form of a path is a walk: rows [frames read, labels emitted, 0, number of the
    move]. :meth:`timestamps` converts walks to the frame and the duration of each label. The event of a path is a 0/1
    tensor (T, U + 1), with a 1 for each blank ``[frame, number of labels emitted so far]``. ``gradient`` has the
    expected numbers of uses of each log-probability: "blank" (..., T, U + 1), "emit" (..., T, U) and "durations"
    (..., T, U + 1, D).

    >>> import bellmax as bx
    >>> token_logits, duration_logits = torch.zeros(4, 2, 5), torch.zeros(4, 2, 3)  # 4 frames, 1 label, 5 classes
    >>> token_logits[:, :, 0] = 3.0                          # the blank is likely
    >>> token_logits[1, 0, 3] = 6.0                          # the label 3 is likely at frame 1
    >>> duration_logits[1, 0, 2] = 6.0                       # and advances by two frames
    >>> loss = bx.nn.TDTLoss(durations=(0, 1, 2))
    >>> p = loss.distribution(token_logits, duration_logits, torch.tensor([3]))
    >>> p.timestamps(p.decode()), int(p.num_paths)
    (tensor([[1, 2]]), 25)
    """

    _size_argument = "lengths"

    def __init__(
        self,
        token_logits: Tensor,
        duration_logits: Tensor,
        targets: Tensor,
        *,
        durations: tuple[int, ...],
        blank: int,
        sigma: float,
        lengths: tuple[Lengths, Lengths] | None,
        omega: Regularizer,
    ) -> None:
        tensors = {"token_logits": token_logits, "duration_logits": duration_logits}
        labels, batch, sizes = read_joint(tensors, targets, blank, lengths)
        if duration_logits.shape[-1] != len(durations):
            needed = f"one class for each of the durations {durations}"
            raise ValueError(f"duration_logits must have {needed}, got shape {tuple(duration_logits.shape)}")
        token_logits = token_logits.expand(batch + token_logits.shape[-3:])
        (frames, positions), device = token_logits.shape[-3:-1], token_logits.device
        blank_scores, label_scores = score_labels(token_logits, labels, blank)
        num_frames, num_labels = (frames, positions - 1) if sizes is None else sizes
        is_padding = None
        if sizes is not None:
            is_late = torch.arange(frames, device=device) >= sizes[0].unsqueeze(-1)
            is_padding = is_late.unsqueeze(-1) | (torch.arange(positions, device=device) > sizes[1][..., None, None])
        scores = {
            "blank": blank_scores - sigma,
            "emit": label_scores - sigma,
            "durations": log_softmax_all(duration_logits, is_padding),
            "_frames": torch.arange(frames + 1, device=device) < (frames if sizes is None else sizes[0].unsqueeze(-1)),
        }
        super().__init__(lattice_of(durations), scores, grid=(num_frames + 1, num_labels + 1), omega=omega)

    @property
    def lengths(self) -> Tensor:
        """The number of frames and the number of labels of each sequence, (..., 2) int64."""
        return self._lengths - 1

    @property
    def marginals(self) -> Tensor:
        """Probability that each label is emitted at each frame, (..., T, U). Differentiable."""
        return self.gradient["emit"]

    def timestamps(self, walks: Tensor) -> Tensor:
        """Return the frame that emits each label and the duration of the label, (..., U, 2) int64, −1 in the padding.

        The next label or blank is at the frame plus the duration.

        Args:
            walks: Paths in the decoded form (..., L, 4), as :meth:`decode`, :meth:`sample_decoded` and
                :meth:`topk_decoded` return them.
        """
        _, decoded = self._read_decoded("walks", walks)
        i, j, _, move = decoded.unbind(-1)
        labels, moves = self.event_shape[1] - 1, self.lattice.moves
        steps = torch.tensor([(m.di, m.dj) for m in moves], device=self.device)[move.clamp(0, len(moves) - 1)]
        duration, is_label = steps[..., 0], (steps[..., 1] > 0) & (move >= 0)
        bad = (move >= len(moves)) | (is_label & ((j < 1) | (j > labels)))
        if is_checked(decoded) and bool(bad.any()):
            raise ValueError(f"walks must be paths, such as decode() returns, got the row {decoded[bad][0].tolist()}")
        number = torch.where(is_label, j - 1, labels).unsqueeze(-1).expand(*j.shape, 2)
        rows = torch.full((*j.shape[:-1], labels + 1, 2), -1, device=self.device)
        return rows.scatter(-2, number, torch.stack((i - duration, duration), -1))[..., :-1, :]
