"""``bellmax ner`` from one end to the other, on a toy language."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

from bellmax.apps.ner import tagging
from bellmax.apps.ner.commands import app

from . import corpus

SMALL = ["--word-size", "16", "--step-size", "0.1", "--sentences", "4"]


def run(*args: object, text: str | None = None, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.write(tmp_path_factory.mktemp("few"), {"train": 14, "dev": 3, "test": 3})


@pytest.fixture(scope="module", params=["negentropy", "l2"])
def trained(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    said = run("train", data, "--output", folder, "--omega", request.param, "--epochs", 8, *SMALL)
    assert re.search(r"epoch   8: loss \d+\.\d+, dev f1 \d+\.\d+.*, \d+ tokens/s", said)
    return folder


def weights(folder: Path) -> torch.Tensor:
    return torch.cat(
        [t.flatten().double() for t in torch.load(folder / "last.pt", weights_only=True)["model"].values()]
    )


def test_evaluates(trained: Path, data: Path) -> None:
    said = run("eval", trained, data)
    f1 = float(re.search(r"F1 +(\d+\.\d+)", said)[1])
    assert f1 > 90
    assert run("eval", trained, data, "--split", "dev") != said


def test_tags_with_readings(trained: Path) -> None:
    said = run("tag", trained, text="the mr Bob Lee walks in Rome\n\nin Oslo\n")
    first, second, _ = said.split("\n\n")
    rows = [line.split("\t") for line in first.splitlines() if not line.startswith("#")]
    assert [row[:2] for row in rows[2:4]] == [["Bob", "B-PER"], ["Lee", "I-PER"]]
    assert all(0 < float(row[2]) <= 1.0001 for row in rows)
    assert second.startswith("\nin\tO\t")  # after an empty line, which stands for the empty one
    readings = [line[2:].split("\t") for line in first.splitlines() if line.startswith("#") and "\t" in line]
    probabilities = [float(p) for p, _ in readings]
    assert readings[0][1] == "the mr [PER Bob Lee] walks in [LOC Rome]"
    assert probabilities == sorted(probabilities, reverse=True)
    if "l2" in str(trained):
        assert sum(probabilities) == pytest.approx(1, abs=1e-3)
        assert "# …" not in first
    else:
        assert len(readings) == 5
        assert "# …" in first


def test_plots(trained: Path, data: Path, tmp_path: Path) -> None:
    picture = tmp_path / "tags.png"
    run("plot", trained, "in Rome mr Bob", "--output", picture)
    alone = matplotlib.image.imread(picture)
    assert alone.std() > 0
    assert not _has_red(alone)
    run("plot", trained, 3, "--data", data, "--output", picture, "--beside", trained)
    assert _has_red(matplotlib.image.imread(picture))


def _has_red(picture: object) -> bool:
    red, green, blue = (picture[..., c] for c in range(3))  # type: ignore[index]
    return bool(((red > 0.8) & (green < 0.3) & (blue < 0.3)).any())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_equals_uninterrupted(few: Path, tmp_path: Path, optimizer: str) -> None:
    small = [*SMALL, "--optimizer", optimizer]
    run("train", few, "--output", tmp_path / "a", "--epochs", 3, *small)
    run("train", few, "--output", tmp_path / "b", "--epochs", 1, *small)
    run("train", few, "--output", tmp_path / "b", "--epochs", 3, "--resume")
    assert torch.equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    said = run("train", few, "--output", tmp_path / "b", status=2)
    assert "holds a run already: add --resume" in said


def test_interrupted_a_run_can_be_used(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = tagging.NamedEntities.batches

    def interrupted(self: tagging.NamedEntities, epoch: int) -> object:
        if epoch == 1:
            raise KeyboardInterrupt
        return batches(self, epoch)

    monkeypatch.setattr(tagging.NamedEntities, "batches", interrupted)
    said = run("train", few, "--output", tmp_path / "run", *SMALL, status=130)
    assert "can be used as it is, or resumed with --resume" in said
    assert "F1" in run("eval", tmp_path / "run", few)


def test_interrupted_in_the_first_epoch_it_begins_again(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = tmp_path / "some.vec"
    vectors.write_text("rome 1 2 3\n")
    options = ["--epochs", 1, "--embeddings", vectors]
    run("train", few, "--output", tmp_path / "whole", *options)

    def interrupted(self: tagging.NamedEntities, epoch: int) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tagging.NamedEntities, "batches", interrupted)
        run("train", few, "--output", tmp_path / "run", *options, status=130)
    run("train", few, "--output", tmp_path / "run", *options, "--resume")
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_warms_up_with_the_surrogate_loss(few: Path, tmp_path: Path) -> None:
    options = ["--epochs", 2, "--omega", "l2", *SMALL]
    for name, more in {"a": [], "b": ["--loss", "relaxed", "--warm-up", 2], "c": ["--loss", "relaxed"]}.items():
        run("train", few, "--output", tmp_path / name, *options, *more)
    assert torch.equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not torch.equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_vectors_begin_the_table(few: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "some.vec"
    vectors.write_text("rome 1 2 3\nunseen 4 5 6\n")
    small = ["--epochs", 1, "--step-size", 1e-9, "--embeddings", vectors]
    run("train", few, "--output", tmp_path / "run", *small)
    model, vocabulary, config = tagging.load(tmp_path / "run")
    assert config.word_size == 3
    for word, vector in {"Rome": [1, 2, 3], "unseen": [4, 5, 6]}.items():
        row = model.words.weight[1 + vocabulary.words.index(word)]
        torch.testing.assert_close(row, torch.tensor(vector).float())


def test_table_is_made_and_resumed(few: Path, tmp_path: Path) -> None:
    options = ["table", few, "--output", tmp_path, "--epochs", 1, "--jobs", 2, "--omega", "l2=2", "--seed", 3, *SMALL]
    said = run(*options)
    assert f"{tmp_path / few.name / 'l2-relaxed'}: begun" in said.replace("\n", "")
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [(row["omega"], row["gamma"], row["loss"]) for row in rows] == [("l2", 2, "surrogate"), ("l2", 2, "relaxed")]
    assert all(0 <= row["test_f1"] <= 100 and row["epochs"] == 1 for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert "| l2 | 2 | surrogate | 3 | " in text
    assert "begun" not in run(*options)


def test_table_of_several_seeds_takes_finished_runs(few: Path, tmp_path: Path) -> None:
    small = ["--epochs", 1, "--omega", "l2", *SMALL]
    for loss, seed in product(("surrogate", "relaxed"), (0, 1)):
        folder = tmp_path / few.name / f"l2-{loss}-{seed}"
        run("train", few, "--output", folder, "--loss", loss, "--seed", seed, *small)
        (folder / "done").touch()
    assert "begun" not in run("table", few, "--output", tmp_path, "--seed", 0, "--seed", 1, *small)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [(row["loss"], row["seed"]) for row in rows] == list(product(("surrogate", "relaxed"), (0, 1)))
    mean = sum(row["dev_f1"] for row in rows[:2]) / 2
    assert re.search(rf"\| l2 \| 1 \| surrogate \| mean \| \S+ \| {mean:.2f} \|", (tmp_path / "table.md").read_text())


@pytest.mark.parametrize(
    ("truth", "guess", "right", "guessed", "wanted"),
    [
        ("B-PER I-PER O B-LOC", "B-PER O O B-LOC", 1, 2, 2),  # a part of an entity is wrong
        ("B-PER I-PER B-PER", "B-PER I-PER I-PER", 0, 1, 2),
        ("B-LOC O B-PER", "B-ORG O B-PER", 1, 2, 2),  # so is one of another type
        ("O O B-PER", "O O O", 0, 0, 1),
    ],
)
def test_f1_is_that_of_conll(truth: str, guess: str, right: int, guessed: int, wanted: int) -> None:
    found = tagging.entity_scores([truth.split()], [guess.split()])
    assert found["precision"] == pytest.approx(100 * right / max(guessed, 1))
    assert found["recall"] == pytest.approx(100 * right / wanted)
    assert found["f1"] == pytest.approx(200 * right / (guessed + wanted))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "nowhere", "--output", "x"], "nowhere is not a folder"),
        (["eval", "nowhere", "nowhere"], "nowhere is not a run of 'bellmax ner train'"),
        (["train", "DATA", "--output", "RUN", "--omega", "max"], "omega must be one of 'negentropy', 'l2', 'tsallis'"),
        (["train", "DATA", "--output", "RUN", "--loss", "hinge"], "loss must be one of 'surrogate', 'relaxed'"),
        (["train", "DATA", "--output", "RUN", "--epochs", "0"], "epochs must be at least 1, got 0"),
    ],
)
def test_errors_are_a_sentence(data: Path, tmp_path: Path, args: list[str], message: str) -> None:
    places = {"DATA": str(data), "RUN": str(tmp_path / "run")}
    said = run(*(places.get(arg, arg) for arg in args), status=2)
    assert message in " ".join(said.split())
    assert "Traceback" not in said
