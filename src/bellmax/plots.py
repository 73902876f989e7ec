"""Figures of alignments and graphs, drawn with matplotlib (``pip install 'bellmax[plots]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from bellmax.automata import Automaton
from bellmax.names import attribute_error
from bellmax.recursions.paths import ProgramPaths
from bellmax.structures.dag import DAGPaths
from bellmax.structures.dtw import DTW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["alignment", "automaton", "dag", "program"]

_MAX_DRAWN_EDGES = 200

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        raise attribute_error("bellmax.plots", name)


def dag(p: DAGPaths, *, ax: Axes | None = None, labels: list[str] | None = None) -> Axes:
    """Draw a graph with the probability of each edge, and return the axes.

    Wider edges are more probable. Edges with probability 0 are dashed.

    Args:
        p: The distribution that :meth:`bellmax.DAG.paths` returns, without batch dimensions.
        ax: The axes to draw on. Default None: a new figure.
        labels: The names of the nodes, default their indices.

    >>> import torch, bellmax as bx
    >>> p = bx.DAG([(0, 1), (0, 2), (1, 2)]).paths(torch.zeros(3), omega="sparsemax")
    >>> len(dag(p).patches)  # an arrow for each edge
    3

    """
    from matplotlib.figure import Figure

    if len(p.batch_shape):
        raise ValueError(
            f"p must have no batch dimensions, got batch shape {tuple(p.batch_shape)}: index it, such as p[0]"
        )
    ax = ax or Figure().subplots()
    positions = _node_positions(p.dag.levels)
    num_parallel: dict[tuple[int, int], int] = {}
    for (parent, child), probability in zip(p.dag.edges.tolist(), p.expected_path.tolist(), strict=True):
        nth = num_parallel.get((parent, child), 0)
        num_parallel[parent, child] = nth + 1
        # Edges that skip levels, and all but the first of several parallel edges, curve away from the center line.
        bend = 0.3 * nth + 0.15 * (p.dag.levels[child] - p.dag.levels[parent] - 1).item()
        outwards = -1 if positions[parent, 1] + positions[child, 1] >= 0 else 1
        _draw_edge(ax, positions[parent], positions[child], probability, outwards * bend, _shown(probability))
    for node, (x, y) in enumerate(positions):
        ax.text(x, y, labels[node] if labels else str(node), ha="center", va="center", zorder=3,
                bbox={"boxstyle": "circle,pad=0.35", "fc": "white", "ec": "black"})  # fmt: skip
    ax.set_xlim(positions[:, 0].min() - 0.4, positions[:, 0].max() + 0.4)
    ax.set_ylim(positions[:, 1].min() - 0.8, positions[:, 1].max() + 0.8)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def automaton(automaton: Automaton, *, ax: Axes | None = None, label_names: Sequence[str] | None = None) -> Axes:
    """Draw the states and arcs of a small automaton, and return the axes.

    An arc is labeled with its label, with its output if it differs, and with its score if it is not 0. ε stands for no
    label and for no output. A start state has a short arrow, and a final state has a double border. Scores of start and
    final states are next to the state if they are not 0.

    Args:
        automaton: The automaton, with at most 200 arcs.
        ax: The axes to draw on. Default None: a new figure.
        label_names: The names of the labels, by default the names that the automaton has, or numbers.

    >>> import bellmax as bx
    >>> ax = automaton(bx.Automaton.ctc([1, 2]))
    >>> len(ax.patches)  # an arrow for each arc and for the start
    11

    """
    from matplotlib.figure import Figure

    if not isinstance(automaton, Automaton):
        raise ValueError(f"automaton must be an Automaton, got a {type(automaton).__name__}")
    if automaton.num_arcs > _MAX_DRAWN_EDGES:
        raise ValueError(f"automaton must have at most {_MAX_DRAWN_EDGES} arcs to be drawn, got {automaton.num_arcs}")
    levels = _distances(automaton)
    positions = _node_positions(levels) * (1.4, 1.2)
    width, height = np.ptp(positions, axis=0)
    ax = ax or Figure(figsize=(3 + 0.9 * width, 2.5 + 0.9 * height), layout="constrained").subplots()
    for (source, target), lines in _arc_texts(automaton, label_names or automaton.label_names).items():
        text = "\n".join(lines)
        if source == target:
            _draw_loop(ax, positions[source], text)
            continue
        span = (levels[target] - levels[source]).item()
        bend = 0.25 if span <= 0 else 0.18 * (span - 1)
        _draw_edge(ax, positions[source], positions[target], 0.2, bend, text)
    _draw_states(ax, automaton, positions)
    ax.set_xlim(positions[:, 0].min() - 1.5, positions[:, 0].max() + 0.8)
    ax.set_ylim(positions[:, 1].min() - 1.3, positions[:, 1].max() + 1.3)
    ax.axis("off")
    return ax


def _draw_states(ax: Axes, automaton: Automaton, positions: NDArray[np.float64]) -> None:
    """Draw the states, the arrows to start states, and the scores of start and final states."""
    ends = zip(automaton.start.tolist(), automaton.final.tolist(), strict=True)
    for state, (start, final) in enumerate(ends):
        point = positions[state]
        x, y = point.tolist()
        is_start, is_final = start > -np.inf, final > -np.inf
        for size in (26, 19) if is_final else (22,):
            ax.plot(x, y, "o", ms=size, mfc="white", mec="black", zorder=2)
        ax.text(x, y, str(automaton.states[state]), ha="center", va="center", fontsize=8, zorder=3)
        if is_final:
            _annotate(ax, point, _shown_score(final), (16, 0), ha="left")
        if is_start:
            before = point - np.array((0.9, 0))
            _draw_arrow(ax, before, point, 0.2)
            _annotate(ax, before, _shown_score(start), (10, 0), ha="right")


def _distances(automaton: Automaton) -> Tensor:
    """Return the smallest number of arcs from a start state to each state, (S,)."""
    distance = torch.where(automaton.start > -torch.inf, 0, automaton.num_states)
    source, target = automaton.arcs[:, :2].unbind(1)
    for _ in range(automaton.num_states):
        distance = distance.scatter_reduce(0, target, distance[source] + 1, "amin")
    return distance.clamp(max=int(distance[distance < automaton.num_states].max()) + 1)


def _arc_texts(automaton: Automaton, label_names: Sequence[str] | None) -> dict[tuple[int, int], list[str]]:
    """Return a line of text for each arc between two states."""
    texts: dict[tuple[int, int], list[str]] = {}
    for (source, target, label, output), score in zip(automaton.arcs.tolist(), automaton.scores.tolist(), strict=True):
        read, written = _symbol(label, label_names), _symbol(output, automaton.output_names)
        text = read if read == written else f"{read}:{written}"
        texts.setdefault((source, target), []).append(" ".join(filter(None, (text, _shown_score(score)))))
    return texts


def _symbol(number: int, names: Sequence[str] | None) -> str:
    """Return the name of a label or an output."""
    if number < 0:
        return "ε"
    return names[number] if names is not None and number < len(names) else str(number)


def _shown_score(score: float) -> str:
    return f"{score:.3g}" if score else ""


def _draw_loop(ax: Axes, point: NDArray[np.float64], text: str) -> None:
    """Draw an arrow from a state to itself with a text, away from the center line."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.transforms import ScaledTranslation

    side = -1 if point[1] < 0 else 1
    inches = ax.figure.dpi_scale_trans + ScaledTranslation(point[0], point[1], cast(Any, ax.transData))
    ax.add_patch(
        FancyArrowPatch(
            (-0.08, 0.1 * side), (0.08, 0.1 * side), connectionstyle=f"arc3,rad={-3.5 * side}", arrowstyle="-|>",
            mutation_scale=12, shrinkA=4, shrinkB=4, clip_on=False, transform=inches, **_edge_style(0.2),
        )
    )  # fmt: skip
    _annotate(ax, point, text, (0, 29 * side), va="bottom" if side > 0 else "top")


