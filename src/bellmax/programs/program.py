"""The class Program: the interface of a dynamic program to sweeps and distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from bellmax.programs.checks import reject_entries
from bellmax.tensors import Tensors


class Program:
    """A dynamic program without its scores: how they are laid out, and which paths they score.

    Every method takes ``theta`` and ``index``. ``theta`` holds one tensor for each name in ``scores``, batch first and
    divided by γ; the first has the batch size B, another may have batch size 1 and is then shared by the batch.
    ``index`` holds integer tensors such as lengths. A program has no tensors itself, so an operator of torch can find
    it by its name.

    An event is a path as a tensor shaped like the first score: the number of times that the path uses each entry. (An
    event of scores that add up, such as emissions, has the shape of their sums.)
    Paths also have a compact form, which the sweeps ``sample`` and ``topk`` return: see :meth:`empty_paths`.

    The edges of a path belong to the ``engine``, a program with one weight for each edge. The weights are a linear
    function of the scores, so the default methods below follow from :meth:`weights`, :meth:`along` and
    :meth:`onto_scores`.
    """

    name: str
    scores: Sequence[str]
    """The names of the scores. A name that begins with an underscore is a constant, which is not shown."""
    engine: str = "dag"
    """The name of the program with one weight for each edge that the expansion uses: "dag", "chain" or this one."""
    paths: str = ""
    """Programs with equal ``paths`` have comparable paths. Default: the name of the program."""
    sense: int = 1
    """1 if the sweeps compute a smoothed maximum of scores, −1 if they compute a smoothed minimum of costs."""
    index_dims: Sequence[int] | None = ()
    """Number of dimensions of each tensor of the index after the batch; None if the batch shares the index."""
    tape_is_large: bool = False
    """True if a value that needs no gradient should be computed without a tape."""
    event_dims: int | None = None
    """The number of dimensions of an event; None if an event has the shape of the first score."""
    topk_is_compact: bool = False
    """True if a backend can find the k best paths in the compact form without the weights of all edges."""
    max_count: float = 1
    """The number of times that a path can use one entry of the first score: 1, or ∞ if unknown."""

    # --- sizes

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """Return the shape of a tensor with one number for each node."""
        raise NotImplementedError

    def event_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """Return the shape of an event."""
        return tuple(theta[0].shape[1:])

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        """Return the number of uniforms that sampling a path consumes."""
        return self.nodes(theta, index)[0]

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        """Return an empty tensor for ``count`` paths of each member in the compact form, by default events."""
        batch, *event = theta[0].shape
        return theta[0].new_empty((batch, count, *event))

    # --- checks

    def used(self, theta: Tensors, index: Tensors) -> Sequence[Tensor | None]:
        """For each score, True at the entries that a path may use; it broadcasts. None if paths may use all entries."""
        return [None] * len(theta)

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        """Raise a ValueError if an integer of the index is out of range."""

    def check(self, theta: Tensors, index: Tensors) -> None:
        """Raise a ValueError if an entry that a path may use is NaN or +∞ (−∞ for costs)."""
        self.check_index(theta, index)
        for name, score, used in zip(self.scores, theta, self.used(theta, index), strict=True):
            bad = ~(self.sense * score < math.inf)
            reject_entries(name, score, bad if used is None else bad & used, -self.sense * math.inf)

    # --- the expansion

    def extra_nodes(self, theta: Tensors, index: Tensors) -> int | Tensor:
        """Number of nodes with a single parent that the engine's graph has and the program does not, or (B,) of it."""
        return 0

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        """Return the index of the engine."""
        raise NotImplementedError

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        """Return the weights of the engine, −∞ for an edge that does not exist."""
        raise NotImplementedError

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        """Return the change of the weights if the scores change by ``z``."""
        raise NotImplementedError

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        """Apply the transpose of :meth:`along` to one number for each weight. The results have the shapes of θ."""
        raise NotImplementedError

    def by_edge(
        self, scores: Tensors, dims: Sequence[int], batch_shape: Sequence[int], index: Tensors
    ) -> tuple[Tensors, tuple[int, ...]] | None:
        """Return scores of this program in which each edge has an entry to itself, and their dimensions.

        Each score has ``dims`` dimensions after the batch. None if the program has no such scores; then callers expand
        it to the engine.
        """
        return None

    def edges_from(self, tensors: Tensors, theta: Tensors, index: Tensors) -> Tensor:
        """Return numbers in the shapes of θ, where each edge has an entry to itself, as numbers of edges."""
        return tensors[0]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return the maximum of numbers of weights over the weights that use each entry of an event, (B, *event).

        ``edges`` has one number for each weight, as in :meth:`onto_scores`. An entry that no weight uses gets −∞.
        """
        raise NotImplementedError

    # --- values of nodes

    def node_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        """Return the shape in which the user sees the values of the nodes."""
        raise NotImplementedError("node_values is only defined for chains, lattices, DAGs and hypergraphs")

    def node_engine(self, theta: Tensors, index: Tensors) -> tuple[Tensor, Tensors]:
        """Return weights and an index for the engine that give each node its value, for :meth:`by_node`."""
        return self.weights(theta, index), self.engine_index(theta, index)

    def by_node(self, values: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return the values of the nodes of :meth:`node_engine` in the shape that the user sees, (B, *node_shape)."""
        return values

    # --- paths

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return paths (B, K, *edges) of the engine in the compact form, (B, K, …)."""
        batch, count = edges.shape[:2]
        flat = self.event_of(edges.flatten(0, 1), *repeated(theta, index, count, self.index_dims, first=False))
        return flat.reshape(batch, count, *flat.shape[1:])

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return compact paths (B, K, …) as events (B, K, *event)."""
        return paths

    def edge_counts(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return compact paths (B, K, …) as paths (B, K, *edges) of the engine, for a program that is an engine."""
        return paths

    def event_of(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return paths (B, *edges) of the engine, one for each member of the batch, as events (B, *event)."""
        return self.sense * self.onto_scores(edges, theta, index)[0]

    def edges_of(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        """Return the edges (B, *edges) of events (B, *event), or None to search for them with a sweep.

        If an event is not a path, its edges are unspecified.
        """
        return None

    def is_path(self, event: Tensor, theta: Tensors, index: Tensors) -> Tensor | None:
        """(B,): True if an event (B, *event) is a path, whatever its score; None to search for its edges."""
        return None

    def without_band(self, index: Tensors) -> Tensors:
        """Return the index of the same paths without a band, which closes some of them."""
        return index

    def key(self, theta: Tensors, index: Tensors) -> Tensors:
        """Tensors that are equal if two programs with equal ``paths`` and event shape have the same paths."""
        return index


def repeated(
    theta: Tensors, index: Tensors, count: int, index_dims: Sequence[int] | None, first: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Repeat a batch ``count`` times: θ, for its shapes alone, and the index.

    The result is ordered (count, B) if ``first``, else (B, count).
    """
    batch = theta[0].shape[0]
    sizes = [batch * count if n == 0 or len(t) > 1 else 1 for n, t in enumerate(theta)]
    like = [t.new_zeros(()).expand(size, *t.shape[1:]) for size, t in zip(sizes, theta, strict=True)]
    if index_dims is None or count == 1:
        return like, list(index)
    if first:
        return like, [t.repeat(count, *[1] * (t.ndim - 1)) for t in index]
    return like, [t.repeat_interleave(count, 0) for t in index]
