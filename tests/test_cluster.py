"""Calls on a cluster, by a client and by tasks, with killed workers and drivers, against one process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import Client, KilledWorker, LocalCluster
from support.checks import close
from support.inside import collections, jobs, load_job, save_job, set_limit
from torch import Tensor

import bellmax as bx

BLOCKS = 21  # 18 series in tiles of three
SIXTH = "rows-0-columns-15"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "series in a tile of dtw_cdist", 3)
    set_limit(monkeypatch, "queries in a block of dtw_neighbors", 3)
    set_limit(monkeypatch, "cells in a block of dtw_neighbors", 1)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two processes, which come back after they were killed."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def series() -> Tensor:
    """Series (18, 5); each begins with its index."""
    numbers = torch.arange(18.0)
    return torch.stack([numbers, *torch.randn(4, 18, generator=torch.Generator().manual_seed(0))], 1)


class Cost:
    """A squared distance that notes each block in a file and then calls ``event``."""

    def __init__(self, notes: Path, event: Any = None) -> None:
        self.notes, self.event = notes, event

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 1:  # the driver evaluates one pair for the fingerprint of the cost
            block = f"rows-{int(x[0, 0, 0])}-columns-{int(y[0, 0, 0])}"
            with self.notes.open("a") as file:
                file.write(f"{block}\n")
            if self.event is not None:
                self.event(block)
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)

    @property
    def noted(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


class Kill:
    """Kills a process, by default this one, once, after some blocks were written; notes these blocks."""

    def __init__(self, checkpoint: Path, pid: int | None = None) -> None:
        self.checkpoint, self.pid, self.notes = checkpoint, pid, checkpoint.with_name("killed")

    def __call__(self, block: str) -> None:
        if block != SIXTH or self.notes.exists():
            return
        with suppress(FileExistsError), self.notes.open("x") as file:
            wait_for(self.checkpoint)
            file.write("\n".join(written_blocks(self.checkpoint)))
            file.flush()
            os.kill(self.pid or os.getpid(), signal.SIGKILL)


def written_blocks(checkpoint: Path) -> list[str]:
    """The names of the blocks in a folder, as in the notes of :class:`Cost`."""
    names = (path.stem.split("-") for path in checkpoint.glob("*.block"))
    return sorted(f"rows-{row}-columns-{column}" for _, row, _, _, column, _ in names)


def wait_for(checkpoint: Path) -> None:
    """Wait until three blocks were written, for at most two minutes."""
    until = time.monotonic() + 120
    while len(written_blocks(checkpoint)) < 3 and time.monotonic() < until:
        time.sleep(0.01)


def fail(block: str) -> None:
    if block == SIXTH:
        raise ZeroDivisionError("no such cell. At all")


class Lazy:
    """A client that computes a block when its result is requested."""

    def __init__(self) -> None:
        self.under_way, self.most = 0, 0

    def submit(self, function: Any, *arguments: Any) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return SimpleNamespace(result=partial(self.result, function, *arguments))

    def result(self, function: Any, *arguments: Any) -> Any:
        self.under_way -= 1
        return function(*arguments)


# --- workers


def one_process(folder: Path) -> Tensor:
    return bx.dtw_cdist(series(), cost=Cost(folder / "of one process"), out=torch.empty(18, 18))


def test_a_worker_may_die(client: Client, tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "blocks", torch.empty(18, 18)
    kill = Kill(checkpoint)
    cost = Cost(tmp_path / "notes", kill)
    bx.dtw_cdist(series(), cost=cost, client=client, checkpoint=checkpoint, out=out)
    close(out, one_process(tmp_path), 0)
    before = kill.notes.read_text().splitlines()
    assert len(before) >= 3
    assert all(cost.noted.count(block) == 1 for block in before)
    assert set(cost.noted) == set(written_blocks(checkpoint))
    assert len(written_blocks(checkpoint)) == BLOCKS


def test_the_driver_may_die(client: Client, tmp_path: Path) -> None:
    checkpoint = tmp_path / "blocks"
    code = f"""
