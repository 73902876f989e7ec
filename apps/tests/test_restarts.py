"""A killed training process is restarted by ``torchrun``, and the result is the same as without the restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from .ner import corpus

# Train two runs. In the second epoch of the second run, a process kills itself, once, after the first epoch is saved.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as distributed
import bellmax_apps.training as training
from bellmax_apps.ner.commands import app

data, whole, killed, *options = sys.argv[1:]
mark = Path(killed + ".mark")
train_epoch = training._train_epoch

def kill_in_second_epoch(*arguments):
    if distributed.get_rank() == 1 and arguments[4] == 1 and not mark.exists():
        while not (Path(killed) / "last.pt").exists():
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return train_epoch(*arguments)

distributed.init_process_group("gloo")
if not mark.exists():
    app(["train", data, "--output", whole, "--resume", *options], standalone_mode=False)
training._train_epoch = kill_in_second_epoch
app(["train", data, "--output", killed, "--resume", *options], standalone_mode=False)
distributed.destroy_process_group()
"""
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
OPTIONS = "--epochs 3 --minutes 9 --word-size 8 --sentences 5 --optimizer adamw"


def finishes(command: list[str | Path]) -> bool:
    """True if torchrun and its processes succeed within 90 seconds."""
    # Without the variable, the store keeps the addresses of the processes before the restart, and gloo uses them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout=90) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False


def test_a_killed_process_is_restarted_and_resumes(tmp_path: Path) -> None:
    data = corpus.write(tmp_path / "data", {"train": 14, "dev": 3, "test": 3})
    script = tmp_path / "trainings.py"
    script.write_text(SCRIPT)
    for attempt in range(3):  # on a busy machine, gloo may fail to connect
        runs = tmp_path / f"whole-{attempt}", tmp_path / f"killed-{attempt}"
        if finishes([sys.executable, *TORCHRUN.split(), script, data, *runs, *OPTIONS.split()]):
            break
    assert Path(f"{runs[1]}.mark").exists()
    whole, killed = (torch.load(run / "last.pt", weights_only=True) for run in runs)
    assert whole["model"].keys() == killed["model"].keys()
    assert all(killed["model"][name].equal(weight) for name, weight in whole["model"].items())
    losses = [[record["loss"] for record in saved["history"]] for saved in (whole, killed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert json.loads((runs[1] / "history.json").read_text()) == killed["history"]
