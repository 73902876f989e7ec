"""The sweeps of a lattice (and of DTW) by its table of moves: one program per batch element, one lane per column.

A step is a row of the grid if every move leads to a later row, else an anti-diagonal. Values of nodes stay in
registers, in the wide dtype, for as many steps as moves look back. Values of a neighboring lane are read with a
gather. Ω is computed on differences from the maximum, in θ's dtype. If the grid has more columns than a program has
lanes, it is swept in strips of columns, with one launch per strip. A strip reads the border values that an earlier
launch wrote.

A slot is one of the scores that a path can collect in a cell. There is a slot for each state (the score of its nodes),
each move, the start of each state, and the end of each state, in this order. The tape contains the values of all nodes,
(B, states, N, M). If a score does not depend on the row, its gradient is summed over rows in registers, so that a gap
score needs no tensor of the grid's size.
"""

# ruff: noqa: RUF005 (kernels cannot unpack tuples into tuples)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bellmax.backends.triton.omega import jacobian_product, smooth_argmax, smooth_max, sums_to_one
from bellmax.programs.table import Ends, Table

_BATCH, _ROWS, _COLUMNS = (tl.constexpr(bit) for bit in (4, 2, 1))


class Plan(NamedTuple):
    """Compile-time constants of a table, for which kernels are unrolled.

    A track is a pair of a state and a number dj of columns: the values of this state, dj lanes to the left, at earlier
    steps. Moves between cells read their source from a track.
    """

    states: int
    moves: tuple[tuple[int, int, int, int], ...]  # di, dj, source state, number of steps back
    into: tuple[tuple[int, ...], ...]  # for each state, the moves that lead to it, in order
    tracks: tuple[tuple[int, int], ...]  # source state and dj
    track: tuple[int, ...]  # for each move, the index of its track, or −1 for a move within a cell
    first: tuple[int, ...]  # for each track, the index of its first vector in the history; then their total number
    by_rows: bool
    starts: tuple[bool, ...]  # for each state, True if paths may start in it
    ends: tuple[int, ...]  # the states that paths may end in
    start: tuple[bool, bool]  # True if paths may start only in the first row, only in the first column
    end: tuple[bool, bool]  # True if paths may end only in the last row, only in the last column
    reach: int  # the maximum dj
    choices: tuple[int, ...]  # for each state, the index of its first candidate; then the total number of candidates
    sign: int
    omega: int = 0
    read: tuple[int, ...] = ()  # the slots that have scores, except for slots of ends
    kinds: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # dimensions of each slot's scores and of their tangents
    sums: tuple[int, ...] = ()  # for each slot, the index of its sum over rows, or −1; then the number of sums


class Cell(NamedTuple):
    """The cell (i, j) of each lane, in batch element ``batch`` of tensors (B, rows, columns)."""

    batch: Any
    i: Any
    j: Any
    rows: Any
    columns: Any
    exists: Any  # mask: the cell is in the tensors
    within: Any  # mask: the cell is within the lengths
    inside: Any  # mask: the cell is within the lengths and the band


class Region(NamedTuple):
    """The lengths of a batch element, and the half-width of its band (None for no band)."""

    rows: Any
    columns: Any
    reach: Any


def plan_of(table: Table) -> Plan:
    """Return the constants of a table. Ω and the slots are filled in later, by ``_replace``."""
    by_rows = all(move.di > 0 or move.dj == 0 for move in table.moves)
    back = [move.di if by_rows else move.di + move.dj for move in table.moves]
    depth: dict[tuple[int, int], int] = {}
    for move, steps in zip(table.moves, back, strict=True):
        if steps:
            track = move.source, move.dj
            depth[track] = max(depth.get(track, 0), steps)
    tracks = tuple(depth)
    into = tuple(tuple(n for n, m in enumerate(table.moves) if m.target == k) for k in range(table.states))
    starts = tuple(k in table.start.states for k in range(table.states))
    return Plan(
        table.states,
        tuple((m.di, m.dj, m.source, steps) for m, steps in zip(table.moves, back, strict=True)),
        into,
        tracks,
        tuple(tracks.index((m.source, m.dj)) if steps else -1 for m, steps in zip(table.moves, back, strict=True)),
        tuple(sum(list(depth.values())[:n]) for n in range(len(depth) + 1)),
        by_rows,
        starts,
        tuple(table.end.states),
        _sides(table.start),
        _sides(table.end),
        max((dj for _, dj in tracks), default=0),
        tuple(sum(len(into[k]) + starts[k] for k in range(n)) for n in range(table.states + 1)),
        table.sense,
    )


def _sides(ends: Ends) -> tuple[bool, bool]:
    """True if ends are restricted to a row, and True if they are restricted to a column."""
    return ends.place in ("corner", "row"), ends.place in ("corner", "column")


# --- tiles: a few vectors stacked along the first axis, so that each thread has all candidates of its lane


