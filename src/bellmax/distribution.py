"""The verbs of every distribution over paths, written once.

A structure supplies its scores, its integers, and a few hooks; the sweeps supply the rest.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

import bellmax.autograd as autograd
from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for
from bellmax.flat import Flat
from bellmax.inputs import check_tensor
from bellmax.layouts.values import subscript
from bellmax.regularizers import Hard, Kernel, Negentropy, Regularizer, resolve
from bellmax.targets import Targets
from bellmax.tensors import Gamma, divide_by_gamma, inner, promote_half, wide_dtype
from bellmax.transforms import is_checked, is_readable, is_transformed, needs_grad

if TYPE_CHECKING:
    from typing_extensions import Self


_MAX_ENUMERATED = 100_000
_HARD = Kernel("hard")


class PathDistribution(Targets):
    """A distribution over the paths of a graph: the random walk Q(θ) from the end node back to the start (section 3.3).

    ``event_shape`` is the shape of one path, an indicator over the potentials; the other dimensions are the batch.

    Args:
        scores: the scores of the program, by the name that error messages use: tensors (..., *own), floating point, −∞
            where there is no edge, each with the number of dimensions of its own. One that has no further dimensions
            is shared by the batch.
        batch_shape: of the distribution.
        event_shape: the shape of a path.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω.

    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as torch.distributions declares it
    has_enumerate_support = True
    structure: str
    backend: str
    _sweeps_minimize: ClassVar[bool] = False
    """Whether the sweeps take costs and give a least cost, as :attr:`sense` −1 asks."""
    _tape_is_large: ClassVar[bool] = False
    """Whether a tape is so large beside the scores that a value without a graph is swept without one."""
    _own_tensors: ClassVar[dict[str, int]] = {}
    """Attributes of a structure that are tensors (..., *own) or None, with their number of dimensions of their own."""

    def __init__(
        self,
        scores: Mapping[str, tuple[Tensor, int]],
        batch_shape: torch.Size,
        event_shape: torch.Size,
        omega: str | Regularizer,
        gamma: Gamma | None = None,
    ) -> None:
        tensors = [tensor for tensor, _ in scores.values()]
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype
        for name, (tensor, _) in scores.items():
            if not tensor.is_floating_point():
                raise ValueError(f"{name} must be floating point, got dtype {tensor.dtype}")
            self._check_device(name, tensor)
            if tensor.dtype != self.dtype:
                self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self._scores = tuple(t if t.dtype == self.dtype else t.to(self.dtype) for t in tensors)
        self._own_dims = tuple(dims for _, dims in scores.values())
        self.omega = resolve(omega, gamma)
        kernel = self.omega.kernel
        if kernel is None and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{type(self.omega).__name__} is written in Python and does not run under torch.compile: "
                "keep the program out of it with torch.compiler.disable"
            )
        self.backend = backend_for(self.structure, self.device, kernel)
        Distribution.__init__(self, batch_shape, event_shape, validate_args=False)
        if isinstance(self.omega.gamma, Tensor):
            self._check_gamma(self.omega.gamma)
        self._is_traced = torch.compiler.is_compiling()
        self._forget()

    def _check_gamma(self, gamma: Tensor) -> None:
        try:
            fits = torch.broadcast_shapes(gamma.shape, self.batch_shape) == self.batch_shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"gamma must broadcast to the batch shape {tuple(self.batch_shape)}, got shape {tuple(gamma.shape)}"
            )

    def _forget(self) -> None:
        """Keep nothing of what was computed: the value and the tape, and θ/γ where no graph belongs to it."""
        self._cache: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._without_graph: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._flat_batch: Flat | None = None

    # --- what a structure supplies

    @property
    def potentials(self) -> Tensor:
        """θ, (..., *event): scores, or costs where the program is a min."""
        return self._scores[0]

    @property
    @abstractmethod
    def _index(self) -> tuple[Tensor, ...]:
        """Integer tensors for the sweeps."""

    @property
    @abstractmethod
    def _num_choices(self) -> int:
        """How many uniforms a sampled path consumes."""

    def _to_paths(self, found: Tensor) -> Tensor:
        """The results (B, K, …) of the sweeps ``sample`` and ``topk`` as paths (B, K, *event)."""
        return found

    def _with(self, scores: Sequence[Tensor], omega: Regularizer) -> Self:
        """The same graph, with other scores, of the same shapes, and Ω."""
        other = copy(self)
        other._forget()
        other.dtype = reduce(torch.promote_types, (score.dtype for score in scores))
        other._scores, other.omega = tuple(score.to(other.dtype) for score in scores), omega
        if omega.kernel != self.omega.kernel:
            other.backend = self._backend_under(omega.kernel)
        return other

    def _without_scores(self) -> Self:
        """The same graph for :meth:`_with`; it holds no scores."""
        other = copy(self)
        other._forget()
        other._scores = ()
        return other

    def _backend_under(self, kernel: Kernel | None) -> str:
        """This backend, or the next that knows an Ω."""
        names = (self.backend, *BACKENDS)
        return next(name for name in names if BACKENDS[name].serves(self.structure, self.device, kernel))

    @abstractmethod
    def _is_path(self, value: Tensor) -> Tensor:
        """Whether each event of ``value`` is a path of the graph, (...)."""

    def _why_no_path(self, event: Tensor) -> str:
        """The reason why an event is not a path, as the end of a sentence. This distribution must have no batch."""
        return "is not a path of the graph"

    @abstractmethod
    def _same_graph(self, other: PathDistribution) -> bool:
        """Whether ``other`` is a distribution over the same paths."""

    # --- the expansion: a distribution over the same paths that has a weight for each edge

    def _expanded(self) -> PathDistribution:
        """This one, unless the weights of the edges are a linear function of fewer scores."""
        return self

    def _onto_event(self, edges: Tensor) -> Tensor:
        """Paths, or numbers, (..., *batch, *edges) of the expansion's event as this one's."""
        return edges

    def _from_event(self, path: Tensor) -> Tensor:
        """Paths of this event as the expansion's."""
        return path

    # --- the flat batch at γ = 1 that the sweeps see

    @property
    def _flat(self) -> Flat:
        if self._flat_batch is None:
            kernel = self.omega.kernel
            omega = self.omega.at_unit_gamma() if kernel is None else kernel
            program = autograd.Program(self.structure, self.backend, omega)
            is_negated = self.sense < 0 and not self._sweeps_minimize
            self._flat_batch = Flat(
                program, self._index, self.batch_shape, self._own_dims, self.omega.gamma, is_negated
            )
        return self._flat_batch

    @property
    def _inputs(self) -> tuple[Tensor, ...]:
        """The scores, and γ if it is a tensor."""
        gamma = self.omega.gamma
        return (*self._scores, gamma) if isinstance(gamma, Tensor) else self._scores

    def _version(self) -> tuple[int, ...]:
        """The key of a sweep's results: the mode, since a tensor made in inference mode is of no use to autograd, and
        how often the scores and γ were changed in place, where torch counts it."""
        if torch.compiler.is_compiling():
            return ()
        changes = [0 if tensor.is_inference() else tensor._version for tensor in self._inputs]
        return torch.is_inference_mode_enabled(), *changes

    def _flat_theta(self) -> tuple[Tensor, ...]:
        """θ/γ as a flat batch."""
        return self._flat.theta(self._scores)

    def _forward(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """θ/γ as a flat batch; DP_Ω(θ/γ) and the tape, without a graph.

        The sweep runs once. Its results are kept without a graph, so that no backward frees what a later access needs.
        """
        version = self._version()
        has_graph = needs_grad(*self._inputs)
        theta = None if has_graph else self._without_graph.get(version)
        if theta is None:
            theta = self._flat_theta()
            if not (has_graph or self._is_foreign_trace() or torch._C._are_functorch_transforms_active()):
                self._without_graph = {version: theta}
        found = None if self._is_foreign_trace() else self._cache.get(version)
        if found is None:
            found = self._explain_overflow(autograd.forward, self._flat.program, theta, self._flat.index)
            self._cache = {version: found}
        return theta, *found

    def _explain_overflow(self, sweep: Callable[..., Any], *args: Any) -> Any:
        """Run a sweep. If it fails because scores overflow after division by γ, the error names γ."""
        try:
            return sweep(*args)
        except ValueError:
            scores = self._detached()
            for score, quotient in zip(self._flat.unscaled(scores), self._flat.theta(scores), strict=True):
                overflows = quotient.isinf() & score.isfinite()
                if is_checked(quotient) and bool(overflows.any()):
                    raise ValueError(
                        f"gamma must be large enough for scores / gamma to be finite in {quotient.dtype}, got a "
                        f"score of {score.expand_as(overflows)[overflows][0].item():g} and gamma="
                        f"{_smallest(self.omega.gamma)}: increase gamma, scale the scores down, or use float64"
                    ) from None
            raise

    def _is_foreign_trace(self) -> bool:
        """Whether a graph is traced that this distribution was not built in, and which must not keep its numbers."""
        return torch.compiler.is_compiling() and not self._is_traced

    def _flat_value(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """θ/γ as a flat batch, DP_Ω(θ/γ) as a function of it, and the tape."""
        theta, value, tape = self._forward()
        return theta, autograd.value(self._flat.program, theta, value, tape, self._flat.index), tape

    def _value(self) -> Tensor:
        if is_transformed(*self._scores) or isinstance(self.omega.gamma, Tensor) or self.device.type == "meta":
            return self._flat.value(self._flat_value()[1])
        flat, scores = self._flat, self._scores
        has_graph = needs_grad(*scores)
        if self._tape_is_large and not (has_graph or self._cache):
            return flat.value(self._explain_overflow(flat.run, "value", self._theta_without_graph(self._version())))
        theta, value, tape = self._swept()
        fresh = flat.value(value.clone() if flat.gamma == 1 and not flat.is_hard else value)
        if not has_graph:
            return fresh
        return autograd.Shortcut(flat.vjp, flat.general).attach(fresh, scores, (*theta, tape))

    def _theta_without_graph(self, version: tuple[int, ...]) -> tuple[Tensor, ...]:
        theta = self._without_graph.get(version)
        if theta is None:
            theta = self._flat.theta([score.detach() if score.requires_grad else score for score in self._scores])
            self._without_graph = {version: theta}
        return theta

    def _swept(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """As :meth:`_forward`, with θ/γ without a graph, where γ is a number and nothing is transformed."""
        version = self._version()
        theta = self._theta_without_graph(version)
        found = self._cache.get(version)
        if found is None:
            found = self._explain_overflow(self._flat.run, "forward", theta)
            self._cache = {version: found}
        return theta, *found

    # --- the layers

    @property
    def value(self) -> Tensor:
        """DP_Ω(θ), of the batch shape: convex in θ, differentiable to any order. −∞ where no path exists.

        Where the program is a min over costs it is the smoothed least cost, concave, and +∞ where no path exists.
        """
        return self._value()

    @property
    def expected_path(self) -> Tensor:
        """∇DP_Ω(θ), of the potentials' shape: the mean of the distribution, differentiable."""
        return self._path().to(self.dtype)

    def directional_derivative(self, z: Tensor) -> Tensor:
        """⟨∇DP_Ω(θ), z⟩, of the batch shape. z broadcasts to the potentials' shape."""
        return self._directional_derivative((self._like("z", z, self._scores[0]),))

    def hessian_product(self, z: Tensor) -> Tensor:
        """∇²DP_Ω(θ) z, of the potentials' shape. z broadcasts to it."""
        return self._hessian_product((self._like("z", z, self._scores[0]),))[0]

    # --- single paths

    def best_path(self) -> Tensor:
        """The highest-scoring path under θ as a 0/1 tensor of the potentials' shape; zeros where no path exists."""
        return self._with(self._detached(), Hard()).expected_path

    @property
    def mode(self) -> Tensor:
        """The most probable path as a 0/1 tensor. It is the best path for negentropy, not in general."""
        if type(self.omega) is Negentropy:
            return self.best_path()
        fine = self._expanded()
        return self._onto_event(fine._by_log_transitions()._path()).to(self.dtype)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best paths under θ: scores (..., k), best first, and paths (..., k, *event).

        Past the number of paths, scores are −∞ (costs +∞) and paths 0. Scores are differentiable.
        """
        fine = self._expanded()
        found, places = fine._topk(k)
        paths = fine._to_paths(places).reshape((*self.batch_shape, k, *fine.event_shape)).to(found.dtype)
        # The sweep has the scores in better precision than a sum along the path. Only the gradient comes from the path.
        weights = fine.potentials.masked_fill(fine.potentials.isinf(), 0)
        zeros = promote_half(weights - weights.detach()).unsqueeze(len(self.batch_shape))
        scores = fine.sense * found.reshape((*self.batch_shape, k)) + inner(paths, zeros, len(fine.event_shape))
        dims = len(self.batch_shape)
        events = self._onto_event(paths.movedim(dims, 0)).movedim(0, dims)
        return scores * (self.sense * fine.sense) + 0, events.to(self.dtype)  # no -0

    # --- the distribution

    @property
    def mean(self) -> Tensor:
        """The expected path."""
        return self.expected_path

    @property
    def variance(self) -> Tensor:
        """Variance of each edge's indicator."""
        path = self.expected_path
        return (path * (1 - path)).clamp(min=0)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Paths drawn from the distribution: (*sample_shape, ..., *event), 0/1; zeros where no path exists."""
        shape = torch.Size(sample_shape)
        paths = self._to_paths(self._sample(shape.numel()))
        return paths.movedim(1, 0).reshape(shape + self.batch_shape + self.event_shape).to(self.dtype)

    def log_prob(self, path: Tensor) -> Tensor:
        """Log-probability of ``path``, a 0/1 tensor that broadcasts to (..., *event). Differentiable in θ and γ."""
        fine = self._expanded()
        return inner(self._from_event(self._check_path(path)), fine._log_transitions(), len(fine.event_shape))

    def entropy(self) -> Tensor:
        """Shannon entropy of the path, Σ ē_i H(q_i), of the batch shape. Differentiable in θ and γ."""
        fine = self._expanded()
        log_q = fine._log_transitions()
        return 0 - inner(_used(fine._path(), log_q), log_q, len(fine.event_shape))

    @property
    def log_num_paths(self) -> Tensor:
        """Logarithm of the number of paths of finite score, of the batch shape, float64 where the device has it."""
        free = self._unweighted(Negentropy())
        return free.sense * free._value()

    @property
    def num_paths(self) -> Tensor:
        """Number of paths of finite score, of the batch shape: exact to about 10¹², then to 14 digits.

        It is float64; on a device without that, float32, and exact to about 10⁴.
        """
        return self.log_num_paths.exp().round()

    def support_paths(self, max_paths: int = 1000) -> tuple[Tensor, Tensor]:
        """Every path of positive probability, most probable first: paths (K, ..., *event), probabilities (K, ...).

        K is the largest count in the batch; the others are padded with 0. More than ``max_paths`` is an error.
        """
        surviving = self._expanded()._by_log_transitions()
        counts = surviving.num_paths
        most = float(counts.max()) if counts.numel() else 0.0
        if most > max_paths:
            raise ValueError(f"max_paths is {max_paths}, but the support holds {most:.10g} paths")
        k = int(most)
        scores, paths = surviving.topk(max(k, 1))
        batch_dims = len(self.batch_shape)
        paths = self._onto_event(paths.movedim(batch_dims, 0)[:k]).to(self.dtype)
        return paths, scores.exp().movedim(-1, 0)[:k]

    @property
    def support(self) -> constraints.Constraint:
        """The paths of the graph, as torch.distributions describes a support: ``p.support.check(path)``."""
        return _Paths(self)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Every path of finite score, (K, ..., *event), in the same order for graphs that are the same.

        Members of a batch must have equally many; :meth:`support_paths` pads instead, and has those of positive
        probability alone. Without ``expand`` the batch dimensions are 1, and all members must have the same paths.
        """
        counts = self.num_paths
        least, most = (float(counts.min()), float(counts.max())) if counts.numel() else (0.0, 0.0)
        if most > _MAX_ENUMERATED:
            raise ValueError(f"enumerate_support lists up to {_MAX_ENUMERATED} paths, got {most:.10g}")
        if least < most:
            raise ValueError(f"enumerate_support needs equally many paths in the batch, got {least:g} to {most:g}")
        batch_dims, k = len(self.batch_shape), int(most)
        edges = self._expanded()._unweighted(Hard()).topk(max(k, 1))[1]
        paths = self._onto_event(edges.movedim(batch_dims, 0)[:k]).to(self.dtype)
        if expand or not paths.numel():
            return paths
        first = paths.flatten(1, batch_dims)[:, :1] if batch_dims else paths
        first = first.reshape(k, *[1] * batch_dims, *self.event_shape)
        if not bool((paths == first).all()):
            raise ValueError("enumerate_support(expand=False) needs the same paths throughout the batch")
        return first

    # --- torch habits

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Self:
        """The same distribution with its batch dimensions expanded to ``batch_shape``; nothing is copied."""
        shape = torch.Size(batch_shape)
        try:
            expanded = torch.broadcast_shapes(self.batch_shape, shape) == shape
        except RuntimeError:
            expanded = False
        if not expanded:
            raise ValueError(f"batch_shape must expand {tuple(self.batch_shape)}, got {tuple(shape)}")
        return self._mapped(lambda t, own: t.expand(shape + t.shape[t.ndim - own :]), shape)

    def __getitem__(self, index: Any) -> Self:
        """The distribution of some members of the batch, by any index of torch that leads into its dimensions.

        >>> import bellmax as bx
        >>> bx.Chain(torch.zeros(4, 5, 2, 2))[1:3].batch_shape
        torch.Size([2])
        """
        batch = self.batch_shape
        if not batch:
            raise IndexError("p has no batch dimensions to index")
        places = torch.arange(batch.numel(), device=self.device).reshape(batch)[index]

        def pick(t: Tensor, own: int) -> Tensor:
            whole = t.expand(batch + t.shape[t.ndim - own :])
            return whole.flatten(0, len(batch) - 1)[places]

        return self._mapped(pick, places.shape)

    def __iter__(self) -> Iterator[Self]:
        if not self.batch_shape:
            raise TypeError("p has no batch dimensions to iterate over")
        return (self[place] for place in range(self.batch_shape[0]))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same distribution on another device or in another floating point type, as ``Tensor.to`` takes them."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")

        def move(t: Tensor, own: int) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else None, non_blocking=non_blocking)

        moved = self._mapped(move, self.batch_shape, shared=True)
        moved.device, moved.dtype = moved._scores[0].device, moved._scores[0].dtype
        if moved.device != self.device:
            moved.backend = backend_for(self.structure, moved.device, self.omega.kernel)
        return moved

    def detach(self) -> Self:
        """The same distribution without gradients."""
        return self._mapped(lambda t, own: t.detach(), self.batch_shape, shared=True)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent copy, whose scores are leaves of their own."""

        def clone(t: Tensor, own: int) -> Tensor:
            return t.detach().clone().requires_grad_(t.requires_grad)

        return self._mapped(clone, self.batch_shape, shared=True)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": {}, "_without_graph": {}, "_flat_batch": None}

    def _mapped(self, function: Callable[[Tensor, int], Tensor], batch_shape: torch.Size, shared: bool = False) -> Self:
        """This distribution with a function of (tensor, dimensions of its own) applied to its tensors.

        What the batch shares stays as it is unless ``shared``, but for the first score, whose batch is the program's.
        """
        other = copy(self)
        other._forget()
        other._batch_shape = batch_shape
        other._scores = tuple(
            function(score, own) if shared or place == 0 or score.ndim > own else score
            for place, (score, own) in enumerate(zip(self._scores, self._own_dims, strict=True))
        )
        for name, own in self._own_tensors.items():
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(other, name, function(tensor, own))
        if isinstance(self.omega.gamma, Tensor):
            other.omega = copy(self.omega)
            other.omega.gamma = function(self.omega.gamma, 0)
        return other

    def __repr__(self) -> str:
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        return f"{type(self).__name__}({shapes}, omega={self.omega})"

    # --- helpers

    def _unweighted(self, omega: Regularizer) -> PathDistribution:
        """The same graph, where every edge that exists has score 0."""
        closed = -self.sense * math.inf
        exists = [score != closed for score in self._detached()]
        return self._with(
            [torch.zeros_like(e, dtype=wide_dtype(self.device)).masked_fill(~e, closed) for e in exists], omega
        )

    def _by_log_transitions(self) -> PathDistribution:
        """The most probable path as a best one, of an expansion: a max over sums of log q."""
        return self._with_weights(self._log_transitions().detach(), Hard())

    def _with_weights(self, weights: Tensor, omega: Regularizer) -> PathDistribution:
        """The same graph with weights to be maximised, for a distribution that is its own expansion."""
        other = self._with((weights,), omega)
        other.sense = 1
        return other

    def _detached(self) -> tuple[Tensor, ...]:
        return tuple(score.detach() for score in self._scores)

    def _gradient(self) -> tuple[Tensor, ...]:
        """∇DP_Ω(θ), of the scores' shapes, in the computing dtype."""
        theta, _, tape = self._forward()
        flat = self._flat
        return flat.onto(autograd.expected_path(flat.program, theta, tape, flat.index), self._scores)

    def _path(self) -> Tensor:
        """The expected path, in the computing dtype."""
        return self._gradient()[0]

    def _directional_derivative(self, z: Sequence[Tensor]) -> Tensor:
        theta, _, tape = self._forward()
        flat = self._flat
        slopes = autograd.directional_derivative(flat.program, theta, tape, flat.direction(z, theta), flat.index)
        return slopes.reshape(self.batch_shape)

    def _hessian_product(self, z: Sequence[Tensor]) -> tuple[Tensor, ...]:
        theta, _, tape = self._forward()
        flat = self._flat
        products = autograd.hessian_product(flat.program, theta, tape, flat.direction(z, theta), flat.index)
        gamma = flat.gamma
        if isinstance(gamma, Tensor):
            gamma = gamma.reshape(()) if gamma.numel() == 1 else gamma.expand(self.batch_shape).reshape(-1)
        over = [
            gamma.reshape(-1, *[1] * dims) if isinstance(gamma, Tensor) and gamma.ndim else gamma
            for dims in self._own_dims
        ]
        products = tuple(divide_by_gamma(p, g) for p, g in zip(products, over, strict=True))
        signed = (-p if flat.is_negated else p for p in flat.onto(products, self._scores))
        return tuple(p.to(self.dtype) for p in signed)

    def _topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Scores of the sweeps' own sense, (B, k), and paths in the sweeps' own form."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        flat = self._flat
        program = autograd.Program(self.structure, self._backend_under(_HARD), _HARD)
        return autograd.topk(program, flat.unscaled(self._scores), k, flat.index)

    def _sample(self, draws: int) -> Tensor:
        with torch.no_grad():
            theta, _, tape = self._forward()
            shape = theta[0].shape[0], draws, self._num_choices
            uniforms = torch.rand(shape, dtype=wide_dtype(self.device), device=self.device)
            return autograd.sample(self._flat.program, theta, tape, uniforms, self._flat.index)

    def _log_transitions(self) -> Tensor:
        """log q of every edge, in the computing dtype."""
        theta, _, tape = self._forward()
        flat = self._flat
        return flat.onto(autograd.log_transitions(flat.program, theta, tape, flat.index), self._scores)[0]

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"{name} must be on the potentials' device {self.device}, got {tensor.device}")

    def _like(self, name: str, tensor: Tensor, score: Tensor) -> Tensor:
        self._check_device(name, check_tensor(name, tensor))
        try:
            return tensor.expand(score.shape)
        except RuntimeError:
            raise ValueError(
                f"{name} must broadcast to the potentials' shape {tuple(score.shape)}, got {tuple(tensor.shape)}"
            ) from None

    def _check_event(self, path: Tensor) -> Tensor:
        """(..., *event), in the computing dtype."""
        self._check_device("path", check_tensor("path", path))
        events = len(self.event_shape)
        if path.shape[path.ndim - events :] != self.event_shape or path.ndim < events:
            raise ValueError(f"path must have event shape {tuple(self.event_shape)}, got shape {tuple(path.shape)}")
        return path.to(torch.promote_types(self.dtype, torch.float32))

    def _check_path(self, path: Tensor) -> Tensor:
        path = self._check_event(path)
        if is_readable(path):
            valid = self._is_path(path)
            if not bool(valid.all()):
                place = _first(~valid)
                member = place[len(place) - len(self.batch_shape) :]
                event = path.expand(valid.shape + self.event_shape)[place]
                p = self.detach()[member] if member else self.detach()
                raise ValueError(f"path{subscript(place)} {p._why_no_path(event)}")
        return path


