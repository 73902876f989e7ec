"""Chains given by scores. log q is computed by the kernels of dense chains."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bellmax.backends.native.sweeps import NativeSweeps
from bellmax.backends.reference.scored_chain import LogTransitions
from bellmax.programs.scored_chain import onto_edges
from bellmax.regularizers import Hard, Negentropy, Regularizer
from bellmax.tensors import Tensors


class NativeScoredChain(LogTransitions, NativeSweeps):
    """log q is read from the tape of the scores, so that a path that other sweeps find has the probability they say."""

    def __init__(self, chain: NativeSweeps) -> None:
        super().__init__("scored_chain")
        self.chain = chain

    def _dense(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """In float64, as the kernels that walk along a chain compute, but for the hard max, which has to round as the
        forward sweep does.

        The values on the tape have the emissions. A dense chain has no scores of the end: they are added to the values
        of the last step. Under negentropy values are in units of log 2, or powers of two if the tape is marked by a 1.
        """
        dtype = theta[0].dtype if isinstance(omega, Hard) else torch.float64
        emissions, transitions, start, end = (t.to(dtype) for t in theta)
        is_negentropy = isinstance(omega, Negentropy)
        values, thresholds = tape.to(dtype).unbind(1)
        if is_negentropy:
            values = torch.where(thresholds[:, :1, :1] == 1, values.log2(), values)
        steps = torch.arange(values.shape[1])
        lengths = index[0].unsqueeze(-1) if index else torch.full_like(steps[:1], emissions.shape[1])
        at_end = (steps == lengths).unsqueeze(-1)
        own = end * (math.log2(math.e) if is_negentropy else 1)
        values = torch.where(at_end, values + own.unsqueeze(1), values)
        edges = onto_edges(transitions, start, emissions, index)
        return edges, torch.stack((values, torch.zeros_like(thresholds)), 1)
