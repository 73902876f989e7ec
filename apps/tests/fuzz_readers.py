"""Fuzz the readers of files: python apps/tests/fuzz_readers.py midi --minutes 10

Input on which a reader misbehaves is saved to a folder, and the search continues. If a reader hangs, crashes or takes
much memory, the search ends.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from hashlib import sha256
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("apps/tests/fuzz_readers.py needs atheris, a coverage-guided fuzzer: pip install atheris")

PACKAGES = "bellmax", "bellmax_apps", "mido", "pretty_midi", "soundfile", "zipfile", "gzip", "json", "sacremoses"
LIMITS = "-timeout=5", "-rss_limit_mb=3000", "-max_len=20000", "-mutate_depth=3", "-verbosity=0"

with atheris.instrument_imports(include=PACKAGES):
    import numpy.lib.format
    import torch._weights_only_unpickler
    from readers import READERS, Folder

for function in (torch._weights_only_unpickler.Unpickler.load, numpy.lib.format.read_array):
    atheris.instrument_func(function)


class Search:
    """A search for input on which a reader misbehaves. One input is saved for each traceback."""

    def __init__(self, reader: str, findings: Path, minutes: float) -> None:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would be slower than the reader
        self._workspace = Path(tempfile.mkdtemp(dir=memory))
        self._reader, self._findings = reader, findings
        self._folder = Folder(reader, self._workspace / "folder")
        self._end, self._tried, self._refused = time.monotonic() + 60 * minutes, 0, 0
        self._tracebacks: set[str] = set()
        findings.mkdir(parents=True, exist_ok=True)

    def run(self, seed: int) -> None:
        """Start the fuzzer, which exits the process when the time is over."""
        words, corpus = self._workspace / "words", self._workspace / "corpus"
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in self._folder.words)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        corpus.mkdir()
        for n, data in enumerate(self._folder.seeds):
            (corpus / f"{n:02}").write_bytes(data)
        options = f"-seed={seed}", f"-dict={words}", f"-artifact_prefix={self._findings / self._reader}-"
        atheris.Setup([sys.argv[0], *LIMITS, *options, str(corpus)], self._try, custom_mutator=self._mutate)
        atheris.Fuzz()

    def _try(self, data: bytes) -> None:
        """Give an input to the reader. After the last input, print a summary and exit."""
        self._tried += 1
        try:
            self._refused += bool(self._folder.check(data))
        except Exception as error:
            self._save(data, error)
        if time.monotonic() > self._end:
            count = len(self._tracebacks)
            print(f"{self._reader}: {self._tried} files, of which {self._refused} were refused, {count} findings")
            sys.stdout.flush()
            shutil.rmtree(self._workspace)
            os._exit(min(count, 1))  # an exception would not stop atheris

    def _save(self, data: bytes, error: Exception) -> None:
        """Save an input on which the reader misbehaves, unless its traceback is known."""
        frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
        where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        if (key := f"{where} {str(error)[:40]}") not in self._tracebacks:
            self._tracebacks.add(key)
            path = self._findings / f"{self._reader}-{sha256(data).hexdigest()[:8]}"
            path.write_bytes(data)
            print(f"{path}: {type(error).__name__}: {str(error)[:300]} ({where})", flush=True)

    def _mutate(self, data: bytes, most: int, seed: int) -> bytes:
        """Mutate an input of the fuzzer or, half of the time, a valid file, since readers refuse most inputs early."""
        rng = random.Random(seed)
        data = rng.choice(self._folder.seeds) if rng.random() < 0.5 else data
        return data[:1] + atheris.Mutate(data[1:], most - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=list(READERS))
    parser.add_argument("--minutes", type=float, default=1.0, help="when to stop (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    parser.add_argument(
        "--findings",
        type=Path,
        default=Path("build/fuzz"),
        help="folder for input on which a reader misbehaves (default: build/fuzz)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    Search(args.reader, args.findings, args.minutes).run(args.seed)


if __name__ == "__main__":
    main()
