from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import bellmax_apps.training as training
from bellmax_apps.training import Config, Settings, Task, clip_gradients, fit, load_best


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.dropout(self.layer(x)) - x.sum(-1, keepdim=True)).square().sum()


class Regression(Task[Tensor]):
    metric = "score"

    def __init__(self, stop_at: int | None = None) -> None:
        self.model: nn.Module = Line()
        self.stop_at = stop_at

    def batches(self, epoch: int) -> list[Tensor]:
        if epoch == self.stop_at:
            raise KeyboardInterrupt
        generator = torch.Generator().manual_seed(epoch)
        return [torch.randn(4, 2, generator=generator) for _ in range(10)]

    def shard(self, batch: Tensor, rank: int, world: int) -> tuple[Tensor, int]:
        return batch, len(batch)

    def items(self, batch: Tensor) -> int:
        return len(batch)

    tokens = items

    def evaluate(self) -> dict[str, float]:
        return {"score": -self.model(torch.ones(1, 2)).item()}


def weights(task: Regression) -> Tensor:
    return torch.cat([p.detach().flatten() for p in task.model.parameters()])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_equals_uninterrupted(tmp_path: Path, optimizer: str) -> None:
    settings = Settings(epochs=4, optimizer=optimizer, step_size=0.02, decay=0.5)
    uninterrupted, stopped, resumed = Regression(), Regression(stop_at=2), Regression()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    state = fit(uninterrupted, settings, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, settings, tmp_path / "b")
    assert len(json.loads((tmp_path / "b" / "history.json").read_text())) == 2
    again = fit(resumed, settings, tmp_path / "b", resume=True)
    assert torch.equal(weights(uninterrupted), weights(resumed))
    assert [r["score"] for r in again.history] == [r["score"] for r in state.history]
    assert state.best == max(r["score"] for r in state.history)
    assert state.best > state.history[0]["score"]


def test_an_interrupt_in_the_first_epoch_leaves_no_weights(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(Regression(stop_at=0), Settings(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_best_weights_are_saved_and_the_learning_rate_decays(tmp_path: Path) -> None:
    task = Regression()
    scores = iter([1.0, 3.0, 2.0, 2.5])
    weights_by_score = {}

    def evaluate() -> dict[str, float]:
        score = next(scores)
        weights_by_score[score] = weights(task)
        return {"score": score}

    task.evaluate = evaluate  # type: ignore[method-assign]
    state = fit(task, Settings(epochs=4, step_size=0.1, decay=0.5), tmp_path)
    assert [r["step_size"] for r in state.history] == [0.1, 0.1, 0.1, 0.05]
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert torch.equal(torch.cat([t.flatten() for t in best.values()]), weights_by_score[3.0])


def test_minutes_limit_the_training(tmp_path: Path) -> None:
    state = fit(Regression(), Settings(epochs=9, minutes=1e-9), tmp_path)
    assert len(state.history) == 1


def test_each_epoch_is_reported(tmp_path: Path) -> None:
    for terminal in (False, True):
        console = Console(record=True, force_terminal=terminal, width=120, file=io.StringIO())
        fit(Regression(), Settings(epochs=2), tmp_path, console=console)
        text = console.export_text()
        assert "epoch   2: loss" in text
        assert "dev score" in text


def test_progress_without_a_terminal_is_printed_in_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {}
    for seconds in (0.0, 3600.0):
        monkeypatch.setattr(training, "LINE_SECONDS", seconds)
        console = Console(record=True, force_terminal=False, width=120, file=io.StringIO())
        fit(Regression(), Settings(epochs=2), tmp_path, console=console)
        lines[seconds] = console.export_text().splitlines()
    assert [line for line in lines[0.0] if " batches" not in line] != lines[0.0]
    assert len(lines[0.0]) == 22
    assert lines[0.0][9].startswith("epoch 1/2: 10 of 10 batches, loss ")
    assert len(lines[3600.0]) == 2


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(Regression(), Settings(epochs=1), tmp_path)
    before = (tmp_path / "last.pt").read_bytes()

    def full(checkpoint: object, path: Path) -> None:
        path.write_bytes(b"incomplete")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 736128 vs 736020")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"\w+.pt cannot be written: its disk has \d+\.\d MB left"):
        fit(Regression(), Settings(epochs=2), tmp_path, resume=True)
    assert (tmp_path / "last.pt").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", "history.json", "last.pt"}


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        FloatingPointError, match=r"the loss became (inf|nan), in epoch \d: try a learning rate below 1e"
    ):
        fit(Regression(), Settings(epochs=30, step_size=1e30, clip=1e30), tmp_path)


def test_clips_sparse_and_dense_gradients_together() -> None:
    table, weight = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.zeros(2))
    (3 * table(torch.tensor([1, 1, 4])).sum() + 4 * weight.sum()).backward()
    assert table.weight.grad is not None
    assert weight.grad is not None
    dense = torch.cat((table.weight.grad.to_dense().flatten(), weight.grad))
    norm = clip_gradients([table.weight, weight], 1.0)
    torch.testing.assert_close(norm, dense.norm())
    clipped = torch.cat((table.weight.grad.to_dense().flatten(), weight.grad))
    torch.testing.assert_close(clipped, dense / dense.norm())
    clip_gradients([table.weight, weight], 2.0)
    torch.testing.assert_close(torch.cat((table.weight.grad.to_dense().flatten(), weight.grad)), clipped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": 1}, "fingerprint must be str | None, got 1"),
        ({"other": 1}, "'other' is not a setting of 'bellmax train'; is this a run of another application?"),
        ({"settings": {"epochs": "2"}}, "epochs must be int, got '2'"),
        ({"settings": {"decay": math.inf}}, "decay must be finite, got inf"),
        ({"settings": {"minutes": 10**400}}, "int too large to convert to float"),
        ({"settings": []}, "'list' object has no attribute 'items'"),
    ],
)
def test_damaged_configurations_are_reported(tmp_path: Path, change: dict[str, object], message: str) -> None:
    Config(Settings(minutes=3)).save(tmp_path)
    assert Config.load(tmp_path) == Config(Settings(minutes=3))
    (tmp_path / "config.json").write_text(json.dumps({"settings": {}} | change))
    with pytest.raises(ValueError, match=r"config.json cannot be read as the configuration of a run: ") as caught:
        Config.load(tmp_path)
    assert message in str(caught.value)


