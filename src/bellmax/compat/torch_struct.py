"""A replacement for ``torch_struct`` 0.5: its distributions over chains, segments, alignments and trees.

``NonProjectiveDependencyCRF`` and ``SentCFG`` are missing: no dynamic program sums the trees of the first, and rules of
the second are the edges of a :class:`bellmax.Hypergraph`.
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
from bellmax.programs.lattice import Graph, graph_of
from bellmax.programs.table import WARPING
from bellmax.regularizers import Hard, Regularizer
from bellmax.structures.chain import Chain
from bellmax.structures.dag import DAG, DAGPaths
from bellmax.structures.parses import DependencyTrees, SpanTrees
from bellmax.tensors import inner
from bellmax.transforms import is_checked, is_readable


class StructDistribution(Distribution):
    """The base of all: a :class:`PathDistribution` under the original's names.

    The original's properties are properties here, also ``entropy``. For all of them: the longest of ``lengths`` need
    not be N; −∞ forbids a part, without NaN, and if it leaves no structure the partition is −∞; ``requires_grad`` of
    the caller's tensor is not changed; ``sample`` takes any shape; failed assertions of the original are a
    ``ValueError``. There is no ``gumbel_crf``, and no ``struct`` with other semirings.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  as torch.distributions declares it

    _shortest = 1

    def __init__(self, log_potentials: Tensor, lengths: Lengths | None, longest: int, args: object = None) -> None:
        self.log_potentials = log_potentials
        self.lengths = None if lengths is None else self._checked(lengths, longest)
        self.args = args
        super().__init__(log_potentials.shape[:1], log_potentials.shape[1:], validate_args=False)

    def _checked(self, lengths: Lengths, longest: int) -> Tensor:
        """The lengths as int64."""
        batch, shortest = self.log_potentials.shape[:1], self._shortest
        given = as_lengths("lengths", lengths, self.log_potentials.device)
        if given.shape != batch:
            raise ValueError(f"lengths must be integers of shape {tuple(batch)}, got shape {tuple(given.shape)}")
        if is_readable(given) and given.numel() and not shortest <= int(given.min()) <= int(given.max()) <= longest:
            raise ValueError(f"lengths must be from {shortest} to {longest}, got {given.tolist()}")
        return given

    @abstractmethod
    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        """The same distribution as a :class:`PathDistribution`."""

    @abstractmethod
    def _events(self, paths: Tensor) -> Tensor:
        """Paths (..., B, *event of :meth:`_paths`) as events of torch-struct."""

    @cached_property
    def _soft(self) -> PathDistribution:
        with torch.enable_grad():  # the result is cached, and later calls may need gradients
            return self._paths()

    @property
    def partition(self) -> Tensor:
        """The log-partition function, (B,)."""
        return self._soft.value

    @property
    def marginals(self) -> Tensor:
        """The probability of each part, of the potentials' shape. Differentiable."""
        return self._events(self._soft.expected_path)

    @property
    def max(self) -> Tensor:
        """The best score, (B,)."""
        return self._paths(Hard()).value

    @property
    def argmax(self) -> Tensor:
        """The best structure as a 0/1 tensor of the potentials' shape."""
        return self._events(self._soft.best_path())

    @property
    def mode(self) -> Tensor:
        """The same as :attr:`argmax`."""
        return self.argmax

    def kmax(self, k: int) -> Tensor:
        """The k best scores, (k, B), best first; −∞ past the number of structures."""
        return self._soft.topk(k)[0].movedim(-1, 0)

    def topk(self, k: int) -> Tensor:
        """The k best structures, (k, B, *event), best first; zeros past their number."""
        return self._events(self._soft.topk(k)[1].movedim(1, 0))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Structures drawn from the distribution, (*sample_shape, B, *event)."""
        return self._events(self._soft.sample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability (..., B) of structures (..., B, *event), 0/1."""
        score = inner(value.to(self.log_potentials.dtype), self.log_potentials, len(self.event_shape))
        return score - self.partition

    @property
    def entropy(self) -> Tensor:  # type: ignore[override]
        """Shannon entropy, (B,). Differentiable."""
        return self._soft.entropy()

    def kl(self, other: StructDistribution) -> Tensor:
        """The Kullback-Leibler divergence from ``other``, (B,)."""
        divergence: Tensor = kl_divergence(self._soft, other._soft)
        return divergence

    def cross_entropy(self, other: StructDistribution) -> Tensor:
        """The entropy plus the divergence from ``other``, (B,)."""
        return self.entropy + self.kl(other)

    @property
    def count(self) -> Tensor:
        """The number of structures of finite score, (B,)."""
        return self._soft.num_paths.to(self.log_potentials.dtype)


