"""DTW of all pairs of two collections of series."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from math import isqrt
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from bellmax.inputs import TRANSPOSE, Numbers, answers_near_misses, as_collection, as_floating, transposed
from bellmax.modes import is_checked, is_transformed
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.costs import Cost
from bellmax.series.jobs import CELLS_OF_BLOCK, Block, Job, Results, check_client, mean_length, results_of
from bellmax.series.measure import Measure, measure_of
from bellmax.series.outputs import Fresh, Out, Output, output
from bellmax.series.routes import Tile, route_of, values
from bellmax.series.runs import CELLS, Advance, Run, Selection, all_pairs, num_pairs, runs_of, self_pairs, slices
from bellmax.tensors import Gamma, promote_half

Collection: TypeAlias = "Numbers | Iterable[Numbers]"

_TILE = 1024  # series of each side of a block, at most


def check_collections(**named: Collection) -> list[list[Tensor]]:
    """Convert each collection to a list of series (N_k, D), all of one dtype, device and D."""
    lists = {name: as_collection(name, collection) for name, collection in named.items()}
    labelled = [(f"{name}[{k}]", s) for name, series in lists.items() for k, s in enumerate(series)]
    features = max((series.shape[1] for _, series in labelled), default=0)
    if features > 1 and all(len(series) == 1 for _, series in labelled):
        raise ValueError(
            f"{' and '.join(lists)} must hold series (length, features), got only series of length 1 with "
            f"{features} features; if the layout is (cases, channels, time), {TRANSPOSE}"
        )
    for name, series in labelled:
        first_name, first = labelled[0]
        if series.shape[1] != first.shape[1]:
            hint = transposed(len(series) > 1 and len(series) in first.shape)
            raise ValueError(
                f"{name} must have {first.shape[1]} features like {first_name}, got {series.shape[1]}{hint}"
            )
        if series.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}, got {series.device}")
    _check_numbers(labelled)
    typed = iter(as_floating([series for _, series in labelled]))
    return [[promote_half(next(typed)) for _ in series] for series in lists.values()]


def _check_numbers(labelled: list[tuple[str, Tensor]]) -> None:
    """Raise ``ValueError`` at the first NaN, if the values can be read without waiting for a device."""
    if not all(is_checked(series) for _, series in labelled):
        return
    for name, series in labelled:
        missing = series.detach().isnan()
        if missing.any():
            step, feature = missing.nonzero()[0].tolist()
            index = f"[{step}]" if series.shape[1] == 1 else f"[{step}, {feature}]"
            raise ValueError(
                f"{name} must hold no NaN, except padding at the end of a series in an array, got NaN at {name}{index}"
            )


def single_gamma(measure: Measure) -> Measure:
    """Return the measure with a scalar γ. Raises ``ValueError`` if γ has several numbers."""
    if measure.gamma_shape.numel() != 1:
        raise ValueError(f"gamma must be one number for all series, got shape {tuple(measure.gamma_shape)}")
    gamma = measure.omega.gamma
    return measure.with_gamma(gamma.reshape(())) if isinstance(gamma, Tensor) and gamma.ndim else measure


@overload
def dtw_cdist(
    xs: Collection,
    ys: Collection | None = None,
    *,
    cost: Cost = ...,
    band: float | None = ...,
    omega: str | Regularizer = ...,
    gamma: Gamma | None = ...,
    divergence: str | None = ...,
    out: None = ...,
    client: Any = ...,
    checkpoint: str | os.PathLike[str] | None = ...,
    max_cells: int = ...,
    progress: bool = ...,
) -> Tensor: ...


@overload
def dtw_cdist(
    xs: Collection,
    ys: Collection | None = None,
    *,
    cost: Cost = ...,
    band: float | None = ...,
    omega: str | Regularizer = ...,
    gamma: Gamma | None = ...,
    divergence: str | None = ...,
    out: Out,
    client: Any = ...,
    checkpoint: str | os.PathLike[str] | None = ...,
    max_cells: int = ...,
    progress: bool = ...,
) -> Any: ...


@answers_near_misses
def dtw_cdist(
    xs: Collection,
    ys: Collection | None = None,
    *,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    out: Out | None = None,
    client: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    max_cells: int = CELLS,
    progress: bool = False,
) -> Any:
    """Return the matrix of the :func:`dtw` of each series of ``xs`` with each series of ``ys``.

    The series may have any lengths.

    The result is differentiable. The backward pass computes the cost matrices again, because storing them would need
    much memory. If no gradient is recorded, the call needs memory only for the result: 4 bytes for each pair of series
    in float32.

    Args:
        xs: K series. Pass a sequence of tensors, arrays or lists, each (N_k, D) or (N_k,). Or pass a tensor or array
            (K, N, D) or (K, N), or a pandas data frame with a series in each row. In a tensor, an array or a data
            frame, NaN at the end of a series is padding. If the axes of an array X are (cases, channels, time), pass
            ``X.swapaxes(1, 2)``.
        ys: L series, in the formats of ``xs``, default ``xs``. If ``ys`` is not passed, the matrix is symmetric, and
            only one of its halves is computed. A cost function must then be symmetric, too.
        cost: The cost of matching two elements, as in :func:`dtw`. Default "sqeuclidean".
        band: The half-width of a Sakoe–Chiba band in steps, as in :class:`DTW`. Default None, no band.
        omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
            :class:`Regularizer`.
        gamma: Smoothing strength, one number for all pairs, default 1. Only valid if ``omega`` is a string.
        divergence: A divergence, as in :func:`dtw`. Default None.
        out: The object or the path where the result is written. Pass an object of shape (K, L) that supports assignment
            to slices, such as a tensor, an array, a memory map or a zarr array. Or pass a path that ends in ".npy" (a
            file) or in ".zarr" (a folder, which needs ``pip install zarr``). With ``out``, the result has no gradient.
            If a call with a path is interrupted, repeat the call to resume. The matrix is computed in blocks, and a
            second file, with the suffix ".blocks", lists the finished blocks. Raises ``ValueError`` if another call
            writes to the path at the same time.
        client: A client whose workers compute the blocks of the matrix: a ``dask.distributed.Client`` (install
            ``bellmax[cluster]``) or a ``concurrent.futures.Executor``. The result has no gradient. Dask sends the
            series to each worker once.
        checkpoint: A folder where each finished block of the matrix is stored. With a checkpoint, the result has no
            gradient. If a call is interrupted, repeat the call to resume. Raises ``ValueError`` if the file of a block
            is damaged.
        max_cells: The maximum number of cells of the cost matrices that are in memory at the same time, default 2²⁰. A
            pair of series whose cost matrix has more cells is computed alone.
        progress: If True, draw a progress bar on standard error, which needs ``pip install 'bellmax[progress]'``.
            Default False.

    Returns:
        The matrix (K, L), by default a tensor. If ``out`` is an object, this object is returned. If ``out`` is a path,
        the memory map or zarr array at this path is returned.

    >>> import bellmax as bx
    >>> xs = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0])]
    >>> ys = [torch.tensor([3.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 3.0])]
    >>> bx.dtw_cdist(xs, ys, omega="hard")
    tensor([[14.,  1.,  2.],
            [10.,  2.,  2.]])
    """
    check_client(client)
    options: dict[str, Any] = {"cost": cost, "band": band, "omega": omega, "gamma": gamma, "divergence": divergence}
    measure, left, right = _check_pairs(xs, ys, max_cells=max_cells, **options)
    destinations = {"out": out, "client": client, "checkpoint": checkpoint}
    elsewhere = [name for name, argument in destinations.items() if argument is not None]
    has_gradient = measure.may_require_grad or any(series.requires_grad for series in (*left, *right))
    if (
        left
        and right
        and (is_transformed(*left, *right) or (has_gradient and torch.is_grad_enabled() and not elsewhere))
    ):
        if elsewhere:
            raise ValueError(f"{elsewhere[0]} must be None under torch.func, torch.compile and forward mode")
        return _with_gradients(measure, left, right, max_cells, progress)
    job = Pairs(measure, left, right, max_cells)
    with output(out, (len(left), len(right)), left[0] if left else None, job.fingerprint) as to:
        return job.all(to, client, checkpoint, progress)


def _check_pairs(
    xs: Collection,
    ys: Collection | None = None,
    *,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    max_cells: int = CELLS,
) -> tuple[Measure, list[Tensor], list[Tensor]]:
    """The measure and both collections of a call of :func:`dtw_cdist`; one list twice without ``ys``."""
    measure = single_gamma(measure_of(cost, band, resolve(omega, gamma), divergence))
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1, got {max_cells}")
    lists = check_collections(xs=xs) if ys is None else check_collections(xs=xs, ys=ys)
    return measure, lists[0], lists[-1]


def pairs_job(xs: Collection, ys: Collection | None = None, *, max_cells: int = CELLS, **options: Any) -> Pairs:
    """The job of a call of :func:`dtw_cdist`."""
    return Pairs(*_check_pairs(xs, ys, max_cells=max_cells, **options), max_cells)


# --- with gradients


def _with_gradients(
    measure: Measure, left: list[Tensor], right: list[Tensor], max_cells: int, progress: bool
) -> Tensor:
    """f or its divergence, (K, L), differentiable."""
    rows = runs_of(left, max_cells)
    columns = rows if right is left else runs_of(right, max_cells)
    matrix = _differentiable_matrix(measure, rows, columns, progress)
    if measure.divergence is None:
        return matrix
    if rows is columns:
        row_terms = column_terms = matrix.diagonal() / 2
    else:
        row_terms, column_terms = (_self_values(measure, runs) / 2 for runs in (rows, columns))
    return matrix - (row_terms.unsqueeze(-1) + column_terms)


def _differentiable_matrix(measure: Measure, rows: list[Run], columns: list[Run], progress: bool) -> Tensor:
    """f of all pairs, (K, L), which saves no cost matrices for the backward pass."""
    height, width = (sum(len(run.positions) for run in runs) for runs in (rows, columns))
    positions = torch.zeros(height, width, dtype=torch.int64, device=rows[0].positions.device)  # of pairs in `computed`
    computed: list[Tensor] = []
    count = 0
    with progress_bar(progress, num_pairs(height, width, rows is columns)) as advance:
        for selection in all_pairs(rows, columns):
            computed.append(_recomputed_values(measure, selection))
            size = len(selection.i)
            row, column = selection.positions
            numbers = torch.arange(count, count + size, device=positions.device)
            positions[row, column] = numbers
            if rows is columns:
                positions[column, row] = numbers
            count += size
            advance(size)
    return torch.cat(computed)[positions]


def _recomputed_values(measure: Measure, selection: Selection) -> Tensor:
    """f of some pairs, (P,), which the backward pass computes again. torch.func cannot do so, and saves all."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return values(measure, selection)

    def run() -> Tensor:
        with measure.on_its_backend():
            return values(measure, selection)

    result: Tensor = recomputed(run, use_reentrant=False, preserve_rng_state=False)
    return result


