"""Alignments with gaps, against all alignments of small pairs, graphs written by hand, parasail and Biopython."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from support.checks import close
from support.data import folder
from support.problems import Enumerated, for_second_order, one_of_each_kind, potentials, two_kinds
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import bellmax as bx

MODES = ("global", "local", "semiglobal")
GAPS = {"gap_open": -1.1, "gap_extend": -0.4}


def all_alignments(n: int, m: int) -> list[list[tuple[int, int]]]:
    """Every alignment, as pairs in order."""
    return [
        list(zip(rows, columns, strict=True))
        for count in range(min(n, m) + 1)
        for rows in combinations(range(n), count)
        for columns in combinations(range(m), count)
    ]


def gap(length: int, opening: float, extending: float) -> float:
    return opening + (length - 1) * extending if length else 0.0


def score_of(pairs: list[tuple[int, int]], scores: Tensor, mode: str, opening: float, extending: float) -> float:
    """Score of an alignment by definition: aligned pairs, and a gap between neighboring pairs in each sequence."""
    n, m = scores.shape
    total = sum(float(scores[pair]) for pair in pairs)
    places = pairs if mode == "local" else [(-1, -1), *pairs, (n, m)]
    for (i, j), (k, last) in pairwise(places):
        total += gap(k - i - 1, opening, extending) + gap(last - j - 1, opening, extending)
    return total


class ByHand:
    """The graph of an alignment, node by node, with the terms of each edge."""

    def __init__(self, n: int, m: int, mode: str) -> None:
        size = (n, m) if mode == "local" else (n + 1, m + 1)
        off = 0 if mode == "local" else -1
        last = size[0] - 1, size[1] - 1
        cells = sorted(((i, j) for i in range(size[0]) for j in range(size[1])), key=lambda c: (sum(c), c))
        self.number: dict[Any, int] = {"source": 0}
        self.edges: list[tuple[int, int]] = []
        self.terms: list[list[tuple[str, tuple[int, ...]]]] = []
        moves = [("M", "M", 1, 1), ("X", "M", 1, 1), ("Y", "M", 1, 1), ("M", "X", 1, 0), ("X", "X", 1, 0)]
        moves += [("M", "Y", 0, 1), ("X", "Y", 0, 1), ("Y", "Y", 0, 1)]
        for i, j in cells:
            for state in "MXY":
                into: list[tuple[Any, list[tuple[str, tuple[int, ...]]]]] = []
                terms = [("scores", (i + off, j + off))] if state == "M" and min(i + off, j + off) >= 0 else []
                on_border = {"global": i == j == 0, "local": True, "semiglobal": i == 0 or j == 0}[mode]
                if state == "M" and on_border:
                    into.append(("source", terms))
                for a, b, di, dj in moves:
                    is_free = mode == "semiglobal" and (
                        (b == "X" and j in (0, last[1])) or (b == "Y" and i in (0, last[0]))
                    )
                    if b == state and (i - di, j - dj, a) in self.number and not is_free:
                        kind = {"M": [], "X": [("row", i + off)], "Y": [("column", j + off)]}[b]
                        which = "extend" if a == b else "open"
                        into.append(((i - di, j - dj, a), terms + [(f"{side}_{which}", (at,)) for side, at in kind]))
                if into:
                    self.number[i, j, state] = len(self.number)
                    self._add((i, j, state), into)
        if mode == "local":
            ends = [v for v in self.number if v[2] == "M" and v != "source"]
        elif mode == "semiglobal":
            ends = [v for v in self.number if v != "source" and (v[0] == last[0] or v[1] == last[1])]
        else:
            ends = [(*last, state) for state in "MXY"]
        ends = [end for end in ends if end in self.number]
        self.number["sink"] = len(self.number)
        self._add("sink", [(end, []) for end in ends])

    def _add(self, child: Any, into: list[tuple[Any, list[tuple[str, tuple[int, ...]]]]]) -> None:
        for parent, terms in into:
            self.edges.append((self.number[parent], self.number[child]))
            self.terms.append(terms)

    def solve(self, tensors: dict[str, Tensor], omega: bx.Regularizer) -> Enumerated:
        weights = [sum(float(tensors[name][at]) for name, at in terms) for terms in self.terms]
        return Enumerated(self.edges, len(self.number), weights, omega)

    def onto(self, edges: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for mass, terms in zip(edges, self.terms, strict=True):
            for name, at in terms:
                sums[name][at] += float(mass)
        return sums


def random_tensors(n: int, m: int, seed: int = 0) -> dict[str, Tensor]:
    return {
        "scores": potentials(n, m, seed=seed),
        "row_open": potentials(n, seed=seed + 1) - 1,
        "row_extend": potentials(n, seed=seed + 2) / 3,
        "column_open": potentials(m, seed=seed + 3) - 1,
        "column_extend": potentials(m, seed=seed + 4) / 3,
    }


def by_position(tensors: dict[str, Tensor], **options: Any) -> bx.SequenceAlignment:
    gaps = {f"{side}_gaps": (tensors[f"{side}_open"], tensors[f"{side}_extend"]) for side in ("row", "column")}
    return bx.SequenceAlignment(tensors["scores"], **gaps, **options)


# --- against enumeration


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (3, 3), (4, 2)])
def test_one_path_for_each_alignment(n: int, m: int, backend: str) -> None:
    count = math.comb(n + m, n)
    assert len(all_alignments(n, m)) == count
    scores = torch.zeros(n, m)
    assert int(bx.SequenceAlignment(scores).num_paths) == count
    assert int(bx.SequenceAlignment(scores, mode="local").num_paths) == count - 1


@pytest.mark.parametrize("mode", ["global", "local"])
def test_values_are_sums_over_alignments(mode: str, backend: str) -> None:
    scores = potentials(3, 4)
    p = bx.SequenceAlignment(scores, **GAPS, mode=mode)
    alignments = [a for a in all_alignments(3, 4) if a or mode == "global"]
    expected = torch.tensor([score_of(a, scores, mode, -1.1, -0.4) for a in alignments], dtype=torch.float64)
    close(p.value, expected.logsumexp(0))
    paths = torch.zeros(len(alignments), 3, 4, dtype=torch.float64)
    for path, alignment in zip(paths, alignments, strict=True):
        for pair in alignment:
            path[pair] = 1
    close(p.log_prob(paths), expected.log_softmax(0))
    close(p.expected_path, (expected.softmax(0)[:, None, None] * paths).sum(0))
    close(p.topk(5)[0], expected.topk(5).values)
    best = bx.SequenceAlignment(scores, **GAPS, mode=mode, omega="hard")
    close(best.value, expected.max())
    close(best.expected_path, paths[expected.argmax()])


@pytest.mark.parametrize("mode", MODES)
def test_every_omega_equals_the_graph_by_hand(mode: str, omega: bx.Regularizer, backend: str) -> None:
    tensors = random_tensors(3, 2)
    tensors["scores"][1, 0] = -math.inf
    hand = ByHand(3, 2, mode)
    wanted = hand.solve(tensors, omega)
    p = by_position(tensors, mode=mode, omega=omega)
    close(p.value, wanted.value)
    gradient = hand.onto(wanted.expected_path, tensors)
    for name, got in p.gradient.items():
        close(got, gradient[name], 1e-9)
    assert p.gradient.keys() == tensors.keys()
    close(p.entropy(), wanted.entropy, 1e-9)
    assert int(p.num_paths) == len(wanted.all_paths)


@pytest.mark.parametrize("mode", MODES)
@two_kinds
def test_lengths_equal_pairs_without_padding(mode: str, omega: bx.Regularizer, backend: str) -> None:
    scores = potentials(4, 3, 5, requires_grad=True)
    lengths = torch.tensor([3, 2, 3, 1]), torch.tensor([5, 3, 1, 4])
    n, m = lengths
    outside = (torch.arange(3)[:, None] >= n[:, None, None]) | (torch.arange(5) >= m[:, None, None])
    p = bx.SequenceAlignment(scores.masked_fill(outside, math.nan), **GAPS, mode=mode, lengths=lengths, omega=omega)
    p.value.sum().backward()
    assert scores.grad is not None
    assert bool((scores.grad[outside] == 0).all())
    for b in range(4):
        pair_scores = scores.detach()[b, : n[b], : m[b]]
        alone = bx.SequenceAlignment(pair_scores, **GAPS, mode=mode, omega=omega)
        close(p.value[b].detach(), alone.value)
        close(p.expected_path[b, : n[b], : m[b]].detach(), alone.expected_path)
        assert p.best_alignment()[b, : n[b] + m[b]].equal(alone.best_alignment())


def test_an_empty_sequence_is_one_gap(backend: str) -> None:
    p = bx.SequenceAlignment(torch.zeros(2, 3), gap_open=-2.0, gap_extend=-0.5, lengths=(0, 3), omega="hard")
    close(p.value, -3.0)
    assert p.best_alignment().tolist() == [[-1, 0], [-1, 1], [-1, 2], [-1, -1], [-1, -1]]


def test_no_aligned_pair(backend: str) -> None:
    closed = torch.full((2, 3), -math.inf, dtype=torch.float64, requires_grad=True)
    p = bx.SequenceAlignment(closed, **GAPS, mode="local")
    assert p.value == -math.inf
    p.value.backward()
    assert closed.grad is not None
    assert not closed.grad.any()
    assert bool((p.best_alignment() == -1).all())
    close(bx.SequenceAlignment(closed.detach(), **GAPS).value, -2 * 1.1 - 3 * 0.4)
    best = bx.SequenceAlignment(torch.tensor([[-3.0, -1.0]]), mode="local", omega="hard")
    assert best.value == -1
    assert best.best_path().tolist() == [[0.0, 1.0]]


# --- gaps


def test_gaps_as_numbers_tensors_and_scores_per_position_agree(backend: str) -> None:
    scores = potentials(2, 3, 4)
    value = bx.SequenceAlignment(scores, gap_open=-2, gap_extend=-0.5).value
    gaps = torch.tensor([-2.0, -2.0]), torch.tensor(-0.5, dtype=torch.float64)
    close(bx.SequenceAlignment(scores, gap_open=gaps[0], gap_extend=gaps[1]).value, value)
    rows = bx.SequenceAlignment(
        scores, row_gaps=(-2.0, torch.full((2, 3), -0.5)), column_gaps=(torch.full((4,), -2.0), -0.5)
    )
    close(rows.value, value)
    close(bx.SequenceAlignment(scores, gap_open=-2, gap_extend=-0.5, column_gaps=(-2, -0.5)).value, value)


@pytest.mark.parametrize("mode", MODES)
@for_second_order
def test_derivatives_reach_scores_and_gaps(mode: str, omega: bx.Regularizer, backend: str) -> None:
    tensors = random_tensors(2, 3, seed=5)
    names = list(tensors)

    def value(*inputs: Tensor) -> Tensor:
        return by_position(dict(zip(names, inputs, strict=True)), mode=mode, omega=omega).value

    inputs = [tensor.requires_grad_() for tensor in tensors.values()]
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, inputs, fast_mode=True)


@for_second_order
def test_derivatives_reach_a_learnt_matrix_and_scalar_gaps(omega: bx.Regularizer, backend: str) -> None:
    a, b = torch.tensor([[0, 2, 1], [3, 3, 0]]), torch.tensor([[2, 1, 0, 0], [3, 1, 2, 3]])
    matrix, opening = potentials(4, 4, requires_grad=True), torch.tensor([-1.3, -0.7], dtype=torch.float64)
    extending = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)

    def value(matrix: Tensor, opening: Tensor, extending: Tensor) -> Tensor:
        options: Any = {"lengths": ([3, 2], 4), "omega": omega}
        return bx.SequenceAlignment.from_sequences(
            matrix, a, b, gap_open=opening, gap_extend=extending, **options
        ).value

    inputs = matrix, opening.requires_grad_(), extending
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, inputs, fast_mode=True)


@pytest.mark.parametrize("mode", MODES)
def test_sequences_equal_their_scores(mode: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = potentials(5, 5, seed=1)
    a, b = torch.randint(5, (2, 4), generator=generator), torch.randint(5, (3,), generator=generator)
    padded = torch.nn.functional.pad(a.int(), (0, 2), value=99)
    p = bx.SequenceAlignment.from_sequences(matrix, padded, b, **GAPS, mode=mode, lengths=(4, 3))
    q = bx.SequenceAlignment(matrix[a[..., None], b], **GAPS, mode=mode)
    close(p.value, q.value)
    close(p.expected_path[:, :4], q.expected_path)
    assert p.best_alignment()[:, :7].equal(q.best_alignment())
    counts = torch.zeros(5, 5, dtype=torch.float64)
    counts.index_put_((a[..., None].expand(2, 4, 3), b.expand(2, 4, 3)), q.expected_path, accumulate=True)
    close(p.gradient["matrix"], counts)
    close(p.gradient["scores"], p.expected_path)


# --- the distribution


@pytest.mark.parametrize("mode", MODES)
def test_samples_have_their_probabilities(mode: str, backend: str) -> None:
    p = bx.SequenceAlignment(potentials(2, 3, seed=7), **GAPS, mode=mode)
    torch.manual_seed(0)
    close(p.sample((1500,)).mean(0), p.expected_path, 0.05)
    pairs = p.sample_alignments((50,))
    assert pairs.shape == (50, 5, 2)
    walks = p.sample_walks((50,))
    assert bool((p.log_prob(walks) > -20).all())


def test_log_prob_of_semi_global_pairs(backend: str) -> None:
    p = bx.SequenceAlignment(potentials(2, 3, seed=7), **GAPS, mode="semiglobal")
    path = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    close(p.log_prob(path), inner_score(p, path) - p.value)
    with pytest.raises(ValueError, match="first row or column"):
        p.log_prob(torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


def inner_score(p: bx.SequenceAlignment, path: Tensor) -> Tensor:
    return (p.potentials * path).sum()


@one_of_each_kind
def test_the_loss_of_an_alignment(omega: bx.Regularizer, backend: str) -> None:
    scores = potentials(3, 4, seed=2, requires_grad=True)
    p = bx.SequenceAlignment(scores, **GAPS, omega=omega)
    target = p.topk(3)[1][2]
    loss = bx.losses.surrogate(p, target)
    if isinstance(omega, bx.Negentropy):
        close(loss, -omega.gamma * p.log_prob(target))
    assert loss >= 0
    (gradient,) = torch.autograd.grad(loss, scores)
    close(gradient, (p.expected_path - target).detach())


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "glocal"}, "mode must be one of 'global'"),
        ({"gap_open": torch.zeros(3)}, r"gap_open must be a number or broadcast to the batch shape \(2,\); row_gaps"),
        ({"row_gaps": torch.zeros(2)}, "row_gaps must be a pair"),
        ({"row_gaps": (torch.zeros(4), -1)}, r"row_gaps, open, must be .* \(2, 3\), got shape \(4,\)"),
        ({"column_gaps": (-1, torch.zeros(1))}, r"column_gaps, extend, must be .* \(2, 4\), got shape \(1,\)"),
        ({"gap_open": 11, "gap_extend": -1.0}, "gap_open must not be positive, got 11.* pass -11"),
        ({"gap_extend": 0.5}, r"gap_extend must not be positive, got 0\.5: gap scores are added, so .* pass -0\.5"),
        ({"row_gaps": (-1, 2.0)}, r"row_gaps, extend, must not be positive, got 2\.0: .* pass -2\.0"),
        ({"column_gaps": (3, -2.0)}, "column_gaps, open, must not be positive, got 3"),
        ({"lengths": (4, 4)}, r"lengths\[0\] must be from 0 to 3, got 4"),
        ({"lengths": (3, 0), "mode": "local"}, r"lengths\[1\] must be from 1 to 4, got 0"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.SequenceAlignment(torch.zeros(2, 3, 4), **options)


def test_gap_scores_that_are_tensors_may_be_positive() -> None:
    learnt = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert bx.SequenceAlignment(
        torch.zeros(2, 2), gap_open=learnt, row_gaps=(learnt.expand(2), -1.0)
    ).value.requires_grad
    assert bx.SequenceAlignment(torch.zeros(2, 2), gap_open=0, gap_extend=0.0).value.isfinite()


def test_errors_in_sequences_name_their_position() -> None:
    matrix, a = torch.zeros(4, 4), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="gap_open must not be positive, got 11"):
        bx.SequenceAlignment.from_sequences(matrix, a[:1], a[:1], gap_open=11, gap_extend=1)
    with pytest.raises(ValueError, match=r"a must hold labels from 0 to 3, got 4 at \(1,\)"):
        bx.SequenceAlignment.from_sequences(matrix, a, a)
    with pytest.raises(ValueError, match="b must hold integers"):
        bx.SequenceAlignment.from_sequences(matrix, torch.tensor([0]), torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"scores must have shape"):
        bx.SequenceAlignment(torch.zeros(3))


# --- peers


def real_pairs(count: int, longest: int) -> list[tuple[str, str]]:
    lines = (folder("protein") / "valid.txt").read_text().splitlines()
    pairs = [tuple(line.split("\t")[5:7]) for line in lines]
    return [(a, b) for a, b in pairs if max(len(a), len(b)) <= longest][:count]


@pytest.mark.parametrize("mode", MODES)
def test_scores_of_real_proteins_equal_parasail_and_biopython(mode: str) -> None:
    parasail = pytest.importorskip("parasail")
    align = pytest.importorskip("Bio.Align")
    letters = "ARNDCQEGHILKMFPSTWYVBZX*"
    numbers = {letter: n for n, letter in enumerate(letters)}
    blosum = torch.tensor(parasail.blosum62.matrix[:24, :24].tolist(), dtype=torch.float32)
    score = {"global": parasail.nw_striped_sat, "local": parasail.sw_striped_sat, "semiglobal": parasail.sg_striped_sat}
    aligner = align.PairwiseAligner(mode="local" if mode == "local" else "global")
    aligner.substitution_matrix = align.substitution_matrices.load("BLOSUM62")
    aligner.open_gap_score, aligner.extend_gap_score = -11, -1
    if mode == "semiglobal":
        aligner.end_gap_score = 0
    pairs = real_pairs(200, 250)
    assert len(pairs) == 200
    sides = list(zip(*pairs, strict=True))
    one, other = (
        pad_sequence([torch.tensor([numbers[c] for c in text]) for text in side], batch_first=True) for side in sides
    )
    lengths = tuple(torch.tensor([len(text) for text in side]) for side in sides)
    p = bx.SequenceAlignment.from_sequences(blosum, one, other, mode=mode, lengths=lengths, omega="hard")
    theirs = torch.tensor([score[mode](a, b, 11, 1, parasail.blosum62).score for a, b in pairs])
    # Semi-global alignments of parasail have at least one pair; here the empty alignment counts.
    assert p.value.equal((theirs.clamp(min=0) if mode == "semiglobal" else theirs).float())
    assert p.value.tolist() == [aligner.score(a, b) for a, b in pairs]


@pytest.mark.parametrize("mode", ["global", "local", "semiglobal"])
def test_a_target_may_be_a_set_of_pairs(mode: str) -> None:
    p = bx.SequenceAlignment(torch.zeros(3, 4), mode=mode)
    assert bx.losses.crf_nll(p, torch.ones(3, 4)) == 0
    fewer = torch.ones(3, 4)
    fewer[1] = 0
    assert bx.losses.crf_nll(p, fewer) > 0
