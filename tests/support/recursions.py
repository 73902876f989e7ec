"""Hand-written recursions on a grid, as plain loops over scalars, for tests of lattices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L

Node: TypeAlias = tuple[int, int, int]
Tensors: TypeAlias = dict[str, Tensor]
Scored: TypeAlias = Iterable[tuple[Node, Tensor | float]]


@dataclass(frozen=True)
class Recursion:
    """A declared lattice, and the same recursion written by hand for tensors without batch dimensions.

    ``into(t, i, j, k)`` lists the moves into a node, ``node(t, i, j, k)`` is its score; ``starts(t, n, m)`` and
    ``ends(t, n, m)`` list the nodes where paths of an n × m grid begin and end, with their scores.
    """

    lattice: bx.Lattice
    tensors: Callable[[int, int], Tensors]  # random tensors for a number of rows and columns
    into: Callable[[Tensors, int, int, int], Scored]
    node: Callable[[Tensors, int, int, int], Tensor | float]
    starts: Callable[[Tensors, int, int], Scored] = lambda t, n, m: [((0, 0, 0), 0.0)]
    ends: Callable[[Tensors, int, int], Scored] = lambda t, n, m: [((n - 1, m - 1, 0), 0.0)]
    has_columns: bool = True

    def nodes(
        self,
        tensors: Tensors,
        n: int,
        m: int,
        maximum: Callable[[list[Tensor]], Tensor],
        inside: Callable[[int, int], bool] = lambda i, j: True,
    ) -> dict[Node, Tensor]:
        """The values of the nodes that paths from the start reach; ``maximum`` is max_Ω."""
        one = torch.ones((), dtype=torch.float64)
        values: dict[Node, Tensor] = {}
        begin = dict(self.starts(tensors, n, m))
        nodes = sorted(
            ((i, j, k) for i in range(n) for j in range(m) for k in range(self.lattice.states)),
            key=lambda v: (v[0] + v[1], v),
        )
        for i, j, k in nodes:
            if not inside(i, j):
                continue
            candidates = [begin[i, j, k] * one] if (i, j, k) in begin else []
            candidates += [values[s] + g for s, g in self.into(tensors, i, j, k) if s in values]
            finite = [x for x in candidates if x > -math.inf]
            if finite:
                values[i, j, k] = maximum(finite) + self.node(tensors, i, j, k)
        return values

    def value(
        self,
        tensors: Tensors,
        n: int,
        m: int,
        omega: bx.Regularizer,
        inside: Callable[[int, int], bool] = lambda i, j: True,
    ) -> Tensor:
        """DP_Ω by the definition, in float64, differentiable by autograd."""
        values = self.nodes(tensors, n, m, lambda finite: omega.max(torch.stack(finite)), inside)
        last = [(v, score) for v, score in self.ends(tensors, n, m) if inside(*v[:2])]
        reached = [values[v] + score for v, score in last if v in values]
        if not reached:
            return torch.tensor(-math.inf, dtype=torch.float64)
        return omega.max(torch.stack(reached)) if len(last) > 1 else reached[0]


def entry(tensor: Tensor, *index: int) -> Tensor | float:
    """An entry of a tensor, −∞ outside its bounds."""
    return tensor[index] if all(0 <= i < size for i, size in zip(index, tensor.shape, strict=True)) else -math.inf


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


M, X, Y = range(3)
_AFFINE = [
    bx.Move(1, 1, (M, X, Y), M),
    bx.Move(1, 0, M, X, "open"),
    bx.Move(1, 0, X, X, "extend"),
    bx.Move(0, 1, (M, X), Y, "open"),
    bx.Move(0, 1, Y, Y, "extend"),
]


def _affine_into(t: Tensors, i: int, j: int, k: int) -> Scored:
    if k == M:
        return [((i - 1, j - 1, a), 0.0) for a in (M, X, Y)]
    if k == X:
        return [((i - 1, j, M), t["open"]), ((i - 1, j, X), t["extend"])]
    return [((i, j - 1, M), t["open"]), ((i, j - 1, X), t["open"]), ((i, j - 1, Y), t["extend"])]


def _affine_tensors(rows: int, columns: int) -> Tensors:
    one = torch.ones((), dtype=torch.float64)
    return {"match": _normal(rows, columns), "open": -1.2 * one, "extend": -0.3 * one}


def _shifted_match(t: Tensors, i: int, j: int, k: int) -> Tensor | float:
    return t["match"][i - 1, j - 1] if k == M and i > 0 and j > 0 else 0.0


def _three(n: int, m: int) -> Scored:
    return [((n - 1, m - 1, k), 0.0) for k in (M, X, Y)]


_CTC = bx.Lattice(
    [
        bx.Move(1, 0, (0, 1), 0),
        bx.Move(1, 0, 1, 1),
        bx.Move(1, 1, 0, 1),
        bx.Move(1, 1, 1, 1, where="skip"),
    ],
    states=2,
    node={0: L.at_class("scores", 0), 1: L.gather("scores", "y", 0, -1)},
    start=L.along_row({0: L.column("_blank_first"), 1: L.column("_label_first")}),
    end=L.corner(0, 1),
)


def _ctc_tensors(rows: int, columns: int) -> Tensors:
    y = torch.tensor([1, 1, 2, 3, 1, 3, 3])[: columns - 1]
    skip = torch.zeros(columns, dtype=torch.bool)
    skip[2:] = y[1:] != y[:-1]
    first = torch.full((2, columns), -math.inf, dtype=torch.float64)
    first[0, :1] = first[1, 1:2] = 0
    return {"scores": _normal(rows, 4), "y": y, "skip": skip, "_blank_first": first[0], "_label_first": first[1]}


def _ctc_into(t: Tensors, i: int, j: int, k: int) -> Scored:
    if k == 0:
        return [((i - 1, j, 0), 0.0), ((i - 1, j, 1), 0.0)]
    moves: list[tuple[Node, Tensor | float]] = [((i - 1, j, 1), 0.0), ((i - 1, j - 1, 0), 0.0)]
    return moves + ([((i - 1, j - 1, 1), 0.0)] if j > 1 and t["y"][j - 1] != t["y"][j - 2] else [])


def _words(rows: int, columns: int) -> Tensors:
    a, b = torch.tensor([0, 1, 1, 2, 0, 2, 1])[:rows], torch.tensor([1, 0, 2, 2, 1, 0, 0])[:columns]
    return {"matrix": _normal(3, 3), "a": a, "b": b}


_DURATIONS = range(5)


def _transducer_tensors(rows: int, columns: int) -> Tensors:
    return {"blank": _normal(rows - 1, columns), "emit": _normal(rows - 1, columns - 1, seed=1)}


def _emitted(t: Tensors, i: int, j: int) -> Scored:
    """The move of a transducer that emits a label."""
    return [((i, j - 1, 0), entry(t["emit"], i, j - 1))]


def _timed_into(t: Tensors, i: int, j: int, k: int) -> Scored:
    """Moves of a token and its number of frames, at least one for a blank, which is the last token."""
    moves: list[tuple[Node, Tensor | float]] = []
    for d in _DURATIONS:
        if d and i >= d:
            moves.append(((i - d, j, 0), entry(t["blank"], i - d, j) + t["durations"][i - d, j, d]))
        if j and i >= d and bool(t["more"][i]):
            moves.append(((i - d, j - 1, 0), entry(t["emit"], i - d, j - 1) + t["durations"][i - d, j - 1, d]))
    return moves


def _segment_moves(flat: bool) -> list[bx.Move]:
    """Segments of two labels and up to three steps: ends of segments (0, 1), boundaries (2, 3) between them."""
    last = {(d, b): L.at_class("segments", d - 1, b, rows=-1) for d in (1, 2, 3) for b in (0, 1)}
    change = {(a, b): L.scalar(f"{a}{b}") for a in (0, 1) for b in (0, 1)}
    if flat:
        first = [bx.Move(d, 0, 2 + b, b, score) for (d, b), score in last.items()]
        return first + [bx.Move(d, 0, a, b, last[d, b] + change[a, b]) for d, b in last for a in (0, 1)]
    within = [bx.Move(0, 0, a, 2 + b, score) for (a, b), score in change.items()]
    return [bx.Move(d, 0, 2 + b, b, score) for (d, b), score in last.items()] + within


def _segment_tensors(rows: int, columns: int) -> Tensors:
    names = ("00", "01", "10", "11", "begin")
    return {"segments": _normal(rows - 1, 3, 2), **{name: _normal(seed=n) for n, name in enumerate(names)}}


def _segment_into(t: Tensors, i: int, j: int, k: int) -> Scored:
    if k > 1:
        return [((i, j, a), t[f"{a}{k - 2}"]) for a in (0, 1)]
    return [((i - d, j, 2 + k), t["segments"][i - 1, d - 1, k]) for d in (1, 2, 3) if i >= d]


def _flat_into(t: Tensors, i: int, j: int, k: int) -> Scored:
    if k > 1:
        return []
    steps = [(d, t["segments"][i - 1, d - 1, k]) for d in (1, 2, 3) if i >= d]
    first: list[tuple[Node, Tensor | float]] = [((i - d, j, 2 + k), score) for d, score in steps]
    return first + [((i - d, j, a), score + t[f"{a}{k}"]) for d, score in steps for a in (0, 1)]


def segments(flat: bool) -> Recursion:
    return Recursion(
        bx.Lattice(
            _segment_moves(flat),
            states=4,
            start=L.corner({2: None, 3: "begin"}),
            end=L.corner({0: None, 1: 0.25}),
        ),
        _segment_tensors,
        _flat_into if flat else _segment_into,
        lambda t, i, j, k: 0.0,
        lambda t, n, m: [((0, 0, 2), 0.0), ((0, 0, 3), t["begin"])],
        lambda t, n, m: [((n - 1, m - 1, 0), 0.0), ((n - 1, m - 1, 1), 0.25)],
        has_columns=False,
    )


RECURSIONS: dict[str, Recursion] = {
    "DTW": Recursion(
        bx.Lattice([bx.Move(1, 1), bx.Move(1, 0), bx.Move(0, 1)], node=-L.cell("cost")),
        lambda rows, columns: {"cost": _normal(rows, columns)},
        lambda t, i, j, k: [((i - 1, j - 1, 0), 0.0), ((i - 1, j, 0), 0.0), ((i, j - 1, 0), 0.0)],
        lambda t, i, j, k: -t["cost"][i, j],
    ),
    "DTW with weights, penalties and open ends": Recursion(
        bx.Lattice(
            [bx.Move(1, 1, score=-L.cell("cost")), bx.Move(1, 0, score=L.scalar("up") - 0.5), bx.Move(0, 1)],
            node=-L.cell("cost"),
            start=L.along_row(0),
            end=L.along_row(0),
        ),
        lambda rows, columns: {"cost": _normal(rows, columns), "up": torch.tensor(0.3, dtype=torch.float64)},
        lambda t, i, j, k: [
            ((i - 1, j - 1, 0), -t["cost"][i, j]),
            ((i - 1, j, 0), t["up"] - 0.5),
            ((i, j - 1, 0), 0.0),
        ],
        lambda t, i, j, k: -t["cost"][i, j],
        lambda t, n, m: [((0, j, 0), 0.0) for j in range(m)],
        lambda t, n, m: [((n - 1, j, 0), 0.0) for j in range(m)],
    ),
    "asymmetric DTW": Recursion(
        bx.Lattice([bx.Move(1, 0), bx.Move(1, 1), bx.Move(1, 2)], node=-L.cell("cost")),
        lambda rows, columns: {"cost": _normal(rows, columns)},
        lambda t, i, j, k: [((i - 1, j, 0), 0.0), ((i - 1, j - 1, 0), 0.0), ((i - 1, j - 2, 0), 0.0)],
        lambda t, i, j, k: -t["cost"][i, j],
    ),
    "edit distance": Recursion(
        bx.Lattice(
            [
                bx.Move(1, 1, score=-L.pair("change", "a", "b", -1, -1)),
                bx.Move(1, 0, score=-1.0),
                bx.Move(0, 1, score=-1.0),
            ]
        ),
        lambda rows, columns: {
            "change": 1 - torch.eye(3, dtype=torch.float64),
            **{n: t for n, t in _words(rows - 1, columns - 1).items() if n != "matrix"},
        },
        lambda t, i, j, k: [
            *([((i - 1, j - 1, 0), -t["change"][t["a"][i - 1], t["b"][j - 1]])] if i and j else []),
            ((i - 1, j, 0), -1.0),
            ((i, j - 1, 0), -1.0),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "Needleman-Wunsch": Recursion(
        bx.Lattice(
            [
                bx.Move(1, 1, score=L.cell("match", -1, -1)),
                bx.Move(1, 0, score="gap_a"),
                bx.Move(0, 1, score="gap_b"),
            ]
        ),
        lambda rows, columns: {
            "match": _normal(rows - 1, columns - 1),
            "gap_a": _normal(seed=1),
            "gap_b": _normal(seed=2),
        },
        lambda t, i, j, k: [
            ((i - 1, j - 1, 0), entry(t["match"], i - 1, j - 1)),
            ((i - 1, j, 0), t["gap_a"]),
            ((i, j - 1, 0), t["gap_b"]),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "Needleman-Wunsch by a matrix": Recursion(
        bx.Lattice(
            [
                bx.Move(1, 1, score=L.pair("matrix", "a", "b", -1, -1)),
                bx.Move(1, 0, score=L.row("gaps", -1)),
                bx.Move(0, 1, score=-1),
            ]
        ),
        lambda rows, columns: _words(rows - 1, columns - 1) | {"gaps": _normal(rows - 1, seed=1)},
        lambda t, i, j, k: [
            *([((i - 1, j - 1, 0), t["matrix"][t["a"][i - 1], t["b"][j - 1]])] if i and j else []),
            ((i - 1, j, 0), entry(t["gaps"], i - 1)),
            ((i, j - 1, 0), -1.0),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "affine gaps": Recursion(
        bx.Lattice(_AFFINE, states=3, node={M: L.cell("match", -1, -1)}, start=L.corner(M), end=L.corner(M, X, Y)),
        lambda rows, columns: _affine_tensors(rows - 1, columns - 1),
        _affine_into,
        _shifted_match,
        ends=lambda t, n, m: _three(n, m),
    ),
    "semi-global": Recursion(
        bx.Lattice(
            _AFFINE, states=3, node={M: L.cell("match", -1, -1)}, start=L.along_column(M), end=L.along_column(M, X)
        ),
        lambda rows, columns: _affine_tensors(rows - 1, columns - 1),
        _affine_into,
        _shifted_match,
        lambda t, n, m: [((i, 0, M), 0.0) for i in range(n)],
        lambda t, n, m: [((i, m - 1, k), 0.0) for i in range(n) for k in (M, X)],
    ),
    "Smith-Waterman": Recursion(
        bx.Lattice(_AFFINE, states=3, node={M: L.cell("match")}, start=L.anywhere(M), end=L.anywhere(M)),
        _affine_tensors,
        _affine_into,
        lambda t, i, j, k: t["match"][i, j] if k == M else 0.0,
        lambda t, n, m: [((i, j, M), 0.0) for i in range(n) for j in range(m)],
        lambda t, n, m: [((i, j, M), 0.0) for i in range(n) for j in range(m)],
    ),
    "Drop-DTW": Recursion(
        bx.Lattice(
            [
                bx.Move(1, 1, score=-L.cell("cost", -1, -1)),
                bx.Move(0, 1, score=-L.cell("cost", -1, -1)),
                bx.Move(0, 1, score=-L.column("drop", -1)),
            ]
        ),
        lambda rows, columns: {"cost": _normal(rows - 1, columns - 1), "drop": _normal(columns - 1, seed=1)},
        lambda t, i, j, k: [
            *([((i - 1, j - 1, 0), -t["cost"][i - 1, j - 1])] if i and j else []),
            *([((i, j - 1, 0), -t["cost"][i - 1, j - 1])] if i and j else []),
            *([((i, j - 1, 0), -t["drop"][j - 1])] if j else []),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "Drop-DTW of runs": Recursion(  # the frames of a step are contiguous; states: matched, dropped
        bx.Lattice(
            [
                bx.Move(1, 1, (0, 1), 0, -L.cell("cost", -1, -1)),
                bx.Move(0, 1, 0, 0, -L.cell("cost", -1, -1)),
                bx.Move(0, 1, (0, 1), 1, -L.column("drop", -1)),
            ],
            states=2,
            start=L.corner(1),
            end=L.corner(0, 1),
        ),
        lambda rows, columns: {"cost": _normal(rows - 1, columns - 1), "drop": _normal(columns - 1, seed=1)},
        lambda t, i, j, k: [
            *([((i, j - 1, a), -t["drop"][j - 1]) for a in (0, 1)] if k and j else []),
            *([((i - 1, j - 1, a), -t["cost"][i - 1, j - 1]) for a in (0, 1)] if not k and i and j else []),
            *([((i, j - 1, 0), -t["cost"][i - 1, j - 1])] if not k and i and j else []),
        ],
        lambda t, i, j, k: 0.0,
        lambda t, n, m: [((0, 0, 1), 0.0)],
        lambda t, n, m: [((n - 1, m - 1, k), 0.0) for k in (0, 1)],
    ),
    "CTC": Recursion(
        _CTC,
        _ctc_tensors,
        _ctc_into,
        lambda t, i, j, k: t["scores"][i, t["y"][j - 1]] if k and j else t["scores"][i, 0],
        lambda t, n, m: [((0, 0, 0), 0.0), ((0, 1, 1), 0.0)],
        lambda t, n, m: [((n - 1, m - 1, k), 0.0) for k in (0, 1)],
    ),
    "transducer": Recursion(
        bx.Lattice([bx.Move(1, 0, score=L.cell("blank", -1)), bx.Move(0, 1, score=L.cell("emit", 0, -1))]),
        _transducer_tensors,
        lambda t, i, j, k: [((i - 1, j, 0), entry(t["blank"], i - 1, j)), *_emitted(t, i, j)],
        lambda t, i, j, k: 0.0,
    ),
    "modified transducer": Recursion(
        bx.Lattice([bx.Move(1, 0, score=L.cell("blank", -1)), bx.Move(1, 1, score=L.cell("emit", -1, -1))]),
        _transducer_tensors,
        lambda t, i, j, k: [
            ((i - 1, j, 0), entry(t["blank"], i - 1, j)),
            ((i - 1, j - 1, 0), entry(t["emit"], i - 1, j - 1)),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "token-and-duration transducer": Recursion(
        bx.Lattice(
            [bx.Move(d, 0, score=L.cell("blank", -d) + L.cell_class("durations", d, -d)) for d in _DURATIONS if d]
            + [
                bx.Move(d, 1, 0, 0, L.cell("emit", -d, -1) + L.cell_class("durations", d, -d, -1), L.row("more"))
                for d in _DURATIONS
            ]
        ),
        lambda rows, columns: {
            **_transducer_tensors(rows, columns),
            "durations": _normal(rows - 1, columns, len(_DURATIONS), seed=2),
            "more": torch.arange(rows) < rows - 1,
        },
        _timed_into,
        lambda t, i, j, k: 0.0,
    ),
    "multi-blank transducer": Recursion(  # classes 0, 3 and 4 are blanks of one, two and three frames
        bx.Lattice(
            [
                *(bx.Move(d, 0, score=L.cell_class("joint", c, -d)) for d, c in ((1, 0), (2, 3), (3, 4))),
                bx.Move(0, 1, score=L.cell_label("joint", "y", 0, -1)),
            ]
        ),
        lambda rows, columns: {
            "joint": _normal(rows - 1, columns, 5),
            "y": torch.tensor([1, 2, 2, 1, 1, 2, 1])[: columns - 1],
        },
        lambda t, i, j, k: [
            *(((i - d, j, 0), entry(t["joint"], i - d, j, c)) for d, c in ((1, 0), (2, 3), (3, 4))),
            *([((i, j - 1, 0), entry(t["joint"], i, j - 1, int(t["y"][j - 1])))] if j else []),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "restricted transducer": Recursion(  # labels in the cells that an alignment allows
        bx.Lattice(
            [
                bx.Move(1, 0, score=L.cell("blank", -1)),
                bx.Move(0, 1, score=L.cell("emit", 0, -1), where=L.cell("near")),
            ]
        ),
        lambda rows, columns: {
            **_transducer_tensors(rows, columns),
            "near": (torch.arange(rows).unsqueeze(1) - torch.arange(columns)).abs() < 3,
        },
        lambda t, i, j, k: [
            ((i - 1, j, 0), entry(t["blank"], i - 1, j)),
            *(_emitted(t, i, j) if bool(t["near"][i, j]) else []),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "transducer from its joint": Recursion(
        bx.Lattice(
            [
                bx.Move(1, 0, score=L.cell_class("joint", 0, -1)),
                bx.Move(1, 1, score=L.cell_label("joint", "y", -1, -1)),
            ]
        ),
        lambda rows, columns: {
            "joint": _normal(rows - 1, columns, 3),
            "y": torch.tensor([1, 2, 2, 1, 1, 2, 1, -1])[: columns - 1],
        },
        lambda t, i, j, k: [
            ((i - 1, j, 0), entry(t["joint"], i - 1, j, 0)),
            *([((i - 1, j - 1, 0), t["joint"][i - 1, j - 1, t["y"][j - 1]])] if i and j else []),
        ],
        lambda t, i, j, k: 0.0,
    ),
    "monotone": Recursion(
        bx.Lattice([bx.Move(1, 0), bx.Move(1, 1)], node=L.cell("scores")),
        lambda rows, columns: {"scores": _normal(rows, columns)},
        lambda t, i, j, k: [((i - 1, j, 0), 0.0), ((i - 1, j - 1, 0), 0.0)],
        lambda t, i, j, k: t["scores"][i, j],
    ),
    "hidden Markov model": Recursion(
        bx.Lattice(
            [bx.Move(1, 0, a, b, L.scalar(f"{a}{b}")) for a in range(2) for b in range(2)],
            states=2,
            node={0: L.at_class("scores", 0), 1: L.at_class("scores", 1)},
            start=L.corner({0: None, 1: "start"}),
            end=L.corner(0, {1: 0.25}),
        ),
        lambda rows, columns: {
            "scores": _normal(rows, 2),
            **{name: _normal(seed=n) for n, name in enumerate(("00", "01", "10", "11", "start"))},
        },
        lambda t, i, j, k: [((i - 1, j, a), t[f"{a}{k}"]) for a in range(2)],
        lambda t, i, j, k: t["scores"][i, k],
        lambda t, n, m: [((0, 0, 0), 0.0), ((0, 0, 1), t["start"])],
        lambda t, n, m: [((n - 1, m - 1, 0), 0.0), ((n - 1, m - 1, 1), 0.25)],
        has_columns=False,
    ),
    "semi-Markov": segments(flat=False),
    "states within a cell": Recursion(
        bx.Lattice(
            [bx.Move(1, 1, 1, 0), bx.Move(0, 1, 0, 0, L.column("stay")), bx.Move(0, 0, 0, 1, L.row("change"))],
            states=2,
            node={1: L.cell("scores")},
            start=L.corner(0),
            end=L.corner(1),
        ),
        lambda rows, columns: {
            "scores": _normal(rows, columns),
            "stay": _normal(columns, seed=1),
            "change": _normal(rows, seed=2),
        },
        lambda t, i, j, k: (
            [((i, j, 0), t["change"][i])] if k else [((i - 1, j - 1, 1), 0.0), ((i, j - 1, 0), t["stay"][j])]
        ),
        lambda t, i, j, k: t["scores"][i, j] if k else 0.0,
        ends=lambda t, n, m: [((n - 1, m - 1, 1), 0.0)],
    ),
}
