"""Find spoken digits in noise with hidden Markov models, without and with explicit durations.

The recordings are from the Free Spoken Digit Dataset (github.com/Jakobovski/free-spoken-digit-dataset). Eight digits of
a speaker are joined with pauses of 0.2 to 0.5 seconds, and white noise is added. The models see one number in each
frame of 20 ms: the logarithm of the energy. Takes 0 to 4 are for testing. The results are in docs/guide/hmm.md.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import soundfile
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from bellmax.sklearn import HMM

RATE, FRAME = 8000, 160  # samples per second, samples per frame
SECONDS = FRAME / RATE
DIGITS, PAUSE = 8, (0.2, 0.5)  # digits of a string, shortest and longest pause in seconds
LONGEST = 120  # frames of the longest stay in a state
LEVELS = 10, 5, 0  # signal-to-noise ratios in dB
TOLERANCE = 3  # frames between a border and its estimate
MODELS = "k-means", "HMM", "HSMM", "HMM, labels", "HSMM, labels"
COLUMNS = "frames right (%)", "F1 of borders (%)", "segments"

Recordings = dict[str, list[NDArray[Any]]]  # by speaker


class Strings(NamedTuple):
    energy: list[NDArray[Any]]  # (frames,), log-energy of each frame
    spoken: list[NDArray[Any]]  # (frames,), 1 in digits, 0 in pauses


def read_recordings(folder: Path, takes: range) -> Recordings:
    recordings: Recordings = {}
    for path in sorted(folder.glob("*_*_*.wav")):
        _, speaker, take = path.stem.split("_")
        if int(take) in takes:
            wave = soundfile.read(path, dtype="float64")[0]
            recordings.setdefault(speaker, []).append(wave / np.sqrt(np.mean(wave**2)))
    if not recordings:
        raise SystemExit(f"{folder} must hold {{digit}}_{{speaker}}_{{take}}.wav with takes below 5 and from 5 on")
    return recordings


def join(recordings: Recordings, count: int, level: float, rng: np.random.Generator) -> Strings:
    """Return ``count`` strings of random digits for each speaker, with noise at a signal-to-noise ratio in dB."""
    energy, spoken = [], []
    for waves in (waves for waves in recordings.values() for _ in range(count)):
        parts = [np.zeros(round(RATE * rng.uniform(*PAUSE)))]
        for _ in range(DIGITS):
            parts += [waves[rng.integers(len(waves))], np.zeros(round(RATE * rng.uniform(*PAUSE)))]
        is_spoken = np.concatenate([np.full(len(part), k % 2) for k, part in enumerate(parts)])
        wave = np.concatenate(parts)
        wave = wave + rng.normal(0, 10 ** (-level / 20), len(wave))
        frames = len(wave) // FRAME
        energy.append(np.log(np.mean(wave[: frames * FRAME].reshape(frames, FRAME) ** 2, 1)))
        spoken.append(is_spoken[FRAME // 2 :: FRAME][:frames])
    return Strings(energy, spoken)


def fit(name: str, train: Strings, seed: int) -> Any:
    """Return a fitted model, whose state 1 starts at the mean of the loud frames."""
    kind, _, labels = name.partition(", ")
    init = {"means": np.quantile(np.concatenate(train.energy), [0.1, 0.9])[:, None]}
    if kind == "k-means":
        return KMeans(2, init=init["means"], n_init=1).fit(np.concatenate(train.energy)[:, None])
    model = HMM(2, max_duration=LONGEST if kind == "HSMM" else None, init=init, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(train.energy, train.spoken if labels else None)


def predict(model: Any, strings: Strings) -> list[NDArray[Any]]:
    if isinstance(model, KMeans):
        return [model.predict(x[:, None]) for x in strings.energy]
    found: list[NDArray[Any]] = model.predict(strings.energy)
    return found


def borders(states: NDArray[Any]) -> NDArray[Any]:
    return np.flatnonzero(np.diff(states)) + 1


def matches(found: NDArray[Any], true: NDArray[Any]) -> int:
    """Return the number of pairs of a found and a true border within the tolerance. Each border is in one pair."""
    count = k = 0
    for border in true:
        while k < len(found) and found[k] < border - TOLERANCE:
            k += 1
        if k < len(found) and found[k] <= border + TOLERANCE:
            count, k = count + 1, k + 1
    return count


def measure(states: list[NDArray[Any]], strings: Strings) -> tuple[float, float, float]:
    """Return the percentage of right frames, F1 of the borders in percent, and found segments by true segments."""
    right = np.mean(np.concatenate(states) == np.concatenate(strings.spoken))
    pairs = [(borders(own), borders(true)) for own, true in zip(states, strings.spoken, strict=True)]
    found, true = (sum(len(own) for own in side) for side in zip(*pairs, strict=True))
    f1 = 2 * sum(matches(*pair) for pair in pairs) / (found + true)
    return 100 * float(right), 100 * f1, (found + len(pairs)) / (true + len(pairs))


def table(train: Recordings, test: Recordings, seeds: int, count: int) -> str:
    lines = ["| signal to noise | model | " + " | ".join(COLUMNS) + " |", "|---|---" + 3 * "|---:" + "|"]
    runs = [*product(LEVELS, range(seeds))]
    results: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for level, seed in track(runs, "runs", console=Console(stderr=True), transient=True):
        rng = np.random.default_rng(seed)
        strings, others = (join(recordings, count, level, rng) for recordings in (train, test))
        for name in MODELS:
            scores = measure(predict(fit(name, strings, seed), others), others)
            results.setdefault((level, name), []).append(scores)
    for (level, name), rows in results.items():
        mean, spread = np.mean(rows, 0), np.std(rows, 0, ddof=1)
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean[:2], spread[:2], strict=True)]
        lines.append(f"| {level} dB | {name} | {' | '.join(cells)} | {mean[2]:.2f} |")
    return "\n".join(lines)


def figure(train: Recordings, test: Recordings, count: int, level: float = 5) -> Figure:
    """Draw a test string, its segments by both labeled models, and the learned durations."""
    rng = np.random.default_rng(0)
    strings, others = (join(recordings, count, level, rng) for recordings in (train, test))
    models = {name: fit(f"{name}, labels", strings, 0) for name in ("HMM", "HSMM")}
    drawn = Figure(figsize=(10, 5.6), layout="constrained")
    axes = drawn.subplot_mosaic([["energy"] * 2, ["states"] * 2, ["pause", "digit"]], height_ratios=[1.2, 0.9, 1.2])
    time = SECONDS * np.arange(len(others.energy[0]))
    axes["energy"].plot(time, others.energy[0], color="black", linewidth=0.8)
    axes["energy"].fill_between(
        time, *axes["energy"].get_ylim(), where=others.spoken[0] == 1, step="mid", color="tab:orange", alpha=0.3
    )
    axes["energy"].set(title=f"log-energy at {level} dB (shaded: digits)", xlim=(0, time[-1]))
    rows = {"truth": others.spoken[0], **{name: predict(model, others)[0] for name, model in models.items()}}
    axes["states"].imshow(
        np.stack([*rows.values()]), aspect="auto", cmap="Oranges", vmax=1.5, extent=(0, time[-1], len(rows), 0)
    )
    axes["states"].set(title="segments (dark: digit)", yticks=np.arange(len(rows)) + 0.5, xlabel="seconds")
    axes["states"].set_yticklabels(rows)
    frames = np.arange(1, LONGEST + 1)
    for state, name in enumerate(("pause", "digit")):
        stay = models["HMM"].transmat_[state, state]
        axes[name].bar(SECONDS * frames, models["HSMM"].durations_[state], SECONDS, color="tab:orange", label="HSMM")
        axes[name].plot(SECONDS * frames, (1 - stay) * stay ** (frames - 1), color="tab:blue", label="HMM")
        axes[name].set(title=f"probability of each duration of a {name}", xlabel="seconds", xlim=(0, 1.2))
        axes[name].legend(frameon=False)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="recordings {digit}_{speaker}_{take}.wav at 8 kHz")
    parser.add_argument("--output", type=Path, default=Path("build/durations"), help="default: build/durations")
    parser.add_argument("--seeds", type=int, default=5, help="number of random sets of strings (default: 5)")
    parser.add_argument("--strings", type=int, default=5, help="strings of each speaker in a set (default: 5)")
    options = parser.parse_args(arguments)
    begun = perf_counter()
    train, test = read_recordings(options.folder, range(5, 1000)), read_recordings(options.folder, range(5))
    print(text := table(train, test, options.seeds, options.strings))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "durations.md").write_text(text + "\n", encoding="utf-8")
    figure(train, test, options.strings).savefig(options.output / "durations.png", dpi=120)
    print(f"{perf_counter() - begun:.0f} seconds")


if __name__ == "__main__":
    main()
