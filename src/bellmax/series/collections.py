"""All pairs of collections of series."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from bellmax.backends import BACKENDS
from bellmax.backends.choice import backend_for
from bellmax.inputs import TRANSPOSE, Numbers, answers_near_misses, as_collection, as_floating, transposed
from bellmax.programs.table import WARPING
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.costs import Cost, as_power
from bellmax.series.jobs import (
    CELLS_OF_BLOCK,
    Advance,
    Block,
    Job,
    Tensors,
    check_client,
    found_in,
    mean_length,
    parts,
)
from bellmax.series.outputs import Fresh, Out, Output, output
from bellmax.series.pairs import Measure, measure_of
from bellmax.tensors import Gamma, multiply_by_gamma, promote_half
from bellmax.transforms import is_checked, is_transformed, needs_grad

Collection: TypeAlias = "Numbers | Iterable[Numbers]"
Joined: TypeAlias = "tuple[Tensor, Tensor]"

CELLS = 2**20  # of the cost matrices at a time: beyond the reach of malloc, fresh pages cost more than the sweeps
_TILE = 1024  # series of each side of a part of the result
_ROWS = 256  # of a part, that the kernel for neighbours computes at a time
_SHORT = 64  # steps up to which another kernel is faster for pairs without a band
_ALIKE = 1.25  # how much longer than the shortest of its run a series may be


class Run(NamedTuple):
    """Series of a collection that are about as long as each other."""

    places: Tensor  # (K,), in the collection
    series: Tensor  # (K, N, D), zeros past the end
    lengths: Tensor  # (K,)


def runs_of(collection: Sequence[Tensor], max_cells: int) -> list[Run]:
    """The collection from short to long, in runs of which two have ``max_cells`` cells between them, if they can."""
    runs: list[list[int]] = []
    for k in sorted(range(len(collection)), key=lambda k: len(collection[k])):
        length, features = collection[k].shape
        if runs:
            fits = (len(runs[-1]) + 1) * (length + features) <= math.isqrt(max_cells)
            if fits and length <= _ALIKE * len(collection[runs[-1][0]]):
                runs[-1].append(k)
                continue
        runs.append([k])
    device = collection[0].device if collection else None
    return [
        Run(
            torch.tensor(run, device=device),
            pad_sequence([collection[k] for k in run], batch_first=True),
            torch.tensor([len(collection[k]) for k in run], device=device),
        )
        for run in runs
    ]


def check_collections(**named: Collection) -> list[list[Tensor]]:
    """Each as a list of (N_k, D), all of one dtype, device and D."""
    lists = {name: as_collection(name, given) for name, given in named.items()}
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
    """Raise a ValueError that names the first NaN."""
    if not all(is_checked(series) for _, series in labelled):
        return
    for name, series in labelled:
        missing = series.detach().isnan()
        if missing.any():
            step, feature = missing.nonzero()[0].tolist()
            place = f"[{step}]" if series.shape[1] == 1 else f"[{step}, {feature}]"
            raise ValueError(f"{name} must hold no NaN but padding at its end in an array, got one at {name}{place}")


def check_single_gamma(measure: Measure) -> None:
    if measure.gamma_shape.numel() != 1:
        raise ValueError(f"gamma must be one number for all series, got shape {tuple(measure.gamma_shape)}")


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
    """:func:`dtw` of every series of ``xs`` with every series of ``ys``, whatever their lengths.

    It is differentiable; gradients do not keep the cost matrices of all pairs, but compute them again. Where nothing
    requires a gradient, the result is all that is kept: 4 bytes a pair in float32.

    Args:
        xs: K series, each (N_k, D) or (N_k,): tensors, arrays or lists, one by one; or one tensor or array (K, N, D) or
            (K, N), or a pandas frame with a series in each row, where NaN at the end of a series is padding. Data of
            layout (cases, channels, time) must be transposed first: ``X.swapaxes(1, 2)``.
        ys: L series likewise. By default ``xs``, with each pair computed once: a cost that is a function must then be
            symmetric.
        cost: as in :func:`dtw`.
        band: as in :class:`DTW`.
        omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard".
        gamma: strength of the smoothing, beside a name of Ω; 1 by default, and one for all pairs.
        divergence: as in :func:`dtw`; the terms of one series are computed once.
        out: where to write the result, without gradients. Either a tensor, an array, a memory map or anything else of
            shape (K, L) whose blocks can be assigned, such as a zarr array; or a path that ends with ".npy" (a file) or
            ".zarr" (a folder, which needs ``pip install zarr``). At a path the same call goes on where an earlier one
            was interrupted: the blocks that are finished are listed beside it, in a file that ends with ".blocks".
            Raises ``ValueError`` if another call writes to the path at the same time.
        client: computes the blocks, without gradients: a ``dask.distributed.Client``, which gets the series once for
            each worker (``pip install 'bellmax[cluster]'``), or a ``concurrent.futures.Executor``.
        checkpoint: a folder in which finished blocks stay, without gradients: the same call goes on from there. Raises
            ``ValueError`` if the file of a block is damaged.
        max_cells: how many cells of cost matrices to hold at a time, unless a single pair has more.
        progress: whether to draw a bar on standard error, which needs ``pip install 'bellmax[progress]'``.

    Returns:
        (K, L): a tensor, or ``out``, or the memory map or zarr array at that path.

    >>> import bellmax as bx
    >>> xs = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0])]
    >>> ys = [torch.tensor([3.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 3.0])]
    >>> bx.dtw_cdist(xs, ys, omega="hard")
    tensor([[14.,  1.,  2.],
            [10.,  2.,  2.]])
    """
    check_client(client)
    job = pairs_job(xs, ys, cost=cost, band=band, omega=omega, gamma=gamma, divergence=divergence, max_cells=max_cells)
    left, right = job.left, job.right
    elsewhere = [
        name for name, given in (("out", out), ("client", client), ("checkpoint", checkpoint)) if given is not None
    ]
    wanted = job.measure.may_require_grad or any(series.requires_grad for series in (*left, *right))
    if left and right and (is_transformed(*left, *right) or (wanted and torch.is_grad_enabled() and not elsewhere)):
        if elsewhere:
            raise ValueError(f"{elsewhere[0]} must be None under torch.func, torch.compile and forward mode")
        return _with_gradients(job.measure, left, right, max_cells, progress)
    with output(out, (len(left), len(right)), left[0] if left else None, job.fingerprint) as to:
        return job.all(to, client, checkpoint, progress)


def pairs_job(
    xs: Collection,
    ys: Collection | None = None,
    *,
    cost: Cost = "sqeuclidean",
    band: float | None = None,
    omega: str | Regularizer = "negentropy",
    gamma: Gamma | None = None,
    divergence: str | None = None,
    max_cells: int = CELLS,
) -> Pairs:
    """What :func:`dtw_cdist` computes."""
    measure = measure_of(cost, band, resolve(omega, gamma), divergence)
    check_single_gamma(measure)
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1, got {max_cells}")
    lists = check_collections(xs=xs) if ys is None else check_collections(xs=xs, ys=ys)
    return Pairs(measure, lists[0], lists[-1], max_cells)


def _with_gradients(
    measure: Measure, left: list[Tensor], right: list[Tensor], max_cells: int, progress: bool
) -> Tensor:
    rows = runs_of(left, max_cells)
    columns = rows if right is left else runs_of(right, max_cells)
    values = _gathered(measure, rows, columns, progress)
    if measure.divergence is None:
        return values
    if rows is columns:
        of_rows = of_columns = values.diagonal() / 2
    else:
        of_rows, of_columns = (_with_itself(measure, runs) / 2 for runs in (rows, columns))
    return values - (of_rows.unsqueeze(-1) + of_columns)


def _gathered(measure: Measure, rows: list[Run], columns: list[Run], progress: bool) -> Tensor:
    """f of all pairs, (K, L)."""
    height, width = (sum(len(run.places) for run in runs) for runs in (rows, columns))
    where = torch.zeros(height, width, dtype=torch.int64, device=rows[0].places.device)  # a pair is in what is found
    found: list[Tensor] = []
    count = 0
    # A checkpoint forgets a block until its gradient is asked for; under torch.func there are none.
    keep = not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    with bar(progress, _num_pairs(height, width, rows is columns)) as advance:
        for row, column, i, j in _blocks(rows, columns):
            block = partial(_block, measure, row, column, i, j)
            found.append(block() if keep else checkpoint(block, use_reentrant=False, preserve_rng_state=False))
            numbers = torch.arange(count, count + len(i), device=where.device)
            where[row.places[i], column.places[j]] = numbers
            if rows is columns:
                where[column.places[j], row.places[i]] = numbers
            count += len(i)
            advance(len(i))
    return torch.cat(found)[where]


class Pairs(Job):
    """f of all pairs: if the rows are the columns, blocks and not their mirror images."""

    def __init__(self, measure: Measure, left: list[Tensor], right: list[Tensor], max_cells: int = CELLS) -> None:
        super().__init__(measure, left, right)
        self._max_cells = max_cells
        step = math.isqrt(CELLS_OF_BLOCK // (mean_length(left) * mean_length(right)))
        self._step = max(1, min(step, _TILE))

    def blocks(self) -> list[Block]:
        sides = product(parts(len(self.left), self._step), parts(len(self.right), self._step))
        return [Block(*sides) for sides in sides if not self.is_symmetric or sides[0].start <= sides[1].start]

    def _is_diagonal(self, block: Block) -> bool:
        return self.is_symmetric and block.rows == block.columns

    def compute(self, block: Block, advance: Advance = lambda done: None) -> Tensors:
        left, right = self.left[block.rows], self.right[block.columns]
        tile = _searched_tile(self.measure, left, right, self._is_diagonal(block), advance)
        if tile is None:
            rows = runs_of(left, self._max_cells)
            columns = rows if self._is_diagonal(block) else runs_of(right, self._max_cells)
            tile = _tile(self.measure, rows, columns, advance)
        return (tile,)

    def shape(self, block: Block) -> tuple[int, int]:
        return len(self.left[block.rows]), len(self.right[block.columns])

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.value_dtype,)

    def size(self, block: Block) -> int:
        return _num_pairs(len(self.left[block.rows]), len(self.right[block.columns]), self._is_diagonal(block))

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
        with torch.no_grad(), bar(progress, _num_pairs(*shape, self.is_symmetric)) as advance:
            halves = self._halves() if self.measure.divergence is not None and 0 not in shape else None
            for block, (tile,) in found_in(self, client, checkpoint, to.has, advance):
                if halves is not None:
                    tile -= halves[0][block.rows].unsqueeze(-1) + halves[1][block.columns]
                    if self._is_diagonal(block):
                        tile.fill_diagonal_(0)
                to.write(block, tile, mirrored=self.is_symmetric)
        return to.matrix

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Half of f of every series with itself, (K,) and (L,)."""
        of_rows = self._with_itself(self.left)
        return of_rows, of_rows if self.is_symmetric else self._with_itself(self.right)

    def _with_itself(self, series: list[Tensor]) -> Tensor:
        found = (
            _with_itself(self.measure, runs_of(series[part], self._max_cells)) for part in parts(len(series), _TILE)
        )
        return torch.cat(list(found)) / 2