class _Paths(constraints.Constraint):
    """The paths of a distribution's graph."""

    is_discrete = True

    def __init__(self, p: PathDistribution) -> None:
        self._p = p
        super().__init__()

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        return len(self._p.event_shape)

    def check(self, value: Tensor) -> Tensor:
        return self._p._is_path(self._p._check_event(value))


def _smallest(gamma: Gamma) -> str:
    return f"{float(gamma.min() if isinstance(gamma, Tensor) else gamma):g}"


def _used(path: Tensor, log_q: Tensor) -> Tensor:
    """An expected path without the mass that rounding leaves on edges whose probability q is 0 or underflows."""
    return path.masked_fill(log_q.exp() == 0, 0)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


@register_kl(PathDistribution, PathDistribution)  # type: ignore[untyped-decorator]
def _kl_divergence(p: PathDistribution, r: PathDistribution) -> Tensor:
    if not p._same_graph(r):
        raise ValueError("kl_divergence needs two distributions over the paths of the same graph")
    p, r = p._expanded(), r._expanded()
    log_p, log_r = p._log_transitions(), r._log_transitions()
    path, ratio = _used(p._path(), log_p), log_p - log_r
    outside = (path > 0) & (ratio == math.inf)  # paths of p that r does not have
    finite = inner(path, ratio.masked_fill(outside, 0), len(p.event_shape))
    return finite.masked_fill(outside.flatten(-len(p.event_shape)).any(-1), math.inf)
