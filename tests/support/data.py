"""Real data, which does not come along with the library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("BELLMAX_DATA") or Path(__file__).parents[3] / "shared/data")


def folder(name: str) -> Path:
    """A folder of the data, or the test is skipped."""
    if not (DATA / name).exists():
        pytest.skip(f"there is no {DATA / name}: set BELLMAX_DATA to the folder that holds {name}")
    return DATA / name
