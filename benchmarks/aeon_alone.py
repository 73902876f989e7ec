"""Measure soft-DTW of aeon, one pair of series per call, in a separate environment with an older numba and numpy.

The argument is JSON: the shapes, the number of repeats, and the seconds per run. Prints the version of aeon, its values
and its times as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from aeon.distances import soft_dtw_distance
from measuring import measure, random_series


def main() -> None:
    shapes, repeats, seconds = json.loads(sys.argv[1])
    rows = []
    for shape in shapes:
        x, y = random_series(shape)

        def values(x=x, y=y) -> list[float]:
            return [soft_dtw_distance(a, b) for a in x for b in y]

        rows.append({"shape": shape, "values": values(), **measure({"aeon": values}, repeats, seconds)})
    print(json.dumps({"version": version("aeon"), "rows": rows}))


if __name__ == "__main__":
    main()
