"""The distribution over the derivations of a program: the class ProgramPaths, its targets and its decoded form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

import bellmax.structures.sums as sums
from bellmax.decoded import EdgeCounts, EdgePaths, Fault
from bellmax.distribution import USES_UNITS_TWICE, PathDistribution
from bellmax.inputs import check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.checks import subscript
from bellmax.programs.graph import node_numbers
from bellmax.recursions.traced import ONE, ProgramEdge, Traced
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.hypergraph import DerivationForm, Hypergraph
from bellmax.targets import PathTargets, Targets
from bellmax.tensors import Gamma, inner, promote_half, wide_dtype, widen

if TYPE_CHECKING:
    from typing_extensions import Self

_TOLERANCE = 1e-4
"""The largest relative difference between counts that are equal, because coefficients may be fractions."""
_PREFERENCE = 1e-9
"""The score of the number 1 in a search for derivations, so that constants only decide ties."""


class ProgramForm(DerivationForm):
    """Nested lists of edge numbers, one list for each member of the batch."""

    def fault(self, decoded: Tensor) -> Fault:
        fault = super().fault(decoded)
        name = cast("ProgramPaths", self.p)._traced.name
        if fault.position:
            return fault
        return Fault((), f"is not a derivation of {name}: pass edge numbers, such as p.decode()")


class CountTargets(PathTargets):
    """A target that counts how often a derivation uses each score entry, and one derivation with these counts."""

    def __init__(self, p: ProgramPaths, counts: Sequence[Tensor], paths: EdgePaths) -> None:
        super().__init__(p, counts[0], paths)
        self.counts, self.has_constants = counts, p._traced.has_constants

    def _event(self) -> Tensor:
        return self.decoded

    def _score(self) -> Tensor:
        if self.has_constants:
            return super()._score()
        scores = zip(self.counts, self.solver.scores, self.solver.dims, strict=True)
        terms = [inner(widen(counts), widen(promote_half(score)), dims) for counts, score, dims in scores]
        return sum(terms[1:], start=terms[0])

    def restricted_value(self, allowed: Tensor) -> Tensor:
        """If values cannot be read, no search confirms the counts, and a score without constants does not need one."""
        value = super().restricted_value(allowed)
        is_known = is_readable(value) or self.has_constants
        return value.masked_fill(~self.paths.is_path, -self.p.sense * math.inf) if is_known else value

    def log_prob(self, name: str) -> Tensor:
        raise ValueError(
            f"{name} must hold edges, such as p.decode(), got counts: several derivations can have the same counts"
        )


class ProgramTargets(Targets):
    """Targets of a program: derivations in the decoded form, or counts of score entries."""

    def forms(self) -> list[str]:
        shapes = [f"{name} {(*self.batch_shape, *own)}" for name, own in self._own_shapes().items()]
        counts = "counts of the score entries, " + ", ".join(shapes)
        if len(shapes) > 1:
            counts = f"a mapping to {counts}"
        return [counts, self.p._form.description]

    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        return cast("ProgramPaths", self.p)._traced.inputs

    def read(self, name: str, target: Any, ignore_index: int = -100) -> tuple[Targets, Tensor]:
        if self.p._form.matches(target):
            return super().read(name, target, ignore_index)
        p = cast("ProgramPaths", self.p)
        counts = self._read_counts(name, target)
        edges, is_path = p._edges_with(counts)
        if is_checked(is_path) and not bool(is_path.all()):
            member = subscript((~is_path).nonzero()[0].tolist())
            raise ValueError(
                f"{name}{member} must hold the counts of a derivation of {p._traced.name}, but no derivation with "
                "these counts was found: pass edges, such as p.decode()"
            )
        return CountTargets(p, counts, EdgeCounts(edges, is_path)), is_path

    def check_cost(self, cost: Tensor) -> Tensor:
        first = next(iter(self._own_shapes()))
        if isinstance(cost, Mapping):
            raise ValueError(f"cost must be a tensor shaped like the first score, {first}, got a mapping")
        return super().check_cost(cost)

    def _read_counts(self, name: str, target: Any) -> list[Tensor]:
        """Return the counts of the entries of each input, (*batch, *own)."""
        shapes = self._own_shapes()
        given = target if isinstance(target, Mapping) else {next(iter(shapes)): target}
        if given.keys() != shapes.keys():
            needed = f"a mapping with the keys {', '.join(shapes)}" if len(shapes) > 1 else "a tensor"
            got = f"the keys {', '.join(map(str, given))}" if isinstance(target, Mapping) else type(target).__name__
            raise ValueError(f"{name} must be {needed}, or nested lists of edge numbers, got {got}")
        return [
            self._read_one(f"{name}[{n!r}]" if len(shapes) > 1 else name, given[n], own) for n, own in shapes.items()
        ]

    def _read_one(self, name: str, counts: Any, own: tuple[int, ...]) -> Tensor:
        """Return the counts of the entries of one input in the computing dtype."""
        self.p._check_device(name, check_tensor(name, counts))
        needed = self.batch_shape + own
        try:
            expanded = counts.expand(needed)
        except RuntimeError:
            raise ValueError(f"{name} must have shape {tuple(needed)}, got {tuple(counts.shape)}") from None
        numbers: Tensor = expanded.to(torch.promote_types(self.p.dtype, torch.float32))
        if is_checked(numbers) and not bool(numbers.isfinite().all()):
            position = tuple((~numbers.isfinite()).nonzero()[0].tolist())
            raise ValueError(f"{name} must hold finite counts, got {numbers[position].item()} at {position}")
        return numbers


class ProgramPaths(PathDistribution):
    """The distribution over the derivations of a program, which the call of a :func:`bellmax.program` returns.

    A derivation chooses one option of each call of ``bellmax.max`` that it reaches, starting from the returned value.

    - An event counts how often a derivation uses each entry of the first score, times the coefficient of the entry. If
      the program has several scores, ``gradient`` has the expected counts of all scores by name.
    - The decoded form is a list of edge numbers, or nested lists for a batch. An edge is one option of a call of
      ``bellmax.max``. :meth:`derivation_edges` returns the line of the program that made each edge.

    Losses accept the decoded form, or counts: a tensor shaped like the score, or a mapping from the names of all scores
    to tensors. Several derivations can have the same counts, so :meth:`log_prob` needs the decoded form.

    >>> import bellmax as bx
    >>> @bx.program("item")
    ... def no_neighbors(value):
    ...     taken, skipped = value[0], 0.0
    ...     for v in value[1:]:
    ...         taken, skipped = skipped + v, bx.max(taken, skipped)
    ...     return bx.max(taken, skipped)
    >>> p = no_neighbors(torch.tensor([1.0, 3.0, 1.0, 2.0]), omega="sparsemax")
    >>> p.best_path(), p.decode()                          # items 1 and 3, and the options that were chosen
    (tensor([0., 1., 0., 1.]), [6, 2])
    >>> for edge in p.derivation_edges(p.decode()):
    ...     print(edge)  # doctest: +ELLIPSIS
    line ..., option 0: value[3]    # return bx.max(taken, skipped)
    line ..., option 0: value[1]    # taken, skipped = skipped + v, bx.max(taken, skipped)
    """

    _target_kind = ProgramTargets
    _form_kind = ProgramForm

    if TYPE_CHECKING:  # lists instead of tensors

        def decode(self) -> list[Any]: ...  # type: ignore[override]

        def sample_decoded(self, sample_shape: Sequence[int] = ()) -> list[Any]: ...  # type: ignore[override]

        def topk_decoded(self, k: int) -> tuple[Tensor, list[Any]]: ...  # type: ignore[override]

        def most_accurate(self) -> list[Any]: ...  # type: ignore[override]

    def __init__(
        self,
        traced: Traced,
        inputs: Mapping[str, Tensor],
        omega: str | Regularizer,
        gamma: Gamma | None,
    ) -> None:
        self._traced = traced
        pairs = list(zip(inputs.items(), traced.inputs.values(), strict=True))
        batch_shape = _batch_shape([(name, tensor, len(own)) for (name, tensor), own in pairs])
        scores = {name: (tensor, len(own)) for (name, tensor), own in pairs}
        first, own = next(iter(traced.inputs.items()))
        tensor = inputs[first]
        if tensor.ndim - len(own) != len(batch_shape) or tensor.shape != batch_shape + own:
            scores[first] = tensor.expand(batch_shape + own), len(own)
        if traced.has_constants:
            scores[ONE] = traced.one(tensor.dtype, tensor.device), 1
        index = traced.index(tensor.device)
        super().__init__(
            traced.program, scores, index, batch_shape, torch.Size(own), omega, gamma, minimize=traced.sense < 0
        )

    @property
    def hypergraph(self) -> Hypergraph:
        """The hypergraph of the program. Nodes are in the order in which the program made them."""
        return self._traced.hypergraph

    @property
    def minimize(self) -> bool:
        """True if the program uses ``bellmax.min``, so that scores are costs."""
        return self.sense < 0

    def derivation_edges(self, derivation: Sequence[Any]) -> list[Any]:
        """Return the edges of a derivation, with the line of the program that made each edge.

        Args:
            derivation: A derivation in the decoded form, as :meth:`decode` returns it. For nested lists, the result is
                nested.

        Returns:
            A list of :class:`ProgramEdge`: line, source, option, scores and constant.

        """
        if not isinstance(derivation, list | tuple):
            raise ValueError(f"derivation must be a list of edge numbers, got {type(derivation).__name__}")
        return [self.derivation_edges(n) if isinstance(n, list | tuple) else self._edge(n) for n in derivation]

    def counts(self, derivation: Any) -> dict[str, Tensor]:
        """Return how often derivations use each entry of all scores, times the coefficients of the entries.

        Losses accept the result as a target.

        Args:
            derivation: Derivations in the decoded form.

        Returns:
            A mapping from the names of the scores to tensors (..., *own).

        """
        p, decoded = self._read_decoded("derivation", derivation)
        p._form.check("derivation", decoded)
        edges = p._form.edges(decoded).counts(self.hypergraph.num_edges).to(wide_dtype(self.device))
        totals = self._traced.program._onto_entries(edges, *self._flat_inputs())
        counts, first = {}, 0
        for name, own in self._traced.inputs.items():
            size = math.prod(own)
            counts[name] = totals[..., first : first + size].reshape(totals.shape[:-1] + own).to(self.dtype)
            first += size
        return counts

    def _edge(self, number: Any) -> ProgramEdge:
        if not isinstance(number, int) or not 0 <= number < self.hypergraph.num_edges:
            raise ValueError(f"derivation must hold edge numbers below {self.hypergraph.num_edges}, got {number!r}")
        return self._traced.edge(number)

    @property
    def node_values(self) -> Tensor:
        graph = self.hypergraph
        number = node_numbers(graph._index, graph.heads, graph.levels).to(self.device)
        return self._solver.node_values()[..., number]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same distribution on another device or in another floating point type."""
        moved = super().to(*args, **kwargs)
        moved._solver.integers = self._traced.index(moved.device)
        return moved

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name} {own}" for name, own in self._traced.inputs.items())
        return (
            f"ProgramPaths({self._traced.name}, nodes={self.hypergraph.num_nodes}, "
            f"edges={self.hypergraph.num_edges}, inputs: {inputs}, batch_shape={tuple(self.batch_shape)}, "
            f"omega={self.omega})"
        )

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._traced.inputs, tensors, strict=False))  # constants are the last score

    # --- derivations and counts

    def _most_accurate(self) -> Tensor:
        if self.hypergraph._uses_nodes_twice:
            raise ValueError(USES_UNITS_TWICE)
        return self._most_accurate_by_edge()

    def _edges_of(self, path: Tensor) -> Tensor:
        raise ValueError(
            "path must hold edges, such as p.decode(), got an event: several derivations can have the same counts"
        )

    def _is_path(self, value: Tensor) -> Tensor:
        return self._edges_with([value, *[None] * (len(self._traced.inputs) - 1)])[1]

    def _why_no_path(self, event: Tensor) -> str:
        return f"holds the counts of no derivation of {self._traced.name}"

    def _edges_with(self, counts: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Search for derivations with the given counts of score entries.

        First solve the program with scores for which a derivation with these counts is likely to be the best one. If
        that fails, search exhaustively, as far as the program is small.

        Args:
            counts: The counts (..., *own) of each input, None for any counts.

        Returns:
            The number of times that a derivation uses each edge, (..., E), and (...), True if it has these counts.

        """
        own_dims = [len(own) for own in self._traced.inputs.values()]
        leads = [c.shape[: c.ndim - dims] for c, dims in zip(counts, own_dims, strict=True) if c is not None]
        lead = torch.broadcast_shapes(self.batch_shape, *leads)
        entries, is_given = self._join(counts, lead)
        weights, is_open = self._search_weights(entries, is_given)
        solver = self._solver.expand(lead).with_edge_weights(weights, Hard())
        edges = solver.expected_edges().to(entries.dtype)
        totals = self._traced.program._onto_entries(edges, *self._flat_inputs())[..., : len(is_given)]
        is_equal = (totals - entries).abs() <= _TOLERANCE * (1 + entries.abs())
        is_path = (is_equal | ~is_given).all(-1) & (solver.value() > -math.inf)
        if is_readable(is_path):
            for member in map(tuple, (~is_path).nonzero().tolist()):
                numbers = self._search(entries[member], is_given, is_open[member])
                if numbers is not None:
                    is_path[member] = True
                    edges[member] = torch.zeros_like(edges[member]).index_add(0, numbers, edges.new_ones(len(numbers)))
        return edges, is_path

    def _join(self, counts: Sequence[Tensor | None], lead: torch.Size) -> tuple[Tensor, Tensor]:
        """Return the counts of all entries (*lead, entries), and (entries,), False for entries with any counts."""
        dtype, parts, is_given = wide_dtype(self.device), [], []
        for part, own in zip(counts, self._traced.inputs.values(), strict=True):
            size = math.prod(own)
            zeros = torch.zeros((*lead, size), dtype=dtype, device=self.device)
            parts.append(zeros if part is None else part.to(dtype).expand(lead + own).reshape(*lead, size))
            is_given.append(torch.full((size,), part is not None, device=self.device))
        return torch.cat(parts, -1), torch.cat(is_given)

    def _search_weights(self, entries: Tensor, is_given: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (*lead, E) for which a derivation with these counts is likely to be the best, and (*lead, E),
        False for edges that such a derivation does not use.

        All derivations with these counts have the same score, up to a small preference for better constants. The
        scores of entries are random, so that derivations with other counts have other scores.
        """
        traced, lead = self._traced, entries.shape[:-1]
        scores = entries.sign() * traced.random(entries.dtype, entries.device)
        is_closed = ((entries == 0) & is_given & ~traced.is_cancelling.to(entries.device)).to(entries.dtype)
        if traced.has_constants:
            scores, is_closed = pad(scores, (0, 1), value=self.sense * _PREFERENCE), pad(is_closed, (0, 1))
        index = self._solver.integers
        without_coefficients = (*index[:8], index[8][:0], *index[9:])
        flat = lead.numel()
        weights = traced.program.weights([scores.reshape(flat, -1)], index)
        is_open = traced.program.weights([is_closed.reshape(flat, -1)], without_coefficients) == 0
        weights = weights.masked_fill(~is_open, -math.inf)
        if not traced.has_paths:
            weights = torch.full_like(weights, -math.inf)
        return weights.reshape(*lead, -1), is_open.reshape(*lead, -1)

    def _search(self, entries: Tensor, is_given: Tensor, is_open: Tensor) -> Tensor | None:
        """Return the edges of a derivation with these counts (entries,), with repetitions.

        Return None if there is no such derivation, or if the search gives up.
        """
        is_needed = ((entries != 0) | self._traced.is_cancelling.to(entries.device)) & is_given
        graph, needed = self.hypergraph, is_needed.nonzero().squeeze(1)
        numbers = is_open.nonzero().squeeze(1)
        if not self._traced.has_paths or sums.is_long(len(numbers), len(needed)):
            return None
        adds = self._traced.entries_of(numbers.tolist(), needed.tolist())
        tails, offset, heads = graph.tails.tolist(), graph.tail_offset.tolist(), graph.heads.tolist()
        edges = [
            sums.Edge(heads[edge], tails[offset[edge] : offset[edge + 1]], row)
            for edge, row in zip(numbers.tolist(), adds, strict=True)
        ]
        found = sums.find(edges, graph.num_nodes - 1, entries[needed].double().cpu().numpy())
        return None if found is None else numbers[torch.tensor(found, device=numbers.device)]


def _batch_shape(inputs: Sequence[tuple[str, Tensor, int]]) -> torch.Size:
    """Return the batch shape to which the batch dimensions of all inputs broadcast."""
    shapes = [tensor.shape[: tensor.ndim - dims] for _, tensor, dims in inputs]
    if len(shapes) == 1:
        return shapes[0]
    try:
        return torch.Size(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(f"{tuple(shape)} of {name}" for (name, _, _), shape in zip(inputs, shapes, strict=True))
        raise ValueError(f"the batch dimensions of all scores must broadcast, got {listed}") from None
