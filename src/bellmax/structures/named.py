"""NamedScores, the base class of distributions with several scores, each with a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bellmax.distribution import PathDistribution


class NamedScores(PathDistribution):
    """A distribution with named scores: derivatives are by name, and events have the shape of the first score."""

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores by name."""
        return self._by_name(self._scores)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """∇DP_Ω with respect to each score, by name: the expected number of uses of each entry. Differentiable.

        Scores whose names begin with an underscore are constants and are left out.
        """
        return self._by_name([g.to(self.dtype) for g in self._solver.gradient()])

    def hessian_product(self, z: Tensor | Mapping[str, Tensor]) -> Any:
        """∇²DP_Ω z, by name if z is a mapping, or for the first score if z is a tensor.

        If a mapping leaves out a name, z is 0 for this score.
        """
        return super().hessian_product(z)

    def directional_derivative(self, z: Tensor | Mapping[str, Tensor]) -> Tensor:
        """⟨∇DP_Ω, z⟩, of the batch shape. z is a mapping by name, or a tensor for the first score."""
        return super().directional_derivative(z)
