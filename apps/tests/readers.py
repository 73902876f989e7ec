"""Valid inputs of each reader of files, and checks of its behavior on changed inputs."""

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
"""Maximum number of characters of an error message, without the path."""
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_WORDS = b"\t|\n|\r|-|O|NaN|-Infinity|null|true|[]|{}|0|-1|1e39|1e999|99999999999|\\ud800|\xef\xbb\xbf|\xff".split(b"|")


class Slot(NamedTuple):
    """A file, or a member of an archive, whose bytes a test replaces.

    Args:
        file: Path in the folder of the reader.
        seeds: Bytes to start from. With the first of them, the folder is valid.
        read: Function that reads the folder and checks the result.
        packed: Function from the bytes of the slot to the bytes of the file, default the identity.

    """

    file: str
    seeds: list[bytes]
    read: Callable[[Path], None]
    packed: Callable[[bytes], bytes] = bytes


class Folder:
    """A valid folder of a reader, in which an input replaces one slot. Its first byte selects the slot."""

    def __init__(self, reader: str, folder: Path) -> None:
        _watch()
        self.folder, self.slots = folder, READERS[reader]()
        self._valid = {slot.file: slot.packed(slot.seeds[0]) for slot in self.slots}
        for file, content in self._valid.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        for slot in self.slots:
            slot.read(folder)  # also triggers late imports of libraries, which are not misbehavior

    @property
    def seeds(self) -> list[bytes]:
        """Valid inputs to start from."""
        return [bytes([n]) + seed for n, slot in enumerate(self.slots) for seed in slot.seeds]

    @property
    def words(self) -> list[bytes]:
        """Byte sequences for the fuzzer to insert: words of the seeds, and values that are hard to parse."""
        return sorted({word for seed in self.seeds for word in re.findall(rb"[\w.-]{2,20}", seed)} | set(_WORDS))

    def check(self, data: bytes) -> str:
        """Read the folder with an input. Returns the error message, or "" if the input is valid.

        Raises ``AssertionError`` if the reader misbehaves.
        """
        slot = self.slots[data[0] % len(self.slots)] if data else self.slots[0]
        path = self.folder / slot.file
        path.write_bytes(slot.packed(data[1:]))
        try:
            with _quiet():
                slot.read(self.folder)
        except ValueError as error:
            return self._sentence(error)
        finally:
            path.write_bytes(self._valid[slot.file])
        return ""

    def _sentence(self, error: ValueError) -> str:
        """Message of an error, which must be a short printable line that names a file of the folder."""
        text = str(error)
        names = ["standard input", *(Path(file).name for file in self._valid)]
        is_named = type(error) is ValueError and any(name in text for name in names)
        if not is_named or _UNWRITABLE.search(text) or len(text) > LONGEST + len(str(self.folder)):
            raise AssertionError(f"not a sentence that names the file: {type(error).__name__}: {text!r}") from error
        return text


# --- actions that a reader must not take

_FORBIDDEN = re.compile(
    r"os\.(system|exec|fork|posix_spawn|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|putenv)"
    r"|subprocess\.|shutil\.|tempfile\.|socket\.(connect|bind)|webbrowser\."
)
_actions: list[str] | None = None


