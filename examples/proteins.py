"""Learn to align proteins that have similar structures but different sequences.

DATA is a file of pairs of proteins with structural alignments by TM-align, as published with DeepBLAST
(github.com/flatironinstitute/deepblast). Starting from BLOSUM62, the program learns a substitution matrix and gap
scores. Then it learns a convolution that adds to the score of each pair of residues and to the gap scores of each
residue. The loss is 1 − F1 of the expected alignment, which is the mean of a global and a local alignment. The models
of each fold are saved in the output folder. If the program is interrupted, run the same command again to continue.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import protein_pairs
import torch
from matplotlib.figure import Figure
from protein_pairs import GAPS, HALF_BIT, LETTERS, Batch, Pair, batches, blosum62, collate, measure, similar
from rich.progress import track
from torch import Tensor, nn

import bellmax as bx

MODES = "global", "local"
KINDS = "matrix", "convolution"
OMEGAS = {"negentropy": bx.Negentropy(), "sparsemax": bx.Tsallis(2.0, gamma=2.0)}


class Substitution(nn.Module):
    """A learned score for each pair of letters, and learned gap scores."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(HALF_BIT * blosum62())
        self.gaps = nn.Parameter(HALF_BIT * torch.tensor([GAPS, GAPS]))  # (modes, 2)

    def alignments(self, batch: Batch, omega: bx.Regularizer) -> list[bx.SequenceAlignment]:
        matrix = (self.matrix + self.matrix.T) / 2
        options = [{"mode": m, "gap_open": o, "gap_extend": e} for m, (o, e) in zip(MODES, self.gaps, strict=True)]
        sequences = batch.a, batch.b
        return [
            bx.SequenceAlignment.from_sequences(matrix, *sequences, lengths=batch.lengths, omega=omega, **o)
            for o in options
        ]

    def forward(self, batch: Batch, omega: bx.Regularizer) -> Tensor:
        """Return the probability that two residues are aligned, (B, N, M)."""
        return torch.stack([p.expected_path for p in self.alignments(batch, omega)]).mean(0)


