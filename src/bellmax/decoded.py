"""The class DecodedForm: how a distribution writes a path in the user's terms, and how it reads such a path.

Sweeps return paths in the compact form of their program. A decoded form is a tensor of integers, padded with −1, such
as tags or index pairs, or nested lists of integers. A structure brings a subclass for its form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from bellmax.inputs import check_tensor
from bellmax.modes import is_readable
from bellmax.programs.checks import subscript
from bellmax.solver import Solver
from bellmax.tensors import inner

if TYPE_CHECKING:
    from typing_extensions import Self


class DecodedPaths(Protocol):
    """A distribution over paths, as its decoded form sees it."""

    device: torch.device
    dtype: torch.dtype
    _solver: Solver

    @property
    def batch_shape(self) -> torch.Size: ...

    @property
    def event_shape(self) -> torch.Size: ...

    @property
    def _form(self) -> DecodedForm: ...

    def detach(self) -> Self: ...

    def __getitem__(self, index: Any) -> Self: ...

    def _check_device(self, name: str, tensor: Tensor) -> None: ...


def are_integers(tensor: Tensor) -> bool:
    """True if a tensor holds integers, which bools are not."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


class EdgePaths(Protocol):
    """Paths (..., *batch) as edges of the expansion, which has E edges."""

    is_path: Tensor
    """(..., *batch): False if a decoded form is not a path, whatever its score. Its edges are then unspecified."""

    def sum_of(self, values: Tensor) -> Tensor:
        """Return the sum of values (*batch, E) over the edges of each path, (..., *batch)."""
        ...

    def counts(self, num_edges: int) -> Tensor:
        """Return how often each path takes each edge, (..., *batch, E) int64."""
        ...

    def num_edges(self) -> Tensor:
        """Return the number of edges of each path, (..., *batch) int64."""
        ...


class EdgeLists:
    """Paths as numbers of edges, (..., *batch, L) int64, padded with −1."""

    def __init__(self, numbers: Tensor, is_path: Tensor) -> None:
        self.numbers, self.is_path = numbers, is_path

    def sum_of(self, values: Tensor) -> Tensor:
        (*shape, longest), batch = self.numbers.shape, values.shape[:-1]
        members, lead = batch.numel(), torch.Size(shape[: len(shape) - len(batch)]).numel()
        # Samples are columns: if the values were expanded to all samples, so would be their gradient.
        numbers = self.numbers.reshape(lead, members, longest).transpose(0, 1).flatten(1)
        flat = values.reshape(members, values.shape[-1])
        entries = flat.gather(1, numbers.clamp(min=0)).masked_fill(numbers < 0, 0)
        return entries.reshape(members, lead, longest).sum(-1).T.reshape(shape)

    def counts(self, num_edges: int) -> Tensor:
        is_edge = self.numbers >= 0
        empty = torch.zeros((*self.numbers.shape[:-1], num_edges), dtype=torch.int64, device=self.numbers.device)
        return empty.scatter_add(-1, self.numbers.clamp(min=0), is_edge.long())

    def num_edges(self) -> Tensor:
        return (self.numbers >= 0).sum(-1)


class EdgeCounts:
    """Paths as numbers of uses of each edge, (..., *batch, E)."""

    def __init__(self, counts: Tensor, is_path: Tensor) -> None:
        self._counts, self.is_path = counts, is_path

    def sum_of(self, values: Tensor) -> Tensor:
        return inner(self._counts, values)

    def counts(self, num_edges: int) -> Tensor:
        return self._counts.long()

    def num_edges(self) -> Tensor:
        return self._counts.sum(-1).long()


class Fault(NamedTuple):
    """Why a decoded form is not a path: the position of its first wrong entry, if any, and the end of a sentence."""

    position: tuple[int, ...]
    reason: str


