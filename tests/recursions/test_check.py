"""check_program agrees with right programs, and sees what differs."""

from __future__ import annotations

import random

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
    with pytest.raises(ValueError, match="no batch dimensions"):
        bx.check_program(cheapest, torch.rand(3, 2, 2))
