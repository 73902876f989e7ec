"""Distributions over paths with several scores, each with a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bellmax.distribution import PathDistribution


class NamedScores(PathDistribution):
    """A distribution whose event has the shape of its first score, with derivatives by name in all scores."""

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores by name."""
        return self._by_name(self._scores)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """∇DP_Ω in each score, by name: the mean number of times that a path uses each entry. Differentiable.

        A score whose name begins with an underscore is a constant, and left out.
        """
        return self._by_name([g.to(self.dtype) for g in self._solver.gradient()])

    def hessian_product(self, z: Tensor | Mapping[str, Tensor]) -> Any:
        """∇²DP_Ω z: the products by name if z is a mapping, 0 for names that it leaves out, or of the first score if z
        is a tensor."""
        return super().hessian_product(z)

    def directional_derivative(self, z: Tensor | Mapping[str, Tensor]) -> Tensor:
        """⟨∇DP_Ω, z⟩, of the batch shape; z is a mapping or a tensor, as for :meth:`hessian_product`."""
        return super().directional_derivative(z)
