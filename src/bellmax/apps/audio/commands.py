"""``bellmax audio …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import librosa
import numpy as np
import soundfile
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import bellmax.apps.audio.align as aligning
import bellmax.apps.audio.evaluation as evaluation
import bellmax.apps.audio.features as features
import bellmax.apps.training as training
from bellmax.apps.audio.model import Harmonic
from bellmax.apps.audio.score import read_midi
from bellmax.apps.commands import one_sentence, origin

app = typer.Typer(
    no_args_is_help=True, help="Audio-to-score alignment: find when a recording plays each note of a score."
)

Data = Annotated[Path, typer.Argument(help="Folder like Bach10: one folder per piece, with a .wav, .mid and .txt.")]


@app.command()
def align(
    recording: Annotated[Path, typer.Argument(help="A .wav, .flac or .ogg file.")],
    score: Annotated[Path, typer.Argument(help="A MIDI file.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("alignment.csv"),
    plot: Annotated[
        Path | None, typer.Option(help="Figure to write: the recording with the notes, and the soft alignment.")
    ] = None,
    audio_clicks: Annotated[
        Path | None, typer.Option(help=".wav file to write: the recording with a click at each onset.")
    ] = None,
    features_: Annotated[
        str, typer.Option("--features", help="Features: harmonic (learnt weights) or chroma (no weights).")
    ] = "harmonic",
    weights: Annotated[
        Path | None, typer.Option(help="Weights that 'train' wrote, instead of those learnt on Bach10.")
    ] = None,
) -> None:
    """Write score time, audio time and a confidence from 0 to 1 for each note of a score."""
    with one_sentence():
        model = aligning.model_named(features_)
        written, audio = read_midi(score), features.load(recording)
        known = aligning.trained(weights) if features_ == "harmonic" else torch.empty(0)
        found = aligning.align(model.features(audio), written, model, known, told=typer.echo)
        aligning.write_csv(out, found, written)
        if plot is not None:
            from bellmax.apps.audio.figure import draw

            draw(audio, found, written, recording.name).savefig(plot, dpi=130)
        if audio_clicks is not None:
            clicks = librosa.clicks(times=found.times, sr=features.RATE, length=len(audio))
            mixed = 0.6 * audio / np.abs(audio).max() + 0.4 * clicks
            soundfile.write(audio_clicks, mixed.astype(np.float32), features.RATE)
    sure = float(np.median(found.confidence))
    typer.echo(
        f"{out}: {len(written)} events, from {found.times[0]:.2f} s to {found.times[-1]:.2f} s, confidence {sure:.2f}"
    )


@app.command()
def train(
    data: Data,
    output: Annotated[Path, typer.Option(help=".json file to write the weights to.")] = Path("weights.json"),
) -> None:
    """Train the harmonic weights end to end, on all pieces."""
    with one_sentence():
        pieces = []
        for recording in evaluation.read(data):
            typer.echo(f"listening to {recording.name}")
            pieces.append(evaluation.Heard(recording, features.harmonic(recording.audio)))
        found = {name: weights for name, weights, _ in evaluation.learnt(Harmonic(share=0), pieces)}
        names = [heard.recording.name for heard in pieces]
        training.write_json(output, {"weights": found["end-to-end, l2"].tolist(), "pieces": names})
    typer.echo(f"{output}: {Harmonic().size()} weights learnt on {len(names)} pieces")


@app.command()
def evaluate(
    data: Data,
    output: Annotated[
        Path, typer.Option(help="Folder for audio.md, the figure, and the results piece by piece.")
    ] = Path("audio"),
) -> None:
    """Leave-one-out evaluation: train on the other pieces, align this one. Run it again to resume."""
    from bellmax.apps.audio.figure import draw_maps

    console = Console()
    with one_sentence():
        pieces = sum(1 for path in data.iterdir() if path.is_dir()) if data.is_dir() else 0
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=pieces * evaluation.STEPS)

            def told(text: str, steps: int) -> None:
                progress.update(bar, advance=steps, description=text)
                if not console.is_terminal:
                    console.print(text, highlight=False, soft_wrap=True)

            folds = evaluation.experiment(data, output / "pieces", told)
        text = evaluation.markdown(folds)
        console.print(text, highlight=False, soft_wrap=True)
        (output / "audio.md").write_text(f"{origin()}\n\n{text}", encoding="utf-8")
        figure = draw_maps(
            np.array(folds[0]["truth"]), evaluation.maps(folds[0]), "A piece that was left out of training"
        )
        figure.savefig(output / "audio-maps.png", dpi=120)
