"""Everything private that the tests use: modules, attributes and limits of the library.

No other file of the tests may use one (``test_house.py``), so that a change of the library's internals changes this
file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bellmax as bx
from bellmax import cluster, files, modes
from bellmax.autograd import functions
from bellmax.backends import BACKENDS, detour
from bellmax.backends.fused import PairCosts
from bellmax.backends.native import automaton, loading, short_pairs, sorting, two_states
from bellmax.backends.triton import KERNELS
from bellmax.programs import GRAPH, PROGRAMS, graph
from bellmax.programs.charts import ChartProgram
from bellmax.programs.segments import SegmentProgram
from bellmax.programs.table import PLACES, WARPING, Axis, Ends, Step, Table, Term
from bellmax.regularizers import Kernel, from_kernel
from bellmax.series import collections, jobs, outputs, pairwise, routes
from bellmax.series.long_pairs import long_pair_value
from bellmax.series.measure import measure_of
from bellmax.solver import Solver
from bellmax.structures.joint import log_sum_of_products
from bellmax.tensors import WITHOUT_FLOAT64, Tensors

__all__ = ["BACKENDS", "KERNELS", "PLACES", "PROGRAMS", "WARPING", "Axis", "ChartProgram", "Ends", "Kernel", "Solver"]
__all__ += [
    "PairCosts",
    "SegmentProgram",
    "Step",
    "Table",
    "Tensors",
    "Term",
    "collections",
    "from_kernel",
    "graph",
    "jobs",
]
__all__ += [
    "automaton_tape",
    "loading",
    "log_sum_of_products",
    "long_pair_value",
    "measure_of",
    "modes",
    "pairwise",
    "routes",
]
__all__ += ["short_pairs", "sorting", "two_states"]

automaton_tape = automaton, "_MOST_NUMBERS"
"""The largest number of entries of the tape of an automaton that has a row for each frame."""

# --- distributions


def scores(p: bx.PathDistribution) -> tuple[Tensor, ...]:
    """The scores that p was made from."""
    return p._scores


def index(p: bx.PathDistribution | bx.DAG | bx.Hypergraph) -> tuple[Tensor, ...]:
    """The integer tensors that the sweeps read in addition to the scores."""
    return p._solver.batch.index if isinstance(p, bx.PathDistribution) else p._index


def program_name(p: bx.PathDistribution) -> str:
    """The name by which operators find the program of p."""
    return p._solver.program.name


def with_scores(p: Any, scores: Sequence[Tensor], omega: bx.Regularizer) -> Any:
    """A distribution over the paths of p, with other scores of the same shapes."""
    return p._with(scores, omega)


def edge_weights(p: Any) -> Tensor:
    """A weight for each edge of p's graph, (..., E)."""
    return p._solver.expanded().edge_weights()


def on_edges(p: bx.PathDistribution, path: Tensor) -> tuple[bx.PathDistribution, Tensor]:
    """The distribution of p with a weight for each edge, and one of p's paths as its event."""
    fine = p._solver.expanded()
    weights = fine.edge_weights()
    shapes = p.batch_shape, weights.shape[-1:]
    by_edge = bx.PathDistribution(GRAPH, {"weights": (weights, 1)}, fine.integers, *shapes, p.omega)
    return by_edge, p._solver.edges_of(path)[0]


def grid_size(p: Any) -> tuple[int, int]:
    """The rows and columns of the grid that the scores of a lattice need."""
    return p._size


def has_sink(p: Any) -> Tensor:
    """True for each lattice of the batch whose paths may end at several nodes, which then lead to a sink, (B,)."""
    solver = p._solver
    return solver.program.has_sink(solver.batch.unscaled(solver.detached()), solver.batch.index)


def tapes(p: bx.PathDistribution, backend: str) -> tuple[Tensor, Tensor]:
    """The tape that the forward sweep of p saves, and the empty tape that torch.compile plans with."""
    theta, _, tape = p._solver.forward()
    return tape, BACKENDS[backend].sweeps(program_name(p)).empty_tape(theta, p._solver.batch.index)


# --- layers, losses, clusters


def attention_weights(attention: bx.nn.SegmentationAttention, scores: Tensor, mask: Tensor | None) -> Tensor:
    """The weights that the layer makes of scores (..., queries, keys)."""
    return attention._weights(scores, None if mask is None else mask.unsqueeze(-2))


def allowed_cells(loss: Any, rows: int, columns: int) -> Tensor | None:
    """The cells that tslearn's global constraints leave, (rows, columns); None for all."""
    return loss._cell_mask(rows, columns)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The error of a result as the check of a GPU reports it."""
    return pytest.importorskip("bellmax.gpu_check.checks")._error(result, expected)


def check_on(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Let the check of a GPU run on another device."""
    monkeypatch.setattr("bellmax.gpu_check.commands._device", lambda console: device)


