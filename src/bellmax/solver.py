"""The class Solver: a program with its scores, and the sweeps that answer questions about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import bellmax.autograd as autograd
from bellmax.backends import BACKENDS
from bellmax.backends.protocol import CHECKED, Sweeps
from bellmax.modes import is_checked, is_readable, is_transformed, needs_grad
from bellmax.programs import PROGRAMS, Program
from bellmax.programs.checks import reject_entries, reject_overflow
from bellmax.programs.program import repeated
from bellmax.regularizers import Hard, Kernel, Negentropy, Regularizer, with_gamma
from bellmax.tensors import HALF, Gamma, Tensors, divide_by_gamma, inner, multiply_by_gamma, promote_half, wide_dtype

if TYPE_CHECKING:
    from typing_extensions import Self

_HARD = Kernel("hard")


def version_of(tensors: Tensors) -> tuple[int, ...]:
    """Return a key of results that depend on these tensors.

    It holds the inference mode, whose tensors autograd cannot use, and how often each tensor was changed in place.
    """
    if torch.compiler.is_compiling():
        return ()
    changes = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    return torch.is_inference_mode_enabled(), *changes


class FlatBatch:
    """A program on a flat batch at γ = 1, as the sweeps see it, and the way back to any batch shape and any γ.

    It holds no scores and no tensor γ, so that closures of autograd can keep it.

    Args:
        program: The program.
        index: Its integers, batch first.
        batch_shape: The batch shape of the scores.
        dims: The number of dimensions of each score after the batch. A score without more is shared by the batch.
        backend: The name of the backend that sweeps.
        omega: Ω at any γ.
        is_negated: True if the scores are costs and the sweeps look for a maximum.

    """

    def __init__(
        self,
        program: Program,
        index: Tensors,
        batch_shape: torch.Size,
        dims: tuple[int, ...],
        backend: str,
        omega: Regularizer,
        is_negated: bool,
    ) -> None:
        kernel = omega.kernel
        self.program, self.index, self.batch_shape, self.dims = program, index, batch_shape, dims
        self.backend, self.is_negated, self.is_hard = backend, is_negated, kernel == _HARD
        self.gamma = 1.0 if isinstance(omega.gamma, Tensor) else omega.gamma
        self.route = autograd.Route(program.name, backend, omega.at_unit_gamma() if kernel is None else kernel)
        self._sweeps: Sweeps | None = None

    def run(self, name: str, *args: Any) -> Any:
        """Run a sweep of the first or of no derivative eagerly."""
        sweeps = self._sweeps
        if sweeps is None:
            sweeps = self._sweeps = BACKENDS[self.backend].sweeps(self.program.name)
            self._omega = self.route.regularizer
        if sweeps.check is not None and name in CHECKED:
            sweeps.check(args[0], self.index)
        return getattr(sweeps, name)(*args, self.index, self._omega)

    # --- scores as a flat batch

    def flatten(self, tensor: Tensor, dims: int) -> Tensor:
        """Reshape (..., *own) to (B, *own), or to (1, *own) if the batch shares the tensor."""
        if tensor.ndim == dims:
            return tensor.unsqueeze(0)
        batch_dims = len(self.batch_shape)
        if batch_dims == 1 and tensor.shape[0] == self.batch_shape[0]:
            return tensor
        shape = self.batch_shape + tensor.shape[tensor.ndim - dims :]
        if tensor.shape != shape:
            tensor = tensor.expand(shape)
        return tensor.flatten(0, batch_dims - 1) if batch_dims != 1 else tensor

    def unscaled(self, scores: Tensors) -> list[Tensor]:
        """Return θ as a flat batch."""
        if self.is_negated:
            scores = [-score for score in scores]
        pairs = zip(scores, self.dims, strict=True)
        return [self.flatten(score.float() if score.dtype in HALF else score, dims) for score, dims in pairs]

    def theta(self, scores: Tensors, gamma: Gamma) -> tuple[Tensor, ...]:
        """Return θ/γ as a flat batch."""
        if isinstance(gamma, Tensor):
            scores = [
                divide_by_gamma(promote_half(score), gamma.reshape(gamma.shape + (1,) * dims))
                for score, dims in zip(scores, self.dims, strict=True)
            ]
            dtype = reduce(torch.promote_types, [score.dtype for score in scores])
            scores = [score.to(dtype) for score in scores]  # a score without dimensions does not widen
        elif gamma != 1:
            scores = [promote_half(score) / gamma for score in scores]
        return tuple(self.unscaled(scores))

    def direction(self, z: Tensors, theta: Tensors) -> list[Tensor]:
        """Return a direction, shaped like the scores, as a flat batch."""
        flat = (self.flatten(d.to(t.dtype), dims) for d, t, dims in zip(z, theta, self.dims, strict=True))
        return [f.expand(t.shape) for f, t in zip(flat, theta, strict=True)]

    # --- results in the shapes of the scores

    def rescale(self, flat: Tensor, gamma: Gamma) -> Tensor:
        """Return the value, of the batch shape, from the value (B,) at γ = 1. A hard distance of 0 is not −0."""
        shaped = flat if flat.shape == self.batch_shape else flat.reshape(self.batch_shape)
        value = multiply_by_gamma(shaped, gamma)
        value = -value if self.is_negated else value
        return value + 0 if self.is_hard else value

    def onto(self, flat: Sequence[Tensor], scores: Tensors) -> tuple[Tensor, ...]:
        """Reshape tensors from the shapes of θ to the shapes of the scores; sum over the batch if it shares a score."""
        return tuple([self._onto(f, s) for f, s in zip(flat, scores, strict=True)])

    def _onto(self, flat: Tensor, score: Tensor) -> Tensor:
        """Reshape a tensor from the shape of θ to the shape of its score; sum over the batch if it shares the score."""
        if flat.shape == score.shape:
            return flat
        if flat.shape[1:] == score.shape:  # shared by the batch
            return flat.squeeze(0) if flat.shape[0] == 1 else flat.sum(0)
        if flat.numel() == score.numel():
            return flat.reshape(score.shape)
        return flat.reshape(self.batch_shape + flat.shape[1:]).sum_to_size(score.shape)

    # --- the value as a function of (*scores, γ if it is a tensor), for autograd.Shortcut

    def vjp(
        self,
        inputs: Tensors,
        saved: Tensors,
        grad: Tensor,
        subtract: Callable[[Tensors, Tensors, Tensor], None] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradient of the value in each input; ``saved`` is (*θ/γ, tape), and the value if γ is a tensor.

        γ cancels in the gradient of the scores. If the result is the value minus a linear function of θ,
        ``subtract(gradients, θ/γ, seed)`` subtracts its gradient in place.
        """
        count = len(self.dims)
        scores, theta, tape = inputs[:count], saved[:count], saved[count]
        seed = self.seed(grad, theta)
        gamma = inputs[count] if len(inputs) > count else None
        if gamma is not None and gamma.requires_grad and gamma.numel() > 1:
            theta = [t.expand(seed.shape[0], *t.shape[1:]) for t in theta]  # a gradient for each member, not their sum
        if not seed.shape[0]:  # kernels of an empty batch do not write the gradients of shared scores
            return [torch.zeros_like(t) if t.requires_grad else None for t in inputs]
        gradients = self.run("backward", theta, tape, seed)
        if subtract is not None:
            subtract(gradients, theta, seed)
        in_scores = self.gradients(gradients, scores)
        if gamma is None:
            return in_scores
        if not gamma.requires_grad:
            return [*in_scores, None]
        return [*in_scores, self._gamma_gradient(gamma, saved[count + 1], seed, gradients, theta)]

    def _gamma_gradient(self, gamma: Tensor, value: Tensor, seed: Tensor, gradients: Tensors, theta: Tensors) -> Tensor:
        """Return the gradient of γ DP(θ/γ) in γ, which is DP(θ/γ) − ⟨∇DP(θ/γ), θ/γ⟩ for each member."""
        per_member = int(gamma.numel() > 1)
        terms = [inner(g, t, g.ndim - per_member) for g, t in zip(gradients, theta, strict=True)]
        values = torch.where(value.isfinite(), seed * value, 0)
        slope = (values if per_member else values.sum()) - sum(terms[1:], start=terms[0])
        slope = -slope if self.is_negated else slope
        shaped = slope.reshape(self.batch_shape).sum_to_size(gamma.shape) if per_member else slope.reshape(gamma.shape)
        return shaped.to(gamma.dtype)

    def seed(self, grad: Tensor, theta: Tensors) -> Tensor:
        """Return the gradient of a loss in the value, (B,), in the dtype of θ."""
        flat = grad if grad.ndim == 1 else grad.reshape(-1)
        return flat if flat.dtype == theta[0].dtype else flat.to(theta[0].dtype)

    def gradients(self, flat: Sequence[Tensor], scores: Tensors) -> list[Tensor | None]:
        """Return the gradients in the scores that require one, in their dtype, from the gradients in θ/γ."""
        pairs = zip(flat, scores, strict=True)
        shaped = [self._onto(f, s) if s.requires_grad else None for f, s in pairs]
        if flat[0].dtype == scores[0].dtype:
            return shaped
        return [None if f is None else f.to(s.dtype) for f, s in zip(shaped, scores, strict=True)]

    def general(self, inputs: Tensors, saved: Tensors) -> Tensor:
        """Return the value as a function that is differentiable to any order.

        If γ is a number, only the gradient is used and the value is a dummy.
        """
        count = len(self.dims)
        is_tensor = len(inputs) > count
        gamma = inputs[count] if is_tensor else self.gamma
        theta = self.theta(inputs[:count], gamma)
        value = saved[count + 1] if is_tensor else theta[0].detach().new_zeros(theta[0].shape[0])
        return self.rescale(autograd.value(self.route, theta, value, saved[count], self.index), gamma)


