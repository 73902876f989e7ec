"""The text format of OpenFst: round trips, errors, and OpenFst itself."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.languages import composed, language, random_automaton, walks

import bellmax as bx

A = bx.Automaton


@pytest.mark.parametrize("seed", range(20))
def test_text_and_back(seed: int) -> None:
    rng = random.Random(seed)
    automaton = random_automaton(rng, size=4, num_arcs=7)
    again = A.from_text(automaton.to_text())
    mine, theirs = language(automaton, 3), language(again, 3)
    assert mine.keys() == theirs.keys()
    for key, scores in mine.items():
        assert scores == pytest.approx(theirs[key], abs=1e-6)
    assert A.from_text(again.to_text()).to_text() == again.to_text()


def test_the_lines_are_those_of_openfst() -> None:
    automaton = A([(1, 0, -1, 3), (0, 2, 4, -1)], scores=[0.25, -math.inf], start={1: 0.0}, final={2: -1.5, 1: 0})
    assert automaton.to_text() == "1\t0\t0\t4\t-0.25\n1\n0\t2\t5\t0\tInfinity\n2\t1.5\n"
    again = A.from_text(automaton.to_text())
    assert again.arcs.tolist() == [[1, 0, -1, 3], [0, 2, 4, -1]]
    assert again.scores.tolist() == [0.25, -math.inf]
    assert again.start.tolist() == [-math.inf, 0, -math.inf]
    assert again.final.tolist() == [-math.inf, 0, -1.5]


def test_acceptors_have_one_column_for_labels() -> None:
    automaton = A.from_text("3 1 5 0.5\n\n1 1 6\n1 2\n", acceptor=True)
    assert automaton.arcs.tolist() == [[3, 1, 4, 4], [1, 1, 5, 5]]
    assert automaton.scores.tolist() == [-0.5, 0]
    assert automaton.final.tolist() == [-math.inf, -2, -math.inf, -math.inf]


def test_an_automaton_of_one_state() -> None:
    assert A.linear([]).to_text() == "0\n"
    assert language(A.from_text("0\n"), 1) == {((), ()): [0.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text must have at least one line, got none"),
        ("0 1 1", "line 1 of the text must have the columns source, target, input, output and an optional cost"),
        ("0 1 1 1\n1 2 3 4 5 6", "line 2 of the text must have the columns .*, got '1 2 3 4 5 6'"),
        ("0 1 1 1\n1\n\n0 a 1 1", "line 4 of the text must have integers for states and labels, got 'a'"),
        ("0 1 -1 1\n1", "line 1 of the text must have integers for states and labels, got '-1'"),
        ("0 1 1 2147483648\n1", "line 1 of the text must have states and labels of at most 2147483647, got 2147483648"),
        ("0 1 1 1\n1\n100000000", "states must be numbered without large gaps, got the state 100000000 for 1 arcs"),
        ("0 1 1 1 x\n1", "line 1 of the text must end with a cost, got 'x'"),
        ("0 1 1 1 nan\n1", "line 1 of the text must end with a cost, got 'nan'"),
        ("0 1 1 1\n1\n1 3", "line 3 of the text must give a new final state, got 1 again"),
        ("0 1 1 1", "final must give at least one state a score above -inf, got none"),
        ("0 1 1 1\n2", "arcs must lead from a start state to a final state, but none leads from 0 to 2"),
        ("0 0 0 1\n0", "must not form a cycle, got 0 → 0"),
    ],
)
def test_bad_texts_are_named_with_the_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        A.from_text(text)


@pytest.mark.parametrize("seed", range(10))
def test_composition_agrees_with_openfst(seed: int) -> None:
    fst = pytest.importorskip("pywrapfst", reason="needs pynini")
    rng = random.Random(seed)
    labels = None
    while labels is None:
        left, right = (random_automaton(rng, num_arcs=8, epsilon=0.3) for _ in range(2))
        labels = next((read for read, _, _ in composed(left, right, 3) if len(read) == 3), None)
    chain = A.linear(labels)
    both = chain @ (left @ right)

    def compiled(automaton: bx.Automaton) -> object:
        compiler = fst.Compiler(arc_type="log64")
        compiler.write(automaton.to_text())
        return compiler.compile()

    sides = [compiled(automaton) for automaton in (chain, left, right)]
    result = fst.compose(sides[0], fst.compose(sides[1].arcsort(sort_type="olabel"), sides[2]))
    distance = -float(fst.shortestdistance(result, reverse=True, delta=1e-12)[result.start()])  # 9 digits
    value = torch.tensor([score for _, _, score in walks(both, 3)], dtype=torch.float64).logsumexp(0)
    assert float(value) == pytest.approx(distance, rel=1e-8)
