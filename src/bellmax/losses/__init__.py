"""Losses for learning potentials from paths (section 5 of the paper): to be minimised, never below 0.

They take a distribution over paths ``p`` and a target, which is one of

- a path: a 0/1 tensor of p's potentials' shape, bool or floating point;
- a set of paths, those that stay within a 0/1 tensor of that shape: partial labels;
- for chains, states (..., T) int64, or allowed states (..., T, S), bool. A label of −100 masks its step, as if p were
  built without it; −1 stands for any state;
- for alignments, index pairs (..., L, 2) int64 padded with −1;
- for hypergraphs and lattices, how often a derivation, or a path, has each weight;
- for trees, labels (..., V) int64, −1 or −100 for any.

Targets at masked steps and in the padding are ignored. A target that p cannot take is a ``ValueError``.

``reduction`` is "none" for the batch shape, "sum", "mean" over the batch, or for chains "token_mean" over the steps
that are kept. A sequence of which no step is kept has loss 0, and is left out of the mean.
"""

from bellmax.losses.alignments import alignment_area, mean_absolute_deviation
from bellmax.losses.expectations import expected_cost, path_nll, relaxed
from bellmax.losses.margins import crf_nll, hamming_cost, structured_hinge, structured_perceptron, surrogate

__all__ = ["alignment_area", "crf_nll", "expected_cost", "hamming_cost", "mean_absolute_deviation", "path_nll"]
__all__ += ["relaxed", "structured_hinge", "structured_perceptron", "surrogate"]
