"""The routes by which pairs of series are computed: which one is taken, and what it computes if γ is a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.checks import close
from support.inside import routes, routes_taken, set_limit
from support.kernels import needs_kernels, took
from support.problems import potentials
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import bellmax as bx

SMOOTH = [bx.Negentropy, bx.SquaredL2, lambda gamma: bx.Tsallis(1.5, gamma)]


def series(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=requires_grad)


# --- the choice


@needs_kernels
@pytest.mark.parametrize(
    ("route", "kernel", "call"),
    [
        ("neighbor search", "dtw_neighbors", lambda: bx.dtw_cdist(series(9, 70), omega="hard")),
        ("neighbor search", "dtw_neighbors", lambda: bx.dtw_cdist(series(9, 20), omega="hard", band=3)),
        ("short pairs", "dtw_short_pairs", lambda: bx.dtw_cdist(series(9, 20))),
        ("short pairs", "dtw_short_pairs", lambda: bx.dtw_cdist(series(9, 20), omega="hard")),
        ("short pairs", "dtw_short_pairs", lambda: bx.dtw_cdist(series(9, 20), gamma=torch.tensor(0.5))),
        ("long pairs", "dtw_forward_block", lambda: bx.dtw(series(2100), series(2099))),
        ("long pairs", "dtw_forward_block", lambda: bx.dtw(series(2100), series(2099), gamma=torch.tensor(0.5))),
        ("one node", None, lambda: bx.dtw(series(9, requires_grad=True), series(8))),
        ("one node", None, lambda: bx.dtw_cdist(series(3, 9, requires_grad=True))),
        ("one node", None, lambda: bx.dtw(series(9), series(8), gamma=torch.tensor(0.5, requires_grad=True))),
        ("one node", None, lambda: bx.dtw_barycenter(series(3, 9), max_iter=1)),
        ("distribution", None, lambda: bx.dtw(series(9), series(8))),
        ("distribution", None, lambda: bx.dtw(series(9), series(8), divergence="sharp")),
        ("distribution", None, lambda: bx.dtw(series(9, requires_grad=True), series(8), open_end=True)),
        ("distribution", None, lambda: bx.dtw(series(9, requires_grad=True), series(8), cost="log_sqeuclidean")),
        ("distribution", None, lambda: bx.dtw_cdist(series(9, 20), band=3)),
    ],
)
def test_each_route_is_taken(
    route: str, kernel: str | None, call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with routes_taken(monkeypatch) as names:
        if kernel is None:
            call()
        else:
            with took(kernel):
                call()
    assert set(names) == {route}


def test_one_node_is_one_node(backend: str) -> None:
    x, y = (potentials(4, 2, seed=seed, requires_grad=True) for seed in (0, 1))
    gamma = torch.tensor(0.5, requires_grad=True)
    graph = bx.dtw(x, y, omega=bx.Negentropy(gamma)).grad_fn
    assert {node.variable for node, _ in graph.next_functions if node is not None} == {x, y, gamma}


@needs_kernels
@pytest.mark.parametrize(
    ("device", "missing"),
    [("cpu", set()), ("mps", {"long pairs"}), ("meta", {"neighbor search", "short pairs", "long pairs"})],
)
def test_the_table_lists_the_routes_of_a_backend(device: str, missing: set[str]) -> None:
    lines = bx.backend_info(device, routes=True)["dtw_routes"].splitlines()
    titles = [line.split(", for")[0].split(". ")[1] for line in lines if not line.startswith(" ")]
    assert titles == [route.name for route in routes.ROUTES if route.name not in missing]
    assert "dtw_routes" not in bx.backend_info(device)


def test_the_last_route_has_no_conditions() -> None:
    assert [route.name for route in routes.ROUTES if not route.conditions] == [routes.ROUTES[-1].name]


@needs_kernels
def test_a_learnt_cost_of_a_long_pair_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.tensor(2.0))

    def cost(x: Tensor, y: Tensor) -> Tensor:
        return weight * (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)

    x, y = series(130, 1, requires_grad=True), series(120, 1)
    expected = torch.autograd.grad(bx.dtw(x, y, cost=cost), (x, weight))
    set_limit(monkeypatch, "cells of a long pair", 1)
    set_limit(monkeypatch, "cells of a batch of long pairs", 1)
    torch.testing.assert_close(torch.autograd.grad(bx.dtw(x, y, cost=cost), (x, weight)), expected)
    with torch.no_grad(), took("dtw_forward_block"):
        bx.dtw(x, y, cost=cost)


# --- γ as a tensor


@pytest.mark.parametrize("omega", SMOOTH)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (3, 2)])
@pytest.mark.parametrize("band", [None, 1])
def test_gradients_in_gamma(omega: Any, shape: tuple[int, ...], band: int | None, backend: str) -> None:
    x, y = potentials(2, 3, 2, requires_grad=True), potentials(4, 2, seed=1, requires_grad=True)
    gamma = (0.5 + potentials(1, *shape, seed=2)[0].square()).requires_grad_()
    lengths = (3, torch.tensor([4, 2]))

    def run(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        return bx.dtw(x, y, lengths=lengths, band=band, omega=omega(gamma))

    assert gradcheck(run, (x, y, gamma))
    if omega is bx.Negentropy:  # the others have kinks
        assert gradgradcheck(run, (x, y, gamma))
    assert gradcheck(lambda gamma: run(x.detach(), y.detach(), gamma), gamma)


def test_an_impossible_pair_gives_gamma_no_gradient(backend: str) -> None:
    x = torch.tensor([[0.0], [torch.inf]], requires_grad=True)
    gamma = torch.tensor(0.5, requires_grad=True)
    value = bx.dtw(x, torch.zeros(2, 1), omega=bx.Negentropy(gamma))
    assert value == torch.inf
    assert torch.autograd.grad(value, gamma)[0] == 0


def test_gamma_of_another_dtype() -> None:
    """A wide γ widens the value, and a narrow one does not; γ always gets a gradient of its dtype."""
    x, y = series(5, 1, requires_grad=True), series(4, 1)
    for dtype, expected in ((torch.float64, torch.float64), (torch.float16, torch.float32)):
        gamma = torch.tensor(0.5, dtype=dtype, requires_grad=True)
        value = bx.dtw(x, y, omega=bx.Negentropy(gamma))
        assert value.dtype == expected
        close(value.float(), bx.dtw(x, y, gamma=0.5), 1e-6)
        assert torch.autograd.grad(value, (x, gamma))[1].dtype == dtype


@needs_kernels
@pytest.mark.parametrize("omega", SMOOTH)
def test_gradients_in_gamma_of_long_pairs(omega: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "cells in a chunk of a long pair", 2**10)
    x, y = potentials(2, 70, 1, requires_grad=True), potentials(66, 1, seed=1, requires_grad=True)
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    results = []
    for large in (2**62, 1):
        set_limit(monkeypatch, "cells of a long pair", large)
        set_limit(monkeypatch, "cells of a batch of long pairs", large)
        with routes_taken(monkeypatch) as names:
            value = bx.dtw(x, y, omega=omega(gamma))
        assert names == ["long pairs" if large == 1 else "one node"]
        first = torch.autograd.grad(value.sum(), (x, y, gamma), retain_graph=True)
        second = torch.autograd.grad(value.sum(), (x, y, gamma), create_graph=True)
        products = torch.autograd.grad(sum(g.square().sum() for g in second), (x, y, gamma))
        results.append((value, *first, *products))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


# --- the backend of a call


@pytest.fixture(params=["inside", "outside"])
def at_backward(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """A context in which derivatives are computed: another backend is requested, or none."""
    return lambda: bx.use_backend("reference") if request.param == "inside" else torch.enable_grad()


def second_derivative(value: Tensor, x: Tensor, context: Callable[[], Any]) -> None:
    """Compute a second derivative in another thread."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with context():
                (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
                torch.autograd.grad(gradient.square().sum(), x)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures


@pytest.fixture
def built_on(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The backends on which DTW and chains are built."""
    backends: set[str] = set()
    build = bx.PathDistribution.__init__

    def noting(self: bx.PathDistribution, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        backends.add(self.backend)

    monkeypatch.setattr(bx.PathDistribution, "__init__", noting)
    return backends


def long_pair(x: Tensor) -> Tensor:
    return bx.dtw(x, series(66, 1))


def matrix(x: Tensor) -> Tensor:
    return bx.dtw_cdist([x, series(9, 1)], cost="log_sqeuclidean")


def attention(x: Tensor) -> Tensor:
    layer = bx.nn.SegmentationAttention(1, 1)
    return layer(x.unsqueeze(0), series(1, 5, 1))[1].square()


@needs_kernels
@pytest.mark.parametrize("function", [long_pair, matrix, attention])
@pytest.mark.parametrize("requested", [None, "native", "reference"])
def test_derivatives_in_another_thread_use_the_backend_of_the_call(
    function: Callable[[Tensor], Tensor],
    requested: str | None,
    at_backward: Callable[[], Any],
    built_on: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limit(monkeypatch, "cells of a long pair", 66 * 66)
    set_limit(monkeypatch, "cells of a batch of long pairs", 66 * 66)
    x = series(70, 1, requires_grad=True)
    with torch.enable_grad() if requested is None else bx.use_backend(requested):
        value = function(x)
    second_derivative(value, x, at_backward)
    assert built_on == {requested or "native"}


@pytest.mark.parametrize("options", [{}, {"omega": "hard", "band": 3}, {"cost": "log_sqeuclidean"}])
def test_threads_of_a_client_use_the_backend_of_the_call(options: Any, built_on: set[str]) -> None:
    xs = series(9, 20)
    with ThreadPoolExecutor(2) as client, bx.use_backend("reference"):
        got = bx.dtw_cdist(xs, client=client, **options)
    assert built_on == {"reference"}
    close(got, bx.dtw_cdist(xs, **options), 1e-5)
