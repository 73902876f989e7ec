"""The decorator bellmax.program, and the class Recursion that it returns."""

from __future__ import annotations

import dis
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial, update_wrapper
from numbers import Number
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bellmax.inputs import check_tensor
from bellmax.modes import once_dynamo_is_imported, outside_modes
from bellmax.recursions.choices import interpreted, is_interpreted
from bellmax.recursions.paths import ProgramPaths
from bellmax.recursions.ragged import RaggedPaths
from bellmax.recursions.symbols import Trace, at_line, error, is_library
from bellmax.recursions.traced import Traced
from bellmax.regularizers import Regularizer
from bellmax.structures.hypergraph import Hypergraph
from bellmax.tensors import Gamma

_MAX_EDGES = 10**7
_RESERVED = ("omega", "gamma")


def program(axes: str, *, max_edges: int = _MAX_EDGES) -> Callable[[Callable[..., Any]], Recursion]:
    """Decorate a recursion written in plain Python. Calling it returns a distribution over its solutions.

    The function describes a dynamic program with ``bellmax.max`` or ``bellmax.min`` in place of max or min. Its
    positional arguments are scores. Its keyword arguments are options such as sizes. It must return one value. For
    example, the knapsack problem asks for the most valuable set of items that fit into a room:

    >>> import torch, bellmax as bx
    >>> @bx.program("item")
    ... def knapsack(value, *, sizes, room):
    ...     best = [0.0] * (room + 1)
    ...     for i, size in enumerate(sizes):
    ...         best = [bx.max(best[r], best[r - size] + value[i]) if r >= size else best[r] for r in range(room + 1)]
    ...     return best[room]
    >>> p = knapsack(torch.tensor([2.0, 3.0, 1.0, 4.0]), sizes=(3, 4, 2, 5), room=9)
    >>> p.best_path()                                  # items 1 and 3
    tensor([0., 1., 0., 1.])
    >>> p.value, p.expected_path                       # smoothed optimum, and the probability of each item
    (tensor(7.7668), tensor([0.4163, 0.7299, 0.2665, 0.7214]))

    The result is a :class:`ProgramPaths`. See :meth:`Recursion.__call__` for the arguments of the call.

    The function runs once for each combination of shapes and keyword arguments, on symbols instead of numbers. Its
    control flow must not depend on scores. Inside the function:

    - scores are arrays: ``value[i]``, ``cost[i, j]``, ``len(value)`` and ``cost.shape`` work as in NumPy;
    - ``+`` adds scores, numbers and results of ``bellmax.max``. Scores can also be subtracted, and multiplied by
      numbers;
    - every call of ``bellmax.max`` with two or more options makes a node of the dynamic program.

    Args:
        axes: The dimensions of each positional argument after the batch dimensions, as names separated by spaces.
            Commas separate arguments: "i j, i, " stands for a matrix, a vector and a number. Dimensions with the same
            name must have the same size.
        max_edges: The maximum number of edges of the dynamic program, default 10⁷. Terms of sums count as well.

    """
    if callable(axes):
        raise ValueError('axes must be a string: write @bx.program("item") with the dimensions of each argument')
    if not isinstance(axes, str):
        raise ValueError(f"axes must be a string such as 'i j, i', got {axes!r}")
    if not isinstance(max_edges, int) or max_edges < 1:
        raise ValueError(f"max_edges must be a positive integer, got {max_edges!r}")
    names = [tuple(part.split()) for part in axes.split(",")]
    for name in (name for part in names for name in part):
        if not name.isidentifier():
            raise ValueError(f"axes must hold names of dimensions such as 'i j, i', got {name!r}")
    return lambda function: Recursion(function, names, max_edges)


