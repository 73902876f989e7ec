"""Base class of programs that run on the graph engine, with one block of edges for each score."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

import bellmax.programs.graph as graph
from bellmax.modes import outside_modes
from bellmax.programs.program import Program
from bellmax.tensors import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Edges(NamedTuple):
    """The edges of a graph, block by block, and the levels of its nodes. Node 0 is the start, the last one the end."""

    parent: NDArray[np.int64]
    child: NDArray[np.int64]
    level: NDArray[np.int64]


class BlockProgram(Program):
    """A program whose graph depends only on the shape of the event.

    A subclass names its scores and lists the edges of its graph in :meth:`edges`, block by block. Block n has
    the shape ``blocks(...)[n]`` and reads score n, which broadcasts to this shape.
    """

    @abstractmethod
    def blocks(self, event: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shape of each block, one for each score, for an event of this shape."""

    @abstractmethod
    def edges(self, event: Sequence[int]) -> Edges:
        """Return the graph for an event of this shape."""

    def exists(self, theta: Tensors, index: Tensors) -> list[Tensor | None]:
        """For each block, True at the edges that exist, of a shape that broadcasts to (B, *block); None for all."""
        return [None] * len(theta)

    def used(self, theta: Tensors, index: Tensors) -> Sequence[Tensor | None]:
        """An entry is used if an edge that reads it exists."""
        batch, *event = theta[0].shape
        triples = zip(self.exists(theta, index), self.blocks(event), theta, strict=True)
        return [
            None if mask is None else _sum_to(mask.expand(batch, *block).long(), score.shape) > 0
            for mask, block, score in triples
        ]

    def _graph(self, theta: Tensors) -> tuple[Tensor, ...]:
        return _sorted_graph(self, tuple(theta[0].shape[1:]), theta[0].device)

    def nodes(self, theta: Tensors, index: Tensors) -> tuple[int, ...]:
        return (self._graph(theta)[0].shape[0] - 1,)

    def engine_index(self, theta: Tensors, index: Tensors) -> Tensors:
        return self._graph(theta)

    def weights(self, theta: Tensors, index: Tensors) -> Tensor:
        return self._join(theta, self.exists(theta, index))

    def along(self, z: Tensors, index: Tensors) -> Tensor:
        return self._join(z, [None] * len(z))

    def _join(self, theta: Tensors, masks: Sequence[Tensor | None]) -> Tensor:
        """Expand each score (B or 1, …) to its block, close the edges that a mask excludes, and join the blocks."""
        (batch, *event), rows = theta[0].shape, list[Tensor]()
        for score, shape, mask in zip(theta, self.blocks(event), masks, strict=True):
            if mask is None:  # a list of equal rows saves a copy of the expanded score
                missing = len(shape) + 1 - score.ndim
                row = score.expand(batch, *shape[missing:]).unsqueeze(-1).flatten(1)
                rows += [row] * math.prod(shape[:missing])
            else:
                rows.append(
                    _insert_dims(score, len(shape) + 1).expand(batch, *shape).masked_fill(~mask, -math.inf).flatten(1)
                )
        return torch.cat(rows, 1)

    def compact_paths(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        return self.event_of(edges, theta, index)

    def event_of(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensor:
        """Take the first block, which reads the first score, of edges (..., E)."""
        event = theta[0].shape[1:]
        shape = self.blocks(event)[0]
        block = edges[..., : math.prod(shape)].reshape(*edges.shape[:-1], *shape)
        lead = edges.ndim - 1
        missing = len(shape) - len(event)
        return (block.sum(tuple(range(lead, lead + missing))) if missing else block).sum_to_size(
            *edges.shape[:-1], *event
        )

    def onto_scores(self, edges: Tensor, theta: Tensors, index: Tensors) -> Tensors:
        shapes = self.blocks(theta[0].shape[1:])
        blocks = zip(edges.split([math.prod(shape) for shape in shapes], 1), shapes, theta, strict=True)
        return [
            _sum_to(block.reshape(edges.shape[0], *shape), (edges.shape[0] if n == 0 else len(score), *score.shape[1:]))
            for n, (block, shape, score) in enumerate(blocks)
        ]


def _insert_dims(score: Tensor, dims: int) -> Tensor:
    """Insert dimensions of size 1 behind the batch, up to ``dims`` in all."""
    return score.reshape(score.shape[0], *[1] * (dims - score.ndim), *score.shape[1:])


def _sum_to(block: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum a block (B, *block) to the shape of the score that was broadcast to it."""
    missing = block.ndim - len(shape)
    total = block.sum(tuple(range(1, 1 + missing))) if missing else block
    return total.sum_to_size(tuple(shape)).contiguous()


@lru_cache(maxsize=8)
def _sorted_graph(program: BlockProgram, event: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return the index of the graph engine on a device, cached because it depends on the event shape only."""
    with outside_modes():
        parent, child, level = program.edges(event)
        return tuple(torch.from_numpy(array).to(device) for array in graph.sort(child, parent, level))
