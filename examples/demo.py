"""Build an interactive page with small examples: series, tags, speech, proteins, a parse, attention, a custom graph."""

from __future__ import annotations

import argparse
import base64
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bellmax as bx
from bellmax.nn import CRF, SegmentationAttention, tag_constraints

GAMMAS = [round(float(g), 4) for g in torch.logspace(-2, 1, 16)]
OMEGAS = {"negentropy": bx.Negentropy, "sparsemax": partial(bx.Tsallis, 2.0)}
Frames = dict[str, list[Any]]


def frames(of: Any) -> Frames:
    """Return the results of the function ``of`` for each Ω and γ of the controls."""
    return {name: [of(omega(gamma)) for gamma in GAMMAS] for name, omega in OMEGAS.items()}


def packed(probabilities: Tensor) -> dict[str, Any]:
    """Return a matrix as bytes from 0 to 255 for the page. Only exact zeros become 0."""
    cells = torch.where(probabilities > 0, (255 * probabilities).round().clamp(1, 255), 0).to(torch.uint8)
    return {"shape": list(cells.shape), "cells": base64.b64encode(cells.numpy().tobytes()).decode()}


# --- two series


def align() -> dict[str, Any]:
    print("Align two series that have the same peaks at different times …")
    generator = torch.Generator().manual_seed(0)

    def bumps(time: Tensor) -> Tensor:
        return torch.exp(-((time - 0.3) ** 2) / 0.004) + 0.7 * torch.exp(-((time - 0.7) ** 2) / 0.01)

    t, u = torch.linspace(0, 1, 44), torch.linspace(0, 1, 56)
    x = bumps(t) + 0.05 * torch.randn(44, generator=generator)
    y = bumps(u**1.6) + 0.05 * torch.randn(56, generator=generator)
    cost = 4 * (x.unsqueeze(1) - y) ** 2

    def frame(omega: bx.Regularizer) -> dict[str, Any]:
        p = bx.DTW(cost, omega=omega)
        return {**packed(p.expected_path), "value": p.value.item(), "entropy": p.entropy().item()}

    found = frames(frame)
    dense, sparse = (sum(byte > 0 for byte in base64.b64decode(found[name][10]["cells"])) for name in OMEGAS)
    print(f"  at γ = {GAMMAS[10]}, positive cells: {dense} of {44 * 56} under negentropy, {sparse} under sparsemax\n")
    return {"x": x.tolist(), "y": y.tolist(), "frames": found}


# --- a tagger

TAGS = ["O", "B-ORG", "I-ORG", "B-LOC"]
PHRASES = {  # phrases, their tags, and how often they occur
    "the Bank of Rome": ("O B-ORG I-ORG I-ORG", 6),
    "the Bank of Rome ": ("O B-ORG O B-LOC", 4),
    "a train to Oslo": ("O O O B-LOC", 5),
    "the Port of Rome": ("O O O B-LOC", 5),
    "the Bank lends": ("O B-ORG O", 5),
}


def tag() -> dict[str, Any]:
    print("Train a small CRF tagger under each Ω …")
    words = sorted({word for phrase in PHRASES for word in phrase.split()})
    sentence = ["the", "Bank", "of", "Rome"]
    trained = {name: _train(words, omega()) for name, omega in OMEGAS.items()}
    shown = {}
    for name, (embedding, crf) in trained.items():
        with torch.no_grad():
            emissions = embedding(_context(words, sentence))
        p = crf.distribution(emissions)
        if name == "sparsemax":
            paths, probabilities = p.support_paths()
        else:
            paths = p.sequence_to_path(p.topk_decoded(5)[1])
            probabilities = p.log_prob(paths).exp()
        sequences = p.path_to_sequence(paths).tolist()
        readings = [{"tags": s, "probability": q} for s, q in zip(sequences, probabilities.tolist(), strict=True)]
        shown[name] = {
            "readings": readings,
            "whole": name == "sparsemax",
            "marginals": p.marginals.tolist(),
            "edges": p.expected_path.tolist(),
        }
        for reading in readings[:3]:
            tags = " ".join(f"{word}/{TAGS[k]}" for word, k in zip(sentence, reading["tags"], strict=True))
            print(f"  {name:>10}  {reading['probability']:.3f}  {tags}")
    print()
    return {"sentence": sentence, "tags": TAGS, "models": shown}


