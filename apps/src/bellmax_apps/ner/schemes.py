"""Conversion between entities and one tag per token, in the schemes IOB1, IOB2 and IOBES."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """An entity of type ``kind`` with the tokens from ``start`` to ``stop`` − 1."""

    kind: str
    start: int
    stop: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """Entities of IOB1, IOB2 or IOBES tags.

    As in the CoNLL scorer, no sequence of tags is malformed: a tag that cannot continue an entity begins another one.

    >>> entities(["B-PER", "I-PER", "O", "S-LOC"])
    [Entity(kind='PER', start=0, stop=2), Entity(kind='LOC', start=3, stop=4)]
    >>> entities(["I-PER", "I-LOC", "B-LOC"])
    [Entity(kind='PER', start=0, stop=1), Entity(kind='LOC', start=1, stop=2), Entity(kind='LOC', start=2, stop=3)]
    """
    complete: list[Entity] = []
    start, kind, last_prefix = 0, "", "O"
    for n, tag in enumerate((*tags, "O")):
        prefix, _, tag_kind = tag.partition("-")
        is_continued = prefix in ("I", "E") and last_prefix in ("B", "I") and tag_kind == kind
        if not is_continued:
            if last_prefix != "O":
                complete.append(Entity(kind, start, n))
            start, kind = n, tag_kind
        last_prefix = prefix
    return complete


def to_iob2(spans: Iterable[Entity], length: int) -> list[str]:
    """Tags of a sentence of ``length`` tokens in IOB2: B begins an entity, I continues it, O is outside.

    >>> to_iob2([Entity("PER", 0, 2)], 3)
    ['B-PER', 'I-PER', 'O']
    """
    tags = ["O"] * length
    for kind, start, stop in spans:
        tags[start:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - start - 1)]
    return tags


def to_iobes(spans: Iterable[Entity], length: int) -> list[str]:
    """Tags of a sentence of ``length`` tokens in IOBES: as IOB2, but E ends an entity and S is an entity of one token.

    >>> to_iobes([Entity("PER", 0, 2), Entity("LOC", 2, 3)], 3)
    ['B-PER', 'E-PER', 'S-LOC']
    """
    tags = ["O"] * length
    for kind, start, stop in spans:
        inside = [f"I-{kind}"] * (stop - start - 2)
        tags[start:stop] = [f"S-{kind}"] if stop == start + 1 else [f"B-{kind}", *inside, f"E-{kind}"]
    return tags
