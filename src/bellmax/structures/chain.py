"""Sequences of states: the smoothed Viterbi operator (section 4.1 and appendix B.2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

import bellmax.autograd as autograd
from bellmax.backends import BACKENDS
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, Mask, answers_near_misses, check_tensor
from bellmax.layouts.scored_chain import dense, onto_edges
from bellmax.layouts.steps import first_step, last_step, previous_states
from bellmax.layouts.values import subscript
from bellmax.regularizers import Negentropy, Regularizer, penalty_at_vertex
from bellmax.structures.sequences import Gap, SequencePaths
from bellmax.targets import Targets
from bellmax.tensors import Gamma, Tensors, wide_dtype, widen
from bellmax.transforms import is_checked, is_transformed

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_PRECISE = 1e9
"""A value up to which a difference of two float64 is right to 1e-6."""
ScoresLike: TypeAlias = "Sequence[Tensor | None]"


class Chain(SequencePaths):
    """A distribution over sequences of T states out of S, for a batch of sequences of different lengths.

    A path is an indicator (T, S, S) ``[t, current, previous]`` over transitions. At the first step there is no previous
    state: only ``potentials[..., 0, :, 0]`` is used, the score of starting in each state.

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
            start: (S,) or (..., S), the score of each state at the first step that is kept; 0 by default.
            end: (S,) or (..., S), the score of each state at the last one; 0 by default.
            lengths: as in :class:`Chain`.
            mask: as in :class:`Chain`. Masked steps are removed; the two neighbours are linked by the transition of
                the later one.
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


