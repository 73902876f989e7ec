"""Measure alignments of difficult recordings: other instruments, out of tune, transposed, noisy, in a large room.

FluidSynth (``apt install fluidsynth fluid-soundfont-gm``) plays each MIDI file of a folder with rubato, once for each
condition. So the true time of every note is known. The results are in apps/results/audio.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import librosa
import numpy as np
import pretty_midi
import soundfile
from numpy.typing import NDArray
from rich.progress import track
from scipy import signal

from bellmax_apps.audio.align import MODELS, align_recording
from bellmax_apps.audio.evaluation import Recording, by_synctoolbox
from bellmax_apps.audio.features import RATE
from bellmax_apps.audio.score import Score

Wave = NDArray[np.float32]
Player = Callable[[pretty_midi.PrettyMIDI], Wave]
GUITAR, ORGAN = (24,), (19,)  # General MIDI program numbers


@dataclass(frozen=True)
class Condition:
    """The way a score is played and recorded.

    Args:
        programs: General MIDI instruments, assigned to the parts in turn. Default: the instruments of the file.
        semitones: The transposition in semitones.
        cents: The detuning in cents, as from a record that is played too fast.
        signal_to_noise: The signal-to-noise ratio in dB of a record with hiss, crackle and a band of 150 to 3800 Hz.
            Default: no noise.
        reverberation: The time in seconds in which sound decays by 60 dB.

    """

    programs: tuple[int, ...] = ()
    semitones: int = 0
    cents: float = 0.0
    signal_to_noise: float | None = None
    reverberation: float = 0.0


CONDITIONS = {
    "its instruments": Condition(),
    "guitar": Condition(GUITAR),
    "organ": Condition(ORGAN),
    "35 cents flat": Condition(cents=-35),
    "60 cents sharp": Condition(cents=60),
    "2 semitones higher": Condition(semitones=2),
    "3 semitones lower": Condition(semitones=-3),
    "old record, 10 dB": Condition(signal_to_noise=10),
    "church, 2.5 s": Condition(reverberation=2.5),
    "all of it": Condition(ORGAN, semitones=-1, cents=30, signal_to_noise=15, reverberation=1.2),
}


# --- a performance


def rubato(end: float, rng: np.random.Generator) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return a function from score time to performance time. The tempo varies at random, and slows down at the end."""
    beats = np.arange(0.0, end + 2.0)
    pace = np.zeros(len(beats))
    for n in range(1, len(beats)):
        pace[n] = 0.85 * pace[n - 1] + rng.normal(0, 0.12)
    slow = np.exp(pace + rng.normal(0, 0.1, len(beats)))
    slow[-4:] *= np.linspace(1, 1.6, 4)[-len(slow) :]
    times = 0.6 + np.concatenate([[0.0], np.cumsum(slow[:-1])])
    return lambda at: np.interp(at, beats, times)


def performed(
    midi: pretty_midi.PrettyMIDI, of: Condition, rng: np.random.Generator
) -> tuple[pretty_midi.PrettyMIDI, Callable[[NDArray[np.float64]], NDArray[np.float64]]]:
    """Return the performed notes, with onset errors of 12 ms, and a function from score time to performance time."""
    when = rubato(midi.get_end_time(), rng)
    played = pretty_midi.PrettyMIDI()
    for number, part in enumerate(midi.instruments):
        program = of.programs[number % len(of.programs)] if of.programs else part.program
        voice = pretty_midi.Instrument(program)
        for note in part.notes:
            begin, end = when(np.array([note.start, note.end])) + rng.normal(0, 0.012)
            loudness = int(np.clip(rng.normal(75, 12), 30, 120))
            voice.notes.append(pretty_midi.Note(loudness, note.pitch + of.semitones, begin, max(end, begin + 0.05)))
        played.instruments.append(voice)
    return played, when


def by_fluidsynth(sounds: Path) -> Player:
    """Return a player that renders MIDI with a soundfont at 44.1 kHz."""

    def play(midi: pretty_midi.PrettyMIDI) -> Wave:
        with tempfile.TemporaryDirectory() as folder:
            score, sound = f"{folder}/a.mid", f"{folder}/a.wav"
            midi.write(score)
            dry = ["-R", "0", "-C", "0", "-g", "0.5", "-r", str(2 * RATE)]
            subprocess.run(["fluidsynth", "-niq", *dry, "-F", sound, sounds, score], check=True, capture_output=True)
            return np.asarray(soundfile.read(sound, dtype="float32", always_2d=True)[0].mean(1))

    return play


