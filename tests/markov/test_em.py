"""Hidden Markov models against enumeration, hmmlearn, plain sums and the numerical Hessian."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

pytest.importorskip("sklearn")

from bellmax.sklearn import HMM

Array = NDArray[np.float64]
COVARIANCES = ["full", "diag", "spherical", "tied"]
KINDS = [*COVARIANCES, "categorical", "poisson"]
both_processes = pytest.mark.parametrize("max_duration", [None, 3], ids=["", "durations"])


def options(kind: str) -> dict[str, Any]:
    return {"covariance": kind} if kind in COVARIANCES else {"emissions": kind}


def series(kind: str, lengths: tuple[int, ...] = (7, 4, 12), features: int = 2, seed: int = 0) -> list[Array]:
    """Random series that stay in one of three regimes for some steps."""
    rng = np.random.default_rng(seed)
    result = []
    for length in lengths:
        state = np.repeat(rng.integers(3, size=length), 3)[:length]
        if kind == "categorical":
            result.append(((state + (rng.random(length) < 0.2)) % 4).astype(float))
        elif kind == "poisson":
            result.append(rng.poisson(3.0 * (1 + state[:, None]), (length, features)).astype(float))
        else:
            result.append(2.0 * state[:, None] + rng.normal(size=(length, features)))
    return result


def with_holes(X: list[Array], share: float = 0.3, seed: int = 1) -> list[Array]:
    rng = np.random.default_rng(seed)
    X = [np.where(rng.random(x.shape) < share, np.nan, x) for x in X]
    X[0][1] = np.nan
    return X


def random_init(
    kind: str, max_duration: int | None, states: int = 3, features: int = 2, seed: int = 3
) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    transmat = rng.dirichlet(np.ones(states), states)
    if max_duration:
        np.fill_diagonal(transmat, 0)
        transmat /= transmat.sum(1, keepdims=True)
    init = {"startprob": rng.dirichlet(np.ones(states)), "transmat": transmat}
    if max_duration:
        init["durations"] = rng.dirichlet(np.ones(max_duration), states)
    if kind == "categorical":
        return init | {"emissionprob": rng.dirichlet(np.ones(4), states)}
    if kind == "poisson":
        return init | {"lambdas": rng.uniform(1, 9, (states, features))}
    roots = rng.normal(size=(states, features, features))
    full = roots @ roots.swapaxes(1, 2) + np.eye(features)
    diag = full.diagonal(axis1=1, axis2=2)
    covars = {"full": full, "diag": diag, "spherical": diag.mean(1), "tied": full[0]}[kind]
    return init | {"means": rng.normal(size=(states, features)) * 2, "covars": covars}


def fixed(kind: str, max_duration: int | None, X: Any, **more: Any) -> HMM:
    """A model with random parameters, as if fitted."""
    init = random_init(kind, max_duration)
    return HMM(3, init=init, max_duration=max_duration, max_iter=0, **options(kind), **more).fit(X)


def density(model: HMM, x: Array, state: int) -> float:
    """The probability of the known values of one step, by scipy."""
    known = ~np.isnan(np.atleast_1d(x))
    x = np.atleast_1d(x)[known]
    if not len(x):
        return 1.0
    if model.emissions == "categorical":
        return float(model.emissionprob_[state, int(x[0])])
    if model.emissions == "poisson":
        return float(stats.poisson(model.lambdas_[state][known]).pmf(x).prod())
    covars, size = model.covars_, model.means_.shape[1]
    matrices = {"full": lambda: covars[state], "diag": lambda: np.diag(covars[state])}
    matrices |= {"spherical": lambda: covars[state] * np.eye(size), "tied": lambda: covars}
    matrix = matrices[model.covariance]()
    return float(stats.multivariate_normal(model.means_[state][known], matrix[np.ix_(known, known)]).pdf(x))


def probability_of_states(model: HMM, states: tuple[int, ...]) -> float:
    """The probability of a sequence of states; the last stay may go on after its end."""
    if model.max_duration is None:
        pairs = itertools.pairwise(states)
        return float(model.startprob_[states[0]] * math.prod(model.transmat_[a, b] for a, b in pairs))
    runs = [(state, len(list(run))) for state, run in itertools.groupby(states)]
    result = model.startprob_[runs[0][0]]
    for (state, stay), (following, _) in itertools.pairwise(runs):
        result *= (model.durations_[state, stay - 1] if stay <= model.max_duration else 0) * model.transmat_[
            state, following
        ]
    state, stay = runs[-1]
    return float(result * model.durations_[state, stay - 1 :].sum())


def enumerate_states(model: HMM, x: Array, y: Any = None) -> tuple[float, Array, tuple[int, ...]]:
    """The likelihood, the posterior (T, S) and the best states of a series, from all sequences of states."""
    total, posterior, best = 0.0, np.zeros((len(x), model.n_states)), (-1.0, ())
    table = np.array([[density(model, step, k) for k in range(model.n_states)] for step in x])
    for states in itertools.product(range(model.n_states), repeat=len(x)):
        if y is not None and any(known not in (-1, state) for known, state in zip(y, states, strict=True)):
            continue
        p = probability_of_states(model, states) * math.prod(table[range(len(x)), states])
        total += p
        posterior[range(len(x)), states] += p
        best = max(best, (p, states))
    return total, posterior / total, best[1]


@both_processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_holes", [False, True], ids=["", "missing"])
def test_likelihood_posterior_and_best_states_equal_enumeration(
    kind: str, max_duration: int | None, has_holes: bool
) -> None:
    X = series(kind, (6, 3, 1))
    X = with_holes(X) if has_holes else X
    model = fixed(kind, max_duration, X)
    likelihoods, posteriors, best = zip(*(enumerate_states(model, x) for x in X), strict=True)
    assert model.score(X) == pytest.approx(sum(map(math.log, likelihoods)), abs=1e-9)
    for found, expected in zip(model.predict_proba(X), posteriors, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    for found, states in zip(model.predict(X), best, strict=True):
        assert tuple(found) == states


@both_processes
@pytest.mark.parametrize("kind", ["full", "categorical"])
def test_known_states_restrict_the_sequences(kind: str, max_duration: int | None) -> None:
    X, y = series(kind, (5, 3)), [np.array([-1, 2, -1, 0, -1]), np.array([-1, -1, -1])]
    model = fixed(kind, max_duration, X)
    expected = sum(math.log(enumerate_states(model, x, known)[0]) for x, known in zip(X, y, strict=True))
    assert model.score(X, y) == pytest.approx(expected, abs=1e-9)
    one_step = HMM(
        3, init=random_init(kind, max_duration), max_duration=max_duration, max_iter=1, tol=None, **options(kind)
    )
    counts = sum(enumerate_states(model, x, known)[1][0] for x, known in zip(X, y, strict=True))
    np.testing.assert_allclose(one_step.fit(X, y).startprob_, counts / 2, atol=1e-9)


def test_states_that_are_all_known_are_counted() -> None:
    y = [np.array([0, 0, 1, 1, 1]), np.array([1, 0, 0, 2])]
    X = [np.array([1.0, 3, 10, 11, 15]), np.array([14.0, 2, 2, 7])]
    model = HMM(3, tol=None, max_iter=2, random_state=0).fit(X, y)
    np.testing.assert_allclose(model.startprob_, [0.5, 0.5, 0], atol=1e-100)
    np.testing.assert_allclose(model.transmat_[:2], [[0.5, 0.25, 0.25], [1 / 3, 2 / 3, 0]], atol=1e-100)
    np.testing.assert_allclose(model.means_.ravel(), [2, 12.5, 7])
    np.testing.assert_allclose(model.covars_[:2].ravel(), [0.5, (6.25 + 2.25 + 6.25 + 2.25) / 4])


def test_with_geometric_durations_it_is_a_plain_model() -> None:
    X = series("full", (9, 5))
    plain = fixed("full", None, X)
    stay, longest = plain.transmat_.diagonal(), 12
    durations = stay[:, None] ** np.arange(longest) * (1 - stay[:, None])
    durations[:, -1] += stay**longest
    transmat = plain.transmat_ - np.diag(stay)
    init = {"startprob": plain.startprob_, "transmat": transmat / transmat.sum(1, keepdims=True)}
    init |= {"durations": durations, "means": plain.means_, "covars": plain.covars_}
    model = HMM(3, init=init, max_duration=longest, max_iter=0).fit(X)
    assert model.score(X) == pytest.approx(plain.score(X), abs=1e-9)
    for a, b in zip(model.predict_proba(X), plain.predict_proba(X), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    for a, b in zip(model.forecast(X, 5)[:2], plain.forecast(X, 5)[:2], strict=True):
        np.testing.assert_allclose(a[:, :3], b[:, :3], atol=1e-9)  # longer stays have no more than 12 steps


# --- expectation maximization

PRIORS = {
    "gaussian": {"means": 0.5, "means_weight": 2, "covars": 0.3, "covars_weight": 4},
    "categorical": {"emissionprob": 1.5},
    "poisson": {"lambdas": 2, "lambdas_weight": 1},
}


@both_processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_priors", [False, True], ids=["", "priors"])
def test_the_objective_never_decreases(kind: str, max_duration: int | None, has_priors: bool) -> None:
    X = with_holes(series(kind, (20, 14, 9), features=3))
    y = [np.full(len(x), -1) for x in X]
    y[0][:3] = 1
    priors = PRIORS.get(kind, PRIORS["gaussian"]) | {"startprob": 1.5, "transmat": 2} if has_priors else None
    model = HMM(3, max_duration=max_duration, priors=priors, max_iter=25, tol=None, random_state=0, **options(kind))
    model.fit(X, y)
    scale = abs(model.objectives_[0])
    assert (np.diff(model.objectives_) >= -1e-12 * scale).all()
    assert model.objectives_[-1] > model.objectives_[0]
    if not has_priors:
        np.testing.assert_array_equal(model.objectives_, model.log_likelihoods_)


@pytest.mark.parametrize("kind", ["full", "diag", "spherical", "tied"])
def test_a_maximum_with_priors_is_stationary(kind: str) -> None:
    """A shift of the parameters in any direction lowers the objective, computed here from the definition."""
    X, weight, scale, degrees = series(kind, (40, 30)), 2.0, 0.3, 4.0
    priors = {"means": 0.5, "means_weight": weight, "covars": scale, "covars_weight": degrees, "transmat": 2}
    model = HMM(2, priors=priors, tol=None, max_iter=300, random_state=0, **options(kind)).fit(X)

    def objective(parameters: dict[str, Array]) -> float:
        shifted = HMM(2, init=parameters, max_iter=0, **options(kind)).fit(X)
        means, covars = parameters["means"], parameters["covars"]
        eye = np.eye(2)
        full = {
            "full": lambda: covars,
            "diag": lambda: covars[..., None] * eye,
            "tied": lambda: covars[None].repeat(2, 0),
        }
        matrices = full.get(kind, lambda: covars[:, None, None] * eye)()
        prior = 0.0
        for mean, matrix in zip(means, matrices, strict=True):
            inverse, share = np.linalg.inv(matrix), 0.5 if kind == "tied" else 1.0
            prior -= weight * (mean - 0.5) @ inverse @ (mean - 0.5) / 2
            prior -= share * (scale * np.trace(inverse) + degrees * np.linalg.slogdet(matrix)[1]) / 2
        return shifted.score(X) + prior + float(np.log(parameters["transmat"]).sum())

    best = {name: getattr(model, f"{name}_") for name in ("startprob", "transmat", "means", "covars")}
    top, rng = objective(best), np.random.default_rng(0)
    for _ in range(6):
        moved = dict(best)
        moved["means"] = best["means"] + 1e-3 * rng.normal(size=(2, 2))
        moved["covars"] = best["covars"] * (1 + 1e-3 * rng.normal())
        assert objective(moved) < top
    moved = dict(best, transmat=best["transmat"] + 1e-3 * np.array([[1, -1], [-1, 1]]))
    assert objective(moved) < top


@pytest.mark.parametrize("kind", KINDS)
def test_every_iteration_equals_hmmlearn(kind: str) -> None:
    peers = pytest.importorskip("hmmlearn.hmm")
    X, init = series(kind, (30, 20, 25)), random_init(kind, None)
    common = {"init_params": "", "n_iter": 8, "tol": -np.inf}
    if kind == "categorical":
        peer = peers.CategoricalHMM(3, n_features=4, **common)
    elif kind == "poisson":
        peer = peers.PoissonHMM(3, lambdas_prior=0, lambdas_weight=0, **common)
    else:
        off = {"covars_prior": 0, "covars_weight": 0, "min_covar": 0}
        peer = peers.GaussianHMM(3, covariance_type=kind, **off, **common)
    for name, value in init.items():
        setattr(peer, f"{name}_", value)
    flat = np.concatenate(X).reshape(-1, 1 if kind == "categorical" else 2)
    peer.fit(flat.astype(int) if kind in ("categorical", "poisson") else flat, [len(x) for x in X])
    model = HMM(3, init=init, max_iter=8, tol=None, **options(kind)).fit(X)
    np.testing.assert_allclose(model.log_likelihoods_, peer.monitor_.history, atol=1e-8, rtol=0)
    np.testing.assert_allclose(model.transmat_, peer.transmat_, atol=1e-8)


def test_the_best_of_several_runs_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    X = series("diag", (40,), features=1)
    model = HMM(3, n_init=4, random_state=0, tol=None, max_iter=5, verbose=1).fit(X)
    lines = [line for line in capsys.readouterr().out.splitlines() if "iteration 4:" in line]
    finals = [float(line.split("log-likelihood ")[1].split()[0]) for line in lines]
    assert len(set(finals)) > 1
    assert model.log_likelihoods_[-1] == pytest.approx(max(finals), rel=1e-7)
    again = HMM(3, n_init=4, random_state=0, tol=None, max_iter=5).fit(X)
    np.testing.assert_array_equal(again.means_, model.means_)


def test_many_series_of_many_lengths_equal_one_at_a_time() -> None:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(n, 1)) for n in rng.integers(1, 400, size=60)]  # several chunks
    model = HMM(9, init={"means": np.linspace(-2, 2, 9)[:, None]}, max_iter=2, tol=None, random_state=0).fit(X)
    assert model.score(X) == pytest.approx(sum(model.score([x]) for x in X), rel=1e-12)
    for x, posterior, states in zip(X, model.predict_proba(X), model.predict(X), strict=True):
        np.testing.assert_allclose(posterior, model.predict_proba([x])[0], atol=1e-12)
        np.testing.assert_array_equal(states, model.predict([x])[0])


# --- data on which other libraries return NaN


def fit_quietly(X: Any, states: int = 3, **more: Any) -> HMM:
    model = HMM(states, max_iter=30, tol=None, random_state=0, **more).fit(X)
    parameters = [value for name, value in vars(model).items() if name.endswith("_") and isinstance(value, np.ndarray)]
    assert parameters
    assert all(np.isfinite(value).all() for value in parameters)
    assert (np.diff(model.objectives_) >= -1e-9 * (1 + abs(model.objectives_[0]))).all()
    assert np.isfinite(np.concatenate([p.ravel() for p in model.predict_proba(X)])).all()
    return model


@both_processes
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize(
    "X",
    [
        pytest.param([np.ones((20, 2))], id="constant"),
        pytest.param([np.column_stack([np.ones(20), np.arange(20.0)])], id="one constant feature"),
        pytest.param([np.array([[0.0, 1], [5, 2], [9, 9]])], id="one sample per state"),
        pytest.param([np.repeat([[0.0, 0], [1, 1], [1e-9, 0]], 5, 0)], id="tiny variances"),
        pytest.param([1e8 + np.random.default_rng(0).normal(size=(30, 2))], id="large numbers"),
        pytest.param([1e-8 * np.random.default_rng(0).normal(size=(30, 2))], id="small numbers"),
        pytest.param([np.array([[k, k]], dtype=float) for k in range(6)], id="series of one step"),
        pytest.param([np.concatenate([np.zeros((20, 2)), [[1e6, -1e6]]])], id="an outlier"),
        pytest.param([np.column_stack([np.arange(9.0), np.arange(9.0)])], id="equal features"),
    ],
)
@pytest.mark.filterwarnings("ignore:no step has a positive probability")
@pytest.mark.filterwarnings("ignore:all series of X have one step")
def test_gaussian_fits_have_no_nan(X: list[Array], covariance: str, max_duration: int | None) -> None:
    fit_quietly(X, covariance=covariance, max_duration=max_duration)


@pytest.mark.parametrize(
    ("X", "kind"),
    [
        pytest.param([np.array([0.0, 2, 2, 5, 0, 2])], "categorical", id="unused symbols"),
        pytest.param([np.zeros(10)], "categorical", id="one symbol"),
        pytest.param([np.zeros((10, 2))], "poisson", id="no counts"),
        pytest.param([np.array([0.0, 0, 1000000, 0, 3])], "poisson", id="a large count"),
    ],
)
@pytest.mark.filterwarnings("ignore:no step has a positive probability")
def test_fits_of_counts_and_symbols_have_no_nan(X: list[Array], kind: str) -> None:
    fit_quietly(X, emissions=kind)


def test_an_empty_state_keeps_its_parameters_with_a_warning() -> None:
    X = [np.random.default_rng(0).normal(size=(30, 1))]
    init = {
        "means": [[0.0], [1e4]],
        "covars": [[[1.0]], [[1.0]]],
        "startprob": [1, 0],
        "transmat": [[1, 0], [0.5, 0.5]],
    }
    with pytest.warns(UserWarning, match="no step has a positive probability of state 1: the parameters"):
        model = HMM(2, init=init, max_iter=3, tol=None).fit(X)
    assert model.means_[1, 0] == 1e4
    np.testing.assert_array_equal(model.transmat_[1], [0.5, 0.5])


# --- standard errors


def numerical_information(model: HMM, X: Any, vector: Array, build: Any, step: float = 1e-4) -> Array:
    """The negative Hessian of the log-likelihood by central differences."""

    def value(v: Array) -> float:
        return (
            HMM(model.n_states, init=build(v), max_iter=0, max_duration=model.max_duration, **options_of(model))
            .fit(X)
            .score(X)
        )

    size = len(vector)
    hessian = np.zeros((size, size))
    for i, j in itertools.product(range(size), repeat=2):
        if j < i:
            continue
        e, f = np.eye(size)[i] * step, np.eye(size)[j] * step
        hessian[i, j] = hessian[j, i] = (
            value(vector + e + f) - value(vector + e - f) - value(vector - e + f) + value(vector - e - f)
        ) / (4 * step * step)
    return -hessian


def options_of(model: HMM) -> dict[str, Any]:
    return {"emissions": model.emissions, "covariance": model.covariance}


@pytest.mark.parametrize("kind", ["full", "diag", "poisson", "categorical"])
def test_standard_errors_equal_the_numerical_hessian(kind: str) -> None:
    rng = np.random.default_rng(0)
    states = [np.repeat(rng.integers(2, size=50), 4) for _ in range(6)]
    if kind == "categorical":
        X = [(rng.random(len(s)) < 0.2 + 0.6 * s).astype(float) for s in states]
    elif kind == "poisson":
        X = [rng.poisson(2 + 6 * s).astype(float) for s in states]
    else:
        X = [3.0 * s + rng.normal(size=len(s)) * (1 + s) for s in states]
    model = HMM(2, tol=0, max_iter=2000, random_state=0, **options(kind)).fit(X)
    own = {"categorical": ["emissionprob"], "poisson": ["lambdas"]}.get(kind, ["means", "covars"])
    numbers = [model.startprob_[0], *model.transmat_[:, 0]]
    numbers += list(model.emissionprob_[:, 0]) if kind == "categorical" else []
    numbers += [] if kind == "categorical" else [v for name in own for v in getattr(model, f"{name}_").ravel()]

    def build(v: Array) -> dict[str, Array]:
        init = {"startprob": np.array([v[0], 1 - v[0]]), "transmat": np.stack([v[1:3], 1 - v[1:3]], 1)}
        if kind == "categorical":
            return init | {"emissionprob": np.stack([v[3:5], 1 - v[3:5]], 1)}
        shapes = [getattr(model, f"{name}_").shape for name in own]
        sizes = np.cumsum([3] + [math.prod(shape) for shape in shapes])
        return init | {
            name: v[a:b].reshape(shape) for name, shape, a, b in zip(own, shapes, sizes[:-1], sizes[1:], strict=True)
        }

    information = numerical_information(model, X, np.array(numbers), build)
    expected = np.sqrt(np.diag(np.linalg.inv(information)))
    errors = model.standard_errors()
    np.testing.assert_allclose(errors["startprob"], expected[0], rtol=1e-3)
    np.testing.assert_allclose(errors["transmat"], np.stack([expected[1:3]] * 2, 1), rtol=1e-3)
    found = errors["emissionprob"][:, 0] if kind == "categorical" else np.concatenate([errors[n].ravel() for n in own])
    np.testing.assert_allclose(found, expected[3:], rtol=1e-3)


def test_standard_errors_on_the_boundary_are_nan_with_a_warning() -> None:
    X = [np.concatenate([np.zeros(30), np.full(30, 8.0)]) + np.random.default_rng(0).normal(size=60)]
    model = HMM(2, tol=0, random_state=0).fit(X)  # starts in one state, and never returns to it
    with pytest.warns(
        UserWarning, match="some standard errors are NaN: startprob and transmat have entries on the bound"
    ):
        errors = model.standard_errors()
    assert np.isnan(errors["startprob"]).all()
    assert np.isfinite(errors["means"]).all()
    assert np.sort(errors["means"].ravel())[0] == pytest.approx(np.sqrt(1 / 30), rel=0.3)


# --- forecasts and samples


@both_processes
def test_forecasts_equal_enumeration(max_duration: int | None) -> None:
    X, steps = series("diag", (4, 2)), 2
    model = fixed("diag", max_duration, X)
    forecast = model.forecast(X, steps, quantiles=[0.25])
    for n, x in enumerate(X):
        unknown = np.full((steps, 2), np.nan)
        posterior = enumerate_states(model, np.concatenate([x, unknown]))[1][-steps:]
        np.testing.assert_allclose(forecast.states[n], posterior, atol=1e-9)
    np.testing.assert_allclose(forecast.mean, forecast.states @ model.means_, atol=1e-12)
    points = forecast.quantiles[0]
    normal = stats.norm(model.means_, np.sqrt(model.covars_))
    below = (normal.cdf(points[..., None, :]) * forecast.states[..., None]).sum(-2)
    np.testing.assert_allclose(below, 0.25, atol=1e-9)


def test_forecasts_of_counts_and_symbols() -> None:
    model = fixed("poisson", None, series("poisson"))
    forecast = model.forecast(series("poisson"), 2, quantiles=(0.1, 0.9))
    for level, points in zip((0.1, 0.9), forecast.quantiles, strict=True):
        for move, is_reached in ((0, True), (-1, False)):  # the least count that reaches the level
            cdf = stats.poisson(model.lambdas_).cdf(points[..., None, :] + move)
            assert (((cdf * forecast.states[..., None]).sum(-2) >= level) == is_reached).all()
    model = fixed("categorical", None, series("categorical"))
    forecast = model.forecast(series("categorical"))
    assert forecast.quantiles is None
    np.testing.assert_allclose(forecast.mean, forecast.states @ model.emissionprob_)


@both_processes
def test_samples_have_the_probabilities_of_the_model(max_duration: int | None) -> None:
    model = fixed("poisson", max_duration, series("poisson"))
    x, states = model.sample(20_000, random_state=0)
    assert x.shape == (20_000, 2)
    for k in range(3):
        np.testing.assert_allclose(x[states == k].mean(0), model.lambdas_[k], rtol=0.05)
    runs = [(state, len(list(run))) for state, run in itertools.groupby(states)][1:-1]
    for k in range(3):
        stays = np.array([stay for state, stay in runs if state == k])
        if max_duration:
            expected = model.durations_[k] @ np.arange(1, max_duration + 1)
        else:
            expected = 1 / (1 - model.transmat_[k, k])
        assert stays.mean() == pytest.approx(expected, rel=0.1)
    again, _ = model.sample(20_000, random_state=0)
    np.testing.assert_array_equal(x, again)


def test_a_model_is_recovered_from_its_samples() -> None:
    init = {"startprob": [0.5, 0.5], "transmat": [[0.95, 0.05], [0.1, 0.9]]}
    init |= {"means": [[0.0, 0.0], [3.0, 1.0]], "covars": [np.eye(2), [[2.0, 1.0], [1.0, 2.0]]]}
    truth = HMM(2, init=init, max_iter=0).fit([np.zeros((2, 2))])
    X = [truth.sample(500, random_state=seed)[0] for seed in range(6)]
    model = HMM(2, random_state=0).fit(X)
    order = np.argsort(model.means_[:, 0])
    np.testing.assert_allclose(model.means_[order], init["means"], atol=0.15)
    np.testing.assert_allclose(model.covars_[order], init["covars"], atol=0.3)
    np.testing.assert_allclose(model.transmat_[np.ix_(order, order)], init["transmat"], atol=0.02)


def test_sparse_posteriors_have_zeros() -> None:
    X = series("diag")
    model = fixed("diag", None, X)
    dense, sparse = (np.concatenate(model.predict_proba(X, omega=omega)) for omega in ("negentropy", "sparsemax"))
    assert (dense > 0).all()
    assert (sparse == 0).any()
    np.testing.assert_allclose(sparse.sum(1), 1)
    assert torch.tensor(sparse).isfinite().all()


@pytest.mark.parametrize("covariance", ["full", "tied"])
def test_a_prior_far_from_the_data_gives_a_positive_definite_covariance(covariance: str) -> None:
    X = [1e9 + np.random.default_rng(seed).normal(size=(20, 2)) for seed in range(3)]
    model = HMM(2, covariance=covariance, priors={"means_weight": 0.5}, max_iter=5, tol=None, random_state=0).fit(X)
    assert np.isfinite(model.objectives_).all()
    assert (np.linalg.eigvalsh(model.covars_) > 0).all()
