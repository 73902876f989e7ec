"""The compiled kernels: accuracy, threads, scale."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.inside import loading
from support.kernels import needs_kernels
from support.problems import OMEGAS, layered_edges, potentials
from support.structures import STRUCTURES

import bellmax as bx

pytestmark = needs_kernels


def applied(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """Run a vector function of the kernels, in the instruction set that they use."""
    y = np.empty_like(x)
    getattr(loading.kernels, name)(torch.from_numpy(x), torch.from_numpy(y))
    return y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_and_log2_are_accurate(dtype: type) -> None:
    eps = np.finfo(dtype).eps
    lowest = -126 if dtype is np.float32 else -1022
    x = np.linspace(lowest, 20, 200_003).astype(dtype)
    assert np.abs(applied("exp2", x) / np.exp2(x.astype(np.longdouble)) - 1).max() < 2 * eps
    x = np.concatenate((np.geomspace(1e-30, 1e30, 200_001), np.linspace(0.5, 2, 200_002))).astype(dtype)
    error = np.abs(applied("log2", x) - np.log2(x.astype(np.longdouble)))
    assert error.max() < 100 * eps
    assert error[200_001:].max() < 2 * eps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_and_log2_at_the_limits_of_their_range(dtype: type) -> None:
    x = np.array([0, -1e4, -np.inf, -0.0, 1, np.nan, 3, -2, 10], dtype)
    assert applied("exp2", x).tolist() == [1, 0, 0, 1, 2, 0, 8, 0.25, 1024]
    assert applied("log2", np.array([1, 0, 2, 0.125], dtype)).tolist() == [0, -math.inf, 1, -3]


def test_kernels_refuse_what_does_not_fit() -> None:
    level = torch.empty(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="shapes of tensors do not fit"):
        loading.kernels.dag_levels(torch.zeros((2, 3), dtype=torch.int64), level)


@pytest.mark.parametrize("name", ["Chain", "ScoredChain", "DAG", "DTW", "MonotonicAlignment", "SpanTrees"])
def test_the_gradient_of_the_values_may_have_any_stride(name: str) -> None:
    structure = STRUCTURES[name]
    x = torch.rand(4, *structure.shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    every_other, equal = torch.arange(8.0)[::2], torch.tensor(2.0).expand(4)
    for seed in (every_other, equal):
        for create_graph in (False, True):  # by the kernel of the gradient, and by the general sweeps
            value = structure.make(x).value
            (strided,) = torch.autograd.grad(value, x, seed, retain_graph=True, create_graph=create_graph)
            (contiguous,) = torch.autograd.grad(value, x, seed.contiguous())
            assert strided.equal(contiguous)
    (product,) = torch.autograd.grad(strided, x, torch.ones_like(x)[..., :1].expand_as(x))
    assert product.isfinite().all()


def test_tensors_without_the_exchange_table_of_dlpack() -> None:
    """Before version 2.10, torch has no such table, and kernels read the attributes of tensors."""
    code = """
        import torch
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            del torch.Tensor.__dlpack_c_exchange_api__
        import bellmax as bx
        x = torch.arange(24.0).reshape(4, 3, 2).transpose(0, 1).requires_grad_()
        p = bx.DTW(x)
        p.value.backward(torch.arange(6.0)[::2])
        print(p.backend, *x.grad.sum((1, 2)).tolist())
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    x = torch.arange(24.0).reshape(4, 3, 2).transpose(0, 1).requires_grad_()
    bx.DTW(x).value.backward(torch.arange(6.0)[::2])
    assert x.grad is not None
    backend, *sums = done.stdout.split()
    assert backend == "native"
    assert [float(n) for n in sums] == pytest.approx(x.grad.sum((1, 2)).tolist(), rel=1e-5)


@pytest.mark.parametrize("name", list(OMEGAS))
def test_float32_over_a_long_path(name: str) -> None:
    """Gradients in float32 are accurate although values grow over thousands of layers."""
    dag, omega = bx.DAG(layered_edges(4096, 4)), OMEGAS[name]
    theta = potentials(2, dag.num_edges).float()
    single, double = dag.paths(theta, omega=omega), dag.paths(theta.double(), omega=omega)
    torch.testing.assert_close(single.value.double(), double.value, rtol=1e-6, atol=0)
    torch.testing.assert_close(single.expected_path.double(), double.expected_path, rtol=0, atol=2e-6)
    crossing = single.expected_path.double()[:, 4:-4].reshape(2, 4095, 16).sum(-1)
    assert (crossing - 1).abs().max() < 2e-6