def _record(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: record events that write files, start processes or connect to the network."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if _actions is not None and (writes or _FORBIDDEN.match(event)):
        _actions.append(f"{event} {args}")


@cache
def _watch() -> None:
    """Install the audit hook once, since hooks cannot be removed."""
    sys.addaudithook(_record)


@contextmanager
def _quiet() -> Iterator[None]:
    """Raise ``AssertionError`` if the block prints, warns, writes a file or starts a process."""
    global _actions
    _actions, printed = [], io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as warned, redirect_stdout(printed), redirect_stderr(printed):
            warnings.simplefilter("always")
            yield
    finally:
        actions, _actions = _actions, None
        assert not warned, f"warned: {warned[0].category.__name__}: {warned[0].message}"
        assert not printed.getvalue(), f"printed: {printed.getvalue()}"
        assert not actions, f"did: {actions[0]}"


# --- columns


def column_slots() -> list[Slot]:
    spaces = b"-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\nPeter NNP I-NP B-PER\n"
    tabs = "New York\tB-LOC\nis\tO\n10\u00a0000\tS-NUM\n\nbig\tE-X\n".encode()
    return [
        Slot("train.txt", [spaces, tabs], lambda folder: _check_columns(folder / "train.txt")),
        Slot("dev.txt", [spaces], lambda folder: _check_columns(folder / "dev.txt", kinds={"ORG", "PER"})),
        Slot("train.txt.gz", [compress(spaces, mtime=0)], lambda folder: _check_columns(folder / "train.txt.gz")),
        Slot("standard input", ["two words\n\nthr\u00e9\nend".encode(), b"\xef\xbb\xbfone\ntwo"], _check_chunks),
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


def midi_slots() -> list[Slot]:
    truth = b"100\t500\t60\t1\n120\t501\t64\t2\n900\t1000\t67\t1\n"
    return [
        Slot("score.mid", [_midi(), _midi(drums=True)], lambda folder: _check_score(read_midi(folder / "score.mid"))),
        Slot("truth.txt", [truth], _check_truth),
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


def wav_slots() -> list[Slot]:
    wave = 0.3 * np.sin(np.arange(1200) / 5)
    kinds = [("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("WAV", "MS_ADPCM"), ("WAVEX", "PCM_16"), ("FLAC", "PCM_S8")]
    kinds += [("AIFF", "PCM_S8"), ("AU", "ULAW"), ("W64", "PCM_U8"), ("CAF", "ALAC_16")]
    return [Slot("a.wav", [_audio(wave, *kind) for kind in kinds], lambda folder: _check_audio(folder / "a.wav"))]


def _audio(wave: np.ndarray[Any, Any], kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, 8000, subtype, format=kind)
    return re.sub(rb"(PEAK.{8}).{4}", rb"\1....", file.getvalue(), flags=re.DOTALL)  # without the time of writing


def _check_audio(path: Path) -> None:
    audio = features.load(path)
    assert audio.ndim == 1
    assert audio.dtype == np.float32
    assert len(audio) >= 4 * features.HOP
    assert np.isfinite(audio).all()
    assert np.isfinite(np.square(audio)).all()


# --- word vectors


def vector_slots() -> list[Slot]:
    words, vectors = np.array(["the", "\u00e9"]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    arrays = {"words": _npy(words), "vectors": _npy(vectors)}
    text = "2 3\nthe 1 2 3\n\u00e9 4e0 -.5 6\n".encode()
    return [
        Slot("a.vec", [text, text[4:]], lambda folder: _check_vectors(folder / "a.vec")),
        Slot("a.npz", [_npz(arrays)], lambda folder: _check_vectors(folder / "a.npz")),
        *(
            Slot(
                "a.npz", [array], lambda folder: _check_vectors(folder / "a.npz"), _Member(_npz(arrays), f"{name}.npy")
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


class _Member:
    """Function that replaces a file of an archive, with the right checksums."""

    def __init__(self, archive_bytes: bytes, name: str) -> None:
        with zipfile.ZipFile(io.BytesIO(archive_bytes)) as archive:
            self._files = {file: archive.read(file) for file in archive.namelist()}
        self._name = next(file for file in self._files if file.endswith(name))

    @property
    def seed(self) -> bytes:
        """Original bytes of the file."""
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


def checkpoint_slots() -> list[Slot]:
    weights = json.dumps({"weights": aligning.trained().tolist()}).encode()
    return [
        *_run_slots("ner", _tagger, _check_tagger),
        *_run_slots("translation", _translator, _check_translator),
        Slot("weights.json", [weights], lambda folder: _check_weights(folder / "weights.json")),
        *_torch_file_slots("last/last.pt", _last(), _check_last),
    ]


def _run_slots(name: str, write: Callable[[Path], None], read: Callable[[Path], None]) -> Iterator[Slot]:
    """Slots for all files of a run folder, which ``write`` creates."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            file, content = f"{name}/{path.name}", path.read_bytes()
            if path.suffix == ".pt":
                yield from _torch_file_slots(file, content, read)
            else:
                yield Slot(file, [content], read)


def _torch_file_slots(file: str, content: bytes, read: Callable[[Path], None]) -> Iterator[Slot]:
    """Slots for a checkpoint of torch, which is an archive, and for the pickle in it."""
    packed = _Member(content, "data.pkl")
    yield Slot(file, [content], read)
    yield Slot(file, [packed.seed, b"cos\nsystem\n(S'true'\ntR."], read, packed)


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
    if config.gamma > 1e-6:  # scores are divided by γ
        (tagged,) = tagging.tag(model, vocabulary, [["Ann", "was"]])
        assert len(tagged.tags) == 2


def _translator(run: Path) -> None:
    config = translating.Config(size=2)
    lines = ["ba aba", "ba ca"]  # with different last letters, the order of the word pieces would be random
    source, target = (parallel.Vocabulary.of("fr", lines, pieces=pieces, least=1) for pieces in (0, 9))
    torch.manual_seed(0)
    config.save(run)
    source.save(run / "source.json")
    target.save(run / "target.json")
    training.save(config.model(source, target).state_dict(), run / "best.pt")


def _check_translator(folder: Path) -> None:
    model, source, target, _ = translating.load(folder / "translation")
    assert all(weight.isfinite().all() for weight in model.parameters())
    ((text, translation),) = translating.translate(model, source, target, ["ba la"])
    assert isinstance(text, str)
    assert all(0 <= word < len(target) for word in target.encode(text))
    assert translation.log_probability <= 0


def _check_weights(path: Path) -> None:
    weights = aligning.trained(path)
    assert weights.ndim == 1
    assert weights.isfinite().all()


class _Untrained(training.Task[int]):
    """A task whose model has one weight, for runs that have no epoch left to train."""

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
    task = _Untrained()
    state = training.fit(task, training.Settings(minutes=0.0, optimizer="adamw"), folder / "last", resume=True)
    assert all(weight.isfinite().all() for weight in task.model.parameters())
    assert state.step_size > 0
    assert state.seconds >= 0
    assert isinstance(state.best, float)
    assert all(isinstance(number, int | float) for record in state.history for number in record.values())


# --- parallel text


def pair_slots() -> list[Slot]:
    french, english = "un chien\n\u00e9t\u00e9\n".encode(), b"a dog\nsummer\n"
    return [
        Slot("val.fr", [french], lambda folder: _check_pairs(folder, "dev")),
        Slot("val.en", [english], lambda folder: _check_pairs(folder, "dev")),
        Slot("train.fr.gz", [compress(french, mtime=0)], lambda folder: _check_pairs(folder, "train")),
        Slot("train.en", [english], lambda folder: _check_pairs(folder, "train")),
    ]


def _check_pairs(folder: Path, split: str) -> None:
    pairs = parallel.read_pairs(folder, split, ("fr", "en"))
    assert pairs
    assert all(len(pair) == 2 and not any("\n" in line for line in pair) for pair in pairs)
    for side in (0, 1):
        vocabulary = parallel.Vocabulary.of("fr", [pair[side] for pair in pairs], least=1)
        for pair in pairs:
            assert all(word < len(vocabulary) for word in vocabulary.encode(pair[side]))


READERS: dict[str, Callable[[], list[Slot]]] = {
    "columns": column_slots,
    "midi": midi_slots,
    "wav": wav_slots,
    "vectors": vector_slots,
    "checkpoints": checkpoint_slots,
    "pairs": pair_slots,
}
