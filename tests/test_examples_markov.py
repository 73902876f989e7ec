"""The examples on hidden Markov models, on synthetic days and tones, and on real data."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.data import folder
from support.tones import record

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="not run from a checkout")


@pytest.fixture
def regimes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("regimes")


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("durations")


def write_days(data: Path, name: str) -> None:
    """Write a dataset of noisy days with a peak in the evening, which is lower in the second season."""
    rng = np.random.default_rng(0)
    (data / name).mkdir()
    for part in ("TRAIN", "TEST"):
        season = np.arange(60) % 2
        days = rng.normal(0, 0.3, (60, 24))
        days[:, 17:21] += 1.0 - season[:, None]
        np.savetxt(data / name / f"{name}_{part}.tsv", np.column_stack([season + 1, days]), delimiter="\t")


def test_seasons_stay_for_days_and_readings_are_missing(regimes: ModuleType, tmp_path: Path) -> None:
    write_days(tmp_path, regimes.NAME)
    rng = np.random.default_rng(0)
    first, second = regimes.read_days(tmp_path, rng)
    assert len(first.labels) == len(second.labels) == 60
    assert not (first.series[:, None] == second.series).all(-1).any()
    series = regimes.join(first, 20, 3, 0.3, rng)
    assert {x.shape for x in series.readings} == {(regimes.DAYS, 8)}
    assert np.isnan(np.concatenate(series.readings)).mean() == pytest.approx(0.3, abs=0.02)
    assert regimes.changes(series.seasons) / (20 * regimes.DAYS) == pytest.approx(1 / regimes.STAY, abs=0.02)


def test_states_are_named_by_the_training_days(regimes: ModuleType) -> None:
    train = regimes.Series([], [np.array([0, 0, 1, 1, 1])])
    named, season_of = regimes.name_seasons([np.array([2, 0, 1])], train, [np.array([0, 0, 0, 1, 2])])
    assert season_of.tolist() == [0, 1, 1]
    assert named[0].tolist() == [1, 0, 1]
    assert regimes.agreement(named, regimes.Series([], [np.array([1, 0, 0])])) == pytest.approx(200 / 3)


def test_the_command_writes_a_table_and_a_figure(
    regimes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(tmp_path, regimes.NAME)
    monkeypatch.setattr(regimes, "STARTS", 1)
    monkeypatch.setattr(regimes, "DAYS", 40)
    regimes.main([str(tmp_path), "--output", str(tmp_path / "out"), "--seeds", "2", "--series", "3"])
    text = (tmp_path / "out/regimes.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert all(f"| {setting} | " in text for setting in regimes.SETTINGS)
    assert (tmp_path / "out/regimes.png").stat().st_size > 10_000


def test_seasons_of_real_days_are_found(regimes: ModuleType) -> None:
    data, rng = folder("timeseries"), np.random.default_rng(0)
    train, test = (regimes.join(half, 10, 3, 0.3, rng) for half in regimes.read_days(data, rng))
    right = {}
    for name in regimes.MODELS:
        of_train, states, _ = regimes.predict(name, train, test, 0)
        right[name] = regimes.agreement(regimes.name_seasons(states, train, of_train)[0], test)
    assert right["HMM"] > 90
    assert right["HMM"] > max(right["k-means"], right["Gaussian mixture"])


# --- durations.py


def test_borders_match_once_within_the_tolerance(durations: ModuleType) -> None:
    assert durations.borders(np.array([0, 0, 1, 1, 0])).tolist() == [2, 4]
    assert durations.matches(np.array([2, 10, 11, 30]), np.array([4, 11, 40])) == 2
    assert durations.matches(np.array([], dtype=np.int64), np.array([4])) == 0
    states = np.array([0] * 10 + [1] * 10)
    strings = durations.Strings([], [states])
    assert durations.measure([states], strings) == (100, 100, 1)
    assert durations.measure([np.zeros(20, np.int64)], strings) == (50, 0, 0.5)


def test_digits_and_pauses_of_a_string_are_known(durations: ModuleType, tmp_path: Path) -> None:
    recordings = durations.read_recordings(record(tmp_path, range(5, 7)), range(5, 1000))
    strings = durations.join(recordings, 2, 20, np.random.default_rng(0))
    assert len(strings.energy) == 2
    for energy, spoken in zip(strings.energy, strings.spoken, strict=True):
        assert len(energy) == len(spoken)
        assert len(durations.borders(spoken)) == 2 * durations.DIGITS
        assert energy[spoken == 1].mean() > energy[spoken == 0].mean() + 1


def test_the_command_measures_all_models(
    durations: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, range(3, 8))
    durations.main([str(tmp_path), "--output", str(tmp_path / "out"), "--seeds", "2", "--strings", "2"])
    text = (tmp_path / "out/durations.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert all(f"| 0 dB | {name} | " in text for name in durations.MODELS)
    assert (tmp_path / "out/durations.png").stat().st_size > 10_000


def test_durations_help_in_noise(durations: ModuleType) -> None:
    data, rng = folder("fsdd"), np.random.default_rng(0)
    train, test = (
        durations.join(durations.read_recordings(data, takes), 2, 0, rng) for takes in (range(5, 10), range(5))
    )
    f1 = {
        name: durations.measure(durations.predict(durations.fit(name, train, 0), test), test)[1]
        for name in ("HMM, labels", "HSMM, labels")
    }
    assert f1["HSMM, labels"] > f1["HMM, labels"] + 8


@pytest.mark.parametrize("name", ["regimes", "durations"])
def test_a_folder_without_data_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match=str(tmp_path)):
        import_module(name).main([str(tmp_path), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
