"""Conversion and validation of the arguments of an automaton."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

import bellmax.backends.native.sorting as sorting
from bellmax.automata.scores import Scores, one_hot, zeros
from bellmax.automata.table import LABEL, OUTPUT, SOURCE, Table
from bellmax.inputs import Numbers, as_tensor
from bellmax.structures.graphs import as_integers, check_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arcs: TypeAlias = "Tensor | NDArray[np.integer[Any]] | Sequence[Sequence[Hashable]]"
StateScores: TypeAlias = "Mapping[Any, float | Tensor] | Numbers"
MAX_NUMBER = 2**31 - 1  # the kernels read int32
_MAX_UNUSED = 10**7  # states without arcs
_ROWS = "(source, target, label) or (source, target, label, output)"


def read(arcs: Arcs, scores: Numbers | None, start: StateScores | None, final: StateScores | None) -> Table:
    """Return the table of an automaton. Raises ``ValueError`` if an argument is invalid."""
    rows, names = _number_states(arcs)
    numbers = _read_arcs(rows, names)
    mappings = [states for states in (start, final) if isinstance(states, Mapping)]
    if names is None:
        lengths = [len(cast(Any, states)) for states in (start, final) if hasattr(states, "__len__")]
        lengths = [] if mappings else lengths
        keys = [_state_number(state) for states in mappings for state in states]
        last_state = max((*numbers[:, :2].ravel().tolist(), *keys, 0, *(n - 1 for n in lengths)))
        states: Sequence[Hashable] = numbered_states(last_state, len(numbers))
    else:
        states = names
    values = zeros(len(numbers)) if scores is None else read_scores("scores", scores, len(numbers), "arc")
    first = one_hot(len(states), 0) if start is None else _read_states("start", start, states)
    is_sink = np.bincount(numbers[:, SOURCE], minlength=len(states)) == 0
    last = one_hot(len(states), *np.flatnonzero(is_sink)) if final is None else _read_states("final", final, states)
    table = Table(numbers, values, first, last, states)
    check(table)
    return table


def numbered_states(last_state: int, num_arcs: int) -> range:
    """Return the states up to the last. Raises ``ValueError`` if they need memory for many states without arcs."""
    if last_state > 2 * num_arcs + _MAX_UNUSED:
        raise ValueError(f"states must be numbered without large gaps, got the state {last_state} for {num_arcs} arcs")
    return range(last_state + 1)


def check(table: Table) -> None:
    """Raise ``ValueError`` if arcs without labels form a cycle, or if no path is accepted."""
    check_cycles(table)
    if not len(table.starts()):
        raise ValueError("start must give at least one state a score above -inf, got none")
    if not len(table.finals()):
        raise ValueError("final must give at least one state a score above -inf, got none")
    if not table.useful().any():
        starts, finals = (_show(states, table.states) for states in (table.starts(), table.finals()))
        raise ValueError(
            f"arcs must lead from a start state to a final state, but none leads from {starts} to {finals}"
        )


def check_cycles(table: Table) -> None:
    """Raise ``ValueError`` if arcs without labels form a cycle."""
    pairs = table.arcs[table.arcs[:, LABEL] < 0, :2]
    if len(pairs):
        check_order(pairs, sorting.levels(pairs, table.num_states), table.states, "arcs without a label (label -1)")


def _show(states: NDArray[np.int64], names: Sequence[Hashable]) -> str:
    """Return the names of states for a message."""
    shown = ", ".join(repr(names[state]) for state in states[:5].tolist())
    return f"{shown} …" if len(states) > 5 else shown


def _number_states(arcs: Arcs) -> tuple[Any, list[Hashable] | None]:
    """Return rows with numbers for states, and the names of the states, or None if states are numbers already."""
    if isinstance(arcs, np.ndarray) and arcs.dtype.kind not in "iuf":
        arcs = arcs.tolist()
    if isinstance(arcs, Tensor | np.ndarray):
        return arcs, None
    if isinstance(arcs, str | Mapping) or not isinstance(arcs, Iterable):
        raise ValueError(f"arcs must be rows {_ROWS}, got a {type(arcs).__name__}")
    rows: list[tuple[Any, ...]] = [
        tuple(row) if isinstance(row, Iterable) and not isinstance(row, str) else (row,) for row in arcs
    ]
    for n, row in enumerate(rows):
        if len(row) not in (3, 4) or not all(isinstance(state, Hashable) for state in row[:2]):
            raise ValueError(f"arcs must be rows {_ROWS}, got arcs[{n}] = {row!r}")
        for word, symbol in zip(("label", "output"), row[2:], strict=False):
            if not _is_integer(symbol):
                raise ValueError(f"the {word} of an arc must be an integer, got arcs[{n}] = {row!r}")
    rows = [(*row, row[2]) if len(row) == 3 else row for row in rows]
    if all(_is_integer(state) for row in rows for state in row[:2]):
        return np.array([[int(entry) for entry in row] for row in rows], np.int64).reshape(-1, 4), None
    number: dict[Hashable, int] = {}
    numbered = [[*(number.setdefault(state, len(number)) for state in row[:2]), *map(int, row[2:])] for row in rows]
    return np.array(numbered, np.int64), list(number)


def _is_integer(value: object) -> bool:
    """True for an integer that fits into int64."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < 2**63


