"""Losses for learning potentials from paths (section 5 of the paper).

All losses are at least 0, except :func:`expected_cost` and :func:`risk`, which can be negative if costs are negative.
These two take a cost. Every other loss takes a distribution over paths ``p`` and a target, the correct path or a set of
correct paths. The target has one of these forms:

- a path in the decoded form of ``p``, which :meth:`PathDistribution.decode` returns: integers such as tags, index
  pairs, segments, spans or heads, or nested lists of edge numbers for hypergraphs;
- a path as an event: a 0/1 tensor of the shape of the potentials, bool or floating point;
- a set of paths (partial labels): a 0/1 tensor of the shape of the potentials. The set contains every path that only
  uses entries with a 1;
- for chains, states (..., T) int64, or allowed states (..., T, S) bool. The state −1 allows any state. The state −100
  masks its step: the loss is computed as if the sequence did not contain this step;
- for a :class:`TreeModel`, labels (..., V) int64, where −1 or −100 allows any label;
- for dependency trees, heads (..., n) int64, where −1 allows any head;
- for automata, the label of each frame as an event: the set of all paths with these labels;
- for hypergraphs and lattices, the number of times that a derivation or a path uses each weight;
- for programs (:func:`bellmax.program`), the number of times that a derivation uses each score entry: a tensor, or a
  mapping from the names of several scores to tensors. For problems of different sizes, a list of targets.

Targets at masked steps and in the padding are ignored. If the target allows no path of ``p``, a loss raises
``ValueError``.

The argument ``reduction`` has these values:

- "none": no reduction, the loss has the batch shape;
- "mean": the mean over the batch;
- "sum": the sum over the batch;
- "token_mean" (chains only): the sum over the batch, divided by the number of unmasked steps.

A sequence without unmasked steps has loss 0 and does not count in the mean.
"""

from typing import TYPE_CHECKING

from bellmax.losses.alignments import alignment_area, mean_absolute_deviation
from bellmax.losses.expectations import expected_cost, path_nll, relaxed
from bellmax.losses.margins import crf_nll, hamming_cost, structured_hinge, structured_perceptron, surrogate
from bellmax.losses.risks import risk
from bellmax.names import attribute_error

__all__ = ["alignment_area", "crf_nll", "expected_cost", "hamming_cost", "mean_absolute_deviation", "path_nll"]
__all__ += ["relaxed", "risk", "structured_hinge", "structured_perceptron", "surrogate"]

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        raise attribute_error("bellmax.losses", name)
