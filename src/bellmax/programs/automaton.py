"""Automata over frames: walks of T emitting arcs through a labelled graph.

A path in the compact form is (L,) int64: the numbers of its arcs in order, with ε-arcs, padded with −1. If no arc is an
ε-arc, L is T. Otherwise L is (T + 1)·D + T, where D is the largest number of ε-arcs in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

import bellmax.programs.graph as graph
from bellmax.modes import is_plain, is_readable, outside_modes
from bellmax.programs.checks import check_lengths, of_sequence
from bellmax.programs.program import Program
from bellmax.tensors import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray


class AutomatonProgram(Program):
    """Walks of T emitting arcs through an automaton with S states and A arcs.

    θ is log_probs (B, T, V), arcs (B or 1, A), start and final (B or 1, S). ``index`` is (lengths, arcs): lengths (B,)
    int64 from 0 to T, and arcs (B, A, 3) int32, rows (source, target, label). An arc of label −1 is an ε-arc, which
    takes no frame. A row of −1 is padding. If the batch shares the automaton, arcs is an expanded view.

    The nodes are (t, s) for t = 0 … T, and the end. These edges lead to (t, s), in this order:

    - if t = 0, the edge from the start with weight start[s];
    - each emitting arc (s′, s, label), from (t − 1, s′), with weight log_probs[t − 1, label] + arcs[arc];
    - each ε-arc (s′, s), from (t, s′), with weight arcs[arc].

    The end has an edge with weight final[s] from each (T_b, s), where T_b is the member's length.
    """

    name = "automaton"
    scores = ("log_probs", "arcs", "start", "final")
    index_dims = (0, 2)
    topk_is_compact = True

    # --- sizes

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return ((theta[0].shape[1] + 1) * theta[2].shape[1] + 2,)

    def longest(self, theta: Tensors, index: Tensors) -> int:
        """Return L, the size of a path in the compact form."""
        steps, depth = theta[0].shape[1], _depth(_members(index[1])[0], theta[2].shape[1])
        return (steps + 1) * depth + steps

    def num_choices(self, theta: Tensors, index: Tensors) -> int:
        return self.longest(theta, index) + 2  # at the end, before each arc, and at the first node

    def empty_paths(self, theta: Tensors, index: Tensors, count: int) -> Tensor:
        batch = theta[0].shape[0]
        return theta[0].new_empty((batch, count, self.longest(theta, index)), dtype=torch.int64)

    def key(self, theta: Tensors, index: Tensors) -> Tensors:
        return [*index, torch.tensor(theta[2].shape[1])]

    # --- checks

    def used(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        (log_probs, scores, *_), (lengths, arcs) = theta, index
        steps, classes = log_probs.shape[1:]
        rows = _once(arcs)
        labels = rows[..., 2].long()
        is_read = torch.zeros((len(rows), classes + 1), dtype=torch.bool, device=rows.device)
        is_read = is_read.scatter(1, torch.where(labels < 0, classes, labels), True)[:, None, :classes]
        is_frame = (torch.arange(steps, device=rows.device) < lengths.unsqueeze(-1)).unsqueeze(-1)
        is_arc = rows[..., 0] >= 0
        return [is_frame & is_read, is_arc if len(scores) > 1 else is_arc.any(0, keepdim=True), None, None]

    def check_index(self, theta: Tensors, index: Tensors) -> None:
        lengths, arcs = index
        check_lengths("lengths", lengths, 0, theta[0].shape[1])
        check_labels(_once(arcs)[..., 2], theta[0].shape[2])

    # --- the expansion

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return self._unrolled(theta, index)[0].engine_index

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        return self._by_edge(theta, theta, index, -math.inf)

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return self._by_edge(z, z, index, 0)

    def _unrolled(self, theta: Tensors, index: Tensors) -> tuple[Unrolled, Slots]:
        """Return the graph, and the meaning of its slots in each member of the batch."""
        members, numbers = _members(index[1])
        unrolled = _unroll(members, theta[0].shape[1], theta[2].shape[1], index[1].device)
        if len(members) == 1:
            return unrolled, unrolled.slots
        chosen = torch.tensor(numbers, dtype=torch.int64, device=index[1].device)
        return unrolled, Slots(*(part.index_select(0, chosen) for part in unrolled.slots))

    def _by_edge(self, scores: Tensors, theta: Tensors, index: Tensors, absent: float) -> Tensor:
        """Return the weight of each edge, (B, E), as a linear function of the scores, ``absent`` if it is closed."""
        log_probs, arcs, start, final = scores
        _, slots = self._unrolled(theta, index)
        batch, steps, _ = log_probs.shape
        frame, lengths = torch.arange(steps + 1, device=log_probs.device), index[0].unsqueeze(-1)

        def block(entries: Tensor, exists: Tensor) -> Tensor:
            """Return entries (…, n) for n slots and all frames, 0 or more of them, closed where no edge exists."""
            shape = batch, exists.shape[1], entries.shape[-1]
            return entries.expand(shape).masked_fill(~exists, absent).flatten(1)

        labels = slots.label.clamp(min=0).unsqueeze(1).expand(batch, steps, -1)
        emitted = log_probs.gather(2, labels) + _take(arcs, slots.emitting).unsqueeze(1)
        is_frame, is_last = (frame <= lengths).unsqueeze(-1), (frame == lengths).unsqueeze(-1)
        blocks = (
            block(_take(start, slots.state).unsqueeze(1), (frame == 0)[None, :, None]),
            block(emitted, is_frame[:, 1:] & (slots.emitting >= 0).unsqueeze(1)),
            block(_take(arcs, slots.epsilon).unsqueeze(1), is_frame & (slots.epsilon >= 0).unsqueeze(1)),
            block(_take(final, slots.end).unsqueeze(1), is_last & (slots.end >= 0).unsqueeze(1)),
        )
        return torch.cat(blocks, 1)

    def _block_shapes(self, slots: Slots, steps: int) -> list[tuple[int, int]]:
        """Return (frames, slots) of the blocks of edges: start, emitting arcs, ε-arcs and end."""
        widths = (part.shape[-1] for part in (slots.state, slots.emitting, slots.epsilon, slots.end))
        return list(zip((steps + 1, steps, steps + 1, steps + 1), widths, strict=True))

    def _offsets(self, slots: Slots, steps: int) -> list[int]:
        """Return the number of the first edge of each block."""
        sizes = [math.prod(shape) for shape in self._block_shapes(slots, steps)]
        return [sum(sizes[:n]) for n in range(4)]

    def _blocks(self, edges: Tensor, slots: Slots, steps: int) -> list[Tensor]:
        """Return numbers of edges (..., E) block by block, (..., frames, slots)."""
        shapes = self._block_shapes(slots, steps)
        parts = edges.split([math.prod(shape) for shape in shapes], -1)
        return [part.reshape(*edges.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        (log_probs, arcs, start, final), (_, slots) = theta, self._unrolled(theta, index)
        first, emitting, epsilon, end = self._blocks(edges, slots, log_probs.shape[1])
        is_arc = (slots.emitting >= 0).unsqueeze(1)
        emitting = emitting.masked_fill(~is_arc, 0)
        labels = slots.label.clamp(min=0).unsqueeze(1).expand(emitting.shape)
        onto_log_probs = edges.new_zeros(log_probs.shape).scatter_add(2, labels, emitting)
        onto_arcs = _put(emitting.sum(1), slots.emitting, arcs) + _put(epsilon.sum(1), slots.epsilon, arcs)
        onto_start = _put(first[:, 0], slots.state, start)
        return [onto_log_probs, onto_arcs, onto_start, _put(end.sum(1), slots.end, final)]

    def best_by_entry(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        _, slots = self._unrolled(theta, index)
        _, emitting, _, _ = self._blocks(edges, slots, theta[0].shape[1])
        emitting = emitting.masked_fill((slots.emitting < 0).unsqueeze(1), -math.inf)
        labels = slots.label.clamp(min=0).unsqueeze(1).expand(emitting.shape)
        best = edges.new_full(theta[0].shape, -math.inf)
        return best.scatter_reduce(2, labels, emitting, "amax")

    # --- values of nodes

    def node_shape(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return theta[0].shape[1] + 1, theta[2].shape[1]

    def by_node(self, values: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        unrolled, slots = self._unrolled(theta, index)
        by_slot = values.index_select(1, unrolled.node).reshape(len(values), *self.node_shape(theta, index))
        return by_slot.gather(2, slots.state.argsort(-1).unsqueeze(1).expand(by_slot.shape))

    # --- paths

    def arc_edges(self, theta: Tensors, index: Tensors) -> slice:
        """Return the edges of the expansion that are arcs."""
        _, first, _, last = self._offsets(self._unrolled(theta, index)[1], theta[0].shape[1])
        return slice(first, last)

    def arc_counts(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Sum numbers of edges (B, E) over the edges of each emitting arc at each frame, (B, T, A)."""
        _, slots = self._unrolled(theta, index)
        _, emitting, _, _ = self._blocks(edges, slots, theta[0].shape[1])
        arcs = torch.where(slots.emitting < 0, theta[1].shape[1], slots.emitting).unsqueeze(1)
        counts = edges.new_zeros((*emitting.shape[:2], theta[1].shape[1] + 1))
        return counts.scatter_add(2, arcs.expand(emitting.shape), emitting)[..., :-1]

    def edge_numbers(self, paths: Tensor, first: Tensor, last: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Return the edges (K, B, L + 2) of the expansion that paths take, −1 for none.

        Args:
            paths: Arc numbers, (K, B, L), padded with −1.
            first: The state in which each path begins, (K, B).
            last: The state in which each path ends, (K, B).
            theta: The scores.
            index: The integers.

        """
        (lengths, arcs), (_, slots), steps = index, self._unrolled(theta, index), theta[0].shape[1]
        labels = labels_of(paths.movedim(0, 1), arcs).movedim(1, 0)
        is_emitting = (labels >= 0).long()
        frame = (is_emitting.cumsum(-1) - is_emitting).clamp(max=steps)  # the frame that an emitting arc takes
        arc, offsets = paths.clamp(min=0), self._offsets(slots, steps)

        def slot_of(numbers: Tensor, asked: Tensor, count: int) -> Tensor:
            """Return the slots of numbers (K, B, n), given the numbers of slots."""
            slot = torch.arange(numbers.shape[1], device=numbers.device).expand(numbers.shape)
            entries = torch.where(numbers < 0, count, numbers)
            inverse = numbers.new_full((len(numbers), count + 1), -1).scatter(1, entries, slot)
            return inverse.expand(asked.shape[1], -1).expand(len(asked), -1, -1).gather(2, asked)

        count, states = theta[1].shape[1], theta[2].shape[1]
        emitting = offsets[1] + frame * slots.emitting.shape[1] + slot_of(slots.emitting, arc, count)
        epsilon = offsets[2] + frame * slots.epsilon.shape[1] + slot_of(slots.epsilon, arc, count)
        begin = slot_of(slots.state, first.unsqueeze(-1), states)
        end = slot_of(slots.end, last.unsqueeze(-1), states)
        end = offsets[3] + lengths.unsqueeze(-1) * slots.end.shape[1] + end
        between = torch.where(is_emitting > 0, emitting, epsilon).masked_fill(paths < 0, -1)
        return torch.cat((begin, between, end), -1)

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        unrolled, slots = self._unrolled(theta, index)
        steps = theta[0].shape[1]
        _, emitting, epsilon, _ = self._blocks(edges, slots, steps)
        taken = torch.cat((emitting.flatten(2), epsilon.flatten(2)), 2) > 0
        arc = torch.cat((slots.emitting.repeat(1, steps), slots.epsilon.repeat(1, steps + 1)), 1)
        last = int(unrolled.level.max()) + 1 if unrolled.level.numel() else 1
        count = min(self.longest(theta, index), taken.shape[2])
        rank = torch.where(taken, last - unrolled.level, 0).topk(count, -1)
        numbers = arc.unsqueeze(1).expand(taken.shape).gather(2, rank.indices).masked_fill(rank.values == 0, -1)
        return torch.nn.functional.pad(numbers, (0, self.longest(theta, index) - count), value=-1)

    def events(self, paths: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        steps, classes = theta[0].shape[1:]
        labels = labels_of(paths, index[1])
        is_emitting = labels >= 0
        frame = is_emitting.cumsum(-1) - 1
        entry = torch.where(is_emitting, frame * classes + labels, steps * classes)
        flat = theta[0].new_zeros((*paths.shape[:-1], steps * classes + 1)).scatter(-1, entry, 1)
        return flat[..., :-1].reshape(*paths.shape[:-1], steps, classes)


def labels_of(paths: Tensor, arcs: Tensor) -> Tensor:
    """Return the labels of arc numbers (B, …) int64, −1 for ε-arcs and for padding; ``arcs`` is (B, A, 3)."""
    flat = paths.flatten(1)
    if not arcs.shape[1]:
        return torch.full_like(paths, -1)
    labels = arcs[..., 2].long().expand(len(paths), -1).gather(1, flat.clamp(min=0))
    return labels.masked_fill(flat < 0, -1).reshape(paths.shape)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise ``ValueError`` if a label (B or 1, A) is not a class. CPU only."""
    if not labels.is_cpu or not labels.numel() or int(labels.max()) < classes:
        return
    batch, arc = (labels >= classes).nonzero()[0].tolist()
    raise ValueError(
        f"arcs must have labels below {classes}, the number of classes of log_probs, got label "
        f"{int(labels[batch, arc])} at arc {arc}{of_sequence((batch,)) if len(labels) > 1 else ''}"
    )


# --- unrolling


class Slots(NamedTuple):
    """Meaning of the slots of the unrolled graph, one row for each automaton, −1 for nothing.

    Automata of a stack share a graph. A slot is an edge at each frame, which an automaton has or has not.
    """

    state: Tensor
    """(…, S): the state of each node of a frame."""
    emitting: Tensor
    """(…, slots): the emitting arc."""
    label: Tensor
    """(…, slots): its label."""
    epsilon: Tensor
    """(…, slots): the ε-arc."""
    end: Tensor
    """(…, slots): the state from which an edge leads to the end."""


class Unrolled(NamedTuple):
    """The graph of all frames. Its edges are in blocks: start (T + 1, S), emitting arcs (T, slots), ε-arcs (T + 1,
    slots), and end (T + 1, slots)."""

    engine_index: tuple[Tensor, ...]
    """The index of the graph engine."""
    level: Tensor
    """The level of the head of each edge of the blocks of arcs."""
    node: Tensor
    """((T + 1)·S,): the number of each node (t, slot) in the order of the sweeps."""
    slots: Slots


def _once(arcs: Tensor) -> Tensor:
    """Return the arcs (B, A, 3) as (1, A, 3) if the batch shares one automaton."""
    return arcs[:1] if arcs.stride(0) == 0 else arcs


def _members(arcs: Tensor) -> tuple[tuple[bytes, ...], list[int]]:
    """Return the different automata of a batch (B, A, 3), and the number of each member's automaton."""
    if not (is_readable(arcs) and is_plain([arcs])):
        raise NotImplementedError(
            "this method of an automaton needs to read its arcs: call it outside of torch.compile and vmap"
        )
    with outside_modes():
        rows = _once(arcs).cpu().numpy()
    number: dict[bytes, int] = {}
    members = [number.setdefault(row.tobytes(), len(number)) for row in rows]
    return tuple(number) or (b"",), members


def _rows(member: bytes) -> NDArray[np.int32]:
    """Return the arcs (A, 3) of an automaton."""
    return np.frombuffer(member, np.int32).reshape(-1, 3)


@lru_cache(maxsize=64)
def _epsilon_levels(member: bytes, states: int) -> NDArray[np.int64]:
    """(S,): the number of arcs of the longest chain of ε-arcs into each state."""
    rows = _rows(member)
    pairs = rows[(rows[:, 0] >= 0) & (rows[:, 2] < 0), :2].astype(np.int64)
    return graph.levels(pairs, states) if len(pairs) else np.zeros(states, dtype=np.int64)


def _depth(members: Sequence[bytes], states: int) -> int:
    """Return the number of arcs of the longest chain of ε-arcs."""
    return max((int(_epsilon_levels(member, states).max(initial=0)) for member in members), default=0)


@lru_cache(maxsize=8)
def _unroll(members: tuple[bytes, ...], steps: int, states: int, device: torch.device) -> Unrolled:
    """Return one graph for all automata, cached because it depends on their arcs and the number of frames only."""
    emitting, epsilon, end, state_of_slot = _share_slots(members, states)
    frame = np.arange(steps + 1)[:, None]
    grid = 1 + frame * states + np.arange(states)  # node 0 is the start
    last = grid[-1, -1] + 1

    def lead(slots: _Shared, frames: NDArray[np.int64], later: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first = 1 + frames * states
        return (first + slots.source).ravel(), (first + later * states + slots.target).ravel()

    ends = [
        (np.zeros(grid.size, dtype=np.int64), grid.ravel()),
        lead(emitting, frame[:-1], 1),
        lead(epsilon, frame, 0),
        ((1 + frame * states + end.source).ravel(), np.full(frame.size * len(end.source), last)),
    ]
    tail, head = (np.concatenate([pair[side] for pair in ends]) for side in (0, 1))
    pairs = np.stack((epsilon.source, epsilon.target), 1)
    depth = graph.levels(pairs, states) if len(pairs) else np.zeros(states, dtype=np.int64)
    per_frame = int(depth.max()) + 1
    level = np.concatenate(([0], (1 + frame * per_frame + depth).ravel(), [1 + frame.size * per_frame]))
    with outside_modes():
        index = tuple(torch.from_numpy(array).to(device) for array in graph.sort(head, tail, level))
        order = np.lexsort((np.bincount(head, minlength=len(level)), level))
        labels = [_rows(member)[:, 2][arcs] for member, arcs in zip(members, emitting.numbers, strict=True)]
        slots = (
            state_of_slot,
            emitting.numbers,
            np.reshape(labels, emitting.numbers.shape),
            epsilon.numbers,
            end.numbers,
        )
        return Unrolled(
            index,
            torch.from_numpy(level[head[grid.size : len(head) - ends[-1][0].size]]).to(device),
            torch.from_numpy(order.argsort()[1:-1]).to(device),
            Slots(*(torch.from_numpy(np.asarray(part, dtype=np.int64)).to(device) for part in slots)),
        )


class _Shared(NamedTuple):
    """Edges of one frame that several automata share."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """(automata, edges): the arc or state of each automaton, −1 for none."""


def _share_slots(members: Sequence[bytes], states: int) -> tuple[_Shared, _Shared, _Shared, NDArray[np.int64]]:
    """Return the edges of one frame: emitting arcs, ε-arcs, edges to the end; and (automata, S), the state of a slot.

    ε-arcs lead to larger slots, so ε-arcs of different automata do not form a cycle.
    """
    levels = [_epsilon_levels(member, states) for member in members]
    state_of_slot = np.reshape([level.argsort(kind="stable") for level in levels], (len(members), states))
    slot_of_state = state_of_slot.argsort(1)
    into: tuple[_Into, _Into] = {}, {}
    for number, member in enumerate(members):
        slot = slot_of_state[number].tolist()
        for arc, (source, target, label) in enumerate(_rows(member).tolist()):
            if source >= 0:
                lists = into[label < 0].setdefault(slot[target], [[] for _ in members])
                lists[number].append((slot[source], arc))
    end = [[(slot, state) for state, slot in enumerate(row)] for row in slot_of_state.tolist()]
    emitting, epsilon, ends = (_share(lists, len(members)) for lists in (*into, {0: end}))
    return emitting, epsilon, ends, state_of_slot


_Into = dict[int, list[list[tuple[int, int]]]]
"""For each target, and each automaton, the pairs (source, number) of the edges into it, in order."""


def _share(into: _Into, count: int) -> _Shared:
    """Share edges among ``count`` automata. The edges of each automaton into a target keep their order."""
    sources: list[int] = []
    targets: list[int] = []
    columns: list[list[int]] = []
    for target, lists in into.items():
        keys, places = _merge([[source for source, _ in edges] for edges in lists])
        first = len(sources)
        sources += keys
        targets += [target] * len(keys)
        columns += [[-1] * count for _ in keys]
        for number, (edges, positions) in enumerate(zip(lists, places, strict=True)):
            for (_, edge), position in zip(edges, positions, strict=True):
                columns[first + position][number] = edge
    numbers = np.array(columns, dtype=np.int64).reshape(len(columns), count).T
    return _Shared(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64), numbers)


def _merge(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return a sequence that contains all sequences in order, and the positions of their items in it."""
    keys: list[int] = []
    order: list[int] = []  # items of keys
    found = []
    for sequence in sequences:
        place, items = 0, []
        for key in sequence:
            at = next((n for n in range(place, len(order)) if keys[order[n]] == key), None)
            if at is None:
                at = place
                order.insert(at, len(keys))
                keys.append(key)
            items.append(order[at])
            place = at + 1
        found.append(items)
    position = {item: n for n, item in enumerate(order)}
    return [keys[item] for item in order], [[position[item] for item in items] for items in found]


def _take(score: Tensor, numbers: Tensor) -> Tensor:
    """Return the entries (B or 1, n) of a score (B or 1, …) with numbers (B or 1, n), of which −1 stands for any."""
    rows = len(score) if len(numbers) == 1 else len(numbers)
    if not score.shape[1]:
        return score.expand(rows, 0)
    return score.expand(rows, -1).gather(1, numbers.clamp(min=0).expand(rows, -1))


def _put(values: Tensor, numbers: Tensor, score: Tensor) -> Tensor:
    """Add values (B, n) to the entries of a score with numbers (B or 1, n), of which −1 stands for none."""
    totals = values.new_zeros((len(values), score.shape[1] + 1))
    entries = torch.where(numbers < 0, score.shape[1], numbers).expand(values.shape)
    by_member = totals.scatter_add(1, entries, values)[:, :-1]
    return (by_member.sum(0, keepdim=True) if len(score) == 1 else by_member).contiguous()


AUTOMATON = AutomatonProgram()
