"""Classify time series with the estimators of bellmax. Their parameters are chosen by cross-validation.

DATA is a folder of datasets in the format of the UCR archive (www.cs.ucr.edu/~eamonn/time_series_data_2018), each in a
separate folder: NAME/NAME_TRAIN.tsv and NAME/NAME_TEST.tsv, gzipped or not, with a label and then the values in each
row. DataSummary.csv in DATA holds the published errors of one nearest neighbor. The errors of the models "full" and
"window" equal the published errors.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC

from bellmax.sklearn import DTWBarycenterClassifier, DTWKernel, DTWNeighborsClassifier


class Split(NamedTuple):
    labels: NDArray[Any]  # (n,)
    series: NDArray[Any]  # (n, time)


class Published(NamedTuple):
    full: float  # error of one nearest neighbor without a window
    window: float  # error of one nearest neighbor with a window of `percent`
    percent: int  # the window, in percent of the length


def read(folder: Path, part: str) -> Split:
    """Read one split of a dataset; shorter series are padded with NaN."""
    found = sorted(folder.glob(f"{folder.name}_{part}.tsv*"))
    if not found:
        raise SystemExit(f"no {folder.name}_{part}.tsv or .tsv.gz in {folder}")
    table = np.loadtxt(found[0], delimiter="\t", ndmin=2)
    return Split(table[:, 0], table[:, 1:])


def published(data: Path) -> dict[str, Published]:
    """Return the published errors of each dataset, by its name."""
    summary = data / "DataSummary.csv"
    if not summary.exists():
        return {}
    with summary.open(encoding="utf-8-sig", newline="") as file:
        rows = [{key.strip(): value.strip() for key, value in row.items()} for row in csv.DictReader(file)]
    known = {}
    for row in rows:
        learnt = re.fullmatch(r"([\d.]+) \((\d+)\)", row["DTW (learned_w)"])
        if learnt is not None:
            known[row["Name"]] = Published(float(row["DTW (w=100)"]), float(learnt[1]), int(learnt[2]))
    return known


def band_of(percent: int, length: int) -> int:
    """Convert a window from percent of the length to steps, rounded up."""
    return int(np.ceil(percent * length / 100))


def models(length: int, smallest_class: int, known: Published | None) -> dict[str, Any]:
    """Return the estimators by name. Grid searches choose parameters by cross-validation on the training series."""
    folds = StratifiedKFold(min(5, max(2, smallest_class)), shuffle=True, random_state=0)
    bands = sorted({band_of(percent, length) for percent in (0, 1, 2, 3, 5, 8, 11, 15, 20)})
    soft = {"omega": ["negentropy", "sparsemax"], "gamma": [0.01, 0.1, 1.0], "divergence": ["debiased"]}
    machine = make_pipeline(DTWKernel(), SVC(kernel="precomputed"))
    found: dict[str, Any] = {"full": DTWNeighborsClassifier()}
    if known is not None:
        found["window"] = DTWNeighborsClassifier(band=band_of(known.percent, length))
    found["best window"] = GridSearchCV(DTWNeighborsClassifier(), {"band": bands}, cv=folds)
    found["best soft"] = GridSearchCV(DTWNeighborsClassifier(), soft, cv=folds)
    found["barycenter"] = GridSearchCV(DTWBarycenterClassifier(max_iter_barycenter=20), {"gamma": [0.1, 1.0]}, cv=folds)
    found["kernel"] = GridSearchCV(machine, {"svc__C": [1, 10, 100], "dtwkernel__band": [bands[-1], None]}, cv=folds)
    return found


NAMES = "full", "window", "best window", "best soft", "barycenter", "kernel"


def error(model: Any, train: Split, test: Split) -> float:
    """Return the fraction of test series whose predicted label is wrong."""
    return 1 - float(model.fit(train.series, train.labels).score(test.series, test.labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder that contains the datasets")
    parser.add_argument("sets", nargs="*", help="names of datasets (default: all)")
    parser.add_argument(
        "--models", nargs="+", choices=NAMES, default=NAMES[:3], help="models (default: full, window, best window)"
    )
    arguments = parser.parse_args()
    sets = arguments.sets or sorted(path.name for path in arguments.data.iterdir() if path.is_dir())
    known = published(arguments.data)

    columns = "set", "train", "test", "length", "model", "parameters", "error", "published", "seconds"
    table, console = Table(*columns, box=None, padding=(0, 1, 0, 0)), Console()
    for name in track(sets, "sets", console=Console(stderr=True), transient=True):
        train, test = read(arguments.data / name, "TRAIN"), read(arguments.data / name, "TEST")
        sizes = (len(train.labels), len(test.labels), train.series.shape[1])
        smallest = int(np.unique(train.labels, return_counts=True)[1].min())
        for label, model in models(sizes[2], smallest, known.get(name)).items():
            if label not in arguments.models:
                continue
            start = perf_counter()
            wrong = error(model, train, test)
            chosen = ", ".join(
                f"{key.split('__')[-1]}={value}" for key, value in getattr(model, "best_params_", {}).items()
            )
            beside = getattr(known.get(name), label, None)
            row = label, chosen, f"{wrong:.4f}", "" if beside is None else f"{beside:.4f}"
            table.add_row(name, *map(str, sizes), *row, f"{perf_counter() - start:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
