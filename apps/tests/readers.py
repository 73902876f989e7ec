"""Fuzzing of file readers: seed folders, and the properties that must hold for everything that is read."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from gzip import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pretty_midi
import soundfile
import torch

import bellmax_apps.audio.align as aligning
import bellmax_apps.ner.data as columns
import bellmax_apps.ner.tagging as tagging
import bellmax_apps.training as training
import bellmax_apps.translation.data as parallel
import bellmax_apps.translation.translating as translating
from bellmax_apps.audio import features
from bellmax_apps.audio.score import Score, read_midi, read_truth
from bellmax_apps.files import chunks

LONGEST = 400
"""Letters of a sentence that says what is wrong, without the path."""
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_WORDS = b"\t|\n|\r|-|O|NaN|-Infinity|null|true|[]|{}|0|-1|1e39|1e999|99999999999|\\ud800|\xef\xbb\xbf|\xff".split(b"|")


class Part(NamedTuple):
    """A file, or a file in an archive, whose bytes are replaced.

    Args:
        file: Name of the file in the folder.
        seeds: Bytes to mutate. The folder is valid with the first of them.
        read: Function that reads the folder and asserts properties of the result.
        packed: Function from the replaced bytes to the bytes of the file.

    """

    file: str
    seeds: list[bytes]
    read: Callable[[Path], None]
    packed: Callable[[bytes], bytes] = bytes


class Folder:
    """A valid folder in which one target at a time is replaced. The first byte of the data selects the target."""

    def __init__(self, reader: str, folder: Path) -> None:
        _watch()
        self.folder, self.parts = folder, READERS[reader]()
        self._whole = {part.file: part.packed(part.seeds[0]) for part in self.parts}
        for file, whole in self._whole.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(whole)
        for part in self.parts:
            part.read(folder)  # also imports lazily loaded modules

    @property
    def seeds(self) -> list[bytes]:
        return [bytes([n]) + seed for n, part in enumerate(self.parts) for seed in part.seeds]

    @property
    def words(self) -> list[bytes]:
        """Tokens for the fuzzer's dictionary: words of the seeds, and tokens that often break readers."""
        return sorted({word for seed in self.seeds for word in re.findall(rb"[\w.-]{2,20}", seed)} | set(_WORDS))

    def check(self, data: bytes) -> str:
        """Read the folder with these bytes. Returns the error message, or ""."""
        part = self.parts[data[0] % len(self.parts)] if data else self.parts[0]
        path = self.folder / part.file
        path.write_bytes(part.packed(data[1:]))
        try:
            with _quiet():
                part.read(self.folder)
        except ValueError as error:
            return self._sentence(error)
        finally:
            path.write_bytes(self._whole[part.file])
        return ""

    def _sentence(self, error: ValueError) -> str:
        text = str(error)
        names = ["standard input", *(Path(file).name for file in self._whole)]
        is_named = type(error) is ValueError and any(name in text for name in names)
        if not is_named or _UNWRITABLE.search(text) or len(text) > LONGEST + len(str(self.folder)):
            raise AssertionError(f"not a sentence that names the file: {type(error).__name__}: {text!r}") from error
        return text


# --- forbidden side effects

_DEEDS = re.compile(
    r"os\.(system|exec|fork|posix_spawn|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|putenv)"
    r"|subprocess\.|shutil\.|tempfile\.|socket\.(connect|bind)|webbrowser\."
)
_done: list[str] | None = None