def _context(words: list[str], sentence: list[str]) -> Tensor:
    """Return an index for each pair of a word and the word before it."""
    numbers = [0, *(1 + words.index(word) for word in sentence)]
    return torch.tensor([before * (len(words) + 1) + word for before, word in pairwise(numbers)])


def _train(words: list[str], omega: bx.Regularizer) -> tuple[torch.nn.Embedding, CRF]:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding((len(words) + 1) ** 2, len(TAGS))
    torch.nn.init.zeros_(embedding.weight)
    crf = CRF(len(TAGS), omega=omega, constraints=tag_constraints(TAGS, scheme="IOB2"))
    optimizer = torch.optim.AdamW([*embedding.parameters(), *crf.parameters()], lr=0.05, weight_decay=0)
    for _ in range(150):
        optimizer.zero_grad()
        for phrase, (tags, times) in PHRASES.items():
            numbers = torch.tensor([TAGS.index(tag) for tag in tags.split()])
            (times / 25 * crf(embedding(_context(words, phrase.split())), numbers)).backward()
        optimizer.step()
    return embedding, crf


# --- letters of a word in frames

ALPHABET, WORD = "·ehlo", "hello"  # the first letter is the blank


def spell() -> dict[str, Any]:
    print("Align the letters of a word with audio frames (CTC) …")
    generator = torch.Generator().manual_seed(1)
    targets = torch.tensor([ALPHABET.index(letter) for letter in WORD])
    scores = torch.randn(32, len(ALPHABET), generator=generator)
    near = torch.exp(-((torch.arange(32)[:, None] - torch.tensor([3, 9, 16, 21, 28])) / 2).square() / 2)
    scores[:, 0] += 1.8 * (1 - near.sum(-1))
    scores.index_add_(1, targets, 3 * near)

    def frame(omega: bx.Regularizer) -> dict[str, Any]:
        return packed(bx.CTC(scores, targets, omega=omega).expected_path.T)

    best = bx.CTC(scores, targets)
    print(f"  the best alignment: {''.join(ALPHABET[k] for k in best.decode())}\n")
    return {"alphabet": ALPHABET, "word": WORD, "best": best.decode().tolist(), "frames": frames(frame)}


# --- two proteins

PROTEINS = "HEAGAWGHEE", "PAWHEAE"
ACIDS = "AEGHPW"
BLOSUM62 = torch.tensor(
    [
        [4, -1, 0, -2, -1, -3],
        [-1, 5, -2, 0, -1, -3],
        [0, -2, 6, -2, -2, -2],
        [-2, 0, -2, 8, -2, -2],
        [-1, -1, -2, -2, 7, -4],
        [-3, -3, -2, -2, -4, 11],
    ],
    dtype=torch.float64,
)


def match() -> dict[str, Any]:
    print("Align two short proteins with gaps …")
    a, b = (torch.tensor([ACIDS.index(letter) for letter in text]) for text in PROTEINS)

    def alignment(omega: bx.Regularizer) -> bx.SequenceAlignment:
        return bx.SequenceAlignment.from_sequences(BLOSUM62 / 2, a, b, gap_open=-4.0, gap_extend=-0.5, omega=omega)

    found = frames(lambda omega: packed(alignment(omega).expected_path))
    best = alignment(bx.Hard()).decode()
    pairs = best[(best >= 0).any(-1)]
    lines = ["".join(text[k] if k >= 0 else "-" for k in side) for text, side in zip(PROTEINS, pairs.T, strict=True)]
    print("  " + "\n  ".join(lines) + "\n")
    return {"proteins": PROTEINS, "best": pairs.tolist(), "lines": lines, "frames": found}


# --- a parse

WORDS = ["she", "saw", "stars", "with", "telescopes"]
ARCS = {  # scores of head and modifier; 0 is the root
    (0, 2): 3.0,
    (2, 1): 2.5,
    (2, 3): 2.5,
    (2, 4): 1.3,
    (3, 4): 1.0,
    (4, 5): 2.5,
}


def parse() -> dict[str, Any]:
    print("Parse an ambiguous sentence …")
    scores = torch.zeros(len(WORDS) + 1, len(WORDS) + 1)
    for arc, score in ARCS.items():
        scores[arc] = score

    def frame(omega: bx.Regularizer) -> dict[str, Any]:
        p = bx.DependencyTrees(scores, omega=omega)
        _, trees = p.topk(3)
        heads = [(tree > 0).double().argmax(0)[1:].tolist() for tree in trees]
        listed = zip(p.log_prob(trees).exp().tolist(), heads, strict=True)
        best = [{"probability": q, "heads": own} for q, own in listed if q > 0]
        return {**packed(p.expected_path), "best": best}

    found = frames(frame)
    dense, sparse = (found[name][8]["best"][0]["probability"] for name in OMEGAS)
    print(f"  at γ = {GAMMAS[8]}, p(best tree) is {dense:.2f} under negentropy, {sparse:.2f} under sparsemax\n")
    return {"words": WORDS, "frames": found}


