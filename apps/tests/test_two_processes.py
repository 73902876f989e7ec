"""Training in two processes gives the same model as training in one. Both applications share the two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from .ner import corpus
from .translation import language

OPTIONS = {
    "ner": "--minutes 9 --word-size 8 --sentences 5",
    "translation": "--attention structured --size 16 --tokens 120 --optimizer sgd --step-size 0.1",
}
BOTH = """
import json, os, sys
from importlib import import_module
for name, port, arguments in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = port
    import_module(f"bellmax_apps.{name}.commands").app(arguments, standalone_mode=False)
"""


def free_port() -> str:
    """A port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def weights(run: Path) -> torch.Tensor:
    state = torch.load(run / "last.pt", weights_only=True)["model"]
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs of both applications in one process, and in two processes with the environment that ``torchrun`` sets."""
    folder = tmp_path
    data = {
        "ner": corpus.write(folder / "data/ner", {"train": 14, "dev": 3, "test": 3}),
        "translation": language.write(folder / "data/translation"),
    }
    commands = {
        name: ["train", str(data[name]), "--epochs", "1", "--dropout", "0", *options.split()]
        for name, options in OPTIONS.items()
    }
    in_two = [[name, free_port(), [*command, "--output", f"{folder}/{name}/two"]] for name, command in commands.items()]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BOTH, json.dumps(in_two)],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        for name, command in commands.items():
            app = import_module(f"bellmax_apps.{name}.commands").app
            result = CliRunner().invoke(app, [*command, "--output", f"{folder}/{name}/one"])
            assert result.exit_code == 0, (result.output, result.exception)
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return folder


def test_two_processes_train_the_same_models_as_one(folder: Path) -> None:
    for name, tolerance in (("ner", 2e-3), ("translation", 1e-4)):
        one, two = folder / name / "one", folder / name / "two"
        torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=tolerance)
        losses = [json.loads((run / "history.json").read_text())[0]["loss"] for run in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
