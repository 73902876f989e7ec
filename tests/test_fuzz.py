"""Some random programs of ``tests/fuzz.py`` with fixed seeds."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support import fuzzing

import bellmax as bx

# Comparisons of each kind that 240 programs must lead to.
LEAST = {"value": 25, "gradient": 35, "directional derivative": 5, "Hessian product": 10, "best path": 2}
LEAST |= {"entropy": 15, "topk": 15, "log_prob of a sample or of the best path is finite": 10}
LEAST |= {"bad number refused": 5, "bad number without effect": 2, "overflow refused": 2, "overflow solved": 3}


@pytest.mark.parametrize("first", [0, 240])
def test_random_programs_equal_the_list_of_their_paths(first: int) -> None:
    reports = [fuzzing.check(seed) for seed in range(first, first + 240)]
    programs = Counter(report.program for report in reports)
    assert set(programs) == {"DAG", "Chain", "ScoredChain", "Lattice", "DTW", "SemiMarkov", "Automaton"}
    assert min(programs.values()) > 5
    comparisons = sum((report.comparisons for report in reports), Counter[str]())
    assert not {kind: comparisons[kind] for kind, least in LEAST.items() if comparisons[kind] < least}
    assert comparisons["too many paths"] == 0


def test_a_wrong_answer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(
        s for s in range(300) if re.search(r": Chain, .* normal, eager, torch.float64", fuzzing.check(s).description)
    )
    right = bx.Chain.value.fget
    monkeypatch.setattr(bx.Chain, "value", property(lambda p: right(p) + 1e-4))
    with pytest.raises(AssertionError, match=rf"seed {seed}: Chain, .*: value"):
        fuzzing.check(seed)
