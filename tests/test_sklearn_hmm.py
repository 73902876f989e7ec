"""The estimator HMM: the checks of scikit-learn, containers of series, custom emissions and error messages."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from bellmax.sklearn import HMM


@pytest.mark.filterwarnings("ignore:y has one label for each series")
@pytest.mark.filterwarnings("ignore:EM did not converge")
@parametrize_with_checks([HMM(), HMM(3, covariance="diag"), HMM(max_duration=4)])
def test_estimator_passes_the_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def regimes(count: int = 4, steps: int = 40, seed: int = 0) -> Any:
    """Series with a calm and a wild half."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(0, 1, (count, steps)), rng.normal(6, 2, (count, steps))], axis=1)


def quick(**options: Any) -> HMM:
    return HMM(**({"n_states": 2, "max_iter": 10, "tol": None, "random_state": 0} | options))


def test_the_scale_matrix_of_a_prior_is_a_covariance() -> None:
    X = [np.random.default_rng(0).normal(size=(50, 2))]
    scale = np.array([[2.0, -1.0], [-1.0, 1.0]])
    for covariance in ("full", "tied"):
        model = quick(n_states=1, covariance=covariance, priors={"covars": scale}).fit(X)
        expected = (50 * np.cov(X[0].T, bias=True) + scale) / 50
        np.testing.assert_allclose(model.covars_.reshape(2, 2), expected, rtol=1e-9)
        for wrong, message in (
            (scale[0], r"must be a number or broadcast to shape"),
            (np.array([[1.0, 0.5], [0.0, 1.0]]), "must be symmetric, got entries that differ by 0.5"),
        ):
            with pytest.raises(ValueError, match=message):
                quick(n_states=1, covariance=covariance, priors={"covars": abs(wrong)}).fit(X)


# --- containers


def test_lists_arrays_frames_and_tensors_give_equal_models() -> None:
    pd = pytest.importorskip("pandas")
    X = regimes()
    model = quick().fit(X)
    for other in (X[..., None], list(X), pd.DataFrame(X), torch.tensor(X)):
        np.testing.assert_allclose(quick().fit(other).means_, model.means_, rtol=1e-12)
    assert model.predict(X).shape == (4, 80)
    assert model.predict_proba(X).shape == (4, 80, 2)
    assert [len(states) for states in model.predict(list(X))] == [80] * 4
    assert model.predict(pd.DataFrame(X)).shape == (4, 80)
    assert model.sample(5)[0].shape == (5,)
    assert quick().fit(X[..., None]).sample(5)[0].shape == (5, 1)


def test_nan_at_the_end_of_an_array_is_padding() -> None:
    X = regimes()
    X[1, 60:] = np.nan
    model = quick().fit(X)
    np.testing.assert_allclose(model.means_, quick().fit([*X[:1], X[1, :60], *X[2:]]).means_, rtol=1e-12)
    assert (model.predict(X)[1, 60:] == -1).all()
    assert (model.predict(X)[1, :60] >= 0).all()
    assert (model.predict_proba(X)[1, 60:] == 0).all()
    y = np.full(X.shape, -1)
    np.testing.assert_allclose(quick().fit(X, y).means_, model.means_, rtol=1e-12)


def test_nan_at_the_end_of_a_list_is_missing() -> None:
    X = regimes()
    X[1, 60:] = np.nan
    assert len(quick().fit(list(X)).predict(list(X))[1]) == 80


def test_large_integers_are_exact() -> None:
    X = np.array([[1, 5, 1, 5, 9, 9, 9, 1], [1, 1, 1, 5, 5, 9, 9, 9]])
    means = quick().fit(X).means_
    for other in (list(X + 2**30), (X + 2**30)[..., None]):
        np.testing.assert_allclose(quick().fit(other).means_ - 2**30, means, atol=1e-6)


def test_arguments_are_not_changed() -> None:
    X, y = list(regimes()), [np.full(80, -1) for _ in range(4)]
    means, transmat = np.array([[0.0], [6.0]]), np.array([[0.9, 0.1], [0.1, 0.9]])
    init = {"means": means, "transmat": transmat}
    copies = [x.copy() for x in X], means.copy(), transmat.copy()
    quick(init=init).fit(X, y)
    for x, copy in zip(X, copies[0], strict=True):
        np.testing.assert_array_equal(x, copy)
    np.testing.assert_array_equal(means, copies[1])
    np.testing.assert_array_equal(transmat, copies[2])