def _annotate(
    ax: Axes, point: NDArray[np.float64], text: str, offset: tuple[float, float], ha: str = "center", va: str = "center"
) -> None:
    """Write a text at an offset in points."""
    ax.annotate(text, (point[0], point[1]), offset, textcoords="offset points", fontsize=8, ha=ha, va=va)


def program(p: ProgramPaths, *, ax: Axes | None = None) -> Axes:
    """Draw the nodes and edges of a small program with the expected number of uses of each edge, and return the axes.

    A node is a call of ``bellmax.max`` or ``bellmax.min``, in the order of ``p.node_values``. An edge is one option of
    the call, labeled with its weight and its expected number of uses, which is its probability if no solution uses it
    twice. It leads from the nodes in the option to the node of the call. The lines from several nodes meet in a dot.
    The last node is the result. Wider edges are used more often. Edges that are never used are dashed.

    Args:
        p: The distribution that a :func:`bellmax.program` returns, without batch dimensions, with at most 200 edges.
        ax: The axes to draw on. Default None: a new figure.

    >>> import torch, bellmax as bx
    >>> @bx.program("item")
    ... def no_neighbors(value):
    ...     taken, skipped = value[0], 0.0
    ...     for v in value[1:]:
    ...         taken, skipped = skipped + v, bx.max(taken, skipped)
    ...     return bx.max(taken, skipped)
    >>> ax = program(no_neighbors(torch.tensor([1.0, 3.0, 1.0]), omega="sparsemax"))
    >>> len(ax.patches)  # an arrow for each edge
    6

    """
    from matplotlib.figure import Figure

    if not isinstance(p, ProgramPaths):
        raise ValueError(f"p must be the distribution that a call of a program returns, got {type(p).__name__}")
    graph = p.hypergraph
    if len(p.batch_shape):
        raise ValueError(
            f"p must have no batch dimensions, got batch shape {tuple(p.batch_shape)}: index it, such as p[0]"
        )
    if graph.num_edges > _MAX_DRAWN_EDGES:
        raise ValueError(f"p must have at most {_MAX_DRAWN_EDGES} edges to be drawn, got {graph.num_edges}")
    positions = _node_positions(graph.levels) * (1.9, 1.3)
    width, height = np.ptp(positions, axis=0)
    ax = ax or Figure(figsize=(3.5 + width, 2 + 0.8 * height), layout="constrained").subplots()
    probabilities = p._solver.expanded().expected_edges().tolist()
    offset, tails = graph.tail_offset.tolist(), graph.tails.tolist()
    num_parallel: dict[tuple[int, ...], int] = {}
    for number, (head, probability) in enumerate(zip(graph.heads.tolist(), probabilities, strict=True)):
        from_nodes = tails[offset[number] : offset[number + 1]]
        key = (head, *sorted({*from_nodes}))
        nth = num_parallel[key] = num_parallel.get(key, -1) + 1
        _draw_option(ax, positions, from_nodes, head, probability, nth, p._traced.edge(number).weight)
    for node, (x, y) in enumerate(positions):
        style = "round4,pad=0.3" if node == graph.num_nodes - 1 else "circle,pad=0.25"
        ax.text(x, y, str(node), ha="center", va="center", fontsize=8, zorder=3,
                bbox={"boxstyle": style, "fc": "white", "ec": "black"})  # fmt: skip
    ax.set_xlim(-2.4, positions[:, 0].max() + 0.5)
    ax.set_ylim(positions[:, 1].min() - 1, positions[:, 1].max() + 1)
    ax.axis("off")
    return ax


