"""check_program agrees with right programs, and sees what differs."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

import bellmax as bx


@bx.program("i j")
def cheapest(cost):
    rows, columns = cost.shape
    total = {(0, 0): cost[0, 0]}
    for i in range(rows):
        for j in range(columns):
            if i or j:
                above = [total[i - 1, j]] if i else []
                left = [total[i, j - 1]] if j else []
                total[i, j] = bx.min(above + left) + cost[i, j]
    return total[rows - 1, columns - 1]


def test_a_right_program_agrees():
    report = bx.check_program(cheapest, torch.rand(4, 5))
    assert report.ok
    assert report.num_paths == (35.0, 35)
    assert str(report).startswith("agrees: ")
    assert "35 by enumeration" in str(report)


def test_a_program_with_fractions_agrees():
    third = Fraction(1, 3)
    report = bx.check_program(bx.program("i")(lambda value: bx.max(value[0] * third, third)), torch.rand(2))
    assert report.ok, report
    assert report.num_paths == (2.0, 2)


def test_more_derivations_than_can_be_listed():
    report = bx.check_program(cheapest, torch.rand(10, 12))
    assert report.ok
    assert report.num_paths[1] is None
    assert "too many to enumerate" in str(report)


def test_a_program_that_is_not_a_function_of_its_arguments_differs():
    draw = random.Random(0)
    noisy = bx.program("i")(lambda value: bx.max(value) + draw.random())
    report = bx.check_program(noisy, torch.rand(3))
    assert not report.ok
    assert str(report).startswith("DIFFERS")


def test_programs_without_derivations_and_forbidden_scores():
    assert bx.check_program(bx.program("i")(lambda value: bx.max([]) + value[0]), torch.rand(3)).ok
    cost = torch.rand(3, 3)
    cost[1, 1] = torch.inf
    report = bx.check_program(cheapest, cost)
    assert report.ok, report
    assert report.num_paths == (2.0, 2)


def test_entries_that_no_derivation_uses_are_listed():
    report = bx.check_program(bx.program("i, j")(lambda a, b: bx.max(a[0], a[2]) + b[0]), torch.rand(4), torch.rand(1))
    assert report.ok
    assert report.num_unused == {"a": 2, "b": 0}
    assert str(report).endswith("2 entries of a are in no derivation")
    one = bx.check_program(bx.program("i")(lambda a: bx.max(a[0], a[2])), torch.rand(3))
    assert str(one).endswith("1 entry of a is in no derivation")


@bx.program("edge")
def walk(weight, *, copies):
    """Find the shortest walk 0 → 1 → 2 or 0 → 2. A copy of the last round reaches the same walk again."""
    arcs, dist = ((0, 1), (1, 2), (0, 2)), [0.0, torch.inf, torch.inf]
    for _ in range(2 + copies):
        new = [dist[0] if copies else torch.inf, *(dist[1:] if copies else [torch.inf] * 2)]
        for edge, (tail, head) in enumerate(arcs):
            new[head] = bx.min(new[head], dist[tail] + weight[edge])
        dist = new
    return dist[2]


def test_derivations_with_equal_counts_are_noted():
    report = bx.check_program(walk, torch.rand(3), copies=True)
    assert report.ok
    assert report.num_paths == (6.0, 6)
    assert report.num_counts == 2
    assert "different counts: 2, fewer than derivations" in str(report)
    weight = torch.ones(3)  # equal totals are not equal counts
    assert bx.check_program(cheapest, torch.ones(3, 3)).num_counts == 6
    assert "different counts" not in str(bx.check_program(walk, weight, copies=False))
    assert bx.check_program(cheapest, torch.rand(10, 12)).num_counts is None
    assert bx.check_program(bx.program("i")(lambda v: bx.max([])), weight).num_counts == 0


@pytest.mark.parametrize(("sense", "infinity"), [(1, "-inf"), (-1, "inf")])
def test_large_constants_are_noted(sense, infinity):
    best, worst = (bx.max, -1e9) if sense > 0 else (bx.min, 10**9)
    report = bx.check_program(bx.program("i")(lambda value: best(worst, *value)), torch.rand(3))
    assert report.ok
    assert report.large_constant == worst
    assert str(report).endswith(f"use float('{infinity}')")
    scores = torch.tensor([1e6, -sense * torch.inf])
    assert bx.check_program(bx.program("i")(lambda value: best(worst, *value)), scores).large_constant is None
    assert bx.check_program(bx.program("i")(lambda value: best(5, *value)), torch.rand(3)).large_constant is None


def test_a_program_that_writes_into_its_scores_does_not_change_the_caller_s_tensor():
    def shifted(value):
        value[0] += 1.0
        return bx.max(value)

    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert bx.check_program(bx.program("i")(shifted), value).ok
    assert value.tolist() == [1.0, 2.0]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="omega must be left out"):
        bx.check_program(cheapest, torch.rand(2, 2), omega="hard")
    with pytest.raises(ValueError, match=r"program must be made by bx\.program, got function"):
        bx.check_program(cheapest.function, torch.rand(2, 2))
    with pytest.raises(ValueError, match=r"cost must be a tensor, got list"):
        bx.check_program(cheapest, [torch.rand(2, 2)])
    with pytest.raises(ValueError, match=r"takes 1 score tensor \(cost\), got 2 positional arguments"):
        bx.check_program(cheapest, torch.rand(2, 2), torch.rand(2, 2))
    with pytest.raises(ValueError, match="no batch dimensions"):
        bx.check_program(cheapest, torch.rand(3, 2, 2))
