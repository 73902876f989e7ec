import numpy as np
import pytest
import torch

import bellmax as bx
from bellmax_apps.audio import evaluation, features
from bellmax_apps.audio.model import Linear, Piece

from . import music


@pytest.fixture(scope="module")
def piece() -> Piece:
    model, score = Linear(), music.score()
    sound = torch.zeros(200, 8).double()
    return Piece(sound, model.columns(score, len(sound)), music.warp(score)[:-1])


def test_measures(piece):
    right = evaluation.measure(piece.truth, piece.truth)
    assert right == {"seconds": 0, "median": 0, "within_50": 1, "within_100": 1}
    late = evaluation.measure(piece.truth, piece.truth + 0.06)
    assert late["seconds"] == pytest.approx(0.06 * 8 / 9)  # the silence before the events is never late
    assert late["median"] == pytest.approx(0.06)
    assert (late["within_50"], late["within_100"]) == (0, 1)


def test_straight_line_has_equal_durations(piece):
    onsets = evaluation.straight_line(piece)
    assert len(onsets) == 8
    np.testing.assert_allclose(np.diff(onsets, prepend=0, append=features.seconds(200)), features.seconds(200) / 9)


def test_constant_costs_resolve_ties_towards_the_last_column(piece):
    theta = torch.ones(piece.shape).double()
    theta[:, -1] -= 1e-6
    np.testing.assert_array_equal(evaluation.constant_costs(piece), evaluation.by_costs(theta, piece))


def test_overlap_decoding_follows_the_soft_alignment(piece):
    theta = torch.randn(piece.shape, generator=torch.Generator().manual_seed(0)).double()
    hard = evaluation.by_overlap(theta, piece, bx.Negentropy(1e-3))
    # A cell outside of the soft alignment costs nothing, so that a diagonal step may become two steps.
    np.testing.assert_allclose(hard, evaluation.by_costs(theta, piece), atol=1.01 * features.seconds(1))
    smooth = evaluation.by_overlap(torch.zeros(piece.shape).double(), piece)
    assert np.abs(smooth - evaluation.straight_line(piece)).max() < 0.1 * features.seconds(200)