def _tile(measure: Measure, rows: list[Run], columns: list[Run], advance: Advance) -> Tensor:
    """f of the pairs of some runs."""
    tile = None
    for row, column, i, j in _blocks(rows, columns):
        found = _block(measure, row, column, i, j)
        if tile is None:
            tile = found.new_empty([sum(len(run.places) for run in runs) for runs in (rows, columns)])
        tile[row.places[i], column.places[j]] = found
        if rows is columns:
            tile[column.places[j], row.places[i]] = found
        advance(len(i))
    assert tile is not None
    return tile


def neighbors_kernel(measure: Measure, series: list[Tensor]) -> Callable[..., Any] | None:
    """A kernel without cost matrices for hard DTW, if it serves these: queries, candidates, the index that is not to be
    found or −1, and how many to find → distances, indices and the number of cells."""
    power, kernel = as_power(measure.cost, series[0].shape[1]), measure.omega.kernel
    shortcut = BACKENDS[backend_for(WARPING.name, series[0].device, kernel)].shortcut("dtw.neighbors")
    if shortcut is None or power is None or measure.divergence is not None or not shortcut.serves(kernel, series[0]):
        return None
    band = math.inf if measure.band is None else float(measure.band)

    def run(queries: Joined, candidates: Joined, without: Tensor, k: int) -> Any:
        return shortcut.run(kernel, queries, candidates, without, k, power, band)

    return run


