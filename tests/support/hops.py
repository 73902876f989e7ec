"""A structure in one file: paths over T steps by hops of one or two steps."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bellmax.distribution import PathDistribution
from bellmax.programs import register
from bellmax.programs.blocks import BlockProgram, Edges
from bellmax.tensors import Tensors


class HopProgram(BlockProgram):
    """θ is the scores of hops by one step (B, T) and by two (B, T − 1), and 0 for the end. Index: lengths (B,)."""

    name, scores, index_dims = "hops", ("one", "two", "_end"), (0,)

    def blocks(self, event: Sequence[int]) -> list[tuple[int, ...]]:
        return [(event[0],), (event[0] - 1,), (event[0],)]

    def edges(self, event: Sequence[int]) -> Edges:
        node, end = np.arange(event[0] + 1), event[0] + 1
        parent = np.concatenate((node[:-1], node[:-2], node[1:]))
        return Edges(parent, np.concatenate((node[1:], node[2:], np.full(event[0], end))), np.arange(end + 1))

    def exists(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        step, lengths = torch.arange(1, theta[0].shape[1] + 1), index[0].unsqueeze(-1)
        return [step <= lengths, step[1:] <= lengths, step == lengths]


class Hops(PathDistribution):
    """The paths of :class:`HopProgram`; an event is the hops by one step."""

    def __init__(self, one: Tensor, two: Tensor, lengths: Tensor, **options: object) -> None:
        scores = {"one": (one, 1), "two": (two, 1), "_end": (one.new_zeros(()), 0)}
        super().__init__(register(HopProgram()), scores, (lengths,), one.shape[:-1], one.shape[-1:], **options)
