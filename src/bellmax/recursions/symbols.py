"""Values of a program that is traced: the class Symbol, and the class Trace, which records nodes and edges.

A symbol is an expression Σ coefficient · entry + constant + Σ node. Its part without nodes is a *form*. A trace
numbers forms and nodes, so that a symbol is a single integer: code = tails · 2³² + form. Form 0 is the number 0. Tails
0 means no node, tails n < 2³⁰ means node n, and larger numbers mean several nodes. So the sum of a node and a form is
the sum of their codes.
"""

from __future__ import annotations

import dis
import linecache
import math
import os
import sys
from collections.abc import Iterator, Sequence
from numbers import Real
from types import CodeType, FrameType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

_FORM_BITS = 32
_FORM = (1 << _FORM_BITS) - 1
_ROUNDING = 1e-12  # coefficients that cancel can leave a rounding error, such as 0.1 + 0.2 - 0.3
_SEVERAL = 1 << 30  # added to the position of a tuple of nodes
_LIBRARIES = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, np.__file__, torch.__file__))

Form = tuple[tuple[tuple[int, float], ...], float]
"""Terms (entry, coefficient) in the order of entries, and a constant."""


def is_library(code: CodeType) -> bool:
    """True if code is part of this package, NumPy or torch."""
    return code.co_filename.startswith(_LIBRARIES)