@triton.jit
def _tile(xs: tl.tuple, fill: tl.constexpr) -> tl.tensor:
    """Stack vectors to a tile (size, lanes), padded with ``fill`` to a power of two ≥ 2."""
    size: tl.constexpr = triton.next_power_of_2(max(len(xs), 2))
    tiles = xs
    for _ in tl.static_range(size - len(xs)):
        tiles = tiles + (tl.full(xs[0].shape, fill, xs[0].dtype),)
    for _ in tl.static_range(5):
        if len(tiles) > 1:
            joined: tl.tuple = ()
            for n in tl.static_range(len(tiles) // 2):
                joined = joined + (tl.join(tiles[n], tiles[n + len(tiles) // 2]),)
            tiles = joined
    tile = tl.permute(tiles[0], (1, 2, 3, 4, 5)[: len(tiles[0].shape) - 1] + (0,))
    return tl.reshape(tile, (size, xs[0].shape[0]))


@triton.jit
def _vectors(tile: tl.tensor) -> tl.tuple:
    """Split a tile into its vectors, including the padding: the inverse of :func:`_tile`."""
    tiles = (tile,)
    for _ in tl.static_range(5):
        if tiles[0].shape[0] > 1:
            even: tl.tuple = ()
            odd: tl.tuple = ()
            for n in tl.static_range(len(tiles)):
                pairs = tl.reshape(tiles[n], (tiles[n].shape[0] // 2, 2, tile.shape[1]))
                a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
                even = even + (a,)
                odd = odd + (b,)
            tiles = even + odd
    return [tl.reshape(t, (tile.shape[1],)) for t in tiles]


@triton.jit
def _shift_lanes(xs: tl.tuple, PLAN: tl.constexpr, BACK: tl.constexpr, fill: tl.constexpr) -> tl.tuple:
    """Shift vectors by the dj lanes of their tracks, to the right, or to the left if BACK; ``fill`` enters at the edge.

    There are one or more vectors for each track. If lanes are in several warps, all vectors are shifted in one gather,
    since each gather costs two barriers.
    """
    lane = tl.arange(0, xs[0].shape[0])
    tracks: tl.constexpr = len(PLAN.tracks)
    sources: tl.tuple = ()
    origins: tl.tuple = ()
    for n in tl.static_range(len(xs)):
        if PLAN.tracks[n % tracks][1] > 0:
            origin = lane + PLAN.tracks[n % tracks][1] if BACK else lane - PLAN.tracks[n % tracks][1]
            sources = sources + (xs[n],)
            origins = origins + (tl.minimum(tl.maximum(origin, 0), xs[0].shape[0] - 1),)
    shifted: tl.tuple = ()
    if len(sources) > 1 and xs[0].shape[0] > 32:
        tile = _tile(sources, 0.0)
        size: tl.constexpr = tile.shape[0] * tile.shape[1]
        index = tl.arange(0, tile.shape[0])[:, None] * tile.shape[1] + _tile(origins, 0)
        shifted = _vectors(tl.reshape(tl.gather(tl.reshape(tile, (size,)), tl.reshape(index, (size,)), 0), tile.shape))
    else:
        for n in tl.static_range(len(sources)):
            shifted = shifted + (tl.gather(sources[n], origins[n], 0),)
    results: tl.tuple = ()
    for n in tl.static_range(len(xs)):
        if PLAN.tracks[n % tracks][1] > 0:
            origin = lane + PLAN.tracks[n % tracks][1] if BACK else lane - PLAN.tracks[n % tracks][1]
            is_in_strip = (origin >= 0) & (origin < xs[0].shape[0])
            results = results + (tl.where(is_in_strip, shifted[0], fill),)
            shifted = shifted[1:]
        else:
            results = results + (xs[n],)
    return results


@triton.jit
def _copies(x: tl.tensor, N: tl.constexpr) -> tl.tuple:
    """Return a tuple of N times x."""
    return (x,) * N


@triton.jit
def _add_to(xs: tl.tuple, N: tl.constexpr, x: tl.tensor) -> tl.tuple:
    """Return the vectors xs with x added to the N-th."""
    return xs[:N] + (xs[N] + x,) + xs[N + 1 :]


# --- cells, and the scores that are read there


@triton.jit
def _region(lengths: tl.tensor, band: tl.tensor, b: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> Region:
    """Return the region of batch element b: all of the grid if ``lengths`` is None."""
    if lengths is None:
        return Region(rows, columns, None)
    else:
        n = tl.minimum(tl.load(lengths + 2 * b), rows).to(tl.int32)
        m = tl.minimum(tl.load(lengths + 2 * b + 1), columns).to(tl.int32)
        reach = tl.maximum(tl.load(band + b), 0.5) * (tl.maximum(n, m) - 1).to(band.dtype.element_ty)
        return Region(n, m, tl.where(reach == reach, reach, 0.0))  # NaN is ∞ · 0: the region is a single cell


@triton.jit
def _steps(region: Region, first: tl.tensor, PLAN: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the number of steps of the strip that begins at column ``first``."""
    width = tl.minimum(region.columns - first, BLOCK)
    steps = region.rows
    if not PLAN.by_rows:
        steps += width - 1
    return tl.where(width > 0, steps, 0)


@triton.jit
def _cell(
    p: tl.tensor, first: tl.tensor, b: tl.tensor, rows: tl.tensor, columns: tl.tensor, region: Region,
    PLAN: tl.constexpr, BLOCK: tl.constexpr,
) -> Cell:  # fmt: skip
    """Return the cells of step p in the strip that begins at column ``first``: a section of a row or anti-diagonal."""
    lane = tl.arange(0, BLOCK)
    j = first + lane
    i = p + lane * 0 if PLAN.by_rows else p - lane
    exists = (i >= 0) & (i < rows) & (j < columns)
    within = (i >= 0) & (i < region.rows) & (j < region.columns)
    inside = within
    if region.reach is not None:
        distance = i.to(tl.int64) * (region.columns - 1) - j.to(tl.int64) * (region.rows - 1)
        inside = within & (tl.abs(distance).to(region.reach.dtype) <= region.reach)
    return Cell(b, i, j, rows, columns, exists, within, inside)


@triton.jit
def _cell_offset(cell: Cell, KIND: tl.constexpr) -> tl.tensor:
    """Return the offset of a cell in a tensor with some of the dimensions batch, rows and columns, by bits of KIND."""
    offset = tl.zeros(cell.j.shape, tl.int64)
    if _BATCH & KIND:
        offset += cell.batch
    if _ROWS & KIND:
        offset = offset * cell.rows + cell.i
    if _COLUMNS & KIND:
        offset = offset * cell.columns + cell.j
    return offset


@triton.jit
def _node_offset(cell: Cell, K: tl.constexpr, DI: tl.constexpr, DJ: tl.constexpr, PLAN: tl.constexpr) -> tl.tensor:
    """Return the offset of the node of state K, DI rows and DJ columns before a cell, in a tensor of all nodes."""
    plane = (cell.batch * PLAN.states + K) * cell.rows
    return (plane + cell.i - DI) * cell.columns + cell.j - DJ


@triton.jit
def _load_source(
    nodes: tl.tensor, cell: Cell, MOVE: tl.constexpr, PLAN: tl.constexpr, mask: tl.tensor, other: tl.constexpr
) -> tl.tensor:
    """Load the entry of the node that a move into the cell comes from, or ``other`` if there is no such node."""
    exists = mask & (cell.i >= PLAN.moves[MOVE][0]) & (cell.j >= PLAN.moves[MOVE][1])
    offset = _node_offset(cell, PLAN.moves[MOVE][2], PLAN.moves[MOVE][0], PLAN.moves[MOVE][1], PLAN)
    return tl.load(nodes + offset, mask=exists, other=other)


@triton.jit
def _load_scores(arrays: tl.tuple, previous: tl.tuple, cell: Cell, region: Region, PLAN: tl.constexpr) -> tl.tuple:
    """Load the scores of the slots in PLAN.read. Scores that do not depend on the row are loaded only once.

    ``previous`` are the scores of another step, or None before the first step.
    """
    scores: tl.tuple = ()
    for n in tl.static_range(len(PLAN.read)):
        if _ROWS & PLAN.kinds[0][PLAN.read[n]]:
            pointer = arrays[PLAN.read[n]] + _cell_offset(cell, PLAN.kinds[0][PLAN.read[n]])
            scores = scores + (tl.load(pointer, mask=cell.inside, other=0.0),)
        elif previous is None:
            pointer = arrays[PLAN.read[n]] + _cell_offset(cell, PLAN.kinds[0][PLAN.read[n]])
            scores = scores + (tl.load(pointer, mask=cell.j < region.columns, other=0.0),)
        else:
            scores = scores + (previous[n],)
    return scores


@triton.jit
def _add_score(x: tl.tensor, read: tl.tuple, SLOT: tl.constexpr, PLAN: tl.constexpr) -> tl.tensor:
    """Return x plus the score of a slot, from the result of :func:`_load_scores`."""
    for n in tl.static_range(len(PLAN.read)):
        if PLAN.read[n] == SLOT:
            x += read[n].to(x.dtype) * PLAN.sign
    return x


@triton.jit
def _load_and_add(
    x: tl.tensor, arrays: tl.tuple, SLOT: tl.constexpr, cell: Cell, PLAN: tl.constexpr, OF: tl.constexpr
) -> tl.tensor:
    """Load the score of a slot (OF = 0) or its tangent (OF = 1), and add it to x."""
    if arrays[SLOT] is not None:
        pointer = arrays[SLOT] + _cell_offset(cell, PLAN.kinds[OF][SLOT])
        x += tl.load(pointer, mask=cell.inside, other=0.0).to(x.dtype) * PLAN.sign
    return x


@triton.jit
def _add_end_score(
    x: tl.tensor, arrays: tl.tuple, E: tl.constexpr, cell: Cell, PLAN: tl.constexpr, OF: tl.constexpr
) -> tl.tensor:
    """Return x of the nodes of the E-th end state plus the score (OF = 0) of ending there, or its tangent (OF = 1)."""
    return _load_and_add(x, arrays, 2 * PLAN.states + len(PLAN.moves) + PLAN.ends[E], cell, PLAN, OF)


@triton.jit
def _start_value(cell: Cell, PLAN: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Return 0 where paths may start, else −∞."""
    is_start = cell.inside
    if PLAN.start[0]:
        is_start = is_start & (cell.i == 0)
    if PLAN.start[1]:
        is_start = is_start & (cell.j == 0)
    return tl.where(is_start, 0.0, float("-inf")).to(WIDE)


# --- the smoothed max of a node


@triton.jit
def subtract_max(tile: tl.tensor, DTYPE: tl.constexpr) -> tl.tuple:
    """Return the maximum of each lane, 0 instead of −∞, and the differences from it, in θ's dtype."""
    top = tl.max(tile, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top, (tile - top[None, :]).to(DTYPE)


@triton.jit
def probabilities(tile: tl.tensor, OMEGA: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Return q = ∇max_Ω along the first axis of a tile of candidates, in θ's dtype."""
    _, r = subtract_max(tile, DTYPE)
    return sums_to_one(smooth_argmax(r, OMEGA, 0), 0)


@triton.jit
def relative_tangents(q: tl.tensor, y: tl.tensor) -> tl.tuple:
    """Return the maximum tangent y of the candidates with q > 0, a mask of lanes that have one, and the differences.

    The maximum is in y's wide dtype, the differences y − maximum are in θ's dtype, and 0 where q = 0.
    """
    top = tl.max(tl.where(q > 0, y, float("-inf")), 0)
    is_reached = top > float("-inf")
    top = tl.where(is_reached, top, 0.0)
    return top, is_reached, tl.where(q > 0, y - top[None, :], 0.0).to(q.dtype)


@triton.jit
def _candidates(tape: tl.tensor, scores: tl.tuple, cell: Cell, PLAN: tl.constexpr) -> tl.tuple:
    """Return the candidates of the nodes of all states, by the values on the tape: a start, then the moves."""
    xs: tl.tuple = ()
    for k in tl.static_range(len(PLAN.into)):
        if PLAN.starts[k]:
            x = _start_value(cell, PLAN, tape.dtype.element_ty)
            xs = xs + (_load_and_add(x, scores, PLAN.states + len(PLAN.moves) + k, cell, PLAN, 0),)
        for n in tl.static_range(len(PLAN.into[k])):
            x = _load_source(tape, cell, PLAN.into[k][n], PLAN, cell.inside, float("-inf"))
            xs = xs + (_load_and_add(x, scores, PLAN.states + PLAN.into[k][n], cell, PLAN, 0),)
    return xs


@triton.jit
def _state_probabilities(K: tl.constexpr, candidates: tl.tuple, PLAN: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Return q of the candidates of state K, a tile, from the candidates of all states."""
    tile = _tile(candidates[PLAN.choices[K] : PLAN.choices[K + 1]], float("-inf"))
    return probabilities(tile, PLAN.omega, DTYPE)


# --- forward: values, or their tangents. ``saved`` is the tensor of all nodes that a sweep writes


@triton.jit
def _at_source(
    MOVE: tl.constexpr, nodes: tl.tuple, history: tl.tuple, saved: tl.tensor, cell: Cell,
    PLAN: tl.constexpr, IS_LATER: tl.constexpr, NONE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the result of this sweep at the node that a move comes from, or NONE if there is no such node.

    It is in ``nodes`` for a move within the cell, in ``history`` for an earlier step, or in ``saved`` if an earlier
    strip (IS_LATER) has computed it.
    """
    if PLAN.track[MOVE] < 0:
        x = nodes[PLAN.moves[MOVE][2]]
    else:
        x = history[PLAN.first[PLAN.track[MOVE]] + PLAN.moves[MOVE][3] - 1]
    if IS_LATER and PLAN.moves[MOVE][1] > 0:
        is_earlier_strip = tl.arange(0, x.shape[0]) < PLAN.moves[MOVE][1]
        loaded = _load_source(saved, cell, MOVE, PLAN, is_earlier_strip & cell.inside, NONE)
        x = tl.where(is_earlier_strip, loaded, x)
    return x


@triton.jit
def _value(
    K: tl.constexpr, nodes: tl.tuple, history: tl.tuple, saved: tl.tensor, read: tl.tuple, cell: Cell,
    PLAN: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, IS_LATER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the values v of the nodes of state K, −∞ outside the band."""
    xs: tl.tuple = ()
    if PLAN.starts[K]:
        xs = xs + (_add_score(_start_value(cell, PLAN, WIDE), read, PLAN.states + len(PLAN.moves) + K, PLAN),)
    for n in tl.static_range(len(PLAN.into[K])):
        x = _at_source(PLAN.into[K][n], nodes, history, saved, cell, PLAN, IS_LATER, float("-inf"))
        xs = xs + (_add_score(x, read, PLAN.states + PLAN.into[K][n], PLAN),)
    none = tl.full(cell.j.shape, float("-inf"), WIDE)
    if len(xs) == 0:
        return none
    else:
        top, r = subtract_max(_tile(xs, float("-inf")), DTYPE)
        v = _add_score(top + smooth_max(r, PLAN.omega, 0).to(WIDE), read, K, PLAN)
        return tl.where(cell.inside, v, none)


@triton.jit
def _tangent(
    K: tl.constexpr, nodes: tl.tuple, history: tl.tuple, saved: tl.tensor, candidates: tl.tuple, z: tl.tuple,
    cell: Cell, PLAN: tl.constexpr, DTYPE: tl.constexpr, IS_LATER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the derivatives along z of the values of state K. They are 0 at nodes that no path reaches."""
    none = tl.zeros(cell.j.shape, saved.dtype.element_ty)
    ys: tl.tuple = ()
    if PLAN.starts[K]:
        ys = ys + (_load_and_add(none, z, PLAN.states + len(PLAN.moves) + K, cell, PLAN, 1),)
    for n in tl.static_range(len(PLAN.into[K])):
        y = _at_source(PLAN.into[K][n], nodes, history, saved, cell, PLAN, IS_LATER, 0.0)
        ys = ys + (_load_and_add(y, z, PLAN.states + PLAN.into[K][n], cell, PLAN, 1),)
    if len(ys) == 0:
        return none
    else:
        q = _state_probabilities(K, candidates, PLAN, DTYPE)
        top, is_reached, y = relative_tangents(q, _tile(ys, 0.0))
        v_dot = top + tl.sum(q * y, 0).to(none.dtype)
        return tl.where(is_reached, _load_and_add(v_dot, z, K, cell, PLAN, 1), none)


@triton.jit
def _push_history(history: tl.tuple, nodes: tl.tuple, PLAN: tl.constexpr, NONE: tl.constexpr) -> tl.tuple:
    """Return the history with the nodes of this step as the newest vectors, and without the oldest vectors."""
    sources: tl.tuple = ()
    for t in tl.static_range(len(PLAN.tracks)):
        sources = sources + (nodes[PLAN.tracks[t][0]],)
    shifted = _shift_lanes(sources, PLAN, False, NONE)
    pushed: tl.tuple = ()
    for t in tl.static_range(len(PLAN.tracks)):
        pushed = pushed + (shifted[t],) + history[PLAN.first[t] : PLAN.first[t + 1] - 1]
    return pushed


@triton.jit
def _store_nodes(saved: tl.tensor, nodes: tl.tuple, cell: Cell, PLAN: tl.constexpr) -> None:
    """Store the nodes of a step, also those outside the band, since later steps read them."""
    for k in tl.static_range(len(PLAN.into)):
        tl.store(saved + _node_offset(cell, k, 0, 0, PLAN), nodes[k], mask=cell.within)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def table_forward(
    value: tl.tensor, saved: tl.tensor, lengths: tl.tensor, band: tl.tensor, scores: tl.tuple,
    rows: tl.tensor, columns: tl.tensor, first: tl.tensor, PLAN: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, IS_LATER: tl.constexpr,
) -> None:  # fmt: skip
    """Write the values of all nodes, unless ``saved`` is None, and DP_Ω, if all paths end in the last cell.

    Scores are loaded one step ahead, since a load takes longer than a step.
    """
    DTYPE: tl.constexpr = value.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    region = _region(lengths, band, b, rows, columns)
    steps = _steps(region, first, PLAN, BLOCK)
    none = tl.full((BLOCK,), float("-inf"), WIDE)
    nodes: tl.tuple = _copies(none, PLAN.states)
    history = _copies(none, PLAN.first[len(PLAN.tracks)])
    next_cell = _cell(0, first, b, rows, columns, region, PLAN, BLOCK)
    next_read = _load_scores(scores, None, next_cell, region, PLAN)
    for p in range(steps):
        cell, read = next_cell, next_read
        next_cell = _cell(p + 1, first, b, rows, columns, region, PLAN, BLOCK)
        next_read = _load_scores(scores, next_read, next_cell, region, PLAN)
        nodes = ()
        for k in tl.static_range(len(PLAN.into)):
            nodes = nodes + (_value(k, nodes, history, saved, read, cell, PLAN, DTYPE, WIDE, IS_LATER),)
        if saved is not None:
            _store_nodes(saved, nodes, cell, PLAN)
        history = _push_history(history, nodes, PLAN, float("-inf"))
    if PLAN.end[0] and PLAN.end[1]:
        last = _cell(steps - 1, first, b, rows, columns, region, PLAN, BLOCK)
        xs: tl.tuple = ()
        for e in tl.static_range(len(PLAN.ends)):
            xs = xs + (_add_end_score(nodes[PLAN.ends[e]], scores, e, last, PLAN, 0),)
        if len(xs) == 1:
            total = xs[0]
        else:
            top, r = subtract_max(_tile(xs, float("-inf")), DTYPE)
            total = top + smooth_max(r, PLAN.omega, 0).to(WIDE)
        is_last = (last.i == region.rows - 1) & (last.j == region.columns - 1)
        tl.store(value + b + last.j * 0, (total * PLAN.sign).to(DTYPE), mask=is_last)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def table_tangents(
    tape: tl.tensor, saved: tl.tensor, lengths: tl.tensor, band: tl.tensor, scores: tl.tuple, z: tl.tuple,
    rows: tl.tensor, columns: tl.tensor, first: tl.tensor, PLAN: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, IS_LATER: tl.constexpr,
) -> None:  # fmt: skip
    """Write the derivatives along z of the values of all nodes to ``saved``."""
    b = tl.program_id(0).to(tl.int64)
    region = _region(lengths, band, b, rows, columns)
    history = _copies(tl.zeros((BLOCK,), tape.dtype.element_ty), PLAN.first[len(PLAN.tracks)])
    next_cell = _cell(0, first, b, rows, columns, region, PLAN, BLOCK)
    next_candidates = _candidates(tape, scores, next_cell, PLAN)
    for p in range(_steps(region, first, PLAN, BLOCK)):
        cell, candidates = next_cell, next_candidates
        next_cell = _cell(p + 1, first, b, rows, columns, region, PLAN, BLOCK)
        next_candidates = _candidates(tape, scores, next_cell, PLAN)
        nodes: tl.tuple = ()
        for k in tl.static_range(len(PLAN.into)):
            nodes = nodes + (_tangent(k, nodes, history, saved, candidates, z, cell, PLAN, DTYPE, IS_LATER),)
        _store_nodes(saved, nodes, cell, PLAN)
        history = _push_history(history, nodes, PLAN, 0.0)


# --- backward
#
# A node has a mass, the derivative of DP_Ω with respect to its value, and for Hessian products also the tangent of its
# mass. ORDERS is 1 for masses only and 2 for both. Tuples of vectors contain first all masses, then all tangents: one
# for each state, track, move or end. ``border`` is a tensor of flows that cross the border between two strips.


@triton.jit
def _load_border(border: tl.tensor, N: tl.constexpr, cell: Cell, PLAN: tl.constexpr, ORDERS: tl.constexpr) -> tl.tensor:
    """Load the flows that leave the cells of this strip by a move into the next strip.

    N is the index of the move, plus the number of moves for tangents.
    """
    dj: tl.constexpr = PLAN.moves[N % len(PLAN.moves)][1]
    i = cell.i + PLAN.moves[N % len(PLAN.moves)][0]
    column = tl.arange(0, cell.j.shape[0]) + (dj - cell.j.shape[0])
    crosses = cell.exists & (column >= 0) & (i < cell.rows) & (cell.j + dj < cell.columns)
    plane = (cell.batch * (ORDERS * len(PLAN.moves)) + N) * cell.rows
    return tl.load(border + (plane + i) * PLAN.reach + column, mask=crosses, other=0.0)


@triton.jit
def _arriving_masses(
    pending: tl.tuple, border: tl.tensor, cell: Cell, PLAN: tl.constexpr, ORDERS: tl.constexpr
) -> tl.tuple:
    """Return the masses that the nodes of each state get from later steps, and from the next strip."""
    tracks: tl.constexpr = len(PLAN.tracks)
    moves: tl.constexpr = len(PLAN.moves)
    masses = _copies(tl.zeros_like(pending[0]), ORDERS * PLAN.states)
    arriving: tl.tuple = ()
    for n in tl.static_range(ORDERS * tracks):
        arriving = arriving + (pending[n // tracks * PLAN.first[tracks] + PLAN.first[n % tracks]],)
    arriving = _shift_lanes(arriving, PLAN, True, 0.0)
    for n in tl.static_range(ORDERS * tracks):
        masses = _add_to(masses, n // tracks * PLAN.states + PLAN.tracks[n % tracks][0], arriving[n])
    if border is not None:
        for n in tl.static_range(ORDERS * moves):
            if PLAN.moves[n % moves][1] > 0:
                x = _load_border(border, n, cell, PLAN, ORDERS)
                masses = _add_to(masses, n // moves * PLAN.states + PLAN.moves[n % moves][2], x)
    return masses


@triton.jit
def _pop_pending(pending: tl.tuple, PLAN: tl.constexpr, ORDERS: tl.constexpr) -> tl.tuple:
    """Return the pending flows of each track without the flows of this step, with zeros for the farthest step."""
    tracks: tl.constexpr = len(PLAN.tracks)
    depth: tl.constexpr = PLAN.first[tracks]
    remaining: tl.tuple = ()
    for n in tl.static_range(ORDERS * tracks):
        track = pending[n // tracks * depth + PLAN.first[n % tracks] : n // tracks * depth + PLAN.first[n % tracks + 1]]
        remaining = remaining + track[1:] + (tl.zeros_like(pending[0]),)
    return remaining


@triton.jit
def _store_gradient(
    gradients: tl.tuple, sums: tl.tuple, SLOT: tl.constexpr, x: tl.tensor, cell: Cell, PLAN: tl.constexpr
) -> tl.tuple:
    """Store the gradient x of a slot's scores in a cell, or add it to the slot's sum over rows. Return the sums."""
    if gradients[SLOT] is not None:
        if PLAN.sums[SLOT] < 0:
            tl.store(gradients[SLOT] + _cell_offset(cell, 7), x, mask=cell.exists)
        else:
            sums = _add_to(sums, PLAN.sums[SLOT], x)
    return sums


@triton.jit
def _corner_masses(
    tape: tl.tensor, tangents: tl.tensor, seed: tl.tensor, scores: tl.tuple, z: tl.tuple, cell: Cell,
    PLAN: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the masses of the ends in the last cell, which is the same in all lanes, times the seed."""
    xs: tl.tuple = ()
    ys: tl.tuple = ()
    for e in tl.static_range(len(PLAN.ends)):
        offset = _node_offset(cell, PLAN.ends[e], 0, 0, PLAN)
        x = tl.load(tape + offset, mask=cell.inside, other=float("-inf"))
        xs = xs + (_add_end_score(x, scores, e, cell, PLAN, 0),)
        if tangents is not None:
            y = tl.load(tangents + offset, mask=cell.inside, other=0.0)
            ys = ys + (_add_end_score(y, z, e, cell, PLAN, 1),)
    q = probabilities(_tile(xs, float("-inf")), PLAN.omega, seed.dtype)
    masses = _vectors(q * seed)[: len(xs)]
    if tangents is not None:
        _, _, y = relative_tangents(q, _tile(ys, 0.0))
        masses = masses + _vectors(jacobian_product(q, y, PLAN.omega, 0) * seed)[: len(xs)]
    return masses


@triton.jit
def _add_end_masses(
    masses: tl.tuple, corner: tl.tuple, ends: tl.tensor, sums: tl.tuple, gradients: tl.tuple, cell: Cell,
    region: Region, PLAN: tl.constexpr, ORDERS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Add the masses of ends in these cells, and store them as gradients of the end scores. Return masses and sums.

    The masses of ends are in ``corner``, or in the tensor ``ends`` if paths can end in several cells.
    """
    count: tl.constexpr = len(PLAN.ends)
    first_slot: tl.constexpr = 2 * PLAN.states + len(PLAN.moves)
    is_end = cell.inside
    if PLAN.end[0]:
        is_end = is_end & (cell.i == region.rows - 1)
    if PLAN.end[1]:
        is_end = is_end & (cell.j == region.columns - 1)
    for n in tl.static_range(ORDERS * count):
        if ends is None:
            x = tl.where(is_end, corner[n], 0.0)
        else:
            offset = tl.zeros(cell.j.shape, tl.int64) + cell.batch * (ORDERS * count) + n
            if not PLAN.end[0]:
                offset = offset * cell.rows + cell.i
            if not PLAN.end[1]:
                offset = offset * cell.columns + cell.j
            x = tl.load(ends + offset, mask=is_end, other=0.0)
        masses = _add_to(masses, n // count * PLAN.states + PLAN.ends[n % count], x)
        if n // count == ORDERS - 1:
            sums = _store_gradient(gradients, sums, first_slot + PLAN.ends[n % count], x, cell, PLAN)
    return masses, sums


@triton.jit
def _probability_tangents(
    K: tl.constexpr, q: tl.tensor, tangents: tl.tensor, z: tl.tuple, cell: Cell, PLAN: tl.constexpr
) -> tl.tensor:
    """Return the derivative along z of q, the probabilities of the candidates of state K: a tile."""
    ys: tl.tuple = ()
    if PLAN.starts[K]:
        none = tl.zeros(cell.j.shape, tangents.dtype.element_ty)
        ys = ys + (_load_and_add(none, z, PLAN.states + len(PLAN.moves) + K, cell, PLAN, 1),)
    for n in tl.static_range(len(PLAN.into[K])):
        y = _load_source(tangents, cell, PLAN.into[K][n], PLAN, cell.inside, 0.0)
        ys = ys + (_load_and_add(y, z, PLAN.states + PLAN.into[K][n], cell, PLAN, 1),)
    _, _, y = relative_tangents(q, _tile(ys, 0.0))
    return jacobian_product(q, y, PLAN.omega, 0)


@triton.jit
def _distribute(
    K: tl.constexpr, masses: tl.tuple, pending: tl.tuple, sums: tl.tuple, q: tl.tensor, q_dot: tl.tensor,
    border: tl.tensor, gradients: tl.tuple, cell: Cell, PLAN: tl.constexpr, ORDERS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Distribute the masses of state K over its candidates, by their probabilities q. Return masses, pending and sums.

    The flow of each move goes to its source, and is the gradient of the move's score.
    """
    starts: tl.constexpr = 1 if PLAN.starts[K] else 0
    qs = _vectors(q)
    q_dots = _vectors(q_dot)
    for n in tl.static_range(starts + len(PLAN.into[K])):
        flows: tl.tuple = (qs[n] * masses[K],)
        if ORDERS == 2:
            flows = flows + (q_dots[n] * masses[K] + qs[n] * masses[PLAN.states + K],)
        gradient = flows[ORDERS - 1]
        if n < starts:
            sums = _store_gradient(gradients, sums, PLAN.states + len(PLAN.moves) + K, gradient, cell, PLAN)
        else:
            sums = _store_gradient(gradients, sums, PLAN.states + PLAN.into[K][n - starts], gradient, cell, PLAN)
            masses, pending = _send(PLAN.into[K][n - starts], masses, pending, flows, border, cell, PLAN, ORDERS)
    return masses, pending, sums


@triton.jit
def _send(
    MOVE: tl.constexpr, masses: tl.tuple, pending: tl.tuple, flows: tl.tuple, border: tl.tensor, cell: Cell,
    PLAN: tl.constexpr, ORDERS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Add the flow of a move to the mass of its source: in this cell, at an earlier step, or in the previous strip."""
    depth: tl.constexpr = PLAN.first[len(PLAN.tracks)]
    index: tl.constexpr = PLAN.first[PLAN.track[MOVE]] + PLAN.moves[MOVE][3] - 1
    for order in tl.static_range(ORDERS):
        if PLAN.track[MOVE] < 0:
            masses = _add_to(masses, order * PLAN.states + PLAN.moves[MOVE][2], flows[order])
        else:
            pending = _add_to(pending, order * depth + index, flows[order])
        if border is not None and PLAN.moves[MOVE][1] > 0:
            lane = tl.arange(0, cell.j.shape[0])
            plane = (cell.batch * ORDERS + order) * len(PLAN.moves) + MOVE
            offset = (plane * cell.rows + cell.i) * PLAN.reach + lane
            tl.store(border + offset, flows[order], mask=cell.exists & (lane < PLAN.moves[MOVE][1]))
    return masses, pending


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def table_backward(
    tape: tl.tensor, tangents: tl.tensor, seed: tl.tensor, ends: tl.tensor, border: tl.tensor,
    previous_border: tl.tensor, lengths: tl.tensor, band: tl.tensor, scores: tl.tuple, z: tl.tuple,
    gradients: tl.tuple, rows: tl.tensor, columns: tl.tensor, first: tl.tensor,
    PLAN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write, for each slot, the expected path times the seed or, with ``tangents``, the Hessian product.

    ``ends`` are the masses of ends, None if all paths end in the last cell. The launch reads ``border``, which the
    launch of the next strip wrote, and writes ``previous_border`` for the previous strip. They are None at the edges.
    """
    ORDERS: tl.constexpr = 1 if tangents is None else 2
    DTYPE: tl.constexpr = seed.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    region = _region(lengths, band, b, rows, columns)
    corner = None
    if ends is None:
        zero = tl.zeros((BLOCK,), tl.int32)
        exists = (zero < region.rows) & (zero < region.columns)
        last = Cell(b, zero + region.rows - 1, zero + region.columns - 1, rows, columns, exists, exists, exists)
        corner = _corner_masses(tape, tangents, tl.load(seed + b), scores, z, last, PLAN)
    none = tl.zeros((BLOCK,), DTYPE)
    pending = _copies(none, ORDERS * PLAN.first[len(PLAN.tracks)])
    sums = _copies(none, PLAN.sums[len(PLAN.sums) - 1])
    steps = _steps(Region(rows, columns, None), first, PLAN, BLOCK)
    next_cell = _cell(steps - 1, first, b, rows, columns, region, PLAN, BLOCK)
    next_candidates = _candidates(tape, scores, next_cell, PLAN)
    for n in range(steps):
        cell, candidates = next_cell, next_candidates
        next_cell = _cell(steps - 2 - n, first, b, rows, columns, region, PLAN, BLOCK)
        next_candidates = _candidates(tape, scores, next_cell, PLAN)
        masses = _arriving_masses(pending, border, cell, PLAN, ORDERS)
        pending = _pop_pending(pending, PLAN, ORDERS)
        masses, sums = _add_end_masses(masses, corner, ends, sums, gradients, cell, region, PLAN, ORDERS)
        for k in tl.static_range(len(PLAN.into) - 1, -1, -1):
            sums = _store_gradient(gradients, sums, k, masses[(ORDERS - 1) * PLAN.states + k], cell, PLAN)
            if PLAN.choices[k] < PLAN.choices[k + 1]:
                q = _state_probabilities(k, candidates, PLAN, DTYPE)
                q_dot = q
                if tangents is not None:
                    q_dot = _probability_tangents(k, q, tangents, z, cell, PLAN)
                masses, pending, sums = _distribute(
                    k, masses, pending, sums, q, q_dot, previous_border, gradients, cell, PLAN, ORDERS
                )
    j = (first + tl.arange(0, BLOCK)).to(tl.int64)
    for slot in tl.static_range(len(PLAN.sums) - 1):
        if PLAN.sums[slot] >= 0:
            tl.store(gradients[slot] + b * columns + j, sums[PLAN.sums[slot]], mask=j < columns)