from test_cluster import *
set_limit(pytest.MonkeyPatch(), "series in a tile of dtw_cdist", 3)
cost = Cost(Path({str(tmp_path / "notes")!r}), Kill(Path({str(checkpoint)!r}), os.getpid()))
bx.dtw_cdist(series(), cost=cost, client=Client({client.scheduler.address!r}), checkpoint={str(checkpoint)!r})
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before, rest = written_blocks(checkpoint), Cost(tmp_path / "rest")
    assert 3 <= len(before) < BLOCKS
    close(bx.dtw_cdist(series(), cost=rest, client=client, checkpoint=checkpoint), one_process(tmp_path), 0)
    assert sorted([*before, *rest.noted]) == written_blocks(checkpoint)
    assert len(rest.noted) == BLOCKS - len(before)


def test_a_block_that_fails_for_good_is_named(client: Client, tmp_path: Path) -> None:
    checkpoint, cost = tmp_path / "blocks", Cost(tmp_path / "notes", fail)
    sentence = "^rows 0–2 against columns 15–17 could not be computed: ZeroDivisionError: no such cell$"
    with pytest.raises(RuntimeError, match=sentence):
        bx.dtw_cdist(series(), cost=cost, client=client, checkpoint=checkpoint)
    before, rest = written_blocks(checkpoint), Cost(tmp_path / "rest")
    assert len(before) >= 5
    assert set(before) == {*cost.noted} - {SIXTH}
    bx.dtw_cdist(series(), cost=rest, checkpoint=checkpoint)
    assert sorted([*before, *rest.noted]) == written_blocks(checkpoint)


def test_series_are_sent_anew_if_no_worker_has_them() -> None:
    class Forgetful(Lazy):
        sent = 0

        def scatter(self, data: Any, broadcast: bool, hash: bool) -> Any:
            self.sent += 1
            return self.sent, data

        def nthreads(self) -> dict[str, int]:
            return {"worker": 1}

        def submit(self, function: Any, *arguments: Any, pure: bool) -> Any:
            (number, data), block = arguments
            return super().submit(function if number > self.lost else self.lose, data, block)

        def lose(self, data: Any, block: Any) -> None:
            raise CancelledError("lost dependencies")

    client = Forgetful()
    client.lost = 2
    close(bx.dtw_cdist(series(), client=client), bx.dtw_cdist(series()), 0)
    assert (client.sent, client.most) == (3, 4)
    client.lost = 9
    with pytest.raises(
        RuntimeError, match="rows 0–2 against columns 0–2 could not be computed: CancelledError: lost dep"
    ):
        bx.dtw_cdist(series(), client=client)


def test_a_lost_worker_gives_a_one_line_error() -> None:
    block = jobs.Block(slice(0, 3), slice(6, 9))
    said = jobs.describe_failure(block, KilledWorker("task", SimpleNamespace(address="tcp://somewhere:1"), 3))
    assert said.startswith("rows 0–2 against columns 6–8 could not be computed: KilledWorker: Attempted to run task")
    assert ". " not in said


# --- any client


@pytest.mark.parametrize("which", ["threads", "client"])
def test_a_client_computes_the_same_as_one_process(which: str, request: pytest.FixtureRequest) -> None:
    client, xs = request.getfixturevalue(which), [*series()[:, :5], torch.ones(3)]
    for ys, options in ((None, {"divergence": "debiased"}), (xs[:7], {"omega": "hard", "band": 2})):
        close(bx.dtw_cdist(xs, ys, client=client, **options), bx.dtw_cdist(xs, ys, **options), 1e-6)
        got, expected = (bx.dtw_neighbors(xs, ys, k=2, client=by, **options) for by in (client, None))
        assert got.indices.equal(expected.indices)
        close(got.distances, expected.distances, 1e-6)


class Closed(Lazy):
    """A client whose futures can be neither read nor canceled."""

    def submit(self, function: Any, *arguments: Any) -> Any:
        future = super().submit(function, *arguments)
        future.add_done_callback = future.cancel = self.refuse
        return future

    def refuse(self, *arguments: Any) -> None:
        raise OSError("the loop is closed")


def test_a_client_that_closes_raises_at_once() -> None:
    with pytest.raises(
        RuntimeError, match=r"^rows 0–2 against columns 0–2 could not be computed: OSError: the loop is closed$"
    ):
        bx.dtw_cdist(series(), client=Closed())


