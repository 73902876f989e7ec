"""Attention to segments of the keys: the structured attention of section 6 of the paper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bellmax.autograd import Shortcut
from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for, requested_backend, restored_request
from bellmax.backends.fused import AttentionScores, AttentionWeights
from bellmax.inputs import Mask, answers_near_misses, as_mask, check_tensor
from bellmax.modes import is_transformed, needs_grad
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer, from_kernel, with_gamma
from bellmax.structures.chain import Chain
from bellmax.tensors import Gamma, Tensors, inner, promote_half, read_gamma


class SegmentationAttention(Smoothed):
    """Structured attention to segments of adjacent keys, from a chain with two states for each key.

    For each query, a chain assigns state 1 (attended to) or state 0 to each key. The score of a sequence of states is a
    sum of two kinds of terms. Each key x in state 1 adds s(x, z), a learned score of x and the query z. Each key also
    adds the transition T[state of this key, state of the previous key]. T is a learned (2, 2) matrix, and the state
    before the first key is 0.

    The attention weight of a key is the marginal probability of its state 1, divided by the sum of these probabilities
    over all keys. If T favors equal states of adjacent keys, the weights form segments. T is initialized to 0. The
    states of the keys are then independent.

    If every key is masked, the weights and the context of a query are 0, and no gradient passes through them. Under a
    sparse Ω, state 1 can have probability 0 at every key. In this case, too, the weights, the context and the gradients
    are 0. In float32, a sum of probabilities below about 1e-31 counts as 0.

    With several heads, the layer divides features among the heads, as :class:`torch.nn.MultiheadAttention` does after
    its linear layers. Each head has its own scores, its own transitions, and an equal share of the features of the
    values. With the bilinear score, a head sees all features of the queries, but only its share of the features of the
    keys. With the additive score, it sees all features, and has its share of the hidden units.

    Args:
        query_size: The number of features of a query.
        key_size: The number of features of a key. ``num_heads`` must divide it.
        num_heads: The number of heads, default 1.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`. Mensch and Blondel (2018) train with γ = 2 for negentropy and γ = 10 for l2. Under l2
            with a small γ, most gradients are 0.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        bilinear: If True (the default), the score s of a query z and a key x is the bilinear form z·W x. If False, s is
            the additive score v·tanh(A z + B x + b) of Bahdanau et al. with ``key_size`` hidden units. The additive
            score needs more memory: Q · K · ``key_size`` numbers for Q queries and K keys.

    >>> import bellmax as bx
    >>> _ = torch.manual_seed(0)
    >>> attention = SegmentationAttention(3, 4, omega=bx.Tsallis(2, gamma=2.0))
    >>> queries, keys = torch.randn(8, 5, 3), torch.randn(8, 6, 4)
    >>> context, weights = attention(queries, keys, mask=torch.arange(6) < torch.tensor([[6], [4]] * 4))
    >>> context.shape, weights.shape
    (torch.Size([8, 5, 4]), torch.Size([8, 5, 6]))
    >>> weights[1, 0].detach()
    tensor([0.4788, 0.0000, 0.3709, 0.1504, 0.0000, 0.0000])

    >>> attention = SegmentationAttention(4, 4, num_heads=2)
    >>> context, weights = attention(keys, keys, is_causal=True)  # each query uses the keys up to its own position
    >>> context.shape, weights.shape
    (torch.Size([8, 6, 4]), torch.Size([8, 2, 6, 6]))
    """

    @answers_near_misses
    def __init__(
        self,
        query_size: int,
        key_size: int,
        *,
        num_heads: int = 1,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        bilinear: bool = True,
    ) -> None:
        super().__init__(omega, gamma)
        for name, size in (("query_size", query_size), ("key_size", key_size), ("num_heads", num_heads)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if key_size % num_heads:
            raise ValueError(f"key_size must be divisible by num_heads={num_heads}, got {key_size}")
        self.query_size, self.key_size, self.num_heads, self.bilinear = query_size, key_size, num_heads, bilinear
        if bilinear:
            self.weight = nn.Parameter(torch.empty(query_size, key_size))
        else:
            self.of_query = nn.Linear(query_size, key_size, bias=False)
            self.of_key = nn.Linear(key_size, key_size)
            self.of_both = nn.Linear(key_size // num_heads, num_heads, bias=False)
        self.transitions = nn.Parameter(torch.empty((2, 2) if num_heads == 1 else (num_heads, 2, 2)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of the score at random, and set the transitions to 0.

        If the features have variance 1, the scores have a variance of about 1.
        """
        super().reset_parameters()
        if self.bilinear:
            nn.init.normal_(self.weight, std=(self.query_size * self.key_size / self.num_heads) ** -0.5)
        else:
            for linear in (self.of_query, self.of_key, self.of_both):
                linear.reset_parameters()
        nn.init.zeros_(self.transitions)

    @answers_near_misses
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the context and the attention weights of each query.

        Args:
            queries: Queries (..., Q, query_size).
            keys: Keys (..., K, key_size).
            values: Values (..., K, V), default the keys. ``num_heads`` must divide V.
            mask: A mask, bool or 0/1 integers, True at the keys to use: (..., K) for all queries, or (..., Q, K) for
                each query. The weights and gradients of masked keys are 0. The keys before and after a masked key
                become neighbors in the chain. If no query uses a key, the key and its value may be NaN.
            is_causal: If True, query q uses only the keys 0, …, q, of which the mask may exclude some. Default False.
                As in :func:`torch.nn.functional.scaled_dot_product_attention`, query 0 uses only key 0, even if there
                are more keys than queries.

        Returns:
            A pair (context, weights). The context (..., Q, V) is the weighted sum of the values for each query. With
            several heads, each head sums its share of the features of the values. The weights (..., Q, K) of a query
            sum to 1, or are all 0. With several heads, the weights have the shape (..., num_heads, Q, K).

        """
        self._check(queries, keys, values)
        is_used = _keys_to_use(queries, keys, mask, is_causal)
        if is_used is not None:
            is_masked = ~is_used.any(-2).unsqueeze(-1)
            keys = keys.masked_fill(is_masked, 0)
            values = keys if values is None else values.masked_fill(is_masked, 0)
        weights = self._weights(self._scores(queries, keys), is_used)
        return self._context(weights, keys if values is None else values), weights

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The score s of each key for each query, in the shape of the weights."""
        if self.bilinear:
            scores = self._by_head(queries @ self.weight) @ self._by_head(keys).mT
        else:
            of_queries, of_keys = self._by_head(self.of_query(queries)), self._by_head(self.of_key(keys))
            hidden = (of_queries.unsqueeze(-2) + of_keys.unsqueeze(-3)).tanh()
            if self.num_heads == 1:
                scores = self.of_both(hidden).squeeze(-1)
            else:
                scores = (hidden.flatten(1, -2) @ self.of_both.weight.unsqueeze(-1)).reshape(hidden.shape[:-1])
        return scores if self.num_heads == 1 else scores.movedim(0, -3)

    def _context(self, weights: Tensor, values: Tensor) -> Tensor:
        """The weighted sums of the values, (..., Q, V)."""
        if self.num_heads == 1:
            return weights @ values
        return (weights.movedim(-3, 0) @ self._by_head(values)).movedim(0, -2).flatten(-2)

    def _by_head(self, features: Tensor) -> Tensor:
        """Features (..., N, F) as (num_heads, ..., N, F / num_heads), or unchanged for one head.

        The heads are the first dimension here and in the memory of the scores, because kernels solve one head per call.
        """
        if self.num_heads == 1:
            return features
        *shape, size = features.shape
        return features.reshape(*shape, self.num_heads, size // self.num_heads).movedim(-2, 0)

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """The weights, from scores of their shape."""
        precise = promote_half(scores)
        omega, transitions = self.omega, self.transitions.to(precise.dtype)
        weights = _fused_weights(omega, precise, transitions, mask)
        if weights is None:
            weights = _chain_weights(omega, precise, transitions, mask)
        return weights.to(scores.dtype)

    def _check(self, queries: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Raise ``ValueError`` if the shapes do not fit together."""
        for name, size, tensor in (("queries", self.query_size, queries), ("keys", self.key_size, keys)):
            if check_tensor(name, tensor).ndim < 2 or tensor.shape[-1] != size:
                raise ValueError(f"{name} must have shape (..., {name[0].upper()}, {size}), got {tuple(tensor.shape)}")
        if queries.shape[:-2] != keys.shape[:-2]:
            raise ValueError(
                f"queries and keys must have the same batch dimensions, got shapes {tuple(queries.shape)} and "
                f"{tuple(keys.shape)}"
            )
        if values is None:
            return
        if check_tensor("values", values).ndim < 2 or values.shape[:-1] != keys.shape[:-1]:
            needed = ", ".join(map(str, (*keys.shape[:-1], "V")))
            raise ValueError(f"values must have shape ({needed}), got {tuple(values.shape)}")
        if values.shape[-1] % self.num_heads:
            raise ValueError(
                f"values must have a number of features divisible by num_heads={self.num_heads}, "
                f"got shape {tuple(values.shape)}"
            )

    def extra_repr(self) -> str:
        """Return the options of the module as text, for ``print(module)``."""
        sizes = f"{self.query_size}, {self.key_size}, num_heads={self.num_heads}"
        return f"{sizes}, {super().extra_repr()}, bilinear={self.bilinear}"


def _keys_to_use(queries: Tensor, keys: Tensor, mask: Mask | None, is_causal: bool) -> Tensor | None:
    """The mask of forward() as bool, (..., 1, K) or (..., Q, K), without the keys after q if ``is_causal``."""
    is_used = None
    if mask is not None:
        is_used = as_mask("mask", mask, keys.device)
        for_all, for_each = keys.shape[:-1], (*queries.shape[:-1], keys.shape[-2])
        if is_used.shape != (for_all if is_used.ndim < keys.ndim else for_each):
            raise ValueError(f"mask must have shape {tuple(for_all)} or {for_each}, got {tuple(is_used.shape)}")
        if is_used.ndim < keys.ndim:
            is_used = is_used.unsqueeze(-2)
    if is_causal:
        causal = torch.ones(queries.shape[-2], keys.shape[-2], dtype=torch.bool, device=keys.device).tril()
        is_used = causal.expand(*keys.shape[:-2], -1, -1) if is_used is None else is_used & causal
    return is_used


def _chain_weights(omega: Regularizer, scores: Tensor, transitions: Tensor, mask: Tensor | None) -> Tensor:
    """The weights from the marginals of a chain, differentiable to any order."""
    if transitions.ndim == 3:  # the scores are (..., num_heads, Q, K)
        transitions = transitions.unsqueeze(1).expand(*scores.shape[:-1], 2, 2)
        mask = None if mask is None else mask.unsqueeze(-3)
    chain = Chain.from_scores(
        pad(scores.unsqueeze(-1), (1, 0)),  # state 0 has score 0
        transitions,
        start=transitions[..., 0],
        mask=None if mask is None else mask.expand(scores.shape),
        omega=omega,
    )
    marginals = chain.marginals[..., 1]
    total = marginals.sum(-1, keepdim=True)
    limits = torch.finfo(total.dtype)
    is_zero = total < limits.tiny / limits.eps  # so that neither 1/total nor a sum of such terms overflows
    return marginals / total.masked_fill(is_zero, math.inf)


def _fused_weights(omega: Regularizer, scores: Tensor, transitions: Tensor, mask: Tensor | None) -> Tensor | None:
    """The weights from one kernel call; None if the backend has no such kernel, or if it declines these scores."""
    kernel, gamma = omega.kernel, omega.gamma
    gammas = (gamma,) if isinstance(gamma, Tensor) else ()
    if kernel is None or is_transformed(scores, transitions, *gammas) or not _is_scalar(gamma, scores):
        return None
    fused = BACKENDS[backend_for("scored_chain", scores.device, kernel)].fused.attention_weights
    if fused is None:
        return None
    lengths_and_mask: Tensors = ()
    if mask is not None:
        rows = mask.flatten(0, -2)
        lengths_and_mask = rows.sum(-1), rows
    inputs = (scores, transitions, *(gammas if needs_grad(*gammas) else ()))
    number, backend = read_gamma(gamma), requested_backend()
    problem = AttentionScores(scores, transitions, lengths_and_mask, 1 / number, kernel)
    result = fused.run(problem) if fused.supports(problem) else None
    if result is None:
        return None

    def vjp(inputs: Tensors, saved: Tensors, grad: Tensor) -> list[Tensor | None]:
        problem = AttentionScores(inputs[0], inputs[1], lengths_and_mask, 1 / number, kernel)
        gradients = fused.vjp(problem, AttentionWeights(*saved), grad)
        return [*gradients, _gamma_gradient(gradients, inputs, number)] if len(inputs) == 3 else list(gradients)

    def general(inputs: Tensors, saved: Tensors) -> Tensor:
        omega = with_gamma(from_kernel(kernel), inputs[2] if len(inputs) == 3 else number)
        with restored_request(backend):
            return _chain_weights(omega, inputs[0], inputs[1], mask)

    return Shortcut(vjp, general).attach(result.weights, inputs, result)


def _is_scalar(gamma: Gamma, scores: Tensor) -> bool:
    """True if γ is one number for all queries, and not of a wider dtype than the scores."""
    if not isinstance(gamma, Tensor):
        return True
    is_narrow = torch.promote_types(gamma.dtype, scores.dtype) == scores.dtype
    return gamma.numel() == 1 and gamma.ndim < scores.ndim and is_narrow


def _gamma_gradient(gradients: Tensors, inputs: Tensors, number: float) -> Tensor:
    """The gradient in γ. The weights depend on quotients θ/γ, so it is −⟨gradient in θ, θ⟩/γ for all θ together."""
    (score_grad, transition_grad), (scores, transitions, gamma) = gradients, inputs
    total = inner(score_grad, scores, scores.ndim) + inner(transition_grad, transitions, transitions.ndim)
    return (total / -number).reshape(gamma.shape).to(gamma.dtype)
