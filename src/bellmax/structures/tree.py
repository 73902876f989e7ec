"""Conditional random fields on trees, with scores of nodes and of pairs of a node and its parent, under any Ω."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import bellmax.backends.native.sorting as sorting
from bellmax.decoded import DecodedForm, EdgeLists, Fault, are_integers
from bellmax.distribution import PathDistribution
from bellmax.inputs import answers_near_misses, check_tensor
from bellmax.modes import is_checked, outside_modes
from bellmax.programs import Program, register
from bellmax.programs.checks import of_sequence
from bellmax.regularizers import Regularizer
from bellmax.structures.graphs import as_integers, check_order, check_single
from bellmax.targets import Targets
from bellmax.tensors import Gamma, Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ANY = -1


class TreeProgram(Program):
    """Labelings of a tree of V nodes with K labels each.

    θ is unary (B, V, K) and pairwise (B or 1, V or 1, K, K) ``[node, label of parent, label]``, or (B or 1, K, K) if
    all nodes share it. ``index`` is the hypergraph, as in :mod:`bellmax.programs.graph`, and the order of nodes (V,)
    int64: the nodes that have a parent, then the root.

    The message (u, s) of a node u is the value of the tree below u if the parent of u has label s. It has an edge for
    each label t of u, of weight unary[u, t] + pairwise[u, s, t], whose tails are the messages (c, t) of the children c.
    The goal has an edge for each label of the root. So the edges are (V − 1, K, K) in the order of nodes, and then K.
    """

    name = "tree"
    scores = ("unary", "pairwise")
    index_dims = None

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        _, size, labels = theta[0].shape
        return ((size - 1) * labels + 1,)

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return theta[0].shape[1]

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        unary, pairwise = theta
        has_parents = torch.tensor(unary.shape[1] > 1, device=unary.device)
        if pairwise.ndim == 4 and pairwise.shape[1] == unary.shape[1]:
            node = torch.arange(unary.shape[1], device=unary.device).reshape(-1, 1, 1)
            return [None, has_parents & (node != index[5][-1])]
        return [None, has_parents]

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return index[:5]

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        unary, pairwise = theta
        order = index[5]
        of_nodes = unary.index_select(1, order)
        of_pairs = pairwise if pairwise.ndim == 4 else pairwise.unsqueeze(1)
        if of_pairs.shape[1] == unary.shape[1]:
            of_pairs = of_pairs.index_select(1, order[:-1])
        edges = of_nodes[:, :-1].unsqueeze(2) + of_pairs
        return torch.cat((edges.flatten(1), of_nodes[:, -1]), 1)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return self.weights(z, index)

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        unary, pairwise = theta
        pairs, nodes = by_node(edges, index, unary.shape[-1])
        if pairwise.ndim == 3:
            pairs = pairs.sum(1)
        return [nodes, pairs.sum_to_size(len(pairwise), *pairwise.shape[1:]).contiguous()]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        size, labels = theta[0].shape[1:]
        of_nodes = edges[:, :-labels].reshape(len(edges), size - 1, labels, labels).amax(2)
        return torch.cat((of_nodes, edges[:, None, -labels:]), 1).index_select(1, index[5].argsort())

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return ((event == 0) | (event == 1)).flatten(-2).all(-1) & (event.sum(-1) == 1).all(-1)


def by_node(edges: Tensor, index: Tensors, labels: int) -> tuple[Tensor, Tensor]:
    """Return values of edges (..., E) by node: pairs (..., V, K, K), 0 for the root, and their sums (..., V, K)."""
    order = index[5]
    size = len(order)
    pairs = edges[..., :-labels].reshape(*edges.shape[:-1], size - 1, labels, labels)
    nodes = torch.cat((pairs.sum(-2), edges[..., -labels:].unsqueeze(-2)), -2)
    pairs = pad(pairs, (0, 0, 0, 0, 0, 1))
    position = order.argsort()
    return pairs.index_select(-3, position), nodes.index_select(-2, position)


def _message_graph(
    parents: NDArray[np.int64], height: NDArray[np.int64], labels: int
) -> tuple[tuple[NDArray[np.int32], ...], NDArray[np.int64]]:
    """Return the index of the hypergraph of messages, and the order of nodes (V,): all others, then the root.

    ``parents`` (V,) is −1 for the root. ``height`` (V,) is the number of edges to the deepest leaf below each node.
    """
    root = int(parents.argmin())
    others = np.flatnonzero(parents >= 0)
    order = np.append(others, root)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    children = others[np.argsort(parents[others], kind="stable")]
    count = np.bincount(parents[others], minlength=len(parents))
    first = np.cumsum(count) - count

    head = np.append(np.repeat(np.arange(len(others) * labels), labels), np.full(labels, len(others) * labels))
    node = np.append(np.repeat(others, labels * labels), np.full(labels, root))  # the node of each edge
    label = np.tile(np.arange(labels), len(others) * labels + 1)
    arity = count[node]
    edge_of_tail = np.repeat(np.arange(len(head)), arity)
    nth = np.arange(len(edge_of_tail)) - np.repeat(np.cumsum(arity) - arity, arity)
    tail = position[children[first[node[edge_of_tail]] + nth]] * labels + label[edge_of_tail]
    level = np.append(np.repeat(height[others], labels), height[root])
    return sorting.sort(head, tail, level, arity), order


_PROGRAM = register(TreeProgram())


class TreeModel:
    """A rooted tree of V nodes.

    Its method :meth:`labels` returns a distribution over the labels of the nodes (a tree-structured CRF).

    Args:
        parents: The parent of each node, integers (V,), −1 for the root.

    >>> import bellmax as bx
    >>> tree = bx.TreeModel([-1, 0, 0, 2])
    >>> unary = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    >>> p = tree.labels(unary, torch.eye(2), omega="sparsemax")   # equal neighbors score 1
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

    @answers_near_misses
    def __init__(self, parents: Tensor | NDArray[np.integer[Any]] | Sequence[int]) -> None:
        shape = torch.as_tensor(parents).shape
        if len(shape) != 1 or not shape[0]:
            raise ValueError(f"parents must have shape (V,) with V >= 1, got {tuple(shape)}")
        self.parents = as_integers(parents, "parents")
        array = self._array = self.parents.cpu().numpy()
        bad = np.flatnonzero((array < -1) | (array >= len(array)))
        if bad.size:
            needed = f"nodes below {len(array)}, or -1 for the root"
            raise ValueError(f"parents must hold {needed}, got {array[bad[0]]} for node {bad[0]}")
        children = np.flatnonzero(array >= 0)
        pairs = np.stack((children, array[children]), 1)
        self._height = sorting.levels(pairs, len(array))
        check_order(pairs, self._height, range(len(array)), "parents")
        check_single("root (of parent -1)", array < 0, range(len(array)), "parents")
        self.root = int(array.argmin())
        self._indices: dict[tuple[int, torch.device], tuple[Tensor, ...]] = {}

    @property
    def num_nodes(self) -> int:
        """The number V of nodes."""
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
        """Return the distribution over labelings, which assign one of K labels to each node.

        Args:
            unary: The score (..., V, K) of each label at each node. −∞ forbids a label.
            pairwise: The score (..., V, K, K) of each pair of labels of a node and its parent, ``[node, label of the
                parent, label of the node]``. The entries of the root are ignored. If all nodes have the same scores,
                pass (..., 1, K, K). If all nodes of the whole batch have the same scores, pass (K, K).
            omega: The regularizer Ω: "negentropy" (the default), "sparsemax", "entmax", "l2", "hard", or a
                :class:`Regularizer`. Under negentropy, the choice of the root does not change the distribution. Under
                another Ω, it changes the value and the probabilities.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        """
        return TreeLabels(self, unary, pairwise, omega=omega, gamma=gamma)

    def _index(self, labels: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the index of the program for this number of labels, which is cached."""
        if (labels, device) not in self._indices:
            integers, order = _message_graph(self._array, self._height, labels)
            with torch._C._DisableFuncTorch() if torch.compiler.is_compiling() else outside_modes():
                self._indices[labels, device] = tuple(torch.from_numpy(a).to(device) for a in (*integers, order))
        return self._indices[labels, device]

    def __repr__(self) -> str:
        return f"TreeModel(num_nodes={self.num_nodes}, root={self.root})"


class TreeTargets(Targets):
    """Targets of a tree: labels (..., V), or 0/1 tensors (..., V, K) of allowed labels."""

    reads_integers = True

    def forms(self) -> list[str]:
        return [*super().forms(), f"{(*self.batch_shape, self.event_shape[0])} int64"]

    def allowed(self, name: str, target: Tensor, ignore_index: int) -> Tensor:
        if not are_integers(target):
            return super().allowed(name, target, ignore_index)
        labels, count = self.expand(name, target, self.event_shape[:1]), self.event_shape[1]
        is_free = (labels == _ANY) | (labels == ignore_index)
        needed = f"from 0 to {count - 1}, or -1 or {ignore_index} for any"
        _check_labels(name, labels, ~is_free & ((labels < 0) | (labels >= count)), needed)
        return (labels.unsqueeze(-1) == torch.arange(count, device=labels.device)) | is_free.unsqueeze(-1)


class LabelForm(DecodedForm):
    """The label of each node, (..., V) int64."""

    p: TreeLabels

    @property
    def own_shape(self) -> Sequence[int | str]:
        return self.p.event_shape[:1]

    def of_compact(self, paths: Tensor) -> Tensor:
        return torch.where(paths.any(-1), paths.argmax(-1), -1)

    def edges(self, decoded: Tensor) -> EdgeLists:
        size, count = self.p.event_shape
        is_label = (decoded >= 0) & (decoded < count)
        labels, order = decoded.masked_fill(~is_label, 0), self.solver.integers[5]
        others, root = order[:-1], order[-1:]
        parents = self.p.tree.parents.to(decoded.device)
        before, own = labels[..., parents[others]], labels[..., others]
        position = torch.arange(size - 1, device=decoded.device)
        numbers = torch.cat(((position * count + before) * count + own, (size - 1) * count**2 + labels[..., root]), -1)
        return EdgeLists(numbers, is_label.all(-1))

    def fault(self, decoded: Tensor) -> Fault:
        count = self.p.event_shape[1]
        node = int(((decoded < 0) | (decoded >= count)).nonzero()[0])
        return Fault((node,), f"must be a label from 0 to {count - 1}, got {int(decoded[node])}")


class TreeLabels(PathDistribution):
    """The distribution over the labelings of a :class:`TreeModel`, which :meth:`TreeModel.labels` returns.

    An event is a 0/1 tensor (V, K) with one 1 per node. The decoded form is the label of each node, (..., V).

    >>> p = TreeModel([-1, 0]).labels(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 2 * torch.eye(2))
    >>> p.decode()
    tensor([0, 0])
    """

    _target_kind = TreeTargets
    _form_kind = LabelForm

    def __init__(
        self,
        tree: TreeModel,
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
        dims = 2 if check_tensor("pairwise", pairwise).ndim == 2 else 3
        if pairwise.shape[-2:] != (states, states) or (dims == 3 and pairwise.shape[-3] not in (1, size)):
            needed = f"(..., {size}, {states}, {states}) or ({states}, {states})"
            raise ValueError(f"pairwise must have shape {needed}, got {tuple(pairwise.shape)}")
        try:
            batch = torch.broadcast_shapes(shape[:-2], pairwise.shape[:-dims])
        except RuntimeError:
            got = f"{tuple(shape)} and {tuple(pairwise.shape)}"
            raise ValueError(f"the batch dimensions of unary and pairwise must broadcast, got {got}") from None
        scores = {"unary": (unary.expand(*batch, *shape[-2:]), 2), "pairwise": (pairwise, dims)}
        super().__init__(_PROGRAM, scores, tree._index(states, unary.device), batch, shape[-2:], omega, gamma)
        self.tree = tree

    # --- labels

    @property
    def marginals(self) -> Tensor:
        """Probability of each label at each node, (..., V, K). Differentiable."""
        return self.expected_path

    @property
    def edge_marginals(self) -> Tensor:
        """Joint probability of the labels of a node and its parent, (..., V, K, K). Differentiable.

        The axes are ``[node, label of parent, label]``. Entries are 0 for the root.
        """
        edges = self._solver.expanded().expected_edges()
        return by_node(edges, self._solver.integers, self.event_shape[1])[0].to(self.dtype)

    def best_labels(self) -> Tensor:
        """Return the labels of highest score, (..., V) int64, as :meth:`decode` does.

        If every labeling has score −∞, all labels are −1.
        """
        return self.decode()

    def sample_labels(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random labels, (*sample_shape, ..., V) int64, as :meth:`sample_decoded` does."""
        return self.sample_decoded(sample_shape)

    def topk_labels(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores (..., k) and the labels (..., k, V) of the k best labelings, as :meth:`topk_decoded` does.

        If there are fewer than k labelings, the remaining scores are −∞ and the remaining labels are −1.
        """
        return self.topk_decoded(k)


def _check_labels(name: str, labels: Tensor, bad: Tensor, needed: str) -> None:
    """Raise ``ValueError`` for the first label that is ``bad``. ``needed`` describes the valid labels."""
    if is_checked(bad) and bool(bad.any()):
        *batch, node = bad.nonzero()[0].tolist()
        got = f"{labels[(*batch, node)].item()} at node {node}{of_sequence(batch)}"
        raise ValueError(f"{name} must be {needed}, got {got}")
