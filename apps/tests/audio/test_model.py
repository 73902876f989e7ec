import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import bellmax as bx
from bellmax_apps.audio import features
from bellmax_apps.audio.model import Both, Chroma, Harmonic, Linear, Piece, area, cost_of_classes, learn, to_batch

from . import music


def piece(model, seed=0, events=4):
    score = music.score(seed, events)
    times = music.warp(score, seed)
    sound = model.features(music.render(score, times))
    return Piece(sound, model.columns(score, len(sound)), times[:-1])


@pytest.mark.parametrize("model", [Linear(), Harmonic(), Harmonic(share=0), Chroma()], ids=lambda m: type(m).__name__)
def test_columns_are_normalised(model):
    score = music.score()
    columns = model.columns(score, 300)
    assert len(columns.onsets) == len(score)
    assert (columns.onsets.diff() >= 1).all()
    assert columns.onsets[0] == 1
    norm = columns.keys.sum(0)
    if isinstance(model, Chroma):
        assert (columns.keys[12, columns.onsets] < 0).all()
        norm = columns.keys.clamp(min=0).norm(dim=0)
    torch.testing.assert_close(norm, torch.ones(columns.keys.shape[1]).double())


def test_pitches_with_the_same_key_count_once():
    score = music.Score.of([(0.0, 1.0, 9), (0.0, 1.0, 21), (1.0, 2.0, 108), (1.0, 2.0, 120)])
    keys = Harmonic().columns(score, 20).keys
    torch.testing.assert_close(keys.sum(0), torch.ones(keys.shape[1]).double())


def test_both_adds_harmonic_and_chroma_costs():
    models = Both(), Harmonic(), Chroma()
    both, harmonic, chroma = pieces = [piece(model) for model in models]
    weights = torch.randn(Both().size(), generator=torch.Generator().manual_seed(0)).double()
    assert (both.columns.onsets == harmonic.columns.onsets).all()
    costs = [m.costs(weights, p.sound, p.columns.keys) for m, p in zip(models, pieces, strict=True)]
    torch.testing.assert_close(costs[0], costs[1] + 0.25 * costs[2])
    for sound, expected in zip(Both.split(both.sound), (harmonic, chroma), strict=True):
        torch.testing.assert_close(sound, expected.sound)


def test_columns_follow_the_tempo_of_the_score():
    score = music.score()
    onsets = Harmonic(share=0.5).columns(score, 1000).onsets
    durations = np.diff(score.onsets) / (score.end - score.onsets[0])
    np.testing.assert_allclose(onsets.diff() / 500, durations, atol=0.01)


def test_linear_uses_the_nearest_pitch_with_a_key():
    model = Linear({60, 64, 90})
    score = music.Score.of([(0.0, 1.0, 61), (0.0, 1.0, 40), (1.0, 2.0, 100), (2.0, 3.0, 64)])
    assert model.columns(score, 10).keys.argmax(0).tolist() == [3, 0, 2, 1]  # silence, then the lowest notes


@pytest.mark.parametrize("model", [Linear({60, 64, 67, 70, 75}), Harmonic(share=0)], ids=["linear", "harmonic"])
@pytest.mark.parametrize("omega", [bx.Negentropy(2.0), bx.SquaredL2(20.0)], ids=str)
def test_gradients_of_the_losses_with_respect_to_weights(model, omega):
    batch = to_batch([piece(model, seed) for seed in range(2)])
    short = batch._replace(
        sound=batch.sound[:, ::6], truth=batch.truth[:, ::6], lengths=(batch.lengths[0] // 6, batch.lengths[1])
    )
    short.truth[:] = 0
    for n, (frames, columns) in enumerate(zip(*short.lengths, strict=True)):
        target = bx.DTW(torch.rand(int(frames), int(columns)).double() + 1).best_path()
        short.truth[n, : int(frames), : int(columns)] = target
    torch.manual_seed(1)
    weights = (0.3 * torch.randn(model.size())).double().requires_grad_()
    assert gradcheck(lambda w: area(model, w, short, omega), weights, fast_mode=True)
    assert gradcheck(lambda w: cost_of_classes(model, w, short), weights, fast_mode=True)
    p = bx.DTW(model.costs(weights, short.sound, short.keys), lengths=short.lengths, omega=omega)
    expected = bx.losses.alignment_area(p, short.truth, reduction="sum") / short.lengths[0].sum()
    torch.testing.assert_close(area(model, weights, short, omega), expected)


@pytest.mark.parametrize("model", [Linear(range(55, 80)), Harmonic(share=0)], ids=["linear", "harmonic"])
def test_end_to_end_training_reduces_the_area(model):
    pieces = [piece(model, seed) for seed in range(3)]
    batch = to_batch(pieces)
    first = learn(model, lambda w: cost_of_classes(model, w, batch), torch.zeros(model.size()).double(), iterations=30)
    omega = bx.Negentropy()
    before = area(model, first, batch, omega)
    weights = learn(model, lambda w: area(model, w, batch, omega), first, iterations=20)
    assert area(model, weights, batch, omega) < 0.8 * before


@pytest.mark.parametrize("model", [Linear(), Harmonic(share=0)], ids=["linear", "harmonic"])
def test_true_alignment_starts_events_at_their_true_times(model):
    toy = piece(model)
    cells = toy.alignment()
    assert cells[0].tolist() == [0, 0]
    assert cells[-1].tolist() == [toy.shape[0] - 1, toy.shape[1] - 1]
    for column, onset in zip(toy.columns.onsets.tolist(), toy.truth, strict=True):
        frames = cells[cells[:, 1] == column, 0]
        assert frames[0] == round(onset * features.RATE / features.HOP)
        assert len(frames) == 1 or isinstance(model, Linear)