@pytest.mark.parametrize("name", list(OMEGAS))
@pytest.mark.parametrize("scale", [1e16, 1e20, 1e30])
def test_weights_much_larger_than_the_threshold(name: str, scale: float) -> None:
    dag, theta = bx.DAG(layered_edges(4, 3)), potentials(20, 33) * scale
    theta[:, ::5] = -scale  # a common value for "forbidden"
    p = dag.paths(theta, omega=OMEGAS[name])
    with bx.use_backend("reference"):
        expected = dag.paths(theta, omega=OMEGAS[name])
    torch.testing.assert_close(p.expected_path, expected.expected_path)
    torch.testing.assert_close(p.hessian_product(theta / scale), expected.hessian_product(theta / scale))
    assert torch.equal(p.sample((3,)).sum(-1), torch.full((3, 20), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1.00001, 1.001, 1.01, 1.2, 1.8])
def test_tsallis_near_negentropy(alpha: float) -> None:
    dag, omega = bx.DAG(layered_edges(6, 5)), bx.Tsallis(alpha)
    theta = 3 * potentials(9, dag.num_edges)
    with bx.use_backend("reference"):
        expected = dag.paths(theta, omega=omega)
    double, single = dag.paths(theta, omega=omega), dag.paths(theta.float(), omega=omega)
    torch.testing.assert_close(double.value, expected.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(double.expected_path, expected.expected_path, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(single.value.double(), expected.value, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(single.expected_path.double(), expected.expected_path, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(OMEGAS))
def test_a_node_with_many_parents_in_float32(name: str) -> None:
    dag = bx.DAG([(0, 1)] * 100_000)
    theta = 1e-3 * potentials(2, 100_000).float()
    single, double = dag.paths(theta, omega=OMEGAS[name]), dag.paths(theta.double(), omega=OMEGAS[name])
    torch.testing.assert_close(single.value.double(), double.value, rtol=1e-5, atol=1e-5)
    assert (single.expected_path.double().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.slow
def test_running_out_of_memory_raises() -> None:
    code = """
import resource, torch, bellmax as bx
dag = bx.DAG([(i, i + 1) for i in range(2000) for _ in range(2)])
dag.paths(torch.zeros(2, 4000)).topk(2)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    dag.paths(torch.zeros(2, 4000)).topk(60_000)
except (MemoryError, RuntimeError) as error:
    print("caught")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "caught\n", result.stderr


def test_lanes_and_threads_do_not_mix_rows() -> None:
    dag = bx.DAG(layered_edges(5, 3))
    theta, z = potentials(37, dag.num_edges), potentials(37, dag.num_edges, seed=1)
    for omega in OMEGAS.values():
        together = dag.paths(theta, omega=omega)
        for b in (0, 1, 7, 8, 31, 32, 36):
            alone = dag.paths(theta[b], omega=omega)
            torch.testing.assert_close(together.value[b], alone.value, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(together.expected_path[b], alone.expected_path, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(
                together.hessian_product(z)[b], alone.hessian_product(z[b]), rtol=1e-10, atol=1e-12
            )


def test_four_python_threads_at_once() -> None:
    dag = bx.DAG(layered_edges(50, 6))
    inputs = [potentials(20, dag.num_edges, seed=seed) for seed in range(16)]

    def run(theta: torch.Tensor) -> list[torch.Tensor]:
        theta = theta.clone().requires_grad_()
        p = dag.paths(theta, omega="l2")
        return [p.value, torch.autograd.grad(p.value.sum(), theta)[0], p.hessian_product(theta.detach()), p.best_path()]

    expected = [run(theta) for theta in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, wanted in zip(pool.map(run, inputs), expected, strict=True):
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a, b)


class Values(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        dag = bx.DAG(layered_edges(5, 3))
        return dag.paths(potentials(20, dag.num_edges, seed=i)).value


def test_forked_workers() -> None:
    expected = torch.stack([Values()[i] for i in range(8)])  # the parent has used its threads
    loader = torch.utils.data.DataLoader(Values(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_one_openmp_runtime() -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc/self/maps")
    # In a separate process: other libraries may load another runtime.
    script = "import torch, bellmax; torch.zeros(9).softmax(0); print(open('/proc/self/maps').read())"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    libraries = {line.split()[-1] for line in told.stdout.splitlines() if "/" in line}
    runtimes = {path for path in libraries if any(name in path for name in ("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1
