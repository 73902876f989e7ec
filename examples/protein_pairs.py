"""Read pairs of proteins with structural alignments, for proteins.py: files, folds, batches and baselines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import parasail
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import bellmax as bx

LETTERS = "ARNDCQEGHILKMFPSTWYVX-"  # X is an unknown residue, - is padding
HALF_BIT = math.log(2) / 2  # BLOSUM62 is in half-bits; in nats, γ = 1 gives probabilities
GAPS = -11.0, -1.0  # first and further elements of a gap; BLAST's 11 and 1 are -12 and -1
GRID = [(-opening, -extending) for opening in (6.0, 8.0, 11.0, 14.0, 18.0) for extending in (0.5, 1.0)]


class Pair(NamedTuple):
    names: frozenset[str]  # names and sequences of the chains
    a: Tensor  # (N,) letters
    b: Tensor  # (M,)
    similarity: float  # the larger of the two TM-scores
    truth: Tensor  # (K, 2) aligned residues


class Batch(NamedTuple):
    a: Tensor  # (B, N)
    b: Tensor  # (B, M)
    lengths: tuple[Tensor, Tensor]
    truth: Tensor  # (B, N, M), 0 or 1


def read(lines: Iterable[str]) -> list[Pair]:
    """Read lines in the format of DeepBLAST, with fields separated by tabs.

    The fields are two names, two TM-scores, a distance, two sequences, and a string of steps: ":" or "." for two
    aligned residues, "1" or "2" for a residue of one sequence without a partner.
    """
    pairs = []
    for line in lines:
        *names, first, second, _, a, b, steps = line.rstrip("\n").split("\t")
        at = torch.tensor([(step != "2", step != "1") for step in steps]).cumsum(0) - 1
        truth = at[torch.tensor([step in ":." for step in steps])]
        letters = (torch.tensor([LETTERS.index(letter) for letter in text]) for text in (a, b))
        pairs.append(Pair(frozenset((*names, a, b)), *letters, max(float(first), float(second)), truth))
    return pairs


def split(pairs: Iterable[Pair], folds: int, seed: int) -> list[list[Pair]]:
    """Return folds of similar sizes. Pairs that share a chain or a sequence, even indirectly, are in one fold."""
    groups: list[tuple[frozenset[str], list[Pair]]] = []
    for pair in pairs:
        related = [group for group in groups if group[0] & pair.names]
        groups = [group for group in groups if not group[0] & pair.names]
        groups.append((pair.names.union(*(g[0] for g in related)), [pair, *(p for g in related for p in g[1])]))
    random.Random(seed).shuffle(groups)
    found: list[list[Pair]] = [[] for _ in range(folds)]
    for _, members in sorted(groups, key=lambda group: -len(group[1])):
        min(found, key=lambda fold: (len(similar(fold)), len(fold))).extend(members)
    return found


def similar(pairs: Iterable[Pair], least: float = 0.5, cells: float = math.inf) -> list[Pair]:
    """Return the pairs with a TM-score above ``least`` and at most ``cells`` pairs of residues."""
    return [pair for pair in pairs if pair.similarity > least and len(pair.a) * len(pair.b) <= cells]


def batches(pairs: Iterable[Pair], cells: int = 100_000) -> list[list[Pair]]:
    """Group pairs of similar lengths into batches of at most ``cells`` cells, of which at most half are padding."""
    found: list[list[Pair]] = [[]]
    for pair in sorted(pairs, key=lambda p: (round(2 * math.log2(len(p.a))), len(p.b))):
        tried = [*found[-1], pair]
        size = len(tried) * max(len(p.a) for p in tried) * max(len(p.b) for p in tried)
        if found[-1] and size > min(cells, 2 * sum(len(p.a) * len(p.b) for p in tried)):
            found.append([pair])
        else:
            found[-1] = tried
    return found


def collate(pairs: Sequence[Pair]) -> Batch:
    sides = [p.a for p in pairs], [p.b for p in pairs]
    a, b = (pad_sequence(side, batch_first=True, padding_value=LETTERS.index("-")) for side in sides)
    truth = torch.zeros(len(pairs), a.shape[1], b.shape[1])
    for own, pair in zip(truth, pairs, strict=True):
        own[tuple(pair.truth.T)] = 1
    rows, columns = (torch.tensor([len(sequence) for sequence in side]) for side in sides)
    return Batch(a, b, (rows, columns), truth)


def blosum62() -> Tensor:
    """Return BLOSUM62 in half-bits, in the order of LETTERS."""
    at = [parasail.blosum62.mapper[ord(letter)] for letter in LETTERS]
    return torch.tensor(parasail.blosum62.matrix.tolist(), dtype=torch.float32)[at][:, at]


def counted(pairs: Iterable[Pair]) -> Tensor:
    """Return the log-odds of aligned letters in half-bits."""
    seen = torch.ones(len(LETTERS), len(LETTERS))
    for pair in pairs:
        a, b = pair.a[pair.truth[:, 0]], pair.b[pair.truth[:, 1]]
        seen.index_put_((torch.cat((a, b)), torch.cat((b, a))), torch.ones(()), accumulate=True)
    share = seen / seen.sum()
    matrix = (share / (share.sum(0) * share.sum(1, keepdim=True))).log() / HALF_BIT
    matrix[20:] = matrix[:, 20:] = 0
    return matrix


def f1(alignment: Tensor, truth: Tensor, within: int = 0) -> float:
    """Return the F1 score of an alignment. A pair is correct if its second residue is at most ``within`` residues
    from the true partner of the first."""
    found = alignment[(alignment >= 0).all(-1)]
    partner = torch.full((int(max(truth[:, 0].max(), alignment[:, 0].max())) + 1,), -1_000_000)
    partner[truth[:, 0]] = truth[:, 1]
    right = (partner[found[:, 0]] - found[:, 1]).abs() <= within
    return 2 * int(right.sum()) / (len(found) + len(truth))


@torch.no_grad()
def measure(decode: Callable[[Batch], Tensor], pairs: Iterable[Pair]) -> Tensor:
    """Return F1, exact and within 2 residues, of the alignments (B, L, 2) of each batch."""
    found = []
    for together in batches(pairs):
        for alignment, pair in zip(decode(collate(together)), together, strict=True):
            found.append([f1(alignment, pair.truth), f1(alignment, pair.truth, within=2)])
    return torch.tensor(found)


def best(matrix: Tensor, gaps: tuple[float, float], batch: Batch) -> Tensor:
    """Return the best global alignments (B, L, 2)."""
    options = {"gap_open": gaps[0], "gap_extend": gaps[1], "lengths": batch.lengths, "omega": "hard"}
    return bx.SequenceAlignment.from_sequences(matrix, batch.a, batch.b, **options).decode()


def by_parasail(batch: Batch) -> list[Tensor]:
    """Return the best global alignments of parasail with BLOSUM62 and GAPS."""
    found = []
    for a, b, rows, columns in zip(batch.a.tolist(), batch.b.tolist(), *batch.lengths, strict=True):
        texts = ("".join(LETTERS[n] for n in side[:own]) for side, own in ((a, rows), (b, columns)))
        traced = parasail.nw_trace_striped_16(*texts, -int(GAPS[0]), -int(GAPS[1]), parasail.blosum62).traceback
        real = torch.tensor([(x != "-", y != "-") for x, y in zip(traced.query, traced.ref, strict=True)])
        found.append(torch.where(real, real.cumsum(0) - 1, -1))
    return found


def tuned(matrix_of: Callable[[Sequence[Pair]], Tensor], folds: Sequence[Sequence[Pair]]) -> Tensor:
    """Return F1 of the pairs of each fold, with a matrix and gap scores chosen on the other folds."""
    found = []
    for n, fold in enumerate(folds):
        others = similar(pair for k, other in enumerate(folds) if k != n for pair in other)
        matrix = matrix_of(others)
        gaps = max(GRID, key=lambda gaps: float(measure(partial(best, matrix, gaps), others)[:, 0].mean()))
        found.append(measure(partial(best, matrix, gaps), similar(fold)))
    return torch.cat(found)