def load_job(folder: Path, fingerprint: str) -> jobs.Job:
    """Read the job of a plan from its file, past the cache."""
    return cluster._load.__wrapped__(folder, fingerprint)


def save_job(folder: Path, job: jobs.Job, fingerprint: str) -> None:
    cluster._save(folder / "job.pickle", job, fingerprint)


# --- patches

LIMITS = {
    "series in a tile of dtw_cdist": "bellmax.series.collections._TILE",
    "queries in a block of dtw_neighbors": "bellmax.series.neighbors._QUERIES",
    "cells in a block of dtw_neighbors": "bellmax.series.neighbors.CELLS_OF_BLOCK",
    "pairs in a call of the kernel for neighbors": "bellmax.series.neighbors._PAIRS",
    "cells in a chunk of a long pair": "bellmax.backends.native.long_pairs._CELLS",
    "cells of a long pair": "bellmax.series.routes._LONG",
    "cells of a batch of long pairs": "bellmax.series.routes._LARGE",
    "work of a search for a sum": "bellmax.structures.sums._MAX_WORK",
    "numbers in a chunk of joint scores": "bellmax.structures.joint._CHUNK",
    "timed runs of the check of a GPU": "bellmax.gpu_check.times._RUNS",
    "warm-up runs of the check of a GPU": "bellmax.gpu_check.times._WARM",
    "edges into a node on a GPU": "bellmax.backends.triton.graph._MAX_EDGES",
}


def set_limit(monkeypatch: pytest.MonkeyPatch, name: str, limit: object) -> None:
    """Change a limit past which the library works in blocks, or gives up."""
    monkeypatch.setattr(LIMITS[name], limit)


class CountedLimit:
    """A limit that counts the comparisons with larger numbers."""

    def __init__(self, limit: float) -> None:
        self.limit, self.times_exceeded = limit, 0

    def __lt__(self, work: float) -> bool:
        self.times_exceeded += self.limit < work
        return self.limit < work


def count_abandoned_searches(monkeypatch: pytest.MonkeyPatch, limit: float = 500_000) -> CountedLimit:
    """Limit the work of a search for a path with given counts; its ``times_exceeded`` says how many gave up."""
    counted = CountedLimit(limit)
    set_limit(monkeypatch, "work of a search for a sum", counted)
    return counted


def forbid_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make derivatives fail that no sweep computes."""
    monkeypatch.setattr(functions.SweepRunner, "in_plain_torch", None)


def forbid_float64(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Mark a device as one without float64."""
    monkeypatch.setattr("bellmax.tensors.WITHOUT_FLOAT64", [*WITHOUT_FLOAT64, device])


def replace_lock(monkeypatch: pytest.MonkeyPatch, lock: Callable[..., None]) -> None:
    """Change the function that locks a file."""
    monkeypatch.setattr(files, "_lock", lock)


def replace_open(monkeypatch: pytest.MonkeyPatch, open_output: Callable[..., None]) -> None:
    """Change the function that opens the file of a result."""
    monkeypatch.setattr(outputs, "_open", open_output)


@contextmanager
def routes_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the routes that are taken inside the ``with``, in order."""
    names: list[str] = []

    def recording(route: Any) -> Any:
        def compute(*args: Any) -> Tensor:
            names.append(route.name)
            return route.compute(*args)

        return route._replace(compute=compute)

    with monkeypatch.context() as m:
        m.setattr(routes, "_ROUTES_OF", {k: list(map(recording, v)) for k, v in routes._ROUTES_OF.items()})
        yield names


# --- the CPU fallback


def copies_on_cpu() -> int:
    """The number of tensors of other devices that have a copy on the CPU now."""
    return len(detour._copies)


def warn_again() -> None:
    """Reset the warning that each process gives once, at the first use of the CPU fallback."""
    detour._warn.cache_clear()


# --- Triton


def triton_module(name: str) -> Any:
    """A module of the Triton backend; the test is skipped without Triton."""
    return pytest.importorskip(f"bellmax.backends.triton.{name}")


def count_level_searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that gets an entry each time the host searches a graph for its levels."""
    module = triton_module("graph")
    find, searches = module._compute_levels, list[object]()
    monkeypatch.setattr(module, "_compute_levels", lambda index: searches.append(index) or find(index))
    return searches


def cache_of(program: Any) -> dict[Any, Any]:
    """Return the traces of a program by their keys."""
    return program._traces
