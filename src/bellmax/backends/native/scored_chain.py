"""Sweeps of chains of emissions and transitions. The kernels of dense chains compute log q."""

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
    """Sweeps by the kernels of scored chains; log q from the dense chain, see :meth:`_dense`.

    log q uses the tape of the scored chain, so that its probabilities agree with the other sweeps.
    """

    def __init__(self, chain: NativeSweeps) -> None:
        super().__init__("scored_chain")
        self.chain = chain

    def _dense(self, theta: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
        """Return the potentials (B, T, S, S) and the tape of the equivalent dense chain, for the kernels of log q.

        Both are float64, the precision of the other kernels. The hard max is an exception: it must round as the
        forward sweep did, to break ties in the same way.

        Values on the tape include the emissions. A dense chain has no end scores, so these are added to the values of
        the last step. Under negentropy values are in units of log 2, or powers of two if the tape begins with 1 or 2.
        After a 2, a tape of floats holds doubles.
        """
        dtype = theta[0].dtype if isinstance(omega, Hard) else torch.float64
        emissions, transitions, start, end = (t.to(dtype) for t in theta)
        is_negentropy = isinstance(omega, Negentropy)
        values, thresholds = tape.to(dtype).unbind(1)
        if is_negentropy:
            mark = values[:, :1, :1]
            values = torch.where(mark == 1, values.log2(), values)
            if tape.dtype == torch.float32:
                wide = tape.flatten(1).view(torch.float64).view(values.shape)
                values = torch.where(mark == 2, wide.log2(), values)
        steps = torch.arange(values.shape[1])
        lengths = index[0].unsqueeze(-1) if index else torch.full_like(steps[:1], emissions.shape[1])
        at_end = (steps == lengths).unsqueeze(-1)
        end_values = end * (math.log2(math.e) if is_negentropy else 1)
        values = torch.where(at_end, values + end_values.unsqueeze(1), values)
        edges = onto_edges(transitions, start, emissions, index)
        return edges, torch.stack((values, torch.zeros_like(thresholds)), 1)
