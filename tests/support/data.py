"""Real data, which is not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("BELLMAX_DATA") or Path(__file__).parents[3] / "shared/data")


def folder(name: str) -> Path:
    """The path of a folder of the data. Skips the test if it does not exist."""
    if not (DATA / name).exists():
        pytest.skip(f"there is no {DATA / name}: set BELLMAX_DATA to the folder that holds {name}")
    return DATA / name
