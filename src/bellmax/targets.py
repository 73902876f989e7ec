"""How a target is read, and what a program is worth on it.

The defaults are those of a graph, whose target is a path, or the set of the paths within some edges. A structure that
has other forms of targets, or quicker ways, overrides them; the losses know none of that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from bellmax.inputs import check_tensor
from bellmax.layouts.values import of_sequence
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.tensors import inner, multiply_by_gamma, promote_half, wide_dtype
from bellmax.transforms import is_checked, is_readable

if TYPE_CHECKING:
    from typing_extensions import Self


class Targets(Distribution):
    """A distribution over paths as losses see it.

    ``allowed`` is what a target allows, bool: of the event's shape, or for sequences also (..., T, S), of states.
    """

    device: torch.device
    dtype: torch.dtype
    omega: Regularizer
    sense: int = 1
    """1 where the program is a max over scores, −1 where it is a min over costs."""
    _scores: tuple[Tensor, ...]
    _most_of_an_entry: float = 1
    """How often a path has an edge at most."""

    # --- what is known of a distribution

    @property
    @abstractmethod
    def expected_path(self) -> Tensor: ...

    @property
    @abstractmethod
    def potentials(self) -> Tensor: ...

    @abstractmethod
    def _value(self) -> Tensor: ...

    @abstractmethod
    def _with(self, scores: Sequence[Tensor], omega: Regularizer) -> Self: ...

    @abstractmethod
    def _is_path(self, value: Tensor) -> Tensor: ...

    @abstractmethod
    def _check_device(self, name: str, tensor: Tensor) -> None: ...

    # --- reading a target

    def _read(self, name: str, target: Tensor, ignore_index: int = -100) -> tuple[Self, Tensor]:
        """This distribution without the steps that the target masks, and what the target allows of the rest."""
        self._check_device(name, check_tensor(name, target))
        p = self._masked_by(name, target, ignore_index)
        return p, p._allowed(name, target, ignore_index)

    def _masked_by(self, name: str, target: Tensor, ignore_index: int) -> Self:
        """This distribution without the steps that the target masks."""
        return self

    def _allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        allowed = self._expand(name, target, self.event_shape)
        if allowed.dtype == torch.bool:
            return allowed
        if is_checked(allowed):
            is_count = (allowed >= 0) & (allowed <= self._most_of_an_entry) & (allowed == allowed.round())
            bad = ~is_count & self._is_used(allowed.ndim)
            if bool(bad.any()):
                place = tuple(bad.nonzero()[0].tolist())
                counts = "0 and 1" if self._most_of_an_entry == 1 else "counts 0, 1, 2, …"
                raise ValueError(f"{name} must hold {counts}, got {allowed[place].item()} at {place}")
        return allowed > 0

    def _target_forms(self) -> list[str]:
        return [f"{tuple(self.batch_shape + self.event_shape)} of 0 and 1"]

    def _expand(self, name: str, target: Tensor, own: torch.Size) -> Tensor:
        needed = self.batch_shape + own
        if target.ndim == len(needed) or len(own) == len(self.event_shape) <= target.ndim:
            try:
                return target.expand(needed)
            except RuntimeError:
                pass
        forms = " or ".join(self._target_forms())
        raise ValueError(f"{name} must have shape {forms}, got {tuple(target.shape)} {target.dtype}")

    def _is_used(self, ndim: int) -> Tensor:
        """Where a tensor of ``ndim`` dimensions, of the event or of states, is used; it broadcasts."""
        return torch.ones((), dtype=torch.bool, device=self.device)

    def _check_one_path(self, name: str, allowed: Tensor) -> Tensor:
        """The target as a 0/1 path in the computing dtype."""
        path = allowed.to(torch.promote_types(self.dtype, torch.float32))
        if is_checked(path):
            whole = self._is_path(path)
            if not bool(whole.all()):
                place = of_sequence((~whole).nonzero()[0].tolist())
                raise ValueError(
                    f"{name} must be a single path from start to end, got a set of edges that is not one{place}"
                )
        self._check_possible(name, allowed)
        return path

    def _check_possible(self, name: str, allowed: Tensor) -> None:
        """Raise a ValueError if none of the allowed paths has a finite score."""
        if is_checked(allowed) and is_readable(self._scores[0]):
            with torch.no_grad():
                hard = self._with([score.detach() for score in self._scores], Hard())
                impossible = hard._restricted_value(allowed).isinf()
            if bool(impossible.any()):
                raise ValueError(self._why_impossible(name, allowed, impossible))

    def _why_impossible(self, name: str, allowed: Tensor, impossible: Tensor) -> str:
        """A sentence on the first target that has no path of finite score."""
        place = of_sequence(impossible.nonzero()[0].tolist())
        return f"{name} must be a path that p can take, but none of its paths has a finite score{place}"

    # --- programs of a target

    def _restrict(self, allowed: Tensor) -> Self:
        """The same program on the allowed edges alone."""
        return self._with((self._scores[0].masked_fill(~allowed, -self.sense * math.inf),), self.omega)

    def _restricted_value(self, allowed: Tensor) -> Tensor:
        """DP_Ω over the paths that are allowed; infinite where there is none."""
        return self._restrict(allowed)._value()

    def _edges_within(self, allowed: Tensor) -> Tensor:
        """The edges of the expansion that are allowed; it broadcasts."""
        return allowed

    def _value_alone(self, score: Tensor, nodes: Tensor) -> Tensor:
        """DP_Ω over a single path: its score less what Ω adds at each of its nodes, which have one parent each."""
        vertex = self.omega.penalty(torch.ones(1, dtype=wide_dtype(self.device), device=self.device))
        value = score - multiply_by_gamma(self.sense * nodes * vertex, self.omega.gamma)
        return value.to(torch.promote_types(self.dtype, torch.float32))

    def _excess_by_kernels(self, target: Tensor, ignore_index: int) -> tuple[Self, Tensor | None]:
        """This distribution without the steps that the target masks, and DP_Ω − DP_Ω within the target, of the batch
        shape; or this distribution and None, if no kernels know this target."""
        return self, None

    # --- costs of mistakes

    def _right(self, allowed: Tensor) -> Tensor:
        """The right entries, bool, in the form of :func:`bellmax.losses.hamming_cost`."""
        return allowed

    def _cost_forms(self) -> list[torch.Size]:
        return [self.batch_shape + self.event_shape]

    def _check_cost(self, cost: Tensor) -> Tensor:
        """C, of one of its forms."""
        self._check_device("cost", check_tensor("cost", cost))
        forms = self._cost_forms()
        for needed in forms:
            if cost.ndim == len(needed) or len(forms) == 1:
                try:
                    return cost.expand(needed)
                except RuntimeError:
                    pass
        shapes = " or ".join(str(tuple(form)) for form in forms)
        raise ValueError(f"cost must have shape {shapes}, got {tuple(cost.shape)}")

    def _augment(self, cost: Tensor) -> Targets:
        """The program with scores θ + C, or costs θ − C."""
        cost = self._check_cost(cost)
        if is_checked(cost):
            bad = ~((cost >= 0) & (cost < math.inf)) & self._is_used(cost.ndim)
            if bool(bad.any()):
                place = tuple(bad.nonzero()[0].tolist())
                raise ValueError(f"cost must be finite and at least 0, got {cost[place].item()} at {place}")
        return self._add(cost)

    def _add(self, cost: Tensor) -> Targets:
        return self._with((self._scores[0] + self.sense * cost,), self.omega)

    def _expected(self, cost: Tensor) -> Tensor:
        """⟨E, C⟩, of the batch shape."""
        return inner(promote_half(self.expected_path), promote_half(cost), len(self.event_shape))

    # --- the expected path beside the target

    def _distance(self, name: str, allowed: Tensor) -> Tensor:
        """How far the expected path is from a target path: −Σ log E over its edges, or ½‖E − Y‖²."""
        y = self._check_one_path(name, allowed)
        path = promote_half(self.expected_path)
        loss = self._divergence(path, y) if isinstance(self.omega, Negentropy) else (path - y).square() / 2
        return loss.flatten(-len(self.event_shape)).sum(-1)

    def _divergence(self, path: Tensor, y: Tensor) -> Tensor:
        return -path.clamp(torch.finfo(path.dtype).tiny, 1).log() * y

    # --- means over a batch

    _is_alignment: ClassVar[bool] = False
    """Whether a path is a set of cells (N, M), which aligns rows with columns."""
    _has_steps: ClassVar[bool] = False
    """Whether a path goes through steps, which may be masked."""

    @property
    def _num_kept(self) -> Tensor | None:
        """How many steps of each sequence are kept, (...); None if there are steps, and none is masked."""
        return None


def check_distribution(p: object) -> None:
    """Raise a ValueError for scores, or anything else that is not a distribution over paths."""
    if not isinstance(p, Targets):
        raise ValueError(f"p must be a distribution such as bx.Chain, got {type(p).__name__}")
