from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import bellmax as bx

if TYPE_CHECKING:
    from gpu.driver import Log


@pytest.fixture
def launches() -> Iterator[Log]:
    """Run the test on the triton backend and an emulated GPU. Yields the log of launches."""
    from gpu.driver import emulated

    with emulated() as log, bx.use_backend("triton"):
        yield log
