"""The training step of the applications, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bellmax_apps.training import clip_gradients


def training_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that runs forward, backward, clipping and update."""

    def run() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        clip_gradients(model.parameters(), 5.0)
        optimizer.step()

    return run
