"""The sweeps of a lattice by its table of moves, DTW among them: a program a member of the batch, a lane a column.

A step is a row where every move leads to a later one, else an anti-diagonal. Values of nodes stay in registers, in the
wide dtype, as far back as moves look; a neighbour's comes by a gather. Ω sees differences, in θ's dtype. More columns
than a program has lanes are swept in strips, a launch each, which read what the launch before wrote at their edge.

The tape is the values of all nodes, (B, states, N, M). Results for cells come as sums over rows where scores do not
depend on these, so that a gap's penalty needs no tensor of the grid's size.
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
    """A table as kernels unroll it: constants, all of them."""

    states: int
    moves: tuple[tuple[int, int, int, int], ...]  # di, dj, source, how many steps back
    into: tuple[tuple[int, ...], ...]  # by state, the moves that lead there, in order
    tracks: tuple[tuple[int, int], ...]  # source and dj of moves between cells: what they look back to
    track: tuple[int, ...]  # of each move; −1 within a cell
    first: tuple[int, ...]  # of each track, where its vectors of earlier steps are; then how many there are in all
    by_rows: bool
    starts: tuple[bool, ...]  # by state
    ends: tuple[int, ...]  # states
    start: tuple[bool, bool]  # whether in the first row, in the first column
    end: tuple[bool, bool]  # whether in the last row, in the last column
    reach: int  # how many columns a move goes, at most
    choices: tuple[int, ...]  # by state, where what leads there is among all that leads anywhere; then how much that is
    sign: int
    omega: int = 0
    read: tuple[int, ...] = ()  # slots with scores, but those of ends
    kinds: tuple[tuple[int, ...], tuple[int, ...]] = (
        (),
        (),
    )  # by slot, what scores, and their relative_tangents, depend on
    sums: tuple[int, ...] = ()  # by slot, which sum over rows its gradient is, or −1; then how many there are


class Cell(NamedTuple):
    """A cell for each lane, of member ``batch`` of tensors with so many rows and columns."""

    batch: Any
    i: Any
    j: Any
    rows: Any
    columns: Any
    exists: Any  # in the tensors
    within: Any  # the lengths
    inside: Any  # the lengths and the band


class Region(NamedTuple):
    """Lengths of a member of the batch, and how far off the diagonal it goes."""

    rows: Any
    columns: Any
    reach: Any


def plan_of(table: Table) -> Plan:
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
    return ends.place in ("corner", "row"), ends.place in ("corner", "column")


# --- tiles of a few vectors, along the first axis: so each thread has all that its lane chooses from


@triton.jit
def _tile(xs: tl.tuple, fill: tl.constexpr) -> tl.tensor:
    """(two, or a greater power of two, lanes)."""
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
    """The transpose of :func:`_tile`, with what it filled."""
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
def _shifted(xs: tl.tuple, PLAN: tl.constexpr, BACK: tl.constexpr, fill: tl.constexpr) -> tl.tuple:
    """A vector for each track, or several times as many, as seen dj lanes on, or dj lanes back; ``fill`` at the edge.

    In one gather, where lanes are in several warps: each costs two barriers.
    """
    lane = tl.arange(0, xs[0].shape[0])
    tracks: tl.constexpr = len(PLAN.tracks)
    moving: tl.tuple = ()
    places: tl.tuple = ()
    for n in tl.static_range(len(xs)):
        if PLAN.tracks[n % tracks][1] > 0:
            place = lane + PLAN.tracks[n % tracks][1] if BACK else lane - PLAN.tracks[n % tracks][1]
            moving = moving + (xs[n],)
            places = places + (tl.minimum(tl.maximum(place, 0), xs[0].shape[0] - 1),)
    moved: tl.tuple = ()
    if len(moving) > 1 and xs[0].shape[0] > 32:
        tile = _tile(moving, 0.0)
        size: tl.constexpr = tile.shape[0] * tile.shape[1]
        at = tl.arange(0, tile.shape[0])[:, None] * tile.shape[1] + _tile(places, 0)
        moved = _vectors(tl.reshape(tl.gather(tl.reshape(tile, (size,)), tl.reshape(at, (size,)), 0), tile.shape))
    else:
        for n in tl.static_range(len(moving)):
            moved = moved + (tl.gather(moving[n], places[n], 0),)
    found: tl.tuple = ()
    for n in tl.static_range(len(xs)):
        if PLAN.tracks[n % tracks][1] > 0:
            place = lane + PLAN.tracks[n % tracks][1] if BACK else lane - PLAN.tracks[n % tracks][1]
            is_here = (place >= 0) & (place < xs[0].shape[0])
            found = found + (tl.where(is_here, moved[0], fill),)
            moved = moved[1:]
        else:
            found = found + (xs[n],)
    return found


@triton.jit
def _copies(x: tl.tensor, N: tl.constexpr) -> tl.tuple:
    return (x,) * N


@triton.jit
def _added(xs: tl.tuple, N: tl.constexpr, x: tl.tensor) -> tl.tuple:
    """The vectors, with x added to one of them."""
    return xs[:N] + (xs[N] + x,) + xs[N + 1 :]


# --- cells, and what is read at them


@triton.jit
def _region(lengths: tl.tensor, band: tl.tensor, b: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> Region:
    if lengths is None:
        return Region(rows, columns, None)
    else:
        n = tl.minimum(tl.load(lengths + 2 * b), rows).to(tl.int32)
        m = tl.minimum(tl.load(lengths + 2 * b + 1), columns).to(tl.int32)
        reach = tl.maximum(tl.load(band + b), 0.5) * (tl.maximum(n, m) - 1).to(band.dtype.element_ty)
        return Region(n, m, tl.where(reach == reach, reach, 0.0))  # ∞ · 0: a single cell


@triton.jit
def _steps(region: Region, first: tl.tensor, PLAN: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """How many there are in the strip that begins at a column."""
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
    """The cells of a step: those of a row, or of an anti-diagonal of a strip."""
    lane = tl.arange(0, BLOCK)
    j = first + lane
    i = p + lane * 0 if PLAN.by_rows else p - lane
    exists = (i >= 0) & (i < rows) & (j < columns)
    within = (i >= 0) & (i < region.rows) & (j < region.columns)
    inside = within
    if region.reach is not None:
        off = i.to(tl.int64) * (region.columns - 1) - j.to(tl.int64) * (region.rows - 1)
        inside = within & (tl.abs(off).to(region.reach.dtype) <= region.reach)
    return Cell(b, i, j, rows, columns, exists, within, inside)


@triton.jit
def _at(cell: Cell, KIND: tl.constexpr) -> tl.tensor:
    """Where the entry of a cell is, in a tensor that has a batch, rows, columns or not."""
    at = tl.zeros(cell.j.shape, tl.int64)
    if _BATCH & KIND:
        at += cell.batch
    if _ROWS & KIND:
        at = at * cell.rows + cell.i
    if _COLUMNS & KIND:
        at = at * cell.columns + cell.j
    return at


@triton.jit
def _at_node(cell: Cell, K: tl.constexpr, DI: tl.constexpr, DJ: tl.constexpr, PLAN: tl.constexpr) -> tl.tensor:
    """Where the node of a state is among all nodes, DI rows and DJ columns before a cell."""
    plane = (cell.batch * PLAN.states + K) * cell.rows
    return (plane + cell.i - DI) * cell.columns + cell.j - DJ


@triton.jit
def _source(
    nodes: tl.tensor, cell: Cell, MOVE: tl.constexpr, PLAN: tl.constexpr, mask: tl.tensor, other: tl.constexpr
) -> tl.tensor:
    """What was kept of the node where a move starts."""
    exists = mask & (cell.i >= PLAN.moves[MOVE][0]) & (cell.j >= PLAN.moves[MOVE][1])
    at = _at_node(cell, PLAN.moves[MOVE][2], PLAN.moves[MOVE][0], PLAN.moves[MOVE][1], PLAN)
    return tl.load(nodes + at, mask=exists, other=other)


@triton.jit
def _read(arrays: tl.tuple, before: tl.tuple, cell: Cell, region: Region, PLAN: tl.constexpr) -> tl.tuple:
    """The scores of slots, but those of ends. What is the same in every row is read once, before the first step."""
    found: tl.tuple = ()
    for n in tl.static_range(len(PLAN.read)):
        if _ROWS & PLAN.kinds[0][PLAN.read[n]]:
            at = arrays[PLAN.read[n]] + _at(cell, PLAN.kinds[0][PLAN.read[n]])
            found = found + (tl.load(at, mask=cell.inside, other=0.0),)
        elif before is None:
            at = arrays[PLAN.read[n]] + _at(cell, PLAN.kinds[0][PLAN.read[n]])
            found = found + (tl.load(at, mask=cell.j < region.columns, other=0.0),)
        else:
            found = found + (before[n],)
    return found


@triton.jit
def _with(x: tl.tensor, read: tl.tuple, SLOT: tl.constexpr, PLAN: tl.constexpr) -> tl.tensor:
    """x and the score of a slot."""
    for n in tl.static_range(len(PLAN.read)):
        if PLAN.read[n] == SLOT:
            x += read[n].to(x.dtype) * PLAN.sign
    return x


@triton.jit
def _plus(
    x: tl.tensor, arrays: tl.tuple, SLOT: tl.constexpr, cell: Cell, PLAN: tl.constexpr, OF: tl.constexpr
) -> tl.tensor:
    """x and the score of a slot or, OF 1, its change."""
    if arrays[SLOT] is not None:
        at = arrays[SLOT] + _at(cell, PLAN.kinds[OF][SLOT])
        x += tl.load(at, mask=cell.inside, other=0.0).to(x.dtype) * PLAN.sign
    return x


@triton.jit
def _end_score(
    x: tl.tensor, arrays: tl.tuple, E: tl.constexpr, cell: Cell, PLAN: tl.constexpr, OF: tl.constexpr
) -> tl.tensor:
    """x of the nodes of an end's state, and the score of the end or its change."""
    return _plus(x, arrays, 2 * PLAN.states + len(PLAN.moves) + PLAN.ends[E], cell, PLAN, OF)


