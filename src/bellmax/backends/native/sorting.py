"""The levels of a graph, computed by a kernel if the kernels are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import bellmax.backends.native.loading as loading
import bellmax.programs.graph as graph

if TYPE_CHECKING:
    from numpy.typing import NDArray


def levels(pairs: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Return the same levels as :func:`bellmax.programs.graph.levels`, faster."""
    if loading.kernels is None:
        return graph.levels(pairs, num_nodes)
    level = np.empty(num_nodes, dtype=np.int64)
    loading.kernels.dag_levels(torch.from_numpy(pairs).contiguous(), torch.from_numpy(level))
    return level
