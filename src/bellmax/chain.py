"""Sequences of states: the smoothed Viterbi operator (section 4.1 and appendix B.2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor

import bellmax.autograd as autograd
import bellmax.binary as binary
from bellmax.backends.reference.chain import first_step, kept_steps
from bellmax.backends.reference.scores import dense
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, Mask, answers_near_misses, as_lengths, as_mask, check_tensor
from bellmax.regularizers import Gamma, Negentropy, Regularizer, is_readable

if TYPE_CHECKING:
    from typing_extensions import Self

ScoresLike: TypeAlias = "Sequence[Tensor | None]"


class Chain(PathDistribution):
    """A distribution over sequences of T states out of S, for a batch of sequences of different lengths.

    A path is an indicator (T, S, S) ``[t, current, previous]`` over transitions. At the first step there is no previous
    state: only ``potentials[..., 0, :, 0]`` counts, the score of starting in each state.

    Args:
        potentials: (..., T, S, S) ``[t, current, previous]``; −∞ forbids a transition.
        lengths: integers of the batch shape, each from 0 to T, in any order; T for all by default. Padding past the end
            of a sequence is ignored, may hold NaN, and gets no gradient. Length 0 has value 0.
        mask: instead of lengths, bool or 0/1 integers (..., T), True at the steps to keep. It may have holes and begin
            with False: a masked step is skipped, and the previous state of the next is that of the last step kept.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default.

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
    _own_tensors: ClassVar[dict[str, int]] = {"lengths": 0, "_mask": 1}

    @answers_near_misses
    def __init__(
        self,
        potentials: Tensor,
        *,
        lengths: Lengths | None = None,
        mask: Mask | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("potentials", potentials).shape
        if len(shape) < 3 or shape[-1] != shape[-2] or shape[-1] == 0:
            raise ValueError(f"potentials must have shape (..., T, S, S) with S >= 1, got {tuple(shape)}")
        super().__init__({"potentials": (potentials, 3)}, shape[:-3], shape[-3:], omega, gamma)
        self._set_steps(lengths, mask)

    @classmethod
    @answers_near_misses
    def from_scores(
        cls,
        emissions: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Lengths | None = None,
        mask: Mask | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> ScoredChain:
        """A chain whose potentials are sums of scores of states and of transitions, and are never built.

        Args:
            emissions: (..., T, S), the score of each state at each step.
            transitions: (S, S) ``[current, previous]`` for the whole batch, (..., S, S) for each sequence, or
                (..., T−1, S, S) for each step as well, where place t−1 leads into step t.
            start: (S,) or (..., S), the score of each state at the first step that counts; 0 by default.
            end: (S,) or (..., S), the score of each state at the last one; 0 by default.
            lengths: as in :class:`Chain`.
            mask: as in :class:`Chain`. A step that is skipped adds no node: the transition into the later one links its
                neighbours.
            omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.

        >>> import bellmax as bx
        >>> emissions = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 0.5]])
        >>> transitions = torch.tensor([[0.0, -1.0], [-1.0, 0.0]])  # to change costs 1
        >>> p = bx.Chain.from_scores(emissions, transitions, omega="l2")
        >>> p.best_sequence()
        tensor([0, 0, 0])
        >>> p.marginals
        tensor([[1.0000, 0.0000],
                [0.8125, 0.1875],
                [0.6250, 0.3750]])
        """
        return ScoredChain(
            emissions, transitions, start=start, end=end, lengths=lengths, mask=mask, omega=omega, gamma=gamma
        )

    def _set_steps(self, lengths: Lengths | None, mask: Mask | None) -> None:
        """Which steps are kept: ``lengths`` of the batch shape, and ``_mask``, empty if they are the first ones."""
        steps = self.event_shape[0]
        if mask is not None and lengths is not None:
            raise ValueError("lengths and mask say the same: give one of them")
        if mask is not None:
            kept = as_mask("mask", mask, self.device)
            if kept.shape != (*self.batch_shape, steps):
                raise ValueError(f"mask must have shape {(*self.batch_shape, steps)}, got {tuple(kept.shape)}")
            self._mask = kept.clone()  # the tape is made for these steps, whatever becomes of the caller's tensor
            self.lengths = kept.sum(-1)
            return
        self._mask = torch.empty((*self.batch_shape, 0), dtype=torch.bool, device=self.device)
        if lengths is None:
            self.lengths = torch.full(self.batch_shape, steps, dtype=torch.int64, device=self.device)
            return
        given = as_lengths("lengths", lengths, self.device)
        if not given.ndim:
            given = given.expand(self.batch_shape)
        if given.shape != self.batch_shape:
            raise ValueError(f"lengths must have the batch shape {tuple(self.batch_shape)}, got {tuple(given.shape)}")
        self.lengths = given.clone()

    # --- states

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 at steps that do not count. Differentiable."""
        return self._path().sum(-1).to(self.dtype)

    @property
    def pairwise_marginals(self) -> Tensor:
        """Joint probability of the states at two neighbouring steps, (..., T−1, S, S) ``[t, current, previous]``.

        Place t is of step t + 1 and the one that counts before it; 0 where there is none. Differentiable.
        """
        first = first_step(self._kept)[..., None, None]
        return self.expected_path.masked_fill(first, 0)[..., 1:, :, :]

    def best_sequence(self) -> Tensor:
        """The states of the highest-scoring path, (..., T) int64; −1 past the end and where no path exists."""
        return self.topk_sequences(1)[1].squeeze(-2)

    def topk_sequences(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best paths under θ: scores (..., k), best first, and states (..., k, T), −1 past the end.

        Past the number of paths, scores are −∞ and states −1. Scores have no gradient; those of :meth:`topk` do.
        """
        scores, sequences = self._topk(k)
        return scores.reshape(*self.batch_shape, k), sequences.reshape(*self.batch_shape, k, self.event_shape[0])

    def sample_sequences(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """States drawn from the distribution, (*sample_shape, ..., T) int64; −1 past the end."""
        shape = torch.Size(sample_shape)
        drawn = self._sample(shape.numel()).movedim(1, 0)
        return drawn.reshape(shape + self.batch_shape + self.event_shape[:1])

    def sequence_to_path(self, sequence: Tensor) -> Tensor:
        """The path (..., T, S, S) of states (..., T): an indicator of the potentials' dtype, 0 where a state is −1."""
        steps, states = self.event_shape[:2]
        if check_tensor("sequence", sequence).shape[-1:] != (steps,) or sequence.is_floating_point():
            got = f"{sequence.dtype} of shape {tuple(sequence.shape)}"
            raise ValueError(f"sequence must be integer of shape (..., {steps}), got {got}")
        if is_readable(sequence) and sequence.numel() and not -1 <= int(sequence.min()) <= int(sequence.max()) < states:
            worst = sequence.max() if int(sequence.max()) >= states else sequence.min()
            raise ValueError(f"sequence must hold states from 0 to {states - 1}, or -1, got {int(worst)}")
        # The step before each one that has a state, −1 for the first.
        step = torch.arange(steps, device=sequence.device).expand(sequence.shape)
        seen = torch.where(sequence >= 0, step, -1).cummax(-1).values if steps else step
        before = torch.cat((torch.full_like(seen[..., :1], -1), seen[..., :-1]), -1)
        previous = torch.where(before >= 0, sequence.gather(-1, before.clamp(min=0)), 0)
        state = torch.arange(states, device=sequence.device)
        return ((sequence.unsqueeze(-1) == state).unsqueeze(-1) & (previous.unsqueeze(-1) == state).unsqueeze(-2)).to(
            self.dtype
        )

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
        if check_tensor("allowed", allowed).dtype != torch.bool:
            raise ValueError(f"allowed must be bool, got dtype {allowed.dtype}")
        try:
            forbidden = ~allowed.expand(needed)
        except RuntimeError:
            raise ValueError(f"allowed must broadcast to {tuple(needed)}, got shape {tuple(allowed.shape)}") from None
        first, *rest = self._scores
        forbidden = forbidden.reshape(needed + (1,) * (self._own_dims[0] - 2))
        return self._with((first.masked_fill(forbidden, -math.inf), *rest), self.omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        return self.lengths.reshape(-1), self._mask.reshape(self.lengths.numel(), self._mask.shape[-1])

    @property
    def _kept(self) -> Tensor:
        """(..., T): the steps that count."""
        return kept_steps((self.lengths, self._mask), self.event_shape[0])

    @property
    def _num_choices(self) -> int:
        return self.event_shape[0]

    def _finite_scores(self) -> tuple[Tensor, ...]:
        if not isinstance(self.omega.gamma, Tensor):
            return self._scores  # the sweeps do not look at the rest, and arithmetic with a number leaves it alone
        kept = self._kept
        state = torch.arange(self.event_shape[1], device=self.device)
        nowhere = first_step(kept)[..., None, None] & (state > 0)
        return (self.potentials.masked_fill(~kept[..., None, None] | nowhere, 0),)

    def _to_paths(self, found: Tensor) -> Tensor:
        return self.sequence_to_path(found)

    def _without(self, ignored: Tensor) -> Self:
        """The same scores on fewer steps: those of ``ignored`` (..., T) are masked as well."""
        other = copy(self)
        other._forget()
        other._set_steps(None, self._kept & ~ignored)
        return other

    def _is_path(self, value: Tensor) -> Tensor:
        sequence = self.path_to_sequence(value)
        whole = ((sequence >= 0) == self._kept).all(-1)
        return whole & (self.sequence_to_path(sequence) == value).flatten(-3).all(-1)

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, Chain)
            and self.batch_shape == other.batch_shape
            and self.event_shape == other.event_shape
            and self._kept.equal(other._kept)
        )


class ScoredChain(Chain):
    """What :meth:`Chain.from_scores` gives.

    A path is still (T, S, S), and what has that shape (``expected_path``, ``topk``, ``log_prob`` of a path, …) is built
    when it is asked for. The value, ``marginals``, the ``*_sequences`` methods, their derivatives, and the entropy
    under negentropy do without.
    """

    structure = "scores"

    def __init__(
        self,
        emissions: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Lengths | None = None,
        mask: Mask | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape = check_tensor("emissions", emissions).shape
        if len(shape) < 2 or shape[-1] == 0:
            raise ValueError(f"emissions must have shape (..., T, S) with S >= 1, got {tuple(shape)}")
        check_tensor("transitions", transitions)
        batch, steps, states = shape[:-2], shape[-2], shape[-1]
        # Shapes of different lengths are not compared: torch.export would take note that a size is not another one.
        places, dims = max(steps - 1, 0), transitions.ndim - len(shape)
        one_for_all = transitions.ndim == 2 and transitions.shape == (states, states)
        by_step = dims == 1 and transitions.shape == (*batch, places, states, states)
        if not (one_for_all or by_step or (dims == 0 and transitions.shape == (*batch, states, states))):
            each = f"{(*batch, states, states)} or {(*batch, places, states, states)}"
            raise ValueError(
                f"transitions must have shape {(states, states)}, {each} for emissions of shape {tuple(shape)}, "
                f"got {tuple(transitions.shape)}"
            )
        if not by_step:
            transitions = transitions.unsqueeze(-3)
        ends = []
        for name, given in (("start", start), ("end", end)):
            score = emissions.new_zeros(states) if given is None else check_tensor(name, given)
            needed = (states,) if score.ndim == 1 else (*batch, states)
            if score.shape != needed:
                raise ValueError(f"{name} must have shape {(states,)} or {(*batch, states)}, got {tuple(score.shape)}")
            ends.append(score)
        PathDistribution.__init__(
            self,
            {"emissions": (emissions, 2), "transitions": (transitions, 3), "start": (ends[0], 1), "end": (ends[1], 1)},
            batch,
            torch.Size((steps, states, states)),
            omega,
            gamma,
        )
        self._by_step = by_step
        self._set_steps(lengths, mask)

    @property
    def emissions(self) -> Tensor:
        """(..., T, S)."""
        return self._scores[0]

    @property
    def transitions(self) -> Tensor:
        """As they were given: (S, S), (..., S, S) or (..., T−1, S, S) ``[current, previous]``."""
        return self._scores[1] if self._by_step else self._scores[1].squeeze(-3)

    @property
    def start(self) -> Tensor:
        """(S,) or (..., S)."""
        return self._scores[2]

    @property
    def end(self) -> Tensor:
        """(S,) or (..., S)."""
        return self._scores[3]

    @property
    def potentials(self) -> Tensor:
        """The potentials (..., T, S, S) ``[t, current, previous]`` that the scores add up to, built now."""
        flat = [self._flatten(score, dims) for score, dims in zip(self._scores, self._own_dims, strict=True)]
        return dense(flat, self._index).reshape(self.batch_shape + self.event_shape)

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 at steps that do not count. Differentiable."""
        theta = self._flat_theta()
        if binary.serves(self._program, theta):
            with suppress(binary.UnservedError):
                found = binary.marginals(self._program, theta, self._index)
                return found.reshape(self.batch_shape + self.event_shape[:2]).to(self.dtype)
        return self._gradient()[0].to(self.dtype)

    def directional_derivative(self, z: ScoresLike) -> Tensor:  # type: ignore[override]
        """⟨∇DP_Ω(θ), z⟩, of the batch shape, along z = (emissions, transitions, start, end); None stands for 0."""
        return self._directional_derivative(self._direction(z))

    def hessian_product(self, z: ScoresLike) -> tuple[Tensor, ...]:  # type: ignore[override]
        """∇²DP_Ω(θ) z in the shapes of (emissions, transitions, start, end), as z is; None stands for 0."""
        emissions, transitions, start, end = self._hessian_product(self._direction(z))
        return emissions, transitions if self._by_step else transitions.squeeze(-3), start, end

    def best_path(self) -> Tensor:
        """The highest-scoring path under θ as a 0/1 tensor (..., T, S, S); zeros where no path exists."""
        return self.sequence_to_path(self.best_sequence())

    @property
    def mode(self) -> Tensor:
        """The most probable path as a 0/1 tensor. It is the best path for negentropy, not in general."""
        return self.best_path() if type(self.omega) is Negentropy else self._dense().mode

    def entropy(self) -> Tensor:
        """Shannon entropy of the path, of the batch shape. Differentiable in the scores and γ."""
        if type(self.omega) is not Negentropy:
            return self._dense().entropy()
        # v − ⟨E, θ⟩, a small difference of large numbers: what is common to all paths is taken off first.
        dims = ((-1,), (-2, -1), (-1,), (-1,))
        scores = [_centred(score.double(), d) for score, d in zip(self._scores, dims, strict=True)]
        precise = self._with(scores, self.omega)
        theta, value, tape = precise._flat_value()
        slopes = autograd.directional_derivative(precise._program, theta, tape, theta, precise._index)
        nowhere = value == -math.inf
        entropy = (value.masked_fill(nowhere, 0) - slopes).reshape(self.batch_shape)
        return entropy.to(torch.promote_types(self.dtype, torch.float32))

    def support_paths(self, max_paths: int = 1000) -> tuple[Tensor, Tensor]:
        """As for every distribution over paths: see :meth:`PathDistribution.support_paths`."""
        return self._dense().support_paths(max_paths)

    # --- what the base asks for

    def _finite_scores(self) -> tuple[Tensor, ...]:
        if not isinstance(self.omega.gamma, Tensor):
            return self._scores
        kept = self._kept
        emissions, transitions, start, end = self._scores
        emissions = emissions.masked_fill(~kept.unsqueeze(-1), 0)
        if self._by_step:
            transitions = transitions.masked_fill(~(kept & ~first_step(kept))[..., 1:, None, None], 0)
        return emissions, transitions, start, end

    def _direction(self, z: ScoresLike) -> list[Tensor]:
        if len(z) != 4:
            raise ValueError(f"z must hold emissions, transitions, start and end, got {len(z)} entries")
        direction = []
        for name, given in zip(("emissions", "transitions", "start", "end"), z, strict=True):
            score: Tensor = getattr(self, name)
            like = torch.zeros_like(score) if given is None else self._like(f"{name} of z", given, score)
            direction.append(like.unsqueeze(-3) if name == "transitions" and not self._by_step else like)
        return direction

    def _dense(self) -> Chain:
        dense = Chain(self.potentials, omega=self.omega)
        dense.lengths, dense._mask, dense.backend = self.lengths, self._mask, self.backend
        return dense

    def _path(self) -> Tensor:
        return self._dense()._path()

    def _log_transitions(self) -> Tensor:
        return self._dense()._log_transitions()


def _centred(score: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A score less the greatest along ``dims``, where that is finite."""
    top = score.detach().amax(dims, keepdim=True)
    return score - top.masked_fill(~top.isfinite(), 0)


@answers_near_misses
def viterbi(
    potentials: Tensor,
    *,
    lengths: Lengths | None = None,
    mask: Mask | None = None,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
) -> Tensor:
    """Vit_Ω: the smoothed best score of a sequence of states, of the batch shape. See :class:`Chain`.

    >>> viterbi(torch.zeros(3, 2, 2), omega="hard")  # eight sequences of score 0
    tensor(0.)
    >>> viterbi(torch.zeros(3, 2, 2)).exp()  # their number
    tensor(8.)
    """
    return Chain(potentials, lengths=lengths, mask=mask, omega=omega, gamma=gamma).value
