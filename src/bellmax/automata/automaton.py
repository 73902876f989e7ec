"""The class Automaton."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import bellmax.automata.builders as builders
from bellmax.automata.reading import Arcs, StateScores, read
from bellmax.automata.table import Table
from bellmax.inputs import Lengths, Numbers, answers_near_misses, check_tensor
from bellmax.regularizers import Regularizer
from bellmax.tensors import Gamma


class Arced:
    """Arcs with scores, for one automaton or a batch."""

    arcs: Tensor
    scores: Tensor
    start: Tensor
    final: Tensor

    @property
    def num_states(self) -> int:
        """The number S of states."""
        return self.start.shape[-1]

    @property
    def num_arcs(self) -> int:
        """The number A of arcs."""
        return self.arcs.shape[-2]

    @answers_near_misses
    def paths(
        self,
        log_probs: Tensor,
        *,
        scores: Tensor | None = None,
        start: Tensor | None = None,
        final: Tensor | None = None,
        lengths: Lengths | None = None,
        omega: str | Regularizer = "negentropy",
        gamma: Gamma | None = None,
    ) -> Any:
        """Return the distribution over the paths of the automaton with one arc per frame."""
        from bellmax.structures.automaton import AutomatonPaths

        dtype = check_tensor("log_probs", log_probs).dtype
        scores, start, final = (
            (default if tensor is None else tensor).to(log_probs.device, dtype)
            for tensor, default in ((scores, self.scores), (start, self.start), (final, self.final))
        )
        return AutomatonPaths(self, log_probs, scores, start, final, lengths, omega, gamma)


class Automaton(Arced):
    """A finite automaton whose arcs have labels, outputs and scores."""

    @answers_near_misses
    def __init__(
        self,
        arcs: Arcs,
        *,
        scores: Numbers | None = None,
        start: StateScores | None = None,
        final: StateScores | None = None,
    ) -> None:
        self._table = read(arcs, scores, start, final)

    @classmethod
    def _of(cls, table: Table) -> Automaton:
        automaton = object.__new__(cls)
        automaton._table = table
        return automaton

    @cached_property
    def arcs(self) -> Tensor:  # type: ignore[override]
        """The arcs, (A, 4) int64 [source, target, label, output]."""
        return torch.from_numpy(self._table.arcs)

    @property
    def scores(self) -> Tensor:  # type: ignore[override]
        """The score of each arc, (A,)."""
        return self._table.scores.tensor()

    @property
    def start(self) -> Tensor:  # type: ignore[override]
        """The score of each start state, (S,)."""
        return self._table.start.tensor()

    @property
    def final(self) -> Tensor:  # type: ignore[override]
        """The score of each final state, (S,)."""
        return self._table.final.tensor()

    @property
    def states(self) -> Sequence[Hashable]:
        """The names of the states."""
        return self._table.states

    def __repr__(self) -> str:
        return f"Automaton(num_states={self.num_states}, num_arcs={self.num_arcs})"

    @classmethod
    def linear(cls, labels: Sequence[int] | Tensor) -> Automaton:
        """Return the automaton that accepts one sequence of labels."""
        return cls._of(builders.linear(labels))

    @classmethod
    def ctc(
        cls, target: Sequence[int] | Tensor | None = None, *, vocab: int | None = None, blank: int = 0
    ) -> Automaton:
        """Return the automaton of CTC."""
        if (target is None) == (vocab is None):
            raise ValueError(
                "ctc must have either a target or vocab=, got " + ("neither" if target is None else "both")
            )
        if target is not None:
            return cls._of(builders.ctc_target(target, blank))
        assert vocab is not None
        return cls._of(builders.ctc_topology(vocab, blank))

    @staticmethod
    def stack(automata: Sequence[Automaton]) -> AutomatonBatch:
        """Return a batch of automata."""
        return AutomatonBatch(automata)


class AutomatonBatch(Arced):
    """A batch of N automata, padded to the same number of states and arcs."""

    def __init__(self, automata: Sequence[Automaton]) -> None:
        self.automata = tuple(automata)
        if not self.automata or not all(isinstance(automaton, Automaton) for automaton in self.automata):
            raise ValueError("automata must be a sequence of at least one Automaton")
        self.arcs = torch.nn.utils.rnn.pad_sequence([a.arcs for a in self.automata], True, -1)

    @property
    def scores(self) -> Tensor:  # type: ignore[override]
        """The score of each arc, (N, A), padded with 0."""
        return torch.nn.utils.rnn.pad_sequence([a.scores for a in self.automata], True)

    @property
    def start(self) -> Tensor:  # type: ignore[override]
        """The score of each start state, (N, S)."""
        return torch.nn.utils.rnn.pad_sequence([a.start for a in self.automata], True, -torch.inf)

    @property
    def final(self) -> Tensor:  # type: ignore[override]
        """The score of each final state, (N, S)."""
        return torch.nn.utils.rnn.pad_sequence([a.final for a in self.automata], True, -torch.inf)
