"""The functions bellmax.max and bellmax.min, and the interpreters that give them a meaning.

Outside of an interpreter they are Python's max and min. A trace is an interpreter: there they make nodes.
"""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import GeneratorType
from typing import Any, Protocol

from torch import Tensor

from bellmax.recursions.symbols import Symbol, error


class Interpreter(Protocol):
    """A meaning of max and min."""

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        """Return the max (``sense`` 1) or the min (−1) of options."""
        ...


class _Numbers:
    """Python's max and min. The max of no options is −∞."""

    def choose(self, sense: int, options: Sequence[Any]) -> Any:
        if not options:
            return -sense * math.inf
        return builtins.max(options) if sense > 0 else builtins.min(options)


_NUMBERS = _Numbers()


class _Active(threading.local):
    """The interpreter of this thread."""

    interpreter: Interpreter = _NUMBERS


_STATE = _Active()


@contextmanager
def interpreted(interpreter: Interpreter) -> Iterator[None]:
    """Let an interpreter give max and min their meaning in this thread."""
    previous, _STATE.interpreter = _STATE.interpreter, interpreter
    try:
        yield
    finally:
        _STATE.interpreter = previous


def is_interpreted() -> bool:
    """True while a program runs under an interpreter in this thread."""
    return _STATE.interpreter is not _NUMBERS


def max(*options: Any) -> Any:
    """Return the smoothed maximum of the options, for use inside a :func:`bellmax.program`.

    Inside a program, a call makes one node of the dynamic program, with one edge for each option. Options of −∞ are
    left out. If a single option remains, the call returns this option unchanged and makes no node. If no option
    remains, the call returns −∞. Outside a program, the function is Python's ``max``, so ``program.function`` runs on
    numbers. A program cannot use both ``bellmax.max`` and ``bellmax.min``.

    Args:
        options: Numbers, scores, and results of other calls, or a single iterable of them.

    >>> import bellmax as bx
    >>> bx.max(1.0, 2.0), bx.max(x * x for x in range(4)), bx.max([])
    (2.0, 9, -inf)
    """
    return _STATE.interpreter.choose(1, options if len(options) != 1 else _options_of(options[0]))


def min(*options: Any) -> Any:
    """Return the smoothed minimum of the options, for use inside a :func:`bellmax.program`.

    As :func:`bellmax.max`, for programs whose scores are costs. Options of +∞ are left out. If no option remains, the
    call returns +∞.

    Args:
        options: Numbers, costs, and results of other calls, or a single iterable of them.

    >>> import bellmax as bx
    >>> bx.min(1.0, 2.0), bx.min([])
    (1.0, inf)
    """
    return _STATE.interpreter.choose(-1, options if len(options) != 1 else _options_of(options[0]))


def _options_of(argument: Any) -> Sequence[Any]:
    """Return the options of a call with one argument: the elements of an iterable, or the argument itself."""
    if type(argument) in (list, tuple):
        return argument  # type: ignore[no-any-return]
    if isinstance(argument, GeneratorType):
        return tuple(argument)
    if isinstance(argument, Mapping) and is_interpreted():
        raise error("an option of bx.max or bx.min must not be a dictionary: pass its values()")
    if isinstance(argument, Symbol | Real | Tensor | str) or not isinstance(argument, Iterable):
        return (argument,)
    return tuple(argument)
