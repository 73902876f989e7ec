"""Hidden Markov models, fitted by expectation maximization."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bellmax.inputs import check_choice
from bellmax.markov.checks import check_init, check_priors, read_labels, read_numbers
from bellmax.markov.data import Data
from bellmax.markov.em import Fit, fit
from bellmax.markov.emissions import Categorical, Emissions, Family, Poisson, check_symbols, draw_from_rows
from bellmax.markov.filtering import Filter
from bellmax.markov.gaussian import COVARIANCES, Gaussian, gaussian
from bellmax.markov.information import standard_errors
from bellmax.markov.process import Process
from bellmax.markov.starts import assign, emissions_of, initial_emissions, initial_process, random_symbols
from bellmax.names import answers_near_misses
from bellmax.regularizers import Regularizer, resolve
from bellmax.series.collections import Collection
from bellmax.sklearn.base import CollectionEstimator, Series
from bellmax.structures.semi_markov import SemiMarkov

_FAMILIES = "gaussian", "categorical", "poisson"
_KINDS: Mapping[str, Any] = {"gaussian": Gaussian, "categorical": Categorical, "poisson": Poisson}
_PARAMETERS = {"gaussian": ("means", "covars"), "categorical": ("emissionprob",), "poisson": ("lambdas",)}

_RATIO = 100
"""An array with so many times more rows than columns is suspicious: it may be one series (time, features)."""


class Forecast(NamedTuple):
    """Predictive distributions of the steps after the end of n series, by :meth:`HMM.forecast`."""

    states: NDArray[np.float64]
    """The probability of each state, (n, steps, S)."""
    mean: NDArray[np.float64] | None
    """The mean of the observations, (n, steps, D). With categorical emissions, the probability of each symbol,
    (n, steps, K). None with custom emissions."""
    quantiles: NDArray[np.float64] | None
    """The quantiles of each feature, (levels, n, steps, D). None with categorical and custom emissions."""


class HMM(CollectionEstimator):
    """A hidden Markov model (HMM) of time series, fitted by expectation maximization (the Baum–Welch algorithm).

    In each step, the model is in one of S hidden states. The next state depends on the current state only, and the
    observation of a step depends on the state of the step only. ``X`` is a collection of series, as for all estimators
    of :mod:`bellmax.sklearn`: an array (n, time) or (n, time, features), or a list of series of any lengths. For one
    series x, (time,) or (time, features), pass ``[x]``. After ``fit`` on an array (n, time), other arrays must have the
    same number of steps. Lists can always have series of any lengths.

    Observations can be missing: pass NaN. In an array, NaN at the end of a series is padding, which means that the
    series is shorter. In a list, all NaN are missing values. All computations use float64 on the CPU.

    Args:
        n_states: The number of states S, default 2.
        emissions: The distribution of the observations of a state. "gaussian" (the default), "categorical" for symbols
            0, 1, 2, …, "poisson" for counts, or an object with the methods ``log_prob(x)`` and ``m_step(x, weights)``.
            x is a float64 tensor (N, D) of all steps with a value. ``log_prob`` returns the log-probability (N, S) of
            each step in each state, and ``m_step`` updates the parameters for the posterior ``weights`` (N, S). ``fit``
            works on a copy of the object, ``emissions_``.
        covariance: The covariance of Gaussian emissions: "full" (the default), "diag", "spherical", or "tied" for one
            matrix that all states share.
        max_duration: The longest stay in a state, in steps. If given, the model has explicit durations (a hidden
            semi-Markov model): each state has a probability for each duration, and no transition to itself. The last
            stay of a series can continue after its end. Default None: a transition from a state to itself continues
            the stay.
        priors: Strengths of priors by name, default none. "startprob", "transmat", "durations" and "emissionprob" are
            concentrations of Dirichlet priors, at least 1 (no prior). Gaussian emissions have a normal inverse Wishart
            prior, with "means", "means_weight", "covars" and "covars_weight". Poisson emissions have a gamma prior,
            with "lambdas" and "lambdas_weight". In the M-step, "covars" and "lambdas" are added to the sums, and the
            weights to the numbers of steps.
        init: Initial parameters by name, such as ``{"means": [[0.0], [5.0]]}``. The names are the names of the fitted
            attributes without the underscore. ``fit`` chooses the other parameters by k-means clustering of the steps.
            To use known parameters without EM, pass all of them, and ``max_iter=0``.
        n_init: The number of runs of EM from different initial parameters, default 1. The best run is used.
        max_iter: The maximum number of iterations, default 100.
        tol: The tolerance, default 1e-6: EM stops if an iteration increases the log-likelihood by less than ``tol`` per
            step. None for exactly ``max_iter`` iterations.
        variance_floor: The smallest variance of Gaussian emissions, relative to the variance of each feature in the
            data. Default 1e-6. It keeps the likelihood bounded.
        n_jobs: The number of threads. None (the default) for torch's setting, −1 for all processors.
        random_state: A seed or a ``numpy.random.RandomState``, for the initial parameters.
        verbose: If nonzero, print the log-likelihood, with the logarithm of the priors, of each iteration. Default 0.

    Attributes:
        startprob_: The probability of each state at the first step, (S,).
        transmat_: The probability of each transition, (S, S) [from, to]. EM keeps probabilities at 1e-130 or more,
            unless they are 0 in ``init``.
        means_, covars_: The parameters of Gaussian emissions, (S, D), and (S, D, D), (S, D), (S,) or (D, D).
        emissionprob_: The probability of each symbol in each state, (S, K).
        lambdas_: The expected counts of Poisson emissions, (S, D).
        durations_: The probability of each duration from 1 to ``max_duration`` in each state, (S, max_duration).
        log_likelihoods_: The log-likelihood at the start of each iteration.
        objectives_: The log-likelihood plus the logarithm of the priors. EM never decreases it.
        n_iter_, converged_: The number of iterations, and True if EM stopped before ``max_iter``.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> calm, wild = rng.normal(0, 1, (5, 40)), rng.normal(0, 5, (5, 40))
    >>> X = np.concatenate([calm, wild, calm], axis=1)         # five series with 120 steps
    >>> X[0, 3] = np.nan                                       # a missing value
    >>> model = HMM(2, random_state=0).fit(X)
    >>> np.sort(np.sqrt(model.covars_).ravel()).round(1)       # the standard deviations of the states
    array([1. , 5.1])
    >>> states = model.predict(X)
    >>> states.shape, int((np.diff(states) != 0).sum())        # each series changes its state twice
    ((5, 120), 10)
    """

    @answers_near_misses
    def __init__(
        self,
        n_states: int = 2,
        *,
        emissions: str | Emissions = "gaussian",
        covariance: str = "full",
        max_duration: int | None = None,
        priors: Mapping[str, Any] | None = None,
        init: Mapping[str, ArrayLike] | None = None,
        n_init: int = 1,
        max_iter: int = 100,
        tol: float | None = 1e-6,
        variance_floor: float = 1e-6,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self._store_parameters(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # --- fit

    @answers_near_misses
    def fit(self, X: Collection, y: Any = None) -> HMM:
        """Estimate the parameters.

        If you interrupt ``fit`` with Ctrl+C after the first iteration, it warns and keeps the parameters of the last
        iteration, or of a better run. To resume, pass them as ``init``.

        Args:
            X: The series.
            y: The known states, default None. For each series, integers (T,) from 0 to S − 1, and −1 where the state is
                unknown. ``fit`` ignores one label for each series, with a warning.

        """
        self._check_parameters()
        data = self._read_data(X, y, reset=True)
        self._check_amount(data)
        if len(data.lengths) > 1 and max(data.lengths) == 1:
            warnings.warn(
                "all series of X have one step, so the transitions cannot be estimated: if X is one series, pass [X]",
                stacklevel=2,
            )
        elif getattr(X, "ndim", 0) == 2 and len(data.lengths) >= _RATIO * max(data.lengths):
            warnings.warn(
                f"X is read as {len(data.lengths)} series of {max(data.lengths)} steps: if it is one series with the "
                "shape (time, features), pass [X]; for many short series, pass list(X)",
                stacklevel=2,
            )
        rng = check_random_state(self.random_state)
        best: Fit | None = None
        with self._threads():
            base = self._family_of(data)
            for run in range(self.n_init):
                result = self._run(base, data, rng, run)
                if best is None or _final(result) > _final(best):
                    best = result
                if result.interrupted:
                    break
        assert best is not None
        if result.interrupted and not best.objectives:
            raise KeyboardInterrupt
        self._data = data
        self._store(best)
        self._warn(best, result.interrupted)
        return self

    def _run(self, base: Family | None, data: Data, rng: Any, run: int) -> Fit:
        process, emissions = self._start(base, data, rng)
        prefix = f"run {run}, " if self.n_init > 1 else ""
        name = "log-likelihood with priors" if self.priors else "log-likelihood"

        def report(iteration: int, objective: float, increase: float | None) -> None:
            if self.verbose:
                change = "" if increase is None else f" ({increase:+.3g})"
                print(f"{prefix}iteration {iteration}: {name} {objective:.8g}{change}")

        return fit(process, emissions, data, self.max_iter, self.tol, report)

    def _start(self, base: Family | None, data: Data, rng: Any) -> tuple[Process, Emissions]:
        """Return the initial process and emissions of a run."""
        init = {name: torch.as_tensor(np.array(value, dtype=np.float64)) for name, value in (self.init or {}).items()}
        guess = None
        emissions: Emissions
        if base is None:
            emissions = deepcopy(self.emissions)
        else:
            own = base.parameters
            if isinstance(base, Categorical):
                own = random_symbols(base, data, rng)
            elif not init.keys() >= {*own, *self._process_names}:
                guess = assign(base, data, rng)
                own = initial_emissions(base, data, guess)
            emissions = base.with_parameters({name: init.get(name, p) for name, p in own.items()})
        process = initial_process(self.n_states, self.max_duration, guess, data, rng)
        return Process({name: init.get(name, p) for name, p in process.items()}, self.priors or {}), emissions

    @property
    def _process_names(self) -> tuple[str, ...]:
        """The parameters of the hidden process."""
        return "startprob", "transmat", *["durations"] * (self.max_duration is not None)

    def _family_of(self, data: Data) -> Family | None:
        """Return emissions that are equal in all states, None for custom emissions. Checks ``init`` and ``priors``."""
        if not isinstance(self.emissions, str):
            self._check_init_and_priors(None)
            return None
        options = self.covariance, self.n_states, data, self.priors or {}, self.variance_floor
        family = emissions_of(self.emissions, *options)
        if isinstance(family, Categorical) and "emissionprob" in (self.init or {}):
            table = torch.as_tensor(read_numbers("init['emissionprob']", self.init["emissionprob"]))
            if table.ndim == 2 and table.shape[1] > family.parameters["emissionprob"].shape[1]:
                family = family.with_parameters({"emissionprob": torch.full_like(table, 1 / table.shape[1])})
        self._check_init_and_priors(family)
        return family

    def _store(self, result: Fit) -> None:
        """Set the attributes of the fitted model."""
        for name in ("durations_", "emissions_", *(f"{own}_" for names in _PARAMETERS.values() for own in names)):
            self.__dict__.pop(name, None)
        parameters = dict(result.process.parameters)
        if isinstance(result.emissions, Family):
            parameters |= result.emissions.parameters
        else:
            self.emissions_ = result.emissions
        for name, parameter in parameters.items():
            setattr(self, f"{name}_", parameter.numpy())
        if isinstance(result.emissions, Gaussian):
            self._center, self._floor = result.emissions.center, result.emissions.floor
        self.log_likelihoods_ = np.array(result.log_likelihoods)
        self.objectives_ = np.array(result.objectives)
        self.n_iter_, self.converged_ = len(result.objectives), result.converged

    def _warn(self, result: Fit, is_interrupted: bool) -> None:
        """Warn about the best run, and about an interrupt."""
        if is_interrupted:
            warnings.warn(
                f"fit was interrupted: the parameters of iteration {len(result.objectives)} are kept", stacklevel=4
            )
        elif not self.converged_ and self.tol is not None and self.max_iter > 0:
            warnings.warn(
                f"EM did not converge in max_iter={self.max_iter} iterations: increase max_iter or tol",
                ConvergenceWarning,
                stacklevel=4,
            )
        if result.empty:
            names = ", ".join(map(str, result.empty))
            warnings.warn(
                f"no step has a positive probability of state {names}: the parameters of such a state are kept as they "
                "were. Decrease n_states, or set init or random_state",
                stacklevel=4,
            )

    # --- use

    @answers_near_misses
    def predict(self, X: Collection) -> Any:
        """Return the most probable sequence of states of each series (the Viterbi algorithm).

        The result is a list of integer arrays (T,). If X is an array, it is one array (n, T), with −1 in the padding.
        """
        return _like_input(X, self._solve(X, _best_states), -1)

    @answers_near_misses
    def predict_proba(self, X: Collection, *, omega: str | Regularizer = "negentropy", gamma: Any = None) -> Any:
        """Return the probability of each state at each step, given the whole series.

        The result is a list of arrays (T, S). If X is an array, it is one array (n, T, S), with 0 in the padding.

        Args:
            X: The series.
            omega: The regularizer Ω. "negentropy" (the default) gives the posterior. A sparse Ω, such as "sparsemax",
                gives a distribution in which unlikely states have probability 0.
            gamma: Smoothing strength, default 1. Only valid if ``omega`` is a string.

        """
        return _like_input(X, self._solve(X, lambda p: p.marginals, resolve(omega, gamma)), 0)

    @answers_near_misses
    def score(self, X: Collection, y: Any = None) -> float:
        """Return the log-likelihood of X, and of the known states y, summed over the series."""
        process, emissions = self._model()
        data = self._read_data(X, y, reset=False)
        with self._threads(), torch.no_grad():
            scores, chunks = process.scores(), data.chunks(emissions, self.n_states)
            values = [scores.distribution(c.log_prob(emissions), c.lengths).value.sum() for c in chunks]
        return float(torch.stack(values).sum())

    @answers_near_misses
    def bic(self, X: Collection) -> float:
        """Return the Bayesian information criterion of the model for X. A lower value is better."""
        steps = sum(len(x) for x in self._read(X, reset=False))
        return self._num_free() * float(np.log(steps)) - 2 * self.score(X)

    @answers_near_misses
    def aic(self, X: Collection) -> float:
        """Return the Akaike information criterion of the model for X. A lower value is better."""
        return 2 * self._num_free() - 2 * self.score(X)

    @answers_near_misses
    def forecast(self, X: Collection, steps: int = 1, *, quantiles: Sequence[float] = (0.1, 0.5, 0.9)) -> Forecast:
        """Return the predictive distributions of the steps after the end of each series.

        Args:
            X: The series.
            steps: The number of steps to forecast, default 1.
            quantiles: The levels of the quantiles to return, from 0 to 1.

        >>> X = [[0.0, 0.1, 5.0, 5.1, 4.9, 0.0, 0.1, 5.0, 5.2]]
        >>> init = {"means": [[0.0], [5.0]]}
        >>> forecast = HMM(2, init=init, tol=None, max_iter=5).fit(X).forecast(X, steps=2)
        >>> forecast.states.shape, forecast.mean.shape, forecast.quantiles.shape
        ((1, 2, 2), (1, 2, 1), (3, 1, 2, 1))
        """
        if not isinstance(steps, Integral) or steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, got {steps!r}")
        levels = torch.as_tensor(np.array(quantiles, dtype=np.float64))
        if levels.ndim != 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"quantiles must be levels between 0 and 1, got {quantiles!r}")
        process, emissions = self._model()
        data = self._read_data(X, None, reset=False)
        start, transitions, durations, last_durations = process.scores()
        recursion = Filter(
            start, transitions, omega=resolve("negentropy", None), durations=durations, last_durations=last_durations
        )
        weights = torch.empty(len(data.lengths), int(steps), self.n_states, dtype=torch.float64)
        with self._threads():
            for chunk in data.chunks(emissions, self.n_states):
                start_state = recursion.start(chunk.shape[:1])
                state, _ = recursion.filter(chunk.log_prob(emissions), start_state, chunk.lengths)
                if bool((state.value == -torch.inf).any()):
                    series = chunk.members[int((state.value == -torch.inf).nonzero()[0])]
                    raise ValueError(f"X[{series}] must have a positive probability under the model for a forecast")
                weights[chunk.members] = recursion.forecast(state, int(steps))
        if not isinstance(emissions, Family):
            return Forecast(weights.numpy(), None, None)
        points = emissions.quantiles(weights, levels)
        return Forecast(weights.numpy(), emissions.mean(weights).numpy(), None if points is None else points.numpy())

    @answers_near_misses
    def sample(self, n_steps: int = 1, *, random_state: Any = None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return a random series (T,) or (T, D) and its states (T,).

        Args:
            n_steps: The number of steps T, default 1.
            random_state: A seed or a ``numpy.random.RandomState``, default the parameter ``random_state`` of the model.

        """
        if not isinstance(n_steps, Integral) or n_steps < 1:
            raise ValueError(f"n_steps must be an integer of at least 1, got {n_steps!r}")
        process, emissions = self._model()
        if not hasattr(emissions, "draw"):
            raise ValueError("sample needs emissions with a method draw(states, rng), which returns an array (T, D)")
        rng = check_random_state(self.random_state if random_state is None else random_state)
        states = _draw_states(process, int(n_steps), rng)
        x = emissions.draw(states, rng)
        return (x[:, 0] if self._is_univariate else x), states

    def standard_errors(self) -> dict[str, NDArray[np.float64]]:
        """Return the standard error of each parameter of the model, by name.

        The errors come from the observed information: the inverse of the Hessian of the negative log-likelihood of the
        data of ``fit``, without priors. An entry is NaN, with a warning, if a parameter is on the boundary of its
        range, such as a probability of 0. Memory and time grow with the square of the number of parameters. The model
        keeps the data of ``fit`` for this method.

        >>> X = np.random.default_rng(0).normal(scale=2.0, size=(1, 400))
        >>> HMM(1).fit(X).standard_errors()["means"].round(2)         # 2 / √400
        array([[0.1]])
        """
        process, emissions = self._model()
        if not isinstance(emissions, Family):
            raise ValueError("standard_errors needs emissions of a family of this class, got custom emissions")
        with self._threads():
            errors, reasons = standard_errors(process, emissions, self._data)
        if reasons:
            warnings.warn(f"some standard errors are NaN: {', and '.join(reasons)}", stacklevel=2)
        return {name: error.numpy() for name, error in errors.items()}

    def _solve(
        self, X: Collection, answer: Callable[[Any], Tensor], omega: str | Regularizer = "negentropy"
    ) -> list[Tensor]:
        """Return an answer (T, ...) for each series of X, from the answers (n, T, ...) for chunks of series."""
        process, emissions = self._model()
        data = self._read_data(X, None, reset=False)
        with self._threads(), torch.no_grad():
            scores, chunks = process.scores(), data.chunks(emissions, self.n_states)
            flat = [
                chunk.flatten(answer(scores.distribution(chunk.log_prob(emissions), chunk.lengths, omega)))
                for chunk in chunks
            ]
        return data.split(torch.cat(flat))

    def _model(self) -> tuple[Process, Emissions]:
        """Return the model with the parameters of the attributes."""
        check_is_fitted(self, "n_iter_")
        hidden = {name: torch.as_tensor(getattr(self, f"{name}_")) for name in self._process_names}
        process = Process(hidden, self.priors or {})
        if not isinstance(self.emissions, str):
            return process, self.emissions_
        own = {name: torch.as_tensor(getattr(self, f"{name}_")) for name in _PARAMETERS[self.emissions]}
        if self.emissions == "gaussian":
            return process, gaussian(self.covariance, own, self.priors or {}, self._center, self._floor)
        family = Categorical if self.emissions == "categorical" else Poisson
        return process, family(own, self.priors or {})

    def _num_free(self) -> int:
        process, emissions = self._model()
        if not isinstance(emissions, Family):
            raise ValueError("aic and bic need emissions of a family of this class, got custom emissions")
        return process.num_free + emissions.num_free

    # --- checks

    def _read_data(self, X: Collection, y: Any, *, reset: bool) -> Data:
        series = self._read(X, reset=reset)
        for k, x in enumerate(series):
            if not reset and self.emissions == "categorical":
                check_symbols(f"X[{k}]", x, self.emissionprob_.shape[1])
        y = y.to_numpy() if hasattr(y, "to_numpy") else y
        if y is not None and len(y) == len(series) and _are_scalars(y):
            warnings.warn(
                "y has one label for each series, which fit ignores: pass a state for each step", stacklevel=4
            )
            y = None
        return Data(series, None if y is None else read_labels(y, [len(x) for x in series], self.n_states))

    def _as_floating(self, series: Series) -> Series:
        return [x.double() for x in series]

    def _check_values(self, name: str, x: Tensor) -> None:
        if bool(x.isinf().any()):
            step = int(x.isinf().any(1).nonzero()[0])
            raise ValueError(f"{name} must be finite, or NaN where a value is missing, got inf at step {step}")
        if isinstance(self.emissions, str):
            _KINDS[self.emissions].check(name, x)

    def _check_amount(self, data: Data) -> None:
        """Raise ``ValueError`` if there are fewer steps with a value than states."""
        known = int((~data.x.isnan()).any(-1).sum())
        if not known:
            raise ValueError("X must hold at least one value, got only NaN")
        if known < self.n_states:
            raise ValueError(
                f"n_states must be at most the number of steps with a value, n_samples={known}, got {self.n_states}"
            )

    def _check_parameters(self) -> None:
        """Check the parameters that do not depend on the data."""
        if isinstance(self.emissions, str):
            check_choice("emissions", self.emissions, _FAMILIES, "an object with log_prob and m_step, or ")
        elif not all(callable(getattr(self.emissions, name, None)) for name in ("log_prob", "m_step")):
            raise ValueError(
                f"emissions must have the methods log_prob and m_step, got a {type(self.emissions).__name__}"
            )
        check_choice("covariance", self.covariance, COVARIANCES)
        least = {"n_states": 1, "n_init": 1, "max_iter": 0}
        if self.max_duration is not None:
            least |= {"n_states": 2, "max_duration": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < bound:
                reason = " with max_duration" if bound == 2 else ""
                raise ValueError(f"{name} must be an integer of at least {bound}{reason}, got {value!r}")
        if self.tol is not None and not (isinstance(self.tol, Real) and float(self.tol) >= 0):
            raise ValueError(f"tol must be at least 0, or None, got {self.tol!r}")
        if not (isinstance(self.variance_floor, Real) and 0 < float(self.variance_floor) < np.inf):
            raise ValueError(f"variance_floor must be greater than 0 and finite, got {self.variance_floor!r}")
        for name in ("priors", "init"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"{name} must map names of parameters to numbers or arrays, or be None, got {value!r}")

    def _check_init_and_priors(self, family: Family | None) -> None:
        """Check ``init`` and ``priors``, whose shapes depend on the data."""
        states = self.n_states
        shapes: dict[str, tuple[int, ...]] = {"startprob": (states,), "transmat": (states, states)}
        if self.max_duration is not None:
            shapes["durations"] = states, self.max_duration
        prior_shapes = dict(shapes)
        if family is not None:
            shapes |= {name: tuple(p.shape) for name, p in family.parameters.items()}
            prior_shapes |= family.prior_shapes
        has_matrices = self.covariance in ("full", "tied")
        check_init(self.init or {}, shapes, self.max_duration is not None, has_matrices)
        check_priors(self.priors or {}, prior_shapes, has_matrices)


def _are_scalars(y: Any) -> bool:
    """True if y has one number for each series."""
    return all(np.ndim(label) == 0 for label in y)


def _final(result: Fit) -> float:
    return result.objectives[-1] if result.objectives else -np.inf


def _best_states(p: Any) -> Tensor:
    """Return the best state of each step, (n, T), −1 in the padding."""
    if not isinstance(p, SemiMarkov):
        states: Tensor = p.decode()
        return states
    segments = p.decode()
    first, label = segments[..., 0], segments[..., 2]
    steps = p.event_shape[0]
    starts = torch.zeros(len(first), steps + 1, dtype=torch.int64)
    starts.scatter_(1, first.masked_fill(first < 0, steps), 1)
    number = (starts[:, :-1].cumsum(1) - 1).clamp(min=0)  # of the segment at each step
    return label.gather(1, number).masked_fill(torch.arange(steps) >= p.lengths.unsqueeze(-1), -1)


def _like_input(X: Collection, values: Sequence[Tensor], padding: int) -> Any:
    """Return the results of each series: a list if X is a list, else one padded array."""
    arrays = [value.numpy() for value in values]
    if isinstance(X, list | tuple):
        return arrays
    steps = max(X.shape[1] if hasattr(X, "shape") and len(X.shape) > 1 else 0, *map(len, arrays))
    padded = np.full((len(arrays), steps, *arrays[0].shape[1:]), padding, dtype=arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


def _draw_states(process: Process, count: int, rng: Any) -> NDArray[np.int64]:
    start, transmat = process.parameters["startprob"].numpy(), process.parameters["transmat"].numpy()
    durations = process.parameters.get("durations")
    states: list[int] = []
    state = int(draw_from_rows(start[None], rng)[0])
    while len(states) < count:
        stay = 1 if durations is None else 1 + int(draw_from_rows(durations.numpy()[state][None], rng)[0])
        states += stay * [state]
        state = int(draw_from_rows(transmat[state][None], rng)[0])
    return np.array(states[:count])