class Recursion:
    """A dynamic program written as a Python function, which :func:`bellmax.program` returns.

    The attribute ``function`` is the original function. It runs on numbers.
    """

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], axes: Sequence[tuple[str, ...]], max_edges: int) -> None:
        self.function, self.axes, self.max_edges = function, tuple(axes), max_edges
        self.inputs = _input_names(function, self.axes)
        self._traces: dict[Hashable, tuple[Traced, list[Any]]] = {}
        """Traces, and the objects outside of the function that it read and that can change, such as lists."""
        self._captured = _captured_names(function)
        self.__name__ = function.__name__
        update_wrapper(self, function)

    def __reduce__(self) -> str:
        return self.function.__qualname__  # pickled as a function is, by its name

    def __repr__(self) -> str:
        inputs = ", ".join(f"{n}[{', '.join(axes)}]" for n, axes in zip(self.inputs, self.axes, strict=True))
        return f"<bellmax.program {self.__name__}({inputs})>"

    def __call__(
        self,
        *scores: Tensor | Sequence[Tensor],
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
        **static: Any,
    ) -> Any:
        """Return the distribution over the derivations of the program.

        Args:
            scores: A tensor for each positional argument of the function, (..., *own), where the dimensions ``own``
                have the names in ``axes``. Batch dimensions broadcast. A score of −∞ (+∞ for a program with
                ``bellmax.min``) removes the options that use it. For problems of different sizes, pass lists of
                tensors without batch dimensions. The result is then a :class:`RaggedPaths`.
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.
            static: The keyword arguments of the function. They must be hashable: pass tuples instead of lists.

        """
        if is_interpreted():
            name = self.__name__
            raise error(f"a program cannot call another program: call {name}.function, which is a plain function")
        self._check_count(scores)
        if any(isinstance(score, list | tuple) for score in scores):
            if isinstance(omega.gamma if isinstance(omega, Regularizer) else gamma, Tensor):
                raise ValueError("gamma must be a number for problems of different sizes, got a tensor")
            solve = partial(self, omega=omega, gamma=gamma, **static)
            return RaggedPaths(self.__name__, solve, dict(zip(self.inputs, scores, strict=True)), self.axes)
        tensors: dict[str, Any] = dict(zip(self.inputs, scores, strict=True))
        return ProgramPaths(self._traced(self._own_shapes(tensors), static), tensors, omega, gamma)

    def graph(self, *shapes: Sequence[int], **static: Any) -> Hypergraph:
        """Return the hypergraph of the program, for scores of these shapes.

        Edges whose weights are the same sum of scores share a weight of the hypergraph.

        Args:
            shapes: For each positional argument of the function, its shape without batch dimensions.
            static: The keyword arguments of the function.

        >>> import bellmax as bx
        >>> @bx.program("word")
        ... def best(score):
        ...     return bx.max(score)
        >>> best.graph((3,))
        Hypergraph(num_nodes=1, num_edges=3)
        """
        if len(shapes) != len(self.inputs):
            raise ValueError(f"{self._signature()}, got {len(shapes)} shapes")
        for name, axes, shape in zip(self.inputs, self.axes, shapes, strict=True):
            is_shape = isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
            if not is_shape or len(shape) != len(axes):
                raise ValueError(f"the shape of {name} must have the dimensions ({', '.join(axes)}), got {shape}")
        own = tuple(map(tuple, shapes))
        self._check_sizes(own)
        return self._traced(own, static).hypergraph

    def clear_cache(self) -> None:
        """Forget all traces, so that the next call runs the function again."""
        self._traces.clear()

    # --- shapes

    def _signature(self) -> str:
        count = len(self.inputs)
        return f"{self.__name__} takes {count} score tensor{'s' * (count != 1)} ({', '.join(self.inputs)})"

    def _check_count(self, scores: Sequence[Any]) -> None:
        if len(scores) != len(self.inputs):
            advice = "pass scores by position" if len(scores) < len(self.inputs) else "pass the others by keyword"
            raise ValueError(f"{self._signature()}, got {len(scores)} positional arguments: {advice}")

    def _own_shapes(self, tensors: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each score without its batch dimensions."""
        own = []
        for (name, tensor), axes in zip(tensors.items(), self.axes, strict=True):
            shape = check_tensor(name, tensor).shape
            if len(shape) < len(axes):
                raise ValueError(f"{name} must have shape (..., {', '.join(axes)}), got {tuple(shape)}")
            own.append(tuple(map(int, shape[len(shape) - len(axes) :])))  # torch.jit.trace has sizes that are tensors
        self._check_sizes(own)
        return tuple(own)

    def _check_sizes(self, own: Sequence[tuple[int, ...]]) -> None:
        """Raise ``ValueError`` if dimensions of the same name have different sizes."""
        sizes: dict[str, tuple[int, str]] = {}
        for name, axes, shape in zip(self.inputs, self.axes, own, strict=True):
            for axis, size in zip(axes, shape, strict=True):
                known, other = sizes.setdefault(axis, (size, name))
                if size != known:
                    raise ValueError(
                        f"the dimensions {axis!r} must have the same size, got {known} of {other} and {size} of {name}"
                    )

    # --- tracing

    def _traced(self, own: tuple[tuple[int, ...], ...], static: Mapping[str, Any]) -> Traced:
        """Return the program for scores of these shapes, from the cache if possible."""
        captured = tuple([get() for get in self._captured])
        key = own, tuple((name, _key(value)) for name, value in static.items()), _captured_key(captured)
        try:
            known = self._traces.get(key)
        except TypeError:
            raise _unhashable(static) from None
        objects = _captured_objects(captured)
        if known is not None and all(a is b for a, b in zip(known[1], objects, strict=True)):
            return known[0]
        traced = self._trace(own, static)
        self._make_room(traced)
        self._traces[key] = traced, objects
        return traced

    def _make_room(self, traced: Traced) -> None:
        """Drop the oldest traces if all traces together have more than ``max_edges`` edges."""
        old = tuple(self._traces.items())  # a copy: other threads can change the cache
        total = traced.hypergraph.num_edges + sum(t.hypergraph.num_edges for _, (t, _) in old)
        for key, (dropped, _) in old:
            if total <= self.max_edges:
                break
            self._traces.pop(key, None)
            total -= dropped.hypergraph.num_edges

    def _trace(self, own: tuple[tuple[int, ...], ...], static: Mapping[str, Any]) -> Traced:
        """Run the function on symbols."""
        for name, value in static.items():
            if _unhashable_part(value) is not None:
                raise _unhashable({name: value})
        trace = Trace(sum(math.prod(shape) for shape in own), self.max_edges)
        proxies, first = [], 0
        for shape in own:
            size = math.prod(shape)
            proxies.append(object_array(shape, [trace.Symbol(n + 1) for n in range(first, first + size)]))
            first += size
        code = self.function.__code__
        inputs = dict(zip(self.inputs, own, strict=True))
        with interpreted(trace):
            try:
                result = self.function(*proxies, **static)
            except (IndexError, TypeError, AttributeError, OverflowError, ValueError) as error:
                explained = _explained(error, inputs)
                if explained is error:
                    raise
                raise explained from error
        with outside_modes():
            return Traced(self.__name__, trace, trace.code_of_result(result, code), inputs, code)


def _keep_from_dynamo() -> None:
    """Let torch.compile run a trace as Python code, outside of the compiled graph."""
    options = {"reason": "call the program once with these shapes and options before compiling with fullgraph=True"}
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:  # before torch 2.7
        options = {}
    Recursion._trace = torch.compiler.disable(Recursion._trace, **options)  # type: ignore[method-assign]


once_dynamo_is_imported(_keep_from_dynamo)


def object_array(shape: tuple[int, ...], elements: list[Any]) -> Any:
    """Return objects as an array of this shape, or the single object if the shape is ()."""
    array = np.fromiter(elements, dtype=object, count=len(elements))
    return array.reshape(shape) if shape else elements[0]


def _unhashable(static: Mapping[str, Any]) -> ValueError:
    """Return the error for a keyword argument that cannot be part of the key of a trace."""
    for name, value in static.items():
        part = _unhashable_part(value)
        if part is not None:
            kind = type(part).__name__
            advice = {
                "list": "pass a tuple",
                "Tensor": "pass it as a positional argument, or as a tuple of numbers",
                "ndarray": "pass a tuple of numbers, such as tuple(x.tolist())",
            }.get(kind, "pass numbers, strings and tuples")
            if part is not value:
                kind += " in a tuple"
                advice = "pass a tuple of tuples or numbers"
            return ValueError(f"the keyword argument {name} must be hashable, got a {kind}: {advice}")
    return ValueError("keyword arguments must be hashable")


def _unhashable_part(value: Any) -> Any:
    """Return the part of a keyword argument that cannot be in the key of a trace, None if there is none.

    A tensor has a hash, but two tensors of equal numbers have different ones.
    """
    if isinstance(value, tuple):
        return next((part for part in map(_unhashable_part, value) if part is not None), None)
    try:
        hash(value)
    except TypeError:
        return value
    return value if isinstance(value, Tensor) else None


def _explained(error: Exception, inputs: Mapping[str, tuple[int, ...]]) -> Exception:
    """Return an error with the line of the program, if Python or NumPy refused a score or an index of a score."""
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [(code, line) for code, line in lines if not is_library(code)]
    if not lines:
        return error
    code, line = lines[-1]
    message, shapes = str(error).partition("\n")[0], ", ".join(f"{name} {shape}" for name, shape in inputs.items())
    if isinstance(error, IndexError) and re.search(r"out of bounds for axis|too many indices for array", message):
        message = f"an index of a score is out of range, {message}, where the shapes are {shapes}"
    elif isinstance(error, IndexError) and message.startswith("only integers, slices"):
        message = "an index must be an integer or a slice, and not a score: pass integers as keyword arguments"
    elif re.search(r"\b(max|min)\(\) got an unexpected keyword", message):
        message = "bx.max and bx.min take no key or default: the max of no options is -inf"
    elif re.search(r"'Symbol' object is not (subscriptable|iterable)|'Symbol' has no len|non-iterable Symbol", message):
        message = f"a single score has no index, length or elements, where the shapes of the scores are {shapes}"
    elif isinstance(error, TypeError | AttributeError) and re.search(r"Symbol|ndarray|0-d array|^ufunc ", message):
        message = f"inside a program, scores are symbols in NumPy arrays and tables are lists, but here {message}"
    elif message == "'int' object is not callable" and ".size(" in linecache.getline(code.co_filename, line):
        message = "inside a program, scores are NumPy arrays: use shape[0] instead of size(0)"
    elif isinstance(error, TypeError) and "'dim'" in message:
        message = "inside a program, scores are NumPy arrays: use axis instead of dim"
    elif message.startswith("The truth value of an array"):
        message = "a program cannot branch on scores: use bx.max or bx.min instead of if"
    elif message == "int too large to convert to float":
        message = "a number must fit into a float: use math.inf instead of a very large number"
    else:
        return error
    return at_line(message, code, line)


# --- keys of traces

_CONSTANTS = Number | np.bool_ | str | FunctionType | Recursion


def _key(value: Any) -> Hashable:
    """Return a key that differs for equal values of different types, such as 1, True and 1.0."""
    if isinstance(value, tuple):
        return type(value), *map(_key, value)
    return type(value), value


def _captured_key(value: Any) -> Hashable:
    """Return a key of a value outside of the function. It is None for objects that can change, such as lists."""
    if isinstance(value, tuple):
        return type(value), *map(_captured_key, value)
    return _key(value) if isinstance(value, _CONSTANTS) else None


def _captured_objects(value: Any) -> list[Any]:
    """Return the objects that can change in a value outside of the function."""
    if isinstance(value, tuple):
        return [part for element in value for part in _captured_objects(element)]
    return [] if isinstance(value, _CONSTANTS) else [value]


# --- reading the function


def _input_names(function: Callable[..., Any], axes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the positional arguments that are scores. Raises ``ValueError`` if they do not fit."""
    if not hasattr(function, "__code__"):
        raise ValueError(f"bx.program must decorate a function, got {function!r}")
    parameters = inspect.signature(function).parameters
    positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    name = function.__name__
    if positional[:1] == ["self"]:
        raise ValueError(f"bx.program must decorate a function, but {name} is a method: define it outside of the class")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(f"{name} must have named positional arguments, got *args")
    if len(axes) > len(positional):
        raise ValueError(
            f"axes must have one part for each score of {name}, got {len(axes)} parts and the positional arguments "
            f"{', '.join(positional) or 'none'}"
        )
    for reserved in _RESERVED:
        if reserved in parameters:
            raise ValueError(f"{name} must not have an argument {reserved!r}, which the call of the program takes")
    return tuple(positional[: len(axes)])


def _captured_names(function: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Return functions that look up what the function reads from outside: closure cells and global variables."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    lookups: list[Callable[[], Any]] = [_cell_lookup(cell) for cell in cells.values()]
    instructions = [instruction for inner in _codes(code) for instruction in dis.get_instructions(inner)]
    names = {instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL"}
    return lookups + [_global_lookup(function.__globals__, name) for name in sorted(names)]


def _codes(code: CodeType) -> list[CodeType]:
    """Return a code object and the code objects of the functions inside."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(nested for child in inner for nested in _codes(child))]


def _cell_lookup(cell: Any) -> Callable[[], Any]:
    def look_up() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # empty until the surrounding function assigns the variable
            return None

    return look_up


def _global_lookup(namespace: dict[str, Any], name: str) -> Callable[[], Any]:
    return lambda: namespace.get(name)