def test_models_are_cloned_pickled_and_searched() -> None:
    X = regimes()
    model = quick().fit(X)
    again = pickle.loads(pickle.dumps(model))
    assert again.score(X) == model.score(X)
    assert not hasattr(clone(model), "means_")
    search = GridSearchCV(quick(covariance="diag"), {"n_states": [1, 2]}, cv=2).fit(X)
    assert search.best_params_ == {"n_states": 2}
    with pytest.raises(NotFittedError):
        HMM().predict(X)


def test_changed_attributes_are_used() -> None:
    X = regimes()
    model = quick().fit(X)
    before = model.score(X)
    model.means_ = model.means_ + 1
    assert model.score(X) < before


def test_criteria_count_free_parameters() -> None:
    X = regimes()
    counts = {"full": 1 + 2 + 2 + 2, "tied": 1 + 2 + 2 + 1}
    for covariance, count in counts.items():
        model = quick(covariance=covariance).fit(X)
        assert model.aic(X) == pytest.approx(2 * count - 2 * model.score(X))
        assert model.bic(X) == pytest.approx(count * np.log(320) - 2 * model.score(X))
    model = quick(max_duration=5).fit(X)
    assert model.aic(X) + 2 * model.score(X) == pytest.approx(2 * (1 + 0 + 2 * 4 + 4))


def test_labels_of_series_are_ignored_with_a_warning() -> None:
    X = regimes()
    for y in ([0, 1, 0, 1], np.array([0, 1, 0, 1])):
        with pytest.warns(UserWarning, match="y has one label for each series, which fit ignores"):
            model = quick().fit(X, y)
        np.testing.assert_array_equal(model.means_, quick().fit(X).means_)


def test_one_series_in_place_of_a_collection_warns() -> None:
    column = regimes()[0][:, None]
    with pytest.warns(UserWarning, match=r"all series of X have one step, .* if X is one series, pass \[X\]"):
        quick(max_iter=1).fit(column)
    quick(max_iter=1).fit([column])
    table = np.column_stack([column] * 2)
    for _ in range(2):
        table = np.concatenate([table, table])
    with pytest.warns(UserWarning, match=r"X is read as 320 series of 2 steps: if it is one series .* pass \[X\]"):
        quick(max_iter=1).fit(table)
    quick(max_iter=1, covariance="diag").fit(list(table))


def test_a_model_with_parameters_but_no_fit_is_not_fitted() -> None:
    model = HMM(2)
    model.transmat_ = np.full((2, 2), 0.5)
    with pytest.raises(NotFittedError):
        model.predict(regimes())


# --- progress


def test_progress_is_printed_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    quick(verbose=1, max_iter=2).fit(regimes())
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("iteration 0: log-likelihood -")
    assert "(+" in second
    quick(verbose=1, max_iter=1, priors={"transmat": 2.0}).fit(regimes())
    assert capsys.readouterr().out.startswith("iteration 0: log-likelihood with priors -")
    quick(max_iter=2).fit(regimes())
    assert not capsys.readouterr().out


