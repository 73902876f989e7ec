from pathlib import Path

import numpy as np
import pretty_midi
import pytest
import torch

from bellmax_apps.audio.score import Score, first_frames, read_midi, read_truth, true_alignment

from . import music


def test_events_group_notes_that_begin_together():
    score = Score.of([(1.0, 3.0, 60), (1.005, 2.0, 64), (2.0, 3.0, 67), (2.5, 4.0, 48)])
    assert score.onsets.tolist() == [1.0, 2.0, 2.5]
    assert [sorted(s) for s in score.sounding] == [[60, 64], [60, 67], [48, 60, 67]]
    assert [sorted(s) for s in score.beginning] == [[60, 64], [67], [48]]
    assert score.end == 4.0
    with pytest.raises(ValueError, match="a score must have at least one note, got none"):
        Score.of([])


def test_overlapping_notes_of_the_same_pitch():
    score = Score.of([(0.0, 3.0, 60), (1.0, 2.0, 60), (2.5, 4.0, 60), (3.5, 5.0, 62), (6.0, 7.0, 60)])
    assert [sorted(s) for s in score.sounding] == [[60], [60], [60], [60, 62], [60]]
    assert score.transposed(-2).sounding == tuple(frozenset(p - 2 for p in pitches) for pitches in score.sounding)


def test_many_long_notes_take_linear_time():
    score = Score.of([(n / 50, 400.0, 40 + n % 40) for n in range(20_000)])  # minutes if the time were quadratic
    assert len(score) == 20_000
    assert len(score.sounding[-1]) == 40


def test_reads_midi(tmp_path: Path):
    score = music.score()
    copy = read_midi(music.write_midi(tmp_path / "a.mid", score))
    np.testing.assert_allclose(copy.onsets, score.onsets, atol=3e-3)
    assert copy.sounding == score.sounding


def test_unreadable_midi_is_reported(tmp_path: Path):
    path = tmp_path / "a.mid"
    with pytest.raises(ValueError, match=r"a.mid does not exist"):
        read_midi(path)
    content = music.write_midi(path, music.score()).read_bytes()
    for text, why in ((b"no midi at all", "\\w+"), (b"", "it ends too early"), (content[:60], "it ends too early")):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=rf"a.mid cannot be read as MIDI: {why}"):
            read_midi(path)
    pretty_midi.PrettyMIDI().write(str(path))
    with pytest.raises(ValueError, match=r"a.mid has no notes"):
        read_midi(path)


def test_reads_truth(tmp_path: Path):
    score = Score.of([(1.0, 2.0, 60), (1.0, 2.0, 64), (2.0, 3.0, 67)])
    path = tmp_path / "truth.txt"
    path.write_text("100\t1000\t60\t1\n120\t1001\t64\t2\n900\t2000\t67\t1\n")
    np.testing.assert_allclose(read_truth(path, score), [0.11, 0.9])
    path.write_text("100\t1000\t60\t1\n")
    with pytest.raises(ValueError, match=r"has no note at 2.000 s of the score"):
        read_truth(path, score)
    for text in ("onset\n", "", "# no line\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"truth.txt cannot be read as lines of four numbers"):
            read_truth(path, score)
    for number in ("nan", "inf", "1e999"):
        path.write_text(f"{number}\t1000\t60\t1\n900\t2000\t67\t1\n")
        with pytest.raises(ValueError, match=r"truth.txt must hold finite numbers, got others"):
            read_truth(path, score)
    path.write_text("1e308 1000 60 1\n1.2e308 1000 64 1\n900 2000 67 1\n")
    np.testing.assert_allclose(read_truth(path, score), [1.1e305, 0.9])


@pytest.mark.parametrize("starts", [[0, 3, 4, 9], [0, 0, 0, 0], [5, 2, 20, 30], [0, 1, 2, 3]])
def test_true_alignments_are_paths(starts: list[int]):
    cells = true_alignment(np.array(starts), 10)
    assert cells[0].tolist() == [0, 0]
    assert cells[-1].tolist() == [9, 3]
    steps = cells[1:] - cells[:-1]
    assert ((steps >= 0) & (steps <= 1)).all()
    assert (steps.sum(1) >= 1).all()
    path = torch.zeros(10, 4)
    path[tuple(cells.T)] = 1
    expected = np.maximum.accumulate(np.clip(starts, 0, 9))
    expected[0] = 0
    assert first_frames(path).tolist() == expected.tolist()


def test_unusual_midi_is_read_without_a_warning(tmp_path: Path):
    content = bytearray(music.write_midi(tmp_path / "a.mid", music.score()).read_bytes())
    content[9] = 2  # a file type at which pretty_midi warns of tempi in later tracks
    track = bytes.fromhex("4d54726b0000000b00ff510307a12000ff2f00")
    content[11] += 1
    (tmp_path / "a.mid").write_bytes(bytes(content) + track)
    with pytest.warns(RuntimeWarning, match="type 0 or type 1"):
        pretty_midi.PrettyMIDI(str(tmp_path / "a.mid"))
    assert len(read_midi(tmp_path / "a.mid")) == 8