def joined(collection: Sequence[Tensor]) -> Joined:
    """All elements, and where each series begins, with the end of the last."""
    lengths = torch.tensor([0, *map(len, collection)], device=collection[0].device)
    return torch.cat(list(collection)), lengths.cumsum(0)


def _searched_tile(
    measure: Measure, left: list[Tensor], right: list[Tensor], is_diagonal: bool, advance: Advance
) -> Tensor | None:
    """f of all pairs as neighbours, of which all are wanted."""
    run = neighbors_kernel(measure, right)
    if run is None or (measure.band is None and max(map(len, (*left, *right))) <= _SHORT):
        return None
    if not all(bool(joined(side)[0].isfinite().all()) for side in (left, right)):
        return None
    tile = right[0].new_zeros(len(left), len(right))
    for part in parts(len(left), _ROWS // 8 if is_diagonal else _ROWS):  # at which both of a pair are computed
        start = part.start if is_diagonal else 0
        queries, candidates = left[part], right[start:]
        without = torch.full((len(queries),), -1, device=tile.device)
        distances, indices, _ = run(joined(queries), joined(candidates), without, len(candidates))
        tile[part, start:].scatter_(1, indices, distances)
        advance(_num_pairs(len(queries), len(queries), is_diagonal) + len(queries) * (len(candidates) - len(queries)))
    if is_diagonal:
        tile.triu_()
        tile += tile.triu(1).mT
    return tile


def _num_pairs(height: int, width: int, symmetric: bool) -> int:
    return height * (height + 1) // 2 if symmetric else height * width


def _blocks(rows: list[Run], columns: list[Run]) -> Iterator[tuple[Run, Run, Tensor, Tensor]]:
    """Two runs and the members of their pairs; if the rows are the columns, a pair and not its mirror image."""
    for r, row in enumerate(rows):
        for column in columns[r if rows is columns else 0 :]:
            i, j = torch.ones(len(row.places), len(column.places), device=row.places.device).nonzero().unbind(-1)
            once = i <= j if row is column else slice(None)
            yield row, column, i[once], j[once]


def _block(measure: Measure, row: Run, column: Run, i: Tensor, j: Tensor) -> Tensor:
    """f of some pairs of two runs."""
    values = _short_pairs(measure, row, column, i, j)
    return measure(row.series[i], column.series[j], row.lengths[i], column.lengths[j]) if values is None else values


def _short_pairs(measure: Measure, row: Run, column: Run, i: Tensor, j: Tensor) -> Tensor | None:
    """The same by a kernel that needs no cost matrices, for short series, where no gradient is wanted."""
    kernel, gamma, power = measure.omega.kernel, measure.omega.gamma, as_power(measure.cost, row.series.shape[-1])
    if power is None or measure.band is not None or measure.divergence in ("sharp", "mean_cost"):
        return None
    if isinstance(gamma, Tensor) or is_transformed(row.series, column.series) or needs_grad(row.series, column.series):
        return None
    shortcut = BACKENDS[backend_for(WARPING.name, row.series.device, kernel)].shortcut("dtw.short_pairs")
    if shortcut is None or not shortcut.serves(kernel, row.series, column.series, len(i)):
        return None
    lengths = row.lengths, column.lengths
    values: Tensor | None = shortcut.run(kernel, row.series, column.series, lengths, (i, j), power, 1 / gamma)
    return None if values is None else multiply_by_gamma(values, gamma)


def _with_itself(measure: Measure, runs: list[Run]) -> Tensor:
    """f of every series with itself, (K,)."""
    every = (torch.arange(len(run.places), device=run.places.device) for run in runs)
    found = [_block(measure, run, run, k, k) for run, k in zip(runs, every, strict=True)]
    return torch.cat(found)[torch.cat([run.places for run in runs]).argsort()]


@contextmanager
def bar(shown: bool, total: int, what: str = "pairs") -> Iterator[Callable[[int], object]]:
    """A function to call with the number of those that were done."""
    if not shown:
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
