"""The examples that draw the figures of the documentation run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("clusters", "figure"),
        ("ctc", "figure"),
        ("trees", "figure"),
        ("programs", "gaps"),
        ("programs", "monotone"),
        ("programs", "transducer"),
        ("programs", "segments"),
    ],
)
def test_figures_are_drawn(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    figure = getattr(import_module(module), name)()
    axes = [ax for figure_or_subfigure in (figure, *figure.subfigs) for ax in figure_or_subfigure.axes]
    assert any(ax.has_data() for ax in axes)


def test_the_denoising_example_removes_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    denoise = import_module("denoise")
    omega = denoise.OMEGAS["negentropy"]
    clean = denoise.picture("dp", 20, 36)
    noisy = denoise.with_noise(clean, seed=7)
    black = denoise.train(omega, ("tree",), steps=25)(noisy).detach()
    wrong = ((black > 0.5) != clean).double().mean()
    assert wrong < ((noisy > 0) != clean).double().mean() / 2
