from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import bellmax as bx

if TYPE_CHECKING:
    from gpu.driver import Log


@pytest.fixture
def launches() -> Iterator[Log]:
    """All that is built in the test runs on the backend "triton", on a GPU that is emulated; the launches so far."""
    from gpu.driver import emulated

    with emulated() as log, bx.use_backend("triton"):
        yield log
