"""Chains and DTW by bellmax, by PyTorch code, and by other libraries if they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measuring import SECONDS, Row, Run, measure, random_series
from torch import Tensor

import bellmax as bx

TASKS = ("value", "value and gradient", "Hessian product", "decoding")
NEGENTROPY = "bellmax, negentropy"
CHAIN_PEERS = ("torch-struct", "pytorch-crf", "TorchCRF", "entmax", "jax")
DTW_PEERS = ("tslearn", "pysdtw", "dtaidistance", "librosa")
Shape = tuple[int, int, int]  # batch, and: steps, states of chains; lengths of both series of DTW

os.environ["NUMBA_THREADING_LAYER"] = "workqueue"  # a second OpenMP runtime slows torch's operators
warnings.filterwarnings("ignore", ".*arg_constraints", UserWarning)  # torch-struct


@dataclass
class Rival:
    """An implementation that computes the values of a batch from ``inputs``, which require gradients."""

    inputs: Sequence[Tensor]
    value: Callable[[], Tensor]
    path: Callable[[], Sequence[Tensor]] | None = None  # differentiable gradient of the value; None: autograd
    decode: Run | None = None
    skips: tuple[str, ...] = ()

    def gradient(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self.value().sum(), self.inputs)

    def runs(self) -> dict[str, Run]:
        """Runs of the tasks, without those in ``skips``."""
        z = [torch.randn_like(x) for x in self.inputs]

        def value() -> object:
            with torch.no_grad():
                return self.value()

        def hessian() -> object:
            if self.path is None:
                path = torch.autograd.grad(self.value().sum(), self.inputs, create_graph=True)
            else:
                path = self.path()
            return torch.autograd.grad(path, self.inputs, grad_outputs=z)

        runs = dict(zip(TASKS, (value, self.gradient, hessian, self.decode), strict=True))
        return {task: run for task, run in runs.items() if run is not None and task not in self.skips}


def compare(
    make: Callable[[Shape], dict[str, Rival]], shapes: Sequence[Shape], repeats: int, tasks: Sequence[str] = TASKS
) -> list[Row]:
    rows: list[Row] = []
    for shape in shapes:
        runs = {name: rival.runs() for name, rival in make(shape).items()}
        check(runs)
        for task in tasks:
            now = {name: run[task] for name, run in runs.items() if task in run}
            rows.append({"shape": shape, "task": task, **measure(now, repeats, SECONDS)})
    return rows


def check(runs: dict[str, dict[str, Run]]) -> None:
    """Check that all implementations have the same value, and that the gradient of bellmax is finite."""
    value = runs["bellmax"]["value"]()
    for name, run in runs.items():
        if name != NEGENTROPY:
            check_value(name, run["value"](), value)
    if not all(gradient.isfinite().all() for gradient in runs["bellmax"]["value and gradient"]()):
        raise ArithmeticError("the gradient is not finite")


def check_value(name: str, value: Any, expected: Any) -> None:
    torch.testing.assert_close(
        value, expected, rtol=1e-4, atol=1e-3, check_dtype=False, msg=f"{name} has another value"
    )


def versions(peers: Sequence[str]) -> dict[str, str | None]:
    """Versions of the libraries, None if not installed."""
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    return {name: installed.get(name) for name in peers}


def peer(module: str, name: str, method: str = "__call__") -> Any:
    """The attribute ``name`` of ``module``, or None if it is missing or has no such method.

    pytorch-crf installs ``torchcrf`` and TorchCRF installs ``TorchCRF``. On file systems that ignore case, the second
    installation overwrites the first, and the method shows which of the two is installed.
    """
    try:
        attribute = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    return attribute if hasattr(attribute, method) else None


def jitted(name: str, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """A function of ``jitted.py``, if JAX is installed."""
    if not peer("jax", "jit"):
        return {}
    module = importlib.import_module("jitted")
    return {"jax": module.Jitted(getattr(module, name), inputs)}


# --- from dense potentials (B, T, S, S) [t, current, previous]


def dense(shape: Shape, *, slow: Sequence[str]) -> dict[str, Rival]:
    """``slow`` selects which of "torch.compile" and "torch-struct" are measured."""
    theta = random_potentials(shape)
    size = shape[1] * theta.numel()  # the gradient of each theta[:, t] has the size of theta
    rivals = {
        "bellmax": ours(theta, "negentropy"),
        "good loop": Rival([theta], lambda: good_loop(theta), decode=lambda: viterbi(theta)),
        "plain loop": Rival(
            [theta],
            lambda: plain_loop(theta),
            skips=TASKS[1:] if size > 1.2e9 else TASKS[2:] if size > 1e8 else (),
        ),
    }
    if "torch.compile" in slow:
        rivals["torch.compile"] = Rival([theta], lambda: compiled_loop(theta), skips=TASKS[2:])
    if "torch-struct" in slow and peer("torch_struct", "LinearChainCRF"):
        rivals["torch-struct"] = torch_struct(theta)
    return rivals | jitted("dense", [theta])


def sparse(shape: Shape) -> dict[str, Rival]:
    """Implementations under the squared l2 norm, and bellmax under negentropy for comparison."""
    theta = random_potentials(shape)
    rivals = {"bellmax": ours(theta, "l2"), NEGENTROPY: ours(theta, "negentropy")}
    if sparsemax := peer("entmax", "sparsemax"):

        def l2_max(x: Tensor) -> Tensor:
            q = sparsemax(x, dim=-1)
            return (q * x).sum(-1) - 0.5 * q.square().sum(-1)

        rivals["entmax"] = Rival([theta], lambda: loop(theta.unbind(1), l2_max))
    return rivals


def random_potentials(shape: Shape) -> Tensor:
    return torch.randn(*shape, shape[2], requires_grad=True)


def ours(theta: Tensor, omega: str) -> Rival:
    def chain() -> bx.Chain:
        return bx.Chain(theta, omega=omega)

    return Rival(
        [theta],
        lambda: chain().value,
        path=lambda: [chain().expected_path],
        decode=lambda: chain().decode(),
    )


def loop(steps: Sequence[Tensor], smooth_max: Callable[[Tensor], Tensor]) -> Tensor:
    v = smooth_max(steps[0][..., :1])
    for theta in steps[1:]:
        v = smooth_max(theta + v.unsqueeze(-2))
    return smooth_max(v)


def logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


def good_loop(theta: Tensor) -> Tensor:
    return loop(theta.unbind(1), logsumexp)


def plain_loop(theta: Tensor) -> Tensor:
    return loop([theta[:, t] for t in range(theta.shape[1])], logsumexp)


compiled_loop = torch.compile(good_loop, dynamic=False)


@torch.no_grad()
def viterbi(theta: Tensor) -> Tensor:
    first, *rest = theta.unbind(1)
    v, pointers = first[..., 0], []
    for step in rest:
        v, best = (step + v.unsqueeze(-2)).max(-1)
        pointers.append(best)
    states = [v.argmax(-1, keepdim=True)]
    for best in reversed(pointers):
        states.append(best.gather(-1, states[-1]))
    return torch.cat(states[::-1], -1)


def torch_struct(theta: Tensor) -> Rival:
    """torch-struct has no potentials of the first step, so they are added to the potentials of the second step."""
    chain = peer("torch_struct", "LinearChainCRF")
    potentials = theta.detach()[:, 1:].clone()
    potentials[:, 0] += theta.detach()[:, 0, None, :, 0]
    potentials.requires_grad_()
    return Rival([potentials], lambda: chain(potentials).partition, decode=lambda: chain(potentials).argmax)


# --- from scores of states and transitions


def scored(shape: Shape, *, spread: float = 1.0) -> dict[str, Rival]:
    """``spread`` is the standard deviation of the transitions."""
    states = shape[2]
    scores = [torch.randn(shape), spread * torch.randn(states, states), torch.randn(states), torch.randn(states)]
    rivals = {"bellmax": our_scores(*[score.requires_grad_() for score in scores])}
    if crf := peer("torchcrf", "CRF", "_compute_normalizer"):
        rivals["pytorch-crf"] = pytorch_crf(crf(states, batch_first=True), *scores)
    if crf := peer("TorchCRF", "CRF", "_compute_denominator_log_likelihood"):
        rivals["TorchCRF"] = other_torch_crf(crf(states, use_gpu=False), *scores)
    return rivals | jitted("scored", scores)


def our_scores(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Rival:
    def chain() -> bx.Chain:
        return bx.Chain.from_scores(emissions, transitions, start=start, end=end)

    return Rival([emissions, transitions, start, end], lambda: chain().value, decode=lambda: chain().decode())


def pytorch_crf(crf: Any, emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Rival:
    crf.transitions.data = transitions.detach().T.contiguous()  # [previous, current]
    crf.start_transitions.data, crf.end_transitions.data = start.detach().clone(), end.detach().clone()
    mask = torch.ones(emissions.shape[:2], dtype=torch.bool)
    return Rival(
        [emissions, *crf.parameters()],
        lambda: crf._compute_normalizer(emissions.transpose(0, 1), mask.T),
        decode=torch.no_grad()(lambda: crf.decode(emissions, mask)),
    )


def other_torch_crf(crf: Any, emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Rival:
    crf.trans_matrix.data = transitions.detach().T.contiguous()  # [previous, current]
    crf.start_trans.data, crf.end_trans.data = start.detach().clone(), end.detach().clone()
    mask = torch.ones(emissions.shape[:2], dtype=torch.bool)
    return Rival(
        [emissions, *crf.parameters()],
        lambda: crf._compute_denominator_log_likelihood(emissions, mask),
        decode=torch.no_grad()(lambda: crf.viterbi_decode(emissions, mask)),
    )


# --- DTW from costs (B, N, M)


def soft_dtws() -> dict[str, Callable[[Tensor], Tensor]]:
    """By name: functions from costs (B, N, M) to values (B,), with γ = 1."""
    rivals = {"bellmax": lambda cost: bx.DTW(cost).value, "anti-diagonals": soft_dtw}
    if loss := peer("tslearn.metrics", "SoftDTWLossPyTorch"):
        of_costs = loss(dist_func=lambda cost, _: cost)
        rivals["tslearn"] = lambda cost: of_costs(cost, cost)
    if function := peer("pysdtw", "SoftDTWcpu", "apply"):
        rivals["pysdtw"] = lambda cost: function.apply(cost, torch.tensor(cost.shape[1:]).expand(len(cost), 2), 1.0, 0)
    return rivals


def soft_aligned(shape: Shape) -> dict[str, Rival]:
    cost = random_cost(shape)
    rivals = {name: Rival([cost], functools.partial(value, cost)) for name, value in soft_dtws().items()}
    for name in {"tslearn", "pysdtw"} & rivals.keys():
        rivals[name].skips = ("Hessian product",)  # wrong, or an error
    return {**rivals, "bellmax": our_dtw(cost, "negentropy")}


def sparse_aligned(shape: Shape) -> dict[str, Rival]:
    """bellmax under the squared l2 norm, and under negentropy for comparison."""
    cost = random_cost(shape)
    return {"bellmax": our_dtw(cost, "l2"), NEGENTROPY: our_dtw(cost, "negentropy")}


def random_cost(shape: Shape) -> Tensor:
    return torch.randn(shape).square_().requires_grad_()


def our_dtw(cost: Tensor, omega: str) -> Rival:
    def dtw() -> bx.DTW:
        return bx.DTW(cost, omega=omega)

    return Rival([cost], lambda: dtw().value, path=lambda: [dtw().expected_path])


def soft_dtw(cost: Tensor) -> Tensor:
    """soft-DTW in PyTorch, one anti-diagonal of the whole batch at a time.

    ``last`` and ``before`` are the two previous anti-diagonals (rows, B), with an unreachable row at both ends.
    """
    batch, rows, columns = cost.shape
    cells, sizes = anti_diagonals(rows, columns)
    edge = cost.new_full((1, batch), -torch.inf)
    last, before = torch.cat((edge, edge)), torch.cat((torch.zeros_like(edge), edge))
    for k, diagonal in enumerate(cost.flatten(1).T.index_select(0, cells).split(sizes)):
        size = len(diagonal)
        # After the last column, each anti-diagonal starts one row below the previous one.
        a, b = int(k >= columns), int(k >= columns) + int(k > columns)
        parents = torch.stack((before[b : b + size], last[a : a + size], last[a + 1 : a + 1 + size]))
        before, last = last, torch.cat((edge, parents.logsumexp(0) - diagonal, edge))
    return -last[1]


@functools.cache
def anti_diagonals(rows: int, columns: int) -> tuple[Tensor, list[int]]:
    """Cells of a flattened matrix sorted by anti-diagonal, and the size of each anti-diagonal."""
    diagonal = (torch.arange(rows).unsqueeze(-1) + torch.arange(columns)).flatten()
    return diagonal.argsort(stable=True), diagonal.bincount().tolist()


# --- DTW from series to values, for all pairs: the threads of dtaidistance share pairs only


def aligned_series(shape: Shape, *, parallel: bool) -> dict[str, Run]:
    """Runs for all pairs. Unless ``parallel``, libraries that take one pair per call are included."""
    x, y = random_series(shape)
    ours = all_pairs(shape)
    soft: dict[str, Run] = {"bellmax, soft": lambda: bx.dtw(*ours)}
    hard: dict[str, Run] = {"bellmax, hard": lambda: bx.dtw(*ours, omega="hard")}
    if matrix := peer("dtaidistance.dtw", "distance_matrix_fast"):
        block = (0, len(x)), (len(x), len(x) + len(y))
        hard["dtaidistance"] = lambda: np.square(matrix([*x, *y], block=block, compact=True, parallel=parallel))
    if not parallel and (librosa := peer("librosa.sequence", "dtw")):
        hard["librosa"] = lambda: [librosa(a, b, metric="sqeuclidean", backtrack=False)[-1, -1] for a in x for b in y]
    if not parallel and (tslearn := peer("tslearn.metrics", "soft_dtw")):
        soft["tslearn"] = lambda: [tslearn(a, b) for a in x for b in y]
    for runs in (soft, hard):
        first, *others = (torch.as_tensor(np.array(run())) for run in runs.values())
        for name, value in zip(list(runs)[1:], others, strict=True):
            check_value(name, value, first)
    return soft | hard


def collected_series(shape: Shape, *, parallel: bool) -> dict[str, Run]:
    """Distance matrices of K series of one length."""
    count, length = shape
    series = np.random.default_rng(0).normal(size=(count, length)).cumsum(1)
    ours = torch.tensor(series, dtype=torch.float32)
    runs: dict[str, Run] = {"bellmax": lambda: bx.dtw_cdist(ours, omega="hard")}
    if matrix := peer("dtaidistance.dtw", "distance_matrix_fast"):
        runs["dtaidistance"] = lambda: matrix(list(series), compact=True, parallel=parallel)
        above = torch.ones(count, count).triu(1).bool()
        check_value("dtaidistance", torch.tensor(runs["dtaidistance"]()).square(), runs["bellmax"]()[above])
    return runs


def all_pairs(shape: Shape) -> tuple[Tensor, Tensor]:
    """All pairs of two families of series, shapes (B, N, 1) and (B, M, 1), in float32."""
    x, y = (torch.tensor(series, dtype=torch.float32).unsqueeze(-1) for series in random_series(shape))
    return x.repeat_interleave(len(y), 0), y.repeat(len(x), 1, 1)
