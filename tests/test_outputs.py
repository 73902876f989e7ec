"""dtw_cdist with ``out=`` (memory of the caller, or a file): results, memory, and resumed calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import close
from support.inside import replace_lock, set_limit
from torch import Tensor

import bellmax as bx

LENGTHS = 5, 3, 8, 3, 1, 7, 4


def series(*lengths: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 2, generator=rng) for n in lengths]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "series in a tile of dtw_cdist", 3)


class Cost:
    """A squared distance that counts its calls and fails after a number of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.calls, self.limit = 0, limit

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.calls == self.limit:
            raise KeyboardInterrupt
        self.calls += 1
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("divergence", [None, "debiased", "sharp"])
def test_tiles_equal_the_whole_result(divergence: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = series(*LENGTHS), series(2, 6, 4, 4, seed=1)
    by_tiles = [bx.dtw_cdist(xs, ys, divergence=divergence), bx.dtw_cdist(xs, divergence=divergence)]
    monkeypatch.undo()
    for got, right in zip(by_tiles, (ys, None), strict=True):
        close(got, bx.dtw_cdist(xs, right, divergence=divergence), 1e-5)
    assert by_tiles[1].equal(by_tiles[1].mT)
    assert divergence is None or not by_tiles[1].diagonal().any()


def test_out_may_be_memory_of_the_caller(tmp_path: Path) -> None:
    xs, ys = series(*LENGTHS), series(2, 6, seed=1)
    for right, width in ((ys, 2), (None, 7)):
        expected = bx.dtw_cdist(xs, right)
        for out in (
            torch.empty(7, width),
            torch.empty(width, 7, dtype=torch.float64).T,
            np.empty((7, width), np.float32),
            np.memmap(tmp_path / "map", np.float32, "w+", shape=(7, width)),
        ):
            assert bx.dtw_cdist(xs, right, out=out) is out
            close(torch.as_tensor(out).float(), expected, 0)
    out = torch.empty(7, 2)
    bx.dtw_cdist([x.requires_grad_() for x in xs], ys, out=out)
    assert not out.requires_grad


@pytest.mark.parametrize("suffix", ["npy", "zarr"])
def test_an_interrupted_call_resumes(suffix: str, tmp_path: Path) -> None:
    if suffix == "zarr":
        pytest.importorskip("zarr")
    xs, path = series(*LENGTHS), tmp_path / f"pairs.{suffix}"
    whole, first, rest, none = Cost(), Cost(limit=4), Cost(), Cost()
    expected = bx.dtw_cdist(xs, cost=whole, divergence="debiased", max_cells=1, out=torch.empty(7, 7))
    with pytest.raises(KeyboardInterrupt):
        bx.dtw_cdist(xs, cost=first, max_cells=1, out=path)
    lost = Cost(limit=whole.calls - 3)
    second = tmp_path / f"second.{suffix}"
    with pytest.raises(KeyboardInterrupt):
        bx.dtw_cdist(xs, cost=lost, divergence="debiased", max_cells=1, out=str(second))
    listed = Path(f"{second}.blocks")
    assert 1 < len(listed.read_text().splitlines()) < 7
    with listed.open("a") as file:
        file.write("3:6 6")  # simulates a kill while writing
    got = bx.dtw_cdist(xs, cost=rest, divergence="debiased", max_cells=1, out=second)
    close(torch.as_tensor(np.asarray(got)), expected, 0)
    assert rest.calls < whole.calls / 2 + 7  # the remaining tiles, and the terms of single series
    assert len(listed.read_text().splitlines()) == 7  # all tiles, after the fingerprint
    bx.dtw_cdist(xs, cost=none, divergence="debiased", max_cells=1, out=second)
    assert none.calls == 1 + 7  # one for the fingerprint, and the terms of single series


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    xs, path = series(*LENGTHS), tmp_path / "pairs.npy"
    bx.dtw_cdist(xs, out=path)
    for others, options in ((xs[1:] + xs[:1], {}), (xs, {"gamma": 2.0}), (xs, {"band": 3})):
        with pytest.raises(ValueError, match=r"out must be the path of a call with the same series and options"):
            bx.dtw_cdist(others, out=path, **options)
    for damaged in (b"\xff\xfe\n", b"half a fingerprin"):
        (tmp_path / "pairs.npy.blocks").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"of another call: remove it and pairs\.npy\.blocks, or pass another"):
            bx.dtw_cdist(xs, out=path)
    foreign = tmp_path / "mine.npy"
    np.save(foreign, np.arange(3))
    with pytest.raises(ValueError, match="out must be a new path, or the path of an equal call"):
        bx.dtw_cdist(xs, out=foreign)
    assert np.load(foreign).tolist() == [0, 1, 2]


