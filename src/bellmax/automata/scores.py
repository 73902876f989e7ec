"""Vectors of scores that stay connected to the user's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

Term: TypeAlias = "tuple[Tensor, NDArray[np.int64]]"


@dataclass(frozen=True)
class Scores:
    """A vector of numbers plus entries of tensors, which are read at each call of :meth:`tensor`.

    A term is a vector and, for each entry of the sum, an index into this vector or −1 for no entry.
    """

    constant: NDArray[np.float64]
    terms: tuple[Term, ...] = ()

    @classmethod
    def of_tensor(cls, vector: Tensor) -> Scores:
        """Return the entries of a tensor."""
        return cls(np.zeros(len(vector)), ((vector, np.arange(len(vector))),))

    def closed(self) -> Scores:
        """Return the vector with its present entries of −∞ as constants."""
        is_closed = (self.tensor().detach() == -torch.inf).cpu().numpy()
        terms = tuple((vector, np.where(is_closed, -1, index)) for vector, index in self.terms)
        return Scores(np.where(is_closed, -np.inf, self.constant), terms)

    def __len__(self) -> int:
        return len(self.constant)

    def tensor(self) -> Tensor:
        """Return the vector. It has the dtype and the device of the tensors. Numbers alone are float64 on the CPU."""
        constant = torch.from_numpy(self.constant)
        if not self.terms:
            return constant
        if len(self.terms) == 1 and self._is_identity():
            return self.terms[0][0]
        dtype = reduce(torch.promote_types, (vector.dtype for vector, _ in self.terms))
        total = constant.to(self.terms[0][0].device, dtype)
        for vector, index in self.terms:
            padded = torch.cat((vector, vector.new_zeros(1)))
            total = total + padded[torch.from_numpy(index).to(vector.device)]  # −1 is the zero at the end
        return total

    def _is_identity(self) -> bool:
        vector, index = self.terms[0]
        closed = index < 0
        is_same = len(vector) == len(index) and bool((closed | (index == np.arange(len(index)))).all())
        return is_same and not self.constant[~closed].any() and bool((self.constant[closed] == -np.inf).all())

    def take(self, index: NDArray[np.int64], fill: float = 0.0) -> Scores:
        """Return the entries at ``index``, or ``fill`` where it is −1."""
        exists = index >= 0
        constant = np.full(len(index), fill)
        constant[exists] = self.constant[index[exists]]
        terms = []
        for vector, old in self.terms:
            new = np.full(len(index), -1)
            new[exists] = old[index[exists]]
            if (new >= 0).any():
                terms.append((vector, new))
        return Scores(constant, tuple(terms))

    def plus(self, other: Scores) -> Scores:
        """Return the sum of two vectors of the same length."""
        terms = list(self.terms)
        for vector, index in other.terms:
            for n, (known, old) in enumerate(terms):
                if known is vector and not ((old >= 0) & (index >= 0)).any():
                    terms[n] = vector, np.maximum(old, index)
                    break
            else:
                terms.append((vector, index))
        return Scores(self.constant + other.constant, tuple(terms))


def zeros(size: int) -> Scores:
    """Return a vector of zeros."""
    return Scores(np.zeros(size))


def one_hot(size: int, *states: int) -> Scores:
    """Return a vector of −∞, except for zeros at the states."""
    constant = np.full(size, -np.inf)
    constant[list(states)] = 0.0
    return Scores(constant)


def join(parts: Sequence[Scores]) -> Scores:
    """Return the concatenation of vectors."""
    size, offset = sum(map(len, parts)), 0
    total = zeros(size)
    for part in parts:
        index = np.full(size, -1)
        index[offset : offset + len(part)] = np.arange(len(part))
        total, offset = total.plus(part.take(index)), offset + len(part)
    return total