def user_frame() -> FrameType:
    """Return the innermost frame outside of this package, NumPy and torch: the line of the program that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code):
        frame = frame.f_back
    assert frame is not None
    return frame


def at_line(message: str, code: CodeType, line: int) -> ValueError:
    """Return an error about a line of a program."""
    source = linecache.getline(code.co_filename, line).strip()
    where = f"line {line} of {code.co_filename}" if not source else f"line {line}: {source}"
    return ValueError(f"{message} ({where})")


def return_line(code: CodeType) -> int:
    """Return the line of the return statement of a function, or the first line of the function if it has several."""
    lines = set(_lines_of_returns(code))
    return lines.pop() if len(lines) == 1 else code.co_firstlineno


def _lines_of_returns(code: CodeType) -> Iterator[int]:
    line = code.co_firstlineno
    starts = {start: number for start, _, number in code.co_lines() if number is not None}
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        if instruction.opname.startswith("RETURN_") and instruction.opname != "RETURN_GENERATOR":
            yield line


def error(message: str) -> ValueError:
    """Return an error about the line of the program that runs."""
    frame = user_frame()
    return at_line(message, frame.f_code, frame.f_lineno)


def _refuse(message: str) -> Any:
    """Return a method that raises an error."""

    def method(self: Symbol, *args: Any) -> Any:
        raise error(message)

    return method


_BRANCH = (
    "a program cannot compare or branch on a smoothed value: use bx.max or bx.min instead of if, max, min or sorted"
)
_FOREIGN = "a program cannot use a smoothed value of another call: create caches inside the program"
_OPTION = "an option of bx.max or bx.min"
_NONLINEAR = "a program can only add and subtract scores and multiply them by numbers"


class Symbol:
    """A value of a program that is traced. Each trace has its own subclass, so that symbols cannot be mixed."""

    __slots__ = ("code",)
    trace: ClassVar[Trace]

    def __init__(self, code: int) -> None:
        self.code = code

    def __repr__(self) -> str:
        return self.trace.show(self.code)

    # --- sums

    def __add__(self, other: Any) -> Any:
        a = self.code
        if type(other) is type(self):
            b = other.code
        elif type(other) is float and other in self.trace.form_of_number:
            b = self.trace.form_of_number[other]
        else:
            return NotImplemented if isinstance(other, np.ndarray) else self.trace.add_number(self, other)
        if (a & _FORM and b & _FORM) or (a > _FORM and b > _FORM):
            return type(self)(self.trace.add(a, b))
        return type(self)(a + b)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self.trace.scale(self, -1.0)

    def __pos__(self) -> Any:
        return self

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        return self + (-other if isinstance(other, Symbol) else self.trace.negated(other))

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else self.trace.scale(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Real) and other == 0:
            raise error("a score cannot be divided by 0")
        return self.trace.scale(self, 1 / float(other) if isinstance(other, Real) else other)

    # --- what a program cannot do

    __hash__ = object.__hash__
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse(_BRANCH)
    __float__ = __int__ = __complex__ = __round__ = __abs__ = __trunc__ = __floor__ = __ceil__ = _refuse(
        "a smoothed value has no number while a program is traced: use a list or a dictionary for a table"
    )
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _refuse(
        _NONLINEAR
    )
    __index__ = _refuse("a smoothed value cannot be an index or a size: pass integers as keyword arguments")


class Trace:
    """The nodes and edges that a program makes while it runs on symbols.

    Node n has the edges ``ends[n − 1]`` … ``ends[n] − 1``. Nodes are numbered from 1, tails before heads.

    Args:
        num_entries: The number of entries of all scores. Entry n has the form n + 1.
        max_edges: The maximum number of edges, terms of forms and tails beyond the first.

    """

    def __init__(self, num_entries: int, max_edges: int) -> None:
        self.codes: list[int] = []
        self.ends = [0]
        self.sense: int | None = None
        self.num_entries, self.max_edges = num_entries, max_edges
        self.forms: list[Form | int] = []
        """The forms that are not a single entry, from form ``num_entries`` + 1 on. An integer a · 2³² + b is the sum of
        the single entries a and b, which are forms."""
        self.bundles: list[int] = []
        """The nodes of tails from 2³⁰ on, one bundle after the other."""
        self.bundle_ends = [0]
        self.form_of_number: dict[float, int] = {0.0: 0}
        self.positions: dict[int, list[int]] = {}
        """For nodes with options that were left out, the positions of the remaining options in the call."""
        self.instructions: list[int] = []
        self.runs: list[tuple[int, CodeType]] = []
        """The code object that made the nodes from a number on."""
        self._form_of: dict[Form, int] = {}
        """The numbers of forms, except of sums of two entries, which are in ``_sum_of``."""
        self._sum_of: dict[int, int] = {}
        """The sum of two forms a ≤ b, for the key a · 2³² + b."""
        self._code: CodeType | None = None
        self._num_terms = 0
        self.Symbol: Any = type("Symbol", (Symbol,), {"__slots__": (), "trace": self})

    # --- nodes

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        """Make a node with an edge for each option, and return its value. Called by max and min."""
        symbol = self.Symbol
        codes = [option.code for option in options if type(option) is symbol]
        positions = None
        if len(codes) != len(options):
            codes, positions = self._read(sense, options)
        if sense != self.sense:
            self._set_sense(sense)
        if len(codes) < 2:
            return symbol(codes[0]) if codes else -sense * math.inf
        self.codes += codes
        self.ends.append(len(self.codes))
        if positions is not None and len(positions) < len(options):
            self.positions[len(self.ends) - 1] = positions
        frame = sys._getframe(2)
        if frame.f_code is not self._code:
            self._code = frame.f_code
            self.runs.append((len(self.ends) - 1, frame.f_code))
        self.instructions.append(frame.f_lasti)
        self._check_size()
        return symbol((len(self.ends) - 1) << _FORM_BITS)

    def _read(self, sense: int, options: Sequence[Any]) -> tuple[list[int], list[int]]:
        """Return the codes and the positions of options, some of which are numbers, without infinitely bad options."""
        codes, positions = [], []
        for position, option in enumerate(options):
            if type(option) is self.Symbol:
                codes.append(option.code)
                positions.append(position)
                continue
            number = self._number(option, _OPTION)
            if math.isfinite(number):
                codes.append(self._number_form(number))
                positions.append(position)
            elif number == sense * math.inf:
                needed = "bx.max must be less than +inf" if sense > 0 else "bx.min must be greater than -inf"
                raise error(f"an option of {needed}, got {number:+}")
        return codes, positions

    def _set_sense(self, sense: int) -> None:
        if self.sense is not None:
            raise error("a program must use either bx.max or bx.min, not both")
        self.sense = sense

    def _check_size(self) -> None:
        if len(self.codes) + len(self.bundles) + self._num_terms > self.max_edges:
            raise error(
                f"the program has more than max_edges = {self.max_edges} edges and terms: for a grid, use bx.Lattice, "
                "or increase max_edges of bx.program"
            )

    def code_of_result(self, result: Any, code: CodeType) -> int | None:
        """Return the code of what the program returned; None if it has no derivation."""
        if type(result) is self.Symbol:
            return int(result.code)
        if isinstance(result, Symbol):
            raise at_line(_FOREIGN, code, return_line(code))
        if isinstance(result, Real) and not math.isnan(float(result)):
            number = float(result)
            if math.isfinite(number):
                return self._number_form(number)
            self.sense = self.sense or (-1 if number > 0 else 1)
            if number == -self.sense * math.inf:
                return None
        got = f"{float(result)}" if isinstance(result, Real) else f"a {type(result).__name__}"
        raise at_line(f"a program must return one smoothed value or number, got {got}", code, return_line(code))

    # --- sums

    def add(self, a: int, b: int) -> int:
        """Return the code of the sum of two codes."""
        form, other = a & _FORM, b & _FORM
        if form and other:
            key = form << _FORM_BITS | other if form < other else other << _FORM_BITS | form
            form = self._sum_of.get(key) or self._add_forms(key)
        else:
            form = form or other
        left, right = a >> _FORM_BITS, b >> _FORM_BITS
        if left and right:
            bundles, ends = self.bundles, self.bundle_ends
            if left < _SEVERAL > right:
                bundles += (left, right)
            else:
                bundles += self._nodes(left) + self._nodes(right)
                self._check_size()  # running sums of nodes make long bundles, possibly without a call of max
            left, right = _SEVERAL + len(ends) - 1, 0
            ends.append(len(bundles))
        return (left or right) << _FORM_BITS | form

    def _nodes(self, tails: int) -> list[int]:
        """Return the nodes of tails."""
        if tails < _SEVERAL:
            return [tails] if tails else []
        return self.bundles[slice(*self.bundle_ends[tails - _SEVERAL : tails - _SEVERAL + 2])]

    def _add_forms(self, key: int) -> int:
        """Return the form of the sum of two forms a ≤ b, for the key a · 2³² + b."""
        a, b = key >> _FORM_BITS, key & _FORM
        is_pair = a < b <= self.num_entries  # two entries: by far the most frequent new form
        form = self._sum_of[key] = self._new_form(key, 2) if is_pair else self._add_terms(a, b)
        return form

    def _add_terms(self, a: int, b: int) -> int:
        """Return the form of the sum of two forms, of which at least one is not a single entry, or which are equal."""
        (terms, constant), (others, other) = self.form(a), self.form(b)
        total = dict(terms)
        for entry, coefficient in others:
            before = total.get(entry, 0.0)
            after = before + coefficient
            total[entry] = after if abs(after) > _ROUNDING * abs(before) else 0.0
        return self._intern(total, constant + other)

    def add_number(self, symbol: Symbol, number: Any) -> Any:
        """Return the sum of a symbol and a number, or the number if it is infinite."""
        value = self._number(number, "a term of a sum")
        if math.isinf(value):
            return value
        return self.Symbol(self.add(symbol.code, self._number_form(value))) if value else symbol

    def scale(self, symbol: Symbol, factor: Any) -> Any:
        """Return the product of a symbol without nodes and a number."""
        if isinstance(factor, Symbol):
            raise error(f"{_NONLINEAR}, got a product of two smoothed values")
        value = self._number(factor, "a factor of a score")
        if symbol.code > _FORM:
            name = "min" if (self.sense or 1) < 0 else "max"
            advice = ": multiply the options instead" if value > 0 else ""
            raise error(
                f"a program can only add to the result of bx.{name}, and cannot multiply, negate or subtract it{advice}"
            )
        if math.isinf(value):
            raise error(f"a factor of a score must be finite, got {value}")
        terms, constant = self.form(symbol.code)
        return self.Symbol(self._intern({entry: value * c for entry, c in terms}, value * constant))

    def negated(self, number: Any) -> float:
        return -self._number(number, "a term of a sum")

    # --- forms

    def form(self, form: int) -> Form:
        if form <= self.num_entries:
            return (((form - 1, 1.0),) if form else ()), 0.0
        terms = self.forms[form - self.num_entries - 1]
        if isinstance(terms, int):
            return (((terms >> _FORM_BITS) - 1, 1.0), ((terms & _FORM) - 1, 1.0)), 0.0
        return terms

    def _intern(self, terms: dict[int, float], constant: float) -> int:
        """Return the number of a form."""
        key = tuple(sorted((entry, c) for entry, c in terms.items() if c)), constant
        if not constant and len(key[0]) < 2:
            if not key[0]:
                return 0
            ((entry, coefficient),) = key[0]
            if coefficient == 1:
                return entry + 1
        if not constant and len(key[0]) == 2 and key[0][0][1] == key[0][1][1] == 1:
            a, b = (entry + 1 for entry, _ in key[0])
            return self.add(a, b)
        form = self._form_of.get(key)
        if form is None:
            form = self._form_of[key] = self._new_form(key, len(key[0]))
        return form

    def _new_form(self, form: Form | int, num_terms: int) -> int:
        """Add a form, and return its number."""
        self.forms.append(form)
        self._num_terms += num_terms
        if self._num_terms > self.max_edges:
            self._check_size()
        return self.num_entries + len(self.forms)

    def _number_form(self, number: float) -> int:
        form = self.form_of_number.get(number)
        if form is None:
            form = self.form_of_number[number] = self._intern({}, number)
        return form

    def _number(self, value: Any, what: str) -> float:
        """Return a number that is not a symbol as a float."""
        if isinstance(value, Real | np.bool_):
            number = float(value)
            if math.isnan(number):
                raise error(f"{what} must be a number, got nan")
            return number
        if isinstance(value, Symbol):
            raise error(_FOREIGN)
        if isinstance(value, Tensor):
            raise error(
                f"{what} must not be a tensor: pass scores as positional arguments, and use a list or a dictionary for "
                "a table"
            )
        is_option = what == _OPTION and isinstance(value, list | tuple | np.ndarray)
        advice = ": unpack it with *, or write one call for each entry" if is_option else ""
        raise error(f"{what} must be a number or a smoothed value, got a {type(value).__name__}{advice}")

    # --- for messages

    def show(self, code: int) -> str:
        terms, constant = self.form(code & _FORM)
        parts = [f"node {node}" for node in self._nodes(code >> _FORM_BITS)]
        parts += [f"entry {entry}" if c == 1 else f"{c:g} * entry {entry}" for entry, c in terms]
        parts += [f"{constant:g}"] if constant or not parts else []
        return f"<{' + '.join(parts)}>"
