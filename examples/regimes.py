"""Find the season of each day of a power meter with a hidden Markov model, and compare it with clusters of the days.

DATA is a folder with the dataset ItalyPowerDemand of the UCR archive (www.cs.ucr.edu/~eamonn/time_series_data_2018):
ItalyPowerDemand/ItalyPowerDemand_TRAIN.tsv and _TEST.tsv, gzipped or not. Each row is the power demand of a day, in 24
hours. The label is the half of the year: October to March, or April to September. The archive does not tell the order
of the days. So days are joined at random into series that stay in a season for ten days on average. No model sees the
labels. Half of the days are for fitting, the other half for testing. The results are in docs/guide/hmm.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from nearest_neighbour import Split, read
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture

from bellmax.sklearn import HMM

NAME, SEASONS = "ItalyPowerDemand", ("October to March", "April to September")
STATES, STARTS = 4, 10  # two states for each season, and the number of starts of each model
DAYS, STAY = 100, 10  # days of a series, and the mean number of days until the season changes
SETTINGS = {  # hours between readings, and the fraction of readings that are missing
    "every 3 hours": (3, 0.0),
    "every 3 hours, 30 % missing": (3, 0.3),
    "every 3 hours, 60 % missing": (3, 0.6),
    "every hour": (1, 0.0),
}
MODELS = "k-means", "Gaussian mixture", "HMM"


class Series(NamedTuple):
    readings: list[NDArray[Any]]  # (days, readings per day), NaN where missing
    seasons: list[NDArray[Any]]  # (days,), 0 or 1


def read_days(data: Path, rng: np.random.Generator) -> tuple[Split, Split]:
    """Return two random halves of all days: labels (n,), 0 or 1, and series (n, 24)."""
    parts = [read(data / NAME, part) for part in ("TRAIN", "TEST")]
    labels = np.unique(np.concatenate([part.labels for part in parts]), return_inverse=True)[1]
    days = np.concatenate([part.series for part in parts])
    order = rng.permutation(len(days))
    first, second = (Split(labels[half], days[half]) for half in np.array_split(order, 2))
    return first, second


def join(days: Split, count: int, hours: int, missing: float, rng: np.random.Generator) -> Series:
    """Return random series of days. Each day is drawn from the days of its season."""
    readings, seasons = [], []
    for _ in range(count):
        changes = rng.random(DAYS) < 1 / STAY
        season = (rng.integers(2) + changes.cumsum()) % 2
        drawn = [rng.choice(np.flatnonzero(days.labels == own)) for own in season]
        x = days.series[drawn][:, ::hours]
        readings.append(np.where(rng.random(x.shape) < missing, np.nan, x))
        seasons.append(season)
    return Series(readings, seasons)


def predict(
    name: str, train: Series, test: Series, seed: int, states: int = STATES
) -> tuple[list[NDArray[Any]], list[NDArray[Any]], Any]:
    """Fit a model. Return the state or the cluster of each day of train and test, and the model.

    For clusters, readings are standardized, and missing readings are replaced by the mean.
    """
    if name == "HMM":
        model = HMM(states, covariance="diag", n_init=STARTS, random_state=seed).fit(train.readings)
        return model.predict(train.readings), model.predict(test.readings), model
    kind = {
        "k-means": KMeans(states, n_init=STARTS, random_state=seed),
        "Gaussian mixture": GaussianMixture(states, covariance_type="diag", n_init=STARTS, random_state=seed),
    }[name]
    known = np.concatenate(train.readings)
    mean, deviation = np.nanmean(known, 0), np.nanstd(known, 0)
    complete = [[np.nan_to_num((x - mean) / deviation) for x in part.readings] for part in (train, test)]
    model = kind.fit(np.concatenate(complete[0]))
    return [model.predict(x) for x in complete[0]], [model.predict(x) for x in complete[1]], model


def name_seasons(
    states: list[NDArray[Any]], train: Series, of_train: list[NDArray[Any]]
) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Return the season of each day: the most frequent season of its state in train. Also return it for each state."""
    counts = np.zeros((1 + max(map(np.max, [*of_train, *states])), len(SEASONS)))
    np.add.at(counts, (np.concatenate(of_train), np.concatenate(train.seasons)), 1)
    season_of = counts.argmax(1)
    return [season_of[own] for own in states], season_of


def agreement(seasons: list[NDArray[Any]], test: Series) -> float:
    """Return the percentage of days whose season is right."""
    return 100 * float(np.mean(np.concatenate(seasons) == np.concatenate(test.seasons)))


