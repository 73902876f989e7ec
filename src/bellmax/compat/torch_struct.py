"""A replacement for ``torch_struct`` 0.5: its distributions over chains, segments, alignments and trees.

Two classes of ``torch_struct`` are missing. ``NonProjectiveDependencyCRF`` is missing because no dynamic program
computes its sum over trees. Instead of ``SentCFG``, build a :class:`bellmax.Hypergraph` with one edge for each rule of
the grammar.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, kl_divergence
from torch.nn.functional import one_hot, pad

from bellmax.distribution import PathDistribution
from bellmax.inputs import Lengths, as_lengths, check_tensor
from bellmax.modes import is_checked, is_readable
from bellmax.programs.lattice import Graph, graph_of
from bellmax.programs.table import WARPING
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.chain import Chain
from bellmax.structures.dag import DAG, DAGPaths
from bellmax.structures.parses import DependencyTrees, SpanTrees
from bellmax.tensors import inner

__all__ = ["HMM", "AlignmentCRF", "DependencyCRF", "LinearChainCRF", "SemiMarkovCRF", "StructDistribution", "TreeCRF"]


class StructDistribution(Distribution):
    """Base class of all distributions of this module, with the methods of torch-struct's ``StructDistribution``.

    Attributes that are properties in the original, such as ``entropy``, are properties here, too. All classes differ
    from the original as follows:

    - The maximum of ``lengths`` may be less than N.
    - A potential of −∞ forbids an entry, without NaN. If all structures are forbidden, the partition is −∞.
    - ``requires_grad`` of the caller's tensor is not changed.
    - ``sample`` accepts any shape.
    - Where the original fails an assertion, these classes raise ``ValueError``.
    - There is no ``gumbel_crf``, and no ``struct`` with other semirings.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as torch.distributions declares it

    _min_length = 1

    def __init__(self, log_potentials: Tensor, lengths: Lengths | None, max_length: int, args: object = None) -> None:
        self.log_potentials = log_potentials
        self.lengths = None if lengths is None else self._check_lengths(lengths, max_length)
        self.args = args
        super().__init__(log_potentials.shape[:1], log_potentials.shape[1:], validate_args=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)})"

    def _check_lengths(self, lengths: Lengths, max_length: int) -> Tensor:
        """Return the lengths as an int64 tensor (B,). Raises ``ValueError`` for a wrong shape or range."""
        batch, min_length = self.log_potentials.shape[:1], self._min_length
        tensor = as_lengths("lengths", lengths, self.log_potentials.device)
        if tensor.shape != batch:
            raise ValueError(f"lengths must be integers of shape {tuple(batch)}, got shape {tuple(tensor.shape)}")
        has_values = is_readable(tensor) and tensor.numel() > 0
        if has_values and not min_length <= int(tensor.min()) <= int(tensor.max()) <= max_length:
            raise ValueError(f"lengths must be from {min_length} to {max_length}, got {tensor.tolist()}")
        return tensor

    @abstractmethod
    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        """Return the bellmax distribution with these potentials, under any Ω."""

    @abstractmethod
    def _events(self, paths: Tensor) -> Tensor:
        """Convert events of bellmax, (..., B, *event of :meth:`_paths`), to the event layout of torch-struct."""

    @cached_property
    def _distribution(self) -> PathDistribution:
        """The bellmax distribution under negentropy. Its sweeps are shared by all properties."""
        with torch.enable_grad():  # the result is cached, and later calls may need gradients
            return self._paths()

    @property
    def partition(self) -> Tensor:
        """The log-partition function, (B,)."""
        return self._distribution.value

    @property
    def marginals(self) -> Tensor:
        """The probability of each entry, of the potentials' shape. Differentiable."""
        return self._events(self._distribution.expected_path)

    @property
    def max(self) -> Tensor:
        """The best score, (B,)."""
        return self._paths(Hard()).value

    @property
    def argmax(self) -> Tensor:
        """The best structure as a 0/1 tensor of the potentials' shape."""
        return self._events(self._distribution.best_path())

    @property
    def mode(self) -> Tensor:
        """The best structure, see :attr:`argmax`."""
        return self.argmax

    def kmax(self, k: int) -> Tensor:
        """Return the k best scores, (k, B), best first.

        If there are fewer than k structures, the remaining scores are −∞.
        """
        return self._distribution.topk(k)[0].movedim(-1, 0)

    def topk(self, k: int) -> Tensor:
        """Return the k best structures, (k, B, *event), best first.

        If there are fewer than k structures, the remaining events are 0.
        """
        return self._events(self._distribution.topk(k)[1].movedim(1, 0))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return random structures, (*sample_shape, B, *event)."""
        return self._events(self._distribution.sample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability (..., B) of 0/1 structures (..., B, *event)."""
        score = inner(value.to(self.log_potentials.dtype), self.log_potentials, len(self.event_shape))
        return score - self.partition

    @property
    def entropy(self) -> Tensor:  # type: ignore[override]
        """Shannon entropy, (B,). Differentiable."""
        return self._distribution.entropy()

    def kl(self, other: StructDistribution) -> Tensor:
        """Return the Kullback–Leibler divergence KL(self ‖ other), (B,)."""
        divergence: Tensor = kl_divergence(self._distribution, other._distribution)
        return divergence

    def cross_entropy(self, other: StructDistribution) -> Tensor:
        """Return the cross-entropy, :attr:`entropy` plus KL(self ‖ other), (B,)."""
        return self.entropy + self.kl(other)

    @property
    def count(self) -> Tensor:
        """The number of structures with a finite score, (B,)."""
        return self._distribution.num_paths.to(self.log_potentials.dtype)


