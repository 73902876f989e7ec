"""Distributions over paths with several scores, each with a name."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bellmax.distribution import PathDistribution

if TYPE_CHECKING:
    from typing_extensions import Self


class NamedScores(PathDistribution):
    """A distribution whose event is of the first score's shape, and whose derivatives are by name for all of them."""

    @property
    @abstractmethod
    def _names(self) -> tuple[str, ...]:
        """Of the scores in order. One that begins with an underscore is a constant, and not shown."""

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores by name."""
        return self._by_name(self._scores)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """∇DP_Ω in each score, by name: the mean number of times that a path uses each entry. Differentiable.

        A score whose name begins with an underscore is a constant, and left out.
        """
        return self._by_name([g.to(self.dtype) for g in self._gradient()])

    def hessian_product(self, z: Tensor | Mapping[str, Tensor]) -> Any:
        """∇²DP_Ω z: for z by name, 0 where it is left out, the products by name; for a tensor, of the first score."""
        products = self._hessian_product(self._direction(z))
        return products[0] if isinstance(z, Tensor) else self._by_name(products)

    def directional_derivative(self, z: Tensor | Mapping[str, Tensor]) -> Tensor:
        """⟨∇DP_Ω, z⟩, of the batch shape; z as for :meth:`hessian_product`."""
        return self._directional_derivative(self._direction(z))

    def _direction(self, z: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
        names = self._names
        given = {names[0]: z} if isinstance(z, Tensor) else dict(z)
        for name in given.keys() - set(names):
            raise ValueError(f"z must name scores out of {', '.join(names)}, got {name!r}")
        pairs = zip(names, self._scores, strict=True)
        return [self._like(n, given[n], s) if n in given else torch.zeros_like(s) for n, s in pairs]

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {n: t for n, t in zip(self._names, tensors, strict=True) if not n.startswith("_")}

    # --- targets

    def _restrict(self, allowed: Tensor) -> Self:
        closed = self._scores[0].masked_fill(~allowed, -self.sense * math.inf)
        return self._with((closed, *self._scores[1:]), self.omega)

    def _add(self, cost: Tensor) -> Self:
        return self._with((self._scores[0] + self.sense * cost, *self._scores[1:]), self.omega)