class LinearChainCRF(StructDistribution):
    """Sequences of N states out of C, with the arguments, event layout and results of torch-struct's class.

    Differences, beside those of :class:`StructDistribution`: time is O(N·C²), not O(N·C³); N may be 1; ``to_event``
    uses its lengths.

    Args:
        log_potentials: (B, N − 1, C, C) ``[current, previous]``.
        lengths: integers (B,), the number of states of each sequence, from 1 to N; N for all by default.
        args: ignored.

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
        # Our first step has potentials too, torch-struct's has none.
        theta = pad(self.log_potentials, (0, 0, 0, 0, 1, 0))
        return Chain(theta, lengths=self.lengths, omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        return paths[..., 1:, :, :]

    @staticmethod
    def to_event(sequence: Tensor, extra: int, lengths: Tensor | None = None) -> Tensor:
        """States (B, N) out of ``extra`` as an event (B, N − 1, C, C), int64; 0 past the lengths."""
        event = one_hot(sequence[:, 1:] * extra + sequence[:, :-1], extra * extra)
        event = event.reshape(*event.shape[:2], extra, extra)
        if lengths is None:
            return event
        past = torch.arange(event.shape[1], device=sequence.device) >= lengths.unsqueeze(-1) - 1
        return event.masked_fill(past[..., None, None], 0)

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, int]:
        """The states (B, N) int64 of an event (B, N − 1, C, C), 0 past its end, and C."""
        previous, current = (event != 0).any(-2).long(), (event != 0).any(-1).long()
        return torch.cat((previous[:, :1], current), 1).argmax(-1), event.shape[-1]


class HMM(LinearChainCRF):
    """The states of a hidden Markov model, given what it emitted: a chain with the arguments of torch-struct's class.

    Differences, beside those of :class:`LinearChainCRF`: sequences have two states or more, else a ``ValueError``: an
    event has no room for a single one (the original leaves the first state's scores out).

    Args:
        transition: (C, C) ``[current, previous]``, log-probabilities.
        emission: (V, C) ``[symbol, state]``, log-probabilities.
        init: (C,), log-probabilities of the first state.
        observations: int64 (B, N) of symbols below V.
        lengths: integers (B,), from 2 to N; N for all by default.

    >>> even = torch.full((2, 2), 0.5).log()
    >>> d = HMM(even, even, even[0], torch.tensor([[0, 1, 1, 0]]))
    >>> d.partition.exp()  # the probability of the symbols
    tensor([0.0625])
    """

    _shortest = 2

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
        for name, given, shape in (("transition", transition, (states, states)), ("init", init, (states,))):
            if check_tensor(name, given).shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(given.shape)}")
        if check_tensor("observations", observations).ndim != 2 or observations.shape[1] < 2:
            raise ValueError(f"observations must have shape (B, N) with N >= 2, got {tuple(observations.shape)}")
        if observations.dtype != torch.int64:
            raise ValueError(f"observations must be int64, got {observations.dtype}")
        if is_checked(observations) and observations.numel():
            least, most = (int(end) for end in observations.aminmax())
            if least < 0 or most >= symbols:
                raise ValueError(f"observations must be from 0 to {symbols - 1}, got {least if least < 0 else most}")
        emitted = emission[observations]
        first = (init + emitted[:, :1]).unsqueeze(-2)
        rest = transition + emitted[:, 1:].unsqueeze(-1)
        super().__init__(torch.cat((rest[:, :1] + first, rest[:, 1:]), 1), lengths)


class SemiMarkovCRF(StructDistribution):
    """Places 0 … N − 1 of which some have a state out of C, with the event layout of torch-struct's class.

    The first and the last place have one, and neighbours with states are at most K − 1 places apart. The score of such
    a step is ``log_potentials[:, place, distance, state after, state before]``; those of distance 0 are ignored.

    Differences, beside those of :class:`StructDistribution`: time and memory are O(N·K·C²), not O(N·K³·C³); unequal
    ``lengths`` work (with K > 2 the original forgets steps past the shortest: its partition, marginals and best
    structure are wrong); N may be 1; ``to_event`` uses its lengths. It runs on the engine for graphs. If scores are a
    sum of a segment's and a transition's, :class:`bellmax.SemiMarkov` takes O(N(K·C + C²)).

    Args:
        log_potentials: (B, N − 1, K, C, C) ``[place, distance, after, before]``, K ≥ 2.
        lengths: integers (B,), the number of places of each sequence, from 1 to N; N for all by default.
        args: ignored.

    >>> potentials = torch.zeros(1, 3, 3, 1, 1)  # four places, steps of one or two
    >>> potentials[0, 1, 2] = 1.0
    >>> d = SemiMarkovCRF(potentials)
    >>> d.count, d.from_event(d.argmax)[0]  # -1 where no state is
    (tensor([3.]), tensor([[ 0,  0, -1,  0]]))
    """

    def __init__(self, log_potentials: Tensor, lengths: Lengths | None = None, args: object = None) -> None:
        shape = check_tensor("log_potentials", log_potentials).shape
        if len(shape) != 5 or shape[3] != shape[4] or shape[4] == 0 or shape[2] < 2:
            raise ValueError(f"log_potentials must have shape (B, N - 1, K, C, C) with K >= 2, got {tuple(shape)}")
        super().__init__(log_potentials, lengths, shape[1] + 1, args)

    @property
    def _steps(self) -> tuple[DAG, Tensor]:
        return _steps_of(*self.event_shape[:3], self.log_potentials.device)

    def _paths(self, omega: str | Regularizer = "negentropy") -> PathDistribution:
        (dag, parts), (steps, _, states, _) = self._steps, self.event_shape
        theta = self.log_potentials
        lengths = torch.full(theta.shape[:1], steps + 1, device=theta.device) if self.lengths is None else self.lengths
        inner = slice(states, states + len(parts))
        place = (dag.edges[inner, 1] - 1) // states
        moves = theta.flatten(1).index_select(1, parts).masked_fill(place >= lengths.unsqueeze(-1), -torch.inf)
        place = torch.arange(steps + 1, device=theta.device).repeat_interleave(states)
        ends = theta.new_zeros(()).masked_fill(place != lengths.unsqueeze(-1) - 1, -torch.inf)
        return DAGPaths(dag, torch.cat((theta.new_zeros((len(theta), states)), moves, ends), 1), omega=omega)

    def _events(self, paths: Tensor) -> Tensor:
        parts, states = self._steps[1], self.event_shape[2]
        events = paths.new_zeros((*paths.shape[:-1], self.event_shape.numel()))
        events = events.index_add(-1, parts, paths[..., states : states + len(parts)])
        return events.reshape(*paths.shape[:-1], *self.event_shape)

    @staticmethod
    def to_event(sequence: Tensor, extra: tuple[int, int], lengths: Tensor | None = None) -> Tensor:
        """States (B, N), −1 where none is, as an event (B, N − 1, K, C, C), int64; ``extra`` is (C, K)."""
        (states, longest), (batch, places) = extra, sequence.shape
        place = torch.arange(places, device=sequence.device)
        has_state = sequence >= 0
        if not bool(has_state[:, 0].all()):
            raise ValueError(f"sequence must begin with a state, got {sequence[:, 0].tolist()}")
        before = torch.where(has_state, place, 0).cummax(1).values[:, :-1]
        taken = has_state[:, 1:] if lengths is None else has_state[:, 1:] & (place[1:] < lengths.unsqueeze(-1))
        distance = place[1:] - before
        if bool((distance[taken] >= longest).any()):
            raise ValueError(f"sequence must have steps below K = {longest}, got {int(distance[taken].max())}")
        event = torch.zeros((batch, places - 1, longest, states, states), dtype=torch.int64, device=sequence.device)
        index = torch.where(taken)[0], before[taken], distance[taken]
        event[(*index, sequence[:, 1:][taken], sequence.gather(1, before)[taken])] = 1
        return event

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The states (B, N) int64 of an event (B, N − 1, K, C, C), −1 where none is, and (C, K)."""
        found = torch.full((event.shape[0], event.shape[1] + 1), -1, device=event.device)
        batch, place, distance, after, before = event.nonzero().unbind(1)
        found[batch, place + distance] = after
        found[batch, place] = before
        return found, (event.shape[-1], event.shape[2])


@lru_cache(maxsize=8)
def _steps_of(steps: int, longest: int, states: int, device: torch.device) -> tuple[DAG, Tensor]:
    """The graph of begins, steps and ends, and the index in the event of the potential of each step."""
    with torch._C._DisableFuncTorch(), torch.device("cpu"):
        state, sink = torch.arange(states), 1 + (steps + 1) * states
        sizes = torch.arange(steps), torch.arange(1, longest), state, state
        place, distance, after, before = torch.cartesian_prod(*sizes).unbind(1)
        parts = ((place * longest + distance) * states + after) * states + before
        moves = torch.stack((1 + place * states + before, 1 + (place + distance) * states + after), 1)
        exists = place + distance <= steps
        begins = torch.stack((torch.zeros_like(state), 1 + state), 1)
        ends = torch.stack((torch.arange(1, sink), torch.full((sink - 1,), sink)), 1)
        return DAG(torch.cat((begins, moves[exists], ends))).to(device), parts[exists].to(device)


class AlignmentCRF(StructDistribution):
    """Alignments of N and M elements, with a score for every move, in the event layout of torch-struct's class.

    An alignment begins in cell (0, 0) with the score ``log_potentials[:, 0, 0, 1]``, and ends in cell (N−1, M−1). The
    move into cell (i, j) is 0 from (i, j−1), 1 from (i−1, j−1), 2 from (i−1, j).

    Differences, beside those of :class:`StructDistribution`: genbmm is not needed; N may exceed M; shorter ``lengths``
    work (the original reads the value at N). ``local`` (an argument that the original ignores) and ``max_gap`` are a
    ``ValueError``: for a band, put −∞ into the potentials. It runs on the engine for graphs, with O(N·M) memory.

    Args:
        log_potentials: (B, N, M, 3).
        local: False.
        lengths: integers (B,), the length on the side of N, from 1 to N; N for all by default.
        max_gap: None.

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
        events = paths.new_zeros((*paths.shape[:-1], self.event_shape.numel()))
        events = events.index_add(-1, self._parts, paths[..., : self._parts.shape[0]])
        return events.reshape(*paths.shape[:-1], *self.event_shape)


class TreeCRF(StructDistribution):
    """Binary trees over N words, each of whose spans has one of NT labels, in the event layout of torch-struct's class.

    Differences are those of :class:`StructDistribution`.

    Args:
        log_potentials: (B, N, N, NT) ``[first word, last word, label]``; entries below the diagonal are ignored.
        lengths: integers (B,), the number of words, from 1 to N; N for all by default.
        args: ignored.

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
        """The event itself, as in the original."""
        return sequence

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, None]:
        """The event itself, and None."""
        return event, None


