"""Paths of composed automata and of batches, compared with enumeration and with bx.CTC."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.languages import random_automaton, random_grams, walks, write_arpa
from support.problems import potentials
from torch import Tensor

import bellmax as bx

A = bx.Automaton


def enumerated(automaton: bx.Automaton, log_probs: Tensor) -> Tensor:
    """The log-partition function of the paths through all frames."""
    frames = torch.arange(len(log_probs))
    scores = [
        score + log_probs[frames, list(labels)].sum()
        for labels, _, score in walks(automaton, len(log_probs), tensors=True)
        if len(labels) == len(log_probs)
    ]
    return torch.stack(scores).logsumexp(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_compositions(seed: int) -> None:
    rng = random.Random(seed)
    left, right = (random_automaton(rng, num_arcs=8, epsilon=0.3, tensors=True) for _ in range(2))
    graph, log_probs = left @ right, potentials(3, 2, seed=seed).requires_grad_()
    leaves = [log_probs, *(getattr(a, name) for a in (left, right) for name in ("scores", "start", "final"))]
    value, expected = graph.paths(log_probs).value, enumerated(graph, log_probs)
    torch.testing.assert_close(value, expected)
    results = (torch.autograd.grad(v, leaves, allow_unused=True, materialize_grads=True) for v in (value, expected))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_a_batch_of_transcripts_is_ctc() -> None:
    targets, lengths = [[1, 2, 2], [3], [2, 1]], [7, 5, 6]
    log_probs = potentials(3, 7, 4).log_softmax(-1).requires_grad_()
    p = A.stack([A.ctc(target) for target in targets]).paths(log_probs, lengths=lengths)
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(target) for target in targets], True)
    ctc = bx.CTC(log_probs, padded, lengths=(lengths, [3, 1, 2]))
    torch.testing.assert_close(p.value, ctc.value)
    torch.testing.assert_close(p.expected_path, ctc.expected_path)
    assert p.labels(p.decode()).equal(ctc.decode())
    assert [row[row >= 0].tolist() for row in p.outputs(p.decode())] == targets


def test_lexicon_and_ngram_train_with_lattice_free_mmi(tmp_path: Path) -> None:
    words = {"ab": [1, 2], "b": [2], "c": [3, 1]}
    path = write_arpa(tmp_path / "words.arpa", random_grams(random.Random(0), tuple(words), 2))
    weight = torch.zeros(3, requires_grad=True)
    grammar = A.lexicon(words, scores=weight) @ A.ngram(path)
    graph = A.ctc(vocab=4) @ grammar
    sentence = A.ctc(vocab=4) @ (grammar @ A.linear([2, 0]))
    log_probs = potentials(6, 4).float().log_softmax(-1).requires_grad_()
    optimizer = torch.optim.SGD([log_probs, weight], lr=0.5)
    losses = []
    for _ in range(20):
        loss = graph.paths(log_probs).value - sentence.paths(log_probs).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0
    p = graph.paths(log_probs, omega="hard")
    assert p.value.dtype == torch.float32
    assert graph.names(p.outputs(p.decode())) == ["c", "ab"]


def test_scores_of_paths_can_be_replaced() -> None:
    automaton = A([(0, 0, 0), (0, 0, 1)], final={0: 0.0}, scores=[5.0, 6.0])
    scores = torch.zeros(2, requires_grad=True)
    p = automaton.paths(torch.zeros(3, 2), scores=scores, start=torch.ones(1), final=2 * torch.ones(1))
    torch.testing.assert_close(p.value, torch.tensor(3.0) + 3 * torch.tensor(2.0).log())
    (gradient,) = torch.autograd.grad(p.value, scores)
    torch.testing.assert_close(gradient, torch.tensor([1.5, 1.5]))
    with pytest.raises(ValueError, match=r"scores must have shape \(\.\.\., 2\), got \(3,\)"):
        automaton.paths(torch.zeros(3, 2), scores=torch.zeros(3))
    with pytest.raises(ValueError, match="scores must be a tensor, got list"):
        automaton.paths(torch.zeros(3, 2), scores=[0.0, 0.0])  # type: ignore[arg-type]