@pytest.mark.parametrize("function", [bx.dtw_cdist, partial(bx.dtw_neighbors, k=1)])
def test_a_closed_client_is_refused(client: Client, function: Any, tmp_path: Path) -> None:
    with Client(client.scheduler.address) as closed:
        pass
    with pytest.raises(ValueError, match=r"client must be open, got a Client that is closed: make a new one"):
        function(series(), client=closed, checkpoint=tmp_path / "blocks")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["scatter", "nthreads"])
def test_a_lost_scheduler_gives_a_one_line_error(method: str) -> None:
    class Lost(Lazy):
        def scatter(self, data: Any, broadcast: bool, hash: bool) -> Any:
            return self.answer("scatter", data)

        def nthreads(self) -> dict[str, int]:
            return self.answer("nthreads", {"worker": 1})

        def answer(self, name: str, value: Any) -> Any:
            if name == method:
                raise OSError("Timed out trying to connect. To what")
            return value

    with pytest.raises(
        RuntimeError,
        match=r"^rows 0–2 against columns 0–2 could not be computed: OSError: Timed out trying to connect$",
    ):
        bx.dtw_cdist(series(), client=Lost())


def backend_of_workers(client: Any, **options: Any) -> set[str]:
    """The backends that workers use in a call within ``bx.use_backend("reference")``."""
    backends = set()

    def cost(x: Tensor, y: Tensor) -> Tensor:
        backends.add(bx.DTW(torch.ones(2, 2)).backend)
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)

    with bx.use_backend("reference"):
        bx.dtw_cdist(series(), cost=cost, client=client, **options)
    return backends


def test_workers_use_the_backend_of_the_caller(threads: ThreadPoolExecutor) -> None:
    assert backend_of_workers(None) == backend_of_workers(threads) == {"reference"}
    assert threads.submit(lambda: bx.DTW(torch.ones(2, 2)).backend).result() == bx.DTW(torch.ones(2, 2)).backend


