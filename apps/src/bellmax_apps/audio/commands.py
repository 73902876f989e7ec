"""Subcommands of ``bellmax audio``: align, train and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import bellmax_apps.audio.align as aligning
import bellmax_apps.audio.evaluation as evaluation
import bellmax_apps.audio.features as features
from bellmax_apps.audio.model import Harmonic
from bellmax_apps.audio.score import read_midi
from bellmax_apps.commands import Force, check_results, origin
from bellmax_apps.files import reading, write_json
from bellmax_command.errors import check_outputs, report_errors

app = typer.Typer(no_args_is_help=True)

UNSURE = {"both": 0.5, "harmonic": 0.15, "chroma": 0.85}
"""Median confidence below which an alignment is probably wrong. The score of another piece is mostly below."""
_AUDIO = {b"RIFF": "WAV", b"RF64": "WAV", b"fLaC": "FLAC", b"OggS": "Ogg"}
_MIDI = {b"MThd": "MIDI"}
Data = Annotated[
    Path, typer.Argument(help="Folder in the layout of Bach10: one folder per piece, with a .wav, .mid and .txt file.")
]


@app.command()
def align(
    recording: Annotated[Path, typer.Argument(help="The recording, a .wav, .flac or .ogg file.")],
    score: Annotated[Path, typer.Argument(help="The score, a MIDI file.")],
    output: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("alignment.csv"),
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Figure to write, with the recording, the notes and the soft alignment.")
    ] = None,
    audio_clicks: Annotated[
        Path | None, typer.Option(help=".wav file to write, the recording with a click at each onset.")
    ] = None,
    features_: Annotated[
        str, typer.Option("--features", help="Features: harmonic (learned weights), chroma (no weights) or both.")
    ] = "both",
    weights: Annotated[
        Path | None, typer.Option(help="File of weights that 'train' wrote. Default: weights learned on Bach10.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a CSV file with the score time, the audio time and a confidence from 0 to 1 for each note of a score."""
    import librosa
    import soundfile

    from bellmax_apps.figures import PICTURES, save

    output = out or output
    with report_errors():
        outputs = {"--output": output, "--plot": plot, "--audio-clicks": audio_clicks}
        sounds = {f".{name.lower()}" for name in soundfile.available_formats()}
        endings = {"--plot": PICTURES, "--audio-clicks": sounds}
        inputs = [recording, score] if weights is None else [recording, score, weights]
        check_outputs(outputs, inputs, force=force, endings=endings)
        model = aligning.model_named(features_)
        if weights is not None and not model.size():
            raise ValueError(f"--weights cannot be used with --features {features_}, which has no weights")
        numbers = aligning.trained(weights)
        _check_kinds(recording, score)
        events, audio = read_midi(score), features.load(recording)
        alignment, pitch = aligning.align_recording(audio, events, model, numbers, report=typer.echo)
        aligning.write_csv(output, alignment, events)
        if plot is not None:
            from bellmax_apps.audio.figure import draw

            save(draw(audio, alignment, events, pitch, recording.name), plot, dpi=130)
        if audio_clicks is not None:
            clicks = librosa.clicks(times=alignment.times, sr=features.RATE, length=len(audio))
            mixed = 0.6 * audio / np.abs(audio).max() + 0.4 * clicks
            soundfile.write(audio_clicks, mixed.astype(np.float32), features.RATE)
    confidence = float(np.median(alignment.confidence))
    begin, end = alignment.times[[0, -1]]
    typer.echo(f"{output}: {len(events)} events, from {begin:.2f} s to {end:.2f} s, confidence {confidence:.2f}")
    if confidence < UNSURE[features_]:
        other = "both" if features_ == "chroma" else "chroma"
        typer.secho(
            f"The confidence is low. Listen to the file of --audio-clicks, or try --features {other}. The score may "
            "be of another piece, or leave out or repeat a part of this one.",
            fg="yellow",
            err=True,
        )


def _check_kinds(recording: Path, score: Path) -> None:
    """Raise ``ValueError`` if the first bytes show that the score is audio, or the recording is MIDI."""
    for path, kinds in ((score, _AUDIO), (recording, _MIDI)):
        with reading(path, "a file"), path.open("rb") as file:
            first = file.read(12)
        if first[:4] in kinds and first[8:] != b"RMID":
            raise ValueError(f"{path} is a {kinds[first[:4]]} file: did you swap the recording and the score?")


@app.command()
def train(
    data: Data,
    output: Annotated[Path, typer.Option(help=".json file to write the weights to.")] = Path("weights.json"),
    force: Force = False,
) -> None:
    """Train the weights of the harmonic features on a folder of aligned pieces."""
    with report_errors():
        check_outputs({"--output": output}, [], force=force, endings={"--output": [".json"]})
        examples = []
        for recording in evaluation.read(data):
            typer.echo(f"listening to {recording.name}")
            sound = features.harmonic(recording.audio, features.tuning(recording.audio))
            examples.append(evaluation.Example(recording, sound))
        weights = {name: numbers for name, numbers, _ in evaluation.learnt(Harmonic(share=0), examples)}
        names = [example.recording.name for example in examples]
        write_json(output, {"weights": weights["end-to-end, l2"].tolist(), "pieces": names})
    typer.echo(f"{output}: {Harmonic().size()} weights learned on {len(names)} pieces")


@app.command()
def evaluate(
    data: Data,
    output: Annotated[
        Path, typer.Option(help="Folder for audio.md, the figure, and the results of each piece.")
    ] = Path("audio"),
) -> None:
    """Run a leave-one-out evaluation: train on all pieces but one, and align this piece. To resume, run it again."""
    from bellmax_apps.audio.figure import draw_maps

    console = Console()
    page, picture = output / "audio.md", output / "audio-maps.png"
    with report_errors():
        check_results(page, picture)
        pieces = sum(1 for path in data.iterdir() if path.is_dir()) if data.is_dir() else 0
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=pieces * evaluation.STEPS)

            def report(text: str, steps: int) -> None:
                progress.update(bar, advance=steps, description=text)
                if not console.is_terminal:
                    console.print(text, highlight=False, soft_wrap=True)

            folds = evaluation.experiment(data, output / "pieces", report)
        text = evaluation.markdown(folds)
        console.print(text, highlight=False, soft_wrap=True)
        page.write_text(f"{origin()}\n\n{text}", encoding="utf-8")
        figure = draw_maps(
            np.array(folds[0]["truth"]), evaluation.maps(folds[0]), "A piece that was left out of training"
        )
        figure.savefig(picture, dpi=120)
