"""A script: the first calls of a process to a kernel, from several threads at once. It fails if they wait forever."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

from bellmax.backends.native.loading import kernels

TRIALS, THREADS, SECONDS = 24, 8, 5


def call_from_threads() -> None:
    """Call a kernel from all threads in the same moment, with many switches between threads."""
    sys.setswitchinterval(1e-7)
    assert kernels is not None
    is_open: list[bool] = []

    def call(x: torch.Tensor, y: torch.Tensor) -> None:
        while not is_open:
            pass
        kernels.exp2(x, y, 1)

    pairs = [(torch.zeros(4), torch.zeros(4)) for _ in range(THREADS)]
    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    is_open.append(True)
    for thread in threads:
        thread.join()


def ends_in_time(child: int) -> bool:
    """True if the process ends with exit code 0 before the time is up. It is killed otherwise."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return status == 0
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


if __name__ == "__main__":
    for _ in range(TRIALS):
        child = os.fork()
        if not child:
            call_from_threads()
            os._exit(0)
        if not ends_in_time(child):
            sys.exit("the first calls of several threads wait for each other")
