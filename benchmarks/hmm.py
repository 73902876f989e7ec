"""Measure hidden Markov models against hmmlearn, pomegranate and dynamax: EM, posteriors, Viterbi, long series.

All libraries run on one thread. All calls are interleaved in one process, except dynamax, which needs a separate
environment. A row gives the minimum and the median of its runs. Libraries that are not installed (`make bench` installs
them) are left out.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hidden import SYMBOLS, Problem, Size, make_problem
from measuring import (
    Row,
    Run,
    Times,
    against,
    cell,
    collect,
    command_line,
    factor,
    forget_peak,
    heading,
    in_own_process,
    installed,
    machine,
    measure,
    peak,
    ratio,
    report,
    shown,
    table,
)
from rivals import peer, versions
from threadpoolctl import threadpool_limits

from bellmax.sklearn import HMM

HERE = Path(__file__).parent
ALONE = HERE.parent / "build/peers/bin/python"
LIMIT = 0.4  # seconds for the repeats of a run
SIZES: tuple[Size, ...] = ((10, 200, 4), (100, 1000, 8), (100, 1000, 32))
QUICK: tuple[Size, ...] = ((3, 20, 2),)
ITERATIONS, MANY_STATES = 10, 32  # EM iterations of a fit, if there are fewer states
KINDS = "Gaussian, D = 1", "Gaussian, D = 4", "categorical"
SCALING, LOG, SINGLE = "hmmlearn, scaling", "hmmlearn, log", ", float32"
INFERENCE = "posteriors", "Viterbi"
INFERRED = SCALING, LOG, "pomegranate", "dynamax", f"dynamax{SINGLE}"
ITERATED = *INFERRED[:4], "dynamax, E-step", f"dynamax, E-step{SINGLE}"
SHAPE = "series, steps, states"
UNITS = "Times are in milliseconds: the minimum / the median over repeated calls."
LONG: tuple[tuple[Size, int | None], ...] = (
    ((1, 1_000_000, 8), None),
    ((1000, 1000, 8), None),
    ((1, 100_000, 4), 1000),
)
SHORT: tuple[tuple[Size, int | None], ...] = (((1, 500, 2), None), ((1, 50, 2), 7))

logging.getLogger("hmmlearn").setLevel(logging.ERROR)
Runs = dict[str, Run]  # "EM" and the tasks of INFERENCE
Implementation = tuple[Runs, Callable[[], float]]  # and the log-likelihood


# --- EM, posteriors and Viterbi by each library


def bellmax(problem: Problem, iterations: int) -> Implementation:
    def fit(max_iter: int = iterations) -> HMM:
        return model_of(problem, max_iter).fit(problem.x)

    model = fit(0)
    runs: Runs = {
        "EM": fit,
        "posteriors": lambda: model.predict_proba(problem.x),
        "Viterbi": lambda: model.predict(problem.x),
    }
    return runs, lambda: fit(1).log_likelihoods_[0]


def model_of(problem: Problem, max_iter: int, max_duration: int | None = None) -> HMM:
    kind = "categorical" if "emissionprob" in problem.emissions else "gaussian"
    transmat = problem.transmat.copy()
    if max_duration is not None:
        np.fill_diagonal(transmat, 0)
        transmat /= transmat.sum(1, keepdims=True)
    init = {"startprob": problem.startprob, "transmat": transmat, **problem.emissions}
    options: Row = {"covariance": "diag", "max_iter": max_iter, "tol": None, "variance_floor": 1e-12}
    return HMM(problem.size[2], emissions=kind, init=init, max_duration=max_duration, **options)


def hmmlearn(problem: Problem, iterations: int, implementation: str) -> Implementation:
    x, lengths = problem.x.reshape(problem.x.shape[0] * problem.x.shape[1], -1), [problem.size[1]] * problem.size[0]
    is_categorical = "emissionprob" in problem.emissions
    make = peer("hmmlearn.hmm", "CategoricalHMM" if is_categorical else "GaussianHMM")
    own: Row = {"n_features": SYMBOLS} if is_categorical else {"covariance_type": "diag", "covars_prior": 0}
    own |= {"init_params": "", "tol": -math.inf, "implementation": implementation}
    parameters = {"startprob": problem.startprob, "transmat": problem.transmat, **problem.emissions}

    def start(n_iter: int = iterations) -> Any:
        model = make(problem.size[2], n_iter=n_iter, **own)
        for name, parameter in parameters.items():
            setattr(model, f"{name}_", parameter)
        return model

    model = start()
    model.n_features = SYMBOLS if is_categorical else x.shape[1]
    runs: Runs = {
        "EM": lambda: start().fit(x, lengths),
        "posteriors": lambda: model.predict_proba(x, lengths),
        "Viterbi": lambda: model.predict(x, lengths),
    }
    return runs, lambda: start(1).fit(x, lengths).monitor_.history[0]


def pomegranate(problem: Problem, iterations: int) -> Implementation:
    """Without probabilities of the end of a series, which other libraries do not have."""
    make = peer("pomegranate.hmm", "DenseHMM")
    family = peer("pomegranate.distributions", "Categorical" if "emissionprob" in problem.emissions else "Normal")
    x = torch.tensor(problem.x).reshape(*problem.size[:2], -1)
    x = x.float() if x.is_floating_point() else x
    startprob, transmat = torch.tensor(problem.startprob).float(), torch.tensor(problem.transmat).float()
    parameters = [torch.tensor(p).float() for p in problem.emissions.values()]
    options: Row = {"ends": [1.0] * problem.size[2], "max_iter": iterations, "tol": 0.0}

    def start() -> Any:
        if family.__name__ == "Categorical":
            states = [family(row.unsqueeze(0).clone()) for row in parameters[0]]
        else:
            states = [family(m.clone(), v.clone(), "diag") for m, v in zip(*parameters, strict=True)]
        return make(states, edges=transmat.clone(), starts=startprob.clone(), **options)

    model = start()
    runs: Runs = {
        "EM": lambda: start().fit(x),
        "posteriors": lambda: model.predict_proba(x),
        "Viterbi": lambda: model.viterbi(x),
    }
    return runs, lambda: float(model.log_probability(x).double().sum())


def implementations(problem: Problem, iterations: int) -> dict[str, Implementation]:
    """Return the libraries that are installed, after a comparison of their log-likelihoods."""
    every = {"bellmax": bellmax(problem, iterations)}
    if peer("hmmlearn.hmm", "GaussianHMM"):
        every |= {f"hmmlearn, {name}": hmmlearn(problem, iterations, name) for name in ("scaling", "log")}
    if peer("pomegranate.hmm", "DenseHMM"):
        every["pomegranate"] = pomegranate(problem, iterations)
    expected = every["bellmax"][1]()
    if SCALING in every and has_underflow(every[SCALING][1]):
        del every[SCALING]
    for name, (_, log_likelihood) in every.items():
        check(name, log_likelihood(), expected)
    return every


def has_underflow(log_likelihood: Callable[[], float]) -> bool:
    """True if hmmlearn raises an error because the likelihood of a step is 0 in all states."""
    try:
        log_likelihood()
    except ValueError as error:
        return "underflow" in str(error)
    return False


def check(name: str, log_likelihood: float, expected: float) -> None:
    tolerance = 1e-4 if name == "pomegranate" or name.endswith(SINGLE) else 1e-9
    if not math.isclose(log_likelihood, expected, rel_tol=tolerance):
        raise ArithmeticError(f"{name} has the log-likelihood {log_likelihood}, bellmax has {expected}")


def iterating(kinds: Sequence[str], sizes: Sequence[Size], peaked: bool, repeats: int) -> list[Row]:
    """Times of an EM iteration."""
    rows: list[Row] = []
    for kind in kinds:
        for size in sizes:
            iterations = 1 if peaked or size[2] >= MANY_STATES else ITERATIONS
            every = implementations(make_problem(kind, size, peaked), iterations)
            times = measure({name: runs["EM"] for name, (runs, _) in every.items()}, repeats, LIMIT)
            row: Row = {"shape": size, "task": kind, "peaked": peaked, "log_likelihood": every["bellmax"][1]()}
            rows.append(row | {name: each(t, iterations) for name, t in times.items()})
    return rows


def each(times: Times, count: int) -> Times:
    return {name: time / count for name, time in times.items()}


def inferring(sizes: Sequence[Size], repeats: int) -> list[Row]:
    """Times of posteriors and best paths."""
    rows: list[Row] = []
    for size in sizes:
        every = implementations(make_problem(KINDS[0], size), 1)
        for task in INFERENCE:
            times = measure({name: runs[task] for name, (runs, _) in every.items()}, repeats, LIMIT)
            rows.append({"shape": size, "task": task, **times})
    return rows


def add_dynamax(results: Row, repeats: int, precision: str) -> str | None:
    """Add the times of dynamax to the rows, and return its version. ``precision`` is "" for float64, or SINGLE."""
    if not ALONE.exists():
        return None
    iterated = [*results["em"], *results["peaked"]]
    cases = [(row["task"], row["shape"], row["peaked"]) for row in iterated]
    case = json.dumps((cases, repeats, LIMIT, precision != SINGLE))
    measured = json.loads(in_own_process(HERE / "dynamax_alone.py", case, python=ALONE))
    for row, times in zip(iterated, measured["rows"], strict=True):
        check(f"dynamax{precision}", times["log_likelihood"], row["log_likelihood"])
        row |= {f"dynamax{precision}": times["EM"], f"dynamax, E-step{precision}": times["E-step"]}
    by_case = dict(zip(cases, measured["rows"], strict=True))
    for row in results["inference"]:
        row[f"dynamax{precision}"] = by_case[KINDS[0], row["shape"], False][row["task"]]
    return measured["version"]


# --- mild and peaked emissions, long series


def peaks(kinds: Sequence[str], sizes: Sequence[Size], repeats: int) -> list[Row]:
    """Times of one EM iteration of bellmax with mild and with peaked emissions, interleaved."""
    rows: list[Row] = []
    for kind in kinds:
        for size in sizes:
            runs = {
                name: bellmax(make_problem(kind, size, name == "peaked"), 1)[0]["EM"] for name in ("mild", "peaked")
            }
            rows.append({"shape": size, "kind": kind, **measure(runs, repeats, 2 * LIMIT)})
    return rows


def long_series(cases: Sequence[tuple[Size, int | None]]) -> list[Row]:
    """Seconds and memory of one EM iteration, each in a new process."""
    rows: list[Row] = []
    for size, max_duration in cases:
        row: Row = {"shape": size, "max_duration": max_duration}
        libraries = ["bellmax"]
        if max_duration is None and peer("hmmlearn.hmm", "GaussianHMM"):
            libraries.append(SCALING)
        for library in libraries:
            row[library] = json.loads(in_own_process(__file__, "--memory", json.dumps((library, size, max_duration))))
            check(library, row[library]["log_likelihood"], row["bellmax"]["log_likelihood"])
        rows.append(row)
    return rows


def print_memory(library: str, size: Size, max_duration: int | None) -> None:
    """Print the log-likelihood, the seconds and the memory of one EM iteration, without the memory of the data."""

    def fit(problem: Problem) -> float:
        if library == SCALING:
            return hmmlearn(problem, 1, "scaling")[1]()
        return model_of(problem, 1, max_duration).fit(problem.x).log_likelihoods_[0]

    fit(make_problem(KINDS[0], (1, 50, size[2])))  # the first call loads libraries
    problem = make_problem(KINDS[0], size)
    before = forget_peak()
    start = time.perf_counter()
    log_likelihood = fit(problem)
    seconds = time.perf_counter() - start
    print(json.dumps({"log_likelihood": log_likelihood, "seconds": seconds, "memory": (peak() - before) / 1024}))


# --- the page


def peaked_table(rows: list[Row]) -> list[str]:
    return table(
        f"{SHAPE} | emissions | mild: | peaked: | peaked ÷ mild:",
        [
            [shown(r["shape"]), r["kind"], cell(r["mild"]), cell(r["peaked"]), factor(ratio(r["peaked"], r["mild"]))]
            for r in rows
        ],
    )


def long_table(rows: list[Row]) -> list[str]:
    def numbers(row: Row, library: str) -> list[str]:
        return [f"{row[library]['seconds']:.2f}", f"{row[library]['memory']:.0f}"] if library in row else ["–", "–"]

    return table(
        f"{SHAPE} | longest duration: | bellmax, s: | bellmax, MB: | {SCALING}, s: | {SCALING}, MB:",
        [
            [shown(r["shape"]), str(r["max_duration"] or "–"), *numbers(r, "bellmax"), *numbers(r, SCALING)]
            for r in rows
        ],
    )


def markdown(results: Row) -> list[str]:
    peers = results["peers"]
    columns = {name: peers[name.split(",")[0]] for name in (*ITERATED, *INFERRED)}
    return [
        *heading("hmm", results["machine"], units=UNITS),
        installed(peers),
        "",
        "All libraries run on one thread. bellmax and hmmlearn compute in float64. pomegranate computes in float32.",
        "dynamax is measured in float64, and in float32, which is its default. The series are random, and the",
        "covariances are diagonal. All libraries start from the same parameters, and the priors of hmmlearn are turned",
        "off. The script checks that the log-likelihoods of all libraries are equal: to a relative error of 1e-9 in",
        "float64, and of 1e-4 in float32. A number in brackets is the time of the other library divided by the time of",
        "bellmax (medians). Above 1×, bellmax is faster.",
        "",
        '- *hmmlearn, scaling* is `implementation="scaling"`, and *hmmlearn, log* is the default.',
        "- *dynamax* is measured in its own process. JAX compiles its functions before the first call, which takes",
        "  seconds and is not counted. The times of the other libraries include all Python code.",
        "",
        "### EM iteration",
        "",
        f"A call of `fit` runs {ITERATIONS} iterations, or one iteration if there are {MANY_STATES} states. The table",
        "has the time of the call divided by the number of iterations. The times of dynamax are for a compiled",
        "function that runs one iteration, or only the E-step. Categorical emissions have 16 symbols.",
        *against(results["em"], SHAPE, ITERATED, columns),
        "",
        "### Posteriors and Viterbi",
        "",
        "The posteriors are the result of `predict_proba`, and the best paths are the result of `predict`. The",
        "emissions are Gaussian, with one feature.",
        *against(results["inference"], SHAPE, INFERRED, columns),
        "",
        "### Peaked emissions",
        "",
        "If the variances are small, the log-densities of different states differ by thousands. The next tables use",
        "the same series as above, but divide the variances by 1000 before the first iteration. A call of `fit` runs",
        "one iteration. The likelihoods of *hmmlearn, scaling* underflow, and it raises an error.",
        *against(results["peaked"], SHAPE, ITERATED, columns),
        "",
        "In the next table, calls of bellmax with mild and with peaked emissions are interleaved.",
        *peaked_table(results["peaks"]),
        "",
        "### Long series and explicit durations",
        "",
        "The table shows one call of `fit` with one iteration in a new process, for series with one feature. Memory is",
        "the peak memory of the process minus its memory before the call. A model with a longest duration is a hidden",
        "semi-Markov model, with a probability for each duration. hmmlearn does not have such models.",
        *long_table(results["long"]),
    ]


def main() -> None:
    parser = command_line(__doc__, "hmm", repeats=15)
    parser.add_argument("--quick", action="store_true", help="small problems and few repeats, to see that it works")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    threadpool_limits(1)
    if args.memory:
        print_memory(*json.loads(args.memory))
        return
    sizes, repeats = (QUICK, 2) if args.quick else (SIZES, args.repeats)
    tables = {
        "em": lambda: [
            *iterating(KINDS[:1], sizes, False, repeats),
            *iterating(KINDS[1:], sizes[:2], False, repeats),
        ],
        "inference": lambda: inferring(sizes, repeats),
        "peaked": lambda: iterating(KINDS[:1], sizes[:2], True, repeats),
        "peaks": lambda: peaks(KINDS[:2], sizes, repeats),
        "long": lambda: long_series(SHORT if args.quick else LONG),
    }
    results: Row = {"machine": machine(), "peers": versions(("hmmlearn", "pomegranate")), **collect(tables)}
    for precision in ("", SINGLE):
        results["peers"]["dynamax"] = add_dynamax(results, repeats, precision)
    report(args.output, "hmm", results, markdown(results))


if __name__ == "__main__":
    main()
