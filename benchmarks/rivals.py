"""Chains by bellmax and by other means: plain torch, and peers from PyPI where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Run
from torch import Tensor

import bellmax as bx

TASKS = ("value", "value and gradient", "Hessian product", "decoding")
NEGENTROPY = "bellmax, negentropy"
PEERS = ("torch-struct", "pytorch-crf", "TorchCRF", "entmax")
Shape = tuple[int, int, int]  # batch, steps, states

warnings.filterwarnings("ignore", ".*arg_constraints", UserWarning)  # torch-struct


@dataclass
class Rival:
    """A way to compute the value of a batch of chains from ``inputs``, which require gradients."""

    inputs: Sequence[Tensor]
    value: Callable[[], Tensor]
    path: Callable[[], Sequence[Tensor]] | None = None  # the gradient of the value, differentiable; autograd's if None
    decode: Run | None = None
    skips: tuple[str, ...] = ()

    def gradient(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self.value().sum(), self.inputs)

    def runs(self) -> dict[str, Run]:
        """What it can do in reasonable time, by task."""
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


def versions() -> dict[str, str | None]:
    """Of the peers; None where one is not installed."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {name: installed.get(name) for name in PEERS}


def peer(module: str, name: str, method: str = "__call__") -> Any:
    """What ``module`` calls ``name``, or None where there is no such thing with that method.

    pytorch-crf installs ``torchcrf`` and TorchCRF installs ``TorchCRF``: where file names ignore case, the later of the
    two overwrites the other, and the method tells which one is there.
    """
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    return found if hasattr(found, method) else None


# --- from dense potentials (B, T, S, S) [t, current, previous]


def dense(shape: Shape, *, slow: Sequence[str]) -> dict[str, Rival]:
    """``slow``: which of "torch.compile" and "torch-struct" take part."""
    theta = random_potentials(shape)
    size = shape[1] * theta.numel()  # theta[:, t] has a gradient of the size of theta, T times
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
    return rivals


def sparse(shape: Shape) -> dict[str, Rival]:
    """Under the squared l2 norm; and bellmax under negentropy beside it."""
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
        decode=lambda: chain().best_sequence(),
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
    """It has no first step of its own: the scores of starting join those of the second step."""
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
    return rivals


def our_scores(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Rival:
    def chain() -> bx.Chain:
        return bx.Chain.from_scores(emissions, transitions, start=start, end=end)

    return Rival([emissions, transitions, start, end], lambda: chain().value, decode=lambda: chain().best_sequence())


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
