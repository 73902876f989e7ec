"""Attention to segments: the structured attention of section 6 of the paper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bellmax.autograd import Shortcut
from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for
from bellmax.inputs import Mask, answers_near_misses, as_mask, check_tensor
from bellmax.nn.smoothed import Smoothed
from bellmax.regularizers import Regularizer
from bellmax.structures.chain import Chain
from bellmax.tensors import Gamma, Tensors, promote_half
from bellmax.transforms import is_transformed


class SegmentationAttention(Smoothed):
    """Attention to segments of a sequence of keys: a chain over the keys, each of which is attended to (1) or not (0).

    For a query z and keys x_1 … x_K the potentials are θ_t1j = s(x_t, z) + T_1j and θ_t0j = T_0j, where s is a learned
    score, T a learned (2, 2) ``[current, previous]`` matrix of transitions, and nothing is attended to before the first
    key. The weights are the marginal probabilities of being attended to, divided by their sum. Transitions that favour
    staying in a state group the weights into segments. They start at 0, where keys are independent of each other.

    If every key is masked, or all marginals are 0 (possible under a sparse Ω), the weights of the query, its context
    and all gradients through them are 0. A sum of marginals below about 1e-31 in float32 is taken as 0.

    Args:
        query_size: number of features of a query.
        key_size: number of features of a key.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard"; the paper trains
            with γ = 2 for negentropy and γ = 10 for l2, since under l2 most gradients are 0 if γ is small.
        gamma: strength of the smoothing, if Ω is given by name; 1 by default.
        bilinear: whether s is the paper's bilinear form z·W x, or the additive v·tanh(A z + B x + b) of Bahdanau et
            al. with ``key_size`` hidden units, which needs memory for every query, key and hidden unit.

    >>> import bellmax as bx
    >>> _ = torch.manual_seed(0)
    >>> attention = SegmentationAttention(3, 4, omega=bx.SquaredL2(2.0))
    >>> queries, keys = torch.randn(8, 5, 3), torch.randn(8, 6, 4)
    >>> context, weights = attention(queries, keys, mask=torch.arange(6) < torch.tensor([[6], [4]] * 4))
    >>> context.shape, weights.shape
    (torch.Size([8, 5, 4]), torch.Size([8, 5, 6]))
    >>> weights[1, 0].detach()
    tensor([0.4788, 0.0000, 0.3709, 0.1504, 0.0000, 0.0000])
    """

    @answers_near_misses
    def __init__(
        self,
        query_size: int,
        key_size: int,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        bilinear: bool = True,
    ) -> None:
        super().__init__(omega, gamma)
        for name, size in (("query_size", query_size), ("key_size", key_size)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.query_size, self.key_size, self.bilinear = query_size, key_size, bilinear
        if bilinear:
            self.weight = nn.Parameter(torch.empty(query_size, key_size))
        else:
            self.of_query = nn.Linear(query_size, key_size, bias=False)
            self.of_key = nn.Linear(key_size, key_size)
            self.of_both = nn.Linear(key_size, 1, bias=False)
        self.transitions = nn.Parameter(torch.empty(2, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the score at random (variance about 1 for features of variance 1), the transitions to 0."""
        super().reset_parameters()
        if self.bilinear:
            nn.init.normal_(self.weight, std=(self.query_size * self.key_size) ** -0.5)
        else:
            for linear in (self.of_query, self.of_key, self.of_both):
                linear.reset_parameters()
        nn.init.zeros_(self.transitions)

    @answers_near_misses
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor | None = None, *, mask: Mask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys, for each query independently.

        Args:
            queries: (..., Q, query_size).
            keys: (..., K, key_size).
            values: (..., K, V); the keys by default.
            mask: bool or 0/1 integers (..., K), True at the keys to keep. It may have holes; the keys on both sides
                become neighbours. Masked keys and values are ignored: they may be NaN, and get weight and gradient 0.

        Returns:
            The context (..., Q, V), the weighted sum of the values, and the weights (..., Q, K), which sum to 1 or
            are all 0.

        """
        kept = self._check(queries, keys, values, mask)
        if kept is not None:
            left_out = ~kept.unsqueeze(-1)
            keys = keys.masked_fill(left_out, 0)
            values = keys if values is None else values.masked_fill(left_out, 0)
        weights = self._weights(self._scores(queries, keys), kept)
        return weights @ (keys if values is None else values), weights

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(..., Q, K)."""
        if self.bilinear:
            return queries @ self.weight @ keys.mT
        hidden = self.of_query(queries).unsqueeze(-2) + self.of_key(keys).unsqueeze(-3)
        scores: Tensor = self.of_both(hidden.tanh()).squeeze(-1)
        return scores

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """(..., Q, K), from scores of that shape."""
        precise = promote_half(scores)
        omega, transitions = self.omega, self.transitions.to(precise.dtype)
        weights = (
            None if is_transformed(precise, transitions) else _weights_in_one_go(omega, precise, transitions, mask)
        )
        if weights is None:
            weights = _weights_of_chain(omega, precise, transitions, mask)
        return weights.to(scores.dtype)

    def _check(self, queries: Tensor, keys: Tensor, values: Tensor | None, mask: Mask | None) -> Tensor | None:
        """The mask as bool."""
        for name, size, tensor in (("queries", self.query_size, queries), ("keys", self.key_size, keys)):
            if check_tensor(name, tensor).ndim < 2 or tensor.shape[-1] != size:
                raise ValueError(f"{name} must have shape (..., {name[0].upper()}, {size}), got {tuple(tensor.shape)}")
        if queries.shape[:-2] != keys.shape[:-2]:
            raise ValueError(
                f"queries and keys must have the same batch dimensions, got shapes {tuple(queries.shape)} and "
                f"{tuple(keys.shape)}"
            )
        if values is not None and (check_tensor("values", values).ndim < 2 or values.shape[:-1] != keys.shape[:-1]):
            needed = ", ".join(map(str, (*keys.shape[:-1], "V")))
            raise ValueError(f"values must have shape ({needed}), got {tuple(values.shape)}")
        if mask is None:
            return None
        kept = as_mask("mask", mask, keys.device)
        if kept.shape != keys.shape[:-1]:
            raise ValueError(f"mask must have shape {tuple(keys.shape[:-1])}, got {tuple(kept.shape)}")
        return kept

    def extra_repr(self) -> str:
        return f"{self.query_size}, {self.key_size}, {super().extra_repr()}, bilinear={self.bilinear}"


