"""Readers of files on bytes that no program wrote: python tests/fuzz_readers.py midi --minutes 10

Bytes on which a reader errs are kept in a folder. Those on which it hangs, crashes or takes much memory end the search.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

try:
    import atheris
except ImportError:
    sys.exit("tests/fuzz_readers.py needs atheris, which finds the bytes that reach new code: pip install atheris")

PACKAGES = "bellmax", "mido", "pretty_midi", "soundfile", "zipfile", "gzip", "json", "sacremoses"
LIMITS = "-timeout=5", "-rss_limit_mb=3000", "-max_len=20000", "-mutate_depth=3", "-verbosity=0", "-print_final_stats=1"

with atheris.instrument_imports(include=PACKAGES):
    import numpy.lib.format
    import torch._weights_only_unpickler
    from support.readers import READERS, Folder

for function in (torch._weights_only_unpickler.Unpickler.load, numpy.lib.format.read_array):
    atheris.instrument_func(function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=list(READERS))
    parser.add_argument("--minutes", type=float, default=1.0, help="when to stop (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the bytes that are tried (default: 1)")
    parser.add_argument(
        "--findings", type=Path, default=Path("build/fuzz"), help="folder to keep them in (default: build/fuzz)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.findings.mkdir(parents=True, exist_ok=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk takes longer to write than a reader to read
    folder, corpus = Folder(args.reader, Path(mkdtemp(dir=memory))), Path(mkdtemp())
    for n, seed in enumerate(folder.seeds):
        (corpus / f"{n:02}").write_bytes(seed)
    words = ["".join(f"\\x{byte:02x}" for byte in word) for word in folder.words]
    (folder.folder / "words").write_text("".join(f'"{word}"\n' for word in words))
    end, tried, refused, found = time.monotonic() + 60 * args.minutes, 0, 0, set[str]()

    def try_(data: bytes) -> None:
        nonlocal tried, refused
        tried += 1
        try:
            refused += bool(folder.check(data))
        except Exception as error:
            frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
            where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
            if (key := f"{where} {str(error)[:40]}") not in found:
                found.add(key)
                path = args.findings / f"{args.reader}-{sha256(data).hexdigest()[:8]}"
                path.write_bytes(data)
                print(f"{path}: {type(error).__name__}: {str(error)[:300]} ({', '.join(where[-3:])})", flush=True)
        if time.monotonic() > end:
            print(f"{args.reader}: {tried} files, of which {refused} were refused, {len(found)} findings", flush=True)
            os._exit(min(len(found), 1))  # atheris itself would not return

    def mutate(data: bytes, most: int, number: int) -> bytes:
        """Half of the time from a file that can be read: bytes that reach new code are mostly refused early."""
        rng = random.Random(number)
        data = rng.choice(folder.seeds) if rng.random() < 0.5 else data
        return data[:1] + atheris.Mutate(data[1:], most - 1)

    files = f"-artifact_prefix={args.findings / args.reader}-", f"-dict={folder.folder / 'words'}", str(corpus)
    atheris.Setup([sys.argv[0], *LIMITS, f"-seed={args.seed}", *files], try_, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