BUSY = (
    r"out must be a path that no other call writes to, got .*pairs\.npy: wait for the other call, or pass another path"
)


def test_two_processes_do_not_share_a_path(tmp_path: Path) -> None:
    xs, path = series(*LENGTHS), tmp_path / "pairs.npy"
    code = f"""
import time
from pathlib import Path
from support.inside import replace_open
from test_outputs import *
def slow(*arguments, **options):
    Path({str(tmp_path / "is open")!r}).touch()
    time.sleep(600)
replace_open(pytest.MonkeyPatch(), slow)  # the list of blocks was read, and the file is not open yet
bx.dtw_cdist(series(*LENGTHS), out={str(path)!r})
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as other:
        until = time.monotonic() + 120
        while not (tmp_path / "is open").exists() and other.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        try:
            with pytest.raises(ValueError, match=BUSY):
                bx.dtw_cdist(xs, out=path)
        finally:
            other.kill()
    close(torch.as_tensor(np.asarray(bx.dtw_cdist(xs, out=path))), bx.dtw_cdist(xs), 0)  # the lock ended with it


def test_two_calls_of_one_process_do_not_share_a_path(tmp_path: Path) -> None:
    xs, path, tries = series(*LENGTHS), tmp_path / "pairs.npy", []

    def cost(x: Tensor, y: Tensor) -> Tensor:
        if not tries:
            tries.append(path)
            with pytest.raises(ValueError, match=BUSY):
                bx.dtw_cdist(xs, cost=cost, out=path)
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)

    for _ in range(2):  # the lock ends with the call
        close(torch.as_tensor(np.asarray(bx.dtw_cdist(xs, cost=cost, out=path))), bx.dtw_cdist(xs), 1e-5)


def test_a_path_without_locks_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object) -> None:
        raise OSError(95, "Operation not supported")

    replace_lock(monkeypatch, refuse)
    xs = series(*LENGTHS)
    close(torch.as_tensor(np.asarray(bx.dtw_cdist(xs, out=tmp_path / "pairs.npy"))), bx.dtw_cdist(xs), 0)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("pairs.csv", r"out must be a path that ends with '.npy' or '.zarr', got 'pairs.csv'"),
        (np.empty((3, 4)), r"out must be a path or an array of shape \(7, 7\), got a ndarray of shape \(3, 4\)"),
        (np.empty((7, 7), int), "out must hold floating point numbers, got dtype int64"),
        (7, r"out must be a path or an array of shape \(7, 7\), got a int"),
    ],
)
def test_bad_outputs_are_named(out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.dtw_cdist(series(*LENGTHS), out=out)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["None", "ThreadPoolExecutor(2)"])
def test_memory_of_many_pairs_is_the_size_of_the_result(client: str) -> None:
    code = r"""
from concurrent.futures import ThreadPoolExecutor
import re, torch, bellmax as bx
def kilobytes(name):
    return int(re.search(name + r":\s+(\d+)", open("/proc/self/status").read())[1])
torch.set_num_threads(1)
xs = torch.randn(6000, 2)
bx.dtw_cdist(xs[:50], omega="hard")
before = kilobytes("VmRSS")
bx.dtw_cdist(xs, omega="hard", client=CLIENT)
print((kilobytes("VmHWM") - before) * 1024 / len(xs) ** 2)  # getrusage would count the memory of the parent
"""
    if sys.platform != "linux":
        pytest.skip("peak memory is read from Linux")
    code = code.replace("CLIENT", client)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 3.5 < float(done.stdout) < 6