def _weights_of_chain(
    omega: Regularizer, scores: Tensor, transitions: Tensor, mask: Tensor | None, backend: str | None = None
) -> Tensor:
    chain = Chain.from_scores(
        pad(scores.unsqueeze(-1), (1, 0)),  # state 0 has score 0
        transitions,
        start=transitions[:, 0],
        mask=None if mask is None else mask.unsqueeze(-2).expand(scores.shape),
        omega=omega,
    )
    if backend is not None:
        chain._solver.backend = backend
    marginals = chain.marginals[..., 1]
    total = marginals.sum(-1, keepdim=True)
    limits = torch.finfo(total.dtype)
    nothing = total < limits.tiny / limits.eps  # so that neither 1/total nor a sum of such overflows
    return marginals / total.masked_fill(nothing, math.inf)


def _weights_in_one_go(omega: Regularizer, scores: Tensor, transitions: Tensor, mask: Tensor | None) -> Tensor | None:
    """The same by a kernel; None where there is none, or it declines these scores."""
    kernel, gamma = omega.kernel, omega.gamma
    backend = backend_for("scored_chain", scores.device, kernel)
    shortcut = BACKENDS[backend].shortcut("attention.weights")
    if shortcut is None or isinstance(gamma, Tensor) or not shortcut.serves(kernel, scores):
        return None
    index: Tensors = ()
    if mask is not None:
        rows = mask.reshape(scores.shape[:-2].numel(), -1)
        index = rows.sum(-1), rows
    scale = 1 / gamma
    found = shortcut.run(kernel, scale, scores, transitions, index)
    if found is None:
        return None

    def vjp(inputs: Tensors, kept: Tensors, grad: Tensor) -> Tensors:
        gradients: Tensors = shortcut.vjp(kernel, scale, inputs, kept, index, grad)
        return gradients

    def general(inputs: Tensors, kept: Tensors) -> Tensor:
        return _weights_of_chain(omega, inputs[0], inputs[1], mask, backend)

    return Shortcut(vjp, general).attach(found[0], (scores, transitions), found)
