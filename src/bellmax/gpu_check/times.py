"""Times of the kernels on a GPU, of the other backends, and of other libraries."""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bellmax as bx
from bellmax.gpu_check.problems import PROBLEMS, Problem

BACKENDS = ("triton", "detour", "reference")
_RUNS, _WARM = 50, 5
_SECONDS = 5.0  # limit for the sum of all runs of a slow program
_CACHE = 2**28  # bytes, more than the size of any second-level cache


class Time(NamedTuple):
    """Median time of a value and its gradient by a backend or library ``who``, and the number of kernel launches."""

    program: str
    shape: tuple[int, ...]
    who: str
    milliseconds: float
    launches: int | None


class Compiled(NamedTuple):
    """Resources of a compiled variant of a kernel."""

    kernel: str
    registers: int
    spills: int
    shared_bytes: int


def count() -> int:
    """Number of times that :func:`run` yields if no other library is installed."""
    return len(PROBLEMS) * len(BACKENDS)


def run(device: torch.device) -> Iterator[Time]:
    """Time every program on every backend, and in other libraries that are installed."""
    for problem in PROBLEMS:
        scores = [score.float().to(device).requires_grad_() for score in problem.scores(problem.large)]
        for backend in BACKENDS:
            with bx.use_backend(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the detour backend warns that it copies to the CPU
                call = _gradient(problem, scores)
                launches = _launches(call) if backend == "triton" else None
                yield Time(problem.name, problem.large, backend, _median(call, device), launches)
        for name, call in _peers(problem, scores):
            yield Time(problem.name, problem.large, name, _median(call, device), None)


def compiled() -> list[Compiled]:
    """Compiled variants of the kernels that have run."""
    from triton import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("bellmax.backends.triton.")]
    kernels = {id(k): k for module in modules for k in vars(module).values() if isinstance(k, JITFunction)}
    variants = [v for k in kernels.values() for cache in k.device_caches.values() for v in cache[0].values()]
    return [Compiled(v.name, v.n_regs, v.n_spills, v.metadata.shared) for v in variants]


def _gradient(problem: Problem, scores: list[Tensor]) -> Callable[[], Any]:
    """Function that computes the values of a program and their gradient."""
    return lambda: torch.autograd.grad(problem.values(scores, "negentropy").sum(), scores)


def _peers(problem: Problem, scores: list[Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Other libraries with the same result for sequences of full length: name, and function to time."""
    if problem.name == "chain from scores":
        with _if_installed():
            from torchcrf import CRF

            emissions = scores[0].transpose(0, 1)
            crf = CRF(emissions.shape[-1]).to(emissions.device)
            tags = torch.zeros(emissions.shape[:2], dtype=torch.int64, device=emissions.device)
            mask = torch.ones_like(tags, dtype=torch.bool)
            yield "pytorch-crf", lambda: torch.autograd.grad(crf(emissions, tags, mask), [scores[0], crf.transitions])
    if problem.name == "soft-DTW":
        with _if_installed():
            from pysdtw import SoftDTW

            batch, rows, columns = problem.large
            x, y = (torch.randn(batch, size, 1, device=scores[0].device) for size in (rows, columns))
            measure = SoftDTW(use_cuda=x.is_cuda)
            yield "pysdtw, with its costs", lambda: torch.autograd.grad(measure(x.requires_grad_(), y).sum(), x)
    if problem.name == "CTC":
        batch, frames, classes = problem.large
        logs = scores[0].detach().transpose(0, 1).log_softmax(-1).requires_grad_()
        labels = frames // 7
        targets = torch.arange(batch * labels, device=logs.device).reshape(batch, labels) % (classes - 1) + 1
        sizes = torch.full((batch,), frames), torch.full((batch,), labels)
        loss = torch.nn.functional.ctc_loss
        yield "torch ctc_loss", lambda: torch.autograd.grad(loss(logs, targets, *sizes, reduction="sum"), logs)


@contextmanager
def _if_installed() -> Iterator[None]:
    """Leave the block at the first import that fails."""
    try:
        yield
    except ImportError:
        return


def _launches(call: Callable[[], Any]) -> int:
    """Number of Triton kernels that a call launches, once it is compiled."""
    from triton import knobs

    launches: list[Any] = []
    call()
    knobs.runtime.launch_enter_hook.add(launches.append)
    try:
        call()
    finally:
        knobs.runtime.launch_enter_hook.remove(launches.append)
    return len(launches)


def _median(call: Callable[[], Any], device: torch.device) -> float:
    """Median of several runs in milliseconds, by the clock of the device. Each run starts with an empty cache."""
    module: Any = torch.get_device_module(device)
    cache = torch.empty(_CACHE, dtype=torch.int8, device=device)
    for _ in range(_WARM):
        call()
    spans: list[float] = []
    while len(spans) < _RUNS and (len(spans) < _WARM or sum(spans) < 1000 * _SECONDS):
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        cache.zero_()
        begin.record()
        call()
        end.record()
        module.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans)
