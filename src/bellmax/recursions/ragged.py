"""Problems of different sizes: the class RaggedPaths, a list of problems that are solved together if they can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bellmax.recursions.paths import ProgramPaths


class RaggedPaths:
    """Distributions over the derivations of a program for K problems of different sizes.

    The call of a :func:`bellmax.program` returns this object if an argument is a list of tensors. The program is traced
    once for each combination of shapes, and problems of the same shapes are solved as one batch. ``p[k]`` is the
    :class:`ProgramPaths` of problem k. Losses take lists of K targets.

    >>> import bellmax as bx
    >>> @bx.program("item")
    ... def heaviest_rise(weight, *, rise=1):
    ...     best = []
    ...     for i, w in enumerate(weight):
    ...         best.append(w + bx.max(0.0, *best[: max(0, i - rise + 1)]))
    ...     return bx.max(best)
    >>> p = heaviest_rise([torch.zeros(2), torch.ones(3), torch.zeros(2)])
    >>> p
    RaggedPaths(heaviest_rise, problems=3, shapes=2)
    >>> p.value.exp()
    tensor([ 3.0000, 50.4076,  3.0000])
    >>> len(p.expected_path), p[1].expected_path.shape
    (3, torch.Size([3]))
    """

    def __init__(
        self,
        name: str,
        solve: Callable[..., ProgramPaths],
        scores: Mapping[str, Any],
        axes: Sequence[tuple[str, ...]],
    ) -> None:
        columns = _columns(scores, axes)
        self._name, self._inputs = name, tuple(scores)
        self._groups: list[tuple[list[int], ProgramPaths]] = []
        members: dict[tuple[Any, ...], list[int]] = {}
        for k, row in enumerate(zip(*columns.values(), strict=True)):
            members.setdefault(tuple(tuple(tensor.shape) for tensor in row), []).append(k)
        for indices in members.values():
            p = solve(*(torch.stack([column[k] for k in indices]) for column in columns.values()))
            self._groups.append((indices, p))

    def __repr__(self) -> str:
        return f"RaggedPaths({self._name}, problems={len(self)}, shapes={len(self._groups)})"

    def __len__(self) -> int:
        return sum(len(indices) for indices, _ in self._groups)

    def __getitem__(self, k: int) -> ProgramPaths:
        """Return the distribution of problem k."""
        if not isinstance(k, int) or not -len(self) <= k < len(self):
            raise IndexError(f"the index must be an integer below {len(self)}, got {k!r}")
        k %= len(self)
        for indices, p in self._groups:
            if k in indices:
                return p[indices.index(k)]
        raise AssertionError("every problem is in a group")

    def __iter__(self) -> Iterator[ProgramPaths]:
        return (self[k] for k in range(len(self)))

    @property
    def groups(self) -> list[tuple[list[int], ProgramPaths]]:
        """The batches that are solved together: pairs (numbers of the problems, distribution)."""
        return list(self._groups)

    # --- answers, in the order of the problems

    @property
    def value(self) -> Tensor:
        """The value of each problem, (K,). Differentiable."""
        return self.join(lambda p: p.value)

    @property
    def expected_path(self) -> list[Tensor]:
        """The expected counts of the entries of the first score of each problem. Differentiable."""
        return self.listed(lambda p: p.expected_path)

    @property
    def gradient(self) -> dict[str, list[Tensor]]:
        """The gradient of the value of each problem, as a mapping from names of scores to lists of K tensors."""
        gradients = [(indices, p.gradient) for indices, p in self._groups]
        return {name: self._in_order([(i, g[name]) for i, g in gradients]) for name in self._inputs}

    def best_path(self) -> list[Tensor]:
        """Return the event of the best derivation of each problem."""
        return self.listed(lambda p: p.best_path())

    def decode(self) -> list[list[int]]:
        """Return the best derivation of each problem as edge numbers of ``p[k]``."""
        return self.listed(lambda p: p.decode())

    def sample_decoded(self) -> list[list[int]]:
        """Return a random derivation of each problem as edge numbers of ``p[k]``."""
        return self.listed(lambda p: p.sample_decoded())

    def log_prob(self, derivations: Sequence[list[int]]) -> Tensor:
        """Return the log-probability of one derivation of each problem, (K,). Differentiable.

        Args:
            derivations: A list of K derivations, as :meth:`decode` returns them.

        """
        return self.join_with("derivations", derivations, lambda p, derivation: p.log_prob(derivation))

    def entropy(self) -> Tensor:
        """Return the entropy of the distribution of each problem, (K,). Differentiable."""
        return self.join(lambda p: p.entropy())

    @property
    def num_paths(self) -> Tensor:
        """The number of derivations of each problem, (K,)."""
        return self.join(lambda p: p.num_paths)

    # --- groups

    def join(self, function: Callable[[ProgramPaths], Tensor]) -> Tensor:
        """Apply a function with results (B,) to each batch. Return the results in the order of the problems, (K,)."""
        return self._concatenate([(indices, function(p)) for indices, p in self._groups])

    def join_with(self, name: str, targets: Sequence[Any], function: Callable[[ProgramPaths, Any], Tensor]) -> Tensor:
        """Apply a function of (distribution, targets) with results (B,) to each batch, and return the results (K,).

        Args:
            name: The name of the argument ``targets``, for messages.
            targets: A list of K targets: lists of edge numbers, tensors, or mappings to tensors.
            function: The function.

        """
        if not isinstance(targets, list | tuple) or len(targets) != len(self):
            got = f"{len(targets)} of them" if isinstance(targets, list | tuple) else f"a {type(targets).__name__}"
            raise ValueError(f"{name} must be a list with an entry for each of the {len(self)} problems, got {got}")
        results = [(i, function(p, _batched({f"{name}[{k}]": targets[k] for k in i}))) for i, p in self._groups]
        return self._concatenate(results)

    def listed(self, function: Callable[[ProgramPaths], Any]) -> list[Any]:
        """Apply a function to each batch, and return its results, of one batch dimension, in a list of K elements."""
        return self._in_order([(indices, function(p)) for indices, p in self._groups])

    def _in_order(self, results: Sequence[tuple[list[int], Any]]) -> list[Any]:
        by_problem = {k: element for indices, result in results for k, element in zip(indices, result, strict=True)}
        return [by_problem[k] for k in range(len(self))]

    def _concatenate(self, results: Sequence[tuple[list[int], Tensor]]) -> Tensor:
        order = torch.tensor([k for indices, _ in results for k in indices])
        joined = torch.cat([result for _, result in results])
        return joined[order.argsort().to(joined.device)]


def _columns(scores: Mapping[str, Any], axes: Sequence[tuple[str, ...]]) -> dict[str, list[Tensor]]:
    """Return a list of K tensors for each score. A tensor that is not in a list is shared by all problems."""
    lists = {name: score for name, score in scores.items() if isinstance(score, list | tuple)}
    count = len(next(iter(lists.values())))
    if not count:
        raise ValueError(f"{next(iter(lists))} must hold at least one tensor, got an empty list")
    columns = {}
    for (name, score), own in zip(scores.items(), axes, strict=True):
        listed = score if name in lists else [score] * count
        if len(listed) != count:
            raise ValueError(f"{name} must have as many tensors as {next(iter(lists))}, {count}, got {len(listed)}")
        for k, tensor in enumerate(listed):
            label = f"{name}[{k}]" if name in lists else name
            if not isinstance(tensor, Tensor):
                advice = "pass one tensor, or a list of tensors for problems of different sizes"
                raise ValueError(f"{label} must be a tensor, got {type(tensor).__name__}: {advice}")
            if tensor.ndim != len(own):
                needed = f"({', '.join(own)}) without batch dimensions"
                raise ValueError(f"{label} must have shape {needed}, got {tuple(tensor.shape)}")
        columns[name] = list(listed)
    return columns


def _batched(targets: Mapping[str, Any]) -> Any:
    """Join the targets of problems of equal shapes: stack tensors, and join the entries of mappings.

    Args:
        targets: The targets by their names in messages.

    """
    (label, first), *others = targets.items()
    for other, target in others:
        if _form(target) != _form(first):
            raise ValueError(
                f"{label} and {other} must have the same form, because their problems have the same shapes, got "
                f"{_form(first)} and {_form(target)}"
            )
    if isinstance(first, Mapping):
        return {n: _batched({f"{k}[{n!r}]": target[n] for k, target in targets.items()}) for n in first}
    return torch.stack(list(targets.values())) if isinstance(first, Tensor) else list(targets.values())


def _form(target: Any) -> str:
    """Return the form of a target: the shape of a tensor, the keys of a mapping, or the type."""
    if isinstance(target, Tensor):
        return f"shape {tuple(target.shape)}"
    if isinstance(target, Mapping):
        return f"the keys {', '.join(sorted(map(str, target)))}"
    return "a list" if isinstance(target, list | tuple) else f"a {type(target).__name__}"
