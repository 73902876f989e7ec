"""The example that learns to align proteins, on synthetic pairs."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

import bellmax as bx

pytest.importorskip("matplotlib")
pytest.importorskip("parasail")
pytest.importorskip("rich")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


def lines(number: int = 8, seed: int = 0) -> list[str]:
    """Lines of pairs: random proteins, and copies with half of the residues mutated and a piece deleted."""
    draw = random.Random(seed)
    written = []
    for n in range(number):
        a = "".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=20 + n))
        changed = "".join(draw.choice("ACDEFGHIKLMNPQRSTVWY") if draw.random() < 0.5 else letter for letter in a)
        lacks = draw.randint(5, 9)
        steps = ":" * lacks + "1" * 3 + "." * (len(a) - lacks - 3)
        fields = f"chain{n}", f"copy{n}", "0.4", "0.6", "1.5", a, changed[:lacks] + changed[lacks + 3 :], steps
        written.append("\t".join(fields) + "\n")
    return written


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("protein_pairs")


@pytest.fixture
def proteins(pairs: ModuleType) -> ModuleType:
    return import_module("proteins")


def test_lines_are_read(pairs: ModuleType) -> None:
    (pair,) = pairs.read(["x\ty\t0.7\t0.2\t1.5\tARND\tCRN\t12:.1\n"])
    assert pair.a.tolist() == [0, 1, 2, 3]
    assert pair.b.tolist() == [4, 1, 2]
    assert pair.truth.tolist() == [[1, 1], [2, 2]]
    assert pair.similarity == 0.7


def test_folds_share_no_chain_and_no_sequence(pairs: ModuleType) -> None:
    text = lines()
    fields = [line.split("\t") for line in text]
    fields[3][1], fields[5][0] = fields[0][1], fields[3][0]  # 0 – 3 – 5 by names
    folds = pairs.split(pairs.read("\t".join(columns) for columns in fields), 3, seed=0)
    assert sum(map(len, folds)) == 8
    names = [frozenset().union(*(pair.names for pair in fold)) for fold in folds]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]


def test_f1_counts_near_pairs(pairs: ModuleType) -> None:
    truth = torch.tensor([[0, 0], [1, 1], [3, 2]])
    alignment = torch.tensor([[0, 0], [1, -1], [2, 1], [3, 4], [-1, -1]])
    assert pairs.f1(alignment, truth) == pytest.approx(2 * 1 / 6)
    assert pairs.f1(alignment, truth, within=2) == pytest.approx(2 * 2 / 6)


def test_the_best_alignments_equal_parasail(pairs: ModuleType) -> None:
    some = pairs.read(lines())
    batch = pairs.collate(some)
    ours = pairs.best(pairs.blosum62(), pairs.GAPS, batch)
    for aligned, theirs in zip(ours, pairs.by_parasail(batch), strict=True):
        assert aligned[: len(theirs)].tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", ["matrix", "convolution"])
@pytest.mark.parametrize("omega", ["negentropy", "sparsemax"])
def test_gradients_of_gaps_equal_finite_differences(
    kind: str, omega: str, pairs: ModuleType, proteins: ModuleType
) -> None:
    torch.manual_seed(0)
    model = proteins.Substitution()
    model = (model if kind == "matrix" else proteins.Convolution(model)).double().eval()
    batch = pairs.collate(pairs.read(lines(3)))

    def loss() -> torch.Tensor:
        return 1 - proteins.soft_f1(model(batch, proteins.OMEGAS[omega]), batch.truth).mean()

    with torch.no_grad():  # less certain, so that every gap has a gradient under a sparse Ω
        model.matrix.mul_(0.2)
        model.gaps.mul_(0.2)
    loss().backward()
    with torch.no_grad():
        for n in range(model.gaps.numel()):
            values = []
            for step in (1e-5, -2e-5):
                model.gaps.view(-1)[n] += step
                values.append(loss())
            model.gaps.view(-1)[n] += 1e-5
            torch.testing.assert_close(
                model.gaps.grad.view(-1)[n], (values[0] - values[1]) / 2e-5, rtol=1e-4, atol=1e-8
            )
    assert model.gaps.grad.count_nonzero() == model.gaps.numel()


@pytest.mark.parametrize("omega", ["negentropy", "sparsemax"])
def test_learning_improves_the_f1_score(omega: str, pairs: ModuleType, proteins: ModuleType) -> None:
    torch.manual_seed(0)
    model, some = proteins.Substitution(), pairs.read(lines())
    batch = pairs.collate(some)
    scores = []
    for _ in range(2):
        with torch.no_grad():
            scores.append(float(proteins.soft_f1(model(batch, proteins.OMEGAS[omega]), batch.truth).mean()))
        proteins.train(model, some, proteins.OMEGAS[omega], 20, "")
    assert scores[1] > scores[0] + 0.02


def test_the_command_learns_reports_plots_and_resumes(
    proteins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "pairs.txt", tmp_path / "run"
    data.write_text("".join(lines()), encoding="utf-8")
    command = ["proteins.py", str(data), "--output", str(output), "--folds", "2", "--epochs", "1", "1"]

    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "0"])
    with pytest.raises(SystemExit, match="0 of 2 folds are done"):
        proteins.main()

    monkeypatch.setattr(sys, "argv", command)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(proteins, "train", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(SystemExit, match="stopped; the same command goes on"):
            proteins.main()
    proteins.main()
    assert (output / "proteins.png").stat().st_size > 10_000
    table = (output / "table.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 2 + 4 + 8
    assert table in capsys.readouterr().out
    saved = torch.load(output / "negentropy-1.pt", weights_only=True)
    assert saved["results"]["convolution"]["most accurate"].shape == (4, 2)

    monkeypatch.setattr(proteins, "train", None)
    proteins.main()
    assert (output / "table.md").read_text(encoding="utf-8") == table

    monkeypatch.setattr(sys, "argv", [*command, "--seed", "1"])
    with pytest.raises(SystemExit, match="was made with"):
        proteins.main()


def test_padding_changes_nothing(pairs: ModuleType, proteins: ModuleType) -> None:
    torch.manual_seed(0)
    model, (short, *others) = proteins.Convolution(proteins.Substitution()).eval(), pairs.read(lines(3))
    with torch.no_grad():
        torch.nn.init.normal_(model.own_gaps.weight, std=0.1)
        alone, padded = (model(pairs.collate(some), bx.Negentropy())[0] for some in ([short], [short, *others]))
    torch.testing.assert_close(padded[: len(short.a), : len(short.b)], alone, rtol=1e-4, atol=1e-6)
