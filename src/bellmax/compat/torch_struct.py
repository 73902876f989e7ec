"""A replacement for ``torch_struct`` 0.5: its two distributions over paths, chains and alignments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, kl_divergence

from bellmax.distribution import PathDistribution
from bellmax.layouts.grid import grid
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.chain import Chain
from bellmax.structures.dag import DAG, DAGPaths
from bellmax.tensors import inner
from bellmax.transforms import is_readable


class StructDistribution(Distribution):
    """The base of both: a :class:`PathDistribution` under the original's names.

    The original's properties are properties here, also ``entropy``.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as torch.distributions declares it

    def __init__(self, log_potentials: Tensor, lengths: Tensor | None = None) -> None:
        self.log_potentials = log_potentials
        self.lengths = lengths
        super().__init__(log_potentials.shape[:1], log_potentials.shape[1:], validate_args=False)

    @abstractmethod
    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        """The same distribution as a :class:`PathDistribution`."""

    @abstractmethod
    def _events(self, paths: Tensor) -> Tensor:
        """Paths (..., B, *event of :meth:`_paths`) as events of torch-struct."""

    @cached_property
    def _soft(self) -> PathDistribution:
        with torch.enable_grad():  # the result is cached, and later calls may need gradients
            return self._paths()

    @property
    def partition(self) -> Tensor:
        """The log-partition function, (B,)."""
        return self._soft.value

    @property
    def marginals(self) -> Tensor:
        """The probability of each part, of the potentials' shape. Differentiable."""
        return self._events(self._soft.expected_path)

    @property
    def max(self) -> Tensor:
        """The best score, (B,)."""
        return self._paths(Hard()).value

    @property
    def argmax(self) -> Tensor:
        """The best structure as a 0/1 tensor of the potentials' shape."""
        return self._events(self._soft.best_path())

    @property
    def mode(self) -> Tensor:
        """The same as :attr:`argmax`."""
        return self.argmax

    def kmax(self, k: int) -> Tensor:
        """The k best scores, (k, B), best first; −∞ past the number of structures."""
        return self._soft.topk(k)[0].movedim(-1, 0)

    def topk(self, k: int) -> Tensor:
        """The k best structures, (k, B, *event), best first; zeros past their number."""
        return self._events(self._soft.topk(k)[1].movedim(1, 0))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Structures drawn from the distribution, (*sample_shape, B, *event)."""
        return self._events(self._soft.sample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability (..., B) of structures (..., B, *event), 0/1."""
        score = inner(value.to(self.log_potentials.dtype), self.log_potentials, len(self.event_shape))
        return score - self.partition

    @property
    def entropy(self) -> Tensor:  # type: ignore[override]
        """Shannon entropy, (B,). Differentiable."""
        return self._soft.entropy()

    def kl(self, other: StructDistribution) -> Tensor:
        """The Kullback-Leibler divergence from ``other``, (B,)."""
        divergence: Tensor = kl_divergence(self._soft, other._soft)
        return divergence

    def cross_entropy(self, other: StructDistribution) -> Tensor:
        """The entropy plus the divergence from ``other``, (B,)."""
        return self.entropy + self.kl(other)

    @property
    def count(self) -> Tensor:
        """The number of structures of finite score, (B,)."""
        return self._soft.num_paths.to(self.log_potentials.dtype)


class LinearChainCRF(StructDistribution):
    """Sequences of N states out of C, with the arguments, event layout and results of torch-struct's class.

    Differences: time is O(N·C²), not O(N·C³); the longest of ``lengths`` need not be N, and N may be 1; if −∞ leaves no
    path, the partition is −∞ (a large negative number in the original), and ``entropy`` has no NaN; ``requires_grad``
    of the caller's tensor is not changed; ``sample`` takes any shape; ``to_event`` uses its lengths; failed assertions
    of the original are a ``ValueError``. There is no ``gumbel_crf``, and no ``struct`` with other semirings.

    Args:
        log_potentials: (B, N − 1, C, C) ``[current, previous]``.
        lengths: integers (B,), the number of states of each sequence, from 1 to N; N for all by default.
        args: ignored.

    >>> d = LinearChainCRF(torch.zeros(1, 3, 2, 2))  # four steps, two states
    >>> d.partition.exp(), d.marginals.shape
    (tensor([16.]), torch.Size([1, 3, 2, 2]))
    >>> d.from_event(d.sample((5,))[0])[0].shape
    torch.Size([1, 4])
    """

    def __init__(self, log_potentials: Tensor, lengths: Tensor | None = None, args: object = None) -> None:
        shape = log_potentials.shape
        if len(shape) != 4 or shape[2] != shape[3] or shape[3] == 0:
            raise ValueError(f"log_potentials must have shape (B, N - 1, C, C), got {tuple(shape)}")
        lengths = _check_lengths(lengths, shape[0], shape[1] + 1)
        self.args = args
        super().__init__(log_potentials, lengths)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        # Our first step has potentials too, torch-struct's has none.
        theta = torch.nn.functional.pad(self.log_potentials, (0, 0, 0, 0, 1, 0))
        return Chain(theta, lengths=self.lengths, omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        return paths[..., 1:, :, :]

    @staticmethod
    def to_event(sequence: Tensor, extra: int, lengths: Tensor | None = None) -> Tensor:
        """States (B, N) out of ``extra`` as an event (B, N − 1, C, C), int64; 0 past the lengths."""
        event = torch.nn.functional.one_hot(sequence[:, 1:] * extra + sequence[:, :-1], extra * extra)
        event = event.reshape(*event.shape[:2], extra, extra)
        if lengths is None:
            return event
        past = torch.arange(event.shape[1], device=sequence.device) >= lengths.unsqueeze(-1) - 1
        return event.masked_fill(past[..., None, None], 0)

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, int]:
        """The states (B, N) int64 of an event (B, N − 1, C, C), 0 past its end, and C."""
        previous, current = (event != 0).any(-2).long(), (event != 0).any(-1).long()
        return torch.cat((previous[:, :1], current), 1).argmax(-1), event.shape[-1]


