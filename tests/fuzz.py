"""Random programs against the list of their paths, for as long as you like: python tests/fuzz.py --minutes 60"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from support.fuzzing import check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="when to stop (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; each has the next one (default: 0)")
    args = parser.parse_args()
    end, seed, found, failed = time.monotonic() + 60 * args.minutes, args.seed, Counter[str](), 0
    while time.monotonic() < end:
        try:
            found[check(seed).split(", ")[0].split(": ")[-1]] += 1
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        seed += 1
    print(f"{sum(found.values())} programs ({dict(found)}), {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
