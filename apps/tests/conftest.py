from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("bellmax", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("bellmax")

collect_ignore = ["fuzz_readers.py"]  # it needs atheris


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread for each worker of pytest: the models are small, and threads of several workers would compete."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