class LinearChainCRF(StructDistribution):
    """Sequences of N states out of C, with the arguments, event layout and results of torch-struct's class.

    In addition to the differences of :class:`StructDistribution`: time is O(N·C²), not O(N·C³). N may be 1.
    ``to_event`` respects its argument ``lengths``.

    Args:
        log_potentials: The scores (B, N − 1, C, C) ``[current, previous]`` of two adjacent states.
        lengths: The number of states of each sequence, integers (B,) from 1 to N, default N.
        args: Ignored.

    >>> d = LinearChainCRF(torch.zeros(1, 3, 2, 2))  # four steps, two states
    >>> d.partition.exp(), d.marginals.shape
    (tensor([16.]), torch.Size([1, 3, 2, 2]))
    >>> d.from_event(d.sample((5,))[0])[0].shape
    torch.Size([1, 4])
    """

    def __init__(self, log_potentials: Tensor, lengths: Lengths | None = None, args: object = None) -> None:
        shape = check_tensor("log_potentials", log_potentials).shape
        if len(shape) != 4 or shape[2] != shape[3] or shape[3] == 0:
            raise ValueError(f"log_potentials must have shape (B, N - 1, C, C), got {tuple(shape)}")
        super().__init__(log_potentials, lengths, shape[1] + 1, args)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        # In bellmax, the first step has potentials, too.
        theta = pad(self.log_potentials, (0, 0, 0, 0, 1, 0))
        return Chain(theta, lengths=self.lengths, omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        return paths[..., 1:, :, :]

    @staticmethod
    def to_event(sequence: Tensor, extra: int, lengths: Tensor | None = None) -> Tensor:
        """Convert states (B, N) out of C = ``extra`` to an event (B, N − 1, C, C), int64, 0 in the padding."""
        event = one_hot(sequence[:, 1:] * extra + sequence[:, :-1], extra * extra)
        event = event.reshape(*event.shape[:2], extra, extra)
        if lengths is None:
            return event
        is_padding = torch.arange(event.shape[1], device=sequence.device) >= lengths.unsqueeze(-1) - 1
        return event.masked_fill(is_padding[..., None, None], 0)

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, int]:
        """Return the states (B, N) int64 of an event (B, N − 1, C, C), 0 in the padding, and C."""
        previous, current = (event != 0).any(-2).long(), (event != 0).any(-1).long()
        return torch.cat((previous[:, :1], current), 1).argmax(-1), event.shape[-1]