def test_a_fit_that_does_not_converge_warns() -> None:
    with pytest.warns(ConvergenceWarning, match="EM did not converge in max_iter=2 iterations"):
        HMM(2, max_iter=2, random_state=0).fit(regimes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = HMM(2, random_state=0).fit(regimes())
    assert model.converged_
    assert model.n_iter_ == len(model.log_likelihoods_) < 100


class Interrupting:
    """Normal emissions with variance 1 that stop like Ctrl+C in the third E-step."""

    def __init__(self) -> None:
        self.means, self.calls = torch.tensor([0.0, 5.0], dtype=torch.float64), 0

    def log_prob(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return -(x - self.means).square() / 2

    def m_step(self, x: Tensor, weights: Tensor) -> None:
        self.means = (weights * x).sum(0) / weights.sum(0)


def test_an_interrupt_keeps_the_parameters() -> None:
    with pytest.warns(UserWarning, match="fit was interrupted: the parameters of iteration 2 are kept"):
        model = quick(emissions=Interrupting()).fit(regimes())
    assert model.n_iter_ == 2
    assert model.emissions_.means[1] > 5.5


class SharedCalls(Interrupting):
    """Emissions whose copies count calls together, so that a later run of EM is interrupted."""

    total = 0

    def log_prob(self, x: Tensor) -> Tensor:
        type(self).total += 1
        if type(self).total == 4:
            raise KeyboardInterrupt
        return -(x - self.means).square() / 2


def test_an_interrupt_of_a_later_run_keeps_the_best_run() -> None:
    SharedCalls.total = 0
    with pytest.warns(UserWarning, match="fit was interrupted: the parameters of iteration 3 are kept"):
        model = quick(emissions=SharedCalls(), n_init=2, max_iter=3).fit(regimes())
    assert model.n_iter_ == 3


def test_an_interrupt_of_the_first_iteration_is_raised() -> None:
    emissions = Interrupting()
    emissions.calls = 2
    with pytest.raises(KeyboardInterrupt):
        quick(emissions=emissions).fit(regimes())


# --- custom emissions


class Normal:
    """Normal emissions with variance 1."""

    def __init__(self) -> None:
        self.means = torch.tensor([0.0, 5.0], dtype=torch.float64)

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(self.means, 1.0).log_prob(x)

    def m_step(self, x: Tensor, weights: Tensor) -> None:
        self.means = (weights * x).sum(0) / weights.sum(0)


class OneState(Normal):
    """Normal emissions. In all copies but the first, the second state is impossible."""

    def __deepcopy__(self, memo: Any) -> OneState:
        copy, self.copies = OneState(), getattr(self, "copies", 0) + 1
        if self.copies > 1:
            copy.means = torch.tensor([0.0, torch.inf], dtype=torch.float64)
        return copy

    def log_prob(self, x: Tensor) -> Tensor:
        return -(x - self.means).square() / 2

    def m_step(self, x: Tensor, weights: Tensor) -> None:
        pass


def test_warnings_are_about_the_best_run() -> None:
    model = quick(emissions=OneState(), n_init=2).fit(regimes())  # raises if a state of the other run is reported
    assert model.emissions_.means[1] == 5


def test_custom_emissions_are_fitted_on_a_copy() -> None:
    X = [*regimes(), np.array([0.0, np.nan, 6.0])]
    emissions = Normal()
    model = quick(emissions=emissions).fit(X)
    assert emissions.means.tolist() == [0, 5]
    np.testing.assert_allclose(model.emissions_.means, [0, 6], atol=0.3)
    assert (np.diff(model.log_likelihoods_) >= -1e-9).all()
    built_in = quick(covariance="spherical", init={"means": [[0.0], [5.0]], "covars": [1.0, 1.0]}, max_iter=0).fit(X)
    start = {"startprob": built_in.startprob_, "transmat": built_in.transmat_}
    custom = quick(emissions=Normal(), init=start, max_iter=0).fit(X)
    assert custom.score(X) == pytest.approx(built_in.score(X))
    np.testing.assert_array_equal(custom.predict(X)[4], built_in.predict(X)[4])
    forecast = custom.forecast(X, 2)
    np.testing.assert_allclose(forecast.states, built_in.forecast(X, 2).states)
    assert forecast.mean is None
    assert forecast.quantiles is None
    with pytest.raises(ValueError, match="standard_errors needs emissions of a family"):
        custom.standard_errors()
    with pytest.raises(ValueError, match="sample needs emissions with a method draw"):
        custom.sample(3)
    with pytest.raises(ValueError, match="aic and bic need emissions of a family"):
        custom.bic(X)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(5, 2), r"log_prob of emissions must return shape \(320, 2\).*got \(5, 2\)"),
        (torch.full((320, 2), torch.nan), "log_prob of emissions must return numbers or -inf, got NaN or inf"),
        (torch.zeros(320, 3), r"log_prob of emissions must return shape \(320, 2\).*got \(320, 3\)"),
        (None, "log_prob of emissions must return shape .* got a NoneType"),
    ],
)
def test_wrong_results_of_custom_emissions_are_named(result: Any, message: str) -> None:
    emissions = Normal()
    emissions.log_prob = lambda x: result  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        quick(emissions=emissions).fit(regimes())


# --- bad input

