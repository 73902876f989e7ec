"""The example that learns the costs of maps recovers them from shortest paths."""

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
    return import_module("learn_maps")


def test_costs_are_learned_from_paths(example: ModuleType) -> None:
    data, test = example.draw_maps(30, seed=0, size=10), example.draw_maps(60, seed=1, size=10)
    equal = example.evaluate(test, torch.ones_like(test.costs))["regret (%)"]
    assert equal > 8
    for method, loss in example.METHODS.items():
        network = example.fit(data, loss, steps=60, seed=0)
        with torch.no_grad():
            learned = example.evaluate(test, network(test.colors))
        assert learned["regret (%)"] < equal / 1.5, method
        assert learned["correlation"] > 0.5, method


def test_true_costs_have_no_regret(example: ModuleType) -> None:
    data = example.draw_maps(5, seed=0)
    assert torch.equal(data.paths.sum((-2, -1)), (data.paths > 0).sum((-2, -1)).float())
    exact = example.evaluate(data, data.costs)
    assert exact["optimal paths (%)"] == 100
    assert exact["regret (%)"] == pytest.approx(0, abs=1e-4)
    noisy = example.draw_maps(5, seed=0, error=0.5)
    assert torch.equal(noisy.costs, data.costs)
    assert not torch.equal(noisy.paths, data.paths)


def test_imle_compares_two_shortest_paths(example: ModuleType) -> None:
    costs, target = torch.rand(3, 4, 5, requires_grad=True), torch.rand(3, 4, 5)
    torch.manual_seed(0)
    path = example.IMLE.apply(costs, 2.0)
    torch.manual_seed(0)
    noisy = (costs + torch.empty_like(costs).exponential_().log()).detach()
    assert torch.equal(path, example.shortest(noisy).best_path())
    (gradient,) = torch.autograd.grad((path * target).sum(), costs)
    moved = example.shortest(noisy + 2 * target).best_path()
    assert gradient.any()
    assert torch.equal(gradient, (moved - path.detach()) / 2)


def test_table_and_figure_are_made(example: ModuleType) -> None:
    text, figure = example.learn(seeds=(0, 1), maps=3, tests=4, steps=2)
    assert "| straight-through |" in text
    assert len(figure.axes) == 4
    assert all(ax.has_data() for ax in figure.axes)
    figure.canvas.draw()


@pytest.mark.parametrize("option", ["--repetitions", "--maps", "--steps", "--threads"])
def test_options_are_checked(example: ModuleType, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err
