"""The integer facts of each structure, and what its values must satisfy, whichever backend runs.

Nothing here sweeps, and nothing knows autograd.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bellmax.layouts import charts, graph, grid, lattice, scored_chain, segments, steps, tree
from bellmax.tensors import Tensors


class Layout(Protocol):
    """How a structure's tensors are laid out: ``theta``, batch first, and the integers of its ``index``."""

    index_is_batched: bool
    sense: int  # 1 if the value is a smoothed max, −1 if it is a smoothed min

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """The shape of a number for each node."""
        ...

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        """Room for (B, count) paths in the form that ``sample`` and ``topk`` give them."""
        ...

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        """Raise a ValueError for integers out of range."""
        ...

    def check(self, theta: Tensors, index: Tensors) -> None:
        """Raise a ValueError for values that no sweep can take."""
        ...


class Expansion(Layout, Protocol):
    """A layout whose edges' weights are a linear function of its scores: an ``engine`` with more of them sweeps.

    The value is ``sense`` · DP_Ω of the engine's graph, which may have nodes with a single parent that the
    structure does not have.
    """

    engine: str

    def extra_nodes(self, theta: Tensors, index: Tensors) -> int | Tensor:
        """How many nodes with a single parent the engine's graph has more than the structure, or than each member of
        the batch, (B,)."""
        ...

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        """The engine's integers."""
        ...

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        """Of the engine's shape; −∞ where there is no edge."""
        ...

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        """The change of the weights for a change of the scores."""
        ...

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        """The transpose of ``along``."""
        ...

    def found_paths(self, found: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """The engine's paths in the structure's own form."""
        ...


EXPANSIONS: dict[str, Expansion] = {
    "scored_chain": scored_chain,
    "dtw": grid,
    "semi_markov": segments,
    "tree": tree,
}
EXPANSIONS |= {name: charts.ChartLayout(name) for name in ("spans", "arcs", "arcs_of_one_root")}


class _Layouts(dict[str, Layout]):
    """Layouts by the name of their structure. That of a lattice is its table."""

    def __missing__(self, name: str) -> Layout:
        layout = self[name] = lattice.layout_of(name)
        return layout


_GRAPHS: dict[str, Layout] = {"dag": graph, "chain": steps}
LAYOUTS = _Layouts(_GRAPHS | EXPANSIONS)
