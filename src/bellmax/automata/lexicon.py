"""Automata of words that are spelled with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from bellmax.automata.builders import as_labels
from bellmax.automata.reading import read_scores
from bellmax.automata.scores import one_hot, zeros
from bellmax.automata.table import Table
from bellmax.inputs import Numbers

_Node = tuple[int, ...]


def lexicon(words: Mapping[str, Sequence[int] | Tensor], scores: Numbers | None) -> Table:
    """Return the looped trie of spellings. State 0 is between two words.

    The output of a word is on its first arc that no other word shares.
    """
    if not isinstance(words, Mapping):
        raise ValueError(f"words must map each word to its labels, got a {type(words).__name__}")
    if not words:
        raise ValueError("words must have at least one word, got none")
    spellings = [tuple(as_labels(f"words[{word!r}]", labels)) for word, labels in words.items()]
    for word, spelling in zip(words, spellings, strict=True):
        if not spelling:
            raise ValueError(f"words[{word!r}] must have at least one label, got none")
    values = zeros(len(words)) if scores is None else read_scores("scores", scores, len(words), "word")
    num_words: dict[_Node, int] = {}  # through each prefix
    for spelling in spellings:
        for n in range(1, len(spelling) + 1):
            num_words[spelling[:n]] = num_words.get(spelling[:n], 0) + 1
    state: dict[_Node, int] = {(): 0}
    arcs: dict[tuple[_Node, int], tuple[int, int, int, int]] = {}
    for number, spelling in enumerate(spellings):
        is_chosen = False
        for n in range(1, len(spelling) + 1):
            node, before = spelling[:n], spelling[: n - 1]
            is_last, is_single = n == len(spelling), num_words[node] == 1
            has_output = not is_chosen and (is_single or is_last)
            is_chosen |= has_output
            target = 0 if is_last else state.setdefault(node, len(state))
            key = (node, number if is_last else -1)
            arcs.setdefault(key, (state[before], target, spelling[n - 1], number if has_output else -1))
    rows = np.array([arcs[key] for key in sorted(arcs, key=lambda key: arcs[key][0])])
    root = one_hot(len(state), 0)
    names = tuple(words)
    return Table(rows, values.take(rows[:, 3]), root, root, range(len(state)), None, names)
