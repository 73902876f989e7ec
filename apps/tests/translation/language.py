"""A toy language pair: a translation has the words in reverse order and upper case."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

WORDS = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"]


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Random sentence pairs."""
    rng = random.Random(seed)
    lines = [rng.choices(WORDS, k=rng.randint(2, 5)) for _ in range(count)]
    return [(" ".join(line), " ".join(word.upper() for word in reversed(line))) for line in lines]


def write(folder: Path, count: int = 60) -> Path:
    """Write the files of train (gzipped), val and test in fr and en."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, size) in enumerate({"train": count, "val": 6, "test_2016_flickr": 6}.items()):
        for side, language in enumerate(("fr", "en")):
            text = "".join(f"{pair[side]}\n" for pair in pairs(size, seed))
            if split == "train":
                (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
            else:
                (folder / f"{split}.{language}").write_text(text)
    return folder
