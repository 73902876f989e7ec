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
    no_args_is_help=True, help="Audio-to-score alignment: at what time in a recording is each note of a score played?"
)

Data = Annotated[Path, typer.Argument(help="A folder as Bach10: in a folder for each piece a .wav, a .mid and a .txt.")]


@app.command()
def align(
    recording: Annotated[Path, typer.Argument(help="A .wav, .flac or .ogg file.")],
    score: Annotated[Path, typer.Argument(help="A MIDI file.")],
    out: Annotated[Path, typer.Option(help="The table to write.")] = Path("alignment.csv"),
    plot: Annotated[
        Path | None, typer.Option(help="A picture: the recording with the notes, and the soft alignment.")
    ] = None,
    audio_clicks: Annotated[
        Path | None, typer.Option(help="The recording with a click at each onset, as .wav.")
    ] = None,
    features_: Annotated[
        str, typer.Option("--features", help="harmonic, with weights that were learnt; or chroma, without any.")
    ] = "harmonic",
    weights: Annotated[
        Path | None, typer.Option(help="What 'train' wrote, instead of what was learnt on Bach10.")
    ] = None,
) -> None:
    """Write when a recording has each note of a score: score time, audio time, and a confidence from 0 to 1."""
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
    output: Annotated[Path, typer.Option(help="The weights to write, as .json.")] = Path("weights.json"),
) -> None:
    """Learn the harmonic weights end to end, on all pieces."""
    with one_sentence():
        pieces = []
        for recording in evaluation.read(data):
            typer.echo(f"listening to {recording.name}")
            pieces.append(evaluation.Heard(recording, features.harmonic(recording.audio)))
        found = dict(evaluation.learnt(Harmonic(share=0), pieces))
        names = [heard.recording.name for heard in pieces]
        training.write_json(output, {"weights": found["end-to-end, l2"].tolist(), "pieces": names})
    typer.echo(f"{output}: {Harmonic().size()} weights learnt on {len(names)} pieces")


@app.command()
def evaluate(
    data: Data,
    output: Annotated[Path | None, typer.Option(help="A folder for audio.md, audio.json and the picture.")] = None,
) -> None:
    """Leave each piece out in turn, learn on the others, align it: end to end, pretrained and at random."""
    console = Console()
    with one_sentence():
        pieces = sum(1 for path in data.iterdir() if path.is_dir()) if data.is_dir() else 0
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=pieces * 8)

            def told(text: str) -> None:
                progress.update(bar, advance=1, description=text)
                if not console.is_terminal:
                    console.print(text, highlight=False)

            rows, onsets = evaluation.experiment(data, told)
        text = evaluation.markdown(rows)
        console.print(text, highlight=False, soft_wrap=True)
        if output is None:
            return
        from bellmax.apps.audio.figure import draw_maps

        output.mkdir(parents=True, exist_ok=True)
        (output / "audio.md").write_text(f"{origin()}\n\n{text}", encoding="utf-8")
        training.write_json(output / "audio.json", [vars(row) for row in rows])
        truth = onsets.pop("truth")
        shown = {name: own for name, own in onsets.items() if "l2" not in name}
        draw_maps(truth, shown, "A piece that was left out").savefig(output / "audio-maps.png", dpi=120)