class Solver:
    """A program with its scores, and the sweeps that answer questions about it.

    The forward sweep runs once. Its results are kept without an autograd graph, so that no backward frees what a later
    call needs, and are recomputed if a score or γ was changed in place.

    Args:
        program: The program.
        scores: Its scores, (..., *own) each, of one dtype.
        dims: The number of dimensions of each score after the batch. A score without more is shared by the batch.
        integers: The index of the program, (..., *own) each, or shared by the batch if the program says so.
        batch_shape: The batch shape.
        omega: Ω.
        backend: The name of the backend that sweeps.
        sense: 1 if the scores are to be maximized, −1 if they are costs.

    """

    def __init__(
        self,
        program: Program,
        scores: Tensors,
        dims: Sequence[int],
        integers: Tensors,
        batch_shape: torch.Size,
        omega: Regularizer,
        backend: str,
        sense: int = 1,
    ) -> None:
        self.program, self.scores, self.dims, self.integers = program, tuple(scores), tuple(dims), tuple(integers)
        self.batch_shape, self.omega, self.backend, self.sense = batch_shape, omega, backend, sense
        self._is_traced = torch.compiler.is_compiling()
        # Results: the flat batch, θ/γ without a graph, and value and tape of the forward sweep, by version.
        self._batch: FlatBatch | None = None
        self._theta: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._swept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_batch": None, "_theta": {}, "_swept": {}}

    def _copy(self) -> Self:
        """Return a copy without results."""
        other = object.__new__(type(self))
        vars(other).update(self.__getstate__())
        return other

    # --- solvers made from this one

    def with_scores(self, scores: Sequence[Tensor], omega: Regularizer) -> Self:
        """Return the same program with other scores, of the same shapes, and Ω."""
        other = self._copy()
        dtype = reduce(torch.promote_types, [score.dtype for score in scores])
        other.scores, other.omega = tuple(score.to(dtype) for score in scores), omega
        if omega.kernel != self.omega.kernel:
            other.backend = self.backend_under(omega.kernel)
        return other

    def without_scores(self) -> Self:
        """Return the same program for :meth:`with_inputs`; it holds no scores and no tensor γ."""
        other = self._copy()
        other.scores = ()
        if isinstance(self.omega.gamma, Tensor):
            other.omega = self.omega.at_unit_gamma()
        return other

    def with_inputs(self, inputs: Tensors) -> Self:
        """Return the same program with other scores, and with another γ if one comes after them."""
        scores, omega = inputs[: len(self.dims)], self.omega
        if len(inputs) > len(scores):
            omega = with_gamma(omega, inputs[-1])
        return self.with_scores(scores, omega)

    def with_integers(self, integers: Tensors) -> Self:
        """Return the same scores with another index."""
        other = self._copy()
        other.integers = tuple(integers)
        return other

    def under(self, omega: Regularizer) -> Self:
        """Return the same scores, without a graph, under another Ω."""
        return self.with_scores(self.detached(), omega)

    def map(self, function: Callable[[Tensor, int], Tensor], batch_shape: torch.Size, shared: bool = False) -> Self:
        """Apply a function of (tensor, its number of dimensions after the batch) to all tensors.

        What the batch shares stays as it is unless ``shared``, but for the first score, whose batch is the program's.
        """
        other = self._copy()
        other.batch_shape = batch_shape
        scores = enumerate(zip(self.scores, self.dims, strict=True))
        other.scores = tuple(function(s, d) if shared or n == 0 or s.ndim > d else s for n, (s, d) in scores)
        index_dims = self.program.index_dims
        if index_dims is not None:
            other.integers = tuple(function(t, d) for t, d in zip(self.integers, index_dims, strict=False))
        elif shared:
            other.integers = tuple(function(t, t.ndim) for t in self.integers)
        if isinstance(self.omega.gamma, Tensor):
            other.omega = with_gamma(self.omega, function(self.omega.gamma, 0))
        return other

    def expand(self, batch_shape: torch.Size) -> Self:
        """Return the same solver with its batch expanded; nothing is copied."""
        return self.map(lambda t, dims: t.expand(batch_shape + t.shape[t.ndim - dims :]), batch_shape)

    def backend_under(self, kernel: Kernel | None) -> str:
        """Return the name of this backend, or of the first other backend that supports an Ω."""
        names, device = (self.backend, *BACKENDS), self.scores[0].device
        return next(name for name in names if BACKENDS[name].serves(self.program.name, device, kernel))

    def detached(self) -> tuple[Tensor, ...]:
        return tuple(score.detach() for score in self.scores)

    # --- the expansion: one weight for each edge, to be maximized

    def expanded(self) -> Solver:
        """Return a solver over the same paths whose sweeps give a number for each edge."""
        program = self.program
        by_edge = program.by_edge(self.scores, self.dims, self.batch_shape, self.integers)
        if by_edge is None:
            self._check()
            return self.with_edge_weights(self.edge_weights(), self.omega)
        scores, dims = by_edge
        if all(a is b for a, b in zip(scores, self.scores, strict=True)):
            return self
        other = self.with_scores(scores, self.omega)
        other.dims = dims
        if type(self.omega) is not Negentropy:  # its kernels keep another tape if the batch shares a score
            _, value, tape = self.forward()
            other._swept = {other._version(): (value, tape)}
        return other

    def _check(self) -> None:
        """Raise ``ValueError`` for invalid scores, before they are added up to weights of edges."""
        theta = self.batch.unscaled(self.detached())
        if all(map(is_readable, theta)):
            self.program.check(theta, self.batch.index)

    def edge_weights(self) -> Tensor:
        """The weight of each edge as a function of the scores, (..., *edges), −∞ for an edge that does not exist."""
        theta, index = self.batch.unscaled(self.scores), self.batch.index
        weights = self.program.weights(theta, index)
        return weights.reshape(self.batch_shape + weights.shape[1:])

    def with_edge_weights(self, weights: Tensor, omega: Regularizer) -> Solver:
        """Return a solver over the same paths with these weights of the edges, (..., *edges), to be maximized."""
        program = PROGRAMS[self.program.engine]
        integers = self.integers
        if program.name != "chain":
            integers = tuple(self.program.engine_index(self.batch.unscaled(self.detached()), self.batch.index))
        backend = self.backend_under(omega.kernel)
        dims = weights.ndim - len(self.batch_shape)
        solver = Solver(program, (weights,), (dims,), integers, self.batch_shape, omega, backend)
        return solver if len(integers) <= 5 else solver.expanded()

    @property
    def edge_dims(self) -> int:
        """The number of dimensions of a tensor with a number for each edge: 3 for chains, 1 for graphs."""
        return 3 if self.program.engine == "chain" else 1

    @property
    def edge_shape(self) -> torch.Size:
        """The shape of a tensor with a number for each edge of the expansion, without the batch."""
        theta, index = self.batch.unscaled(self.detached()), self.batch.index
        if self.program.engine == "chain":
            steps, states = theta[0].shape[1:3]
            return torch.Size((steps, states, states))
        return self.program.engine_index(theta, index)[2].shape

    def best_compact(self, k: int) -> tuple[Tensor, Tensor]:
        """Return scores (B, k) of the best paths, in the sense of the scores, and the paths in the compact form."""
        if self.program.engine == "chain" or self.program.topk_is_compact:
            return self.topk(k)
        scores, edges = self.expanded().topk(k)
        return self.sense * scores + 0, self._compact(edges)  # no -0

    def most_probable_compact(self, k: int) -> Tensor:
        """Return the most probable paths in the compact form, (B, k, …). Padding follows the last possible path."""
        if type(self.omega) is Negentropy:
            return self.best_compact(k)[1]
        _, edges = self.most_probable().topk(k)
        return edges if self.program.engine == "chain" else self._compact(edges)

    def _compact(self, edges: Tensor) -> Tensor:
        """Return paths (B, K, *edges) of the expansion in the compact form."""
        theta, index = self.batch.unscaled(self.detached()), self.batch.index
        return self.program.compact_paths(edges, theta, index)

    def unweighted(self, omega: Regularizer) -> Self:
        """Return the same paths, where the score of every path that exists is 0."""
        self._check()
        free = [torch.zeros_like(s, dtype=wide_dtype(s.device)).where(~s.isinf(), s) for s in self.detached()]
        return self.with_scores(free, omega)

    def most_probable(self) -> Solver:
        """Return the expansion whose best path is the most probable path: a hard max over sums of log q."""
        fine = self.expanded()
        return fine.with_edge_weights(fine.log_transitions().detach(), Hard())

    # --- events and edges

    def events(self, compact: Tensor) -> Tensor:
        """Return paths of the sweeps ``sample`` and ``topk``, (B, K, …), as events (..., K, *event)."""
        theta, index = self.batch.unscaled(self.detached()), self.batch.index
        events = self.program.events(compact, theta, index)
        return events.reshape(*self.batch_shape, *events.shape[1:])

    def events_of_edges(self, edges: Tensor) -> Tensor:
        """Return paths (lead..., *batch, *edges) of the expansion as events (lead..., *batch, *event)."""
        lead = edges.shape[: edges.ndim - self.edge_dims - len(self.batch_shape)]
        flat = edges.reshape(lead.numel() * self.batch_shape.numel(), *edges.shape[edges.ndim - self.edge_dims :])
        events = self.program.event_of(flat, *self._repeated(lead))
        return events.reshape(lead + self.batch_shape + events.shape[1:])

    def _repeated(self, lead: torch.Size) -> tuple[list[Tensor], list[Tensor]]:
        """Return θ, for its shapes alone, and the index of a flat batch (lead..., *batch)."""
        theta = self.batch.unscaled(self.detached())
        return repeated(theta, self.batch.index, lead.numel(), self.program.index_dims)

    def is_path(self, event: Tensor) -> Tensor:
        """(lead..., *batch): True if an event (lead..., *batch, *event) is a path, whatever its score."""
        answer, batch = self._ask(self.program.is_path, event)
        if answer is not None:
            return answer
        best = self._within(event, batch)
        return best.value().isfinite() & (best.gradient()[0] == event).flatten(-self.event_dims).all(-1)

    def edges_of(self, event: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges (lead..., *batch, *edges) of events (lead..., *batch, *event), and True for those events
        that are paths. The edges of the others are unspecified."""
        edges, batch = self._ask(self.program.edges_of, event)
        if edges is not None:
            return edges, self.is_path(event)
        best = self._within(event, batch).expanded()
        edges = best.expected_edges().to(event.dtype)
        is_equal = (self.events_of_edges(edges) == event).flatten(-self.event_dims).all(-1)
        return edges, best.value().isfinite() & is_equal

    def _ask(
        self, question: Callable[[Tensor, Tensors, Tensors], Tensor | None], event: Tensor
    ) -> tuple[Tensor | None, torch.Size]:
        """Ask the program about events (lead..., *batch, *event). Return its answer, if any, and (lead..., *batch).

        If the batch shares the index, the events need not broadcast with it.
        """
        dims = event.ndim - self.event_dims
        shape = event.shape[:dims]
        if self.program.index_dims is not None:
            shape = torch.broadcast_shapes(shape, self.batch_shape)
        flat = event.expand(shape + event.shape[dims:]).reshape(shape.numel(), *event.shape[dims:])
        answer = question(flat, *self._repeated(shape[: len(shape) - len(self.batch_shape)]))
        if answer is not None:
            answer = answer.reshape(shape + answer.shape[1:])
        return answer, shape

    def _within(self, event: Tensor, batch: torch.Size) -> Solver:
        """Return the program whose best path uses most of the entries of an event, and no other entries."""
        batch = torch.broadcast_shapes(batch, self.batch_shape)
        hard = self.expand(batch)
        event = event.expand(batch + event.shape[event.ndim - self.event_dims :])
        first = torch.where(event > 0, self.sense, -self.sense * math.inf).to(promote_half(event).dtype)
        rest = [s if name.startswith("_") else torch.zeros_like(s) for name, s in self._named(hard.detached())[1:]]
        return hard.with_integers(self.program.without_band(hard.integers)).with_scores([first, *rest], Hard())

    def _named(self, scores: Tensors) -> list[tuple[str, Tensor]]:
        return list(zip(self.program.scores, scores, strict=True))

    @property
    def event_dims(self) -> int:
        return self.program.event_dims or self.dims[0]

    # --- the forward sweep

    @property
    def batch(self) -> FlatBatch:
        if self._batch is None:
            is_negated = self.sense < 0 < self.program.sense
            index = self.integers if len(self.batch_shape) == 1 else self._flat_index()
            self._batch = FlatBatch(
                self.program, index, self.batch_shape, self.dims, self.backend, self.omega, is_negated
            )
        return self._batch

    def _flat_index(self) -> Tensors:
        """The integers as a flat batch."""
        index_dims = self.program.index_dims
        if index_dims is None:
            return self.integers
        count = self.batch_shape.numel()
        return [t.reshape(count, *t.shape[t.ndim - d :]) for t, d in zip(self.integers, index_dims, strict=False)]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The scores, and γ if it is a tensor."""
        gamma = self.omega.gamma
        return (*self.scores, gamma) if isinstance(gamma, Tensor) else self.scores

    def _version(self) -> tuple[int, ...]:
        """Return the key of cached results for the present inputs."""
        return version_of(self.inputs)

    def _is_foreign_trace(self) -> bool:
        """True if a graph is traced that this solver was not built in, and which must not keep its numbers."""
        return torch.compiler.is_compiling() and not self._is_traced

    def forward(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return θ/γ as a flat batch, with its graph, and DP_Ω(θ/γ) and the tape, without."""
        version = self._version()
        has_graph = needs_grad(*self.inputs)
        theta = None if has_graph else self._theta.get(version)
        if theta is None:
            theta = self.batch.theta(self.scores, self.omega.gamma)
            if not (has_graph or self._is_foreign_trace() or torch._C._are_functorch_transforms_active()):
                self._theta = {version: theta}
        swept = None if self._is_foreign_trace() else self._swept.get(version)
        if swept is None:
            try:
                swept = autograd.forward(self.batch.route, theta, self.batch.index)
            except ValueError:
                self._explain_scores()
                raise
            self._swept = {version: swept}
        return theta, *swept

    def eager_theta(self) -> tuple[Tensor, ...]:
        """Return θ/γ as a flat batch without a graph, if nothing is transformed."""
        return self._eager_theta(self._version())

    def _eager_theta(self, version: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return θ/γ from the cache, or compute it; ``version`` is the version of the inputs."""
        theta = self._theta.get(version)
        if theta is None:
            gamma = self.omega.gamma
            plain = gamma.detach() if isinstance(gamma, Tensor) and gamma.requires_grad else gamma
            theta = self.batch.theta([s.detach() if s.requires_grad else s for s in self.scores], plain)
            self._theta = {version: theta}
        return theta

    def eager_forward(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return θ/γ, DP_Ω(θ/γ) and the tape, all without a graph, if nothing is transformed."""
        version = self._version()
        theta = self._eager_theta(version)
        swept = self._swept.get(version)
        if swept is None:
            swept = self._run_forward("forward", theta)
            self._swept = {version: swept}
        return theta, *swept

    def _run_forward(self, name: str, theta: Tensors) -> Any:
        """Run a sweep that checks the scores, and explain an overflow by γ if it is the cause."""
        try:
            return self.batch.run(name, theta)
        except ValueError:
            self._explain_scores()
            raise

    def _explain_scores(self) -> None:
        """Raise a ValueError that names an invalid cost as the caller passed it, or γ if it makes scores overflow."""
        scores, batch, gamma = self.detached(), self.batch, self.omega.gamma
        if batch.is_negated:
            theta = batch.unscaled(scores)
            named = zip(self.program.scores, theta, self.program.used(theta, batch.index), strict=True)
            for name, score, used in named:
                bad = ~(score < math.inf)
                reject_entries(name, -score, bad if used is None else bad & used, math.inf)
        for score, quotient in zip(batch.unscaled(scores), batch.theta(scores, gamma), strict=True):
            overflows = quotient.isinf() & score.isfinite()
            if is_checked(quotient) and bool(overflows.any()):
                smallest = float(gamma.min() if isinstance(gamma, Tensor) else gamma)
                raise ValueError(
                    f"gamma must be large enough for scores / gamma to be finite in {quotient.dtype}, got a "
                    f"score of {score.expand_as(overflows)[overflows][0].item():g} and gamma={smallest:g}: "
                    "increase gamma, scale the scores down, or use float64"
                ) from None

    # --- the value and its derivatives

    def value(self) -> Tensor:
        """DP_Ω(θ), of the batch shape. Differentiable in the scores and γ, to any order."""
        batch, gamma = self.batch, self.omega.gamma
        inputs = (*self.scores, gamma) if isinstance(gamma, Tensor) else self.scores
        if is_transformed(*inputs) or inputs[0].is_meta:
            return batch.rescale(self.flat_value()[1], gamma)
        has_graph = needs_grad(*inputs)
        if self.program.tape_is_large and not (has_graph or self._swept):
            return batch.rescale(self._run_forward("value", self.eager_theta()), gamma)
        theta, value, tape = self.eager_forward()
        fresh = value.clone() if batch.gamma == 1 and not batch.is_hard else value
        if not isinstance(gamma, Tensor):
            fresh, saved = batch.rescale(fresh, gamma), (*theta, tape)
        else:
            fresh, saved = batch.rescale(fresh, gamma.detach()), (*theta, tape, value)
        return autograd.attach(batch, fresh, inputs, saved) if has_graph else fresh

    def flat_value(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return θ/γ as a flat batch, DP_Ω(θ/γ) as a function of it, and the tape."""
        theta, value, tape = self.forward()
        return theta, autograd.value(self.batch.route, theta, value, tape, self.batch.index), tape

    def gradient(self) -> tuple[Tensor, ...]:
        """∇DP_Ω(θ), of the shapes of the scores, in the computing dtype. Differentiable."""
        theta, _, tape = self.forward()
        batch = self.batch
        return batch.onto(autograd.expected_path(batch.route, theta, tape, batch.index), self.scores)

    def directional_derivative(self, z: Sequence[Tensor]) -> Tensor:
        """⟨∇DP_Ω(θ), z⟩, of the batch shape, for a direction shaped like the scores. Differentiable."""
        theta, _, tape = self.forward()
        batch = self.batch
        slopes = autograd.directional_derivative(batch.route, theta, tape, batch.direction(z, theta), batch.index)
        return slopes.reshape(self.batch_shape)

    def hessian_product(self, z: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """∇²DP_Ω(θ) z, of the shapes of the scores, for a direction shaped like them. Differentiable."""
        theta, _, tape = self.forward()
        batch, gamma = self.batch, self.omega.gamma
        products = autograd.hessian_product(batch.route, theta, tape, batch.direction(z, theta), batch.index)
        if isinstance(gamma, Tensor):
            gamma = gamma.reshape(()) if gamma.numel() == 1 else gamma.expand(self.batch_shape).reshape(-1)
        divisors = [
            gamma.reshape(-1, *[1] * dims) if isinstance(gamma, Tensor) and gamma.ndim else gamma for dims in self.dims
        ]
        products = tuple(divide_by_gamma(p, g) for p, g in zip(products, divisors, strict=True))
        return tuple(-p if batch.is_negated else p for p in batch.onto(products, self.scores))

    def expected_edges(self) -> Tensor:
        """The expected number of times that a path takes each edge, of an expansion: (..., *edges). Differentiable."""
        return self._by_edge(autograd.expected_path)

    def log_transitions(self) -> Tensor:
        """log q of each edge of an expansion, (..., *edges). Differentiable."""
        return self._by_edge(autograd.log_transitions)

    def _by_edge(self, sweep: Callable[..., Sequence[Tensor]]) -> Tensor:
        """Run a sweep of an expansion and return its result as one number for each edge."""
        theta, _, tape = self.forward()
        batch = self.batch
        edges = self.program.edges_from(sweep(batch.route, theta, tape, batch.index), theta, batch.index)
        return edges.reshape(self.batch_shape + edges.shape[1:])

    # --- values of nodes, and the best path through each entry

    def node_values(self) -> Tensor:
        """The values of the nodes under Ω, (..., *nodes), in the sense of the scores, without gradient.

        For a graph or hypergraph, nodes are in the order of the sweeps.
        """
        gamma = self.omega.gamma.detach() if isinstance(self.omega.gamma, Tensor) else self.omega.gamma
        batch, theta = self.batch, self.batch.theta(self.detached(), gamma)
        self.program.node_shape(theta, batch.index)  # raises an error for a program without such nodes
        try:
            flat = autograd.node_values(batch.route, theta, batch.index)
        except ValueError:
            self._explain_scores()
            raise
        if isinstance(gamma, Tensor):
            gamma = gamma.reshape(gamma.shape + (1,) * (flat.ndim - 1))
        return self._in_sense(multiply_by_gamma(flat.reshape(self.batch_shape + flat.shape[1:]), gamma))

    def max_marginals(self) -> Tensor:
        """The score of the best path that uses each entry of an event, (..., *event), without gradient."""
        batch = self.batch
        route = autograd.Route(self.program.name, self.backend_under(_HARD), _HARD)
        flat = autograd.max_marginals(route, batch.unscaled(self.detached()), batch.index)
        reject_overflow(flat, self.program.sense)
        return self._in_sense(flat.reshape(self.batch_shape + flat.shape[1:]))

    def _in_sense(self, values: Tensor) -> Tensor:
        """Return values of the sweeps in the sense of the scores, without −0."""
        return (-values if self.batch.is_negated else values) + 0

    # --- paths

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return scores (B, k) of the best paths, in the sense of the sweeps, and the paths in the compact form."""
        if not isinstance(k, int | torch.SymInt):
            raise ValueError(f"k must be an integer, got {k!r}")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        batch = self.batch
        route = autograd.Route(self.program.name, self.backend_under(_HARD), _HARD)
        return autograd.topk(route, batch.unscaled(self.scores), k, batch.index)

    def best_edges(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best paths of an expansion: scores (..., k), differentiable, and edges (..., k, *edges)."""
        scores, compact = self.topk(k)
        edges = self.program.edge_counts(compact, self.batch.unscaled(self.detached()), self.batch.index)
        edges = edges.reshape(*self.batch_shape, k, *edges.shape[2:]).to(scores.dtype)
        # The sweep has the scores in better precision than a sum along the path. Only the gradient comes from the path.
        weights = self.edge_weights()
        weights = weights.masked_fill(weights.isinf(), 0)
        zeros = promote_half(weights - weights.detach()).unsqueeze(len(self.batch_shape))
        return scores.reshape(*self.batch_shape, k) + inner(edges, zeros, self.edge_dims), edges

    def sample(self, draws: int) -> Tensor:
        """Return paths drawn from the distribution in the compact form, (B, draws, …)."""
        with torch.no_grad():
            theta, _, tape = self.forward()
            batch = self.batch
            shape = theta[0].shape[0], draws, self.program.num_choices(theta, batch.index)
            dtype, device = wide_dtype(theta[0].device), theta[0].device
            if batch.is_hard:  # it has one path, whatever is drawn
                uniforms = torch.full(shape, 0.5, dtype=dtype, device=device)
            else:
                uniforms = torch.rand(shape, dtype=dtype, device=device)
            return autograd.sample(batch.route, theta, tape, uniforms, batch.index)