class HMM(LinearChainCRF):
    """The states of a hidden Markov model, given its observations, with the arguments of torch-struct's class.

    In addition to the differences of :class:`LinearChainCRF`: sequences with fewer than two states raise
    ``ValueError``, since an event cannot represent a single state. (The original omits the scores of the first state.)

    Args:
        transition: The log-probabilities (C, C) ``[current, previous]``.
        emission: The log-probabilities (V, C) ``[symbol, state]``.
        init: The log-probabilities (C,) of the first state.
        observations: The observed symbols, int64 (B, N), less than V.
        lengths: The number of states of each sequence, integers (B,) from 2 to N, default N.

    >>> even = torch.full((2, 2), 0.5).log()
    >>> d = HMM(even, even, even[0], torch.tensor([[0, 1, 1, 0]]))
    >>> d.partition.exp()  # the probability of the symbols
    tensor([0.0625])
    """

    _min_length = 2

    def __init__(
        self,
        transition: Tensor,
        emission: Tensor,
        init: Tensor,
        observations: Tensor,
        lengths: Lengths | None = None,
    ) -> None:
        if check_tensor("emission", emission).ndim != 2 or 0 in emission.shape:
            raise ValueError(f"emission must have shape (V, C), each at least 1, got {tuple(emission.shape)}")
        symbols, states = emission.shape
        for name, tensor, shape in (("transition", transition, (states, states)), ("init", init, (states,))):
            if check_tensor(name, tensor).shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if check_tensor("observations", observations).ndim != 2 or observations.shape[1] < 2:
            raise ValueError(f"observations must have shape (B, N) with N >= 2, got {tuple(observations.shape)}")
        if observations.dtype != torch.int64:
            raise ValueError(f"observations must be int64, got {observations.dtype}")
        if is_checked(observations) and observations.numel():
            low, high = (int(bound) for bound in observations.aminmax())
            if low < 0 or high >= symbols:
                raise ValueError(f"observations must be from 0 to {symbols - 1}, got {low if low < 0 else high}")
        emissions = emission[observations]
        first = (init + emissions[:, :1]).unsqueeze(-2)
        steps = transition + emissions[:, 1:].unsqueeze(-1)
        super().__init__(torch.cat((steps[:, :1] + first, steps[:, 1:]), 1), lengths)


