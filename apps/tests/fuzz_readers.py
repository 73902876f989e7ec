"""Readers of files on bytes that no program wrote: python apps/tests/fuzz_readers.py midi --minutes 10

Bytes on which a reader errs are kept in a folder. Those on which it hangs, crashes or takes much memory end the search.
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
    sys.exit("apps/tests/fuzz_readers.py needs atheris, which finds the bytes that reach new code: pip install atheris")

PACKAGES = "bellmax", "bellmax_apps", "mido", "pretty_midi", "soundfile", "zipfile", "gzip", "json", "sacremoses"
LIMITS = "-timeout=5", "-rss_limit_mb=3000", "-max_len=20000", "-mutate_depth=3", "-verbosity=0"

with atheris.instrument_imports(include=PACKAGES):
    import numpy.lib.format
    import torch._weights_only_unpickler
    from readers import READERS, Folder

for function in (torch._weights_only_unpickler.Unpickler.load, numpy.lib.format.read_array):
    atheris.instrument_func(function)


class Search:
    """Tries bytes on a reader until the time is over, and keeps those on which it errs, one for each place."""

    def __init__(self, reader: str, findings: Path, minutes: float) -> None:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk takes longer to write than a reader to read
        self._place = Path(tempfile.mkdtemp(dir=memory))
        self._reader, self._findings = reader, findings
        self._folder = Folder(reader, self._place / "folder")
        self._end, self._tried, self._refused, self._found = time.monotonic() + 60 * minutes, 0, 0, set[str]()
        findings.mkdir(parents=True, exist_ok=True)

    def run(self, seed: int) -> None:
        words, corpus = self._place / "words", self._place / "corpus"
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in self._folder.words)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        corpus.mkdir()
        for n, data in enumerate(self._folder.seeds):
            (corpus / f"{n:02}").write_bytes(data)
        options = f"-seed={seed}", f"-dict={words}", f"-artifact_prefix={self._findings / self._reader}-"
        atheris.Setup([sys.argv[0], *LIMITS, *options, str(corpus)], self._try, custom_mutator=self._changed)
        atheris.Fuzz()

    def _try(self, data: bytes) -> None:
        self._tried += 1
        try:
            self._refused += bool(self._folder.check(data))
        except Exception as error:
            self._keep(data, error)
        if time.monotonic() > self._end:
            count = len(self._found)
            print(f"{self._reader}: {self._tried} files, of which {self._refused} were refused, {count} findings")
            sys.stdout.flush()
            shutil.rmtree(self._place)
            os._exit(min(count, 1))  # atheris would go on

    def _keep(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
        where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        if (key := f"{where} {str(error)[:40]}") not in self._found:
            self._found.add(key)
            path = self._findings / f"{self._reader}-{sha256(data).hexdigest()[:8]}"
            path.write_bytes(data)
            print(f"{path}: {type(error).__name__}: {str(error)[:300]} ({where})", flush=True)

    def _changed(self, data: bytes, most: int, number: int) -> bytes:
        """Half of the time from a file that can be read: most bytes that reach new code are refused early."""
        rng = random.Random(number)
        data = rng.choice(self._folder.seeds) if rng.random() < 0.5 else data
        return data[:1] + atheris.Mutate(data[1:], most - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=list(READERS))
    parser.add_argument("--minutes", type=float, default=1.0, help="when to stop (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the bytes that are tried (default: 1)")
    parser.add_argument(
        "--findings", type=Path, default=Path("build/fuzz"), help="where they are kept (default: build/fuzz)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    Search(args.reader, args.findings, args.minutes).run(args.seed)


if __name__ == "__main__":
    main()
