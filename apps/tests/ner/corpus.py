"""A toy language in which names begin with a capital, after "mr" (people) or "in" (places)."""

from __future__ import annotations

import random
from pathlib import Path

PEOPLE = ["ann", "bob lee", "cy", "dana fox", "ed"]
PLACES = ["rome", "new york", "oslo", "san juan bay"]


def sentence(rng: random.Random) -> list[tuple[str, str]]:
    """A random sentence: tokens with tags in IOB2."""
    rows = []
    for word in rng.choices(["the", "sees", "walks", "and", "to", "PER", "LOC"], k=rng.randint(3, 9)):
        if word in ("PER", "LOC"):
            tokens = rng.choice(PEOPLE if word == "PER" else PLACES).split()
            rows.append(("mr" if word == "PER" else "in", "O"))
            rows += [(token.title(), f"{'I' if n else 'B'}-{word}") for n, token in enumerate(tokens)]
        else:
            rows.append((word, "O"))
    return rows


def write(folder: Path, sizes: dict[str, int] | None = None) -> Path:
    """Write the files of train, dev and test to ``folder``."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (sizes or {"train": 80, "dev": 20, "test": 20}).items():
        text = "\n\n".join("\n".join("\t".join(row) for row in sentence(rng)) for _ in range(size))
        (folder / f"{split}.tsv").write_text(f"-DOCSTART-\tO\n\n{text}\n", encoding="utf-8")
    return folder
