"""A few of the random programs of ``tests/fuzz.py``, always the same."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support import fuzzing

import bellmax as bx


@pytest.mark.parametrize("first", [0, 100])
def test_random_programs_equal_the_list_of_their_paths(first: int) -> None:
    names = Counter(fuzzing.check(seed).split(", ")[0].split(": ")[-1] for seed in range(first, first + 60))
    assert set(names) == {"DAG", "Chain", "ScoredChain", "Lattice", "DTW"}
    assert min(names.values()) > 5


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(s for s in range(300) if re.search(r": Chain, .* normal, eager, torch.float64", fuzzing.check(s)))
    right = bx.Chain.value.fget
    monkeypatch.setattr(bx.Chain, "value", property(lambda p: right(p) + 1e-4))
    with pytest.raises(AssertionError, match=rf"seed {seed}: Chain, .*: value"):
        fuzzing.check(seed)