class Backend:
    """A cost that notes the backend of its process."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        with self.notes.open("a") as file:
            file.write(f"{bx.DTW(torch.ones(2, 2)).backend}\n")
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


def test_other_processes_use_the_backend_of_the_caller(client: Client, tmp_path: Path) -> None:
    cost = Backend(tmp_path / "notes")
    with bx.use_backend("reference"):
        bx.dtw_cdist(series(), cost=cost, client=client)
        tasks = bx.cluster.plan(bx.dtw_cdist, series()[:3], cost=cost, checkpoint=tmp_path / "blocks")
    tasks[0].run()
    assert set(cost.notes.read_text().split()) == {"reference"}


def test_an_interrupt_cancels_running_blocks() -> None:
    class Interrupted(Lazy):
        def __init__(self) -> None:
            super().__init__()
            self.cancelled: list[int] = []

        def submit(self, function: Any, *arguments: Any) -> Any:
            future, number = super().submit(function, *arguments), self.under_way
            future.cancel = lambda: self.cancelled.append(number)
            if number == 2:
                future.result = self.interrupt
            return future

        def interrupt(self) -> None:
            raise KeyboardInterrupt

    client = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        bx.dtw_cdist(series(), client=client)
    assert client.cancelled[:2] == [2, 3]


def test_few_blocks_are_submitted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Lazy()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    close(bx.dtw_cdist(series(), client=client), bx.dtw_cdist(series()), 0)
    assert client.most == 8


def test_a_slow_block_does_not_keep_the_others_back(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    checkpoint, written = tmp_path / "blocks", []

    def slow(block: str) -> None:
        if block == "rows-0-columns-0":
            wait_for(checkpoint)
            written.extend(written_blocks(checkpoint))

    cost = Cost(tmp_path / "notes", slow)
    close(bx.dtw_cdist(series(), cost=cost, client=threads, checkpoint=checkpoint), one_process(tmp_path), 0)
    assert len(written) >= 3


# --- folders


def test_neighbours_go_on_from_a_folder(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    xs, checkpoint = series(), tmp_path / "folder"
    expected = bx.dtw_neighbors(xs, k=2)
    assert bx.dtw_neighbors(xs, k=2, checkpoint=checkpoint, client=threads).indices.equal(expected.indices)
    files = sorted(checkpoint.glob("*.block"))
    assert len(files) == 6
    files[3].unlink()
    folder = jobs.Folder(checkpoint, (checkpoint / "fingerprint").read_text())
    first = jobs.Block(slice(0, 3), slice(0, 18))
    folder.write(first, (torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)))  # must not be computed again
    got = bx.dtw_neighbors(xs, k=2, checkpoint=checkpoint).indices
    assert not got[:3].any()
    assert got[3:].equal(expected.indices[3:])


def test_a_foreign_folder_is_not_changed(tmp_path: Path) -> None:
    xs, checkpoint = series(), tmp_path / "blocks"
    bx.dtw_cdist(xs, checkpoint=checkpoint)
    for others, options in ((xs[1:], {}), (xs, {"gamma": 2.0}), (xs, {"band": 3})):
        with pytest.raises(
            ValueError, match=r"must be the folder of a call with the same series and options, got .*blocks"
        ):
            bx.dtw_cdist(others, checkpoint=checkpoint, **options)
    for k, name in ((1, "one"), (2, "one")):
        if k == 1:
            bx.dtw_neighbors(xs, k=k, checkpoint=tmp_path / name)
        else:
            with pytest.raises(ValueError, match="must be the folder of a call with the same series and options"):
                bx.dtw_neighbors(xs, k=k, checkpoint=tmp_path / name)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="a new or empty folder, or the checkpoint of an equal call, got"):
        bx.dtw_cdist(xs, checkpoint=tmp_path / "mine")
    with pytest.raises(ValueError, match="checkpoint must be a folder, got the file"):
        bx.dtw_cdist(xs, checkpoint=tmp_path / "mine" / "thesis.tex")


class Power:
    """A cost with a parameter."""

    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).abs().pow(self.power).sum(-1)


@pytest.mark.parametrize("function", [bx.dtw_cdist, partial(bx.dtw_neighbors, k=1)])
def test_another_cost_of_the_same_name_has_another_fingerprint(function: Any, tmp_path: Path) -> None:
    function(series(), cost=Power(1), checkpoint=tmp_path)
    function(series(), cost=Power(1), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="must be the folder of a call with the same series and options"):
        function(series(), cost=Power(3), checkpoint=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fingerprint_has_all_digits_of_a_tensor_gamma(dtype: torch.dtype) -> None:
    gammas = [torch.tensor(gamma, dtype=dtype) for gamma in (0.123451, 0.123452)]
    first, second = (collections.pairs_job(series(), gamma=gamma).fingerprint() for gamma in gammas)
    assert first != second
    assert first == collections.pairs_job(series(), gamma=gammas[0].clone().requires_grad_()).fingerprint()


def test_where_the_sides_part_tells_calls_apart() -> None:
    xs = series()
    calls = (xs,), (xs[:6], xs[6:]), (xs[:9], xs[9:]), (xs, xs)
    assert len({collections.pairs_job(*sides).fingerprint() for sides in calls}) == 4
    assert collections.pairs_job(xs, band=2).fingerprint() == collections.pairs_job(xs, band=2.0).fingerprint()


DAMAGED = "is damaged, or another call or version wrote it: remove it and repeat the call to compute the block again"


@pytest.mark.parametrize("what", [b"", b"no tensor", b"bellmax 1 \n"])
def test_a_damaged_block_is_named(what: bytes, tmp_path: Path) -> None:
    bx.dtw_cdist(series(), checkpoint=tmp_path)
    file = sorted(tmp_path.glob("rows-*"))[2]
    file.write_bytes(what)
    with pytest.raises(ValueError, match=f"{file.name} {DAMAGED}"):
        bx.dtw_cdist(series(), checkpoint=tmp_path)
    file.unlink()
    close(bx.dtw_cdist(series(), checkpoint=tmp_path), bx.dtw_cdist(series()), 0)


def flips(path: Path, every: int) -> Iterator[None]:
    """Flip a bit of each byte of a file, or of some, one at a time."""
    whole = path.read_bytes()
    for offset in range(0, len(whole), every):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :])
        yield
    path.write_bytes(whole)


def test_a_flipped_bit_in_a_block_is_refused(tmp_path: Path) -> None:
    xs = series()[:3]
    expected = bx.dtw_cdist(xs, checkpoint=tmp_path)
    (file,) = tmp_path.glob("rows-*")
    for _ in flips(file, every=5):
        with pytest.raises(ValueError, match=f"{file.name} {DAMAGED}"):
            bx.dtw_cdist(xs, checkpoint=tmp_path)
    close(bx.dtw_cdist(xs, checkpoint=tmp_path), expected, 0)


def test_a_block_of_another_call_is_refused(tmp_path: Path) -> None:
    bx.dtw_cdist(series(), checkpoint=tmp_path / "a")
    bx.dtw_cdist(series() + 1, checkpoint=tmp_path / "b")
    for source, target in (
        ("b/rows-0-3-columns-0-3", "a/rows-0-3-columns-0-3"),
        ("b/rows-0-3-columns-0-3", "b/rows-3-6-columns-3-6"),
    ):
        (tmp_path / f"{target}.block").write_bytes((tmp_path / f"{source}.block").read_bytes())
        xs = series() + (target[0] == "b")
        with pytest.raises(ValueError, match=f"{target[2:]}.block {DAMAGED}"):
            bx.dtw_cdist(xs, checkpoint=tmp_path / target[0])


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (torch.zeros(1, 3),),
        (torch.zeros(3, 3), torch.zeros(3, 3)),
        (torch.zeros(3, 3, dtype=torch.int64),),
        (torch.zeros(3, 3, dtype=torch.float64),),
        (torch.zeros(3, 3, dtype=torch.bool),),
        (torch.zeros(3, 3).to_sparse(),),
        {"tensors": 1},
    ],
)
def test_a_block_of_other_tensors_is_refused(tensors: Any, tmp_path: Path) -> None:
    bx.dtw_cdist(series(), checkpoint=tmp_path)
    folder = jobs.Folder(tmp_path, (tmp_path / "fingerprint").read_text())
    folder.write(jobs.Block(slice(0, 3), slice(0, 3)), tensors)
    with pytest.raises(ValueError, match=f"rows-0-3-columns-0-3.block {DAMAGED}"):
        bx.dtw_cdist(series(), checkpoint=tmp_path)


def in_float64(x: Tensor, y: Tensor) -> Tensor:
    return (x.double().unsqueeze(-2) - y.double().unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("options", [{"cost": in_float64}, {"gamma": torch.tensor(1.0, dtype=torch.float64)}])
def test_blocks_have_the_dtype_of_the_values(options: Any, tmp_path: Path) -> None:
    expected = bx.dtw_cdist(series(), checkpoint=tmp_path, **options)
    assert expected.dtype == torch.float64
    close(bx.dtw_cdist(series(), checkpoint=tmp_path, **options), expected, 0)


def test_blocks_of_an_old_format_are_computed_again(tmp_path: Path) -> None:
    bx.dtw_cdist(series(), checkpoint=tmp_path)
    for file in tmp_path.glob("rows-*"):
        torch.save((torch.zeros(3, 3),), file.with_suffix(".pt"))
        file.unlink()
    close(bx.dtw_cdist(series(), checkpoint=tmp_path), bx.dtw_cdist(series()), 0)


def test_a_fingerprint_of_other_bytes_is_refused(tmp_path: Path) -> None:
    bx.dtw_cdist(series(), checkpoint=tmp_path)
    (tmp_path / "fingerprint").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be the folder of a call with the same series and options"):
        bx.dtw_cdist(series(), checkpoint=tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file sizes")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    set_limit(monkeypatch, "series in a tile of dtw_cdist", 1024)
    xs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"rows-0-64-columns-0-64.block cannot be written: File too large"):
            bx.dtw_cdist(xs, checkpoint=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["fingerprint"]
    close(bx.dtw_cdist(xs, checkpoint=tmp_path), bx.dtw_cdist(xs), 0)


def test_finished_blocks_survive_a_broken_client(tmp_path: Path) -> None:
    class Broken(Lazy):
        def submit(self, function: Any, *arguments: Any) -> Any:
            if self.most == 3:
                raise RuntimeError("the pool is closed")
            return super().submit(function, *arguments)

    with pytest.raises(RuntimeError, match="rows 0–2 against columns 9–11 could not be computed: RuntimeError: the"):
        bx.dtw_cdist(series(), checkpoint=tmp_path, client=Broken())
    assert len(written_blocks(tmp_path)) == 3


@pytest.mark.parametrize("function", [bx.dtw_cdist, bx.dtw_neighbors])
def test_bad_clients_are_named(function: Any) -> None:
    with pytest.raises(ValueError, match=r"client must have a method submit\(function, \*arguments\), .* got a str"):
        function(series(), client="tcp://scheduler:8786", **({"k": 1} if function is bx.dtw_neighbors else {}))


# --- plans


@pytest.mark.parametrize("function", [bx.dtw_cdist, bx.dtw_neighbors])
def test_tasks_can_be_pickled_and_run_anywhere(function: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"omega": "hard"} if function is bx.dtw_cdist else {"k": 2, "band": 1}
    xs, ys = series(), series()[:7] + 1
    tasks = bx.cluster.plan(function, xs, ys, checkpoint=tmp_path / "blocks", **options)
    assert tasks == bx.cluster.plan(function, xs, ys, checkpoint=tmp_path / "blocks", **options)
    assert len(tasks) == (18 if function is bx.dtw_cdist else 6)
    for task in reversed(tasks):
        sent = pickle.dumps(task)
        assert len(sent) < 1000
        pickle.loads(sent).run()
    assert len(list((tmp_path / "blocks").glob("*.block"))) == len(tasks)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "blocks").iterdir()}
    tasks[0].run()
    got, expected = (function(xs, ys, checkpoint=folder, **options) for folder in (tmp_path / "blocks", None))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "blocks").iterdir()}
    for each, right in zip(got, expected, strict=True):
        close(each, right, 0)


def test_tasks_name_the_block_that_failed(tmp_path: Path) -> None:
    tasks = bx.cluster.plan(bx.dtw_cdist, series(), checkpoint=tmp_path / "a", cost=Cost(tmp_path / "notes", fail))
    for task in tasks[:5]:
        task.run()
    with pytest.raises(
        RuntimeError, match="rows 0–2 against columns 15–17 could not be computed: ZeroDivisionError: no"
    ):
        tasks[5].run()
    with pytest.raises(ValueError, match=r"function must be bx.dtw_cdist or bx.dtw_neighbors, got <function dtw "):
        bx.cluster.plan(bx.dtw, series(), checkpoint=tmp_path / "b")
    with pytest.raises(ValueError, match="plan takes no out: pass out to the call that collects the blocks"):
        bx.cluster.plan(bx.dtw_cdist, series(), checkpoint=tmp_path / "b", out=torch.empty(18, 18))
    with pytest.raises(ValueError, match="cost must be picklable, such as a function defined in a module: "):
        bx.cluster.plan(bx.dtw_cdist, series(), checkpoint=tmp_path / "b", cost=lambda x, y: Power(1)(x, y))
    (tmp_path / "a" / "job.pickle").write_bytes(b"")
    with pytest.raises(ValueError, match=LOST):
        load_job(tmp_path / "a", tasks[0].fingerprint)


LOST = "job.pickle is missing or damaged, or another call or version wrote it: remove it, and call plan again"


def test_a_flipped_bit_in_a_job_is_refused_before_it_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = bx.cluster.plan(bx.dtw_cdist, series()[:3], checkpoint=tmp_path)
    file = tmp_path / "job.pickle"
    load, loaded = pickle.loads, []
    monkeypatch.setattr(pickle, "loads", lambda content: loaded.append(content) or load(content))
    for _ in flips(file, every=11):
        with pytest.raises(ValueError, match=LOST):
            load_job(tmp_path, tasks[0].fingerprint)
    file.write_bytes(pickle.dumps(collections.pairs_job(series()[:3])))  # as earlier versions did
    with pytest.raises(ValueError, match=LOST):
        load_job(tmp_path, tasks[0].fingerprint)
    assert not loaded


def test_a_job_of_another_fingerprint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = series()[:3]
    for folder, others in (("a", xs), ("b", xs + 1)):
        tasks = bx.cluster.plan(bx.dtw_cdist, others, checkpoint=tmp_path / folder)
    job = collections.pairs_job(xs)
    save_job(tmp_path / "b", job, tasks[0].fingerprint)
    with pytest.raises(ValueError, match=LOST):
        tasks[0].run()
    (tmp_path / "b" / "job.pickle").write_bytes((tmp_path / "a" / "job.pickle").read_bytes())
    with pytest.raises(ValueError, match=LOST):
        tasks[0].run()
