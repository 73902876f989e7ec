"""Nearest-neighbour classification of time series, with the DTW distances and divergences of bellmax.

DATA is a folder of datasets in the format of the UCR archive (www.cs.ucr.edu/~eamonn/time_series_data_2018), each in a
separate folder: NAME/NAME_TRAIN.tsv and NAME/NAME_TEST.tsv, gzipped or not, with a label and then the values in each
row. DataSummary.csv in DATA holds the published errors; the column "hard" agrees with them to the last digit.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import bellmax as bx

PUBLISHED = "DTW (w=100)"


class Measure(NamedTuple):
    omega: Callable[[float], bx.Regularizer]
    divergence: str | None
    has_gamma: bool = True


MEASURES = {
    "hard": Measure(lambda _: bx.Hard(), None, has_gamma=False),
    "soft": Measure(bx.Negentropy, None),
    "debiased": Measure(bx.Negentropy, "debiased"),
    "sharp": Measure(bx.Negentropy, "sharp"),
    "l2": Measure(bx.SquaredL2, None),
    "l2-debiased": Measure(bx.SquaredL2, "debiased"),
    "l2-sharp": Measure(bx.SquaredL2, "sharp"),
    "mean-cost": Measure(bx.Negentropy, "mean_cost", has_gamma=False),
}


class Split(NamedTuple):
    labels: Tensor  # (K,)
    series: Tensor  # (K, N)


def read(folder: Path, part: str) -> Split:
    """Read one split of a dataset; shorter series are padded with NaN."""
    found = sorted(folder.glob(f"{folder.name}_{part}.tsv*"))
    if not found:
        raise SystemExit(f"no {folder.name}_{part}.tsv or .tsv.gz in {folder}")
    table = torch.from_numpy(np.loadtxt(found[0], delimiter="\t", ndmin=2))
    return Split(table[:, 0], table[:, 1:])


def published(data: Path) -> dict[str, str]:
    """The published error of each dataset."""
    summary = data / "DataSummary.csv"
    if not summary.exists():
        return {}
    with summary.open(encoding="utf-8-sig", newline="") as file:
        rows = [{key.strip(): value.strip() for key, value in row.items()} for row in csv.DictReader(file)]
    return {row["Name"]: row[PUBLISHED] for row in rows}


def distances(xs: Tensor, ys: Tensor | None, measure: Measure, gamma: float, progress: bool) -> Tensor:
    with torch.no_grad():
        return bx.dtw_cdist(xs, ys, omega=measure.omega(gamma), divergence=measure.divergence, progress=progress)


def error(train: Split, test: Split, measure: Measure, gamma: float = 1.0, progress: bool = False) -> float:
    """Share of the test series whose nearest training series (the first, if tied) has another label."""
    nearest = distances(test.series, train.series, measure, gamma, progress).argmin(1)
    return float((train.labels[nearest] != test.labels).double().mean())


def best_gamma(train: Split, measure: Measure, gammas: list[float], progress: bool) -> float:
    """The γ of least leave-one-out error on the training series."""

    def error_without_itself(gamma: float) -> float:
        apart = distances(train.series, None, measure, gamma, progress).fill_diagonal_(torch.inf)
        return float((train.labels[apart.argmin(1)] != train.labels).double().mean())

    return min(gammas, key=error_without_itself) if len(gammas) > 1 else gammas[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the datasets")
    parser.add_argument("sets", nargs="*", help="names of datasets (default: all)")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=["hard"], help="default: hard")
    chosen = "values of γ to choose from, by leave-one-out on the training series (default: 0.1 1 10)"
    parser.add_argument("--gammas", nargs="+", type=float, default=[0.1, 1.0, 10.0], help=chosen)
    arguments = parser.parse_args()
    sets = arguments.sets or sorted(path.name for path in arguments.data.iterdir() if path.is_dir())
    known = published(arguments.data)

    columns = "set", "train", "test", "length", "measure", "γ", "error", "published", "seconds"
    table = Table(*columns, box=None, padding=(0, 1, 0, 0))
    for name in sets:
        train, test = read(arguments.data / name, "TRAIN"), read(arguments.data / name, "TEST")
        sizes = (len(train.labels), len(test.labels), train.series.shape[1])
        for label in arguments.measures:
            measure, start = MEASURES[label], perf_counter()
            gamma = best_gamma(train, measure, arguments.gammas, progress=True) if measure.has_gamma else 1.0
            wrong = error(train, test, measure, gamma, progress=True)
            row = label, f"{gamma:g}" if measure.has_gamma else "", f"{wrong:.4f}"
            beside = f"{float(known[name]):.4f}" if label == "hard" and name in known else ""
            table.add_row(name, *map(str, sizes), *row, beside, f"{perf_counter() - start:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
