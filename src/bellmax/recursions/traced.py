"""The class Traced: a program that was run on symbols, as a hypergraph whose edge weights are sums of score entries."""

from __future__ import annotations

import linecache
import math
from collections.abc import Sequence
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

import bellmax.backends.native.sorting as sorting
from bellmax.modes import outside_modes
from bellmax.programs import LinearGraphProgram
from bellmax.recursions.symbols import _FORM, _FORM_BITS, _SEVERAL, Form, Trace, return_line
from bellmax.structures.hypergraph import Hypergraph, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

ONE = "1"
"""The name of the score that is the number 1, which no argument can have. Constants of a program are its
coefficients."""


class ProgramEdge(NamedTuple):
    """An edge of a traced program: one option of a call of ``bellmax.max`` or ``bellmax.min``."""

    line: int
    """The line of the call in its file. For a sum that the program returns, the line of the return statement, or the
    first line of the function if it has several return statements."""
    source: str
    """The text of the line, empty if it is not available."""
    option: int
    """The position of the option in the call. 0 for the returned sum."""
    scores: tuple[tuple[str, tuple[int, ...], float], ...]
    """The score entries in the weight of the edge: (name, index, coefficient)."""
    constant: float
    """The constant in the weight of the edge."""
    node: int
    """The number of the node to which the edge leads, in the order of ``p.node_values``."""
    tails: tuple[int, ...]
    """The numbers of the nodes in the option, which the derivation derives next."""

    @property
    def weight(self) -> str:
        """The weight of the edge as a formula, such as "value[3] + 0.5"."""
        terms = [
            f"{'' if coefficient == 1 else f'{coefficient:g} * '}{name}{list(index) if index else ''}"
            for name, index, coefficient in self.scores
        ]
        terms += [f"{self.constant:g}"] if self.constant or not terms else []
        return " + ".join(terms)

    def __str__(self) -> str:
        return f"line {self.line}, option {self.option}: {self.weight}    # {self.source}"


class _Arrays(NamedTuple):
    """Edges of a trace, of all its nodes or of those that the result uses. Nodes are numbered from 0."""

    head: NDArray[np.int64]  # (E,)
    form: NDArray[np.int64]  # (E,)
    arity: NDArray[np.int64]  # (E,)
    tail: NDArray[np.int64]  # (arity.sum(),)


