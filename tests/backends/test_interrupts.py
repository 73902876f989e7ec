"""Kernels that stop when a signal handler raises, as the handler of Ctrl-C does."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from support.kernels import MODULE, needs_kernels
from torch import Tensor

import bellmax as bx

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers that send a signal are of Unix"),
]


class AlarmError(Exception):
    """Raised by the signal handler."""


def interrupted(job: Callable[[], object], watched_kernel: str = "") -> bool:
    """True if a signal stops the kernel ``watched_kernel``, or else the job's first kernel, before it returns."""
    kernels = importlib.import_module(MODULE)
    is_stopped = []

    def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            results: list[Any] = []
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                results.extend(map(kernel, *([arg] for arg in args)))  # Python handles no signal in between
            except AlarmError:
                is_stopped.append(not results)
                raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            return results[0]

        return call

    originals = {name: f for name, f in vars(kernels).items() if callable(f) and name.startswith(watched_kernel)}
    with alarms():
        try:
            for name, kernel in originals.items():
                setattr(kernels, name, watched(kernel))
            job()
        except AlarmError:
            pass
        finally:
            for name, kernel in originals.items():
                setattr(kernels, name, kernel)
    return is_stopped == [True]


@contextmanager
def alarms() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


COMPLETE = bx.DAG([(i, j) for j in range(1, 1000) for i in range(j)])
LOOPS = bx.Automaton([(i, j, j) for i in range(60) for j in range(60)], final={0: 0.0})
SLOW = bx.Tsallis(1.3)
JOBS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], object]]] = {
    "dtw_neighbors": ((1000, 300, 1), lambda x: bx.dtw_neighbors(x, k=3)),
    "dtw_cdist": ((700, 300, 1), lambda x: bx.dtw_cdist(x, omega="hard")),
    "DTW": ((1, 3000, 3000), lambda x: bx.DTW(x, omega=SLOW).value),
    "DTW, backward": ((1, 3000, 3000), lambda x: bx.DTW(x.requires_grad_(), omega=SLOW).value.sum().backward()),
    "CTC": ((1, 6000, 9), lambda x: bx.CTC(x, torch.randint(1, 9, (1, 1500)), omega="entmax").value),
    "Chain": ((1, 400, 200, 200), lambda x: bx.Chain(x, omega=SLOW).value),
    "Chain.from_scores": ((2, 9000, 600), lambda x: bx.Chain.from_scores(x, torch.zeros(600, 600)).value),
    "topk": ((1, 400, 20, 20), lambda x: bx.Chain(x).topk_sequences(400)),
    "sample": ((1, 3000, 40, 40), lambda x: bx.Chain(x).sample_sequences((5000,))),
    "SpanTrees": ((2, 1600, 1600), lambda x: bx.SpanTrees(0 * x).value),
    "Automaton": ((8, 2000, 60), lambda x: LOOPS.paths(x, omega=SLOW).value),
    "Automaton, best": ((8, 2000, 60), lambda x: LOOPS.paths(x).topk(3)),
    "DAG": ((16, 499500), lambda x: COMPLETE.paths(x, omega=SLOW).value),
}
"""Shapes and jobs, each with a kernel that takes several times the 100 ms between two looks for signals."""
WATCHED = {"DTW, backward": "lattice_backward", "sample": "chain_sample"}
"""Kernels, if they are not the first of their job."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_a_signal_stops_a_kernel(name: str, threads: int) -> None:
    shape, job = JOBS[name]
    x, before = torch.randn(shape), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert interrupted(lambda: job(x), WATCHED.get(name, ""))
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_waits_for_another_sees_the_signal() -> None:
    """The lattices of a batch run in one thread each. The first lattice is small."""
    x = torch.randn(2, 6000, 9)
    lengths = torch.tensor([1, 6000]), torch.tensor([1, 1500])
    targets, before = torch.randint(1, 9, (2, 1500)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert interrupted(lambda: bx.CTC(x, targets, lengths=lengths, omega="entmax").value)
    finally:
        torch.set_num_threads(before)


def test_results_are_right_after_a_signal_whose_handler_returns() -> None:
    cost, calls = torch.randn(1, 700, 700), []
    wanted = bx.DTW(cost, omega=bx.Tsallis(1.3)).value
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(bx.Chain(torch.zeros(3, 2, 2)).value.item()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        value = bx.DTW(cost, omega=bx.Tsallis(1.3)).value
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(value, wanted)
    assert calls
    torch.testing.assert_close(calls[0], 3 * torch.tensor(2.0).log().item())


def test_kernels_of_other_threads_continue() -> None:
    """Python handles signals only in its main thread."""
    cost, values = torch.randn(1, 1500, 1500), []
    wanted = bx.DTW(cost, omega=bx.Tsallis(1.3)).value
    worker = threading.Thread(target=lambda: values.append(bx.DTW(cost, omega=bx.Tsallis(1.3)).value))
    with alarms():
        worker.start()
        with pytest.raises(AlarmError):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            while True:
                signal.pause()
    worker.join()
    assert torch.equal(values[0], wanted)


def test_python_exits_while_another_thread_runs_a_kernel() -> None:
    """Only the main thread checks for signals: another thread that takes the GIL during exit would abort."""
    code = f"""if True:
        import threading, time, torch, bellmax as bx, {MODULE} as kernels
        x, forward, is_entered = torch.randn(1, 5000, 5000), kernels.lattice_forward, threading.Event()
        kernels.lattice_forward = lambda *args: (is_entered.set(), forward(*args))
        threading.Thread(target=lambda: bx.DTW(x, omega=bx.Tsallis(1.3)).value, daemon=True).start()
        is_entered.wait()
        time.sleep(0.5)  # the kernel takes seconds
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
