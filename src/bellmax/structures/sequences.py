"""Base classes of distributions over sequences of states: SequencePaths and SequenceTargets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.decoded import DecodedForm, EdgeLists, Fault, are_integers
from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, Mask, as_lengths, as_mask, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.chain import first_step, is_used, previous_states, states_of, transitions_of
from bellmax.programs.checks import of_sequence, subscript
from bellmax.regularizers import Negentropy
from bellmax.targets import Paths, Targets
from bellmax.tensors import inner, promote_half, wide_dtype

if TYPE_CHECKING:
    from typing_extensions import Self

_ANY_STATE = -1
_MAX_SHOWN = 4  # states in a message


class Gap(NamedTuple):
    """The first step that no path reaches, and the unmasked step before it."""

    before: int
    """The unmasked step before, −1 if there is none."""
    step: int
    is_last: bool


class Tags(Protocol):
    """Names of states for messages, and advice about a sequence that constraints forbid."""

    def show(self, tag: int) -> str: ...

    def advice(self, tags: Sequence[int] | None, rule: str) -> str: ...


class SequenceTargets(Targets):
    """Targets of sequences: paths, labels (..., T), or sets of states (..., T, S)."""

    has_steps = True
    reads_integers = True

    @property
    def sequences(self) -> SequencePaths:
        return cast("SequencePaths", self.p)

    @property
    def num_steps(self) -> Tensor | None:
        return None if not self.solver.integers and self.event_shape[0] else self.sequences.lengths

    # --- reading a target

    def masked_by(self, name: str, target: Tensor, ignore_index: int) -> Self:
        if not self._are_labels(target):
            return self
        ignored = self.expand(name, target, self.event_shape[:1]) == ignore_index
        if self.solver.integers:
            ignored = ignored & self.sequences._unmasked
        if is_checked(ignored) and not bool(ignored.any()):
            return self
        return type(self)(self.sequences._without_steps(ignored))

    def _are_labels(self, target: object) -> bool:
        """True for integers (..., T), also without batch dimensions."""
        return isinstance(target, Tensor) and are_integers(target) and target.ndim <= len(self.batch_shape) + 1

    def _are_states(self, tensor: Tensor) -> bool:
        """True for tensors (..., T, S) over states, rather than (..., T, S, S) over transitions."""
        return tensor.ndim == len(self.batch_shape) + 2

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if self._are_labels(target):
            return self._allowed_by_labels(name, target, ignore_index)
        if target.dtype == torch.bool and self._are_states(target):
            return self._check_states(name, self.expand(name, target, self.event_shape[:2]))
        return super().allowed(name, target, ignore_index)

    def _allowed_by_labels(self, name: str, labels: Tensor, ignore_index: int) -> Tensor:
        """Return the states (..., T, S) that labels (..., T) allow: all states for −1 and at masked steps."""
        states = self.event_shape[1]
        labels = self.expand(name, labels, self.event_shape[:1])
        is_free = ~self.sequences._unmasked | (labels == _ANY_STATE)
        if is_checked(labels):
            bad = ~is_free & ((labels < 0) | (labels >= states))
            if bool(bad.any()):
                *batch, step = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"{name} must be from 0 to {states - 1}, -1 for any, or {ignore_index} to mask a step, "
                    f"got {labels[(*batch, step)].item()} at step {step}{of_sequence(batch)}"
                )
        state = torch.arange(states, device=labels.device)
        return (labels.unsqueeze(-1) == state) | is_free.unsqueeze(-1)

    def forms(self) -> list[str]:
        steps, states = self.event_shape[:2]
        labels, sets = (*self.batch_shape, steps), (*self.batch_shape, steps, states)
        return [*super().forms(), f"{labels} int64", f"{sets} bool"]

    def _check_states(self, name: str, states: Tensor) -> Tensor:
        """Return the allowed states, with all states at masked steps. Raises ``ValueError`` if a step allows none."""
        states = states | ~self.sequences._unmasked.unsqueeze(-1)
        if is_checked(states):
            empty = ~states.any(-1)
            if bool(empty.any()):
                *batch, step = empty.nonzero()[0].tolist()
                where = f"step {step}{of_sequence(batch)}"
                raise ValueError(f"{name} must allow a state at every unmasked step, got none at {where}")
        return states

    def is_used(self, ndim: int) -> Tensor:
        unmasked = self.sequences._unmasked
        is_of_states = ndim == len(self.batch_shape) + 2
        return unmasked.unsqueeze(-1) if is_of_states else is_used(unmasked, self.event_shape[1])

    # --- the program within a target

    def restrict(self, allowed: Tensor) -> Paths:
        if self._are_states(allowed):
            return self.sequences.constrain(allowed)
        return self.sequences._dense()._with((self.p.potentials.masked_fill(~allowed, -math.inf),), self.p.omega)

    def restricted_value(self, allowed: Tensor) -> Tensor:
        if not self._are_states(allowed):
            return super().restricted_value(allowed)
        is_single = (allowed.sum(-1) == 1) | ~self.sequences._unmasked
        if is_readable(is_single) and bool(is_single.all()):
            lengths = self.sequences.lengths
            score = self.sequences._score_of(allowed.to(torch.uint8).argmax(-1))
            return self.value_of_one_path(score, lengths + (lengths > 0))
        return super().restricted_value(allowed)

    def edges_within(self, allowed: Tensor) -> Tensor:
        return allowed.unsqueeze(-1) if self._are_states(allowed) else allowed

    # --- costs and distances are about states

    def correct(self, allowed: Tensor) -> Tensor:
        """Return the states (..., T, S) that a target allows, with all states at masked steps."""
        if self._are_states(allowed):
            return allowed
        first = first_step(self.sequences._unmasked).unsqueeze(-1)
        return self._check_states("target", torch.where(first, allowed[..., 0], allowed.any(-1)))

    def cost_shapes(self) -> list[torch.Size]:
        return [*super().cost_shapes(), self.batch_shape + self.event_shape[:2]]

    def add(self, cost: Tensor) -> Paths:
        p = self.sequences if self._are_states(cost) else self.sequences._dense()
        first, *rest = p._scores
        return p._with((first + (cost.unsqueeze(-1) if first.ndim > cost.ndim else cost), *rest), p.omega)

    def expected_cost(self, cost: Tensor) -> Tensor:
        if not self._are_states(cost):
            return super().expected_cost(cost)
        return inner(promote_half(self.sequences.marginals), promote_half(cost), 2)

    def distance(self, name: str, allowed: Tensor) -> Tensor:
        """Compare the marginals with the allowed states, step by step: KL for negentropy, else half the squared
        distance. A step that allows all states adds 0."""
        self.check_possible(name, allowed)
        states = self.correct(allowed)
        marginals = promote_half(self.sequences.marginals)
        correct = marginals.masked_fill(~states, 0).sum(-1)
        if isinstance(self.p.omega, Negentropy):
            loss = -correct.clamp(torch.finfo(correct.dtype).tiny, 1).log()
        else:
            # The nearest distribution over the allowed states spreads the wrong mass evenly over them.
            wrong = marginals.masked_fill(states, 0).square().sum(-1)
            loss = (wrong + (1 - correct).square() / states.sum(-1).clamp(min=1)) / 2
        return loss.masked_fill(states.all(-1), 0).sum(-1)

    # --- messages

    def why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        batch = tuple(impossible.nonzero()[0].tolist())
        p = cast("SequencePaths", self.p.detach()[batch] if batch else self.p.detach())
        within = (allowed.unsqueeze(-1) if self._are_states(allowed) else allowed)[batch]
        exists = (p.potentials > -math.inf) & within
        steps = p._unmasked.nonzero().flatten().tolist()
        reached = torch.arange(self.event_shape[1], device=p.device) == 0
        before = -1
        for step in steps:
            now = (exists[step] & reached).any(-1)
            if not bool(now.any()):
                break
            before, reached = step, now
        position = f"{name}{subscript((*batch, step))}"
        states, sources = (mask.nonzero().flatten().tolist() for mask in (within[step].any(-1), reached))
        if not states:
            return f"{position} allows no state"
        if not bool((within[step] & reached).any()):
            return f"{position} does not go on from {p._show(sources)}, where the path so far ends"
        is_label = len(states) == 1 and self._are_states(allowed)
        forbidden = f"{position} = {states[0]} is forbidden" if is_label else f"{position} is forbidden"
        rule, reason = p._why_forbidden(batch, Gap(before, step, step == steps[-1]), sources, states)
        if p._tags is None or not rule:
            return f"{forbidden}: {reason}"
        gold = [within[t].any(-1).nonzero().flatten().tolist() for t in steps]
        tags = [tag for (tag,) in gold] if all(len(tags) == 1 for tags in gold) else None
        return f"{forbidden}: {reason}. {p._tags.advice(tags, rule)}"


class StateForm(DecodedForm):
    """States (..., T) int64. States at masked steps are −1 in answers, and are ignored in arguments."""

    p: SequencePaths

    @property
    def own_shape(self) -> Sequence[int | str]:
        return self.p.event_shape[:1]

    def of_compact(self, paths: Tensor) -> Tensor:
        return paths

    def edges(self, decoded: Tensor) -> EdgeLists:
        steps, states = self.p.event_shape[:2]
        unmasked = self.p._unmasked.expand(decoded.shape)
        is_state = (decoded >= 0) & (decoded < states)
        current = decoded.masked_fill(~(is_state & unmasked), 0)
        if len(self.solver.integers) < 2:  # unmasked steps are adjacent
            previous = pad(current, (1, 0))[..., :-1]
        else:
            previous = previous_states(current, unmasked)
        step = torch.arange(steps, device=decoded.device)
        numbers = (step * states + current) * states + previous
        return EdgeLists(numbers.masked_fill(~unmasked, -1), (is_state | ~unmasked).all(-1))

    def fault(self, decoded: Tensor) -> Fault:
        states = self.p.event_shape[1]
        step = int((self.p._unmasked & ((decoded < 0) | (decoded >= states))).nonzero()[0])
        return Fault((step,), f"must be a state from 0 to {states - 1}, got {int(decoded[step])}")


class SequencePaths(PathDistribution):
    """A distribution over sequences of T states out of S, the base class of :class:`bellmax.Chain`.

    An event is the 0/1 tensor (T, S, S) ``[t, current, previous]`` of the transitions of a sequence. The decoded form
    is the state of each step, (..., T) int64, −1 at masked steps.

    >>> import bellmax as bx
    >>> isinstance(bx.Chain(torch.zeros(4, 2, 2)), SequencePaths)
    True
    """

    _target_kind = SequenceTargets
    _form_kind = StateForm
    _tags: Tags | None = None
    """The names of the states, if −∞ stands for constraints on tags."""

    @property
    def lengths(self) -> Tensor:
        """The number of unmasked steps of each sequence, (...) int64."""
        if not self._solver.integers:
            return torch.full(self.batch_shape, self.event_shape[0], dtype=torch.int64, device=self.device)
        return self._solver.integers[0]

    @property
    def _unmasked(self) -> Tensor:
        """(..., T): True at the unmasked steps."""
        steps, integers = self.event_shape[0], self._solver.integers
        if not integers:
            return torch.ones((*self.batch_shape, steps), dtype=torch.bool, device=self.device)
        if len(integers) == 2:
            return integers[1]
        return torch.arange(steps, device=self.device) < integers[0].unsqueeze(-1)

    def _without_steps(self, ignored: Tensor) -> Self:
        """Return the same scores with the steps of ``ignored`` (..., T) masked as well."""
        mask = self._unmasked & ~ignored
        return self._by(self._solver.with_integers((mask.sum(-1), mask)))

    # --- states

    @property
    def marginals(self) -> Tensor:
        """Probability of each state at each step, (..., T, S); 0 at masked steps. Differentiable."""
        return self._expected_path().sum(-1).to(self.dtype)

    @property
    def pairwise_marginals(self) -> Tensor:
        """Joint probability of the states at two neighboring steps, (..., T−1, S, S). Differentiable.

        The axes are ``[t, state of t + 1, state of t]``, in the order of the transitions. With a mask, step t is the
        last unmasked step before t + 1. Entries are 0 if step t + 1 is masked or has no unmasked step before it.

        >>> import bellmax as bx
        >>> p = bx.Chain.from_scores(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2))
        >>> p.pairwise_marginals[0]                     # [state of step 1, state of step 0]
        tensor([[0.0871, 0.0321],
                [0.6439, 0.2369]])
        >>> p.marginals
        tensor([[0.7311, 0.2689],
                [0.1192, 0.8808]])
        """
        first = first_step(self._unmasked)[..., None, None]
        return self.expected_path.masked_fill(first, 0)[..., 1:, :, :]

    def decode(self) -> Tensor:
        """Return the states of the highest-scoring path, (..., T) int64.

        States are −1 at masked steps. If no path exists, all states are −1.
        """
        return self._solver.topk(1)[1].reshape(*self.batch_shape, self.event_shape[0])

    def best_sequence(self) -> Tensor:
        """Return the states of the highest-scoring path, (..., T) int64, as :meth:`decode` does."""
        return self.decode()

    def topk_sequences(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores (..., k) and the states (..., k, T) of the k best paths, as :meth:`topk_decoded` does.

        States are −1 at masked steps. If there are fewer than k paths, the remaining scores are −∞ and the remaining
        states are −1. The scores have no gradient. For a gradient, use :meth:`topk`.
        """
        return self.topk_decoded(k)

    def sample_sequences(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return the states of random paths, (*sample_shape, ..., T) int64, as :meth:`sample_decoded` does."""
        return self.sample_decoded(sample_shape)

    def _most_accurate(self) -> Tensor:
        """Return the most accurate path in units of states, of which each transition has the score of its state."""
        first = self._solver.program.scores[0]
        marginals = self._solver.expanded().expected_edges().sum(-1)
        return self._decode_units({first: marginals.unsqueeze(-1)})

    def sequence_to_path(self, sequence: Tensor) -> Tensor:
        """Convert states (..., T) to an event (..., T, S, S), which is 0 at steps with state −1."""
        steps, states = self.event_shape[:2]
        if check_tensor("sequence", sequence).shape[-1:] != (steps,) or sequence.is_floating_point():
            got = f"{sequence.dtype} of shape {tuple(sequence.shape)}"
            raise ValueError(f"sequence must hold integers of shape (..., {steps}), got {got}")
        if is_readable(sequence) and sequence.numel() and not -1 <= int(sequence.min()) <= int(sequence.max()) < states:
            worst = sequence.max() if int(sequence.max()) >= states else sequence.min()
            raise ValueError(f"sequence must hold states from 0 to {states - 1}, or -1, got {int(worst)}")
        return transitions_of(sequence, states).to(self.dtype)

    def path_to_sequence(self, path: Tensor) -> Tensor:
        """Convert an event (..., T, S, S) to states (..., T) int64, which are −1 at steps without a transition."""
        return states_of(path)

    def constrain(self, allowed: Tensor) -> Self:
        """Return the distribution restricted to allowed states, for partial labels or prefixes.

        Under negentropy, the result is the conditional distribution, given that every state is allowed. Under another
        Ω, the result is not the conditional distribution, since each max_Ω is taken over the allowed states only.

        Args:
            allowed: The allowed states, bool, broadcastable to (..., T, S).

        >>> import bellmax as bx
        >>> allowed = torch.tensor([[True, True], [False, True]])  # state 1 at the second step
        >>> bx.Chain(torch.zeros(2, 2, 2)).constrain(allowed).marginals
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
        """
        needed = (*self.batch_shape, *self.event_shape[:2])
        if check_tensor("allowed", allowed).dtype != torch.bool:
            raise ValueError(f"allowed must be a bool tensor, got dtype {allowed.dtype}")
        try:
            forbidden = ~allowed.expand(needed)
        except RuntimeError:
            raise ValueError(f"allowed must broadcast to {tuple(needed)}, got shape {tuple(allowed.shape)}") from None
        first, *rest = self._scores
        forbidden = forbidden.reshape(needed + (1,) * (self._solver.dims[0] - 2))
        return self._with((first.masked_fill(forbidden, -math.inf), *rest), self.omega)

    # --- for losses

    def _dense(self) -> SequencePaths:
        """Return this distribution with potentials (..., T, S, S) as its score."""
        return self

    def _score_of(self, sequence: Tensor) -> Tensor:
        """Score ⟨Y, θ⟩ of states (..., T) in the wide dtype, of the batch shape. States at masked steps are ignored."""
        unmasked = self._unmasked
        sequence = sequence.masked_fill(~unmasked, 0)
        edge = sequence * self.event_shape[1] + previous_states(sequence, unmasked)
        scores = self.potentials.flatten(-2).gather(-1, edge.unsqueeze(-1)).squeeze(-1)
        return scores.masked_fill(~unmasked, 0).sum(-1, dtype=wide_dtype(self.device))

    def _why_forbidden(
        self, batch: tuple[int, ...], gap: Gap, sources: list[int], states: list[int]
    ) -> tuple[str, str]:
        """Return the rule that forbids the states after the sources, and a sentence about it.

        The rule is "starts", "transitions", "ends", or "" if constraints are not the cause. This distribution has no
        batch dimensions; ``batch`` is its index in the original batch.
        """
        if len(sources) == len(states) == 1:
            return "", f"potentials{subscript((*batch, gap.step, *states, *sources))} is -inf"
        return "", f"the potentials from {self._show(sources)} to {self._show(states)} are -inf"

    def _show(self, states: Sequence[int]) -> str:
        """Return the names of some states, for messages."""
        shown = [f"state {state}" if self._tags is None else self._tags.show(state) for state in states]
        more = f" or {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
        return " or ".join(shown[:_MAX_SHOWN]) + more


def read_steps(
    lengths: Lengths | None, mask: Mask | None, shape: torch.Size, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the index of a chain program with steps of ``shape`` (..., T), from lengths or a mask."""
    if mask is not None and lengths is not None:
        raise ValueError("pass either lengths or mask, not both")
    if mask is not None:
        unmasked = as_mask("mask", mask, device)
        if unmasked.shape != shape:
            raise ValueError(f"mask must have shape {tuple(shape)}, got {tuple(unmasked.shape)}")
        return unmasked.sum(-1), unmasked.clone()  # a copy: the caller may modify the mask after the tape is made
    if lengths is None:
        return ()
    length = as_lengths("lengths", lengths, device)
    if not length.ndim:
        length = length.expand(shape[:-1])
    if length.shape != shape[:-1]:
        raise ValueError(f"lengths must have the batch shape {tuple(shape[:-1])}, got {tuple(length.shape)}")
    return (length.clone(),)