class Traced:
    """A program for inputs of certain shapes. Make it outside of all modes of torch, because later calls share it.

    Args:
        name: The name of the program, for messages.
        trace: The trace, after the function has run.
        result: The code of the result; None if there is no derivation.
        inputs: The name and the own shape of each score.
        code: The code of the function.

    """

    def __init__(
        self, name: str, trace: Trace, result: int | None, inputs: dict[str, tuple[int, ...]], code: CodeType
    ) -> None:
        self.name, self.inputs, self.sense, self.has_paths = name, inputs, trace.sense or 1, result is not None
        self.has_extra_root = result is None or bool(result & _FORM) or not 0 < result >> _FORM_BITS < _SEVERAL
        arrays, nodes = _prune(_arrays(trace, result, self.has_extra_root))
        is_used = np.zeros(trace.num_entries + len(trace.forms) + 1, dtype=bool)
        is_used[arrays.form] = True
        form_of_edge = (np.cumsum(is_used) - 1)[arrays.form]
        self._set_forms(trace, np.flatnonzero(is_used))
        rows = Rows(arrays.head, arrays.tail, arrays.arity, None, torch.device("cpu"))
        self.hypergraph = Hypergraph(rows, weight_of=form_of_edge)
        self._index = {torch.device("cpu"): self._make_index(form_of_edge)}
        self.is_cancelling = torch.from_numpy(self._find_cancelling())
        """(entries,), True for the entries of the inputs that a derivation can use although their count is 0."""
        names = [*inputs, *([ONE] if self.has_constants else [])]
        self.program = LinearGraphProgram(names, self.has_extra_root, self.hypergraph._longest_path)
        self._set_lines(trace, nodes, code)
        number = dict(zip(nodes.tolist(), range(len(nodes)), strict=True)) if trace.positions else {}
        self._positions = {number[node - 1]: p for node, p in trace.positions.items() if node - 1 in number}
        self._ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._random: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def _set_forms(self, trace: Trace, forms: NDArray[np.int64]) -> None:
        """Save the terms of these forms of a trace: their entries and coefficients, and the bounds of each form.

        A constant is the coefficient of an additional entry, the number 1.
        """
        first = trace.num_entries + 1
        composite: list[Form | int] = [trace.forms[n] for n in (forms[forms >= first] - first).tolist()]
        if not self.has_paths:
            composite, forms = [((), 1.0)], np.array([first])
        pairs = np.array([form if isinstance(form, int) else 0 for form in composite], dtype=np.int64)
        others = [form for form in composite if not isinstance(form, int)]
        self.has_constants = any(constant for _, constant in others)
        terms = [(*terms, (first - 1, constant)) if constant else terms for terms, constant in others]
        is_pair = pairs > 0
        count = ((forms > 0) & (forms < first)).astype(np.int64)
        num_terms = np.full(len(composite), 2)
        num_terms[~is_pair] = [len(form) for form in terms]
        count[forms >= first] = num_terms
        self._term_offset = np.concatenate(([0], np.cumsum(count)))
        # Forms are in order: 0, single entries, then composite forms.
        is_in_pair = np.repeat(is_pair, num_terms)
        entries, coefficients = np.empty(len(is_in_pair), dtype=np.int64), np.ones(len(is_in_pair))
        entries[is_in_pair] = np.stack((pairs >> _FORM_BITS, pairs & _FORM), 1)[is_pair].ravel() - 1
        entries[~is_in_pair] = [entry for form in terms for entry, _ in form]
        coefficients[~is_in_pair] = [c for form in terms for _, c in form]
        single = forms[(forms > 0) & (forms < first)] - 1
        self._entry = np.concatenate((single, entries))
        self._coefficient = np.concatenate((np.ones(len(single)), coefficients))

    def _make_index(self, form_of_edge: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return the index of the program on the CPU, see :mod:`bellmax.programs.linear`."""
        is_one = bool((self._coefficient == 1).all())
        more = (
            self._term_offset.astype(np.int32),
            self._entry.astype(np.int32),
            self._coefficient[:0] if is_one else self._coefficient,
            form_of_edge,
        )
        return *self.hypergraph._index, *map(torch.from_numpy, more)

    def index(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the index of the program on a device."""
        if device not in self._index:
            with outside_modes():
                self._index[device] = tuple(t.to(device) for t in self._index[torch.device("cpu")])
        return self._index[device]

    def one(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the score of constants, (1,). If there is no derivation, it is infinitely bad."""
        key = dtype, device
        if key not in self._ones:
            with outside_modes():
                number = 1.0 if self.has_paths else -self.sense * math.inf
                self._ones[key] = torch.full((1,), number, dtype=dtype, device=device)
        return self._ones[key]

    def entries_of(self, edges: Sequence[int], entries: Sequence[int]) -> NDArray[np.float64]:
        """Return the coefficients (edges, entries) of these entries in the weights of these edges."""
        assert self.hypergraph.weight_of is not None
        column = {entry: n for n, entry in enumerate(entries)}
        matrix = np.zeros((len(edges), len(entries)))
        for row, form in enumerate(self.hypergraph.weight_of[torch.tensor(edges, dtype=torch.int64)].tolist()):
            for term in range(*self._term_offset[form : form + 2]):
                if self._entry[term] in column:
                    matrix[row, column[self._entry[term]]] = self._coefficient[term]
        return matrix

    def random(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a number from 1 to 2 for each entry of the inputs."""
        key = dtype, device
        if key not in self._random:
            size = sum(math.prod(shape) for shape in self.inputs.values())
            with outside_modes():
                self._random[key] = torch.from_numpy(1 + np.random.default_rng(0).random(size)).to(device, dtype)
        return self._random[key]

    def _find_cancelling(self) -> NDArray[np.bool_]:
        """Return (entries,), True for the entries of the inputs with coefficients of both signs."""
        size = sum(math.prod(shape) for shape in self.inputs.values())
        is_added, is_subtracted = np.zeros((2, size + 1), dtype=bool)
        is_added[self._entry[self._coefficient > 0]] = True
        is_subtracted[self._entry[self._coefficient < 0]] = True
        return (is_added & is_subtracted)[:size]

    def num_unused(self) -> dict[str, int]:
        """Return the number of entries of each input that no edge uses."""
        sizes = [math.prod(shape) for shape in self.inputs.values()]
        is_used = np.zeros(sum(sizes) + 1, dtype=bool)
        is_used[self._entry] = True
        parts = np.split(is_used[:-1], np.cumsum(sizes)[:-1])
        return {name: int((~part).sum()) for name, part in zip(self.inputs, parts, strict=True)}

    def constants(self) -> list[float]:
        """Return the constants in the weights of the edges."""
        size = sum(math.prod(shape) for shape in self.inputs.values())
        return [float(c) for c in self._coefficient[self._entry == size]]

    # --- the lines of the program

    def _set_lines(self, trace: Trace, nodes: NDArray[np.int64], function: CodeType) -> None:
        """Save the file and the line that made each of these nodes of the trace; for an extra root, the function's."""
        made = nodes[: len(nodes) - self.has_extra_root]
        instruction = np.array(trace.instructions, dtype=np.int64)[made]
        first = np.array([first - 1 for first, _ in trace.runs], dtype=np.int64)
        run = np.searchsorted(first, made, side="right") - 1
        number = {code: n for n, code in enumerate(dict.fromkeys((function, *(code for _, code in trace.runs))))}
        code_of_run = np.array([number[code] for _, code in trace.runs], dtype=np.int64)
        self._files = [code.co_filename for code in number]
        self._file = np.zeros(len(nodes), dtype=np.int32)
        self._file[: len(made)] = code_of_run[run]
        self._line = np.full(len(nodes), return_line(function), dtype=np.int32)
        for code, n in number.items():
            is_here = self._file[: len(made)] == n
            table = [(start, line or code.co_firstlineno) for start, _, line in code.co_lines()]
            starts, lines = np.array(table).T
            at = np.searchsorted(starts, instruction[is_here], side="right") - 1
            self._line[: len(made)][is_here] = lines[at]

    @cached_property
    def _first_edge(self) -> NDArray[np.int64]:
        """The first edge into each node."""
        heads = self.hypergraph.heads.cpu().numpy()
        return np.searchsorted(heads, np.arange(self.hypergraph.num_nodes))

    def line(self, node: int) -> int:
        """Return the line that made a node. For an extra root, the line of the return statement."""
        return int(self._line[node])

    def edge(self, number: int) -> ProgramEdge:
        """Return an edge by its number."""
        node = int(self.hypergraph.heads[number])
        line = self.line(node)
        source = linecache.getline(self._files[self._file[node]], line).strip()
        assert self.hypergraph.weight_of is not None
        form = int(self.hypergraph.weight_of[number])
        terms = slice(*self._term_offset[form : form + 2])
        named = zip(map(self._name, self._entry[terms].tolist()), self._coefficient[terms].tolist(), strict=True)
        scores = [(name, index, coefficient) for (name, index), coefficient in named]
        constant = scores.pop()[2] if scores and scores[-1][0] == ONE else 0.0
        option = number - int(self._first_edge[node])
        if node in self._positions:
            option = self._positions[node][option]
        graph = self.hypergraph
        tails = graph.tails[graph.tail_offset[number] : graph.tail_offset[number + 1]].tolist()
        return ProgramEdge(line, source, option, tuple(scores), constant, node, tuple(tails))

    def _name(self, entry: int) -> tuple[str, tuple[int, ...]]:
        """Return the name and the index of a score entry."""
        for name, shape in self.inputs.items():
            if entry < math.prod(shape):
                return name, tuple(int(n) for n in np.unravel_index(entry, shape))
            entry -= math.prod(shape)
        return ONE, ()


def _arrays(trace: Trace, result: int | None, has_extra_root: bool) -> _Arrays:
    """Return the edges of a trace up to the node of the result, which may be an extra root."""
    if has_extra_root:
        code = np.array([*trace.codes, result or 0], dtype=np.int64)
        ends = np.array([*trace.ends, len(code)])
    else:
        assert result is not None
        ends = np.array(trace.ends[: (result >> _FORM_BITS) + 1])
        code = np.array(trace.codes[: ends[-1]], dtype=np.int64)
    head = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    tails, form = code >> _FORM_BITS, code & _FORM
    bundle_offset = np.array(trace.bundle_ends)
    size = np.diff(bundle_offset)
    has_several = tails >= _SEVERAL
    arity = (tails > 0).astype(np.int64)
    arity[has_several] = size[tails[has_several] - _SEVERAL]
    offset = np.cumsum(arity) - arity
    tail = np.empty(int(arity.sum()), dtype=np.int64)
    has_one = (tails > 0) & ~has_several
    tail[offset[has_one]] = tails[has_one] - 1
    if has_several.any():
        bundle = tails[has_several] - _SEVERAL
        within = _ranges(size[bundle])
        first = np.repeat(bundle_offset[bundle], size[bundle])
        nodes = np.array(trace.bundles)[first + within] - 1
        tail[np.repeat(offset[has_several], size[bundle]) + within] = nodes
    return _Arrays(head, form, arity, tail)


def _ranges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate 0 … size − 1 for each size."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _prune(arrays: _Arrays) -> tuple[_Arrays, NDArray[np.int64]]:
    """Remove the nodes that the last node does not use. Return the remaining edges, and the remaining nodes."""
    num_nodes = int(arrays.head[-1]) + 1
    pairs = np.stack((np.repeat(arrays.head, arrays.arity), arrays.tail), 1)
    is_used = sorting.is_reachable(num_nodes - 1, pairs, num_nodes)
    mask, number = is_used[arrays.head], np.cumsum(is_used) - 1
    tail = arrays.tail[np.repeat(mask, arrays.arity)]
    live = _Arrays(number[arrays.head[mask]], arrays.form[mask], arrays.arity[mask], number[tail])
    return live, np.flatnonzero(is_used)
