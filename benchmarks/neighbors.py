"""Measure nearest neighbors and clusters of time series of the UCR archive, and estimate the cost of many more series.

DATA is a folder with a folder for each dataset: NAME/NAME_TRAIN.tsv and NAME/NAME_TEST.tsv, gzipped or not. All calls
use one thread.
"""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import (
    SECONDS,
    Row,
    Run,
    cell,
    collect,
    command_line,
    factor,
    heading,
    installed,
    machine,
    measure,
    ratio,
    report,
    slower,
    table,
)
from numpy.typing import NDArray
from rivals import check_value, peer, versions
from torch import Tensor

import bellmax as bx
from bellmax.backends import BACKENDS
from bellmax.backends.fused import Concatenated, NeighborSearch
from bellmax.sklearn import DTWKMeans

BAND = 5  # percent of the length of the series
CLUSTERED = "CBF", "GunPoint", "ECG200"
STARTS = 3
GAMMA = 1.0
PEERS = "dtaidistance", "tslearn"
MANY = 4000, 128  # number and length of the series from which costs are estimated
NEIGHBORS = 10
PAIRS = 500  # series of the distance matrix
CORES = 64


def read(folder: Path, part: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Labels (n,) and series (n, time)."""
    (path,) = folder.glob(f"{folder.name}_{part}.tsv*")
    values = np.loadtxt(path, delimiter="\t", ndmin=2)
    return values[:, 0], values[:, 1:]


# --- neighbors


def search(folder: Path, repeats: int) -> Row:
    """Find the nearest training series of each test series."""
    (_, train), (_, test) = read(folder, "TRAIN"), read(folder, "TEST")
    length = train.shape[1]
    band = math.ceil(BAND * length / 100)
    exact = bx.dtw_neighbors(test, train, k=1, band=band)
    values = bx.dtw_cdist(test, train, band=band, omega="hard")
    assert exact.indices.squeeze(1).equal(values.argmin(1)), f"{folder.name}: another neighbor is nearer"
    torch.testing.assert_close(exact.distances.squeeze(1), values.min(1).values, rtol=1e-9, atol=1e-9)
    xs, ys = (torch.tensor(series, dtype=torch.float32) for series in (test, train))
    runs: dict[str, Run] = {
        "bellmax": lambda: bx.dtw_neighbors(xs, ys, k=1, band=band),
        "all pairs": lambda: bx.dtw_cdist(xs, ys, band=band, omega="hard").min(1),
    }
    if matrix := peer("dtaidistance.dtw", "distance_matrix_fast"):
        both = [*test, *train]
        block = (0, len(test)), (len(test), len(both))
        runs["dtaidistance"] = lambda: matrix(both, block=block, window=band + 1, compact=True, parallel=False)
        check_value("dtaidistance", torch.tensor(runs["dtaidistance"]()).square(), values.flatten())
    sizes = {"set": folder.name, "queries": len(test), "series": len(train), "length": length, "band": band}
    return {**sizes, "share": share_of_cells(xs, ys, band), **measure(runs, repeats, SECONDS)}


def share_of_cells(xs: Tensor, ys: Tensor, band: int) -> float:
    """Share of the cells in the band that the search computes, over all pairs."""
    kernel = BACKENDS["native"].fused.neighbors
    queries, candidates = (
        Concatenated(side.reshape(-1, 1), torch.arange(0, side.numel() + 1, side.shape[1])) for side in (xs, ys)
    )
    excluded = torch.full((len(xs),), -1)
    cells = kernel.run(NeighborSearch(queries, candidates, excluded, 1, 2, float(band), bx.Hard().kernel)).cells
    steps = torch.arange(xs.shape[1])
    in_band = (steps.unsqueeze(-1) - steps).abs() <= band
    return int(cells.sum()) / (len(xs) * len(ys) * int(in_band.sum()))


# --- clusters


def cluster(folder: Path, starts: int) -> list[Row]:
    """Run k-means from given centers, one per class: objective and seconds of each implementation."""
    labels, flat = read(folder, "TRAIN")
    series = flat[:, :, None]
    count = len(np.unique(labels))
    rows = []
    for seed in range(starts):
        init = series[np.random.default_rng(seed).choice(len(series), count, replace=False)]
        row: Row = {"set": folder.name, "series": len(series), "clusters": count, "start": seed}
        for name, model in make_models(count, init).items():
            begun = time.perf_counter()
            centers = model.fit(series).cluster_centers_
            row[name] = {"seconds": time.perf_counter() - begun, "objective": objective(series, centers)}
        rows.append(row)
    return rows


def make_models(count: int, init: NDArray[Any], **options: Any) -> dict[str, Any]:
    estimators: dict[str, Any] = {"bellmax": DTWKMeans(count, init=init, gamma=GAMMA, **options)}
    with warnings.catch_warnings(action="ignore"):  # tslearn warns if h5py is missing
        kmeans = peer("tslearn.clustering", "TimeSeriesKMeans", "fit")
    if kmeans is not None:
        soft = {"metric": "softdtw", "metric_params": {"gamma": GAMMA}}
        estimators["tslearn"] = kmeans(count, init=init.copy(), **soft, **options)
    return estimators


def objective(series: NDArray[Any], centers: NDArray[Any]) -> float:
    """Sum of soft-DTW between each series and its nearest center, in float64."""
    return float(bx.dtw_cdist(series, centers, gamma=GAMMA).min(1).values.sum())


# --- many series


def costs(count: int, repeats: int) -> Row:
    """Nanoseconds per pair of random walks."""
    length = MANY[1]
    walks = torch.randn(count, length).cumsum(1)
    walks = (walks - walks.mean(1, keepdim=True)) / walks.std(1, keepdim=True)
    some, band = walks[:PAIRS], math.ceil(BAND * length / 100)
    runs: dict[str, Run] = {
        "all pairs": lambda: bx.dtw_cdist(some, omega="hard"),
        "all pairs in the band": lambda: bx.dtw_cdist(some, omega="hard", band=band),
        "neighbors in the band": lambda: bx.dtw_neighbors(walks, k=NEIGHBORS, band=band),
    }
    times = measure(runs, repeats, SECONDS)
    pairs = dict.fromkeys(runs, len(some) * (len(some) + 1) / 2) | {"neighbors in the band": count * (count - 1)}
    return {
        "series": count,
        "length": length,
        "band": band,
        "nanoseconds": {name: own["min"] * 1e6 / pairs[name] for name, own in times.items()},
    }


CALLS = {
    "all pairs": "`dtw_cdist`",
    "all pairs in the band": "`dtw_cdist`, band",
    "neighbors in the band": "`dtw_neighbors`, band",
}


def estimates(measured: Row) -> list[list[str]]:
    """Rows of the table of estimates for 10⁵ and 10⁶ series."""
    lines = []
    for count in (10**5, 10**6):
        for name, each in measured["nanoseconds"].items():
            is_matrix = name.startswith("all pairs")
            hours = each * count**2 / (2 if is_matrix else 1) / 3.6e12
            size = 4 * count**2 if is_matrix else 12 * NEIGHBORS * count
            lines.append(
                [f"{count:,}", CALLS[name], f"{each:,.0f}", f"{hours:,.1f}", f"{hours / CORES:,.2f}", in_bytes(size)]
            )
    return lines


def in_bytes(size: int) -> str:
    return (
        f"{size / 10**12:.0f} TB"
        if size >= 10**12
        else f"{size / 10**9:.0f} GB"
        if size >= 10**9
        else f"{size // 10**6} MB"
    )


# --- the page


def markdown(results: dict[str, Any]) -> list[str]:
    peers, many = results["peers"], results["costs"]
    searches = [
        [
            row["set"],
            *(str(row[name]) for name in ("queries", "series", "length", "band")),
            f"{100 * row['share']:.1f} %",
            cell(row["bellmax"]),
            slower(row, "all pairs", peers),
            slower(row, "dtaidistance", peers),
        ]
        for row in results["search"]
    ]
    return [
        *heading("neighbors", results["machine"], " DATA"),
        installed(peers),
        "",
        "### Nearest neighbors",
        "",
        f"Each row finds the nearest training series of each test series under hard DTW. The band is {BAND} % of the",
        "length of the series. `dtw_neighbors` skips pairs of series, and cells of the cost matrix, that cannot",
        "change the result. The column *cells* is the share of the cells in the band that `dtw_neighbors` computes.",
        "`dtw_cdist` and dtaidistance compute all pairs of series. dtaidistance is written in C and computes in",
        "float64. A number in brackets is the median time of a column divided by the median time of `dtw_neighbors`.",
        "",
        "In float64, we checked that `dtw_neighbors` finds the same neighbors and distances as `dtw_cdist`. The",
        "datasets are from the UCR archive, and `DATA` is their folder.",
        *table(
            "dataset | queries: | series: | length: | band: | cells: | `dtw_neighbors`: | `dtw_cdist`: | dtaidistance:",
            searches,
        ),
        "",
        "### k-means",
        "",
        f"This table compares `DTWKMeans` with `TimeSeriesKMeans` of tslearn, for soft-DTW with γ = {GAMMA:g} in",
        "float64. There is one cluster per class. Both libraries start from the same centers, which are randomly",
        "chosen series. The objective is the sum over all series of the soft-DTW value between a series and its",
        "nearest center. A lower objective is better. The ratio is the time of tslearn divided by the time of",
        "bellmax.",
        *table(
            "dataset | series: | clusters: | start: | objective, bellmax: | objective, tslearn:"
            " | bellmax, s: | tslearn, s: | ratio:",
            [clustered(row) for row in results["clusters"]],
        ),
        "",
        "### Estimates for many series",
        "",
        "We did not run these searches. We measured the time per pair on fewer series and estimated the hours from",
        f"it. The measured series are random walks of length {many['length']}: {PAIRS} random walks for `dtw_cdist`,",
        f"and {many['series']:,} for `dtw_neighbors`. The band is {many['band']}, and `dtw_neighbors` returns",
        f"{NEIGHBORS} neighbors of each series. With more series, `dtw_neighbors` skips a larger share of the pairs.",
        "The estimates ignore this effect. *Result* is the size of the result: 4 bytes per pair of series for",
        "`dtw_cdist`, and 12 bytes per neighbor for `dtw_neighbors`.",
        *table(f"series: | call | ns per pair: | hours, 1 core: | hours, {CORES} cores: | result:", estimates(many)),
    ]


def clustered(row: Row) -> list[str]:
    names = [name for name in ("bellmax", "tslearn") if name in row]
    cells = {
        what: [f"{row[name][what]:.{places}f}" for name in names] for what, places in (("objective", 2), ("seconds", 2))
    }
    times = [{"median": row[name]["seconds"]} for name in names]
    return [
        row["set"],
        *(str(row[name]) for name in ("series", "clusters", "start")),
        *(cells["objective"] + ["–"])[:2],
        *(cells["seconds"] + ["–"])[:2],
        factor(ratio(times[1], times[0])) if len(times) == 2 else "–",
    ]


def main() -> None:
    parser = command_line(__doc__, "neighbors", repeats=10)
    parser.add_argument("data", type=Path, help="folder of the datasets")
    parser.add_argument("--quick", action="store_true", help="few datasets, series and repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    quick, repeats = args.quick, 2 if args.quick else args.repeats
    folders = sorted(path for path in args.data.iterdir() if path.is_dir())
    sets = [args.data / name for name in (CLUSTERED[:1] if quick else CLUSTERED)]
    for model in make_models(2, np.eye(2, 3)[:, :, None], max_iter=1).values():  # numba compiles at the first call
        model.fit(np.random.default_rng(0).normal(size=(4, 3, 1)))
    tables = {
        "search": lambda: [search(folder, repeats) for folder in (folders[:2] if quick else folders)],
        "clusters": lambda: [row for folder in sets for row in cluster(folder, 1 if quick else STARTS)],
        "costs": lambda: costs(MANY[0] // 10 if quick else MANY[0], repeats),
    }
    results = {"machine": machine(), "peers": versions(PEERS), **collect(tables)}
    report(args.output, "neighbors", results, markdown(results))


if __name__ == "__main__":
    main()