# --- attention

KEYS = ["the", "old", "man", "in", "the", "blue", "shirt", "reads", "a", "paper"]
QUERIES = ["who?", "where?", "doing what?"]
SCORES = torch.tensor(
    [
        [1.0, 2.2, 3.0, -1.0, 0.0, 0.4, 0.8, -1.0, -2.0, -1.0],
        [-2.0, -1.0, 0.2, 1.6, 0.9, 2.4, 2.6, -1.0, -1.0, 0.5],
        [-2.0, -2.0, 0.4, -1.0, -2.0, -1.0, 0.3, 2.8, 1.2, 2.2],
    ],
    dtype=torch.float64,
)


def attend() -> dict[str, Any]:
    print("Attend to segments of a sentence, with three queries …")

    def frame(omega: bx.Regularizer) -> dict[str, Any]:
        attention = SegmentationAttention(3, len(KEYS), omega=omega)
        with torch.no_grad():
            attention.weight.copy_(SCORES - 1)
            attention.transitions.copy_(torch.tensor([[0.5, -0.5], [-0.5, 0.5]]))
            _, weights = attention(torch.eye(3), torch.eye(len(KEYS)))
        return packed(weights)

    found = frames(frame)
    sparse = sum(byte > 0 for byte in base64.b64decode(found["sparsemax"][8]["cells"]))
    print(
        f"  at γ = {GAMMAS[8]}, {sparse} of {SCORES.numel()} weights are positive under sparsemax, all under softmax\n"
    )
    return {"keys": KEYS, "queries": QUERIES, "softmax": packed(SCORES.softmax(-1)), "frames": found}


# --- a custom graph

EDGES = [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (2, 4), (2, 5), (3, 5), (4, 6), (5, 6), (1, 2)]
WEIGHTS = torch.tensor([2.0, 1.4, 0.3, 0.2, 1.4, 1.9, 0.7, 0.5, 1.3, 1.1, -0.5], dtype=torch.float64)


def follow() -> dict[str, Any]:
    dag = bx.DAG(EDGES)
    count = int(dag.paths(WEIGHTS).num_paths)
    print(f"A graph of {dag.num_nodes} nodes and {dag.num_edges} edges, with {count} paths …")

    def frame(omega: bx.Regularizer) -> dict[str, Any]:
        p = dag.paths(WEIGHTS, omega=omega)
        paths, probabilities = p.support_paths()
        listed = sorted(zip(probabilities.tolist(), paths.tolist(), strict=True), reverse=True)[:4]
        best = [{"probability": q, "edges": _in_order(path)} for q, path in listed if q > 0]
        return {"edges": p.expected_path.tolist(), "value": p.value.item(), "left": len(probabilities), "best": best}

    found = frames(frame)
    dense, sparse = (found[name][8]["left"] for name in OMEGAS)
    print(f"  at γ = {GAMMAS[8]}, {dense} paths are possible under negentropy, {sparse} under sparsemax\n")
    return {"edges": EDGES, "weights": WEIGHTS.tolist(), "levels": dag.levels.tolist(), "frames": found}


def _in_order(path: list[float]) -> list[int]:
    """Return the edges of a path, from first to last."""
    return sorted((n for n, on in enumerate(path) if on), key=lambda n: EDGES[n])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="Folder for the page, default demo.")
    output: Path = parser.parse_args().output
    begun = time.perf_counter()
    torch.set_default_dtype(torch.float64)
    print("bellmax smooths the max in a dynamic program, so you can train through its value and its solution.\n")
    parts = align, tag, spell, match, parse, attend, follow
    data = {"gammas": GAMMAS, **{part.__name__: part() for part in parts}}
    page = Path(__file__).with_name("demo.html").read_text(encoding="utf-8")
    output.mkdir(parents=True, exist_ok=True)
    # "</" in the data would end the script element
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    (output / "index.html").write_text(page.replace("{{ data }}", text), encoding="utf-8")
    print(f"wrote {output / 'index.html'} in {time.perf_counter() - begun:.1f} s: open it in a browser")


if __name__ == "__main__":
    main()
