"""A hidden Markov model as a layer, under any Ω, with explicit durations on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bellmax.inputs import Lengths, answers_near_misses, check_tensor
from bellmax.markov.filtering import Filter, FilterState, log_survival
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.structures.chain import Chain, ScoredChain
from bellmax.structures.semi_markov import ScoredSemiMarkov, SemiMarkov
from bellmax.tensors import Gamma, promote_half


class HMM(Smoothed):
    """A hidden Markov model as a layer, which learns its transitions together with a module that scores observations.

    The layer returns a distribution over sequences of hidden states. If Ω is negentropy with γ = 1, and ``emission``
    returns log-densities of the observations, the value of the distribution is their log-likelihood. Under another Ω,
    the value is a smoothed maximum of the joint log-probability of observations and states.

    To train the layer without labels, minimize ``-layer(x, lengths=n).value.mean()``. In this case, ``emission`` must
    return log-densities or log-probabilities of the observations. If it returns arbitrary scores, such as the result of
    a linear layer, this loss has no minimum. If the states are labeled, use a loss of :mod:`bellmax.losses`. Then
    ``emission`` may return arbitrary scores.

    The parameters are ``start_logits`` (S,), ``transition_logits`` (S, S) ``[from, to]``, and with ``max_duration``,
    ``duration_logits`` (S, D). A log-softmax over the last dimension turns them into log-probabilities. A logit of −∞
    forbids a state, transition or duration. Each row needs one finite logit. The parameters are initialized to 0, so
    all probabilities of a row are equal. The states then differ only by their emissions. Initialize ``emission`` such
    that they do, since training cannot separate states with equal emissions.

    With ``max_duration``, the model is a hidden semi-Markov model: each segment of equal states has an explicit
    duration from 1 to ``max_duration``, and a state cannot follow itself. The last segment of a sequence can be longer
    than observed (right-censoring). It is scored by the probability of lasting at least as long as observed.

    If an observation is missing, set all of its scores to 0.

    Args:
        num_states: The number S of states. If ``max_duration`` is set, S must be at least 2.
        emission: A module or function that maps observations x to the log-score (..., T, S) of each state at each step.
            Default None: x is the log-score.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`~bellmax.Regularizer`. If γ of the regularizer is an ``nn.Parameter``, it is learned.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        max_duration: The longest duration D of a segment. Default None: no explicit durations.

    >>> from bellmax.nn import HMM
    >>> class Gaussian(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.means = torch.nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))
    ...     def forward(self, x):
    ...         return torch.distributions.Normal(self.means, 1.0).log_prob(x.unsqueeze(-1))
    >>> layer = HMM(3, emission=Gaussian())
    >>> x = torch.randn(4, 10)                                    # four sequences of ten steps
    >>> p = layer(x, lengths=[10, 8, 10, 5])                      # a Chain
    >>> p.value.shape, p.marginals.shape, p.decode().shape
    (torch.Size([4]), torch.Size([4, 10, 3]), torch.Size([4, 10]))
    >>> (-p.value.mean()).backward()
    >>> layer.transition_logits.grad.shape
    torch.Size([3, 3])

    To label a stream while it arrives, pass it in chunks of any length:

    >>> state = layer.start(batch_shape=4)
    >>> state, posterior = layer.filter(x[:, :7], state)
    >>> state, posterior = layer.filter(x[:, 7:], state)
    >>> posterior.shape, layer.forecast(state, steps=5).shape
    (torch.Size([4, 3, 3]), torch.Size([4, 5, 3]))
    """

    start_logits: nn.Parameter
    transition_logits: nn.Parameter
    duration_logits: nn.Parameter | None

    @answers_near_misses
    def __init__(
        self,
        num_states: int,
        *,
        emission: Callable[..., Tensor] | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        max_duration: int | None = None,
    ) -> None:
        super().__init__(omega, gamma)
        least = 1 if max_duration is None else 2
        if num_states < least:
            why = "" if max_duration is None else " with max_duration, since a state cannot follow itself"
            raise ValueError(f"num_states must be at least {least}{why}, got {num_states}")
        if max_duration is not None and max_duration < 1:
            raise ValueError(f"max_duration must be at least 1, got {max_duration}")
        if emission is not None and not callable(emission):
            raise ValueError(f"emission must be a module or a function, got {type(emission).__name__}")
        self.num_states, self.max_duration = num_states, max_duration
        self.emission = emission
        self.start_logits = nn.Parameter(torch.zeros(num_states))
        self.transition_logits = nn.Parameter(torch.zeros(num_states, num_states))
        self.duration_logits = None if max_duration is None else nn.Parameter(torch.zeros(num_states, max_duration))

    def reset_parameters(self) -> None:
        """Set all logits to 0 and γ to its initial value. The parameters of ``emission`` do not change."""
        super().reset_parameters()
        for parameter in (self.start_logits, self.transition_logits, self.duration_logits):
            if parameter is not None:
                nn.init.zeros_(parameter)

    @property
    def startprob(self) -> Tensor:
        """The probability (S,) of each state at the first step. Differentiable."""
        return self._log_start().exp()

    @property
    def transmat(self) -> Tensor:
        """The probability (S, S) ``[from, to]`` of each transition. Rows sum to 1. Differentiable."""
        return self._log_transitions().exp()

    @property
    def durations(self) -> Tensor | None:
        """The probability (S, D) of each duration ``[state, duration − 1]``. Rows sum to 1. Differentiable.

        Without ``max_duration``, the result is None.
        """
        return None if self.duration_logits is None else promote_half(self.duration_logits).softmax(-1)

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        longest = "" if self.max_duration is None else f", max_duration={self.max_duration}"
        return f"{self.num_states}, {super().extra_repr()}{longest}"

    @answers_near_misses
    def forward(self, x: Any, *, lengths: Lengths | None = None) -> ScoredChain | ScoredSemiMarkov:
        """Return the distribution over sequences of states, given the observations.

        The result is a :class:`bellmax.Chain`, or with ``max_duration``, a :class:`bellmax.SemiMarkov`.

        Args:
            x: The observations, as ``emission`` takes them, or without ``emission``, log-scores (..., T, S).
            lengths: The number of steps of each sequence, integers of the batch shape, default T. With
                ``max_duration``, each sequence must have at least one step.

        >>> layer = HMM(2, max_duration=3)
        >>> layer(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])).best_segments()  # [start, end), state
        tensor([[ 0,  2,  0],
                [ 2,  3,  1],
                [-1, -1, -1]])
        """
        emissions, start, transitions = self._emissions(x), self._log_start(), self._log_transitions().mT
        durations = self._log_durations()
        if durations is None:
            return Chain.from_scores(emissions, transitions, start=start, lengths=lengths, omega=self.omega)
        last = log_survival(durations)
        return SemiMarkov.from_scores(
            emissions, durations, transitions, start=start, last_durations=last, lengths=lengths, omega=self.omega
        )

    # --- streams

    @answers_near_misses
    def start(self, batch_shape: int | Sequence[int] = ()) -> FilterState:
        """Return the state of a filter before the first step, for :meth:`filter` and :meth:`forecast`.

        Args:
            batch_shape: The batch shape of the streams, or the number of streams. Default (): one stream.

        """
        with torch.no_grad():
            return self._filter().start((batch_shape,) if isinstance(batch_shape, int) else batch_shape)

    @answers_near_misses
    def filter(self, x: Any, state: FilterState, *, lengths: Lengths | None = None) -> tuple[FilterState, Tensor]:
        """Process the next chunk of a stream. Return the new state, and the probability of each state at each step.

        The probabilities (..., T, S) at a step are computed from the observations up to this step. They are equal to
        the marginals of the last step of the distribution over these steps. The property ``value`` of the new state is
        the value of the distribution over all steps so far. The results have no gradient.

        The results do not depend on how the stream is divided into chunks, if ``emission`` scores each step on its own.
        Do not change the parameters of the layer within a stream. Without ``max_duration``, a call costs little more
        for 100 steps than for one. With ``max_duration``, the time is proportional to the number of steps.

        Args:
            x: The observations of the chunk, as ``emission`` takes them, or without ``emission``, log-scores
                (..., T, S). T may be 0.
            state: The result of :meth:`start` before the first chunk, and the state after the previous chunk otherwise.
            lengths: The number of steps of each stream in the chunk, integers of the batch shape from 0 to T, default
                T. The other steps are padding, where the probabilities are 0.

        >>> layer = HMM(2)
        >>> layer.transition_logits.data = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
        >>> state, posterior = layer.filter(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), layer.start())
        >>> posterior
        tensor([[0.7311, 0.2689],
                [0.2505, 0.7495]])
        """
        with torch.no_grad():
            return self._filter().filter(self._emissions(x), state, lengths)

    @answers_near_misses
    def forecast(self, state: FilterState, steps: int) -> Tensor:
        """Return the probability (..., steps, S) of each state at each of the next steps, given the steps so far.

        The forecast equals :meth:`filter` on steps without observations, whose scores are 0. Under negentropy, it is
        the predictive distribution: the probabilities at the last step times powers of ``transmat``. With
        ``max_duration``, the predictive distribution also depends on the time in the current segment.

        >>> layer = HMM(2)
        >>> layer.transition_logits.data = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
        >>> state, posterior = layer.filter(torch.tensor([[9.0, 0.0]]), layer.start())
        >>> layer.forecast(state, steps=2)
        tensor([[0.8999, 0.1001],
                [0.8299, 0.1701]])
        """
        if steps < 0:
            raise ValueError(f"steps must be at least 0, got {steps}")
        with torch.no_grad():
            return self._filter().forecast(state, steps)

    def _filter(self) -> Filter:
        durations = self._log_durations()
        last = None if durations is None else log_survival(durations)
        start, transitions = self._log_start(), self._log_transitions().mT
        return Filter(start, transitions, omega=self.omega, durations=durations, last_durations=last)

    # --- scores

    def _log_start(self) -> Tensor:
        return promote_half(self.start_logits).log_softmax(-1)

    def _log_transitions(self) -> Tensor:
        """Log-probabilities (S, S) [from, to]."""
        logits = promote_half(self.transition_logits)
        if self.max_duration is not None:
            is_same = torch.eye(self.num_states, dtype=torch.bool, device=logits.device)
            logits = logits.masked_fill(is_same, -math.inf)
        return logits.log_softmax(-1)

    def _log_durations(self) -> Tensor | None:
        """Log-probabilities (D, S) [duration − 1, state], None without ``max_duration``."""
        return None if self.duration_logits is None else promote_half(self.duration_logits).log_softmax(-1).mT

    def _emissions(self, x: Any) -> Tensor:
        """Return the scores (..., T, S) of observations. Raises ``ValueError`` for another shape."""
        name, scores = ("x", x) if self.emission is None else ("emission(x)", self.emission(x))
        if check_tensor(name, scores).ndim < 2 or scores.shape[-1] != self.num_states:
            raise ValueError(f"{name} must have shape (..., T, {self.num_states}), got {tuple(scores.shape)}")
        return scores