CHAIN = {"startprob": [0.5, 0.5], "transmat": [[0.5, 0.5], [0.5, 0.5]]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_states": 0}, "n_states must be an integer of at least 1, got 0"),
        ({"n_states": 2.0}, "n_states must be an integer of at least 1, got 2.0"),
        ({"n_states": 1, "max_duration": 3}, "n_states must be an integer of at least 2 with max_duration, got 1"),
        ({"max_duration": 0}, "max_duration must be an integer of at least 1, got 0"),
        ({"n_init": 0}, "n_init must be an integer of at least 1"),
        ({"max_iter": -1}, "max_iter must be an integer of at least 0"),
        ({"tol": -1.0}, "tol must be at least 0, or None, got -1.0"),
        ({"variance_floor": 0.0}, "variance_floor must be greater than 0"),
        ({"emissions": "gauss"}, "emissions must be .*gaussian.* got 'gauss'"),
        ({"emissions": 3}, "emissions must have the methods log_prob and m_step, got a int"),
        ({"covariance": "diagonal"}, "covariance must be .* got 'diagonal'"),
        ({"priors": {"transmat": 0.5}}, r"priors\['transmat'\] must be at least 1, got 0.5"),
        ({"priors": {"mean": 0.5}}, "priors must have names among startprob, .* got 'mean'"),
        ({"priors": {"lambdas": 0.5}}, "priors must have names among startprob, .* got 'lambdas'"),
        (
            {"priors": {"startprob": [1.0, 2.0, 3.0]}},
            r"priors\['startprob'\] must be a number or broadcast to shape \(2,\)",
        ),
        ({"priors": {"means_weight": [1.0, 2.0]}}, r"priors\['means_weight'\] must be a number, got shape \(2,\)"),
        ({"init": {"mean": [[0.0], [1.0]]}}, "init must have names among startprob, .* got 'mean'"),
        ({"init": {"means": [0.0, 1.0]}}, r"init\['means'\] must have shape \(2, 1\), got \(2,\)"),
        ({"init": {"means": [[0.0], [np.nan]]}}, r"init\['means'\] must be finite, got NaN or inf"),
        ({"init": {"transmat": [[0.5, 0.6], [0.5, 0.5]]}}, r"init\['transmat'\] must hold probabilities that sum to 1"),
        ({"init": {"startprob": [-0.5, 1.5]}}, r"init\['startprob'\] must hold probabilities that sum to 1"),
        ({"init": {"covars": [[[1.0]], [[-1.0]]]}}, r"init\['covars'\] must be positive definite"),
        ({"init": {"covars": [1.0, 0.0]}, "covariance": "spherical"}, r"init\['covars'\] must be positive definite"),
        ({"init": CHAIN, "max_duration": 3}, r"init\['transmat'\] must be 0 on the diagonal with max_duration"),
        ({"tol": "small"}, "tol must be at least 0, or None, got 'small'"),
        ({"variance_floor": np.inf}, "variance_floor must be greater than 0 and finite, got inf"),
        ({"init": "kmeans"}, "init must map names of parameters to numbers or arrays, or be None, got 'kmeans'"),
        ({"priors": [2.0]}, "priors must map names of parameters to numbers or arrays, or be None"),
        ({"init": {"means": "kmeans"}}, r"init\['means'\] must be a number or an array of numbers, got 'kmeans'"),
        (
            {"init": {"means": [[0.0], [1.0, 2.0]]}},
            r"init\['means'\] must be a number or an array of numbers, got \[\[",
        ),
        ({"priors": {"means": "zero"}}, r"priors\['means'\] must be a number or an array of numbers, got 'zero'"),
        ({"init": {"transmat": [[0.9, 0.2], [0.5, 0.5]]}}, "in each row, got the sum 1.1 in row 0"),
        ({"priors": {"covars": [1.0]}}, r"priors\['covars'\] must be a number or broadcast to shape \(2, 1, 1\)"),
        ({"priors": {"covars": [[-1.0]]}}, r"priors\['covars'\] must be positive semidefinite, .* eigenvalue -1"),
        ({"priors": {"covars": -1.0}}, r"priors\['covars'\] must be at least 0, got -1.0"),
        ({"init": {"lambdas": [[1.0], [-1.0]]}, "emissions": "poisson"}, r"init\['lambdas'\] must be at least 0"),
    ],
)
def test_wrong_parameters_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        quick(**options).fit(np.abs(regimes()).round())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("X", "options", "message"),
    [
        ([[1.0, -2.0]], {"emissions": "poisson"}, r"X\[0\] must hold counts 0, 1, 2, ..., got -2 at step 1"),
        ([[1.0, 2.5]], {"emissions": "poisson"}, r"X\[0\] must hold counts 0, 1, 2, ..., got 2.5 at step 1"),
        ([[1.0, -1.0]], {"emissions": "categorical"}, r"X\[0\] must hold symbols 0, 1, 2, ..., got -1 at step 1"),
        ([[[1.0, 2.0]]], {"emissions": "categorical"}, r"X\[0\] must have one symbol in each step, got 2 features"),
        ([[1.0]], {}, "n_states must be at most the number of steps with a value, n_samples=1, got 2"),
        ([[np.nan, np.nan]], {}, "X must hold at least one value, got only NaN"),
        ([[1.0, np.inf]], {}, r"X\[0\] must be finite, or NaN where a value is missing, got inf at step 1"),
        (
            np.array([[1.0, 2.0], [np.nan, np.nan]]),
            {},
            r"X\[1\] must have a value before its NaN padding, got only NaN",
        ),
        ([[1.0, 2.0], []], {}, r"X\[1\] must have shape .* both at least 1, got \(0, 1\)"),
        ([[1.0, 2.0], [[1.0, 2.0]]], {}, r"X\[1\] must have 1 features"),
        ([], {}, "X must hold at least one series"),
    ],
)
def test_wrong_series_are_one_sentence(X: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**options).fit(X)


