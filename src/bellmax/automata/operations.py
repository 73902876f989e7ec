"""Union, concatenation, closure and reversal of automata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bellmax.automata.reading import check_cycles
from bellmax.automata.scores import join, one_hot
from bellmax.automata.table import LABEL, OUTPUT, SOURCE, TARGET, Names, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray


def union(tables: Sequence[Table]) -> Table:
    """Return the automaton with the paths of all tables."""
    arcs, offset = [], 0
    for table in tables:
        arcs.append(_shifted(table.arcs, offset))
        offset += table.num_states
    return Table(
        np.concatenate(arcs),
        join([table.scores for table in tables]),
        join([table.start for table in tables]),
        join([table.final for table in tables]),
        range(offset),
        *_shared_names(tables),
    )


def concatenate(left: Table, right: Table) -> Table:
    """Return the automaton whose paths are a path of ``left`` and then a path of ``right``."""
    both = union((left, right))
    finals, starts = left.finals(), right.starts()
    source, target = (states.ravel() for states in np.meshgrid(finals, starts, indexing="ij"))
    scores = left.final.take(source).plus(right.start.take(target))
    nowhere_left, nowhere_right = one_hot(left.num_states), one_hot(right.num_states)
    return replace(
        both,
        arcs=np.concatenate((both.arcs, _silent(source, target + left.num_states))),
        scores=join((both.scores, scores)),
        start=join((left.start, nowhere_right)),
        final=join((nowhere_left, right.final)),
    )


def closure(table: Table) -> Table:
    """Return the automaton whose paths are any number of paths in a row. A new first state starts and ends them."""
    starts, finals = table.starts() + 1, table.finals() + 1
    hub_out, hub_in = _silent(np.zeros_like(starts), starts), _silent(finals, np.zeros_like(finals))
    size = table.num_states + 1
    scores = (table.start.take(starts - 1), table.final.take(finals - 1), table.scores)
    result = replace(
        table,
        arcs=np.concatenate((hub_out, hub_in, _shifted(table.arcs, 1))),
        scores=join(scores),
        start=one_hot(size, 0),
        final=one_hot(size, 0),
        states=range(size),
    )
    try:
        check_cycles(result)
    except ValueError:
        raise ValueError("the closure needs an automaton that does not accept the empty sequence of labels") from None
    return result


def reverse(table: Table) -> Table:
    """Return the automaton that reads all paths backward."""
    arcs = table.arcs[:, [TARGET, SOURCE, LABEL, OUTPUT]]
    return replace(table, arcs=arcs, start=table.final, final=table.start)


def _shifted(arcs: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
    """Return arcs between states with larger numbers."""
    return np.concatenate((arcs[:, :LABEL] + offset, arcs[:, LABEL:]), 1)


def _silent(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return arcs without labels and outputs."""
    none = np.full_like(source, -1)
    return np.stack((source, target, none, none), 1)


def _shared_names(tables: Sequence[Table]) -> tuple[Names | None, Names | None]:
    """Return the names of labels and of outputs. Raises ``ValueError`` if tables have different names."""
    shared = []
    for kind in ("label_names", "output_names"):
        names = list(dict.fromkeys(n for n in (getattr(table, kind) for table in tables) if n is not None))
        if len(names) > 1:
            raise ValueError(f"the automata must have the same {kind}, got {_shown(names[0])} and {_shown(names[1])}")
        shared.append(names[0] if names else None)
    return shared[0], shared[1]


def _shown(names: Names) -> str:
    more = ", …" if len(names) > 5 else ""
    return f"({', '.join(map(repr, names[:5]))}{more})"
