"""The constructor of Automaton, its properties and its errors."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

import bellmax as bx

A = bx.Automaton
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_states_are_numbers(kind: Callable[[list[list[int]]], object]) -> None:
    automaton = A(kind([[0, 2, 5], [2, 3, 6]]))  # type: ignore[arg-type]
    assert automaton.arcs.tolist() == [[0, 2, 5, 5], [2, 3, 6, 6]]
    assert automaton.scores.tolist() == [0, 0]
    assert automaton.start.tolist() == [0, -INF, -INF, -INF]
    assert automaton.final.tolist() == [-INF, 0, -INF, 0]
    assert list(automaton.states) == [0, 1, 2, 3]
    assert (automaton.num_states, automaton.num_arcs) == (4, 2)
    assert repr(automaton) == "Automaton(num_states=4, num_arcs=2)"


def test_states_are_names() -> None:
    automaton = A(
        [("go", "on", 5, 1), ("on", ("a", "tuple"), -1), ("on", "go", 2)],
        scores=[0.5, 1.0, -INF],
        start={"on": 0.5},
        final={"go": 1, ("a", "tuple"): np.float32(2)},
    )
    assert automaton.states == ["go", "on", ("a", "tuple")]
    assert automaton.arcs.tolist() == [[0, 1, 5, 1], [1, 2, -1, -1], [1, 0, 2, 2]]
    assert automaton.scores.tolist() == [0.5, 1, -INF]
    assert automaton.start.tolist() == [-INF, 0.5, -INF]
    assert automaton.final.tolist() == [1, -INF, 2]


def test_states_of_start_and_final_count() -> None:
    assert A([(0, 1, 2)], final={1: 0.0, 4: 0.0}).num_states == 5
    assert A([(0, 1, 2)], start=[0.0, -INF, -INF]).num_states == 3
    assert A([]).final.tolist() == [0]


def test_arguments_are_not_modified_and_numbers_are_copied() -> None:
    scores, rows = np.array([0.5]), torch.tensor([[0, 1, 3, 4]])
    automaton = A(rows, scores=scores)
    scores[0], rows[0, 0] = 7, 7
    assert automaton.scores.tolist() == [0.5]
    assert automaton.arcs.tolist() == [[0, 1, 3, 4]]


def test_scores_keep_their_dtype_and_gradients() -> None:
    scores = torch.tensor([0.5, 1.5], requires_grad=True)
    final = torch.tensor([-INF, 0.0, 2.0], requires_grad=True)
    automaton = A([(0, 1, 3), (0, 2, 4)], scores=scores, final=final)
    assert automaton.scores is scores
    assert automaton.final is final
    weight = torch.tensor(0.5, requires_grad=True)
    assert A([(0, 1, 3), (0, 2, 4)], scores=[weight, 1.0]).scores.requires_grad
    assert A([(0, 1, 3)], scores=torch.tensor([1])).scores.dtype == torch.float64
    for other in (copy.deepcopy(automaton), pickle.loads(pickle.dumps(automaton))):
        assert other.scores.requires_grad
        assert other.final.tolist() == [-INF, 0, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A([(0, 1)]), r"arcs must be rows \(source, target, label\) or .*, got arcs\[0\] = \(0, 1\)"),
        (lambda: A([(0, 1, 2), (0, 1, 2, 3, 4)]), r"arcs must be rows .*, got arcs\[1\] = \(0, 1, 2, 3, 4\)"),
        (lambda: A([0, 1, 2]), r"arcs must be rows .*, got arcs\[0\] = \(0,\)"),
        (lambda: A("abc"), "arcs must be rows .*, got a str"),
        (lambda: A({0: 1}), "arcs must be rows .*, got a dict"),
        (lambda: A([(0, 1, "x")]), r"the label of an arc must be an integer, got arcs\[0\] = \(0, 1, 'x'\)"),
        (lambda: A([(0, 1, 2, 0.5)]), r"the output of an arc must be an integer, got arcs\[0\] = \(0, 1, 2, 0\.5\)"),
        (lambda: A([([], 1, 2)]), r"arcs must be rows .*, got arcs\[0\] = \(\[\], 1, 2\)"),
        (lambda: A(torch.zeros(2, 3)), r"arcs must hold integers, got dtype torch\.float32"),
        (lambda: A(torch.zeros(2, 5, dtype=torch.int64)), r"arcs must have shape \(A, 3\) or \(A, 4\), got \(2, 5\)"),
        (lambda: A([(0, 1, 2), (0, -1, 2)]), r"states must be at least 0, got arcs\[1\] = \(0, -1, 2, 2\)"),
        (lambda: A([("a", "b", -2)]), r"a label must be at least 0, or -1 .*, got arcs\[0\] = \('a', 'b', -2, -2\)"),
        (lambda: A([(0, 10**8, 1)]), "states must be numbered without large gaps, got the state 100000000 for 1 arcs"),
        (lambda: A([(0, 1, 1)], final={10**8: 0.0}), "states must be numbered without large gaps, got the state 1000"),
        (lambda: A([(0, 1, 2**31)]), r"states and labels must be at most 2147483647, got arcs\[0\] = \(0, 1, 2147"),
        (lambda: A([(0, 1, 2**63)]), r"the label of an arc must be an integer, got arcs\[0\] = \(0, 1, 9223"),
        (lambda: A([(0, 1, 2, -2)]), r"an output must be at least 0, or -1 for none, got arcs\[0\] = \(0, 1, 2, -2\)"),
        (
            lambda: A([(0, 1, 2)], scores=[1.0, 2.0]),
            r"scores must have one number for each arc, shape \(1,\), got \(2,\)",
        ),
        (lambda: A([(0, 1, 2)] * 2, scores=[0.0, NAN]), r"scores must be numbers .*, got scores\[1\] = nan"),
        (lambda: A([(0, 1, 2)] * 2, scores=torch.tensor([0, INF])), r"scores must be .*, got scores\[1\] = inf"),
        (lambda: A([(0, 1, 2)], start={"a": 0.0}), "start and final must have states of the arcs as keys, got 'a'"),
        (lambda: A([("a", "b", 2)], start={0: 0.0}), "start must have states of the arcs as keys, got 0"),
        (lambda: A([("a", "b", 2)], final={"b": NAN}), r"final must map states to numbers .*, got nan for state 'b'"),
        (lambda: A([("a", "b", 2)], final={"b": "x"}), r"final must map states to numbers below \+inf, got 'x' for"),
        (lambda: A([("a", "b", 2)], final={"b": torch.zeros(2)}), r"final must map states to numbers below \+inf, got"),
        (lambda: A([(0, 1, 2)], final=[0.0, NAN]), r"final must be numbers below \+inf, got final\[1\] = nan"),
        (lambda: A([(0, 1, 2)], start={}), "start must give at least one state a score above -inf, got none"),
        (lambda: A([(0, 1, 2)], start={0: -INF}), "start must give at least one state a score above -inf, got none"),
        (lambda: A([(0, 0, 2)]), "final must give at least one state a score above -inf, got none"),
        (
            lambda: A([("a", "b", 1), ("c", "d", 1)], final={"d": 0.0}),
            "arcs must lead from a start state to a final state, but none leads from 'a' to 'd'",
        ),
        (
            lambda: A([("a", "b", -1), ("b", "c", -1), ("c", "b", -1), ("c", "d", 1)]),
            r"arcs without a label \(label -1\) must not form a cycle, got (b → c → b|c → b → c)",
        ),
        (lambda: A([(0, 0, -1), (0, 1, 1)]), "must not form a cycle, got 0 → 0"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_wrong_names_of_arguments_are_explained() -> None:
    with pytest.raises(TypeError, match=r"Automaton\(\) has no argument 'weights'"):
        A([(0, 1, 2)], weights=[1.0])  # type: ignore[call-arg]
