"""The class Targets: how losses read a target of a distribution, and compare the distribution with it.

The defaults are for a graph, whose target is one path, or the set of all paths within some edges. A structure that
takes other forms of targets, or has quicker ways, brings a subclass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from bellmax.decoded import DecodedForm, DecodedPaths, EdgePaths, are_integers
from bellmax.inputs import check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.checks import of_sequence, subscript
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.solver import Solver
from bellmax.tensors import inner, multiply_by_gamma, promote_half, wide_dtype, widen

if TYPE_CHECKING:
    from typing_extensions import Self


class Paths(DecodedPaths, Protocol):
    """A distribution over paths, as its targets see it."""

    @property
    def omega(self) -> Regularizer: ...

    @property
    def sense(self) -> int: ...

    @property
    def backend(self) -> str: ...

    @property
    def potentials(self) -> Tensor: ...

    @property
    def value(self) -> Tensor: ...

    @property
    def expected_path(self) -> Tensor: ...

    @property
    def num_paths(self) -> Tensor: ...

    @property
    def _targets(self) -> Targets: ...

    def _read_decoded(self, name: str, decoded: Any) -> tuple[Self, Tensor]: ...

    def _is_path(self, value: Tensor) -> Tensor: ...

    def best_path(self) -> Tensor: ...

    def _by(self, solver: Solver) -> Self: ...

    def _with(self, scores: Sequence[Tensor], omega: Regularizer) -> Self: ...

    def _under(self, omega: Regularizer) -> Self: ...


class Targets:
    """The targets and costs that a distribution ``p`` takes.

    ``allowed`` is what a target allows, bool: of the event's shape, or for sequences also (..., T, S), of states.
    """

    is_alignment: ClassVar[bool] = False
    """True if a path is a set of cells (N, M), which aligns rows with columns."""
    has_steps: ClassVar[bool] = False
    """True if a path goes through steps, which may be masked."""
    reads_integers: bool = False
    """True if :meth:`allowed` reads integers, for example because they may be partial labels."""

    def __init__(self, p: Paths) -> None:
        self.p = p
        self.solver = p._solver
        self.batch_shape, self.event_shape = p.batch_shape, p.event_shape

    @property
    def num_steps(self) -> Tensor | None:
        """The number of steps of each sequence that are not masked, (...); None if no step is masked."""
        return None

    # --- reading a target

    def read(self, name: str, target: Any, ignore_index: int = -100) -> tuple[Targets, Tensor]:
        """Read a target: return the targets of p without the steps that it masks, and what it allows."""
        if not self.reads_integers and self.p._form.matches(target):
            targets = self._of_path(name, target)
            return targets, targets.paths.is_path
        self.p._check_device(name, check_tensor(name, target))
        masked = self.masked_by(name, target, ignore_index)
        return masked, masked.allowed(name, target, ignore_index)

    def _of_path(self, name: str, target: Any) -> PathTargets:
        """Return the target of a path in the decoded form. Raises ``ValueError`` if it is not a path."""
        decoded = self.read_decoded(name, target)
        self.p._form.check(name, decoded)
        return PathTargets(self.p, decoded, self.p._form.edges(decoded))

    def read_decoded(self, name: str, target: Any) -> Tensor:
        """Return a target in the decoded form, (*batch, *own). Raises ``ValueError`` if it has another batch shape."""
        p, decoded = self.p._read_decoded(name, target)
        got = decoded.shape[: decoded.ndim - len(p._form.own_shape)]
        if got != self.batch_shape:
            raise ValueError(
                f"{name} must have the batch shape {tuple(self.batch_shape)}, got a batch of shape {tuple(got)}"
            )
        return decoded

    def masked_by(self, name: str, target: Tensor, ignore_index: int) -> Self:
        """Return the targets of the distribution without the steps that the target masks."""
        return self

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        """Return what a target allows."""
        if self.p._form.matches(target):
            raise self._shape_error(name, target)
        allowed = self.expand(name, target, self.event_shape)
        if allowed.dtype == torch.bool:
            return allowed
        if is_checked(allowed):
            max_count = self.solver.program.max_count
            is_count = (allowed >= 0) & (allowed <= max_count) & (allowed == allowed.round())
            bad = ~is_count & self.is_used(allowed.ndim)
            if bool(bad.any()):
                position = tuple(bad.nonzero()[0].tolist())
                counts = "0 and 1" if max_count == 1 else "counts 0, 1, 2, …"
                raise ValueError(f"{name} must hold {counts}, got {allowed[position].item()} at {position}")
        return allowed > 0

    def forms(self) -> list[str]:
        """The forms that a target may have, for messages."""
        event = f"{tuple(self.batch_shape + self.event_shape)} of 0 and 1"
        has_form = not self.reads_integers and type(self.p._form) is not DecodedForm
        return [event, self.p._form.description] if has_form else [event]

    def expand(self, name: str, target: Tensor, shape: torch.Size) -> Tensor:
        """Expand a target to the batch shape and ``shape``, or raise a ValueError that lists the forms."""
        needed = self.batch_shape + shape
        is_shared = are_integers(target) or len(shape) == len(self.event_shape)
        if target.ndim == len(needed) or (is_shared and len(shape) <= target.ndim):
            try:
                return target.expand(needed)
            except RuntimeError:
                pass
        raise self._shape_error(name, target)

    def _shape_error(self, name: str, target: Tensor) -> ValueError:
        """The error for a target of a shape or dtype that no form has."""
        forms, got = " or ".join(self.forms()), f"{tuple(target.shape)} {target.dtype}"
        is_event = are_integers(target) and target.shape[target.ndim - len(self.event_shape) :] == self.event_shape
        hint = f". For an event, pass floating point or bool: {name}.float()" if is_event else ""
        return ValueError(f"{name} must have shape {forms}, got {got}{hint}")

    def is_used(self, ndim: int) -> Tensor:
        """True at the entries that a path may use, of a tensor with ``ndim`` dimensions; it broadcasts."""
        batch = self.solver.batch
        used = self.solver.program.used(batch.unscaled(self.solver.detached()), batch.index)[0]
        if used is None:
            return torch.ones((), dtype=torch.bool, device=self.p.device)
        return used.reshape(self.batch_shape + used.shape[1:])

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        """Return the target as a 0/1 path in the computing dtype, or raise a ValueError if it is not a single path."""
        path = allowed.to(torch.promote_types(self.p.dtype, torch.float32))
        if is_checked(path):
            is_path = self.p._is_path(path)
            if not bool(is_path.all()):
                member = of_sequence((~is_path).nonzero()[0].tolist())
                raise ValueError(
                    f"{name} must be a single path from start to end, got a set of edges that is not one{member}"
                )
        self.check_possible(name, allowed)
        return path

    def check_possible(self, name: str, allowed: Tensor) -> None:
        """Raise a ValueError if none of the allowed paths has a finite score."""
        if is_checked(allowed) and is_readable(self.solver.scores[0]):
            with torch.no_grad():
                impossible = self.p._under(Hard())._targets.restricted_value(allowed).isinf()
            if bool(impossible.any()):
                raise ValueError(self.why_impossible(name, allowed, impossible))

    def why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        """A sentence on the first target that has no path of finite score."""
        member = subscript(impossible.nonzero()[0].tolist())
        return f"{name}{member} allows no path of finite score"

    # --- the program within a target

    def restrict(self, allowed: Tensor) -> Paths:
        """Return the same program on the allowed entries alone."""
        first, *rest = self.solver.scores
        closed = first.masked_fill(~allowed, -self.p.sense * math.inf)
        return self.p._with((closed, *rest), self.p.omega)

    def restricted_value(self, allowed: Tensor) -> Tensor:
        """DP_Ω over the paths that are allowed; infinite if there is none."""
        return self.restrict(allowed).value

    def edges_within(self, allowed: Tensor) -> Tensor:
        """True at the edges of the expansion that are allowed; it broadcasts."""
        return self.restrict(allowed)._solver.expanded().edge_weights().detach() > -math.inf

    def value_of_one_path(self, score: Tensor, nodes: Tensor) -> Tensor:
        """DP_Ω over a single path: its score less what Ω adds at each of its nodes, which have one parent each."""
        device = self.p.device
        at_vertex = self.p.omega.penalty(torch.ones(1, dtype=wide_dtype(device), device=device))
        value = score - multiply_by_gamma(self.p.sense * nodes * at_vertex, self.p.omega.gamma)
        return value.to(torch.promote_types(self.p.dtype, torch.float32))

    def excess_by_kernels(self, target: Tensor, ignore_index: int) -> tuple[Self, Tensor | None]:
        """DP_Ω − DP_Ω within the target, of the batch shape, or None if no fused kernel supports this target.

        It comes with the targets of the distribution without the steps that the target masks.
        """
        return self, None

    # --- costs of mistakes

    def correct(self, allowed: Tensor) -> Tensor:
        """True at the correct entries, bool, in the form of :func:`bellmax.losses.hamming_cost`."""
        return allowed

    def cost_shapes(self) -> list[torch.Size]:
        """The shapes that a cost may have."""
        return [self.batch_shape + self.event_shape]

    def check_cost(self, cost: Tensor) -> Tensor:
        """Expand a cost C to one of its shapes."""
        self.p._check_device("cost", check_tensor("cost", cost))
        shapes = self.cost_shapes()
        for shape in shapes:
            if cost.ndim == len(shape) or len(shapes) == 1:
                try:
                    return cost.expand(shape)
                except RuntimeError:
                    pass
        needed = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"cost must have shape {needed}, got {tuple(cost.shape)}")

    def augment(self, cost: Tensor) -> Paths:
        """Return the program with scores θ + C, or costs θ − C."""
        cost = self.check_cost(cost)
        if is_checked(cost):
            bad = ~((cost >= 0) & (cost < math.inf)) & self.is_used(cost.ndim)
            if bool(bad.any()):
                position = tuple(bad.nonzero()[0].tolist())
                raise ValueError(f"cost must be finite and at least 0, got {cost[position].item()} at {position}")
        return self.add(cost)

    def add(self, cost: Tensor) -> Paths:
        first, *rest = self.solver.scores
        return self.p._with((first + self.p.sense * cost, *rest), self.p.omega)

    def expected_cost(self, cost: Tensor) -> Tensor:
        """⟨E, C⟩, of the batch shape."""
        return inner(promote_half(self.p.expected_path), promote_half(cost), len(self.event_shape))

    # --- the distance of the expected path from the target

    def distance(self, name: str, allowed: Tensor) -> Tensor:
        """The distance of the expected path from a target path: −Σ log E over its edges, or ½‖E − Y‖²."""
        y = self.check_one_path(name, allowed)
        path = promote_half(self.p.expected_path)
        loss = self.divergence(path, y) if isinstance(self.p.omega, Negentropy) else (path - y).square() / 2
        return loss.flatten(-len(self.event_shape)).sum(-1)

    def divergence(self, path: Tensor, y: Tensor) -> Tensor:
        """The divergence of an expected path from a path y under negentropy, entry by entry."""
        return -path.clamp(torch.finfo(path.dtype).tiny, 1).log() * y


class PathTargets(Targets):
    """A target in the decoded form, which is one path. ``allowed`` is not used."""

    def __init__(self, p: Paths, decoded: Tensor, paths: EdgePaths) -> None:
        super().__init__(p)
        self.decoded, self.paths = decoded, paths

    def _score(self) -> Tensor:
        """The score of the path, of the batch shape, in the wide dtype."""
        weights = widen(promote_half(self.solver.edge_weights())).flatten(len(self.batch_shape))
        return self.p.sense * self.paths.sum_of(weights)

    def _event(self) -> Tensor:
        return self.p._form.events(self.decoded)

    def restricted_value(self, allowed: Tensor) -> Tensor:
        batch = self.solver.batch
        extra = self.solver.program.extra_nodes(batch.unscaled(self.solver.detached()), batch.index)
        if isinstance(extra, Tensor):
            extra = extra.reshape(self.batch_shape)
        return self.value_of_one_path(self._score(), self.paths.num_edges() - extra)

    def check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        self.check_possible(name, allowed)
        return self._event()

    def check_possible(self, name: str, allowed: Tensor) -> None:
        if is_checked(allowed) and is_readable(self.solver.scores[0]):
            with torch.no_grad():
                impossible = self._score().isinf()
            if bool(impossible.any()):
                raise ValueError(self.why_impossible(name, allowed, impossible))

    def why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        if type(self.p._targets).why_impossible is not Targets.why_impossible:
            return self.p._targets.why_impossible(name, self._event() != 0, impossible)
        member = subscript(impossible.nonzero()[0].tolist())
        return f"{name}{member} is forbidden: its score is {-self.p.sense * math.inf}"

    def log_prob(self, name: str) -> Tensor:
        """Log-probability of the path, of the batch shape. Raises ``ValueError`` if the target fits several paths."""
        self.p._form.check_unique(name, self.decoded)
        log_q = self.solver.expanded().log_transitions()
        return self.paths.sum_of(log_q.flatten(len(self.batch_shape)))

    # --- as the targets of p have it, for an event

    def correct(self, allowed: Tensor) -> Tensor:
        return self.p._targets.correct(self._event() != 0)

    def is_used(self, ndim: int) -> Tensor:
        return self.p._targets.is_used(ndim)

    def divergence(self, path: Tensor, y: Tensor) -> Tensor:
        return self.p._targets.divergence(path, y)