def test_unknown_symbols_are_named_after_fit() -> None:
    model = quick(emissions="categorical").fit([[0.0, 1, 2, 1, 0]])
    for method in (model.predict, model.score, model.forecast):
        with pytest.raises(ValueError, match=r"X\[0\] must hold symbols from 0 to 2, as in fit, got 5 at step 1"):
            method([[0.0, 5.0]])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([np.zeros(80, int)] * 3, "y must hold the states of 4 series, got 3"),
        ([np.zeros(79, int)] * 4, r"y\[0\] must have shape \(80,\), one state for each step, got \(79,\)"),
        ([np.zeros(80)] * 4, r"y\[0\] must hold integers, -1 where the state is unknown, got float64"),
        ([np.full(80, 2)] * 4, r"y\[0\] must be from 0 to 1, or -1 where the state is unknown, got 2 at step 0"),
    ],
)
def test_wrong_labels_are_one_sentence(y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick().fit(regimes(), y)


def test_a_series_that_is_impossible_is_named() -> None:
    X, y = list(regimes(2)), [np.full(80, -1), np.full(80, -1)]
    y[1][:2] = 1, 0
    init = {"startprob": [0.5, 0.5], "transmat": [[1.0, 0.0], [0.0, 1.0]]}
    with pytest.raises(ValueError, match=r"X\[1\] must have a positive probability, but its labels and the initial"):
        quick(init=init).fit(X, y)
    assert quick(init=init, max_iter=0).fit(X).score(X, y) == -np.inf


@pytest.mark.parametrize("max_duration", [None, 3])
def test_a_series_without_possible_states_has_no_forecast(max_duration: int | None) -> None:
    init = {"lambdas": [[0.0], [0.0]]}
    model = quick(emissions="poisson", init=init, max_iter=0, max_duration=max_duration).fit([np.zeros(3)])
    X = [np.array([0.0, 2.0])]
    assert model.score(X) == -np.inf
    assert (model.predict(X)[0] == -1).all()
    assert (model.predict_proba(X)[0] == 0).all()
    with pytest.raises(ValueError, match=r"X\[0\] must have a positive probability under the model for a forecast"):
        model.forecast(X)


@pytest.mark.parametrize("steps", [0, 1.5])
def test_wrong_horizons_are_one_sentence(steps: Any) -> None:
    model = quick(max_iter=1).fit(regimes())
    with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
        model.forecast(regimes(), steps)
    with pytest.raises(ValueError, match="n_steps must be an integer of at least 1"):
        model.sample(steps)
    with pytest.raises(ValueError, match="quantiles must be levels between 0 and 1"):
        model.forecast(regimes(), quantiles=[steps])
