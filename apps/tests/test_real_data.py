"""The applications on real data, if it is available: published counts and results."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
import torch
from support.data import folder

import bellmax_apps.audio.align as aligning
from bellmax_apps.audio import features
from bellmax_apps.audio.evaluation import constant_costs, measure, straight_line
from bellmax_apps.audio.evaluation import read as read_pieces
from bellmax_apps.audio.model import Linear, Piece
from bellmax_apps.ner.schemes import entities
from bellmax_apps.ner.tagging import Config
from bellmax_apps.translation.data import Vocabulary, read_pairs


@pytest.mark.parametrize(
    ("language", "counts"),
    [("es", {"train": 18798, "dev": 4352, "test": 3559}), ("nl", {"train": 13344, "dev": 2616, "test": 3941})],
)
def test_conll_2002_has_the_published_number_of_entities(language: str, counts: dict[str, int]) -> None:
    data = folder(f"ner/conll2002_{language}")
    for split, count in counts.items():
        sentences = Config().read(data, split)
        assert sum(len(entities(sentence.tags)) for sentence in sentences) == count


def test_multi30k_survives_a_round_trip_through_tokens() -> None:
    data = folder("translation/multi30k")
    assert [len(read_pairs(data, split, ("fr", "en"))) for split in ("train", "dev", "test")] == [29000, 1014, 1000]
    lines = [line for _, line in read_pairs(data, "dev", ("fr", "en"))]
    vocabulary = Vocabulary.of("en", lines, least=1)
    decoded = [vocabulary.decode(vocabulary.encode(line)) for line in lines]
    assert sacrebleu.corpus_bleu(decoded, [lines]).score > 98


def test_baselines_without_audio_on_bach10() -> None:
    errors = []
    for recording in read_pieces(folder("bach10")):
        frames = 1 + len(recording.audio) // features.HOP
        piece = Piece(torch.empty(frames, 8), Linear().columns(recording.score, frames), recording.truth)
        errors.append([measure(piece.truth, path(piece))["seconds"] for path in (constant_costs, straight_line)])
    np.testing.assert_allclose(np.mean(errors, 0), [14.64, 1.17], atol=0.005)  # 14.64 is "Random θ" in the paper
    np.testing.assert_allclose(np.std(errors, 0, ddof=1), [2.63, 0.58], atol=0.005)


def test_shipped_weights_align_a_chorale() -> None:
    first = next(read_pieces(folder("bach10")))
    alignment, pitch = aligning.align_recording(first.audio, first.score.transposed(2))
    assert pitch.semitones == -2
    error = np.abs(alignment.times - first.truth)
    assert np.median(error) < 0.05
    assert (error < 0.1).mean() > 0.85
