"""Conditional random fields on trees: a label for each node, scores of nodes and of pairs of neighbours, any Ω."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import bellmax.backends.native.sorting as sorting
from bellmax.distribution import PathDistribution
from bellmax.inputs import answers_near_misses, check_tensor
from bellmax.layouts import tree as layout
from bellmax.layouts.values import of_sequence
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.graphs import as_integers, check_order, check_single
from bellmax.structures.hypergraph import Derivations, Hypergraph
from bellmax.structures.named import NamedScores
from bellmax.tensors import Gamma
from bellmax.transforms import is_checked, is_readable

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ANY = -1


class Tree:
    """A rooted tree over V nodes, with any branching.

    Args:
        parents: (V,) integers, the parent of each node, −1 for the root.

    >>> import bellmax as bx
    >>> tree = bx.Tree([-1, 0, 0, 2])
    >>> unary = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    >>> p = tree.labels(unary, torch.eye(2), omega="sparsemax")   # neighbours like to agree
    >>> p.best_labels()
    tensor([0, 0, 1, 1])
    >>> p.marginals
    tensor([[0.5396, 0.4604],
            [1.0000, 0.0000],
            [0.1517, 0.8483],
            [0.1138, 0.8862]])
    """

    parents: Tensor
    root: int

    def __init__(self, parents: Tensor | NDArray[np.integer[Any]] | Sequence[int]) -> None:
        shape = torch.as_tensor(parents).shape
        if len(shape) != 1 or not shape[0]:
            raise ValueError(f"parents must have shape (V,) with V >= 1, got {tuple(shape)}")
        self.parents = as_integers(parents, "parents")
        given = self._given = self.parents.cpu().numpy()
        bad = np.flatnonzero((given < -1) | (given >= len(given)))
        if bad.size:
            needed = f"nodes below {len(given)}, or -1 for the root"
            raise ValueError(f"parents must hold {needed}, got {given[bad[0]]} for node {bad[0]}")
        children = np.flatnonzero(given >= 0)
        pairs = np.stack((children, given[children]), 1)
        self._height = sorting.levels(pairs, len(given))
        check_order(pairs, self._height, range(len(given)), "parents")
        check_single("root (of parent -1)", given < 0, range(len(given)), "parents")
        self.root = int(given.argmin())
        self._graphs: dict[tuple[int, torch.device], tuple[Hypergraph, tuple[Tensor, ...]]] = {}

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[0]

    @answers_near_misses
    def labels(
        self,
        unary: Tensor,
        pairwise: Tensor,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> TreeLabels:
        """The distribution over labellings, given the scores of nodes and of their pairs with their parents.

        Args:
            unary: (..., V, K), the score of each of K labels at each node; −∞ forbids one.
            pairwise: (..., V, K, K) ``[node, parent's label, own label]``, where the root's is ignored; V may be 1 for
                scores that all nodes share; or (K, K), which the batch shares too.
            omega: a :class:`Regularizer`, or one of "negentropy", "l2", "sparsemax", "entmax", "hard". For an Ω other
                than negentropy the value depends on which node is the root.
            gamma: strength of the smoothing, beside a name of Ω; 1 by default.

        """
        return TreeLabels(self, unary, pairwise, omega=omega, gamma=gamma)

    def _graph(self, states: int, device: torch.device) -> tuple[Hypergraph, tuple[Tensor, ...]]:
        """The hypergraph for so many labels, and the integers of the sweeps; made once."""
        if (states, device) not in self._graphs:
            # The graph is the same whatever transforms its caller is under.
            with torch._C._DisableFuncTorch():
                made = layout.make_graph(self._given, self._height, states)
                graph = Hypergraph._of_tree(made, device)
                self._graphs[states, device] = graph, (*graph._index, torch.from_numpy(made.order).to(device))
        return self._graphs[states, device]

    def __repr__(self) -> str:
        return f"Tree(num_nodes={self.num_nodes}, root={self.root})"


class TreeLabels(NamedScores):
    """The labellings of a :class:`Tree`; an event is an indicator (V, K) of the label of each node."""

    structure = "tree"

    def __init__(
        self,
        tree: Tree,
        unary: Tensor,
        pairwise: Tensor,
        *,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> None:
        shape, size = check_tensor("unary", unary).shape, tree.num_nodes
        if len(shape) < 2 or shape[-2] != size or not shape[-1]:
            raise ValueError(f"unary must have shape (..., {size}, K), got {tuple(shape)}")
        states = shape[-1]
        own = 2 if check_tensor("pairwise", pairwise).ndim == 2 else 3
        if pairwise.shape[-2:] != (states, states) or (own == 3 and pairwise.shape[-3] not in (1, size)):
            needed = f"(..., {size}, {states}, {states}) or ({states}, {states})"
            raise ValueError(f"pairwise must have shape {needed}, got {tuple(pairwise.shape)}")
        try:
            batch = torch.broadcast_shapes(shape[:-2], pairwise.shape[:-own])
        except RuntimeError:
            got = f"{tuple(shape)} and {tuple(pairwise.shape)}"
            raise ValueError(f"the batch dimensions of unary and pairwise must broadcast, got {got}") from None
        scores = {"unary": (unary.expand(*batch, *shape[-2:]), 2), "pairwise": (pairwise, own)}
        super().__init__(scores, batch, shape[-2:], omega, gamma)
        self.tree = tree

    @property
    def _names(self) -> tuple[str, ...]:
        return "unary", "pairwise"

    # --- labels

    @property
    def marginals(self) -> Tensor:
        """The probability of each label at each node, (..., V, K). Differentiable."""
        return self.expected_path

    @property
    def edge_marginals(self) -> Tensor:
        """Joint probability of the labels of a node and its parent, (..., V, K, K) ``[node, parent's, own]``.

        0 for the root. Differentiable.
        """
        return layout.onto_nodes(self._expanded()._path(), self._index, self.event_shape[1])[0].to(self.dtype)

    def best_labels(self) -> Tensor:
        """The labels of highest score, (..., V) int64; −1 where every labelling scores −∞."""
        return self._with(self._detached(), Hard()).sample_labels()

    def sample_labels(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Labels drawn from the distribution, (*sample_shape, ..., V) int64; −1 where there are none."""
        shape = torch.Size(sample_shape)
        drawn = self._in_place(self._sample(shape.numel())).movedim(1, 0)
        return drawn.reshape(shape + self.batch_shape + self.event_shape[:1])

    def topk_labels(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best labellings: scores (..., k), best first, and labels (..., k, V); past their number −∞ and −1."""
        scores, paths = self.topk(k)
        return scores, torch.where(paths.any(-1), paths.argmax(-1), -1)

    def log_prob(self, path: Tensor) -> Tensor:
        """Log-probability of labels (..., V), integers, or of a 0/1 tensor (..., V, K). Differentiable."""
        return super().log_prob(self._indicator("path", path) if _are_labels(path) else path)

    def _in_place(self, labels: Tensor) -> Tensor:
        """Labels (..., V) of the nodes in the order of the sweeps, as they are numbered."""
        return labels.index_select(-1, self._index[5].argsort())

    def _indicator(self, name: str, labels: Tensor) -> Tensor:
        """0/1 (..., V, K) of labels (..., V)."""
        self._check_device(name, labels)
        size, states = self.event_shape
        if labels.shape[-1:] != (size,):
            raise ValueError(f"{name} must have shape (..., {size}), got {tuple(labels.shape)} {labels.dtype}")
        self._check_labels(name, labels, (labels < 0) | (labels >= states), f"from 0 to {states - 1}")
        return (labels.unsqueeze(-1) == torch.arange(states, device=self.device)).to(self.dtype)

    def _check_labels(self, name: str, labels: Tensor, bad: Tensor, needed: str) -> None:
        if is_checked(bad) and bool(bad.any()):
            *batch, node = bad.nonzero()[0].tolist()
            got = f"{labels[(*batch, node)].item()} at node {node}{of_sequence(batch)}"
            raise ValueError(f"{name} must be {needed}, got {got}")

    # --- the expansion

    def _expanded(self) -> Derivations:
        theta = self._flat.unscaled(self._scores)
        if is_readable(theta[0]):
            layout.check([t.detach() for t in theta], self._index)
        weights = layout.weights(theta, self._index)
        graph = self.tree._graph(self.event_shape[1], self.device)[0]
        p = Derivations(graph, weights.reshape(*self.batch_shape, weights.shape[-1]), omega=self.omega)
        p.backend = self.backend
        return p

    def _onto_event(self, edges: Tensor) -> Tensor:
        return layout.onto_nodes(edges, self._index, self.event_shape[1])[1]

    def _from_event(self, path: Tensor) -> Tensor:
        return layout.from_labels(path, self._index, self.tree.parents.to(self.device))

    def _to_paths(self, found: Tensor) -> Tensor:
        labels = self._in_place(found).unsqueeze(-1)
        return (labels == torch.arange(self.event_shape[1], device=self.device)).to(self.dtype)

    def _unweighted(self, omega: Regularizer) -> PathDistribution:
        return self._expanded()._unweighted(omega)

    # --- what the base asks for

    @property
    def _index(self) -> tuple[Tensor, ...]:
        return self.tree._graph(self.event_shape[1], self.device)[1]

    @property
    def _num_choices(self) -> int:
        return self.tree.num_nodes

    def _is_path(self, value: Tensor) -> Tensor:
        return ((value == 0) | (value == 1)).flatten(-2).all(-1) & (value.sum(-1) == 1).all(-1)

    def _same_graph(self, other: PathDistribution) -> bool:
        return (
            isinstance(other, TreeLabels)
            and self.event_shape == other.event_shape
            and self.tree.parents.equal(other.tree.parents)
        )

    # --- targets: labels, or those that are allowed

    def _target_forms(self) -> list[str]:
        return [*super()._target_forms(), f"{(*self.batch_shape, self.event_shape[0])} int64"]

    def _allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if not _are_labels(target):
            return super()._allowed(name, target, ignore_index)
        labels, states = self._expand(name, target, self.event_shape[:1]), self.event_shape[1]
        free = (labels == _ANY) | (labels == ignore_index)
        needed = f"from 0 to {states - 1}, or -1 or {ignore_index} for any"
        self._check_labels(name, labels, ~free & ((labels < 0) | (labels >= states)), needed)
        return (labels.unsqueeze(-1) == torch.arange(states, device=self.device)) | free.unsqueeze(-1)

    def _edges_within(self, allowed: Tensor) -> Tensor:
        return self._from_event(allowed)


def _are_labels(given: object) -> bool:
    if not isinstance(given, Tensor):
        return False
    return not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
