"""Entities to one tag per token, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """Tokens ``start`` to ``stop``, the latter not included."""

    kind: str
    start: int
    stop: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of IOB1, IOB2 or IOBES tags, read as CoNLL's own scorer does: nothing is malformed.

    >>> entities(["B-PER", "I-PER", "O", "S-LOC"])
    [Entity(kind='PER', start=0, stop=2), Entity(kind='LOC', start=3, stop=4)]
    >>> entities(["I-PER", "I-LOC", "B-LOC"])
    [Entity(kind='PER', start=0, stop=1), Entity(kind='LOC', start=1, stop=2), Entity(kind='LOC', start=2, stop=3)]
    """
    found: list[Entity] = []
    start, kind, last = 0, "", "O"
    for n, tag in enumerate((*tags, "O")):
        prefix, _, own = tag.partition("-")
        goes_on = prefix in ("I", "E") and last in ("B", "I") and own == kind
        if not goes_on:
            if last != "O":
                found.append(Entity(kind, start, n))
            start, kind = n, own
        last = prefix
    return found


def to_iob2(found: Iterable[Entity], length: int) -> list[str]:
    """
    >>> to_iob2([Entity("PER", 0, 2)], 3)
    ['B-PER', 'I-PER', 'O']
    """
    tags = ["O"] * length
    for kind, start, stop in found:
        tags[start:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - start - 1)]
    return tags


def to_iobes(found: Iterable[Entity], length: int) -> list[str]:
    """
    >>> to_iobes([Entity("PER", 0, 2), Entity("LOC", 2, 3)], 3)
    ['B-PER', 'E-PER', 'S-LOC']
    """
    tags = ["O"] * length
    for kind, start, stop in found:
        inside = [f"I-{kind}"] * (stop - start - 2)
        tags[start:stop] = [f"S-{kind}"] if stop == start + 1 else [f"B-{kind}", *inside, f"E-{kind}"]
    return tags
