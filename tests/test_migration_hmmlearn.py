"""The rows of docs/migrate/hmmlearn.md: both columns are evaluated with hmmlearn and with bellmax, and compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellmax.sklearn import HMM

models = pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is not installed")

PAGE = (Path(__file__).parents[1] / "docs/migrate/hmmlearn.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^|]+)` \| (?:`([^|]+)` )?\|", PAGE, re.MULTILINE)
ARGUMENTS = [row for row in ROWS if re.match(r"\w+=", row[0])]
EXPRESSIONS = [row for row in ROWS if row[0].startswith("theirs.")]
LENGTHS = [20, 1, 33, 2]
STATES, FEATURES, SYMBOLS = 2, 2, 5
CLASSES = {"gaussian": "GaussianHMM", "categorical": "CategoricalHMM", "poisson": "PoissonHMM"}


def draw(emissions: str) -> np.ndarray:
    """Return the steps of all series, one after the other."""
    random = np.random.default_rng(0)
    size = sum(LENGTHS), FEATURES
    if emissions == "categorical":
        return random.integers(SYMBOLS, size=(sum(LENGTHS), 1))
    states = np.repeat(np.arange(8) % 2, 7)[: sum(LENGTHS), None]
    return random.poisson(1 + 3 * states, size) if emissions == "poisson" else random.normal(2 * states, 1, size)


def initial(emissions: str, covariance: str) -> dict[str, np.ndarray]:
    """Return initial parameters, by their names in both libraries."""
    random = np.random.default_rng(1)
    table = {"startprob": np.array([0.6, 0.4]), "transmat": np.array([[0.8, 0.2], [0.3, 0.7]])}
    if emissions == "categorical":
        return {**table, "emissionprob": random.dirichlet(np.ones(SYMBOLS), size=STATES)}
    if emissions == "poisson":
        return {**table, "lambdas": random.uniform(1, 4, (STATES, FEATURES))}
    matrix = np.array([[1.0, 0.3], [0.3, 2.0]])
    covars = {
        "diag": np.array([[1.0, 2.0], [3.0, 1.5]]),
        "spherical": np.array([1.0, 2.0]),
        "full": np.stack([matrix, 2 * matrix]),
        "tied": matrix,
    }
    return {**table, "means": random.normal(size=(STATES, FEATURES)), "covars": covars[covariance]}


def fitted(emissions: str, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Fit both models from the same parameters, and return the names of the page."""
    steps = draw(emissions)
    series = np.split(steps, np.cumsum(LENGTHS)[:-1])
    options = {"n_components": STATES, "init_params": "", "n_iter": 20, "tol": -np.inf, **theirs}
    if emissions == "gaussian":
        options = {"covars_prior": 0, **options}
    model = getattr(models, CLASSES[emissions])(**options)
    start = initial(emissions, ours.get("covariance", "diag"))
    for name, parameter in start.items():
        setattr(model, f"{name}_", parameter)
    model.fit(steps, LENGTHS)
    own = {"n_states": STATES, "covariance": "diag", "max_iter": 20, "tol": None, "init": start, **ours}
    return {
        "theirs": model,
        "ours": HMM(emissions=emissions, **own).fit(series),
        "X": steps,
        "lengths": LENGTHS,
        "series": series,
        "np": np,
        "D": FEATURES,
    }


def assert_equal_fits(names: dict[str, Any]) -> None:
    theirs, ours = names["theirs"], names["ours"]
    history = np.array(theirs.monitor_.history)
    np.testing.assert_allclose(ours.log_likelihoods_, history, rtol=0, atol=1e-8)
    assert (np.diff(ours.objectives_) >= -1e-9 * np.abs(ours.objectives_[1:])).all()
    for name in ("startprob", "transmat", "means", "emissionprob", "lambdas"):
        if hasattr(ours, f"{name}_"):
            np.testing.assert_allclose(getattr(ours, f"{name}_"), getattr(theirs, f"{name}_"), rtol=0, atol=1e-8)
    if hasattr(ours, "covars_"):
        covars = ours.covars_ if ours.covariance != "spherical" else np.repeat(ours.covars_[:, None], FEATURES, 1)
        np.testing.assert_allclose(covars, theirs._covars_, rtol=0, atol=1e-8)


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical", "tied"])
def test_log_likelihoods_of_gaussians_are_equal(covariance: str) -> None:
    assert_equal_fits(fitted("gaussian", {"covariance_type": covariance}, {"covariance": covariance}))


@pytest.mark.parametrize("implementation", ["log", "scaling"])
@pytest.mark.parametrize("emissions", ["categorical", "poisson"])
def test_log_likelihoods_of_symbols_and_counts_are_equal(emissions: str, implementation: str) -> None:
    assert_equal_fits(fitted(emissions, {"implementation": implementation}, {}))


def test_rows_of_the_page_are_read() -> None:
    tables = re.findall(r"^\| `.*$", PAGE, re.MULTILINE)
    assert len(ARGUMENTS) + len(EXPRESSIONS) == len(ROWS) == len(tables)
    assert len(ARGUMENTS) > 15
    assert len(EXPRESSIONS) > 15


def arguments(text: str) -> dict[str, Any]:
    return eval(f"dict({text})", {"np": np, "D": FEATURES, "X": draw("gaussian"), "dict": dict})


@pytest.mark.parametrize(("theirs", "ours"), ARGUMENTS, ids=[theirs for theirs, _ in ARGUMENTS])
def test_arguments_of_the_page_are_equal(theirs: str, ours: str) -> None:
    emissions = "categorical" if "emissionprob" in theirs else "gaussian"
    names = fitted(emissions, arguments(theirs), arguments(ours))
    assert_equal_fits(names)
    if "tol=0.5" in theirs:
        assert 2 < names["ours"].n_iter_ < 100


@pytest.mark.parametrize(("theirs", "ours"), EXPRESSIONS, ids=[theirs for theirs, _ in EXPRESSIONS])
def test_expressions_of_the_page_are_equal(theirs: str, ours: str) -> None:
    emissions = "categorical" if "emissionprob" in theirs else "poisson" if "lambdas" in theirs else "gaussian"
    names = fitted(emissions, {}, {})
    expected, actual = eval(theirs, names), eval(ours, names)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-8)


def test_a_prior_of_poisson_is_weaker_in_hmmlearn() -> None:
    """It weighs the prior against the number of all steps, as the page says."""
    priors = {"lambdas": 40.0, "lambdas_weight": 20.0}
    names = fitted(
        "poisson", {"lambdas_prior": 40.0, "lambdas_weight": 20.0, "n_iter": 1}, {"priors": priors, "max_iter": 1}
    )
    free = fitted("poisson", {"n_iter": 1}, {"max_iter": 1})["ours"].lambdas_
    theirs, ours = names["theirs"].lambdas_, names["ours"].lambdas_
    assert (np.abs(theirs - free) < np.abs(ours - free)).all()


def test_the_floor_of_hmmlearn_has_no_effect_in_em() -> None:
    first, second = (fitted("gaussian", {"min_covar": floor}, {})["theirs"] for floor in (1e-3, 10.0))
    np.testing.assert_array_equal(first._covars_, second._covars_)


def test_a_probability_of_zero_stays_zero() -> None:
    start = initial("gaussian", "diag") | {"transmat": np.array([[0.8, 0.2], [0.0, 1.0]])}
    series = np.split(draw("gaussian"), np.cumsum(LENGTHS)[:-1])
    assert HMM(STATES, covariance="diag", init=start, max_iter=5, tol=None).fit(series).transmat_[1, 0] == 0