class AlignmentCRF(StructDistribution):
    """Alignments of N and M elements, with a score for every move, in the event layout of torch-struct's class.

    An alignment begins in cell (0, 0) with the score ``log_potentials[:, 0, 0, 1]``, and ends in cell (N−1, M−1). The
    move into cell (i, j) is 0 from (i, j−1), 1 from (i−1, j−1), 2 from (i−1, j).

    Differences: genbmm is not needed; N may exceed M; shorter ``lengths`` work (the original reads the value at N); −∞
    forbids a move; ``requires_grad`` of the caller's tensor is not changed; ``sample`` takes any shape. ``local`` (an
    argument that the original ignores) and ``max_gap`` are a ``ValueError``: for a band, put −∞ into the potentials. It
    runs on the engine for graphs, with O(N·M) memory.

    Args:
        log_potentials: (B, N, M, 3).
        local: False.
        lengths: integers (B,), the length on the side of N, from 1 to N; N for all by default.
        max_gap: None.

    >>> d = AlignmentCRF(torch.zeros(1, 2, 3, 3))
    >>> d.count, d.partition.exp()
    (tensor([5.]), tensor([5.]))
    >>> d.argmax[0].nonzero().tolist()  # from (0, 0) to (1, 2): each cell, and how it was reached
    [[0, 0, 1], [0, 1, 0], [1, 2, 1]]
    """

    def __init__(
        self,
        log_potentials: Tensor,
        local: bool = False,
        lengths: Tensor | None = None,
        max_gap: int | None = None,
    ) -> None:
        shape = log_potentials.shape
        if len(shape) != 4 or shape[3] != 3 or 0 in shape[1:]:
            raise ValueError(f"log_potentials must have shape (B, N, M, 3) with N, M >= 1, got {tuple(shape)}")
        if local:
            raise ValueError("local must be False: local alignments are not supported, got True")
        if max_gap is not None:
            raise ValueError(f"max_gap must be None, got {max_gap}: put -inf into log_potentials for a band")
        lengths = _check_lengths(lengths, shape[0], shape[1])
        self.local, self.max_gap = local, max_gap
        super().__init__(log_potentials, lengths)

    @cached_property
    def _parts(self) -> Tensor:
        """The index in (N·M·3) of the potential of each edge of the grid, except the edges to the end."""
        rows, columns = self.event_shape[:2]
        g = grid(rows, columns, self.log_potentials.device)
        move = torch.tensor((1, 2, 0), device=g.kind.device)  # of DIAGONAL, UP, LEFT
        return 3 * g.cell + move[g.kind]

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        theta = self.log_potentials
        batch, rows, columns = theta.shape[:3]
        lengths = torch.full((batch,), rows, device=theta.device) if self.lengths is None else self.lengths
        past = torch.arange(rows, device=theta.device) >= lengths.unsqueeze(-1)
        moves = theta.masked_fill(past[..., None, None], -torch.inf).flatten(1).index_select(1, self._parts)
        begin = torch.arange(moves.shape[1], device=theta.device)
        moves = moves.masked_fill((begin > 0) & (begin < columns), -torch.inf)
        last = torch.arange(rows * columns, device=theta.device) == lengths.unsqueeze(-1) * columns - 1
        ends = torch.zeros_like(last, dtype=theta.dtype).masked_fill(~last, -torch.inf)
        return DAGPaths(DAG._of_grid(grid(rows, columns, theta.device)), torch.cat((moves, ends), 1), omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        events = paths.new_zeros((*paths.shape[:-1], self.event_shape.numel()))
        events = events.index_add(-1, self._parts, paths[..., : self._parts.shape[0]])
        return events.reshape(*paths.shape[:-1], *self.event_shape)


def _check_lengths(lengths: Tensor | None, batch: int, most: int) -> Tensor | None:
    """The lengths as int64."""
    if lengths is None:
        return None
    if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.shape != (batch,):
        got = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        raise ValueError(f"lengths must be integers of shape ({batch},), got {got}")
    if is_readable(lengths) and batch and not 1 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise ValueError(f"lengths must be from 1 to {most}, got {lengths.tolist()}")
    return lengths.long()