def changes(seasons: list[NDArray[Any]]) -> int:
    return sum(int((np.diff(own) != 0).sum()) for own in seasons)


def measure(data: Path, setting: str, seeds: int, series: int) -> list[str]:
    """Return the cells of a row of the table: agreement for each model, and changes of season relative to the truth."""
    hours, missing = SETTINGS[setting]
    right: dict[str, list[float]] = {name: [] for name in MODELS}
    changed: dict[str, list[float]] = {name: [] for name in MODELS}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        train, test = (join(half, series, hours, missing, rng) for half in read_days(data, rng))
        for name in MODELS:
            of_train, states, _ = predict(name, train, test, seed)
            seasons, _ = name_seasons(states, train, of_train)
            right[name].append(agreement(seasons, test))
            changed[name].append(changes(seasons) / changes(test.seasons))
    spread = [f"{np.mean(own):.1f} ± {np.std(own, ddof=1):.1f}" for own in right.values()]
    return [setting, *spread, *(f"{np.mean(own):.1f}" for own in changed.values())]


def table(data: Path, seeds: int, series: int) -> str:
    lines = ["| readings | " + " | ".join([*MODELS, *(f"changes, {name}" for name in MODELS)]) + " |"]
    lines.append("|---" + 2 * len(MODELS) * "|---:" + "|")
    settings = track(SETTINGS, "settings", console=Console(stderr=True), transient=True)
    return "\n".join([*lines, *("| " + " | ".join(measure(data, own, seeds, series)) + " |" for own in settings)])


def number_of_states(data: Path, series: int) -> str:
    """Return a table of models with different numbers of states, for seed 0: BIC, and agreement on the test series."""
    rng = np.random.default_rng(0)
    train, test = (join(half, series, 3, 0.0, rng) for half in read_days(data, rng))
    counts, bics, right = range(1, 11), [], []
    for states in counts:
        of_train, found, model = predict("HMM", train, test, 0, states)
        bics.append(f"{model.bic(train.readings):.0f}")
        right.append(f"{agreement(name_seasons(found, train, of_train)[0], test):.1f}")
    rows = [["states", *map(str, counts)], ["---", *["---:"] * len(bics)], ["BIC", *bics], ["agreement (%)", *right]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def figure(data: Path, series: int) -> Figure:
    """Draw a test series with 30 % missing readings, the seasons of each model, and the posterior of a season."""
    rng = np.random.default_rng(0)
    train, test = (join(half, series, 3, 0.3, rng) for half in read_days(data, rng))
    seasons = {"truth": test.seasons[0]}
    for name in MODELS:
        of_train, states, model = predict(name, train, test, 0)
        named, season_of = name_seasons(states, train, of_train)
        seasons[name] = named[0]
    posterior = model.predict_proba(test.readings[:1])[0]
    drawn = Figure(figsize=(10, 5.2), layout="constrained")
    top, middle, bottom = drawn.subplots(3, 1, sharex=True, height_ratios=[2, 1.4, 1])
    top.imshow(test.readings[0].T, aspect="auto", cmap="viridis", interpolation="nearest", origin="lower")
    top.set(title="power demand of each day (white: missing)", ylabel="hour", yticks=range(0, 8, 2))
    top.set_yticklabels(range(0, 24, 6))
    middle.imshow(np.stack([*seasons.values()]), aspect="auto", cmap="coolwarm", interpolation="nearest")
    middle.set(title="season (blue: October to March, red: April to September)", yticks=range(len(seasons)))
    middle.set_yticklabels(seasons)
    bottom.plot(posterior[:, season_of == 1].sum(1), color="black")
    bottom.fill_between(range(DAYS), test.seasons[0], step="mid", color="tab:red", alpha=0.2)
    bottom.set(title="HMM: probability of April to September (shaded: truth)", xlabel="day", ylim=(-0.05, 1.05))
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help=f"folder that contains {NAME}")
    parser.add_argument("--output", type=Path, default=Path("build/regimes"), help="default: build/regimes")
    parser.add_argument("--seeds", type=int, default=5, help="number of random splits of the days (default: 5)")
    parser.add_argument("--series", type=int, default=10, help="number of series for fitting and testing (default: 10)")
    options = parser.parse_args(arguments)
    begun = perf_counter()
    text = table(options.data, options.seeds, options.series) + "\n\n" + number_of_states(options.data, options.series)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "regimes.md").write_text(text + "\n", encoding="utf-8")
    figure(options.data, options.series).savefig(options.output / "regimes.png", dpi=120)
    print(f"{perf_counter() - begun:.0f} seconds")


if __name__ == "__main__":
    main()
