"""Figures of an alignment with a recording, and of the onsets of several methods."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import bellmax_apps.audio.features as features
from bellmax_apps.audio.align import Alignment, Pitch
from bellmax_apps.audio.score import Score


def draw(audio: NDArray[np.float32], alignment: Alignment, score: Score, pitch: Pitch, title: str) -> Figure:
    """Draw the loudness of a recording by semitone with the notes of its score, and below it the soft alignment."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    end = float(features.seconds(len(alignment.soft)))
    loudness = _shrink(features.constant_q(audio, pitch.tuned), 2000)
    above.imshow(
        loudness.T, origin="lower", aspect="auto", cmap="magma", interpolation="nearest",
        extent=(0, end, features.LOWEST - 0.5, features.LOWEST + features.BINS - 0.5),
    )  # fmt: skip
    for time, pitches in zip(alignment.times, score.transposed(pitch.semitones).beginning, strict=True):
        above.vlines(time, min(pitches) - 2, max(pitches) + 2, color="cyan", linewidth=0.7)
        above.plot([time] * len(pitches), sorted(pitches), "o", color="cyan", markersize=2.5)
    above.set_ylim(features.LOWEST + 10, features.LOWEST + features.BINS - 6)
    above.set_ylabel("pitch (MIDI number)")
    above.set_title(
        f"{title}: the notes of the score, where they were found", fontsize=10, loc="left", parse_math=False
    )
    below.imshow(
        _shrink(alignment.soft, 2000).T, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1,
        extent=(0, end, -0.5, len(score) - 0.5),
    )  # fmt: skip
    below.plot(alignment.times, np.arange(len(score)), ".", color="tab:red", markersize=2)
    below.set_xlabel("time in the recording (s)")
    below.set_ylabel("event of the score")
    below.set_title("The soft alignment (blue) and the onsets (red)", fontsize=10, loc="left")
    return figure


def _shrink(rows: NDArray[np.float32], limit: int) -> NDArray[np.float32]:
    """Reduce to at most ``limit`` rows, each the maximum of several consecutive rows."""
    times = -(-len(rows) // limit)
    padded = np.pad(rows, ((0, -len(rows) % times), (0, 0)))
    return np.asarray(padded.reshape(-1, times, rows.shape[1]).max(1))


def draw_maps(truth: NDArray[np.float64], onsets: dict[str, NDArray[np.float64]], title: str) -> Figure:
    """Draw the true and the estimated onset of each event, with a panel for each method, as in appendix C.2."""
    figure = Figure(figsize=(4.2 * len(onsets), 4), layout="constrained")
    axes = figure.subplots(1, len(onsets), squeeze=False, sharex=True, sharey=True)[0]
    for ax, (name, estimate) in zip(axes, onsets.items(), strict=True):
        _map(ax, truth, estimate)
        ax.set_title(name, fontsize=9, loc="left")
    axes[0].set_ylabel("event of the score")
    figure.suptitle(title, fontsize=10)
    return figure


def _map(ax: Axes, truth: NDArray[np.float64], onsets: NDArray[np.float64]) -> None:
    """Draw true and estimated onsets as two step functions, with the area between them."""
    events = np.arange(len(truth))
    ax.fill_betweenx(events, truth, onsets, step="pre", color="tab:orange", alpha=0.35, linewidth=0)
    ax.step(truth, events, where="post", color="black", linewidth=1.2, label="truth")
    ax.step(onsets, events, where="post", color="tab:orange", linewidth=1.2, label="found")
    ax.set_xlabel("time in the recording (s)")
    ax.legend(fontsize=8, loc="upper left", frameon=False)