class ScoredChain(Chain):
    """A chain given by scores: see :meth:`Chain.from_scores`.

    A path is still (T, S, S), and tensors of that shape (``expected_path``, ``topk``, ``log_prob`` of a path, …) are
    built when they are asked for. The value, ``marginals``, the ``*_sequences`` methods, their derivatives, and the
    entropy under negentropy do without.
    """

    structure = "scored_chain"
    _tape_is_large = True

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
        ends = []
        for name, given in (("start", start), ("end", end)):
            score = emissions.new_zeros(states) if given is None else check_tensor(name, given)
            needed = (states,) if score.ndim == 1 else (*batch, states)
            if score.shape != needed:
                raise ValueError(f"{name} must have shape {(states,)} or {(*batch, states)}, got {tuple(score.shape)}")
            ends.append(score)
        PathDistribution.__init__(
            self,
            {
                "emissions": (emissions, 2),
                "transitions": (transitions, 3 if by_step else 2),
                "start": (ends[0], 1),
                "end": (ends[1], 1),
            },
            batch,
            torch.Size((steps, states, states)),
            omega,
            gamma,
        )
        self._set_steps(lengths, mask)

    @property
    def emissions(self) -> Tensor:
        """(..., T, S)."""
        return self._scores[0]

    @property
    def transitions(self) -> Tensor:
        """As they were given: (S, S), (..., S, S) or (..., T−1, S, S) ``[current, previous]``."""
        return self._scores[1]

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
        """The potentials (..., T, S, S) ``[t, current, previous]`` that the scores add up to, built now.

        If the scores are in half precision, the potentials are float32.
        """
        return dense(self._flat.unscaled(self._scores), self._flat.index).reshape(self.batch_shape + self.event_shape)

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 at masked steps. Differentiable."""
        found = None if is_transformed(*self._scores) else self._marginals_in_one_go()
        if found is None:
            return self._gradient()[0].to(self.dtype)
        return found.reshape(self.batch_shape + self.event_shape[:2]).to(self.dtype)

    def _marginals_in_one_go(self) -> Tensor | None:
        """(B, T, S), by kernels for two states; None where they do not serve."""
        shortcut = BACKENDS[self.backend].shortcut("scored_chain.marginals")
        kernel, states = self.omega.kernel, self.event_shape[1]
        if shortcut is None or states != 2:
            return None
        theta, flat = self._flat_theta(), self._flat
        if not shortcut.serves(kernel, theta):
            return None
        program, index = flat.program, flat.index
        found = shortcut.run(kernel, theta, index)

        def vjp(theta: Tensors, kept: Tensors, grad: Tensor) -> Tensors:
            gradients: Tensors = shortcut.vjp(kernel, theta, index, grad)
            return gradients

        def general(theta: Tensors, kept: Tensors) -> Tensor:
            _, tape = autograd.forward(program, theta, index)
            return autograd.expected_path(program, theta, tape, index)[0]

        return None if found is None else autograd.Shortcut(vjp, general).attach(found, theta)

    def directional_derivative(self, z: Tensor | ScoresLike) -> Tensor:
        """⟨∇DP_Ω(θ), z⟩, of the batch shape, along z = (emissions, transitions, start, end); None stands for 0.

        A bare tensor z stands for (z, None, None, None).
        """
        return self._directional_derivative(self._direction(z))

    def hessian_product(self, z: Tensor | ScoresLike) -> tuple[Tensor, ...]:  # type: ignore[override]
        """∇²DP_Ω(θ) z in the shapes of (emissions, transitions, start, end), as z is; None stands for 0.

        A bare tensor z stands for (z, None, None, None). The result always holds four tensors.
        """
        return self._hessian_product(self._direction(z))

    def best_path(self) -> Tensor:
        """The highest-scoring path under θ as a 0/1 tensor (..., T, S, S); zeros where no path exists."""
        return self.sequence_to_path(self.best_sequence())

    def entropy(self) -> Tensor:
        """Shannon entropy of the path, of the batch shape. Differentiable in the scores and γ."""
        if type(self.omega) is not Negentropy:
            return super().entropy()
        # v − ⟨E, θ⟩, a small difference of large numbers: what is common to all paths is taken off first.
        dims = ((-1,), (-2, -1), (-1,), (-1,))
        scores = [_centred(widen(score), d) for score, d in zip(self._scores, dims, strict=True)]
        precise = self._with(scores, self.omega)
        theta, value, tape = precise._flat_value()
        flat = precise._flat
        slopes = autograd.directional_derivative(flat.program, theta, tape, theta, flat.index)
        nowhere = value == -math.inf
        if is_checked(value) and bool((value.masked_fill(nowhere, 0).abs() > _MOST_PRECISE).any()):
            return super().entropy()  # the difference would have no digits
        entropy = (value.masked_fill(nowhere, 0) - slopes).reshape(self.batch_shape)
        return entropy.to(torch.promote_types(self.dtype, torch.float32))

    # --- what the base asks for

    def _direction(self, z: Tensor | ScoresLike) -> list[Tensor]:
        if isinstance(z, Tensor):
            z = (z, None, None, None)
        if len(z) != 4:
            raise ValueError(f"z must hold emissions, transitions, start and end, got {len(z)} entries")
        direction = []
        for name, given in zip(("emissions", "transitions", "start", "end"), z, strict=True):
            score: Tensor = getattr(self, name)
            like = torch.zeros_like(score) if given is None else self._like(f"{name} of z", given, score)
            direction.append(like)
        return direction

    def _by_step(self) -> Self:
        """The same program, where each sequence has its own transitions at every step."""
        emissions, transitions, start, end = self._scores
        steps, states, batch = self.event_shape[0], self.event_shape[1], self.batch_shape
        if self._own_dims[1] == 2:
            transitions = transitions.unsqueeze(-3)
        transitions = transitions.expand(*batch, max(steps - 1, 0), states, states)
        other = self._with((emissions, transitions, start.expand(*batch, -1), end.expand(*batch, -1)), self.omega)
        other._own_dims = (2, 3, 1, 1)
        if type(self.omega) is not Negentropy:  # whose kernels keep another tape for shared transitions
            _, value, tape = self._forward()
            other._cache = {other._version(): (value, tape)}
        return other

    def _path(self) -> Tensor:
        return self._by_step()._onto_edges(autograd.expected_path)

    def _log_transitions(self) -> Tensor:
        return self._by_step()._onto_edges(autograd.log_transitions)

    def _onto_edges(self, sweep: Callable[..., Sequence[Tensor]]) -> Tensor:
        """Run a sweep of log q. Return its transitions and start as numbers of edges, (..., T, S, S)."""
        theta, _, tape = self._forward()
        flat = self._flat
        _, transitions, start, _ = sweep(flat.program, theta, tape, flat.index)
        edges = onto_edges(transitions, start, theta[0], flat.index)
        return edges.reshape(self.batch_shape + self.event_shape)

    def _with_weights(self, weights: Tensor, omega: Regularizer) -> Chain:
        dense = Chain(weights, omega=omega)
        dense._lengths, dense._mask, dense.backend = self._lengths, self._mask, self._backend_under(omega.kernel)
        return dense

    # --- targets

    def _why_forbidden(
        self, batch: tuple[int, ...], gap: Gap, sources: list[int], states: list[int]
    ) -> tuple[str, str]:
        emissions, transitions, start, end = self._scores
        to = self._show(states)
        if self._own_dims[1] == 3:
            transitions = transitions[max(gap.step - 1, 0)]
        if bool((emissions[gap.step, states] == -math.inf).all()):
            shown = (f"emissions{subscript((*batch, gap.step, state))}" for state in states)
            return "", f"{' and '.join(shown)} {'is' if len(states) == 1 else 'are'} -inf"
        if gap.before < 0 and bool((start[states] == -math.inf).all()):
            return "starts", self._rule(f"sequence to start with {to}", f"start is -inf for {to}")
        if gap.before >= 0 and bool((transitions[states][:, sources] == -math.inf).all()):
            where = f" at step {gap.before}" if gap.before < gap.step - 1 else ""
            way = f"transition from {self._show(sources)}{where} to {to}"
            return "transitions", self._rule(way, f"the {way} has score -inf")
        if gap.is_last and bool((end[states] == -math.inf).all()):
            return "ends", self._rule(f"sequence to end with {to}", f"end is -inf for {to}")
        return "", f"every way from {self._show(sources)} to {to} has score -inf"

    def _rule(self, forbidden: str, scores: str) -> str:
        return scores if self._tags is None else f"the constraints allow no {forbidden}"

    def _restricted_value(self, allowed: Tensor) -> Tensor:
        if self._is_of_states(allowed):
            return super()._restricted_value(allowed)
        return self._with_weights(self.potentials, self.omega)._restricted_value(allowed)

    def _add(self, cost: Tensor) -> Targets:
        if self._is_of_states(cost):
            return super()._add(cost)
        return self._with_weights(self.potentials, self.omega)._add(cost)

    def _excess_by_kernels(self, target: Tensor, ignore_index: int) -> tuple[Self, Tensor | None]:
        shortcut = BACKENDS[self.backend].shortcut("scored_chain.labels")
        if shortcut is None or is_transformed(*self._scores) or isinstance(self.omega.gamma, Tensor):
            return self, None
        shape = (*self.batch_shape, self.event_shape[0])
        if not self._holds_labels(target) or target.shape != shape or target.device != self.device:
            return self, None
        labels = (target if target.ndim == 2 else target.reshape(self.batch_shape.numel(), shape[-1])).to(torch.int64)
        p = self
        scores = p._score_by_kernels(shortcut, labels, ignore_index)
        if scores is None and bool((labels == ignore_index).any()):
            p = self._masked_by("target", target, ignore_index)
            scores = p._score_by_kernels(shortcut, labels, ignore_index)
        return (self, None) if scores is None else (p, p._excess_of_labels(shortcut, labels, scores))

    def _score_by_kernels(self, shortcut: Any, labels: Tensor, ignore_index: int) -> Tensor | None:
        """The score (B,) of labels (B, T) at γ = 1, if all of them are states of finite score."""
        theta = self._theta_without_graph(self._version())
        scores: Tensor | None = shortcut.run(theta, self._flat.index, labels, ignore_index)
        return scores

    def _excess_of_labels(self, shortcut: Any, labels: Tensor, scores: Tensor) -> Tensor:
        """DP_Ω less the score of labels (B, T), which were scored (B,) at γ = 1."""
        flat, kernel = self._flat, self.omega.kernel
        assert kernel is not None
        theta, value, tape = self._swept()
        excess = value - scores
        vertex = penalty_at_vertex(kernel)
        if vertex:
            lengths = self.lengths.reshape(-1)
            excess = excess + vertex * (lengths + (lengths > 0))
        found = flat.value(excess.clamp_(min=0))
        recipe = self._without_scores()

        def vjp(inputs: Tensors, kept: Tensors, grad: Tensor) -> list[Tensor | None]:
            *theta, tape, labels = kept
            seed = flat.seed(grad, theta)
            gradients = flat.run("backward", theta, tape, seed)
            shortcut.subtract(gradients, theta, flat.index, labels, seed)
            return flat.gradients(gradients, inputs)

        def general(inputs: Tensors, kept: Tensors) -> Tensor:
            p = recipe._with(inputs, recipe.omega)
            value = p._value()
            return value - p._score(kept[-1].reshape(*p.batch_shape, p.event_shape[0])).to(value.dtype)

        return autograd.Shortcut(vjp, general).attach(found, self._scores, (*theta, tape, labels))

    def _score(self, sequence: Tensor) -> Tensor:
        kept, states = self._kept, self.event_shape[1]
        sequence = sequence.masked_fill(~kept, 0)
        emissions, transitions, start, end = self._scores
        edge = (sequence * states + previous_states(sequence, kept))[..., 1:]
        first, last = first_step(kept), last_step(kept)
        if self._own_dims[1] == 3:
            moved = transitions.flatten(-2).gather(-1, edge.unsqueeze(-1)).squeeze(-1)
        else:
            moved = transitions.flatten(-2).expand(*self.batch_shape, -1).gather(-1, edge)
        terms = [
            (emissions.gather(-1, sequence.unsqueeze(-1)).squeeze(-1), kept),
            (moved, (kept & ~first)[..., 1:]),
        ]
        for score, at in ((start, first), (end, last)):
            terms.append((score.expand(*self.batch_shape, states).gather(-1, sequence), at))
        return torch.stack([term.masked_fill(~at, 0).sum(-1, dtype=wide_dtype(self.device)) for term, at in terms]).sum(
            0
        )


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
