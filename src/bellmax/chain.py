"""Sequences of states: the smoothed Viterbi operator (section 4.1 and appendix B.2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.regularizers import Regularizer


class Chain(PathDistribution):
    """A distribution over sequences of T states out of S, for a batch of sequences of different lengths.

    A path is an indicator (T, S, S) ``[t, current, previous]`` over transitions. At the first step there is no previous
    state: only ``potentials[..., 0, :, 0]`` counts, the score of starting in each state.

    Args:
        potentials: (..., T, S, S) ``[t, current, previous]``; −∞ forbids a transition.
        lengths: int64 of the batch shape, each from 0 to T, in any order; T for all by default. What lies past the
            end of a sequence is not looked at, may hold NaN, and gets no gradient. Length 0 has value 0.
        omega: a :class:`Regularizer`, or "negentropy", "l2", "hard".

    >>> import bellmax as bx
    >>> theta = torch.zeros(4, 2, 2)                   # four steps, two states
    >>> theta[:, 0, 0] = 1.0                           # state 0 likes to stay
    >>> p = bx.Chain(theta, omega="l2")
    >>> p.marginals
    tensor([[1., 0.],
            [1., 0.],
            [1., 0.],
            [1., 0.]])
    >>> p.best_sequence()
    tensor([0, 0, 0, 0])
    >>> bx.Chain(theta, lengths=torch.tensor(2)).best_sequence()
    tensor([ 0,  0, -1, -1])
    """

    structure = "chain"

    def __init__(
        self, potentials: Tensor, *, lengths: Tensor | None = None, omega: str | Regularizer = "negentropy"
    ) -> None:
        shape = potentials.shape
        if len(shape) < 3 or shape[-1] != shape[-2] or shape[-1] == 0:
            raise ValueError(f"potentials must have shape (..., T, S, S) with S >= 1, got {tuple(shape)}")
        super().__init__("potentials", potentials, 3, omega)
        if lengths is None:
            lengths = torch.full(self.batch_shape, shape[-3], dtype=torch.int64, device=potentials.device)
        if lengths.dtype != torch.int64:
            raise ValueError(f"lengths must be int64, got dtype {lengths.dtype}")
        if lengths.shape != self.batch_shape:
            raise ValueError(f"lengths must have the batch shape {tuple(self.batch_shape)}, got {tuple(lengths.shape)}")
        if lengths.device != potentials.device:
            raise ValueError(f"lengths must be on the potentials' device {potentials.device}, got {lengths.device}")
        self.lengths = lengths

    # --- states

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 past the end. Differentiable."""
        return self._path().sum(-1).to(self.potentials.dtype)

    def best_sequence(self) -> Tensor:
        """The states of the highest-scoring path, (..., T) int64; −1 past the end and where no path exists."""
        return self.topk_sequences(1)[1].squeeze(-2)

    def topk_sequences(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best paths under θ: scores (..., k), best first, and states (..., k, T), −1 past the end.

        Past the number of paths, scores are −∞ and states −1. Scores have no gradient; those of :meth:`topk` do.
        """
        scores, sequences = self._topk(k)
        return scores.reshape(*self.batch_shape, k), sequences.reshape(*self.batch_shape, k, -1)

    def sample_sequences(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """States drawn from the distribution, (*sample_shape, ..., T) int64; −1 past the end."""
        shape = torch.Size(sample_shape)
        drawn = self._sample(shape.numel()).movedim(1, 0)
        return drawn.reshape(shape + self.batch_shape + self.event_shape[:1])

    def sequence_to_path(self, sequence: Tensor) -> Tensor:
        """The path (..., T, S, S) of states (..., T): an indicator of the potentials' dtype, 0 where a state is −1."""
        states = self.event_shape[-1]
        if sequence.shape[-1:] != self.event_shape[:1] or sequence.is_floating_point():
            got = f"{sequence.dtype} of shape {tuple(sequence.shape)}"
            raise ValueError(f"sequence must be integer of shape (..., {self.event_shape[0]}), got {got}")
        previous = torch.cat((torch.zeros_like(sequence[..., :1]), sequence[..., :-1]), -1)
        state = torch.arange(states, device=sequence.device)
        current, before = sequence.unsqueeze(-1) == state, previous.unsqueeze(-1) == state
        return (current.unsqueeze(-1) & before.unsqueeze(-2)).to(self.potentials.dtype)

    def path_to_sequence(self, path: Tensor) -> Tensor:
        """The states (..., T) int64 of a path (..., T, S, S); −1 at steps that it does not take."""
        current = path.any(-1)
        return torch.where(current.any(-1), current.long().argmax(-1), -1)

    def constrain(self, allowed: Tensor) -> Chain:
        """The same program on the allowed states alone, ``allowed`` (..., T, S) bool: partial labels, prefixes.

        Under negentropy it is the distribution given that every state is allowed; under another Ω it is not, since what
        remains of a vector after removing entries is solved anew.
        """
        needed = (*self.batch_shape, *self.event_shape[:2])
        if allowed.dtype != torch.bool:
            raise ValueError(f"allowed must be bool, got dtype {allowed.dtype}")
        try:
            forbidden = ~allowed.expand(needed).unsqueeze(-1)
        except RuntimeError:
            raise ValueError(f"allowed must broadcast to {tuple(needed)}, got shape {tuple(allowed.shape)}") from None
        return self._with(self.potentials.masked_fill(forbidden, -math.inf), self.omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        return (self.lengths.reshape(-1),)

    @property
    def _num_choices(self) -> int:
        return self.event_shape[0]

    def _edges(self) -> Tensor:
        if not isinstance(self.omega.gamma, Tensor):
            return self.potentials  # the sweeps do not look at the rest, and arithmetic with a number leaves it alone
        steps = torch.arange(self.event_shape[0], device=self.potentials.device)
        state = torch.arange(self.event_shape[1], device=self.potentials.device)
        beyond = (steps >= self.lengths.unsqueeze(-1))[..., None, None]
        return self.potentials.masked_fill(beyond | ((steps == 0)[:, None, None] & (state > 0)), 0)

    def _to_paths(self, found: Tensor) -> Tensor:
        return self.sequence_to_path(found)

    def _with(self, potentials: Tensor, omega: Regularizer) -> Chain:
        other = Chain(potentials, lengths=self.lengths, omega=omega)
        other.backend = self.backend
        return other

    def _is_path(self, value: Tensor) -> Tensor:
        sequence = self.path_to_sequence(value)
        taken = torch.arange(self.event_shape[0], device=value.device) < self.lengths.unsqueeze(-1)
        whole = ((sequence >= 0) == taken).all(-1)
        return whole & (self.sequence_to_path(sequence) == value).flatten(-3).all(-1)

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, Chain)
            and self.potentials.shape == other.potentials.shape
            and self.lengths.equal(other.lengths)
        )


def viterbi(potentials: Tensor, *, lengths: Tensor | None = None, omega: str | Regularizer = "negentropy") -> Tensor:
    """Vit_Ω: the smoothed best score of a sequence of states, of the batch shape. See :class:`Chain`.

    >>> viterbi(torch.zeros(3, 2, 2), omega="hard")  # eight sequences of score 0
    tensor(0.)
    >>> viterbi(torch.zeros(3, 2, 2)).exp()  # their number
    tensor(8.)
    """
    return Chain(potentials, lengths=lengths, omega=omega).value
