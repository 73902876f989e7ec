"""The class PathDistribution: everything that a distribution over paths can answer, written once.

A structure is a constructor that makes a program with its scores, and conveniences in the user's terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from bellmax.backends.choice import backend_for
from bellmax.decoded import DecodedForm
from bellmax.inputs import answers_near_misses, as_sample_shape, check_tensor
from bellmax.modes import is_readable
from bellmax.programs import Program
from bellmax.programs.checks import subscript
from bellmax.regularizers import Hard, Negentropy, Regularizer, resolve
from bellmax.solver import Solver
from bellmax.targets import Targets
from bellmax.tensors import Gamma, Tensors, inner, promote_half

if TYPE_CHECKING:
    from typing_extensions import Self


_MAX_ENUMERATED = 100_000
COUNTS_VARY = "variance is not available if a path can use an entry twice: estimate it with p.sample((n,)).var(0)"
USES_UNITS_TWICE = "most_accurate needs paths that use each unit at most once, but a path can use a unit twice here"


class PathDistribution(Distribution):
    """A distribution over the paths of a dynamic program, the base class of all structures.

    Do not call the constructor. Use a structure, such as :class:`Chain` or :class:`DTW`, which inherits the methods
    below. In shapes, ``...`` stands for the batch shape, and ``*event`` stands for the shape of one path as a 0/1
    tensor. A path has two forms:

    - the *event*: a 0/1 tensor of the shape of the scores θ (:attr:`potentials`), floating point or bool;
    - the *decoded form*: integers in the terms of the structure, such as tags or index pairs. See :meth:`decode`.

    The distribution is defined by a random walk from the end node of the graph back to the start (Mensch and Blondel,
    2018, section 3.3). At each node, the walk chooses one of the edges into the node and goes to the parent at its
    other end. The value of a node is a smoothed max with one entry for each of these edges. The gradient of this
    smoothed max contains the probabilities of the edges. The probability of a path is the product of the probabilities
    of its edges.

    >>> import bellmax as bx
    >>> p = bx.Chain.from_scores(torch.tensor([[0.5, 0.0], [0.0, 2.0], [0.0, 0.0]]), torch.eye(2))
    >>> p.batch_shape, p.event_shape
    (torch.Size([]), torch.Size([3, 2, 2]))
    >>> p.decode(), p.log_prob(p.decode()).exp()
    (tensor([1, 1, 1]), tensor(0.3890))

    Args:
        program: The dynamic program.
        scores: A mapping from the name of each score to a pair (tensor, dims). The tensor is floating point, and dims
            is the number of its dimensions after the batch dimensions. An entry of −∞ (+∞ for costs) removes the edges
            that use it. A score without batch dimensions is shared by the batch.
        integers: The index tensors of the program. A tensor without batch dimensions is shared by the batch.
        batch_shape: The batch shape.
        event_shape: The shape of one path.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
        minimize: If True, treat the scores as costs. Default False.

    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as torch.distributions declares it
    has_enumerate_support = True
    _target_kind: ClassVar[type[Targets]] = Targets
    """How losses read a target of this distribution."""
    _form_kind: ClassVar[type[DecodedForm]] = DecodedForm
    """The decoded form of a path."""

    def __init__(
        self,
        program: Program,
        scores: Mapping[str, tuple[Tensor, int]],
        integers: Tensors,
        batch_shape: torch.Size,
        event_shape: torch.Size,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        minimize: bool = False,
    ) -> None:
        tensors, dims = zip(*scores.values(), strict=True)
        self.device, dtype = tensors[0].device, tensors[0].dtype
        for name, tensor in zip(scores, tensors, strict=True):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} must be floating point, got dtype {tensor.dtype}")
            if tensor.device != self.device:
                self._check_device(name, tensor)
            if tensor.dtype != dtype:
                dtype = torch.promote_types(dtype, tensor.dtype)
        self.dtype = dtype
        resolved = resolve(omega, gamma)
        kernel = resolved.kernel
        if kernel is None and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{type(resolved).__name__} is written in Python and does not run under torch.compile: "
                "keep the program out of it with torch.compiler.disable"
            )
        Distribution.__init__(self, batch_shape, event_shape, validate_args=False)
        if isinstance(resolved.gamma, Tensor):
            self._check_gamma(resolved.gamma)
        self._solver = Solver(
            program,
            [t if t.dtype == dtype else t.to(dtype) for t in tensors],
            dims,
            integers,
            batch_shape,
            resolved,
            backend_for(program.name, self.device, kernel),
            -1 if minimize else 1,
        )

    def _check_gamma(self, gamma: Tensor) -> None:
        """Raise ``ValueError`` unless γ broadcasts to the batch shape."""
        try:
            fits = torch.broadcast_shapes(gamma.shape, self.batch_shape) == self.batch_shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"gamma must broadcast to the batch shape {tuple(self.batch_shape)}, got shape {tuple(gamma.shape)}"
            )

    # --- the program and its scores

    @property
    def omega(self) -> Regularizer:
        """The regularizer Ω, with its strength γ."""
        return self._solver.omega

    @property
    def backend(self) -> str:
        """The name of the backend that runs this distribution."""
        return self._solver.backend

    @property
    def sense(self) -> int:
        """The direction of the optimization: 1 for a max over scores, −1 for a min over costs."""
        return self._solver.sense

    @property
    def potentials(self) -> Tensor:
        """The potentials θ, (..., *event): scores, or costs if :attr:`sense` is −1."""
        return self._solver.scores[0]

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores of the program, as a mapping from names to tensors. Internal constants are left out."""
        return self._by_name(self._scores)

    @property
    def _scores(self) -> tuple[Tensor, ...]:
        return self._solver.scores

    @property
    def _targets(self) -> Targets:
        return self._target_kind(self)

    @property
    def _form(self) -> DecodedForm:
        return self._form_kind(self)

    def _flat_inputs(self) -> tuple[list[Tensor], Tensors]:
        """The scores without gradients and the index, as a flat batch."""
        return self._solver.batch.unscaled(self._solver.detached()), self._solver.batch.index

    def _by(self, solver: Solver) -> Self:
        """Return this distribution with another solver of the same program."""
        other = copy(self)
        other._solver, other._batch_shape = solver, solver.batch_shape
        other.device, other.dtype = solver.scores[0].device, solver.scores[0].dtype
        return other

    def _with(self, scores: Sequence[Tensor], omega: Regularizer) -> Self:
        """Return this distribution with other scores, of the same shapes, and Ω."""
        return self._by(self._solver.with_scores(scores, omega))

    def _under(self, omega: Regularizer) -> Self:
        """Return this distribution under another Ω, without gradients."""
        return self._by(self._solver.under(omega))

    def _is_path(self, value: Tensor) -> Tensor:
        """(...): True if an event of ``value`` is a path of the graph."""
        return self._solver.is_path(value)

    def _why_no_path(self, event: Tensor) -> str:
        """The reason why an event is not a path, as the end of a sentence. This distribution must have no batch."""
        return "is not a path of the graph"

    def _edges_of(self, path: Tensor) -> Tensor:
        """Return the edges (..., *edges) of a path that :meth:`log_prob` takes, in the computing dtype."""
        event = self._check_event(path)
        edges, is_path = self._solver.edges_of(event)
        self._refuse_unless(is_path, event)
        return edges

    # --- the layers

    @property
    def value(self) -> Tensor:
        """Smoothed maximum of the scores of all paths. Its shape is the batch shape.

        Under negentropy with γ = 1, the value is the log-partition function. The value is a convex function of the
        potentials θ, and it is differentiable to any order. If no path exists, the value is −∞. If the scores are
        costs, the value is the smoothed minimum of the costs of all paths. The smoothed minimum is a concave function
        of θ. If no path exists, the smoothed minimum is +∞. Mensch and Blondel (2018) write DP_Ω(θ) for the value.

        >>> import bellmax as bx
        >>> bx.Chain(torch.zeros(3, 2, 2)).value.exp()  # eight sequences of score 0
        tensor(8.)
        """
        return self._solver.value()

    @property
    def expected_path(self) -> Tensor:
        """Expected path: the mean of the events of random paths, of the shape of the potentials. Differentiable.

        The expected path is the gradient of :attr:`value` with respect to the potentials.
        """
        return self._expected_path().to(self.dtype)

    def _expected_path(self) -> Tensor:
        """The expected path, in the computing dtype."""
        solver = self._solver
        if solver.program.engine == "chain":
            return solver.expanded().expected_edges()
        return solver.gradient()[0]

    @property
    def gradient(self) -> dict[str, Tensor]:
        """Gradient of the value with respect to each score: a mapping from names to tensors. Differentiable.

        Each entry of a gradient is the expected number of times that a random path uses the corresponding entry of the
        score.

        >>> import bellmax as bx
        >>> p = bx.Chain.from_scores(torch.zeros(3, 2), torch.zeros(2, 2))
        >>> p.gradient["transitions"]                  # expected number of each transition [current, previous]
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
        return self._by_name([g.to(self.dtype) for g in self._solver.gradient()])

    def directional_derivative(self, z: Any) -> Tensor:
        """Return the derivative of the value in the direction z, of the batch shape.

        The derivative is the dot product of the gradient of the value and z: the rate at which the value changes if the
        scores move along z.

        Args:
            z: A mapping from names of scores to tensors, or a single tensor for the first score in :attr:`scores`. Each
                tensor must broadcast to the shape of its score. Scores without a tensor stay constant: their direction
                is 0.

        >>> import bellmax as bx
        >>> p = bx.DTW(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), omega="hard")
        >>> p.directional_derivative(torch.ones(2, 2))  # the best alignment visits two cells
        tensor(2.)
        """
        return self._solver.directional_derivative(self._direction(z))

    def hessian_product(self, z: Any) -> Any:
        """Return the product of the Hessian of the value and a direction z.

        The Hessian contains the second derivatives of the value with respect to the scores. If z is a tensor, the
        result is a tensor of the shape of the first score in :attr:`scores`. If z is a mapping, the result is a mapping
        from the names of all scores to tensors.

        Args:
            z: The direction, as in :meth:`directional_derivative`.

        >>> import bellmax as bx
        >>> p = bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(2))  # two parallel edges
        >>> p.hessian_product(torch.tensor([1.0, 0.0]))
        tensor([ 0.2500, -0.2500])
        """
        products = [p.to(self.dtype) for p in self._solver.hessian_product(self._direction(z))]
        return products[0] if isinstance(z, Tensor) else self._by_name(products)

    def _direction(self, z: Any) -> list[Tensor]:
        """Return a direction shaped like the scores: ``z`` is a tensor for the first, or a mapping from names; 0 for
        the others."""
        names, scores = self._solver.program.scores, self._solver.scores
        if len(scores) == 1:
            name = "z" if not isinstance(z, Mapping) else names[0]
            return [self._like(name, z[name] if isinstance(z, Mapping) else z, scores[0])]
        directions = {names[0]: z} if isinstance(z, Tensor) else dict(z)
        for name in directions.keys() - self.scores.keys():
            raise ValueError(f"the keys of z must be names of scores, out of {', '.join(self.scores)}, got {name!r}")
        pairs = zip(names, scores, strict=True)
        return [self._like(n, directions[n], s) if n in directions else torch.zeros_like(s) for n, s in pairs]

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return one tensor for each score, by name, without the constants."""
        pairs = zip(self._solver.program.scores, tensors, strict=True)
        return {name: tensor for name, tensor in pairs if not name.startswith("_")}

    # --- single paths

    def best_path(self) -> Tensor:
        """Return the highest-scoring path as an event, a 0/1 tensor of the potentials' shape.

        If the scores are costs, the result is the path of least cost. If no path exists, all entries of the event are
        0. To get the best path in the decoded form, call :meth:`decode`.

        >>> import bellmax as bx
        >>> bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)]).paths(torch.tensor([1.0, 0.0, 1.0, 1.5])).best_path()
        tensor([1., 0., 1., 0.])
        """
        return self._under(Hard()).expected_path

    @property
    def mode(self) -> Tensor:
        """The most probable path as a 0/1 tensor of the potentials' shape.

        Under negentropy, it is the highest-scoring path. Under another Ω, the most probable path and the
        highest-scoring path can differ.
        """
        if type(self.omega) is Negentropy:
            return self.best_path()
        edges = self._solver.most_probable().expected_edges()
        return self._solver.events_of_edges(edges).to(self.dtype)

    @answers_near_misses
    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores and the events of the k best paths, best path first.

        The scores have the shape (..., k), and the events have the shape (..., k, *event). If there are fewer than k
        paths, the remaining scores are −∞ (+∞ for costs) and the remaining events contain only zeros. The scores are
        differentiable.

        Args:
            k: The number of paths, at least 1.

        >>> import bellmax as bx
        >>> scores, paths = bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)]).paths(torch.tensor([1.0, 0.0, 1.0, 1.5])).topk(2)
        >>> scores
        tensor([2.0000, 1.5000])
        """
        scores, edges = self._solver.expanded().best_edges(k)
        return self.sense * scores + 0, self._events_of(edges)  # no -0

    def _events_of(self, edges: Tensor) -> Tensor:
        """Return paths (..., k, *edges) of the expansion as events (..., k, *event)."""
        dims = len(self.batch_shape)
        return self._solver.events_of_edges(edges.movedim(dims, 0)).movedim(0, dims).to(self.dtype)

    # --- paths in the decoded form

    def decode(self) -> Tensor:
        """Return the highest-scoring path in the decoded form, such as tags, index pairs or spans.

        The class of each structure documents its decoded form. For a :class:`Hypergraph`, it is a list of integers, or
        nested lists for a batch. For every other structure, it is a tensor of integers with the batch shape first. The
        tensor is padded with −1, and durations are padded with 0. If no path exists, the tensor contains only padding,
        and the list is empty. :meth:`log_prob`, :meth:`encode`, ``support.check`` and the losses accept the decoded
        form.

        >>> import bellmax as bx
        >>> p = bx.DTW(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
        >>> p.decode()                                 # index pairs, padded
        tensor([[ 0,  0],
                [ 1,  1],
                [-1, -1]])
        >>> p.log_prob(p.decode()).exp()
        tensor(0.6652)
        """
        return self._under(Hard()).sample_decoded()

    @answers_near_misses
    def sample_decoded(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random paths in the decoded form.

        The shape of the result starts with ``sample_shape``, followed by the batch shape.

        Args:
            sample_shape: A tuple with the shape of the sample, default () for one path per batch member.

        >>> import bellmax as bx
        >>> bx.Chain(torch.zeros(4, 3, 2, 2)).sample_decoded((10,)).shape  # 10 samples, batch of 4, 3 steps
        torch.Size([10, 4, 3])
        """
        decoded: Tensor = self._form.of_compact(self._sample_compact(sample_shape))
        return decoded

    @answers_near_misses
    def topk_decoded(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores and the decoded forms of the k best paths, best path first.

        The scores have the shape (..., k). The shape of the paths starts with the batch shape and k. If there are fewer
        than k paths, the remaining scores are −∞ (+∞ for costs), and the remaining paths are padding. The scores have
        no gradient. For scores with a gradient, use :meth:`topk`. For log-probabilities with a gradient, pass the paths
        to :meth:`log_prob`.

        Args:
            k: The number of paths, at least 1.

        >>> import bellmax as bx
        >>> p = bx.Chain.from_scores(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2))
        >>> p.topk_decoded(2)
        (tensor([3., 2.]), tensor([[0, 1],
                [1, 1]]))
        """
        with torch.no_grad():
            scores, paths = self._solver.best_compact(k)
        form, dims = self._form, len(self.batch_shape)
        paths = paths.reshape(*self.batch_shape, *paths.shape[1:])
        scores = scores.reshape(*self.batch_shape, k)
        if form.is_nested_list:
            return scores, form.of_compact(paths)
        return scores, form.of_compact(paths.movedim(dims, 0)).movedim(0, dims)

    def encode(self, decoded: Any) -> Tensor:
        """Convert paths in the decoded form to events, 0/1 tensors (..., *event).

        Raises ``ValueError`` if an element of ``decoded`` is not a path.

        Args:
            decoded: Paths in the decoded form, as :meth:`decode` and :meth:`sample_decoded` return them.

        >>> import bellmax as bx
        >>> bx.MonotonicAlignment(torch.zeros(3, 2)).encode(torch.tensor([1, 2]))  # frames per token
        tensor([[1., 0.],
                [0., 1.],
                [0., 1.]])
        """
        p, tensor = self._read_decoded("decoded", decoded)
        p._form.check("decoded", tensor)
        return p._form.events(tensor).to(self.dtype)

    def _read_decoded(self, name: str, decoded: Any) -> tuple[Self, Tensor]:
        """Read paths in the decoded form. Return them, and this distribution, expanded to their batch shape."""
        form = self._form
        tensor = form.read(name, decoded)
        batch = tensor.shape[: tensor.ndim - len(form.own_shape)]
        batch = batch[len(batch) - len(self.batch_shape) :]
        return (self if batch == self.batch_shape else self.expand(batch)), tensor

    def most_accurate(self) -> Tensor:
        """Return the path with the smallest expected Hamming distance to a random path, in the decoded form.

        This method is known as minimum Bayes risk decoding. A path consists of units. A unit is a tag, an index pair,
        the label of a frame, a segment, a span, a head or an edge, depending on the structure. Gaps are not units. The
        Hamming distance of two paths is the number of units that occur in only one of the two paths. Let μ be the
        probability that a random path contains a unit. To find the result, the method gives each unit the score 2μ − 1.
        The result is the path with the highest sum of these scores. The result is never a forbidden path. For a chain
        without forbidden transitions, the result is ``marginals.argmax(-1)``.

        Raises ``ValueError`` if a path can use a unit more than once.

        >>> import bellmax as bx
        >>> p = bx.Chain(torch.tensor([[[0.0, 0.0], [0.3, 0.0]], [[0.0, 0.6], [0.4, 0.5]]]))
        >>> p.decode(), p.most_accurate()
        (tensor([1, 0]), tensor([1, 1]))
        """
        with torch.no_grad():
            return self._most_accurate()

    def _most_accurate(self) -> Tensor:
        """Return :meth:`most_accurate` for units that are the entries of the first score."""
        if self._solver.program.max_count > 1:
            raise ValueError(USES_UNITS_TWICE)
        units = {self._solver.program.scores[0]: self._expected_path()}
        return self._decode_units(units)

    def _decode_units(self, probabilities: Mapping[str, Tensor]) -> Tensor:
        """Return the best path if scores are 2μ − 1, given μ by the name of the score, and all other scores are 0."""
        named = zip(self._solver.program.scores, self._solver.detached(), strict=True)
        scores = []
        for name, score in named:
            mu = probabilities.get(name)
            free = torch.zeros_like(score) if mu is None else self.sense * (2 * mu - 1).to(promote_half(score).dtype)
            scores.append(torch.where(score.isinf(), score, free))
        return self._by(self._solver.with_scores(scores, Hard())).sample_decoded()

    def _most_accurate_by_edge(self, is_unit: Tensor | None = None) -> Tensor:
        """Return :meth:`most_accurate` for units that are edges of the expansion, or those where ``is_unit`` (E,)."""
        fine = self._solver.expanded()
        weights, gain = fine.edge_weights().detach(), 2 * fine.expected_edges() - 1
        gain = gain if is_unit is None else gain.masked_fill(~is_unit, 0)
        best = fine.with_edge_weights(torch.where(weights.isinf(), weights, gain), Hard())
        edges = best.expected_edges().reshape(self.batch_shape.numel(), 1, weights.shape[-1])
        paths = self._solver.program.compact_paths(edges, *self._flat_inputs())
        decoded: Tensor = self._form.of_compact(paths.reshape(*self.batch_shape, *paths.shape[2:]))
        return decoded

    # --- the distribution

    @property
    def mean(self) -> Tensor:
        """The expected path, a synonym of :attr:`expected_path`."""
        return self.expected_path

    @property
    def variance(self) -> Tensor:
        """Variance of each entry of the event of a random path, of the shape of the potentials.

        Raises ``NotImplementedError`` if a path can use an entry twice.
        """
        if self._solver.program.max_count > 1:
            raise NotImplementedError(COUNTS_VARY)
        path = self.expected_path
        return (path * (1 - path)).clamp(min=0)

    @answers_near_misses
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random paths as events, 0/1 tensors (*sample_shape, ..., *event).

        If no path exists, all entries of the events are 0.

        Args:
            sample_shape: A tuple with the shape of the sample, default () for one path per batch member.

        >>> import bellmax as bx
        >>> bx.DTW(torch.zeros(4, 3, 2)).sample((10,)).shape
        torch.Size([10, 4, 3, 2])
        """
        shape = as_sample_shape(sample_shape)
        events = self._solver.events(self._solver.sample(shape.numel())).movedim(len(self.batch_shape), 0)
        return events.reshape(shape + self.batch_shape + self.event_shape).to(self.dtype)

    def _sample_compact(self, sample_shape: Sequence[int]) -> Tensor:
        """Paths drawn from the distribution in the compact form, (*sample_shape, ..., …)."""
        shape = as_sample_shape(sample_shape)
        paths = self._solver.sample(shape.numel()).movedim(1, 0)
        return paths.reshape(*shape, *self.batch_shape, *paths.shape[2:])

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Raise ``NotImplementedError``: paths are discrete and have no reparameterized samples."""
        raise NotImplementedError(
            "paths are discrete and have no reparameterized samples: use expected_path, sample_straight_through, or "
            "log_prob of samples"
        )

    @answers_near_misses
    def sample_straight_through(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random paths as events, with the gradient of the expected path (a straight-through estimator).

        The result has the values of :meth:`sample`. In the backward pass, each sample is treated as if it were
        :attr:`expected_path`. The gradient of a function that is linear in the path is therefore unbiased. For any
        other function, the gradient is biased. Under ``omega="hard"``, it is 0.

        Args:
            sample_shape: A tuple with the shape of the sample, default () for one path per batch member.

        >>> import bellmax as bx
        >>> theta = torch.zeros(2, requires_grad=True)
        >>> p = bx.DAG([(0, 1), (0, 1)]).paths(theta)  # two parallel edges
        >>> path = p.sample_straight_through()          # one of the two
        >>> torch.autograd.grad(path[0], theta)[0]      # in both cases
        tensor([ 0.2500, -0.2500])
        """
        path = self.expected_path
        return self.sample(sample_shape) + (path - path.detach())

    def log_prob(self, path: Any) -> Tensor:
        """Return the log-probability of paths, of the batch shape. Differentiable in θ and γ.

        If the distribution gives a path probability 0, the result is −∞. Raises ``ValueError`` if ``path`` is not a
        path of the graph.

        Args:
            path: Paths in the decoded form (integers or nested lists), or events (..., *event) in a floating point or
                bool dtype. Paths may have sample dimensions before the batch dimensions. The result then has the shape
                of the sample dimensions followed by the batch shape.

        >>> import bellmax as bx
        >>> p = bx.Chain.from_scores(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2))
        >>> p.log_prob(torch.tensor([0, 1])).exp()
        tensor(0.6439)
        """
        if self._form.matches(path):
            p, tensor = self._read_decoded("path", path)
            return p._log_prob_of_decoded("path", tensor)
        edges, fine = self._edges_of(path), self._solver.expanded()
        return inner(edges, fine.log_transitions(), fine.edge_dims)

    def _log_prob_of_decoded(self, name: str, decoded: Tensor) -> Tensor:
        """Log-probability of paths in the decoded form, (..., *batch, *own)."""
        form = self._form
        form.check_unique(name, decoded)
        edges = form.edges(decoded)
        log_prob = edges.sum_of(self._solver.expanded().log_transitions().flatten(len(self.batch_shape)))
        # A path of positive probability exists, so most calls do not need the other checks.
        if is_readable(log_prob) and not bool((edges.is_path & (log_prob > -math.inf)).all()):
            form.check(name, decoded)
        return log_prob

    def _random_paths(self, count: int) -> tuple[Any, Tensor]:
        """Return :meth:`_scored` of random paths."""
        return self._scored(self._sample_compact((count,)))

    def _most_probable_paths(self, k: int) -> tuple[Any, Tensor]:
        """Return :meth:`_scored` of the most probable paths."""
        with torch.no_grad():
            paths = self._solver.most_probable_compact(k)
        return self._scored(paths.movedim(1, 0).reshape(k, *self.batch_shape, *paths.shape[2:]))

    def _scored(self, compact: Tensor) -> tuple[Any, Tensor]:
        """Return compact paths (K, *batch, …) in the decoded form, and their log-probabilities (K, *batch).

        The log-probability of padding is −∞.
        """
        form = self._form
        edges = form.edges_of_compact(compact)
        log_prob = edges.sum_of(self._solver.expanded().log_transitions().flatten(len(self.batch_shape)))
        return form.of_compact(compact), log_prob.masked_fill(~edges.is_path, -math.inf)

    def entropy(self) -> Tensor:
        """Return the Shannon entropy of the distribution over paths, of the batch shape. Differentiable in θ and γ.

        >>> import bellmax as bx
        >>> bx.Chain(torch.zeros(3, 2, 2)).entropy().exp()  # eight equally probable sequences
        tensor(8.)
        """
        fine = self._solver.expanded()
        log_q = fine.log_transitions()
        return 0 - inner(_without_rounding(fine.expected_edges(), log_q), log_q, fine.edge_dims)

    @property
    def log_num_paths(self) -> Tensor:
        """Logarithm of the number of paths with a finite score, shape (...).

        The dtype is float64, or float32 on a device without float64.
        """
        return self.sense * self._solver.unweighted(Negentropy()).value()

    @property
    def num_paths(self) -> Tensor:
        """Number of paths with a finite score, of the batch shape.

        The dtype is float64. Numbers up to about 10¹² are exact, and larger numbers are accurate to 14 digits. On a
        device without float64, the dtype is float32, and numbers up to about 10⁴ are exact.
        """
        return self.log_num_paths.exp().round()

    @property
    def max_marginals(self) -> Tensor:
        """Score of the best path that uses each entry of the potentials, (..., *event), without gradient.

        For each entry of the potentials, such as a cell or an edge, only paths that use this entry are compared. If no
        path uses an entry, the result at this entry is −∞. The result depends only on the scores, not on Ω. If the
        scores are costs, the result is the least cost of a path that uses each entry. If no path uses an entry, the
        least cost is +∞.

        >>> import bellmax as bx
        >>> p = bx.DTW(torch.tensor([[0.0, 2.0, 5.0], [3.0, 1.0, 0.0]]))
        >>> p.max_marginals
        tensor([[1., 2., 7.],
                [4., 1., 1.]])
        """
        return self._solver.max_marginals()

    @property
    def node_values(self) -> Tensor:
        """Value of each node in the forward recursion under Ω, without gradient.

        The value of a node is the smoothed maximum of the scores of all partial paths from the start to this node. If
        the scores are costs, it is the smoothed minimum. For a chain, the shape is (..., T, S), and the values do not
        include end scores. For :class:`DTW` and other lattices, the shape is (..., rows, columns). If each cell of a
        lattice has several states, the shape is (..., rows, columns, states). For a :class:`DAG` or a
        :class:`Hypergraph`, the shape is (..., num_nodes), in the order of ``nodes``.

        Values are −∞ (+∞ for costs) at nodes that no path from the start reaches, at masked steps, at pruned nodes, and
        outside of the lengths and the band. Raises ``NotImplementedError`` for segmentations, tree models and parses.

        For DTW with ``omega="hard"``, the result is the accumulated cost matrix:

        >>> import bellmax as bx
        >>> bx.DTW(torch.tensor([[0.0, 2.0, 5.0], [3.0, 1.0, 0.0]]), omega="hard").node_values
        tensor([[0., 2., 7.],
                [3., 1., 1.]])
        """
        return self._solver.node_values()

    def support_paths(self, max_paths: int = 1000) -> tuple[Tensor, Tensor]:
        """Return all paths of positive probability, most probable first, and their probabilities.

        The paths are events (K, ..., *event), and the probabilities have the shape (K, ...). If batch members have
        different numbers of paths of positive probability, K is the largest of these numbers. For batch members with
        fewer paths, the remaining events and probabilities are 0. Raises ``ValueError`` if K exceeds ``max_paths``.

        Args:
            max_paths: The maximum of K, default 1000.

        >>> import bellmax as bx
        >>> p = bx.Chain.from_scores(torch.tensor([[0.5, 0.0], [0.0, 3.0]]), torch.zeros(2, 2), omega="sparsemax")
        >>> paths, probabilities = p.support_paths()
        >>> probabilities
        tensor([0.7500, 0.2500])
        """
        surviving = self._solver.most_probable()
        counts = surviving.unweighted(Negentropy()).value().exp().round()
        most = float(counts.max()) if counts.numel() else 0.0
        if most > max_paths:
            raise ValueError(
                f"max_paths is {max_paths}, but the support holds {most:.10g} paths: increase max_paths, or use topk"
            )
        k = int(most)
        log_probs, edges = surviving.best_edges(max(k, 1))
        paths = self._events_of(edges).movedim(len(self.batch_shape), 0)[:k]
        return paths, log_probs.exp().movedim(-1, 0)[:k]

    @property
    def support(self) -> constraints.Constraint:
        """The set of all paths, as a torch constraint.

        ``p.support.check(x)`` is True if x is a path of the graph. Pass x as an event or in the decoded form. The check
        ignores the scores, so it also accepts paths with probability 0.
        """
        return _Paths(self)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all K paths of finite score as events, (K, ..., *event).

        If two distributions have the same graph and every path has a finite score, this method returns the paths in the
        same order for both. Raises ``ValueError`` if the members of a batch have different numbers of paths. To list
        only paths of positive probability, use :meth:`support_paths`, which pads the lists of a batch.

        Args:
            expand: If True (the default), the result has the batch shape. If False, each batch dimension has size 1,
                and all members of the batch must have the same paths.

        >>> import bellmax as bx
        >>> bx.DAG([(0, 1), (0, 2), (1, 3), (2, 3)]).paths(torch.zeros(4)).enumerate_support()
        tensor([[1., 0., 1., 0.],
                [0., 1., 0., 1.]])
        """
        counts = self.num_paths
        least, most = (float(counts.min()), float(counts.max())) if counts.numel() else (0.0, 0.0)
        if most > _MAX_ENUMERATED:
            raise ValueError(
                f"enumerate_support lists up to {_MAX_ENUMERATED} paths, got {most:.10g}: use topk or sample instead"
            )
        if least < most:
            raise ValueError(
                "enumerate_support needs the same number of paths for each batch member, got "
                f"{least:g} to {most:g}: use support_paths, which pads"
            )
        batch_dims, k = len(self.batch_shape), int(most)
        edges = self._solver.expanded().unweighted(Hard()).best_edges(max(k, 1))[1]
        paths = self._events_of(edges).movedim(batch_dims, 0)[:k]
        if expand or not paths.numel():
            return paths
        first = paths.flatten(1, batch_dims)[:, :1] if batch_dims else paths
        first = first.reshape(k, *[1] * batch_dims, *self.event_shape)
        if not bool((paths == first).all()):
            raise ValueError("enumerate_support(expand=False) needs the same paths for each batch member")
        return first

    # --- torch habits

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> Self:
        """Return this distribution with its batch dimensions expanded to ``batch_shape``, without a copy."""
        shape = torch.Size(batch_shape)
        try:
            expanded = torch.broadcast_shapes(self.batch_shape, shape) == shape
        except RuntimeError:
            expanded = False
        if not expanded:
            raise ValueError(
                f"batch_shape must be a shape to which {tuple(self.batch_shape)} expands, got {tuple(shape)}"
            )
        return self._by(self._solver.expand(shape))

    def __getitem__(self, index: Any) -> Self:
        """Return the distribution of some members of the batch, for any index that torch accepts.

        >>> import bellmax as bx
        >>> bx.Chain(torch.zeros(4, 5, 2, 2))[1:3].batch_shape
        torch.Size([2])
        """
        batch = self.batch_shape
        if not batch:
            raise IndexError("p has no batch dimensions to index")
        members = torch.arange(batch.numel(), device=self.device).reshape(batch)[index]

        def pick(t: Tensor, dims: int) -> Tensor:
            expanded = t.expand(batch + t.shape[t.ndim - dims :])
            return expanded.flatten(0, len(batch) - 1)[members]

        return self._by(self._solver.map(pick, members.shape))

    def __iter__(self) -> Iterator[Self]:
        if not self.batch_shape:
            raise TypeError("p has no batch dimensions to iterate over")
        return (self[member] for member in range(self.batch_shape[0]))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return this distribution on another device or in another floating point dtype.

        This method takes the same arguments as ``torch.Tensor.to``.

        >>> import bellmax as bx
        >>> bx.Chain(torch.zeros(3, 2, 2)).to(torch.float64).value.dtype
        torch.float64
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")

        def move(t: Tensor, dims: int) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else None, non_blocking=non_blocking)

        solver = self._solver.map(move, self.batch_shape, shared=True)
        target = solver.scores[0].device
        solver.integers = tuple(t.to(target) for t in self._solver.integers)  # a band keeps its dtype
        if target != self.device:
            solver.backend = backend_for(solver.program.name, target, self.omega.kernel)
        return self._by(solver)

    def detach(self) -> Self:
        """Return this distribution without gradients."""
        return self._by(self._solver.map(lambda t, dims: t.detach(), self.batch_shape, shared=True))

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy, whose scores are new leaves."""

        def clone(t: Tensor, dims: int) -> Tensor:
            return t.detach().clone().requires_grad_(t.requires_grad)

        return self._by(self._solver.map(clone, self.batch_shape, shared=True))

    def __repr__(self) -> str:
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        options = "".join(f"{name}={value!r}, " for name, value in self._shown_options().items())
        return f"{type(self).__name__}({shapes}, {options}omega={self.omega})"

    def _shown_options(self) -> dict[str, object]:
        """Return the options that ``repr`` shows, by name."""
        return {}

    # --- checks of arguments

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"{name} must be on the potentials' device {self.device}, got {tensor.device}")

    def _like(self, name: str, tensor: Tensor, score: Tensor) -> Tensor:
        """Expand a tensor to the shape of a score."""
        self._check_device(name, check_tensor(name, tensor))
        try:
            return tensor.expand(score.shape)
        except RuntimeError:
            raise ValueError(
                f"{name} must broadcast to the potentials' shape {tuple(score.shape)}, got {tuple(tensor.shape)}"
            ) from None

    def _check_event(self, path: Tensor, name: str = "path") -> Tensor:
        """Return an event (..., *event) in the computing dtype."""
        self._check_device(name, check_tensor(name, path))
        events = len(self.event_shape)
        if path.shape[path.ndim - events :] != self.event_shape or path.ndim < events:
            raise ValueError(f"{name} must have event shape {tuple(self.event_shape)}, got shape {tuple(path.shape)}")
        return path.to(torch.promote_types(self.dtype, torch.float32))

    def _check_path(self, path: Tensor) -> Tensor:
        """Return an event in the computing dtype, if it is a path."""
        event = self._check_event(path)
        if is_readable(event):
            self._refuse_unless(self._is_path(event), event)
        return event

    def _refuse_unless(self, is_path: Tensor, event: Tensor) -> None:
        """Raise a ValueError about the first event that is not a path, if values can be read."""
        if is_readable(is_path) and not bool(is_path.all()):
            first = tuple((~is_path).nonzero()[0].tolist())
            member = first[len(first) - len(self.batch_shape) :]
            p = self.detach()[member] if member else self.detach()
            reason = p._why_no_path(event.expand(is_path.shape + self.event_shape)[first])
            raise ValueError(f"path{subscript(first)} {reason}")


def check_distribution(p: object, name: str = "p") -> None:
    """Raise a ValueError if p is not a distribution over paths. ``name`` is its name in the message."""
    if not isinstance(p, PathDistribution):
        raise ValueError(f"{name} must be a distribution such as bx.Chain, got {type(p).__name__}")


class _Paths(constraints.Constraint):
    """The paths of a distribution's graph."""

    is_discrete = True

    def __init__(self, p: PathDistribution) -> None:
        self._p = p
        super().__init__()

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        return len(self._p.event_shape)

    def check(self, value: Any) -> Tensor:
        """Return True if an event, or a path in the decoded form, is a path of the graph. Scores are ignored."""
        if self._p._form.matches(value):
            p, tensor = self._p._read_decoded("value", value)
            return p._form.is_path(tensor)
        return self._p._is_path(self._p._check_event(value, "value"))


