"""Compare random programs with enumeration of their paths: python tests/fuzz.py --minutes 60"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from support.fuzzing import check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="when to stop (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first program; each program adds 1 (default: 0)"
    )
    args = parser.parse_args()
    end, seed, failed = time.monotonic() + 60 * args.minutes, args.seed, 0
    programs, comparisons = Counter[str](), Counter[str]()
    while time.monotonic() < end:
        try:
            report = check(seed)
            programs[report.program] += 1
            comparisons += report.comparisons
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        seed += 1
    print(f"{programs.total()} programs ({dict(programs)}), {failed} failed")
    print(f"{comparisons.total()} comparisons ({dict(comparisons)})")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
