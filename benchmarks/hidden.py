"""Series with hidden states and start parameters for EM, the same in every process. Needs NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SYMBOLS = 16
Size = tuple[int, int, int]  # series, steps, states


class Problem(NamedTuple):
    """Series, and the parameters at which EM starts."""

    size: Size
    x: np.ndarray  # (series, steps, features), or symbols (series, steps)
    startprob: np.ndarray
    transmat: np.ndarray  # [from, to]
    emissions: dict[str, np.ndarray]  # means and covars (S, D), or emissionprob (S, K)


def make_problem(kind: str, size: Size, peaked: bool = False) -> Problem:
    """Return a problem with D features (kind "Gaussian, D = …") or with symbols (kind "categorical").

    If ``peaked``, the variances at which EM starts are divided by 1000.
    """
    series, steps, states = size
    random = np.random.default_rng(0)
    path = dwelling(random, size)
    start, transmat = random.dirichlet(np.ones(states)), random.dirichlet(np.ones(states), size=states)
    if kind == "categorical":
        table = random.dirichlet(np.ones(SYMBOLS), size=states)
        cumulative = table.cumsum(1)[:, :-1]
        x = (random.random((series, steps, 1)) > cumulative[path]).sum(-1)
        guess = {"emissionprob": (table + 1 / SYMBOLS) / 2}
    else:
        features = int(kind.split()[-1])
        means = 3 * random.normal(size=(states, features))
        x = means[path] + random.normal(size=(series, steps, features))
        variances = 1 + random.random((states, features))
        guess = {"means": means + random.normal(size=means.shape) / 2, "covars": variances / (1000 if peaked else 1)}
    return Problem(size, x, start, (transmat + np.eye(states)) / 2, guess)


def dwelling(random: np.random.Generator, size: Size) -> np.ndarray:
    """Return paths (series, steps) that move to a random state after 20 steps on average."""
    series, steps, states = size
    moves = random.random((series, steps)) < 1 / 20
    moves[:, 0] = True
    last_move = np.maximum.accumulate(np.where(moves, np.arange(steps), 0), axis=1)
    return np.take_along_axis(random.integers(states, size=(series, steps)), last_move, axis=1)