def recorded(audio: Wave, of: Condition, rng: np.random.Generator) -> tuple[Wave, float]:
    """Return a recording at 22.05 kHz of audio at 44.1 kHz, and the factor by which it is faster."""
    faster = 2 ** (of.cents / 1200)
    heard = librosa.resample(audio, orig_sr=2 * RATE * faster, target_sr=RATE)
    if of.reverberation:
        time = np.arange(int(1.2 * RATE * of.reverberation)) / RATE
        room = rng.normal(size=len(time)) * 10 ** (-3 * time / of.reverberation)
        room /= np.linalg.norm(room)
        room[0] += 1
        heard = signal.fftconvolve(heard, room)[: len(heard)]
    if of.signal_to_noise is not None:
        record = signal.butter(4, [150, 3800], "bandpass", fs=RATE, output="sos")
        hiss = signal.sosfilt(signal.butter(1, 2500, fs=RATE, output="sos"), rng.normal(size=len(heard)))
        crackle = signal.sosfilt(record, (rng.random(len(heard)) < 8 / RATE) * rng.normal(0, 30, len(heard)))
        noise = hiss / hiss.std() + crackle
        heard = signal.sosfilt(record, heard)
        heard += noise / noise.std() * heard.std() * 10 ** (-of.signal_to_noise / 20)
    return (0.7 * heard / np.abs(heard).max()).astype(np.float32), faster


# --- errors


def methods(audio: Wave, score: Score) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield the onsets of the events in seconds, for each model, and for synctoolbox in the right key if installed."""
    for name, model in MODELS.items():
        found, pitch = align_recording(audio, score, model())
        yield name, found.times
    peer = by_synctoolbox(Recording("", audio, score.transposed(pitch.semitones), score.onsets))
    if peer is not None:
        yield "synctoolbox", peer


def errors(path: Path, name: str, play: Player, seconds: float) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield the errors of each method in seconds, on the first seconds of a score under a condition."""
    rng, of = np.random.default_rng(zlib.crc32(f"{path.stem} {name}".encode())), CONDITIONS[name]
    midi = pretty_midi.PrettyMIDI(str(path))
    midi.instruments = [part for part in midi.instruments if not part.is_drum]
    for part in midi.instruments:
        part.notes = [note for note in part.notes if note.start < seconds]
        for note in part.notes:
            note.end = min(note.end, seconds)
    score = Score.of([(note.start, note.end, note.pitch) for part in midi.instruments for note in part.notes])
    played, when = performed(midi, of, rng)
    audio, faster = recorded(play(played), of, rng)
    for method, found in methods(audio, score):
        yield method, np.abs(found - when(score.onsets) / faster)


def table(found: dict[tuple[str, str], list[NDArray[np.float64]]]) -> str:
    """Return a table of the mean and median error in ms by condition and method, averaged over the scores."""
    names = list(dict.fromkeys(method for _, method in found))
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for condition in dict.fromkeys(condition for condition, _ in found):
        cells = []
        for name in names:
            own = found[condition, name]
            mean, median = (1000 * np.mean([kind(error) for error in own]) for kind in (np.mean, np.median))
            cells.append(f"{mean:.0f} / {median:.0f}")
        lines.append(f"| {condition} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", type=Path, help="folder of MIDI files")
    parser.add_argument("--sounds", type=Path, default=Path("/usr/share/sounds/sf2/FluidR3_GM.sf2"), help="soundfont")
    parser.add_argument("--seconds", type=float, default=60.0, help="length to play of each score (default: 60)")
    given = parser.parse_args(arguments)
    paths = sorted(given.scores.glob("*.mid"))
    if not paths:
        parser.error(f"{given.scores} must hold MIDI files (.mid), got none")
    if not shutil.which("fluidsynth"):
        parser.error("FluidSynth must be installed, such as by apt install fluidsynth")
    if not given.sounds.exists():
        parser.error(f"{given.sounds} does not exist: name a soundfont with --sounds")
    play, found = by_fluidsynth(given.sounds), dict[tuple[str, str], list[NDArray[np.float64]]]()
    for condition in track(CONDITIONS, "conditions"):
        for path in paths:
            for method, error in errors(path, condition, play, given.seconds):
                found.setdefault((condition, method), []).append(error)
    print(table(found))


if __name__ == "__main__":
    main()
