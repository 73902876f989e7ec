"""The classes Chain and ScoredChain: the smoothed Viterbi operator (section 4.1 and appendix B.2 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

import bellmax.autograd as autograd
from bellmax.backends import BACKENDS
from bellmax.backends.fused import LabelledChain, LabelScores, TwoStateChain
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, Mask, answers_near_misses, check_tensor
from bellmax.modes import is_checked, is_transformed
from bellmax.programs import CHAIN, SCORED_CHAIN
from bellmax.programs.chain import first_step, last_step, previous_states
from bellmax.programs.checks import subscript
from bellmax.regularizers import Negentropy, Regularizer, penalty_at_vertex
from bellmax.structures.sequences import Gap, SequencePaths, SequenceTargets, read_steps
from bellmax.tensors import Gamma, Tensors, multiply_by_gamma, wide_dtype, widen

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_PRECISE = 1e9
"""The largest value for which a difference of two float64 values has an error below 1e-6."""
ScoresLike: TypeAlias = "Sequence[Tensor | None]"


class ScoredChainTargets(SequenceTargets):
    """Targets of a :class:`ScoredChain`. A fused kernel computes the score of full labels."""

    def excess_by_kernels(self, target: Tensor, ignore_index: int) -> tuple[Self, Tensor | None]:
        fused = BACKENDS[self.p.backend].fused.label_scores
        shape = (*self.batch_shape, self.event_shape[0])
        if fused is None or is_transformed(*self.solver.inputs) or not self._are_labels(target):
            return self, None
        if target.shape != shape or target.device != self.p.device:
            return self, None
        labels = (target if target.ndim == 2 else target.reshape(self.batch_shape.numel(), shape[-1])).to(torch.int64)
        targets, scores = self, self._scores_by_kernel(fused, labels, ignore_index)
        if scores is None and bool((labels == ignore_index).any()):
            targets = self.masked_by("target", target, ignore_index)
            scores = targets._scores_by_kernel(fused, labels, ignore_index)
        return (self, None) if scores is None else (targets, targets._excess_of(fused, labels, scores))

    def _scores_by_kernel(self, fused: LabelScores, labels: Tensor, ignore_index: int) -> Tensor | None:
        """Score (B,) of labels (B, T) at γ = 1, or None if a label is not a state or a score is infinite."""
        return fused.run(LabelledChain(self.solver.eager_theta(), self.solver.batch.index, labels, ignore_index))

    def _excess_of(self, fused: LabelScores, labels: Tensor, scores: Tensor) -> Tensor:
        """DP_Ω(θ) − DP_Ω(θ restricted to labels (B, T)), of the batch shape, given the label scores (B,) at γ = 1."""
        solver, batch, gamma = self.solver, self.solver.batch, self.p.omega.gamma
        theta, value, tape = solver.eager_forward()
        excess, penalty = value - scores, self._penalty(value.dtype)
        excess = (excess if penalty is None else excess + penalty).clamp_(min=0)
        result = batch.rescale(excess, gamma.detach() if isinstance(gamma, Tensor) else gamma)
        template = copy(self.p)
        template._solver = solver.without_scores()

        def vjp(inputs: Tensors, saved: Tensors, grad: Tensor) -> list[Tensor | None]:
            *saved_by_value, labels = saved

            def subtract(gradients: Tensors, theta: Tensors, seed: Tensor) -> None:
                fused.subtract_vjp(gradients, LabelledChain(theta, batch.index, labels, ignored=-1), seed)

            return batch.vjp(inputs, saved_by_value, grad, subtract)

        def general(inputs: Tensors, saved: Tensors) -> Tensor:
            p = cast("ScoredChain", template._by(template._solver.with_inputs(inputs)))
            value, score = p.value, p._score_of(saved[-1].reshape(*p.batch_shape, p.event_shape[0]))
            constant = 0 if penalty is None else multiply_by_gamma(penalty.reshape(p.batch_shape), p.omega.gamma)
            return value - score.to(value.dtype) + constant

        return autograd.Shortcut(vjp, general).attach(result, solver.inputs, (*theta, tape, excess, labels))

    def _penalty(self, dtype: torch.dtype) -> Tensor | None:
        """Sum of Ω over the nodes of a single path at γ = 1, (B,), or None if it is 0."""
        kernel = self.p.omega.kernel
        assert kernel is not None
        at_vertex = penalty_at_vertex(kernel)
        if not at_vertex:
            return None
        lengths = self.sequences.lengths.reshape(-1)
        return at_vertex * (lengths + (lengths > 0)).to(dtype)


class Chain(SequencePaths):
    """A distribution over sequences of states, such as a linear-chain CRF or a hidden Markov model.

    A sequence has T steps, and each step has one of S states. The event of a sequence is a 0/1 tensor (T, S, S). Its
    entry ``[t, i, j]`` is 1 if step t has state i and step t − 1 has state j. The first step has no previous state, so
    its entries use j = 0. ``potentials[..., 0, i, 0]`` is the score of starting in state i, and ``potentials[..., 0, i,
    j]`` with j > 0 is ignored. The decoded form of a sequence is the state of each step, integers (..., T), with −1 at
    masked steps and in the padding.

    Args:
        potentials: The score (..., T, S, S) of each transition ``[t, current, previous]``. −∞ forbids a transition.
        lengths: The number of steps of each sequence, integers of the batch shape from 0 to T, default T. The lengths
            need not be sorted. Steps beyond the length of a sequence are padding. Padding is ignored, may contain NaN
            and gets no gradient. A sequence of length 0 has value 0.
        mask: A tensor (..., T) of bool or 0/1 integers, to pass instead of ``lengths``. It is True (1) at the steps to
            keep. The other steps, called masked, may be anywhere. Masked steps are skipped: the previous state of a
            step is the state of the last unmasked step before this step. If step t is the first unmasked step,
            ``potentials[..., t, i, 0]`` is the score of starting in state i.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

    >>> import bellmax as bx
    >>> theta = torch.zeros(4, 2, 2)                   # four steps, two states
    >>> theta[:, 0, 0] = 1.0                           # staying in state 0 scores 1
    >>> p = bx.Chain(theta, omega="sparsemax")
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
        integers = read_steps(lengths, mask, shape[:-2], potentials.device)
        super().__init__(CHAIN, {"potentials": (potentials, 3)}, integers, shape[:-3], shape[-3:], omega, gamma)

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
        """Return a chain whose potentials are sums of scores of states and scores of transitions.

        The (T, S, S) potentials are not stored, which saves memory.

        Args:
            emissions: The score (..., T, S) of each state at each step.
            transitions: The score of each transition ``[current, previous]``: (S, S) for the whole batch, (..., S, S)
                for each sequence, or (..., T−1, S, S) for each sequence and step. If there are scores for each step,
                ``transitions[..., t − 1, :, :]`` scores the transition from step t − 1 to step t.
            start: The score (S,) or (..., S) of each state at the first unmasked step, default 0.
            end: The score (S,) or (..., S) of each state at the last unmasked step, default 0.
            lengths: The number of steps of each sequence, integers of the batch shape from 0 to T, default T.
            mask: A tensor (..., T) of bool or 0/1 integers, to pass instead of ``lengths``. It is True (1) at the steps
                to keep. The other steps, called masked, are skipped: the transition into a step comes from the last
                unmasked step before this step.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        >>> import bellmax as bx
        >>> emissions = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 0.5]])
        >>> transitions = torch.tensor([[0.0, -1.0], [-1.0, 0.0]])  # a change costs 1
        >>> p = bx.Chain.from_scores(emissions, transitions, omega="sparsemax")
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
    """A chain with scores of states and scores of transitions, which :meth:`Chain.from_scores` returns.

    An event is a 0/1 tensor (T, S, S). Methods that return or accept events, such as ``expected_path`` and ``topk``,
    create tensors of this size. So do ``log_prob``, ``pairwise_marginals`` and, under an Ω other than negentropy,
    ``entropy``. ``value``, ``marginals``, their derivatives, ``decode`` and the ``*_sequences`` methods do not.

    >>> import bellmax as bx
    >>> p = bx.Chain.from_scores(torch.tensor([[0.5, 0.0], [0.0, 2.0]]), torch.eye(2))
    >>> p.emissions.shape, p.decode()
    (torch.Size([2, 2]), tensor([1, 1]))
    """

    _target_kind = ScoredChainTargets

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
        # Compare only shapes with equal numbers of dimensions: torch.export records every comparison of sizes.
        num_transitions, dims = max(steps - 1, 0), transitions.ndim - len(shape)
        one_for_all = transitions.ndim == 2 and transitions.shape == (states, states)
        by_step = dims == 1 and transitions.shape == (*batch, num_transitions, states, states)
        if not (one_for_all or by_step or (dims == 0 and transitions.shape == (*batch, states, states))):
            pair = states, states
            shapes = " or ".join(dict.fromkeys(map(str, (pair, (*batch, *pair), (*batch, num_transitions, *pair)))))
            raise ValueError(
                f"transitions must have shape {shapes} for emissions of shape {tuple(shape)}, "
                f"got {tuple(transitions.shape)}"
            )
        if start is None or end is None:
            zeros = emissions.new_zeros(states)
            start, end = zeros if start is None else start, zeros if end is None else end
        for name, score in (("start", start), ("end", end)):
            needed = (states,) if check_tensor(name, score).ndim == 1 else (*batch, states)
            if score.shape != needed:
                shapes = " or ".join(dict.fromkeys((str((states,)), str((*batch, states)))))
                raise ValueError(f"{name} must have shape {shapes}, got {tuple(score.shape)}")
        scores = {"emissions": (emissions, 2), "transitions": (transitions, 3 if by_step else 2)}
        scores |= {"start": (start, 1), "end": (end, 1)}
        integers = read_steps(lengths, mask, shape[:-1], emissions.device)
        event = torch.Size((steps, states, states))
        PathDistribution.__init__(self, SCORED_CHAIN, scores, integers, batch, event, omega, gamma)

    @property
    def emissions(self) -> Tensor:
        """The score of each state at each step, (..., T, S)."""
        return self._scores[0]

    @property
    def transitions(self) -> Tensor:
        """The score of each transition ``[current, previous]``: (S, S), (..., S, S) or (..., T−1, S, S)."""
        return self._scores[1]

    @property
    def start(self) -> Tensor:
        """The score of each state at the first step, (S,) or (..., S)."""
        return self._scores[2]

    @property
    def end(self) -> Tensor:
        """The score of each state at the last step, (S,) or (..., S)."""
        return self._scores[3]

    @property
    def potentials(self) -> Tensor:
        """The sums of the scores, (..., T, S, S) ``[t, current, previous]``, computed at each access.

        If the scores are in half precision, the potentials are float32.
        """
        return self._solver.edge_weights()

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 at masked steps. Differentiable."""
        marginals = None if is_transformed(*self._solver.inputs) else self._marginals_by_kernels()
        if marginals is None:
            return self._solver.gradient()[0].to(self.dtype)
        return marginals.reshape(self.batch_shape + self.event_shape[:2]).to(self.dtype)

    def _marginals_by_kernels(self) -> Tensor | None:
        """Marginals (B, T, S) by the fused kernel for two states, or None if it does not support these scores."""
        fused, omega, batch = BACKENDS[self.backend].fused.chain_marginals, self.omega.kernel, self._solver.batch
        if fused is None or omega is None or self.event_shape[1] != 2:
            return None
        theta, index, route = batch.theta(self._scores, self.omega.gamma), batch.index, batch.route
        problem = TwoStateChain(theta, index, omega)
        if not fused.supports(problem):
            return None
        marginals = fused.run(problem)

        def vjp(theta: Tensors, saved: Tensors, grad: Tensor) -> Tensors:
            return fused.vjp(TwoStateChain(theta, index, omega), None, grad)

        def general(theta: Tensors, saved: Tensors) -> Tensor:
            _, tape = autograd.forward(route, theta, index)
            return autograd.expected_path(route, theta, tape, index)[0]

        return None if marginals is None else autograd.Shortcut(vjp, general).attach(marginals, theta)

    def directional_derivative(self, z: Tensor | ScoresLike | Mapping[str, Tensor]) -> Tensor:
        """Return the derivative of the value in the direction z, of the batch shape.

        Args:
            z: A tuple (emissions, transitions, start, end), where None stands for 0, or a mapping from these names to
                tensors. A tensor is the direction of the emissions.

        """
        return self._solver.directional_derivative(self._direction(z))

    def hessian_product(self, z: Tensor | ScoresLike | Mapping[str, Tensor]) -> Any:
        """Return the product of the Hessian of the value with a direction z, a tensor for each score.

        The result is a tuple (emissions, transitions, start, end), or a mapping by name if z is a mapping.

        Args:
            z: A tuple (emissions, transitions, start, end), where None stands for 0, or a mapping from these names to
                tensors. A tensor is the direction of the emissions.

        """
        products = [p.to(self.dtype) for p in self._solver.hessian_product(self._direction(z))]
        return self._by_name(products) if isinstance(z, Mapping) else tuple(products)

    def _most_accurate(self) -> Tensor:
        return self._decode_units({"emissions": self._solver.gradient()[0]})

    def entropy(self) -> Tensor:
        """Return the Shannon entropy of the distribution over sequences, of the batch shape.

        Differentiable in the scores and γ.
        """
        if type(self.omega) is not Negentropy:
            return super().entropy()
        # v − ⟨E, θ⟩ is a small difference of large numbers, so the scores are centered first.
        dims = ((-1,), (-2, -1), (-1,), (-1,))
        scores = [_centred(widen(score), d) for score, d in zip(self._scores, dims, strict=True)]
        centred = self._solver.with_scores(scores, self.omega)
        theta, value, tape = centred.flat_value()
        batch = centred.batch
        # A path with a lower score has probability 0, but for what rounding leaves, which times 1e308 is not small.
        bounded = [score.clamp(min=-2 * _MAX_PRECISE) for score in theta]
        slopes = autograd.directional_derivative(batch.route, theta, tape, bounded, batch.index)
        has_no_path = value == -math.inf
        if is_checked(value) and bool((value.masked_fill(has_no_path, 0).abs() > _MAX_PRECISE).any()):
            return super().entropy()  # the difference would have no correct digits
        entropy = (value.masked_fill(has_no_path, 0) - slopes).reshape(self.batch_shape)
        return entropy.to(torch.promote_types(self.dtype, torch.float32))

    def _direction(self, z: Tensor | ScoresLike | Mapping[str, Tensor]) -> list[Tensor]:
        """Return a direction as four tensors shaped like the scores. A single tensor is one of the emissions."""
        if isinstance(z, Mapping):
            return super()._direction(z)
        if isinstance(z, Tensor):
            z = (z, None, None, None)
        if len(z) != 4:
            raise ValueError(f"z must be a tuple (emissions, transitions, start, end), got {len(z)} entries")
        pairs = zip(SCORED_CHAIN.scores, z, self._scores, strict=True)
        return [torch.zeros_like(s) if d is None else self._like(f"{name} of z", d, s) for name, d, s in pairs]

    # --- for losses

    def _dense(self) -> Chain:
        dense = Chain(self.potentials, omega=self.omega)
        dense._solver = self._solver.with_edge_weights(self.potentials, self.omega)
        return dense

    def _why_forbidden(
        self, batch: tuple[int, ...], gap: Gap, sources: list[int], states: list[int]
    ) -> tuple[str, str]:
        """Name the score that is −∞ between the source states and the states of a gap."""
        emissions, transitions, start, end = self._scores
        to = self._show(states)
        if self._solver.dims[1] == 3:
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
        """Return the sentence about the constraints if there are any, else the sentence about the scores."""
        return scores if self._tags is None else f"the constraints allow no {forbidden}"

    def _score_of(self, sequence: Tensor) -> Tensor:
        """Return the sum of the scores along sequences (..., T), of the batch shape, without the potentials."""
        unmasked, states = self._unmasked, self.event_shape[1]
        sequence = sequence.masked_fill(~unmasked, 0)
        emissions, transitions, start, end = self._scores
        edge = (sequence * states + previous_states(sequence, unmasked))[..., 1:]
        first, last = first_step(unmasked), last_step(unmasked)
        if self._solver.dims[1] == 3:
            of_transitions = transitions.flatten(-2).gather(-1, edge.unsqueeze(-1)).squeeze(-1)
        else:
            of_transitions = transitions.flatten(-2).expand(*self.batch_shape, -1).gather(-1, edge)
        terms = [
            (emissions.gather(-1, sequence.unsqueeze(-1)).squeeze(-1), unmasked),
            (of_transitions, (unmasked & ~first)[..., 1:]),
        ]
        for score, at in ((start, first), (end, last)):
            terms.append((score.expand(*self.batch_shape, states).gather(-1, sequence), at))
        sums = [term.masked_fill(~at, 0).sum(-1, dtype=wide_dtype(self.device)) for term, at in terms]
        return torch.stack(sums).sum(0)


def _centred(score: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Subtract from a score its maximum along ``dims``, if that is finite."""
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
    """Return the smoothed Viterbi score of a chain, a tensor of the batch shape.

    The result is ``Chain(potentials, ...).value``: the smoothed maximum of the scores of all state sequences. See
    :class:`Chain` for the arguments. To get the best sequence, call ``Chain(...).decode()``.

    >>> viterbi(torch.zeros(3, 2, 2), omega="hard")  # each of the eight sequences has score 0
    tensor(0.)
    >>> viterbi(torch.zeros(3, 2, 2)).exp()  # the number of sequences
    tensor(8.)
    """
    return Chain(potentials, lengths=lengths, mask=mask, omega=omega, gamma=gamma).value