class Convolution(Substitution):
    """Scores and gap scores that also depend on the neighboring residues.

    The result is the mean of these alignments and the alignments of a learned :class:`Substitution`.
    """

    def __init__(self, learnt: Substitution, size: int = 32, width: int = 7) -> None:
        super().__init__()
        self.load_state_dict(learnt.state_dict())
        self.learnt = learnt.requires_grad_(False)
        self.letters = nn.Embedding(len(LETTERS), 20, padding_idx=LETTERS.index("-"))
        self.letters.weight.data[:-1] = blosum62()[:-1, :20] / 4
        self.first = nn.Conv1d(20, size, width, padding="same")
        self.second = nn.Conv1d(size, size, width, padding="same")
        self.drop = nn.Dropout(0.3)
        self.scores, self.own_gaps = nn.Linear(size, 16), nn.Linear(size, len(MODES) * 2)
        nn.init.zeros_(self.own_gaps.weight)

    def encode(self, letters: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of the residues (B, N, 16), and terms of their gap scores (modes, 2, B, N)."""
        is_real = (letters != LETTERS.index("-")).unsqueeze(1)
        narrow = self.first(self.drop(self.letters(letters)).mT).relu() * is_real
        wide = self.second(self.drop(narrow)).relu() * is_real
        seen = self.drop(narrow + wide).mT
        return self.scores(seen), self.own_gaps(seen).unflatten(-1, self.gaps.shape).permute(2, 3, 0, 1)

    def alignments(self, batch: Batch, omega: bx.Regularizer) -> list[bx.SequenceAlignment]:
        (a, rows), (b, columns) = self.encode(batch.a), self.encode(batch.b)
        rows, columns = (own + self.gaps[:, :, None, None] for own in (rows, columns))
        matrix = (self.matrix + self.matrix.T) / 2
        scores = a @ b.mT + matrix[batch.a[:, :, None], batch.b[:, None]]
        gaps = [{"row_gaps": tuple(r), "column_gaps": tuple(c)} for r, c in zip(rows, columns, strict=True)]
        modes = zip(MODES, gaps, strict=True)
        return [bx.SequenceAlignment(scores, mode=m, lengths=batch.lengths, omega=omega, **own) for m, own in modes]

    def forward(self, batch: Batch, omega: bx.Regularizer) -> Tensor:
        return (super().forward(batch, omega) + self.learnt(batch, omega)) / 2


def soft_f1(expected: Tensor, truth: Tensor) -> Tensor:
    """Return F1 of each pair (B,), with expected numbers in place of counts."""
    return 2 * (expected * truth).sum((1, 2)) / (expected.sum((1, 2)) + truth.sum((1, 2)))


def train(model: Substitution, pairs: Sequence[Pair], omega: bx.Regularizer, epochs: int, title: str) -> None:
    data = [collate(together) for together in batches(pairs)]
    rates = {"gaps": 0.05, "matrix": 0.01}
    groups = [{"params": [p], "lr": rates.get(n, 0.003)} for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(groups)
    order = [n for _ in range(epochs) for n in torch.randperm(len(data)).tolist()]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(order))
    start = model.matrix.detach().clone()
    model.train()
    for n in track(order, title, transient=True, disable=not sys.stdout.isatty()):
        missed = (1 - soft_f1(model(data[n], omega), data[n].truth)).sum() * len(data) / len(pairs)
        optimizer.zero_grad()
        (missed + 0.003 * (model.matrix - start).square().sum()).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def most_accurate(model: Substitution, omega: bx.Regularizer, batch: Batch) -> Tensor:
    """Return the alignments with the largest sum of probabilities. Probabilities below 0.02 do not count."""
    scores = model(batch, omega) - 0.02
    return bx.SequenceAlignment(scores, gap_open=0.0, gap_extend=0.0, lengths=batch.lengths, omega="hard").decode()


def best_global(model: Substitution, omega: bx.Regularizer, batch: Batch) -> Tensor:
    return model.alignments(batch, omega)[0].decode()


DECODERS = {"best": best_global, "most accurate": most_accurate}


def learn(name: str, fold: int, folds: Sequence[Sequence[Pair]], asked: argparse.Namespace) -> dict[str, Any]:
    """Return the model for a fold and its results.

    If the output folder has them, they are read. If not, the model is trained on the other folds, tested and saved.
    """
    omega, path = OMEGAS[name], asked.output / f"{name}-{fold}.pt"
    settings = {key: getattr(asked, key) for key in ("folds", "seed", "least", "cells", "epochs")}
    matrix = Substitution()
    if path.exists():
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        if saved["settings"] != settings:
            raise SystemExit(f"{path} was made with {saved['settings']}: choose another --output, or remove it")
        model = Convolution(matrix)
        model.load_state_dict(saved["model"])
        return {**saved, "model": model.eval()}
    torch.manual_seed(asked.seed + fold)
    others = similar((p for n, other in enumerate(folds) if n != fold for p in other), asked.least, asked.cells)
    saved, own = {"settings": settings, "results": {}}, similar(folds[fold])
    for kind, epochs in zip(KINDS, asked.epochs, strict=True):
        model = matrix if kind == "matrix" else Convolution(matrix)
        begun = time.process_time()
        train(model, others, omega, epochs, f"{kind}, {name}, fold {fold + 1}")
        found = {"seconds": torch.tensor([time.process_time() - begun])}
        found |= {way: measure(partial(decode, model, omega), own) for way, decode in DECODERS.items()}
        saved["results"][kind] = found
        scores = ", ".join(f"{way} {found[way][:, 0].mean():.3f}" for way in DECODERS)
        print(f"fold {fold + 1}, {name}, {kind}: F1 {scores}; {float(found['seconds']):.0f} s", flush=True)
    torch.save({**saved, "model": model.state_dict()}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    return {**saved, "model": model}


def table(folds: Sequence[Sequence[Pair]], learnt: Sequence[dict[str, Any]]) -> str:
    """Return a table of means over all pairs with a TM-score above 0.5, each aligned by a model of the other folds."""
    start = partial(most_accurate, Substitution(), OMEGAS["negentropy"])
    defaults = [torch.cat([measure(way, similar(f)) for f in folds]) for way in (protein_pairs.by_parasail, start)]
    rows = {
        "BLOSUM62, gaps 11 and 1, by parasail | | best": (defaults[0], ""),
        "BLOSUM62, gaps 11 and 1 | negentropy | most accurate": (defaults[1], ""),
        "BLOSUM62, tuned gaps | | best": (protein_pairs.tuned(lambda _: blosum62(), folds), ""),
        "counted matrix, tuned gaps | | best": (protein_pairs.tuned(protein_pairs.counted, folds), ""),
    }
    for kind, name, way in product(KINDS, OMEGAS, DECODERS):
        results = [of_fold[name]["results"][kind] for of_fold in learnt]
        seconds = f"{torch.cat([result['seconds'] for result in results]).mean():.0f}"
        rows[f"learnt: {kind} and gaps | {name} | {way}"] = torch.cat([result[way] for result in results]), seconds
    lines = ["| scores | Ω | alignment | F1 | to parasail | within 2 | s a fold |", "|---|---|---|---:|---:|---:|---:|"]
    for name, (found, seconds) in rows.items():
        (exact, near), gain = found.mean(0), (found - defaults[0])[:, 0]
        to_default = f"{gain.mean():+.3f} ± {gain.std() / len(gain) ** 0.5:.3f}"
        lines.append(f"| {name} | {exact:.3f} | {to_default} | {near:.3f} | {seconds} |")
    return "\n".join(lines)


@torch.no_grad()
def draw(learnt: dict[str, Any], pairs: Sequence[Pair]) -> Figure:
    """Draw a test pair aligned under each Ω, and the learned scores against BLOSUM62."""
    decode = partial(most_accurate, learnt["negentropy"]["model"], OMEGAS["negentropy"])
    pair = min(pairs, key=lambda pair: abs(float(measure(decode, [pair])[0, 0]) - 0.5))
    figure = Figure(figsize=(4.2 * (len(learnt) + 1), 4.2), layout="constrained")
    *maps, last = figure.subplots(1, len(learnt) + 1)
    for ax, (name, of_omega) in zip(maps, learnt.items(), strict=True):
        shares = of_omega["model"](collate([pair]), OMEGAS[name])[0]
        ax.imshow(shares.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        ax.plot(*pair.truth.T.flip(0).numpy(), ".", color="tab:orange", markersize=1.5)
        ax.set_title(f"{name} ({int((shares > 0).sum())} of {shares.numel()} above 0)", loc="left", fontsize=9)
    matrix = learnt["negentropy"]["model"].learnt.matrix[:20, :20] / HALF_BIT
    last.plot(blosum62()[:20, :20].flatten().numpy(), ((matrix + matrix.T) / 2).flatten().numpy(), ".", markersize=3)
    last.axline((0, 0), slope=1, color="0.7", linewidth=0.8)
    last.set(xlabel="BLOSUM62", ylabel="learnt")
    last.set_title("scores of letters, in half-bits", loc="left", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="file of pairs")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/proteins"), help="output folder (default: runs/proteins)"
    )
    parser.add_argument("--figure", type=Path, help="file of the figure (default: proteins.png in the output folder)")
    parser.add_argument(
        "--epochs", type=int, nargs=2, default=[4, 5], help="epochs of matrix and convolution (default: 4 5)"
    )
    parser.add_argument("--folds", type=int, default=5, help="number of folds (default: 5)")
    parser.add_argument("--least", type=float, default=0.35, help="minimum TM-score of training pairs (default: 0.35)")
    parser.add_argument("--cells", type=int, default=60_000, help="maximum cells of training pairs (default: 60000)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no fold after this time (default: no limit)"
    )
    parser.add_argument("--threads", type=int, default=1, help="number of threads (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the folds and of the training (default: 0)")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    asked.output.mkdir(parents=True, exist_ok=True)
    with asked.data.open(encoding="utf-8") as lines:
        folds = protein_pairs.split(protein_pairs.read(lines), asked.folds, asked.seed)
    end, learnt = time.monotonic() + 60 * asked.minutes, []
    try:
        while len(learnt) < asked.folds and time.monotonic() < end:
            learnt.append({name: learn(name, len(learnt), folds, asked) for name in OMEGAS})
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on with the folds that are not done") from None
    if len(learnt) < asked.folds:
        raise SystemExit(f"{len(learnt)} of {asked.folds} folds are done; run the same command again for the others")
    shown = table(folds, learnt)
    print(shown)
    (asked.output / "table.md").write_text(shown + "\n", encoding="utf-8")
    draw(learnt[0], similar(folds[0], cells=asked.cells)).savefig(
        asked.figure or asked.output / "proteins.png", dpi=120
    )


if __name__ == "__main__":
    main()