class DecodedForm:
    """The decoded form of the paths of a distribution ``p``."""

    is_nested_list: ClassVar[bool] = False
    """True if the form is nested lists instead of a tensor."""

    def __init__(self, p: DecodedPaths) -> None:
        self.p, self.solver = p, p._solver

    @property
    def own_shape(self) -> Sequence[int | str]:
        """The shape of one path; a string for a size that varies."""
        raise self._no_form()

    @property
    def description(self) -> str:
        """The form in words, for messages."""
        shape = ", ".join(map(str, (*self.p.batch_shape, *self.own_shape)))
        return f"({shape}) int64"

    def of_compact(self, paths: Tensor) -> Any:
        """Return paths (..., *batch, …) of the sweeps in the decoded form."""
        raise self._no_form()

    def edges(self, decoded: Tensor) -> EdgePaths:
        """Return the edges of paths that :meth:`read` returned.

        ``is_path`` may be True for a path whose edges are closed in its member of the batch, see :meth:`is_open`.
        """
        raise self._no_form()

    def edges_of_compact(self, paths: Tensor) -> EdgePaths:
        """Return the edges of paths (..., *batch, …) of the sweeps. ``is_path`` is False for padding."""
        return self.edges(self.of_compact(paths))

    def is_open(self, edges: EdgePaths) -> Tensor:
        """(...): False if an edge of a path does not exist, for example because it is outside of the lengths."""
        return edges.is_path

    def check_unique(self, name: str, decoded: Tensor) -> None:
        """Raise ``ValueError`` if a decoded form does not determine its path."""

    def _no_form(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self.p).__name__} has no decoded form: use events, such as best_path()")

    def fault(self, decoded: Tensor) -> Fault:
        """Return why a decoded form (*own) is not a path. ``p`` must have no batch."""
        return Fault((), "is not a path of the graph")

    # --- reading

    def matches(self, value: object) -> bool:
        """True if a value is a decoded form, not an event: integers are, floating point and bool tensors are not."""
        return isinstance(value, Tensor) and are_integers(value)

    def read(self, name: str, decoded: Any) -> Tensor:
        """Return the argument ``name`` as int64, (..., *batch, *own), with the batch that it broadcasts to."""
        self.p._check_device(name, check_tensor(name, decoded))
        if not are_integers(decoded):
            raise ValueError(f"{name} must hold integers, got dtype {decoded.dtype}")
        own, batch_shape = self.own_shape, self.p.batch_shape
        dims = len(own)
        sizes = decoded.shape[decoded.ndim - dims :]
        if decoded.ndim < dims or any(n not in (size, "L") for n, size in zip(own, sizes, strict=True)):
            needed, shown = f"(..., {', '.join(map(str, own))})", f"{tuple(decoded.shape)}{self._hint(name, decoded)}"
            raise ValueError(f"{name} must have shape {needed} for integers, got {shown}")
        try:
            shape = torch.broadcast_shapes(decoded.shape[: decoded.ndim - dims], batch_shape)
        except RuntimeError:
            n, message = len(batch_shape), f"{name} must broadcast to the batch shape {tuple(batch_shape)}"
            message += f", got {tuple(decoded.shape)}"
            if decoded.shape[:n] == batch_shape:
                message += f". If it is of topk_decoded, pass {name}.movedim({n}, 0)"
            raise ValueError(message) from None
        integers: Tensor = decoded.to(torch.int64)
        return integers.expand(shape + sizes)

    def _hint(self, name: str, decoded: Tensor) -> str:
        """The end of a message about integers that are not a decoded form, if they have the shape of an event."""
        event = self.p.event_shape
        is_like_event = len(event) > 1 and decoded.shape[decoded.ndim - len(event) :] == event
        return f". For an event, pass floating point or bool: {name}.float()" if is_like_event else ""

    def is_path(self, decoded: Tensor) -> Tensor:
        """(...): True if what :meth:`read` returned is a path, whatever its score."""
        edges = self.edges(decoded)
        return edges.is_path & self.is_open(edges)

    def check(self, name: str, decoded: Tensor) -> None:
        """Raise ``ValueError`` if one of the paths that :meth:`read` returned is not a path."""
        is_path = self.is_path(decoded)
        if is_readable(is_path) and not bool(is_path.all()):
            first = tuple((~is_path).nonzero()[0].tolist())
            member = first[len(first) - len(self.p.batch_shape) :]
            p = self.p.detach()[member] if member else self.p.detach()
            position, reason = p._form.fault(decoded[first])
            raise ValueError(f"{name}{subscript((*first, *position))} {reason}{self._hint(name, decoded)}")

    def events(self, decoded: Tensor) -> Tensor:
        """Return paths that :meth:`read` returned as events (..., *batch, *event)."""
        shape = self.solver.edge_shape
        dtype = torch.promote_types(self.p.dtype, torch.float32)
        counts = self.edges(decoded).counts(shape.numel()).to(dtype)
        return self.solver.events_of_edges(counts.reshape(*counts.shape[:-1], *shape)) + 0  # no -0


class EventForm(DecodedForm):
    """A decoded form whose edges are found from events."""

    def events_of(self, decoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return events (..., *batch, *event), and (..., *batch), False if an integer is out of range."""
        raise self._no_form()

    def edges(self, decoded: Tensor) -> EdgePaths:
        event, is_in_range = self.events_of(decoded)
        counts, is_path = self.solver.edges_of(event)
        return EdgeCounts(counts, is_path & is_in_range)

    def events(self, decoded: Tensor) -> Tensor:
        return self.events_of(decoded)[0]
