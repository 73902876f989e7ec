"""Contents of the figures."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from support.problems import potentials

import bellmax as bx
from bellmax import plots


@pytest.mark.parametrize("omega", ["negentropy", "l2"])
def test_alignment_shows_path_borders_and_series(omega: str, backend: str) -> None:
    x, y = potentials(7, 2).cumsum(0), potentials(9, 2, seed=1).cumsum(0)
    dtw = bx.DTW(torch.cdist(x, y).requires_grad_(), lengths=(6, 9), omega=omega)
    figure = Figure()
    ax = plots.alignment(dtw, x, y.numpy(), ax=figure.subplots())
    figure.savefig(io.BytesIO())
    path, pairs = dtw.expected_path.detach()[:6].numpy(), dtw.best_alignment()
    (image,), (line,), (borders,) = ax.images, ax.lines, ax.collections
    np.testing.assert_array_equal(image.get_array().filled(0), path)
    np.testing.assert_array_equal(line.get_xydata(), pairs[pairs[:, 0] >= 0].flip(1))
    left, above = ax.child_axes
    np.testing.assert_array_equal([feature.get_xdata() for feature in left.lines], x[:6].T)
    np.testing.assert_array_equal([feature.get_ydata() for feature in above.lines], y.T)
    inside = np.pad(path > 0, 1)
    walls = (inside[1:] | inside[:-1]).sum() + (inside[:, 1:] | inside[:, :-1]).sum()
    assert sum(np.ptp(segment, axis=0).sum() for segment in borders.get_segments()) == walls


def test_alignment_alone_or_without_a_path() -> None:
    ax = plots.alignment(bx.DTW(torch.full((3, 40), torch.inf)))
    assert not ax.child_axes
    assert not len(ax.lines[0].get_xydata())
    assert ax.get_aspect() == "auto"
    ax.figure.savefig(io.BytesIO())


def test_bad_input_is_named() -> None:
    for wrong, message in [
        (lambda: plots.alignment(bx.DTW(torch.zeros(2, 3, 4))), r"dtw must have no batch dimensions, got .* \(2,\)"),
        (lambda: plots.alignment(bx.DTW(torch.zeros(3, 4)), y=torch.zeros(3)), r"y must have shape \(4,\) or \(4, D\)"),
        (lambda: plots.alignment(bx.DTW(torch.zeros(3, 4)), torch.zeros(3, 1, 1)), r"x must have .* got \(3, 1, 1\)"),
        (
            lambda: plots.dag(bx.DAG([(0, 1)]).paths(torch.zeros(5, 1))),
            r"p must have no batch dimensions, got .* \(5,\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


@bx.program("i j")
def _fold(pair):
    n = pair.shape[0]
    best = {(i, i - 1): 0.0 for i in range(n + 1)}
    for width in range(n):
        for i in range(n - width):
            j = i + width
            options = (best[i, k - 1] + best[k + 1, j - 1] + pair[k, j] for k in range(i, j))
            best[i, j] = bx.max(best[i, j - 1], *options)
    return best[0, n - 1]


def test_a_program_has_an_arrow_for_each_edge_and_a_label_with_its_probability():
    p = _fold(torch.arange(36.0).reshape(6, 6), omega="sparsemax")
    ax = plots.program(p)
    arrows = [patch for patch in ax.patches if type(patch).__name__ == "FancyArrowPatch"]
    assert len(arrows) == p.hypergraph.num_edges
    texts = [text.get_text() for text in ax.texts]
    assert "pair[4, 5]: 1.00" in texts
    assert str(p.hypergraph.num_nodes - 1) in texts
    several = (p.hypergraph.tail_offset.diff() > 1).sum()
    assert len([line for line in ax.lines if line.get_marker() == "o"]) == several > 0


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (lambda: _fold(torch.zeros(2, 3, 3)), r"p must have no batch dimensions, got batch shape \(2,\)"),
        (lambda: _fold, "p must be the distribution that a call of a program returns, got Recursion"),
        (lambda: _fold(torch.zeros(12, 12)), "p must have at most 200 edges to be drawn, got"),
    ],
)
def test_programs_that_cannot_be_drawn(p, message):
    with pytest.raises(ValueError, match=message):
        plots.program(p())


def test_automaton_has_an_arrow_for_each_pair_of_states_and_each_start() -> None:
    rows = [("go", "on", 5, 1), ("go", "on", 6), ("on", "on", 2, -1), ("on", "go", -1)]
    drawn = bx.Automaton(rows, scores=[0.5, 0, -2, 0], start={"go": 0.25}, final={"on": 1.5, "go": 0})
    ax = plots.automaton(drawn, label_names=["a", "b", "c"])
    ax.figure.savefig(io.BytesIO())
    assert len(ax.patches) == 4
    texts = {text.get_text() for text in ax.texts} - {""}
    assert texts == {"go", "on", "5:1 0.5\n6", "c:ε -2", "ε", "0.25", "1.5"}
    words = bx.Automaton.lexicon({"yes": [5], "no": [6]}, scores=torch.zeros(2, requires_grad=True))
    assert "5:yes\n6:no" in {text.get_text() for text in plots.automaton(words).texts}


def test_automata_must_be_small() -> None:
    with pytest.raises(ValueError, match="automaton must have at most 200 arcs to be drawn, got 225"):
        plots.automaton(bx.Automaton.ctc(vocab=15))
    with pytest.raises(ValueError, match="automaton must be an Automaton, got a list"):
        plots.automaton([])  # type: ignore[arg-type]