def _draw_option(
    ax: Axes,
    positions: NDArray[np.float64],
    tails: list[int],
    head: int,
    probability: float,
    nth: int,
    label: str,
) -> None:
    """Draw an edge into a node from its tails. Without tails, it begins at its label, left of the node."""
    stop, text = positions[head], f"{label}: {_shown(probability)}"
    if not tails:
        start = stop + np.array((-0.8, 0.8 - 0.45 * nth))
        _draw_arrow(ax, start, stop, probability)
        _draw_label(ax, start, text, probability, ha="right")
        return
    points = [positions[tail] for tail in tails]
    middle = points[0]
    if len(points) > 1:
        middle = 0.4 * np.mean(points, axis=0) + 0.6 * stop + np.array((0, 0.5 * nth))
        style = _edge_style(probability)
        for point in points:
            ax.plot(*zip(point, middle, strict=True), zorder=1, **style)
        ax.plot(*middle, "o", color=style["color"], ms=4)
    skips_levels = len(tails) == 1 and stop[0] - middle[0] > 4 and abs(stop[1] - middle[1]) < 1
    bend = 0.3 * nth + 0.2 * skips_levels if len(tails) == 1 else 0.0
    _draw_edge(ax, middle, stop, probability, bend, text)


def _node_positions(levels: Tensor) -> NDArray[np.float64]:
    """Return coordinates (N, 2) of the nodes: levels from left to right, the nodes of a level in a column."""
    positions = np.empty((len(levels), 2))
    for level in levels.unique():
        nodes = (levels == level).nonzero()[:, 0].numpy()
        positions[nodes, 0] = 1.6 * float(level)
        positions[nodes, 1] = 1.4 * (np.arange(len(nodes))[::-1] - (len(nodes) - 1) / 2)
    return positions