def _notice(event: str, args: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if _done is not None and (writes or _DEEDS.match(event)):
        _done.append(f"{event} {args}")


@cache
def _watch() -> None:
    sys.addaudithook(_notice)


@contextmanager
def _quiet() -> Iterator[None]:
    """Raise an AssertionError if the code inside prints, warns, writes a file or starts a process."""
    global _done
    _done, printed = [], io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as warned, redirect_stdout(printed), redirect_stderr(printed):
            warnings.simplefilter("always")
            yield
    finally:
        done, _done = _done, None
        assert not warned, f"warned: {warned[0].category.__name__}: {warned[0].message}"
        assert not printed.getvalue(), f"printed: {printed.getvalue()}"
        assert not done, f"did: {done[0]}"


# --- columns


def of_columns() -> list[Part]:
    spaces = b"-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\nPeter NNP I-NP B-PER\n"
    tabs = "New York\tB-LOC\nis\tO\n10\u00a0000\tS-NUM\n\nbig\tE-X\n".encode()
    return [
        Part("train.txt", [spaces, tabs], lambda folder: _check_columns(folder / "train.txt")),
        Part("dev.txt", [spaces], lambda folder: _check_columns(folder / "dev.txt", kinds={"ORG", "PER"})),
        Part("train.txt.gz", [compress(spaces, mtime=0)], lambda folder: _check_columns(folder / "train.txt.gz")),
        Part("standard input", ["two words\n\nthr\u00e9\nend".encode(), b"\xef\xbb\xbfone\ntwo"], _check_chunks),
    ]


def _check_columns(path: Path, kinds: set[str] | None = None) -> None:
    sentences = columns.read(path, kinds=kinds)
    assert sentences
    for sentence, other in zip(sentences, columns.as_iobes(sentences), strict=True):
        assert len(sentence.tokens) == len(sentence.tags) == len(other.tags) > 0
        assert all(sentence.tokens)
        assert all(re.fullmatch(r"O|[BIES]-.+", tag, re.DOTALL) for tag in (*sentence.tags, *other.tags))
    columns.Corpus(columns.as_iobes(sentences), columns.Vocabulary.of(columns.as_iobes(sentences)))


def _check_chunks(folder: Path) -> None:
    data = (folder / "standard input").read_bytes()
    lines = [line for chunk in chunks(io.BytesIO(data)) for line in chunk]
    assert "\n".join(lines).encode() == data.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    for line in lines:
        assert all(columns.tokens_of(line))


# --- MIDI


def of_midi() -> list[Part]:
    truth = b"100\t500\t60\t1\n120\t501\t64\t2\n900\t1000\t67\t1\n"
    return [
        Part("score.mid", [_midi(), _midi(drums=True)], lambda folder: _check_score(read_midi(folder / "score.mid"))),
        Part("truth.txt", [truth], _check_truth),
    ]


def _midi(*, drums: bool = False) -> bytes:
    midi, file = pretty_midi.PrettyMIDI(initial_tempo=100), io.BytesIO()
    for program in (0, 40):
        instrument = pretty_midi.Instrument(program, is_drum=drums and program > 0)
        instrument.notes = [pretty_midi.Note(80, 60 + n, 0.5 + 0.5 * n, 1.25 + 0.5 * n) for n in range(4)]
        instrument.pitch_bends = [pretty_midi.PitchBend(100, 0.7)]
        instrument.control_changes = [pretty_midi.ControlChange(64, 100, 0.6)]
        midi.instruments.append(instrument)
    midi.time_signature_changes.append(pretty_midi.TimeSignature(3, 4, 0))
    midi.key_signature_changes.append(pretty_midi.KeySignature(3, 0))
    midi.lyrics.append(pretty_midi.Lyric("la", 0.5))
    midi.write(file)
    return file.getvalue()


def _check_score(score: Score) -> None:
    assert len(score) == len(score.sounding) == len(score.beginning) > 0
    assert np.isfinite(score.onsets).all()
    assert (np.diff(score.onsets) > 0).all()
    assert score.onsets[0] >= 0
    assert all(0 <= start <= end < np.inf and 0 <= pitch <= 127 for start, end, pitch in score.notes)
    assert all(new and new <= held for new, held in zip(score.beginning, score.sounding, strict=True))


def _check_truth(folder: Path) -> None:
    score = Score.of([(0.5, 2.0, 60), (0.5, 2.0, 64), (1.0, 3.0, 67)])
    times = read_truth(folder / "truth.txt", score)
    assert times.shape == (2,)
    assert np.isfinite(times).all()


# --- WAV


def of_wav() -> list[Part]:
    wave = 0.3 * np.sin(np.arange(1200) / 5)
    kinds = [("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("WAV", "MS_ADPCM"), ("WAVEX", "PCM_16"), ("FLAC", "PCM_S8")]
    kinds += [("AIFF", "PCM_S8"), ("AU", "ULAW"), ("W64", "PCM_U8"), ("CAF", "ALAC_16")]
    return [Part("a.wav", [_audio(wave, *kind) for kind in kinds], lambda folder: _check_audio(folder / "a.wav"))]


def _audio(wave: np.ndarray[Any, Any], kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, 8000, subtype, format=kind)
    return re.sub(rb"(PEAK.{8}).{4}", rb"\1....", file.getvalue(), flags=re.DOTALL)  # the time of writing


def _check_audio(path: Path) -> None:
    audio = features.load(path)
    assert audio.ndim == 1
    assert audio.dtype == np.float32
    assert len(audio) >= 4 * features.HOP
    assert np.isfinite(audio).all()
    assert np.isfinite(np.square(audio)).all()


# --- word vectors


def of_vectors() -> list[Part]:
    words, vectors = np.array(["the", "\u00e9"]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    arrays = {"words": _npy(words), "vectors": _npy(vectors)}
    text = "2 3\nthe 1 2 3\n\u00e9 4e0 -.5 6\n".encode()
    return [
        Part("a.vec", [text, text[4:]], lambda folder: _check_vectors(folder / "a.vec")),
        Part("a.npz", [_npz(arrays)], lambda folder: _check_vectors(folder / "a.npz")),
        *(
            Part(
                "a.npz", [array], lambda folder: _check_vectors(folder / "a.npz"), _Packed(_npz(arrays), f"{name}.npy")
            )
            for name, array in arrays.items()
        ),
    ]


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(arrays: dict[str, bytes]) -> bytes:
    return _zipped({f"{name}.npy": array for name, array in arrays.items()})


def _zipped(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()


class _Packed:
    """Replace one file of an archive and update its checksum."""

    def __init__(self, whole: bytes, name: str) -> None:
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            self._files = {file: archive.read(file) for file in archive.namelist()}
        self._name = next(file for file in self._files if file.endswith(name))

    @property
    def seed(self) -> bytes:
        return self._files[self._name]

    def __call__(self, data: bytes) -> bytes:
        return _zipped({**self._files, self._name: data})


def _check_vectors(path: Path) -> None:
    words, vectors = columns.read_vectors(path)
    assert vectors.ndim == 2
    assert len(words) == len(vectors) > 0
    assert vectors.shape[1] > 0
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    assert all(type(word) is str for word in words)
    "".join(words).encode()


# --- checkpoints


def of_checkpoints() -> list[Part]:
    weights = json.dumps({"weights": aligning.trained().tolist()}).encode()
    return [
        *_parts_of_run("ner", _tagger, _check_tagger),
        *_parts_of_run("translation", _translator, _check_translator),
        Part("weights.json", [weights], lambda folder: _check_weights(folder / "weights.json")),
        *_checkpoints("last/last.pt", _last(), _check_last),
    ]


def _parts_of_run(name: str, write: Callable[[Path], None], read: Callable[[Path], None]) -> Iterator[Part]:
    with tempfile.TemporaryDirectory() as made:
        write(Path(made))
        for path in sorted(Path(made).iterdir()):
            file, whole = f"{name}/{path.name}", path.read_bytes()
            if path.suffix == ".pt":
                yield from _checkpoints(file, whole, read)
            else:
                yield Part(file, [whole], read)


def _checkpoints(file: str, whole: bytes, read: Callable[[Path], None]) -> Iterator[Part]:
    """A torch archive, and the pickle in it."""
    packed = _Packed(whole, "data.pkl")
    yield Part(file, [whole], read)
    yield Part(file, [packed.seed, b"cos\nsystem\n(S'true'\ntR."], read, packed)


def _tagger(run: Path) -> None:
    config = tagging.Config(word_size=2, letter_size=2, hidden_size=2)
    vocabulary = columns.Vocabulary.of([columns.Sentence(["Ann", "is"], ["S-PER", "O"])])
    torch.manual_seed(0)
    config.save(run)
    vocabulary.save(run / "vocabulary.json")
    training.save(config.tagger(vocabulary).state_dict(), run / "best.pt")


def _check_tagger(folder: Path) -> None:
    model, vocabulary, config = tagging.load(folder / "ner")
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert config.settings.epochs > 0
    if config.gamma > 1e-6:  # scores are divided by it
        (tags,) = tagging.tag(model, vocabulary, [["Ann", "was"]])
        assert len(tags.tags) == 2


def _translator(run: Path) -> None:
    config = translating.Config(size=2)
    lines = ["ba aba", "ba ca"]  # words that end in the same letter: otherwise the order of subwords is random
    source, target = (parallel.Vocabulary.of("fr", lines, pieces=pieces, least=1) for pieces in (0, 9))
    torch.manual_seed(0)
    config.save(run)
    source.save(run / "source.json")
    target.save(run / "target.json")
    training.save(config.model(source, target).state_dict(), run / "best.pt")


def _check_translator(folder: Path) -> None:
    model, source, target, _ = translating.load(folder / "translation")
    assert all(weight.isfinite().all() for weight in model.parameters())
    ((text, score),) = translating.translate(model, source, target, ["ba la"])
    assert isinstance(text, str)
    assert all(0 <= word < len(target) for word in target.encode(text))
    assert score.log_probability <= 0


def _check_weights(path: Path) -> None:
    weights = aligning.trained(path)
    assert weights.ndim == 1
    assert weights.isfinite().all()


class _Nothing(training.Task[int]):
    """A model with one weight, trained for no time."""

    metric = "score"

    def __init__(self) -> None:
        self.model: torch.nn.Module = torch.nn.Linear(1, 1, bias=False)


def _last() -> bytes:
    model, file = torch.nn.Linear(1, 1, bias=False), io.BytesIO()
    torch.nn.init.ones_(model.weight)
    model.weight.grad = torch.ones(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    history = [{"epoch": 1, "seconds": 2.0, "score": 3.0}]
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, "history": history, "step_size": 0.1, "best": 3.0}, file)
    return file.getvalue()


def _check_last(folder: Path) -> None:
    task = _Nothing()
    state = training.fit(task, training.Settings(minutes=0.0, optimizer="adamw"), folder / "last", resume=True)
    assert all(weight.isfinite().all() for weight in task.model.parameters())
    assert state.step_size > 0
    assert state.seconds >= 0
    assert isinstance(state.best, float)
    assert all(isinstance(number, int | float) for record in state.history for number in record.values())


# --- parallel text


def of_pairs() -> list[Part]:
    french, english = "un chien\n\u00e9t\u00e9\n".encode(), b"a dog\nsummer\n"
    return [
        Part("val.fr", [french], lambda folder: _check_pairs(folder, "dev")),
        Part("val.en", [english], lambda folder: _check_pairs(folder, "dev")),
        Part("train.fr.gz", [compress(french, mtime=0)], lambda folder: _check_pairs(folder, "train")),
        Part("train.en", [english], lambda folder: _check_pairs(folder, "train")),
    ]


def _check_pairs(folder: Path, split: str) -> None:
    pairs = parallel.read_pairs(folder, split, ("fr", "en"))
    assert pairs
    assert all(len(pair) == 2 and not any("\n" in line for line in pair) for pair in pairs)
    for side in (0, 1):
        vocabulary = parallel.Vocabulary.of("fr", [pair[side] for pair in pairs], least=1)
        for pair in pairs:
            assert all(word < len(vocabulary) for word in vocabulary.encode(pair[side]))


READERS: dict[str, Callable[[], list[Part]]] = {
    "columns": of_columns,
    "midi": of_midi,
    "wav": of_wav,
    "vectors": of_vectors,
    "checkpoints": of_checkpoints,
    "pairs": of_pairs,
}
