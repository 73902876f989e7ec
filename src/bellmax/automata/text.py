"""The column format of OpenFst: one arc or one final state in each line, with costs and with label 0 for none."""

from __future__ import annotations

import math

import numpy as np

from bellmax.automata.reading import MAX_NUMBER, check, numbered_states
from bellmax.automata.scores import Scores, join, one_hot
from bellmax.automata.table import LABEL, SOURCE, Table


def to_text(table: Table) -> str:
    """Return the lines of an automaton. The first line is about the start state."""
    table = _with_one_start(table)
    start = int(table.starts()[0])
    scores, final = (vector.tensor().detach().double().tolist() for vector in (table.scores, table.final))
    lines: dict[bool, list[str]] = {True: [], False: []}
    for arc, score in zip(table.arcs.tolist(), scores, strict=True):
        columns = [*arc[:LABEL], *(number + 1 for number in arc[LABEL:])]
        lines[arc[SOURCE] == start].append("\t".join((*map(str, columns), *_cost(score))))
    for state in table.finals().tolist():
        lines[state == start].append("\t".join((str(state), *_cost(final[state]))))
    return "".join(f"{line}\n" for line in (*lines[True], *lines[False]))


def _with_one_start(table: Table) -> Table:
    """Return the table, or one with a new start state, if it has several or a start score that is not 0."""
    starts = table.starts()
    if len(starts) == 1 and float(table.start.tensor()[starts[0]].detach()) == 0:
        return table
    size = table.num_states
    none = np.full_like(starts, -1)
    return Table(
        np.concatenate((np.stack((np.full_like(starts, size), starts, none, none), 1), table.arcs)),
        join((table.start.take(starts), table.scores)),
        one_hot(size + 1, size),
        join((table.final, one_hot(1))),
        range(size + 1),
    )


def _cost(score: float) -> tuple[str, ...]:
    """Return the cost of a line, which is left out if it is 0."""
    return () if score == 0 else ("Infinity",) if score == -math.inf else (repr(-score),)


def from_text(text: str, is_acceptor: bool) -> Table:
    """Return the automaton of these lines. Raises ``ValueError`` that names the line if one is wrong."""
    arcs: list[list[int]] = []
    scores: list[float] = []
    final: dict[int, float] = {}
    start = -1
    num_labels = 1 if is_acceptor else 2
    for number, line in enumerate(text.split("\n"), 1):
        fields = line.split()
        if not fields:
            continue
        is_arc = len(fields) > 2
        size = 2 + num_labels if is_arc else 1
        if len(fields) not in (size, size + 1):
            kind = "label" if is_acceptor else "input, output"
            needed = f"source, target, {kind} and an optional cost, or a final state and an optional cost"
            raise ValueError(f"line {number} of the text must have the columns {needed}, got {line!r}")
        numbers = [_integer(field, number) for field in fields[:size]]
        score = -_float(fields[size], number) if len(fields) > size else 0.0
        start = numbers[0] if start < 0 else start
        if is_arc:
            source, target, label, output = (*numbers, numbers[LABEL])[:4]
            arcs.append([source, target, label - 1, output - 1])
            scores.append(score)
        elif numbers[0] in final:
            raise ValueError(f"line {number} of the text must give a new final state, got {numbers[0]} again")
        else:
            final[numbers[0]] = score
    if start < 0:
        raise ValueError("text must have at least one line, got none")
    rows = np.array(arcs, np.int64).reshape(-1, 4)
    states = numbered_states(max(int(rows[:, :LABEL].max(initial=start)), *final, start), len(rows))
    size = len(states)
    last = np.full(size, -np.inf)
    last[list(final)] = list(final.values())
    table = Table(rows, Scores(np.array(scores, float)), one_hot(size, start), Scores(last), states)
    check(table)
    return table


def _integer(field: str, line: int) -> int:
    """Return a state or a label."""
    if not (field.isascii() and field.isdigit()):
        raise ValueError(f"line {line} of the text must have integers for states and labels, got {field!r}")
    if len(field) > 10 or int(field) > MAX_NUMBER:
        raise ValueError(f"line {line} of the text must have states and labels of at most {MAX_NUMBER}, got {field}")
    return int(field)


def _float(field: str, line: int) -> float:
    """Return a cost."""
    try:
        cost = float(field)
    except ValueError:
        cost = math.nan
    if math.isnan(cost) or cost == -math.inf:
        raise ValueError(f"line {line} of the text must end with a cost, got {field!r}")
    return cost