def _self_values(measure: Measure, runs: list[Run]) -> Tensor:
    """f of each series with itself, (K,)."""
    computed = [values(measure, self_pairs(run)) for run in runs]
    return torch.cat(computed)[torch.cat([run.positions for run in runs]).argsort()]


# --- without gradients


class Pairs(Job):
    """f of all pairs. In a symmetric matrix, only the blocks on and above the diagonal are computed."""

    def __init__(self, measure: Measure, left: list[Tensor], right: list[Tensor], max_cells: int = CELLS) -> None:
        super().__init__(measure, left, right)
        self._max_cells = max_cells
        step = isqrt(CELLS_OF_BLOCK // (mean_length(left) * mean_length(right)))
        self._step = max(1, min(step, _TILE))

    def blocks(self) -> list[Block]:
        sides = product(slices(len(self.left), self._step), slices(len(self.right), self._step))
        return [Block(*sides) for sides in sides if not self.is_symmetric or sides[0].start <= sides[1].start]

    def _is_diagonal(self, block: Block) -> bool:
        return self.is_symmetric and block.rows == block.columns

    def compute(self, block: Block, advance: Advance = lambda done: None) -> Results:
        tile = Tile(self.left[block.rows], self.right[block.columns], self._is_diagonal(block), advance)
        route = route_of(self.measure, tile)
        return (self._by_runs(tile) if route is None else route.compute(self.measure, tile),)

    def _by_runs(self, tile: Tile) -> Tensor:
        """f of all pairs of a tile, computed run by run."""
        rows = runs_of(tile.left, self._max_cells)
        columns = rows if tile.is_diagonal else runs_of(tile.right, self._max_cells)
        matrix = None
        for selection in all_pairs(rows, columns):
            computed = values(self.measure, selection)
            if matrix is None:
                matrix = computed.new_empty(len(tile.left), len(tile.right))
            row, column = selection.positions
            matrix[row, column] = computed
            if rows is columns:
                matrix[column, row] = computed
            tile.advance(len(computed))
        assert matrix is not None
        return matrix

    def shape(self, block: Block) -> tuple[int, int]:
        return len(self.left[block.rows]), len(self.right[block.columns])

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.value_dtype,)

    def size(self, block: Block) -> int:
        return num_pairs(*self.shape(block), self._is_diagonal(block))

    def all(
        self,
        to: Output | None = None,
        client: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> Any:
        """f or its divergence, (K, L), without gradients and with no other memory of that size."""
        shape = len(self.left), len(self.right)
        to = to or Fresh(shape)
        with torch.no_grad(), progress_bar(progress, num_pairs(*shape, self.is_symmetric)) as advance:
            terms = self._single_terms() if self.measure.divergence is not None and 0 not in shape else None
            for block, (matrix,) in results_of(self, client, checkpoint, to.has, advance):
                if terms is not None:
                    matrix -= terms[0][block.rows].unsqueeze(-1) + terms[1][block.columns]
                    if self._is_diagonal(block):
                        matrix.fill_diagonal_(0)
                to.write(block, matrix, mirrored=self.is_symmetric)
        return to.matrix

    def _single_terms(self) -> tuple[Tensor, Tensor]:
        """The terms f(x, x)/2 and f(y, y)/2 of a divergence, (K,) and (L,)."""
        row_terms = self._halved_self_values(self.left)
        return row_terms, row_terms if self.is_symmetric else self._halved_self_values(self.right)

    def _halved_self_values(self, series: list[Tensor]) -> Tensor:
        chunks = (runs_of(series[chunk], self._max_cells) for chunk in slices(len(series), _TILE))
        return torch.cat([_self_values(self.measure, runs) for runs in chunks]) / 2


@contextmanager
def progress_bar(is_shown: bool, total: int, what: str = "pairs") -> Iterator[Callable[[int], object]]:
    """Draw a progress bar on standard error, if it is shown. Yields ``advance(n)``, which moves it."""
    if not is_shown:
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install 'bellmax[progress]'") from error
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