def _edge_style(probability: float) -> dict[str, Any]:
    """Return the color and the line style of an edge."""
    if probability == 0:
        return {"color": "0.7", "lw": 1, "linestyle": "--"}
    return {"color": "tab:blue", "lw": 0.8 + 3 * probability, "linestyle": "-"}


def _shown(probability: float) -> str:
    return "0" if probability == 0 else f"{probability:.2f}"


def _draw_edge(
    ax: Axes, start: NDArray[np.float64], stop: NDArray[np.float64], probability: float, bend: float, text: str
) -> None:
    """Draw a curved arrow from ``start`` to ``stop``, (x, y), with a text next to it."""
    _draw_arrow(ax, start, stop, probability, bend)
    dx, dy = stop - start
    control = (start + stop) / 2 + bend * np.array((dy, -dx))
    # Near the parent, so that labels of crossing edges are apart.
    _draw_label(ax, 0.38 * start + 0.48 * control + 0.14 * stop, text, probability)


def _draw_arrow(
    ax: Axes, start: NDArray[np.float64], stop: NDArray[np.float64], probability: float, bend: float = 0.0
) -> None:
    from matplotlib.patches import FancyArrowPatch

    ax.add_patch(
        FancyArrowPatch(
            (start[0], start[1]), (stop[0], stop[1]), connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>",
            mutation_scale=12, shrinkA=14, shrinkB=14, clip_on=False, **_edge_style(probability),
        )
    )  # fmt: skip