def _state_number(state: object) -> int:
    """Return a state of an automaton whose states are numbers."""
    if not _is_integer(state) or int(cast(Any, state)) < 0:
        raise ValueError(f"start and final must have states of the arcs as keys, got {state!r}")
    return int(cast(Any, state))


def _read_arcs(rows: Any, names: list[Hashable] | None) -> NDArray[np.int64]:
    """Return the arcs (A, 4). Raises ``ValueError`` if a number is out of range."""
    numbers = as_integers(rows, "arcs").cpu().numpy()
    if numbers.ndim != 2 or numbers.shape[1] not in (3, 4):
        raise ValueError(f"arcs must have shape (A, 3) or (A, 4), got {tuple(numbers.shape)}")
    if numbers.shape[1] == 3:
        numbers = np.concatenate((numbers, numbers[:, LABEL:]), 1)
    for columns, least, needed in (
        (slice(0, 2), 0, "states must be at least 0"),
        (slice(LABEL, LABEL + 1), -1, "a label must be at least 0, or -1 for none"),
        (slice(OUTPUT, OUTPUT + 1), -1, "an output must be at least 0, or -1 for none"),
    ):
        is_low = (numbers[:, columns] < least).any(1)
        if is_low.any():
            n = int(is_low.argmax())
            raise ValueError(f"{needed}, got arcs[{n}] = {_show_arc(numbers[n], names)}")
    is_large = (numbers > MAX_NUMBER).any(1)
    if is_large.any():
        n = int(is_large.argmax())
        raise ValueError(
            f"states and labels must be at most {MAX_NUMBER}, got arcs[{n}] = {_show_arc(numbers[n], names)}"
        )
    return numbers


def _show_arc(arc: NDArray[np.int64], names: Sequence[Hashable] | None) -> str:
    """Return one arc for a message, with the names of its states."""
    row = arc.tolist()
    return str(tuple(row if names is None else (names[row[0]], names[row[1]], *row[2:])))


def read_scores(argument: str, scores: Numbers, size: int, unit: str) -> Scores:
    """Return a vector of scores. Raises ``ValueError`` unless it has ``size`` numbers below +∞."""
    vector = as_tensor(argument, scores)
    if vector.shape != (size,):
        raise ValueError(f"{argument} must have one number for each {unit}, shape ({size},), got {tuple(vector.shape)}")
    _check_numbers(argument, vector)
    if isinstance(scores, Tensor) or vector.requires_grad:  # a list of tensors
        return Scores.of_tensor(vector if vector.is_floating_point() else vector.double())
    return Scores(vector.double().numpy().copy())


def _check_numbers(argument: str, vector: Tensor) -> None:
    """Raise ``ValueError`` if a score is NaN or +∞."""
    values = vector.detach()
    is_bad = values.isnan() | (values == torch.inf)
    if bool(is_bad.any()):
        n = int(is_bad.nonzero()[0])
        raise ValueError(f"{argument} must be numbers below +inf, got {argument}[{n}] = {values[n].item()}")


def _read_states(argument: str, scores: StateScores, states: Sequence[Hashable]) -> Scores:
    """Return scores of start or final states, −∞ for states that are not in the mapping."""
    if not isinstance(scores, Mapping):
        return read_scores(argument, scores, len(states), "state").closed()
    number = {state: n for n, state in enumerate(states)}
    total = one_hot(len(states))
    for state, score in scores.items():
        if state not in number:
            raise ValueError(f"{argument} must have states of the arcs as keys, got {state!r}")
        is_number = isinstance(score, int | float | np.number) or (isinstance(score, Tensor) and score.numel() == 1)
        value = float(score.detach() if isinstance(score, Tensor) else score) if is_number else np.nan
        if not value < np.inf:
            raise ValueError(f"{argument} must map states to numbers below +inf, got {score!r} for state {state!r}")
        if isinstance(score, Tensor) and score.is_floating_point() and value > -np.inf:
            index = np.full(len(states), -1)
            index[number[state]] = 0
            total.constant[number[state]] = 0.0
            total = total.plus(Scores(np.zeros(len(states)), ((score.reshape(1), index),)))
        else:
            total.constant[number[state]] = value
    return total