@triton.jit
def _at_start(cell: Cell, PLAN: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """0 where paths may start, else −∞."""
    here = cell.inside
    if PLAN.start[0]:
        here = here & (cell.i == 0)
    if PLAN.start[1]:
        here = here & (cell.j == 0)
    return tl.where(here, 0.0, float("-inf")).to(WIDE)


# --- a node


@triton.jit
def subtract_max(tile: tl.tensor, DTYPE: tl.constexpr) -> tl.tuple:
    """The greatest of each lane, 0 where there is none, and the differences from it, in θ's dtype."""
    top = tl.max(tile, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top, (tile - top[None, :]).to(DTYPE)


@triton.jit
def probabilities(tile: tl.tensor, OMEGA: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """q of what is along the first axis."""
    _, r = subtract_max(tile, DTYPE)
    return sums_to_one(smooth_argmax(r, OMEGA, 0), 0)


@triton.jit
def relative_tangents(q: tl.tensor, y: tl.tensor) -> tl.tuple:
    """The greatest change of what has a share, whether anything has, and the differences from it, in θ's dtype."""
    top = tl.max(tl.where(q > 0, y, float("-inf")), 0)
    reached = top > float("-inf")
    top = tl.where(reached, top, 0.0)
    return top, reached, tl.where(q > 0, y - top[None, :], 0.0).to(q.dtype)


@triton.jit
def _choices(tape: tl.tensor, scores: tl.tuple, cell: Cell, PLAN: tl.constexpr) -> tl.tuple:
    """Return the candidates of the nodes of all states, by the values on the tape: a start, then the moves."""
    xs: tl.tuple = ()
    for k in tl.static_range(len(PLAN.into)):
        if PLAN.starts[k]:
            x = _at_start(cell, PLAN, tape.dtype.element_ty)
            xs = xs + (_plus(x, scores, PLAN.states + len(PLAN.moves) + k, cell, PLAN, 0),)
        for n in tl.static_range(len(PLAN.into[k])):
            x = _source(tape, cell, PLAN.into[k][n], PLAN, cell.inside, float("-inf"))
            xs = xs + (_plus(x, scores, PLAN.states + PLAN.into[k][n], cell, PLAN, 0),)
    return xs


@triton.jit
def _shares(K: tl.constexpr, choices: tl.tuple, PLAN: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """q of what leads into a state: a tile."""
    return probabilities(_tile(choices[PLAN.choices[K] : PLAN.choices[K + 1]], float("-inf")), PLAN.omega, DTYPE)


# --- forward: values, or their tangents


@triton.jit
def _looked_back(
    MOVE: tl.constexpr, nodes: tl.tuple, history: tl.tuple, kept: tl.tensor, cell: Cell,
    PLAN: tl.constexpr, IS_LATER: tl.constexpr, NONE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What a sweep found at the node where a move starts, NONE if there is no such node."""
    if PLAN.track[MOVE] < 0:
        x = nodes[PLAN.moves[MOVE][2]]
    else:
        x = history[PLAN.first[PLAN.track[MOVE]] + PLAN.moves[MOVE][3] - 1]
    if IS_LATER and PLAN.moves[MOVE][1] > 0:  # the strip before found it
        beyond = tl.arange(0, x.shape[0]) < PLAN.moves[MOVE][1]
        x = tl.where(beyond, _source(kept, cell, MOVE, PLAN, beyond & cell.inside, NONE), x)
    return x


@triton.jit
def _value(
    K: tl.constexpr, nodes: tl.tuple, history: tl.tuple, kept: tl.tensor, read: tl.tuple, cell: Cell,
    PLAN: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, IS_LATER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """v of the nodes of a state."""
    xs: tl.tuple = ()
    if PLAN.starts[K]:
        xs = xs + (_with(_at_start(cell, PLAN, WIDE), read, PLAN.states + len(PLAN.moves) + K, PLAN),)
    for n in tl.static_range(len(PLAN.into[K])):
        x = _looked_back(PLAN.into[K][n], nodes, history, kept, cell, PLAN, IS_LATER, float("-inf"))
        xs = xs + (_with(x, read, PLAN.states + PLAN.into[K][n], PLAN),)
    none = tl.full(cell.j.shape, float("-inf"), WIDE)
    if len(xs) == 0:
        return none
    else:
        top, r = subtract_max(_tile(xs, float("-inf")), DTYPE)
        v = _with(top + smooth_max(r, PLAN.omega, 0).to(WIDE), read, K, PLAN)
        return tl.where(cell.inside, v, none)


@triton.jit
def _tangent(
    K: tl.constexpr, nodes: tl.tuple, history: tl.tuple, kept: tl.tensor, choices: tl.tuple, z: tl.tuple, cell: Cell,
    PLAN: tl.constexpr, DTYPE: tl.constexpr, IS_LATER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The change of v of the nodes of a state for a change z of the scores; 0 where no path leads."""
    none = tl.zeros(cell.j.shape, kept.dtype.element_ty)
    ys: tl.tuple = ()
    if PLAN.starts[K]:
        ys = ys + (_plus(none, z, PLAN.states + len(PLAN.moves) + K, cell, PLAN, 1),)
    for n in tl.static_range(len(PLAN.into[K])):
        y = _looked_back(PLAN.into[K][n], nodes, history, kept, cell, PLAN, IS_LATER, 0.0)
        ys = ys + (_plus(y, z, PLAN.states + PLAN.into[K][n], cell, PLAN, 1),)
    if len(ys) == 0:
        return none
    else:
        q = _shares(K, choices, PLAN, DTYPE)
        top, reached, y = relative_tangents(q, _tile(ys, 0.0))
        return tl.where(reached, _plus(top + tl.sum(q * y, 0).to(none.dtype), z, K, cell, PLAN, 1), none)


@triton.jit
def _remembered(history: tl.tuple, nodes: tl.tuple, PLAN: tl.constexpr, NONE: tl.constexpr) -> tl.tuple:
    """The vectors that later steps look back to: those of this step and, but for the oldest, of those before."""
    sources: tl.tuple = ()
    for t in tl.static_range(len(PLAN.tracks)):
        sources = sources + (nodes[PLAN.tracks[t][0]],)
    moved = _shifted(sources, PLAN, False, NONE)
    found: tl.tuple = ()
    for t in tl.static_range(len(PLAN.tracks)):
        found = found + (moved[t],) + history[PLAN.first[t] : PLAN.first[t + 1] - 1]
    return found


@triton.jit
def _keep(kept: tl.tensor, nodes: tl.tuple, cell: Cell, PLAN: tl.constexpr) -> None:
    """Write what was found at nodes; those outside the band too, which later ones look back to."""
    for k in tl.static_range(len(PLAN.into)):
        tl.store(kept + _at_node(cell, k, 0, 0, PLAN), nodes[k], mask=cell.within)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def table_forward(
    value: tl.tensor, kept: tl.tensor, lengths: tl.tensor, band: tl.tensor, scores: tl.tuple,
    rows: tl.tensor, columns: tl.tensor, first: tl.tensor, PLAN: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, IS_LATER: tl.constexpr,
) -> None:  # fmt: skip
    """The values of nodes, unless ``kept`` is None, and the value of the whole, if paths end in a corner.

    Scores are read a step ahead: reading takes longer than a step.
    """
    DTYPE: tl.constexpr = value.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    region = _region(lengths, band, b, rows, columns)
    steps = _steps(region, first, PLAN, BLOCK)
    none = tl.full((BLOCK,), float("-inf"), WIDE)
    nodes: tl.tuple = _copies(none, PLAN.states)
    history = _copies(none, PLAN.first[len(PLAN.tracks)])
    following = _cell(0, first, b, rows, columns, region, PLAN, BLOCK)
    ahead = _read(scores, None, following, region, PLAN)
    for p in range(steps):
        cell, read = following, ahead
        following = _cell(p + 1, first, b, rows, columns, region, PLAN, BLOCK)
        ahead = _read(scores, ahead, following, region, PLAN)
        nodes = ()
        for k in tl.static_range(len(PLAN.into)):
            nodes = nodes + (_value(k, nodes, history, kept, read, cell, PLAN, DTYPE, WIDE, IS_LATER),)
        if kept is not None:
            _keep(kept, nodes, cell, PLAN)
        history = _remembered(history, nodes, PLAN, float("-inf"))
    if PLAN.end[0] and PLAN.end[1]:
        last = _cell(steps - 1, first, b, rows, columns, region, PLAN, BLOCK)
        xs: tl.tuple = ()
        for e in tl.static_range(len(PLAN.ends)):
            xs = xs + (_end_score(nodes[PLAN.ends[e]], scores, e, last, PLAN, 0),)
        if len(xs) == 1:
            found = xs[0]
        else:
            top, r = subtract_max(_tile(xs, float("-inf")), DTYPE)
            found = top + smooth_max(r, PLAN.omega, 0).to(WIDE)
        is_last = (last.i == region.rows - 1) & (last.j == region.columns - 1)
        tl.store(value + b + last.j * 0, (found * PLAN.sign).to(DTYPE), mask=is_last)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def table_tangents(
    tape: tl.tensor, kept: tl.tensor, lengths: tl.tensor, band: tl.tensor, scores: tl.tuple, z: tl.tuple,
    rows: tl.tensor, columns: tl.tensor, first: tl.tensor, PLAN: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, IS_LATER: tl.constexpr,
) -> None:  # fmt: skip
    """The change of the values of nodes for a change z of the scores."""
    b = tl.program_id(0).to(tl.int64)
    region = _region(lengths, band, b, rows, columns)
    history = _copies(tl.zeros((BLOCK,), tape.dtype.element_ty), PLAN.first[len(PLAN.tracks)])
    following = _cell(0, first, b, rows, columns, region, PLAN, BLOCK)
    ahead = _choices(tape, scores, following, PLAN)
    for p in range(_steps(region, first, PLAN, BLOCK)):
        cell, choices = following, ahead
        following = _cell(p + 1, first, b, rows, columns, region, PLAN, BLOCK)
        ahead = _choices(tape, scores, following, PLAN)
        nodes: tl.tuple = ()
        for k in tl.static_range(len(PLAN.into)):
            nodes = nodes + (_tangent(k, nodes, history, kept, choices, z, cell, PLAN, DTYPE, IS_LATER),)
        _keep(kept, nodes, cell, PLAN)
        history = _remembered(history, nodes, PLAN, 0.0)


# --- backward: mass, or mass and its tangent, the parts of what nodes hold


@triton.jit
def _from_edge(edge: tl.tensor, N: tl.constexpr, cell: Cell, PLAN: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """What a move from the nodes of a strip gets from the strip behind, part by part, moves in each."""
    dj: tl.constexpr = PLAN.moves[N % len(PLAN.moves)][1]
    i = cell.i + PLAN.moves[N % len(PLAN.moves)][0]
    beyond = tl.arange(0, cell.j.shape[0]) + (dj - cell.j.shape[0])
    has_one = cell.exists & (beyond >= 0) & (i < cell.rows) & (cell.j + dj < cell.columns)
    plane = (cell.batch * (PARTS * len(PLAN.moves)) + N) * cell.rows
    return tl.load(edge + (plane + i) * PLAN.reach + beyond, mask=has_one, other=0.0)


@triton.jit
def _arrivals(pending: tl.tuple, edge: tl.tensor, cell: Cell, PLAN: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    """What reaches the nodes of each state from later steps, part by part."""
    tracks: tl.constexpr = len(PLAN.tracks)
    moves: tl.constexpr = len(PLAN.moves)
    masses = _copies(tl.zeros_like(pending[0]), PARTS * PLAN.states)
    due: tl.tuple = ()
    for n in tl.static_range(PARTS * tracks):
        due = due + (pending[n // tracks * PLAN.first[tracks] + PLAN.first[n % tracks]],)
    due = _shifted(due, PLAN, True, 0.0)
    for n in tl.static_range(PARTS * tracks):
        masses = _added(masses, n // tracks * PLAN.states + PLAN.tracks[n % tracks][0], due[n])
    if edge is not None:
        for n in tl.static_range(PARTS * moves):
            if PLAN.moves[n % moves][1] > 0:
                x = _from_edge(edge, n, cell, PLAN, PARTS)
                masses = _added(masses, n // moves * PLAN.states + PLAN.moves[n % moves][2], x)
    return masses


@triton.jit
def _advanced(pending: tl.tuple, PLAN: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    """What waits for earlier steps, a step on."""
    tracks: tl.constexpr = len(PLAN.tracks)
    depth: tl.constexpr = PLAN.first[tracks]
    found: tl.tuple = ()
    for n in tl.static_range(PARTS * tracks):
        own = pending[n // tracks * depth + PLAN.first[n % tracks] : n // tracks * depth + PLAN.first[n % tracks + 1]]
        found = found + own[1:] + (tl.zeros_like(pending[0]),)
    return found


@triton.jit
def _paid(
    gradients: tl.tuple, sums: tl.tuple, SLOT: tl.constexpr, x: tl.tensor, cell: Cell, PLAN: tl.constexpr
) -> tl.tuple:
    """Write what a slot gets, or add it to a sum over rows."""
    if gradients[SLOT] is not None:
        if PLAN.sums[SLOT] < 0:
            tl.store(gradients[SLOT] + _at(cell, 7), x, mask=cell.exists)
        else:
            sums = _added(sums, PLAN.sums[SLOT], x)
    return sums


@triton.jit
def _corner_masses(
    tape: tl.tensor, tangents: tl.tensor, seed: tl.tensor, scores: tl.tuple, z: tl.tuple, cell: Cell,
    PLAN: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """What ends in a corner cell, the same in all lanes, hold of the seed: part by part, ends in each."""
    xs: tl.tuple = ()
    ys: tl.tuple = ()
    for e in tl.static_range(len(PLAN.ends)):
        at = _at_node(cell, PLAN.ends[e], 0, 0, PLAN)
        x = tl.load(tape + at, mask=cell.inside, other=float("-inf"))
        xs = xs + (_end_score(x, scores, e, cell, PLAN, 0),)
        if tangents is not None:
            y = tl.load(tangents + at, mask=cell.inside, other=0.0)
            ys = ys + (_end_score(y, z, e, cell, PLAN, 1),)
    q = probabilities(_tile(xs, float("-inf")), PLAN.omega, seed.dtype)
    found = _vectors(q * seed)[: len(xs)]
    if tangents is not None:
        _, _, y = relative_tangents(q, _tile(ys, 0.0))
        found = found + _vectors(jacobian_product(q, y, PLAN.omega, 0) * seed)[: len(xs)]
    return found


@triton.jit
def _ending(
    masses: tl.tuple, corner: tl.tuple, ends: tl.tensor, sums: tl.tuple, gradients: tl.tuple, cell: Cell,
    region: Region, PLAN: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Masses, with those of the ends, and what the scores of these get."""
    count: tl.constexpr = len(PLAN.ends)
    here = cell.inside
    if PLAN.end[0]:
        here = here & (cell.i == region.rows - 1)
    if PLAN.end[1]:
        here = here & (cell.j == region.columns - 1)
    for n in tl.static_range(PARTS * count):
        if ends is None:
            x = tl.where(here, corner[n], 0.0)
        else:
            at = tl.zeros(cell.j.shape, tl.int64) + cell.batch * (PARTS * count) + n
            if not PLAN.end[0]:
                at = at * cell.rows + cell.i
            if not PLAN.end[1]:
                at = at * cell.columns + cell.j
            x = tl.load(ends + at, mask=here, other=0.0)
        masses = _added(masses, n // count * PLAN.states + PLAN.ends[n % count], x)
        if n // count == PARTS - 1:
            sums = _paid(gradients, sums, 2 * PLAN.states + len(PLAN.moves) + PLAN.ends[n % count], x, cell, PLAN)
    return masses, sums


@triton.jit
def _changes_of_shares(
    K: tl.constexpr, q: tl.tensor, tangents: tl.tensor, z: tl.tuple, cell: Cell, PLAN: tl.constexpr
) -> tl.tensor:
    """The change of q of what leads into a state, for a change z of the scores: a tile."""
    ys: tl.tuple = ()
    if PLAN.starts[K]:
        none = tl.zeros(cell.j.shape, tangents.dtype.element_ty)
        ys = ys + (_plus(none, z, PLAN.states + len(PLAN.moves) + K, cell, PLAN, 1),)
    for n in tl.static_range(len(PLAN.into[K])):
        y = _source(tangents, cell, PLAN.into[K][n], PLAN, cell.inside, 0.0)
        ys = ys + (_plus(y, z, PLAN.states + PLAN.into[K][n], cell, PLAN, 1),)
    _, _, y = relative_tangents(q, _tile(ys, 0.0))
    return jacobian_product(q, y, PLAN.omega, 0)


@triton.jit
def _passed_on(
    K: tl.constexpr, masses: tl.tuple, pending: tl.tuple, sums: tl.tuple, q: tl.tensor, q_dot: tl.tensor,
    edge: tl.tensor, gradients: tl.tuple, cell: Cell, PLAN: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Spread what the nodes of a state hold over what leads there."""
    starts: tl.constexpr = 1 if PLAN.starts[K] else 0
    shares = _vectors(q)
    dots = _vectors(q_dot)
    for n in tl.static_range(starts + len(PLAN.into[K])):
        flows: tl.tuple = (shares[n] * masses[K],)
        if PARTS == 2:
            flows = flows + (dots[n] * masses[K] + shares[n] * masses[PLAN.states + K],)
        if n < starts:
            sums = _paid(gradients, sums, PLAN.states + len(PLAN.moves) + K, flows[PARTS - 1], cell, PLAN)
        else:
            sums = _paid(gradients, sums, PLAN.states + PLAN.into[K][n - starts], flows[PARTS - 1], cell, PLAN)
            masses, pending = _sent(PLAN.into[K][n - starts], masses, pending, flows, edge, cell, PLAN, PARTS)
    return masses, pending, sums


@triton.jit
def _sent(
    MOVE: tl.constexpr, masses: tl.tuple, pending: tl.tuple, flows: tl.tuple, edge: tl.tensor, cell: Cell,
    PLAN: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Send what a move carries to where it starts: in this cell, at an earlier step, or in the strip before."""
    depth: tl.constexpr = PLAN.first[len(PLAN.tracks)]
    place: tl.constexpr = PLAN.first[PLAN.track[MOVE]] + PLAN.moves[MOVE][3] - 1
    for part in tl.static_range(PARTS):
        if PLAN.track[MOVE] < 0:
            masses = _added(masses, part * PLAN.states + PLAN.moves[MOVE][2], flows[part])
        else:
            pending = _added(pending, part * depth + place, flows[part])
        if edge is not None and PLAN.moves[MOVE][1] > 0:
            lane = tl.arange(0, cell.j.shape[0])
            plane = (cell.batch * PARTS + part) * len(PLAN.moves) + MOVE
            at = (plane * cell.rows + cell.i) * PLAN.reach + lane
            tl.store(edge + at, flows[part], mask=cell.exists & (lane < PLAN.moves[MOVE][1]))
    return masses, pending


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def table_backward(
    tape: tl.tensor, tangents: tl.tensor, seed: tl.tensor, ends: tl.tensor, edge: tl.tensor, edge_before: tl.tensor,
    lengths: tl.tensor, band: tl.tensor, scores: tl.tuple, z: tl.tuple, gradients: tl.tuple,
    rows: tl.tensor, columns: tl.tensor, first: tl.tensor, PLAN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The expected path times the seed, slot by slot or, with ``tangents``, its change: the Hessian product.

    ``ends`` are the masses of ends, if these are not in a corner. ``edge`` is what the strip behind left for this one,
    ``edge_before`` what this leaves for the one before.
    """
    PARTS: tl.constexpr = 1 if tangents is None else 2
    DTYPE: tl.constexpr = seed.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    region = _region(lengths, band, b, rows, columns)
    corner = None
    if ends is None:
        at = tl.zeros((BLOCK,), tl.int32)
        exists = (at < region.rows) & (at < region.columns)
        last = Cell(b, at + region.rows - 1, at + region.columns - 1, rows, columns, exists, exists, exists)
        corner = _corner_masses(tape, tangents, tl.load(seed + b), scores, z, last, PLAN)
    none = tl.zeros((BLOCK,), DTYPE)
    pending = _copies(none, PARTS * PLAN.first[len(PLAN.tracks)])
    sums = _copies(none, PLAN.sums[len(PLAN.sums) - 1])
    steps = _steps(Region(rows, columns, None), first, PLAN, BLOCK)
    following = _cell(steps - 1, first, b, rows, columns, region, PLAN, BLOCK)
    ahead = _choices(tape, scores, following, PLAN)
    for n in range(steps):
        cell, choices = following, ahead
        following = _cell(steps - 2 - n, first, b, rows, columns, region, PLAN, BLOCK)
        ahead = _choices(tape, scores, following, PLAN)
        masses = _arrivals(pending, edge, cell, PLAN, PARTS)
        pending = _advanced(pending, PLAN, PARTS)
        masses, sums = _ending(masses, corner, ends, sums, gradients, cell, region, PLAN, PARTS)
        for k in tl.static_range(len(PLAN.into) - 1, -1, -1):
            sums = _paid(gradients, sums, k, masses[(PARTS - 1) * PLAN.states + k], cell, PLAN)
            if PLAN.choices[k] < PLAN.choices[k + 1]:
                q = _shares(k, choices, PLAN, DTYPE)
                q_dot = q
                if tangents is not None:
                    q_dot = _changes_of_shares(k, q, tangents, z, cell, PLAN)
                masses, pending, sums = _passed_on(
                    k, masses, pending, sums, q, q_dot, edge_before, gradients, cell, PLAN, PARTS
                )
    j = (first + tl.arange(0, BLOCK)).to(tl.int64)
    for slot in tl.static_range(len(PLAN.sums) - 1):
        if PLAN.sums[slot] >= 0:
            tl.store(gradients[slot] + b * columns + j, sums[PLAN.sums[slot]], mask=j < columns)