def test_old_pickle_protocols_are_read_without_a_warning(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt", pickle_protocol=3)
    with pytest.warns(UserWarning, match="Detected pickle protocol 3"):
        torch.load(tmp_path / "a.pt")
    assert training.load_checkpoint(tmp_path / "a.pt") == {"a": 1}


@pytest.mark.parametrize("other", [[1], torch.zeros(2, 2)])
def test_checkpoints_that_are_not_dictionaries_are_reported(tmp_path: Path, other: object) -> None:
    torch.save(other, tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"last.pt cannot be read as a checkpoint: it is damaged, or another program"):
        fit(Regression(), Settings(epochs=1), tmp_path, resume=True)


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1j])
def test_weights_that_are_not_finite_are_reported(tmp_path: Path, weight: complex) -> None:
    fit(Regression(), Settings(epochs=1), tmp_path)
    Config().save(tmp_path)
    for name in ("best.pt", "last.pt"):
        saved = torch.load(tmp_path / name, weights_only=True)
        saved.get("model", saved)["layer.bias"] = torch.tensor([weight])
        torch.save(saved, tmp_path / name)
    message = r"{} cannot be read as {}: layer.bias must hold finite numbers"
    with pytest.raises(ValueError, match=message.format("best.pt", "the weights of this model")):
        load_best(Line, tmp_path)
    with pytest.raises(ValueError, match=message.format("last.pt", "a checkpoint of this model")):
        fit(Regression(), Settings(epochs=2), tmp_path, resume=True)


def test_shapes_are_compared_before_memory_is_allocated(tmp_path: Path) -> None:
    fit(Regression(), Settings(epochs=1), tmp_path)
    Config().save(tmp_path)
    assert torch.equal(load_best(Line, tmp_path).layer.weight, torch.load(tmp_path / "best.pt")["layer.weight"])
    with pytest.raises(ValueError, match=r"best.pt cannot be read as the weights of this model: Missing key"):
        load_best(lambda: nn.Linear(2**20, 2**20), tmp_path)
    with pytest.raises(ValueError, match=r"config.json cannot be read as the configuration of a run: .*negative"):
        load_best(lambda: nn.Linear(-1, 1), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"history": [{"epoch": 1}]}, "the progress of a run must have the seconds of each epoch"),
        ({"history": [{"seconds": -1.0}]}, "the progress of a run must have the seconds of each epoch"),
        ({"history": [{"seconds": "1"}]}, "the progress of a run must be numbers"),
        ({"best": None}, "the progress of a run must be numbers"),
        ({"best": math.nan}, "the progress of a run must be numbers"),
        ({"history": [{"seconds": math.inf}]}, "the progress of a run must have the seconds of each epoch"),
        ({"step_size": math.nan}, "the step size of a run must be finite and above 0, got nan"),
        ({"step_size": math.inf}, "the step size of a run must be finite and above 0, got inf"),
    ],
)
def test_damaged_progress_is_reported(tmp_path: Path, change: dict[str, object], message: str) -> None:
    fit(Regression(), Settings(epochs=1), tmp_path)
    torch.save(torch.load(tmp_path / "last.pt") | change, tmp_path / "last.pt")
    with pytest.raises(ValueError, match=rf"last.pt cannot be read as a checkpoint of this model: {message}"):
        fit(Regression(), Settings(epochs=2), tmp_path, resume=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_damaged_optimizers_are_reported(tmp_path: Path, optimizer: str) -> None:
    fit(Regression(), Settings(epochs=1, optimizer=optimizer), tmp_path)
    content = (tmp_path / "last.pt").read_bytes()

    def error(entry: str, change: Callable[[Any], object]) -> str:
        (tmp_path / "last.pt").write_bytes(content)
        saved = torch.load(tmp_path / "last.pt")
        change(saved["optimizer"][entry][0])
        torch.save(saved, tmp_path / "last.pt")
        with pytest.raises(ValueError, match=r"last.pt cannot be read as a checkpoint of this model: ") as caught:
            fit(Regression(), Settings(epochs=2, optimizer=optimizer), tmp_path, resume=True)
        return str(caught.value)

    assert error("param_groups", lambda group: group.pop("weight_decay")).endswith(": 'weight_decay' is missing")
    assert error("param_groups", lambda group: group.update(weight_decay="a"))
    if optimizer == "adamw":
        assert "size of tensor" in error("state", lambda state: state.update(exp_avg=torch.zeros(7)))
        wrong = torch.full((1, 2), math.nan)
        assert error("state", lambda state: state.update(exp_avg=wrong)).endswith("must hold finite numbers")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "lbfgs"}, "optimizer must be 'sgd' or 'adamw', got 'lbfgs'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"step_size": 0.0}, "step_size must be above 0, got 0.0"),
        ({"clip": -1.0}, r"clip must be above 0, got -1\.0"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)
