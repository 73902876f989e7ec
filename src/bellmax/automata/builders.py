"""Automata of label sequences and of CTC."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bellmax.automata.scores import one_hot, zeros
from bellmax.automata.table import Table


def as_labels(argument: str, labels: Sequence[int] | Tensor) -> list[int]:
    """Return a sequence of labels as a list. Raises ``ValueError`` if it is not one."""
    if isinstance(labels, str):
        raise ValueError(f"{argument} must be integers, got the text {labels!r}: convert its letters to integers")
    try:
        numbers = torch.as_tensor(labels)
    except (ValueError, TypeError, RuntimeError):  # other objects, or numbers beyond int64
        raise ValueError(f"{argument} must be integers, got {labels!r}") from None
    if numbers.ndim != 1:
        raise ValueError(f"{argument} must have one dimension, got shape {tuple(numbers.shape)}")
    if len(numbers) and (numbers.is_floating_point() or numbers.dtype == torch.bool):
        raise ValueError(f"{argument} must be integers, got dtype {numbers.dtype}")
    listed: list[int] = numbers.tolist()
    for n, label in enumerate(listed):
        if label < 0:
            raise ValueError(f"{argument} must be at least 0, got {label} at position {n}")
    return listed


def linear(labels: Sequence[int] | Tensor) -> Table:
    """Return the automaton of one label sequence."""
    sequence = as_labels("labels", labels)
    size = len(sequence)
    step, label = np.arange(size), np.array(sequence, np.int64)
    arcs = np.stack((step, step + 1, label, label), 1)
    return Table(arcs, zeros(size), one_hot(size + 1, 0), one_hot(size + 1, size), range(size + 1))


def ctc_target(target: Sequence[int] | Tensor, blank: int) -> Table:
    """Return the alignments of a target. State 2j is a blank after j labels, state 2j − 1 is label j."""
    labels = as_labels("target", target)
    if not isinstance(blank, int) or blank < 0:
        raise ValueError(f"blank must be an integer of at least 0, got {blank!r}")
    if blank in labels:
        raise ValueError(f"target must not hold the blank {blank}, got it at position {labels.index(blank)}")
    rows = [(0, 0, blank, -1)]
    for j, label in enumerate(labels, 1):
        here, before = 2 * j - 1, 2 * j - 3
        rows.append((here - 1, here, label, label))
        if j > 1 and label != labels[j - 2]:
            rows.append((before, here, label, label))
        rows += [(here, here, label, -1), (here, here + 1, blank, -1), (here + 1, here + 1, blank, -1)]
    size = 2 * len(labels) + 1
    finals = (size - 1, size - 2) if labels else (0,)
    return Table(np.array(rows), zeros(len(rows)), one_hot(size, 0), one_hot(size, *finals), range(size))


def ctc_topology(vocab: int, blank: int) -> Table:
    """Return the automaton that merges repeats and removes blanks. The state is the last label, or 0 for a blank."""
    if not isinstance(vocab, int) or vocab < 1:
        raise ValueError(f"vocab must be a positive integer, the number of classes with the blank, got {vocab!r}")
    if not isinstance(blank, int) or not 0 <= blank < vocab:
        raise ValueError(f"blank must be an integer from 0 to {vocab - 1}, got {blank!r}")
    classes = np.array([blank, *(k for k in range(vocab) if k != blank)])
    source, target = (states.ravel() for states in np.indices((vocab, vocab)))
    label = classes[target]
    output = np.where((target == 0) | (source == target), -1, label)
    arcs = np.stack((source, target, label, output), 1)
    return Table(arcs, zeros(len(arcs)), one_hot(vocab, 0), zeros(vocab), range(vocab))
