"""All subcommands of ``bellmax ner`` on a toy language."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from itertools import product
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bellmax_apps.ner import commands, tagging
from bellmax_apps.ner.commands import app
from bellmax_apps.ner.figure import draw
from bellmax_apps.ner.table import markdown

from ..processes import train_in_this_process
from . import corpus

SMALL = ["--word-size", "16", "--optimizer", "sgd", "--step-size", "0.1", "--decay", "1", "--sentences", "4"]


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
    output = run("train", data, "--output", folder, "--omega", request.param, "--epochs", 8, *SMALL)
    assert re.search(r"epoch   8: loss \d+\.\d+, dev f1 \d+\.\d+.*, \d+ tokens/s", output)
    return folder


def weights(folder: Path) -> torch.Tensor:
    return torch.cat(
        [t.flatten().double() for t in torch.load(folder / "last.pt", weights_only=True)["model"].values()]
    )


def test_evaluates(trained: Path, data: Path) -> None:
    output = run("evaluate", trained, data)
    assert output.startswith(f"{data / 'test.tsv'}: 20 sentences, ")
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines()[2:]}
    assert list(rows) == ["LOC", "PER", "all"]
    assert all(float(f1) > 90 for _, _, f1, _ in rows.values())
    assert int(rows["all"][3]) == int(rows["LOC"][3]) + int(rows["PER"][3]) > 0
    assert run("eval", trained, data) == output  # the old name of the command
    assert run("evaluate", trained, data, "--split", "dev") != output


def test_tags_with_readings(trained: Path) -> None:
    output = run("tag", trained, text="the mr Bob Lee walks in Rome\n\nin Oslo\n")
    first, second, _ = output.split("\n\n")
    rows = [line.split("\t") for line in first.splitlines() if not line.startswith("#")]
    assert [row[:2] for row in rows[2:4]] == [["Bob", "B-PER"], ["Lee", "I-PER"]]
    assert all(0 < float(row[2]) <= 1.0001 for row in rows)
    assert second.startswith("\nin\tO\t")  # an empty sentence gives an empty line
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
    assert "exists: add --force to replace it" in run("plot", trained, "in Rome", "--output", picture, status=2)
    run("plot", trained, 3, "--data", data, "--output", picture, "--beside", trained, "--force")
    assert _has_red(matplotlib.image.imread(picture))


def test_plots_unusual_characters_and_long_words(trained: Path, tmp_path: Path) -> None:
    picture = tmp_path / "tags.svg"
    output = run("plot", trained, f"$x_1$ $\\frac$ 日本 😀 10\u00a0000 {'x' * 300_000}", "--output", picture)
    assert len(output) > 300_000


def test_long_sentences_take_several_rows() -> None:
    panels = [("a", np.eye(78, 2)), ("b", np.eye(78, 2))]
    figure = draw([str(n) for n in range(78)], ["O", "S-PER"], panels, ["O"] * 78)
    rows = [[label.get_text() for label in ax.get_xticklabels()] for ax in figure.axes]
    assert [len(row) for row in rows] == [20, 20, 20, 18] * 2
    assert [word for row in rows for word in row] == [str(n) for n in range(78)] * 2
    assert figure.get_size_inches()[0] < 13


def test_dollar_signs_are_drawn_as_text() -> None:
    tokens = ["$x_1$", "$\\frac$", "y" * 30]
    (ax,) = draw(tokens, ["O"], [("$title$", np.ones((3, 1)))], ["O"] * 3).axes
    labels = ax.get_xticklabels()
    assert [label.get_text() for label in labels] == [*tokens[:2], "y" * 19 + "…"]
    assert not any(label.get_parse_math() for label in labels)


def _has_red(picture: object) -> bool:
    red, green, blue = (picture[..., c] for c in range(3))  # type: ignore[index]
    return bool(((red > 0.8) & (green < 0.3) & (blue < 0.3)).any())


def test_a_batch_is_tagged_like_single_sentences(trained: Path) -> None:
    lines = ["mr Bob Lee walks in San Juan Bay and sees mr Ann", "", "in Rome", "zzz " * 40, "mr Ed", "the"] * 2
    batch = run("tag", trained, text="\n".join(lines)).split("\n\n")
    single = "".join(run("tag", trained, text=f"{line}\n") for line in lines).split("\n\n")
    assert len(batch) == len(single)
    for sentence, expected in zip(batch, single, strict=True):
        for line, expected_line in zip(sentence.splitlines(), expected.splitlines(), strict=True):
            words, probability = _words_and_probability(line)
            expected_words, expected_probability = _words_and_probability(expected_line)
            assert words == expected_words
            assert probability == pytest.approx(expected_probability, abs=1e-3)


def _words_and_probability(line: str) -> tuple[list[str], float]:
    numbers = re.findall(r"\b[01]\.\d{4}\b", line)
    return re.split(r"\b[01]\.\d{4}\b", line), float(numbers[0]) if numbers else 0.0


def test_tags_the_lines_before_one_that_is_not_utf8(trained: Path) -> None:
    long = "x" * 300_000
    text = f"in 10\u00a0000 {long}\n{'the in Rome ' * 2000}\n".encode() + b"in \xff Rome\nin Oslo\n"
    result = CliRunner().invoke(app, ["tag", str(trained)], input=text)
    assert result.exit_code == 2
    first, second, error = result.output.split("\n\n")
    assert [line.split("\t")[0] for line in first.splitlines()[:3]] == ["in", "10\u00a0000", long]
    assert any(line.startswith("# ") and "[LOC Rome]" in line for line in second.splitlines())
    assert error == "Error: standard input, line 3: must be UTF-8, got b'in \\xff Rome'\n"


def test_defaults_match_the_page_of_results() -> None:
    page = Path(__file__).parents[2] / "results/ner.md"
    lines = page.read_text().replace("\\\n", "").splitlines()
    command = next(line for line in lines if line.startswith("bellmax ner table"))
    options = dict(re.findall(r"--([a-z-]+) (\S+)", command))
    config = tagging.Config()
    for name in ("epochs", "optimizer", "step_size", "decay"):
        assert str(getattr(config.settings, name)) == options[name.replace("_", "-")]
    assert (str(config.sentences), str(config.word_size)) == (options["sentences"], options["word-size"])
    assert str(inspect.signature(commands.table).parameters["warm_up"].default) == options["warm-up"]
    omegas = ", ".join(re.findall(r"--omega (\S+)", command))
    assert f"Default: {omegas}." in " ".join(run("table", "--help").replace("│", " ").split())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_equals_uninterrupted(few: Path, tmp_path: Path, optimizer: str) -> None:
    small = [*SMALL, "--optimizer", optimizer]
    run("train", few, "--output", tmp_path / "a", "--epochs", 3, *small)
    run("train", few, "--output", tmp_path / "b", "--epochs", 1, *small)
    run("train", few, "--output", tmp_path / "b", "--epochs", 3, "--resume")
    assert torch.equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    output = run("train", few, "--output", tmp_path / "b", status=2)
    assert "already holds a run: add --resume" in output


def test_resuming_refuses_other_settings_or_data(few: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("train", few, "--output", folder, "--epochs", 1, *SMALL)
    before = (folder / "last.pt").read_bytes()
    again = ["train", few, "--output", folder, "--resume"]
    output = " ".join(run(*again, "--optimizer", "adamw", "--word-size", 16, "--omega", "l2", status=2).split())
    assert "was started with omega negentropy, got l2; optimizer sgd, got adamw: omit these options" in output
    assert "(only epochs and minutes may change)" in output
    other = corpus.write(tmp_path / "other", {"train": 5, "dev": 3, "test": 3})
    assert "was started with other data" in run("train", other, *again[2:], status=2)
    assert "--resume and --force exclude each other" in run(*again, "--force", status=2)
    assert (folder / "last.pt").read_bytes() == before
    assert "after 1 epochs" in run(*again)  # as many as before
    assert "after 2 epochs" in run(*again, "--epochs", 2, *SMALL)
    assert "after 1 epochs" in run("train", few, "--output", folder, "--epochs", 1, *SMALL, "--force")


def test_resumes_if_vectors_determine_the_word_size(few: Path, tmp_path: Path) -> None:
    vectors, others = tmp_path / "some.vec", tmp_path / "others.vec"
    for path in (vectors, others):
        path.write_text("rome 1 2 3\n")
    command = ["train", few, "--output", tmp_path / "run", "--word-size", 9, "--resume", "--embeddings"]
    run(*command, vectors, "--epochs", 1)
    assert "after 2 epochs" in run(*command, vectors, "--epochs", 2)
    assert "others.vec: omit these options" in " ".join(run(*command, others, status=2).split())
    run("train", few, "--output", tmp_path / "none", "--epochs", 1, *SMALL)
    command[3] = tmp_path / "none"
    assert "none was started with embeddings None, got " in " ".join(run(*command, vectors, status=2).split())


def test_runs_of_older_versions_can_be_resumed(few: Path, tmp_path: Path) -> None:
    vectors, folder = tmp_path / "some.vec", tmp_path / "run"
    vectors.write_text("rome 1 2 3\n")
    command = ["train", few, "--output", folder, "--embeddings", vectors, "--resume", *SMALL]
    run(*command, "--epochs", 1)
    config = json.loads((folder / "config.json").read_text())
    del config["fingerprint"], config["embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "after 2 epochs" in run(*command, "--epochs", 2)


@pytest.fixture
def copy(few: Path, tmp_path: Path) -> Path:
    """A run of one epoch, which a test can damage."""
    run("train", few, "--output", tmp_path / "copy", "--epochs", 1, *SMALL)
    return tmp_path / "copy"


def test_damaged_files_of_a_run_are_reported(copy: Path, few: Path) -> None:
    def error(*args: object) -> str:
        output = run(*args, status=2, text="")
        assert output.count("\n") == 1
        return output

    evaluate, resume = ("evaluate", copy, few), ("train", few, "--output", copy, "--epochs", 2, "--resume")
    for name, command in (("best.pt", evaluate), ("last.pt", resume)):
        content = (copy / name).read_bytes()
        for damaged in (b"", b"text", content[: len(content) // 2], pickle.dumps({"a": print})):
            (copy / name).write_bytes(damaged)
            assert f"{copy / name} cannot be read as a checkpoint: it is damaged" in error(*command)
        (copy / name).write_bytes(content)
    other = torch.load(copy / "best.pt", weights_only=True)
    torch.save({**other, "words.weight": torch.zeros(3, 2)}, copy / "best.pt")
    assert "best.pt cannot be read as the weights of this model: size mismatch for words.weight" in error("tag", copy)
    torch.save({"model": 1}, copy / "last.pt")
    assert "last.pt cannot be read as a checkpoint of this model: " in error(*resume)
    (copy / "config.json").write_text("{}")
    assert f"{copy / 'config.json'} cannot be read as the configuration of a run: 'settings' is missing" in error(
        *evaluate
    )
    (copy / "config.json").write_text("{no")
    assert f"{copy / 'config.json'} cannot be read as JSON" in error(*evaluate)


def test_bad_input_is_reported_before_training(few: Path, tmp_path: Path) -> None:
    vectors, folder = tmp_path / "some.vec", tmp_path / "run"
    vectors.write_text("rome 1 nan 3\n")
    output = run("train", few, "--output", folder, "--embeddings", vectors, status=2)
    assert "some.vec must hold finite numbers, got others for 1 words, the first of them 'rome'" in " ".join(
        output.split()
    )
    data = corpus.write(tmp_path / "data", {"train": 5, "dev": 3, "test": 3})
    (data / "dev.tsv").write_text("it\tO\nnew\tB-NEW\n")
    assert "dev.tsv, line 2: the tag 'B-NEW' has a type" in " ".join(
        run("train", data, "--output", folder, status=2).split()
    )
    assert not folder.exists()
    assert "must not be the folder of the data" in run("train", data, "--output", data, "--force", status=2)


def test_a_diverging_loss_suggests_a_smaller_learning_rate(few: Path, tmp_path: Path) -> None:
    output = run("train", few, "--output", tmp_path / "run", "--step-size", "1e30", status=2)
    assert "in epoch 2: try a learning rate below 1e+30" in " ".join(output.split())


def test_trains_on_a_very_long_word(tmp_path: Path) -> None:
    data = corpus.write(tmp_path / "data", {"train": 5, "dev": 3, "test": 3})
    with (data / "train.tsv").open("a") as file:
        file.write(f"\n{'x' * 200_000}\tO\n")
    assert "after 1 epochs" in run("train", data, "--output", tmp_path / "run", "--epochs", 1, *SMALL)
    _, vocabulary, _ = tagging.load(tmp_path / "run")
    assert "x" * 200_000 in vocabulary.words


def test_a_run_interrupted_in_the_second_epoch_can_be_used(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = tagging.NamedEntities.batches

    def interrupted(self: tagging.NamedEntities, epoch: int) -> object:
        if epoch == 1:
            raise KeyboardInterrupt
        return batches(self, epoch)

    monkeypatch.setattr(tagging.NamedEntities, "batches", interrupted)
    output = run("train", few, "--output", tmp_path / "run", *SMALL, status=130)
    assert "can be used now, or continued with --resume" in output
    assert "F1" in run("evaluate", tmp_path / "run", few)


def test_a_run_interrupted_before_the_first_epoch_cannot_be_used(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(tagging, "NamedEntities", interrupted)
    output = run("train", few, "--output", tmp_path / "run", *SMALL, status=130)
    assert "run has no finished epoch yet; continue with --resume" in " ".join(output.split())
    assert "already holds a run" in run("train", few, "--output", tmp_path / "run", *SMALL, status=2)


def test_a_run_interrupted_in_the_first_epoch_starts_again(
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


def test_a_run_interrupted_in_the_first_epoch_keeps_its_settings(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: tagging.NamedEntities, epoch: int) -> object:
        raise KeyboardInterrupt

    folder, options = tmp_path / "run", ["--omega", "l2", "--gamma", 10, "--word-size", 30, "--epochs", 1]
    with monkeypatch.context() as patch:
        patch.setattr(tagging.NamedEntities, "batches", interrupted)
        output = " ".join(run("train", few, "--output", folder, *options, status=130).split())
    assert f"interrupted: {folder} has no finished epoch yet; continue with --resume" in output
    for command in (["tag", folder], ["evaluate", folder, few], ["plot", folder, "Rome"]):
        assert (
            f"{folder} has no weights, since no epoch was finished: continue with 'bellmax ner train --resume'"
            in " ".join(run(*command, text="", status=2).split())
        )
    before = (folder / "config.json").read_bytes()
    output = run("train", few, "--output", folder, "--resume", "--gamma", 3, status=2)
    assert "was started with gamma 10.0, got 3.0" in " ".join(output.split())
    run("train", few, "--output", folder, "--resume")
    assert (folder / "config.json").read_bytes() == before
    run("train", few, "--output", tmp_path / "whole", *options)
    assert torch.equal(weights(folder), weights(tmp_path / "whole"))


def test_an_interrupt_while_reading_data_leaves_no_run(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(tagging, "read", interrupted)
    output = run("train", few, "--output", tmp_path / "run", *SMALL, status=130)
    assert "interrupted before the training began: run the same command again" in " ".join(output.split())


def test_training_ends_with_the_next_commands(few: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    output = run("train", few, "--output", folder, "--epochs", 1, *SMALL).splitlines()
    assert output[-1] == f"next: bellmax ner evaluate '{folder}' {few}, or bellmax ner tag '{folder}'"


def test_a_run_of_another_application_is_refused(few: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("train", few, "--output", folder, "--epochs", 1, *SMALL)
    settings = json.loads((folder / "config.json").read_text())["settings"]
    (folder / "config.json").write_text(json.dumps({"source": "fr", "target": "en", "settings": settings}))
    message = (
        f"{folder / 'config.json'} cannot be read as the configuration of a run: 'source' is not a setting of "
        "'bellmax ner train'; is this a run of another application?"
    )
    for command in (["tag", folder], ["train", few, "--output", folder, "--resume"]):
        assert message in run(*command, text="", status=2)


@pytest.mark.parametrize("dropout", ["-0.1", "1", "1.5", "nan"])
def test_dropout_outside_of_0_to_1_is_refused(few: Path, tmp_path: Path, dropout: str) -> None:
    output = run("train", few, "--output", tmp_path / "run", "--dropout", dropout, status=2)
    assert f"dropout must be at least 0 and below 1, got {float(dropout)}" in output
    assert not (tmp_path / "run").exists()


def test_warms_up_with_the_surrogate_loss(few: Path, tmp_path: Path) -> None:
    options = ["--epochs", 2, "--omega", "l2", *SMALL]
    for name, more in {"a": [], "b": ["--loss", "relaxed", "--warm-up", 2], "c": ["--loss", "relaxed"]}.items():
        run("train", few, "--output", tmp_path / name, *options, *more)
    assert torch.equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not torch.equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_word_embeddings_start_from_vectors(few: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "some.vec"
    vectors.write_text("rome 1 2 3\nunseen 4 5 6\n")
    small = ["--epochs", 1, "--step-size", 1e-9, "--embeddings", vectors]
    run("train", few, "--output", tmp_path / "run", *small)
    model, vocabulary, config = tagging.load(tmp_path / "run")
    assert config.word_size == 3
    for word, vector in {"Rome": [1, 2, 3], "unseen": [4, 5, 6]}.items():
        row = model.words.weight[1 + vocabulary.words.index(word)]
        torch.testing.assert_close(row, torch.tensor(vector).float())


def test_table_is_written_and_resumed(few: Path, tmp_path: Path) -> None:
    options = ["table", few, "--output", tmp_path, "--epochs", 1, "--jobs", 2, "--omega", "l2=2", "--seed", 3, *SMALL]
    output = run(*options)
    assert f"{tmp_path / few.name / 'l2-relaxed'}: begun" in output.replace("\n", "")
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [(row["omega"], row["gamma"], row["loss"]) for row in rows] == [("l2", 2, "surrogate"), ("l2", 2, "relaxed")]
    assert all(0 <= row["test_f1"] <= 100 and row["epochs"] == 1 for row in rows)
    text = (tmp_path / "table.md").read_text()
    assert "| l2 | 2 | surrogate | 3 | " in text
    output = " ".join(run(*options, "--step-size", 0.5, "--jobs", 1, status=2).split())
    assert "failed (see log.txt there): Error: " in output
    assert "was started with step_size 0.1, got 0.5: omit these options" in output
    assert (tmp_path / "table.md").read_text() == text


def test_table_of_several_seeds_uses_finished_runs(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_this_process(monkeypatch, run)
    small = ["--epochs", 1, "--omega", "l2", "--warm-up", 0, *SMALL]
    for loss, seed in product(("surrogate", "relaxed"), (0, 1)):
        folder = tmp_path / few.name / f"l2-{loss}-{seed}"
        run("train", few, "--output", folder, "--loss", loss, "--seed", seed, *small)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*/best.pt")}
    run("table", few, "--output", tmp_path, "--seed", 0, "--seed", 1, *small)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*/*/best.pt")}
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [(row["loss"], row["seed"]) for row in rows] == list(product(("surrogate", "relaxed"), (0, 1)))
    mean = sum(row["dev_f1"] for row in rows[:2]) / 2
    text = (tmp_path / "table.md").read_text()
    assert re.search(rf"\| l2 \| 1 \| surrogate \| mean \| \S+ \|  \| {mean:.2f} \|", text)


def test_a_table_does_not_replace_other_files(few: Path, tmp_path: Path) -> None:
    for name in ("table.md", "table.json"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("mine")
        output = run("table", few, "--output", folder, status=2)
        assert f"{name} was not written by this command. Move it, or choose another folder" in " ".join(output.split())
        assert [path.name for path in folder.iterdir()] == [name]


def test_numbers_of_the_paper_are_in_the_table() -> None:
    numbers = dict.fromkeys(
        ("gamma", "seed", "epochs", "best_epoch", "dev_f1", "tags_per_word", "seconds_per_epoch"), 1
    )
    row = {"data": "conll2002_nl", "omega": "l2", "loss": "relaxed", "test_f1": 78.28, **numbers}
    assert "| l2 | 1 | relaxed | 1 | **78.28** | 85.90 | 1.00 | 1 of 1 | 1.00 | 1 |" in markdown([row])


@pytest.mark.parametrize(
    ("truth", "guess", "right", "predicted", "expected"),
    [
        ("B-PER I-PER O B-LOC", "B-PER O O B-LOC", 1, 2, 2),  # an incomplete entity is wrong
        ("B-PER I-PER B-PER", "B-PER I-PER I-PER", 0, 1, 2),
        ("B-LOC O B-PER", "B-ORG O B-PER", 1, 2, 2),  # an entity of another type is wrong
        ("O O B-PER", "O O O", 0, 0, 1),
    ],
)
def test_f1_counts_complete_entities(truth: str, guess: str, right: int, predicted: int, expected: int) -> None:
    scores = tagging.entity_scores([truth.split()], [guess.split()])
    assert scores["precision"] == pytest.approx(100 * right / max(predicted, 1))
    assert scores["recall"] == pytest.approx(100 * right / expected)
    assert scores["f1"] == pytest.approx(200 * right / (predicted + expected))


def test_table_warms_up_under_a_sparse_omega_only(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    monkeypatch.setattr(commands, "train_table", lambda *args: tables.append(args[1]))
    names = "negentropy", "softmax", "l2", "sparsemax", "entmax"
    run("table", data, "--output", tmp_path / "runs", "--warm-up", 2, *(f"--omega={name}" for name in names))
    options = [options for _, options in tables[0].values()]
    assert {str(option["omega"]): option["warm_up"] for option in options} == dict(
        zip(names, [None, None, 2, 2, 2], strict=True)
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "nowhere", "--output", "x"], "nowhere is not a folder"),
        (["evaluate", "nowhere", "nowhere"], "nowhere is not a run of 'bellmax ner train'"),
        (
            ["train", "DATA", "--output", "RUN", "--omega", "max"],
            "omega must be one of 'negentropy', 'softmax', 'l2', 'sparsemax', 'entmax'",
        ),
        (["train", "DATA", "--output", "RUN", "--loss", "hinge"], "loss must be one of 'surrogate', 'relaxed'"),
        (["train", "DATA", "--output", "RUN", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["table", "nowhere", "--output", "RUN"], "nowhere is not a folder"),
        (
            ["table", "DATA", "--output", "RUN", "--omega", "max"],
            "omega must be one of 'negentropy', 'softmax', 'l2', 'sparsemax', 'entmax'",
        ),
        (["table", "DATA", "--output", "RUN", "--omega", "l2=x"], "must be NAME or NAME=γ, such as l2=10, got 'l2=x'"),
        (["table", "DATA", "--output", "RUN", "--embeddings", "a"], "--embeddings must be FOLDER=FILE, with a FOLDER"),
    ],
)
def test_errors_are_one_sentence(data: Path, tmp_path: Path, args: list[str], message: str) -> None:
    folders = {"DATA": str(data), "RUN": str(tmp_path / "run")}
    output = run(*(folders.get(arg, arg) for arg in args), status=2)
    assert message in " ".join(output.split())
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