def _without_rounding(path: Tensor, log_q: Tensor) -> Tensor:
    """Remove the mass that rounding leaves on edges whose probability q is 0 or underflows."""
    return path.masked_fill(log_q.exp() == 0, 0)


def _have_same_paths(p: PathDistribution, r: PathDistribution) -> bool:
    """Return True if two distributions have the same graph, so that their events can be compared."""
    programs = p._solver.program, r._solver.program
    if programs[0].paths != programs[1].paths or p.event_shape != r.event_shape:
        return False
    if programs[0].index_dims is not None and p.batch_shape != r.batch_shape:
        return False
    keys = [s.program.key(s.batch.unscaled(s.detached()), s.batch.index) for s in (p._solver, r._solver)]
    return len(keys[0]) == len(keys[1]) and all(a.equal(b) for a, b in zip(*keys, strict=True))


@register_kl(PathDistribution, PathDistribution)  # type: ignore[untyped-decorator]
def _kl_divergence(p: PathDistribution, r: PathDistribution) -> Tensor:
    """Return KL(p ‖ r), of the batch shape: ∞ if p has a path that r does not have."""
    if not _have_same_paths(p, r):
        raise ValueError("kl_divergence needs two distributions over the paths of the same graph")
    fine = p._solver.expanded()
    log_p, log_r = fine.log_transitions(), r._solver.expanded().log_transitions()
    path, ratio = _without_rounding(fine.expected_edges(), log_p), log_p - log_r
    outside = (path > 0) & (ratio == math.inf)  # paths of p that r does not have
    finite = inner(path, ratio.masked_fill(outside, 0), fine.edge_dims)
    return finite.masked_fill(outside.flatten(-fine.edge_dims).any(-1), math.inf)