def _draw_label(ax: Axes, point: NDArray[np.float64], text: str, probability: float, ha: str = "center") -> None:
    x, y = point
    ax.text(x, y, text, color="black" if probability else "0.5", fontsize=8, ha=ha, va="center",
            bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"})  # fmt: skip


def alignment(
    dtw: DTW,
    x: Tensor | NDArray[np.floating] | None = None,
    y: Tensor | NDArray[np.floating] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the expected alignment of two series and the alignment with the lowest cost, and return the axes.

    Darker cells are more probable. Cells with positive probability have a border. Cells with probability 0 are white.
    The figure resembles figure 1 of Mensch and Blondel (2018).

    Args:
        dtw: A :class:`bellmax.DTW` without batch dimensions.
        x: The first series, (N,) or (N, D), drawn on the left of the alignment, from top to bottom. Not drawn if None.
        y: The second series, (M,) or (M, D), drawn above the alignment. Not drawn if None.
        ax: The axes to draw on. Default None: a new figure.

    >>> import bellmax as bx
    >>> x, y = torch.tensor([0.0, 2.0, 5.0, 1.0]), torch.tensor([0.0, 5.0, 1.0])
    >>> p = bx.DTW((x[:, None] - y).square(), omega="sparsemax")
    >>> len(alignment(p, x, y).child_axes)  # a margin for each series
    2

    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    if len(dtw.batch_shape):
        raise ValueError(
            f"dtw must have no batch dimensions, got batch shape {tuple(dtw.batch_shape)}: index it, such as dtw[0]"
        )
    ax = ax or Figure(layout="constrained").subplots()
    rows, columns = dtw.lengths.tolist()
    path = dtw.expected_path.detach().cpu().double().numpy()[:rows, :columns]
    ax.imshow(np.ma.masked_equal(path, 0), cmap="Blues", vmin=0, vmax=1)
    ax.set_aspect("equal" if max(path.shape) < 4 * min(path.shape) else "auto")
    line_scale = min(1.0, 40 / max(path.shape))
    ax.add_collection(
        LineCollection(_cell_borders(path > 0), colors="0.8", linewidths=0.7 * line_scale, capstyle="projecting")
    )
    pairs = dtw.decode().cpu().numpy()
    pairs = pairs[pairs[:, 0] >= 0]
    ax.plot(pairs[:, 1], pairs[:, 0], color="gold", lw=0.8 + line_scale, solid_joinstyle="round",
            path_effects=[withStroke(linewidth=1.4 + 1.8 * line_scale, foreground="0.25")])  # fmt: skip
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.spines[:].set(color="0.6", linewidth=0.7)
    ax.locator_params(integer=True)
    for side, (name, series) in enumerate((("x", x), ("y", y))):
        if series is not None:
            _draw_margin(ax, side, _as_matrix(name, series, dtw.event_shape[side])[: path.shape[side]])
    return ax


def _as_matrix(name: str, series: Tensor | NDArray[np.floating], length: int) -> NDArray[np.float64]:
    """Return a series (length,) or (length, D) as an array (length, D). ``name`` is for error messages."""
    values = torch.as_tensor(series).detach().cpu().double().numpy()
    if values.ndim not in (1, 2) or len(values) != length:
        raise ValueError(f"{name} must have shape ({length},) or ({length}, D), got {values.shape}")
    return values.reshape(length, -1)


def _draw_margin(ax: Axes, side: int, values: NDArray[np.float64]) -> None:
    """Draw a series (length, D) to the left of ``ax`` (side 0), from top to bottom, or above it (side 1)."""
    steps, marker = np.arange(len(values)), "o" if len(values) <= 50 else ""
    if side == 0:
        margin = ax.inset_axes((-0.22, 0, 0.2, 1), sharey=ax)
        margin.plot(values, steps, lw=1.2, marker=marker, ms=2.5)
        margin.invert_xaxis()
        ax.tick_params(left=False, labelleft=False)
    else:
        margin = ax.inset_axes((0, 1.02, 1, 0.2), sharex=ax)
        margin.plot(steps, values, lw=1.2, marker=marker, ms=2.5)
        ax.tick_params(bottom=False, labelbottom=False)
    margin.axis("off")


def _cell_borders(is_inside: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """Return line segments, each an array (2, 2) of two points (x, y), around the cells where ``is_inside`` (N, M).

    Segments are as long as possible, and neighboring cells share theirs: overlapping lines would be darker.
    """
    segments = []
    for is_transposed, cells in ((False, is_inside), (True, is_inside.T)):
        has_border = np.pad(cells, ((1, 0), (1, 1))) | np.pad(cells, ((0, 1), (1, 1)))
        change = np.diff(has_border.astype(np.int8))
        start, stop = np.argwhere(change == 1) - 0.5, np.argwhere(change == -1) - 0.5
        ends = np.stack((start, stop), 1)  # (segment, end, (row, column))
        segments += list(ends if is_transposed else ends[..., ::-1])
    return segments
