"""Functions that declare a :class:`bellmax.Lattice`: which tensor entry is a score, and where paths start and end.

In a cell (i, j), a score reads one entry of a tensor. Pass the tensors to :meth:`bellmax.Lattice.paths` by name:

>>> import torch, bellmax as bx
>>> from bellmax import lattice as L
>>> change = bx.Move(1, 1, score=L.cell("change", -1, -1))
>>> edit = bx.Lattice([change, bx.Move(1, 0, score=1.0), bx.Move(0, 1, score=1.0)])
>>> edit.paths({"change": torch.ones(4, 3)}, omega="hard", minimize=True).value
tensor(4.)
"""

from typing import TYPE_CHECKING

from bellmax.names import attribute_error
from bellmax.structures.lattice import (
    Score,
    along_column,
    along_row,
    anywhere,
    at_class,
    cell,
    cell_class,
    cell_label,
    column,
    corner,
    gather,
    pair,
    row,
    scalar,
)

__all__ = [
    "Score",
    "along_column",
    "along_row",
    "anywhere",
    "at_class",
    "cell",
    "cell_class",
    "cell_label",
    "column",
    "corner",
    "gather",
    "pair",
    "row",
    "scalar",
]

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        raise attribute_error("bellmax.lattice", name)
