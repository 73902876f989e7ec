"""All subcommands of ``bellmax translation`` on a toy language."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

from bellmax.nn import SegmentationAttention
from bellmax_apps.translation import translating
from bellmax_apps.translation.commands import app
from bellmax_apps.translation.translating import Translating

from ..processes import train_in_this_process
from . import language

SMALL = ["--size", "16", "--tokens", "120", "--dropout", "0"]
L2 = ["--attention", "structured", "--omega", "l2"]


def run(*args: object, text: str | None = None, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("l2") / "run"
    options = ["--epochs", 6, *L2, "--step-size", 0.01, *SMALL]
    output = run("train", data, "--output", folder, *options)
    assert re.search(r"epoch   6: loss \d+\.\d+, dev bleu \d+\.\d+", output)
    return folder


def weights(folder: Path) -> torch.Tensor:
    return torch.cat(
        [t.flatten().double() for t in torch.load(folder / "last.pt", weights_only=True)["model"].values()]
    )


def test_translates_empty_unknown_and_long_lines(trained: Path) -> None:
    output = run("translate", trained, text=f"un deux\n\nzzz yyy\n{'trois ' * 500}\n")
    lines = output.split("\n")
    assert len(lines) == 5
    assert lines[0]
    assert lines[1] == ""


def test_evaluates(trained: Path, data: Path) -> None:
    output = run("evaluate", trained, data, "--width", 2)
    assert re.search(r"BLEU +\d+\.\d\d +nrefs:1", output)
    attended = float(re.search(r"words attended +(\d+\.\d+)", output)[1])
    assert 0 < attended <= 6
    nothing = float(re.search(r"no word +(\d+\.\d\d) % of the target words have no weight above 0\n", output)[1])
    assert 0 <= nothing <= 100
    assert run("evaluate", trained, data, "--split", "dev", "--width", 1) != output


@pytest.mark.parametrize("width", [1, 2])
def test_evaluate_counts_words_that_attend_to_nothing(trained: Path, width: int) -> None:
    model, source, target, _ = translating.load(trained)
    pairs = language.pairs(6, seed=2)
    with torch.no_grad():
        model.attention.transitions[1, 0] = -1e3  # no segment can start
    scores = translating.evaluate(model, source, target, pairs, width)
    assert (scores["nothing"], scores["attended"], scores["clearly"]) == (1, 0, 0)
    with torch.no_grad():
        model.attention.transitions.zero_()
        model.attention.weight.zero_()
    scores = translating.evaluate(model, source, target, pairs, width)
    lengths = [len(a.split()) + 1 for a, _ in pairs]
    assert scores["nothing"] == 0
    assert min(lengths) <= scores["attended"] <= max(lengths)


def test_evaluate_averages_over_all_target_words(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    model, source, target, _ = translating.load(trained)
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.05, 0.95, 0.0], [0.0, 1.0, 0.0]])
    translations = [translating.Translation([4, 5, 6], 0.0, weights), translating.Translation([4], 0.0, weights[1:2])]
    monkeypatch.setattr(translating, "translate_all", lambda *_: translations)
    scores = translating.evaluate(model, source, target, [("un deux", "DEUX UN"), ("un", "UN")], width=1)
    assert (scores["nothing"], scores["attended"], scores["clearly"]) == (0.25, 1.25, 0.75)


def test_evaluate_of_empty_translations(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    model, source, target, _ = translating.load(trained)
    monkeypatch.setattr(translating, "translate_all", lambda *_: [translating.Translation([], 0.0, torch.empty(0, 2))])
    scores = translating.evaluate(model, source, target, [("un", "UN")], width=1)
    assert (scores["nothing"], scores["attended"], scores["clearly"]) == (0, 0, 0)


def test_draws_attention(trained: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    run("attention", trained, "un deux trois", "--output", picture)
    alone = matplotlib.image.imread(picture)
    run("attention", trained, "un deux trois", "--output", picture, "--beside", trained, "--force")
    assert alone.std() > 0
    assert matplotlib.image.imread(picture).shape[1] > alone.shape[1]


def test_resumed_equals_uninterrupted(data: Path, tmp_path: Path) -> None:
    small = [*SMALL, "--cool-down", "0"]
    run("train", data, "--output", tmp_path / "a", "--epochs", 2, *small)
    run("train", data, "--output", tmp_path / "b", "--epochs", 1, *small)
    run("train", data, "--output", tmp_path / "b", "--epochs", 2, "--resume")
    assert torch.equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert "already holds a run" in run("train", data, "--output", tmp_path / "b", status=2)


def test_resuming_refuses_other_settings(data: Path, tmp_path: Path) -> None:
    run("train", data, "--output", tmp_path, "--epochs", 1, *SMALL)
    output = run("train", data, "--output", tmp_path, "--resume", *L2, "--source", "en", status=2)
    message = (
        f"{tmp_path} was started with source fr, got en; attention dot, got structured; omega negentropy, got l2: "
        "omit these options"
    )
    assert message in " ".join(output.split())


def test_a_run_of_version_0_2_can_be_used_and_resumed(data: Path, trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    path = copy / "config.json"
    values = json.loads(path.read_text())
    assert (values["attention"], values.pop("omega")) == ("structured", "l2")
    path.write_text(json.dumps(values | {"attention": "l2"}))
    text = "un deux\n"
    assert run("translate", copy, text=text) == run("translate", trained, text=text)
    run("train", data, "--output", copy, "--epochs", 7, "--resume")
    values = json.loads(path.read_text())
    assert (values["attention"], values["omega"]) == ("structured", "l2")


def test_defaults_match_the_page_of_results() -> None:
    page = Path(__file__).parents[2] / "results/translation.md"
    lines = page.read_text().replace("\\\n", "").splitlines()
    command = next(line for line in lines if line.startswith("bellmax translation table"))
    options = dict(re.findall(r"--([a-z-]+) (\S+)", command))
    config = translating.Config()
    assert (str(config.size), str(config.tokens)) == (options["size"], options["tokens"])
    for name in ("epochs", "step_size", "decay", "cool_down"):
        assert getattr(config.settings, name) == float(options[name.replace("_", "-")])


def test_a_line_that_is_not_utf8_is_reported(trained: Path) -> None:
    result = CliRunner().invoke(app, ["translate", str(trained)], input=b"un\nd\xe9ux\n")
    assert result.exit_code == 2
    assert result.output.endswith("Error: standard input, line 2: must be UTF-8, got b'd\\xe9ux'\n")


def test_damaged_files_of_a_run_are_reported(trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    for name, message in (
        ("best.pt", "cannot be read as a checkpoint: it is damaged"),
        ("source.json", "cannot be read as the vocabulary of a run: 'pieces' is missing"),
        ("config.json", "cannot be read as the configuration of a run: 'settings' is missing"),
    ):
        (copy / name).write_text("{}")
        assert f"{copy / name} {message}" in run("translate", copy, text="", status=2)


def test_word_pieces_can_be_trained_and_resumed(data: Path, tmp_path: Path) -> None:
    run("train", data, "--output", tmp_path, "--epochs", 1, "--pieces", 40, *SMALL)
    run("train", data, "--output", tmp_path, "--epochs", 2, "--resume")
    assert len(json.loads((tmp_path / "history.json").read_text())) == 2
    assert run("translate", tmp_path, text="un deux\n").endswith("\n")


def test_table_is_written_and_uses_finished_runs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_this_process(monkeypatch, run)
    options = [
        "table",
        data,
        "--output",
        tmp_path,
        "--epochs",
        1,
        "--jobs",
        2,
        "--pairs",
        "fr-en",
        "--width",
        1,
        *SMALL,
    ]
    run(*options)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["attention"] for row in rows] == [
        "dot-negentropy",
        "structured-negentropy",
        "structured-l2",
        "dot-sparsemax",
    ]
    text = (tmp_path / "table.md").read_text()
    assert "## fr → en" in text
    assert re.search(r"\| dot-negentropy \| 0 \| \S+ \| \+0.00 \| 27.96 \|", text)  # 27.96 is in the paper
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*/best.pt")}
    run(*options)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*/*/best.pt")}
    assert json.loads((tmp_path / "table.json").read_text()) == rows


def test_table_of_several_seeds(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_this_process(monkeypatch, run)
    options = ["--epochs", 1, "--pairs", "fr-en", "--attention", "structured-l2", "--width", 1, *SMALL]
    options += ["--seed", 1, "--seed", 2]
    run("table", data, "--output", tmp_path, *options)
    assert not torch.equal(*(weights(tmp_path / "fr-en" / name) for name in ("structured-l2-1", "structured-l2-2")))
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["seed"] for row in rows] == [1, 2]
    text = (tmp_path / "table.md").read_text()
    mean = sum(row["bleu"] for row in rows) / 2
    assert f"| structured-l2 | mean | {mean:.2f} | +0.00 |" in text
    assert "negentropy" not in text


def test_cool_down_reduces_the_learning_rate(data: Path, tmp_path: Path) -> None:
    options = ["--epochs", 3, "--cool-down", 1, "--step-size", 0.004, "--decay", 1.0, *SMALL]
    run("train", data, "--output", tmp_path, *options)
    history = json.loads((tmp_path / "history.json").read_text())
    assert [record["step_size"] for record in history] == [0.004, 0.004, 0.002]


def test_gamma_starts_large_and_falls(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    forward = SegmentationAttention.forward

    def recorded(self: SegmentationAttention, *args: object, **more: object) -> object:
        used.append((self.training, self.omega.gamma))
        return forward(self, *args, **more)

    monkeypatch.setattr(SegmentationAttention, "forward", recorded)
    options = [*L2, "--gamma-start", 4, "--cool-down", 1, *SMALL]
    run("train", data, "--output", tmp_path / "whole", "--epochs", 3, *options)
    assert list(dict.fromkeys(used)) == [(True, 40), (False, 10), (True, 20), (True, 10)]
    with monkeypatch.context() as patch:
        patch.setattr(Translating, "batches", interrupted_in_the_second(Translating.batches))
        run("train", data, "--output", tmp_path / "parts", "--epochs", 3, *options, status=130)
    run("train", data, "--output", tmp_path / "parts", "--epochs", 3, "--resume")
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_run_interrupted_in_the_first_epoch_keeps_its_settings(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Translating, epoch: int) -> object:
        raise KeyboardInterrupt

    folder, options = tmp_path / "run", [*L2, "--epochs", 1, *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(Translating, "batches", interrupted)
        output = " ".join(run("train", data, "--output", folder, *options, status=130).split())
    assert f"interrupted: {folder} has no finished epoch yet; continue with --resume" in output
    output = " ".join(run("translate", folder, text="", status=2).split())
    assert f"{folder} has no weights, since no epoch was finished: continue with 'bellmax translation train" in output
    before = (folder / "config.json").read_bytes()
    output = run("train", data, "--output", folder, "--resume").splitlines()
    assert (
        output[-1] == f"next: bellmax translation evaluate {folder} {data}, or bellmax translation translate {folder}"
    )
    assert (folder / "config.json").read_bytes() == before
    run("train", data, "--output", tmp_path / "whole", *options)
    assert torch.equal(weights(folder), weights(tmp_path / "whole"))


@pytest.mark.parametrize("name", ["dropout", "smoothing"])
def test_probabilities_outside_of_0_to_1_are_refused(data: Path, tmp_path: Path, name: str) -> None:
    output = run("train", data, "--output", tmp_path / "run", f"--{name}", 1.5, status=2)
    assert f"{name} must be at least 0 and below 1, got 1.5" in output
    assert not (tmp_path / "run").exists()


def interrupted_in_the_second(batches: Callable[..., object]) -> Callable[..., object]:
    """Replacement of ``Translating.batches`` that raises ``KeyboardInterrupt`` in the second epoch."""

    def interrupted(self: Translating, epoch: int) -> object:
        if epoch == 1:
            raise KeyboardInterrupt
        return batches(self, epoch)

    return interrupted


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "nowhere", "--output", "x"], "nowhere is not a folder"),
        (["translate", "nowhere"], "nowhere is not a run of 'bellmax translation train'"),
        (["train", "DATA", "--output", "RUN", "--source", "de"], "must hold a file for train that ends in .de"),
        (["train", "DATA", "--output", "RUN", "--attention", "max"], "attention must be one of 'dot', 'structured'"),
        (["train", "DATA", "--output", "RUN", "--attention", "softmax"], "write --attention dot --omega negentropy"),
        (["train", "DATA", "--output", "RUN", "--omega", "max"], "omega must be one of 'negentropy', 'softmax'"),
        (["train", "DATA", "--output", "RUN", "--longest", "1"], "no training pair has 1 to 1 tokens"),
        (
            ["train", "DATA", "--output", "RUN", "--epochs", "2", "--cool-down", "3"],
            "cool_down must be from 0 to the 2 epochs, got 3",
        ),
        (["train", "DATA", "--output", "RUN", "--gamma-start", "0"], "gamma_start must be above 0, got 0.0"),
        (["table", "DATA", "--output", "RUN", "--pairs", "fren"], "pairs must be SOURCE-TARGET, such as fr-en"),
        (["table", "DATA", "--output", "RUN", "--pairs", "fr-xx"], "must hold a file for train that ends in .xx"),
        (
            ["table", "DATA", "--output", "RUN", "--attention", "max-l2"],
            "attention must be one of 'dot', 'structured', got 'max'",
        ),
        (
            ["table", "DATA", "--output", "RUN", "--attention", "sparsemax"],
            "attention must be ATTENTION-OMEGA, such as structured-l2, got 'sparsemax': write dot-sparsemax",
        ),
    ],
)
def test_errors_are_one_sentence(data: Path, tmp_path: Path, args: list[str], message: str) -> None:
    folders = {"DATA": data, "RUN": tmp_path / "run"}
    output = run(*(folders.get(arg, arg) for arg in args), status=2, text="")
    assert message in " ".join(output.split())
    assert "Traceback" not in output
