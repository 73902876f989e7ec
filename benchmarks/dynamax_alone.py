"""Measure dynamax on one processor, in a separate environment, where it installs JAX and its other requirements.

The argument is JSON: the cases (kind, size, peaked), the number of repeats, the seconds per run, and True for float64.
Prints the version of dynamax, its log-likelihoods and its times as JSON. Functions are compiled before the first call.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib.metadata import version
from typing import Any

if hasattr(os, "sched_setaffinity"):  # before JAX starts a thread for each processor
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
from dynamax.hidden_markov_model import CategoricalHMM, DiagonalGaussianHMM
from hidden import SYMBOLS, Problem, make_problem
from jax import numpy as jnp
from measuring import Run, measure


def model_of(problem: Problem) -> tuple[Any, Any, Any]:
    """Return the model, its parameters and their properties."""
    states, own = problem.size[2], {name: jnp.asarray(p) for name, p in problem.emissions.items()}
    chain = {"initial_probs": jnp.asarray(problem.startprob), "transition_matrix": jnp.asarray(problem.transmat)}
    if "emissionprob" in own:
        model: Any = CategoricalHMM(states, 1, SYMBOLS)
        emissions = {"emission_probs": own["emissionprob"][:, None]}
    else:
        model = DiagonalGaussianHMM(states, problem.x.shape[2])
        emissions = {"emission_means": own["means"], "emission_scale_diags": jnp.sqrt(own["covars"])}
    return model, *model.initialize(**chain, **emissions)


def runs_of(problem: Problem) -> tuple[dict[str, Run], float]:
    """Return runs by task, and the log-likelihood."""
    model, params, props = model_of(problem)
    x = jnp.asarray(problem.x if problem.x.ndim == 3 else problem.x[..., None])
    state = model.initialize_m_step_state(params, props)

    def expect(params: Any, x: Any) -> Any:
        return jax.vmap(partial(model.e_step, params))(x)

    def iterate(params: Any, x: Any) -> Any:
        statistics, log_likelihoods = expect(params, x)
        return model.m_step(params, props, statistics, state)[0], log_likelihoods.sum()

    tasks = {
        "E-step": expect,
        "EM": iterate,
        "posteriors": lambda params, x: jax.vmap(lambda one: model.smoother(params, one).smoothed_probs)(x),
        "Viterbi": lambda params, x: jax.vmap(partial(model.most_likely_states, params))(x),
    }
    compiled = {task: jax.jit(run) for task, run in tasks.items()}
    log_likelihood = float(compiled["EM"](params, x)[1])
    return {task: lambda f=f: jax.block_until_ready(f(params, x)) for task, f in compiled.items()}, log_likelihood


def main() -> None:
    cases, repeats, seconds, is_double = json.loads(sys.argv[1])
    jax.config.update("jax_enable_x64", is_double)
    rows = []
    for kind, size, peaked in cases:
        runs, log_likelihood = runs_of(make_problem(kind, size, peaked))
        rows.append({"log_likelihood": log_likelihood, **measure(runs, repeats, seconds)})
    print(json.dumps({"version": version("dynamax"), "rows": rows}))


if __name__ == "__main__":
    main()