class SemiMarkovCRF(StructDistribution):
    """Sequences of N positions, where some positions have a state out of C, in torch-struct's event layout.

    The first and the last position have a state. A step leads from a position with a state to the next position with a
    state, at most K − 1 positions later. The score of a step is ``log_potentials[:, position, distance, next state,
    state]``. Scores with distance 0 are ignored.

    In addition to the differences of :class:`StructDistribution`:

    - Time and memory are O(N·K·C²), not O(N·K³·C³). If each score is the sum of a segment's score and a transition's
      score, :class:`bellmax.SemiMarkov` needs only O(N(K·C + C²)).
    - ``lengths`` may be unequal. (With K > 2, the original drops steps beyond the shortest length, so its partition,
      marginals and best structure are wrong.)
    - N may be 1. ``to_event`` respects its argument ``lengths``.

    Args:
        log_potentials: The scores (B, N − 1, K, C, C) ``[position, distance, next state, state]``, K ≥ 2.
        lengths: The number of positions of each sequence, integers (B,) from 1 to N, default N.
        args: Ignored.

    >>> potentials = torch.zeros(1, 3, 3, 1, 1)  # four positions, steps of one or two
    >>> potentials[0, 1, 2] = 1.0
    >>> d = SemiMarkovCRF(potentials)
    >>> d.count, d.from_event(d.argmax)[0]  # -1 at positions without a state
    (tensor([3.]), tensor([[ 0,  0, -1,  0]]))
    """

    def __init__(self, log_potentials: Tensor, lengths: Lengths | None = None, args: object = None) -> None:
        shape = check_tensor("log_potentials", log_potentials).shape
        if len(shape) != 5 or shape[3] != shape[4] or shape[4] == 0 or shape[2] < 2:
            raise ValueError(f"log_potentials must have shape (B, N - 1, K, C, C) with K >= 2, got {tuple(shape)}")
        super().__init__(log_potentials, lengths, shape[1] + 1, args)

    @property
    def _graph(self) -> tuple[DAG, Tensor]:
        """The graph of these paths, and the potential of each step, see :func:`_build_graph`."""
        return _build_graph(*self.event_shape[:3], self.log_potentials.device)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        """Return paths of a graph over (position, state); edges that arrive past the length of a sequence are −∞."""
        (dag, entry), (steps, _, states, _) = self._graph, self.event_shape
        theta = self.log_potentials
        lengths = torch.full(theta.shape[:1], steps + 1, device=theta.device) if self.lengths is None else self.lengths
        arrival = (dag.edges[states : states + len(entry), 1] - 1) // states
        moves = theta.flatten(1).index_select(1, entry).masked_fill(arrival >= lengths.unsqueeze(-1), -torch.inf)
        position = torch.arange(steps + 1, device=theta.device).repeat_interleave(states)
        ends = theta.new_zeros(()).masked_fill(position != lengths.unsqueeze(-1) - 1, -torch.inf)
        return DAGPaths(dag, torch.cat((theta.new_zeros((len(theta), states)), moves, ends), 1), omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        """Copy the weight of each edge of a segment to its entry ``[start, duration, state, previous state]``."""
        entry, states = self._graph[1], self.event_shape[2]
        events = paths.new_zeros((*paths.shape[:-1], self.event_shape.numel()))
        events = events.index_add(-1, entry, paths[..., states : states + len(entry)])
        return events.reshape(*paths.shape[:-1], *self.event_shape)

    @staticmethod
    def to_event(sequence: Tensor, extra: tuple[int, int], lengths: Tensor | None = None) -> Tensor:
        """Convert states (B, N), −1 for none, to an event (B, N − 1, K, C, C), int64. ``extra`` is (C, K)."""
        (states, num_distances), (batch, positions) = extra, sequence.shape
        position = torch.arange(positions, device=sequence.device)
        has_state = sequence >= 0
        if not bool(has_state[:, 0].all()):
            raise ValueError(f"sequence must begin with a state, got {sequence[:, 0].tolist()}")
        previous = torch.where(has_state, position, 0).cummax(1).values[:, :-1]
        is_step = has_state[:, 1:] if lengths is None else has_state[:, 1:] & (position[1:] < lengths.unsqueeze(-1))
        distance = position[1:] - previous
        if bool((distance[is_step] >= num_distances).any()):
            raise ValueError(
                f"sequence must have a state at least every K - 1 = {num_distances - 1} positions, got a distance of "
                f"{int(distance[is_step].max())}"
            )
        shape = batch, positions - 1, num_distances, states, states
        event = torch.zeros(shape, dtype=torch.int64, device=sequence.device)
        index = torch.where(is_step)[0], previous[is_step], distance[is_step]
        event[(*index, sequence[:, 1:][is_step], sequence.gather(1, previous)[is_step])] = 1
        return event

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the states (B, N) int64 of an event (B, N − 1, K, C, C), −1 for none, and (C, K)."""
        sequence = torch.full((event.shape[0], event.shape[1] + 1), -1, device=event.device)
        batch, position, distance, after, before = event.nonzero().unbind(1)
        sequence[batch, position + distance] = after
        sequence[batch, position] = before
        return sequence, (event.shape[-1], event.shape[2])


@lru_cache(maxsize=8)
def _build_graph(steps: int, num_distances: int, states: int, device: torch.device) -> tuple[DAG, Tensor]:
    """Return the graph of a semi-Markov CRF, and the index of each step's potential in the flattened event.

    Node 0 is the start, node 1 + position · states + state is a state, and the last node is the end. First come the
    edges from the start, then the steps between states, then the edges to the end. Only steps have potentials.
    """
    with torch._C._DisableFuncTorch(), torch.device("cpu"):
        state, sink = torch.arange(states), 1 + (steps + 1) * states
        sizes = torch.arange(steps), torch.arange(1, num_distances), state, state
        position, distance, after, before = torch.cartesian_prod(*sizes).unbind(1)
        entry = ((position * num_distances + distance) * states + after) * states + before
        moves = torch.stack((1 + position * states + before, 1 + (position + distance) * states + after), 1)
        exists = position + distance <= steps
        begins = torch.stack((torch.zeros_like(state), 1 + state), 1)
        ends = torch.stack((torch.arange(1, sink), torch.full((sink - 1,), sink)), 1)
        return DAG(torch.cat((begins, moves[exists], ends))).to(device), entry[exists].to(device)


class AlignmentCRF(StructDistribution):
    """Alignments of N and M elements, with a score for every move, in the event layout of torch-struct's class.

    An alignment begins in cell (0, 0) with the score ``log_potentials[:, 0, 0, 1]``, and ends in cell (N−1, M−1). The
    move into cell (i, j) has the index 0 from (i, j−1), 1 from (i−1, j−1), and 2 from (i−1, j).

    In addition to the differences of :class:`StructDistribution`:

    - genbmm is not needed. N may exceed M. Memory is O(N·M).
    - ``lengths`` may be less than N. (The original reads the result at N for every length.)
    - ``local=True``, which the original ignores, raises ``ValueError``, and so does ``max_gap``. For a band, set
      potentials to −∞.

    Args:
        log_potentials: The scores (B, N, M, 3) of the moves into each cell.
        local: Must be False, the default.
        lengths: The length of the first side, integers (B,) from 1 to N, default N.
        max_gap: Must be None, the default.

    >>> d = AlignmentCRF(torch.zeros(1, 2, 3, 3))
    >>> d.count, d.partition.exp()
    (tensor([5.]), tensor([5.]))
    >>> d.argmax[0].nonzero().tolist()  # from (0, 0) to (1, 2): each cell, and how it was reached
    [[0, 0, 1], [0, 1, 0], [1, 2, 1]]
    """

    def __init__(
        self,
        log_potentials: Tensor,
        local: bool = False,
        lengths: Lengths | None = None,
        max_gap: int | None = None,
    ) -> None:
        shape = check_tensor("log_potentials", log_potentials).shape
        if len(shape) != 4 or shape[3] != 3 or 0 in shape[1:]:
            raise ValueError(f"log_potentials must have shape (B, N, M, 3) with N, M >= 1, got {tuple(shape)}")
        if local:
            raise ValueError("local must be False: local alignments are not supported, got True")
        if max_gap is not None:
            raise ValueError(f"max_gap must be None, got {max_gap}: put -inf into log_potentials for a band")
        self.local, self.max_gap = local, max_gap
        super().__init__(log_potentials, lengths, shape[1])

    @cached_property
    def _parts(self) -> Tensor:
        """The index in (N·M·3) of the potential of each edge of the graph, except the edges to the end."""
        moves = 1, 1, 2, 0  # numbers of the start and of the moves, in the order of the graph's edges
        slots = self._graph.slots[: len(moves)]
        return torch.cat([3 * cells + move for move, (_, _, cells) in zip(moves, slots, strict=True)])

    @property
    def _graph(self) -> Graph:
        rows, columns = self.event_shape[:2]
        return graph_of(WARPING, rows, columns, self.log_potentials.device)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        """Return paths of the graph of DTW, in which only the cell at the end of a sequence leads to the end node."""
        theta = self.log_potentials
        batch, rows, columns = theta.shape[:3]
        lengths = torch.full((batch,), rows, device=theta.device) if self.lengths is None else self.lengths
        past = torch.arange(rows, device=theta.device) >= lengths.unsqueeze(-1)
        moves = theta.masked_fill(past[..., None, None], -torch.inf).flatten(1).index_select(1, self._parts)
        last = torch.arange(rows * columns, device=theta.device) == lengths.unsqueeze(-1) * columns - 1
        ends = torch.zeros_like(last, dtype=theta.dtype).masked_fill(~last, -torch.inf)
        dag = DAG._of_sorted(self._graph.edges, self._graph.levels, self._graph.graph)
        return DAGPaths(dag, torch.cat((moves, ends), 1), omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        """Copy the weight of each move to its entry ``[row, column, kind of move]``."""
        events = paths.new_zeros((*paths.shape[:-1], self.event_shape.numel()))
        events = events.index_add(-1, self._parts, paths[..., : self._parts.shape[0]])
        return events.reshape(*paths.shape[:-1], *self.event_shape)


class TreeCRF(StructDistribution):
    """Binary trees over N words whose spans have one of NT labels, in the event layout of torch-struct's class.

    The differences from the original are listed in :class:`StructDistribution`.

    Args:
        log_potentials: The scores (B, N, N, NT) ``[first word, last word, label]`` of spans. Entries below the diagonal
            are ignored.
        lengths: The number of words of each sentence, integers (B,) from 1 to N, default N.
        args: Ignored.

    >>> TreeCRF(torch.zeros(3, 5, 5, 1), lengths=torch.tensor([3, 4, 5])).count
    tensor([ 2.,  5., 14.])
    """

    def __init__(self, log_potentials: Tensor, lengths: Lengths | None = None, args: object = None) -> None:
        shape = check_tensor("log_potentials", log_potentials).shape
        if len(shape) != 4 or shape[1] != shape[2] or 0 in shape[1:]:
            raise ValueError(f"log_potentials must have shape (B, N, N, NT), each at least 1, got {tuple(shape)}")
        super().__init__(log_potentials, lengths, shape[1], args)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        return SpanTrees(self.log_potentials, labels=True, lengths=self.lengths, omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        return paths

    @staticmethod
    def to_event(sequence: Tensor, extra: object = None, lengths: object = None) -> Tensor:
        """Return the event itself, as the original does."""
        return sequence

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, None]:
        """Return the event itself, and None."""
        return event, None


class DependencyCRF(StructDistribution):
    """Projective dependency trees of N words, in the event layout of torch-struct's class: roots on the diagonal.

    In addition to the differences of :class:`StructDistribution`:

    - ``multiroot`` applies to this distribution only. (In the original, the last distribution that was constructed sets
      it for all.)
    - Tensors without gradients work, and so do ``count``, ``kl`` and ``cross_entropy``. (The original raises an error.)
    - ``to_event`` returns a tensor on the device of its argument.
    - Potentials with labels, (B, N, N, L), raise ``ValueError``. Sum over the labels with ``logsumexp(-1)``.

    Args:
        log_potentials: The scores (B, N, N) ``[head, modifier]`` of arcs. ``[i, i]`` is the score of word i as a root.
        lengths: The number of words of each sentence, integers (B,) from 1 to N, default N.
        args: Ignored.
        multiroot: If True (the default), several words may be roots.

    >>> DependencyCRF(torch.zeros(1, 3, 3)).count, DependencyCRF(torch.zeros(1, 3, 3), multiroot=False).count
    (tensor([12.]), tensor([7.]))
    >>> potentials = torch.tensor([[[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]])
    >>> d = DependencyCRF(potentials)
    >>> d.from_event(d.argmax)[0]  # heads, numbered from 1; 0 for a root
    tensor([[2, 0, 2]])
    """

    def __init__(
        self,
        log_potentials: Tensor,
        lengths: Lengths | None = None,
        args: object = None,
        multiroot: bool = True,
    ) -> None:
        shape = check_tensor("log_potentials", log_potentials).shape
        if len(shape) != 3 or shape[1] != shape[2] or shape[1] == 0:
            hint = ": sum over the labels with log_potentials.logsumexp(-1)" if len(shape) == 4 else ""
            raise ValueError(f"log_potentials must have shape (B, N, N) with N >= 1, got {tuple(shape)}{hint}")
        self.multiroot = multiroot
        super().__init__(log_potentials, lengths, shape[1], args)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        theta = self.log_potentials
        arcs = pad(torch.cat((theta.diagonal(dim1=1, dim2=2).unsqueeze(1), theta), 1), (1, 0))
        return DependencyTrees(arcs, single_root=not self.multiroot, lengths=self.lengths, omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        return _roots_on_diagonal(paths[..., 1:])

    @staticmethod
    def to_event(sequence: Tensor, extra: object = None, lengths: Tensor | None = None) -> Tensor:
        """Convert heads (B, N), numbered from 1, 0 for a root, to an event (B, N, N), int64, 0 in the padding."""
        words = torch.arange(sequence.shape[1] + 1, device=sequence.device)
        arcs = sequence.unsqueeze(1) == words.unsqueeze(-1)
        if lengths is not None:
            arcs &= (words[1:] <= lengths.unsqueeze(-1)).unsqueeze(1)
        return _roots_on_diagonal(arcs.long())

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, None]:
        """Return the heads (B, N) int64 of an event (B, N, N), and None.

        Heads are numbered from 1. They are 0 for a root and in the padding.
        """
        words = torch.arange(1, event.shape[-1] + 1, device=event.device)
        heads = words.unsqueeze(-1) * (words.unsqueeze(-1) != words)
        return ((event != 0) * heads).sum(-2), None


def _roots_on_diagonal(arcs: Tensor) -> Tensor:
    """Convert arcs (..., N + 1, N) ``[head, modifier]``, with the root as head 0, to torch-struct's (..., N, N)."""
    return arcs[..., 1:, :] + torch.diag_embed(arcs[..., 0, :])