class DependencyCRF(StructDistribution):
    """Projective dependency trees of N words, in the event layout of torch-struct's class: roots on the diagonal.

    Differences, beside those of :class:`StructDistribution`: ``multiroot`` is the distribution's own (in the original
    that of the last one made holds for all); tensors without gradients work, and ``count``, ``kl`` and
    ``cross_entropy`` do (the original raises an error); ``to_event`` follows the device of its argument. Potentials
    with labels, (B, N, N, L), are a ``ValueError``: sum labels out by ``logsumexp(-1)``.

    Args:
        log_potentials: (B, N, N) ``[head, modifier]``; ``[i, i]`` is the score of word i as a root.
        lengths: integers (B,), the number of words, from 1 to N; N for all by default.
        args: ignored.
        multiroot: whether more than one word may be a root.

    >>> DependencyCRF(torch.zeros(1, 3, 3)).count, DependencyCRF(torch.zeros(1, 3, 3), multiroot=False).count
    (tensor([12.]), tensor([7.]))
    >>> potentials = torch.tensor([[[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]])
    >>> d = DependencyCRF(potentials)
    >>> d.from_event(d.argmax)[0]  # heads, counted from 1; 0 for a root
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
            hint = ": sum labels out by log_potentials.logsumexp(-1)" if len(shape) == 4 else ""
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
        """Heads (B, N), counted from 1 and 0 for a root, as an event (B, N, N), int64; 0 past the lengths."""
        words = torch.arange(sequence.shape[1] + 1, device=sequence.device)
        arcs = sequence.unsqueeze(1) == words.unsqueeze(-1)
        if lengths is not None:
            arcs &= (words[1:] <= lengths.unsqueeze(-1)).unsqueeze(1)
        return _roots_on_diagonal(arcs.long())

    @staticmethod
    def from_event(event: Tensor) -> tuple[Tensor, None]:
        """The heads (B, N) int64 of an event (B, N, N), counted from 1, 0 for a root and past the end; and None."""
        words = torch.arange(1, event.shape[-1] + 1, device=event.device)
        heads = words.unsqueeze(-1) * (words.unsqueeze(-1) != words)
        return ((event != 0) * heads).sum(-2), None


def _roots_on_diagonal(arcs: Tensor) -> Tensor:
    """Arcs (..., N + 1, N) ``[head, modifier]``, the root first, as (..., N, N)."""
    return arcs[..., 1:, :] + torch.diag_embed(arcs[..., 0, :])
