"""The example that learns through programs recovers scores from solutions."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("learn_programs")


@pytest.mark.parametrize("omega", ["negentropy", "sparsemax", "hard"])
def test_item_values_are_learned_from_optimal_sets(example: ModuleType, omega: str) -> None:
    data, test = (example.choices(40, kinds=2, noise=0.0, seed=seed) for seed in (0, 1))
    model, _ = example.fit_values(data, omega, steps=40)
    learned = example.evaluate_values(test, *model)
    equal = example.evaluate_values(test, torch.zeros(6), torch.tensor(1.0))
    assert equal["regret (%)"] > 10
    assert learned["regret (%)"] < 1
    assert learned["optimal sets (%)"] > 60
    assert learned["correlation"] > 0.95


def test_logistic_regression_mistakes_large_items_for_bad_ones(example: ModuleType) -> None:
    model, _ = example.fit_values(example.choices(40, kinds=2, noise=0.0, seed=0), "logistic regression", steps=40)
    result = example.evaluate_values(example.choices(40, kinds=2, noise=0.0, seed=1), *model)
    assert result["weight of size"] < 0.1
    assert result["regret (%)"] > 5


def test_pair_scores_are_learned_from_structures(example: ModuleType) -> None:
    data, test = (example.folds(count, seed=count, lengths=(18, 20)) for count in (60, 100))
    model, _ = example.fit_folds(data, "negentropy", steps=40)
    f1 = {
        name: example.evaluate_folds(test, *scores)["F1"]
        for name, scores in (("learned", model), ("true", example.TRUE))
    }
    assert example.evaluate_folds(test, torch.zeros(4, 4), torch.tensor(0.0))["F1"] < 0.2
    assert f1["learned"] > max(0.5, example.evaluate_folds(test, *example.MOST_PAIRS)["F1"], f1["true"] - 0.1)
    scores = example.evaluate_folds(test, *model)
    assert scores["CG"] > scores["AU"] > scores["GU"] > scores["AC"]


def test_tables_and_figures_are_made(example: ModuleType) -> None:
    for learn, counts in ((example.learn_knapsack, (4, 8)), (example.learn_folding, (2, 3))):
        text, figure = learn(counts, seeds=(0, 1), tests=10, steps=3)
        assert "| negentropy |" in text
        assert all(ax.has_data() or ax.patches for ax in figure.axes)
        figure.canvas.draw()
