"""Programs on a device without kernels, against the CPU. ``test_detour.py`` runs this file in a separate process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from support import device
from support.inside import BACKENDS, copies_on_cpu, forbid_float64, program_name, tapes, warn_again
from support.problems import diamond
from torch import Tensor

import bellmax as bx
from bellmax.nn import CRF, CTCLoss, SegmentationAttention

pytestmark = pytest.mark.filterwarnings("ignore:bellmax has no kernels for this device:RuntimeWarning")

HERE = device.DEVICE
Put = Callable[[Tensor], Tensor]
Build = Callable[[Put, str], tuple[bx.PathDistribution, list[Tensor]]]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    device.register()


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor: Tensor, put: Put) -> Tensor:
    return put(tensor).detach().requires_grad_()


def graph(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    weights = scores(2, 10)
    weights[0, 3] = -math.inf
    theta = leaf(weights, put)
    return diamond().to(theta.device).paths(theta, omega=omega), [theta]


def chain(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta = scores(3, 4, 3, 3)
    theta[2, 2:] = math.nan  # past its end
    theta = leaf(theta, put)
    return bx.Chain(theta, lengths=put(torch.tensor([4, 0, 2])), omega=omega), [theta]


def scored_chain(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    parts = [leaf(scores(*shape), put) for shape in ((2, 5, 3), (3, 3), (3,), (3,))]
    mask = put(torch.tensor([[True] * 5, [True, False, True, True, False]]))
    emissions, transitions, start, end = parts
    more = {"start": start, "end": end, "mask": mask, "omega": omega, "gamma": 0.7}
    return bx.Chain.from_scores(emissions, transitions, **more), parts


def two_states(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    parts = [leaf(scores(*shape), put) for shape in ((2, 5, 2), (2, 2))]
    return bx.Chain.from_scores(*parts, omega=omega), parts


def warping(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    cost = leaf(scores(2, 5, 6).abs(), put)
    lengths = put(torch.tensor([5, 3])), put(torch.tensor([6, 2]))
    return bx.DTW(cost, lengths=lengths, band=1.3, omega=omega), [cost]


def ctc(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    emissions = leaf(scores(2, 6, 4), put)
    labels, lengths = put(torch.tensor([[1, 1], [3, 0]])), (put(torch.tensor([6, 4])), put(torch.tensor([2, 1])))
    return bx.CTC(emissions, labels, lengths=lengths, omega=omega), [emissions]


def gaps(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta, opened = leaf(scores(2, 3, 4), put), leaf(-scores(2).abs(), put)
    return bx.SequenceAlignment(theta, gap_open=opened, mode="local", omega=omega), [theta, opened]


def spans(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    theta = leaf(scores(2, 4, 4), put)
    return bx.SpanTrees(theta, lengths=put(torch.tensor([4, 2])), omega=omega), [theta]


def tree(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    parts = [leaf(scores(*shape), put) for shape in ((2, 4, 3), (2, 4, 3, 3))]
    return bx.TreeModel([-1, 0, 0, 1]).labels(*parts, omega=omega), parts


def segments(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    parts = [leaf(scores(*shape), put) for shape in ((2, 4, 2, 3), (3, 3))]
    return bx.SemiMarkov(*parts, omega=omega), parts


def scored_segments(put: Put, omega: str) -> tuple[bx.PathDistribution, list[Tensor]]:
    parts = [leaf(scores(*shape), put) for shape in ((2, 4, 3), (2, 3), (3, 3))]
    return bx.SemiMarkov.from_scores(*parts, omega=omega), parts


STRUCTURES = [graph, chain, scored_chain, two_states, warping, ctc, gaps, spans, tree, segments, scored_segments]
every_structure = pytest.mark.parametrize("build", STRUCTURES)


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.clone()


def on_device(tensor: Tensor) -> Tensor:
    return tensor.to(HERE)


def verbs(build: Build, put: Put, omega: str) -> dict[str, Tensor]:
    """All deterministic results of a distribution, by name."""
    p, theta = build(put, omega)
    results = {"value": p.value, "path": p.expected_path, "best": p.best_path(), "entropy": p.entropy()}
    results["scores of the best"], results["best paths"] = p.topk(3)
    results["number"] = p.num_paths
    gradients = torch.autograd.grad(p.value.sum(), theta, create_graph=True)
    along = [put(scores(*t.shape, seed=1)) for t in theta]
    slope = sum((g * z).sum() for g, z in zip(gradients, along, strict=True))
    results |= {f"gradient {n}": g for n, g in enumerate(gradients)}
    if slope.requires_grad:
        results |= {f"second {n}": g for n, g in enumerate(torch.autograd.grad(slope, theta))}
    p, theta = build(put, omega)
    (results["of the path"],) = torch.autograd.grad(p.expected_path.square().sum(), theta[0])
    return results


def losses(build: Build, put: Put, omega: str) -> dict[str, Tensor]:
    p, theta = build(put, omega)
    target = p.best_path()
    results = {
        "crf_nll": bx.losses.crf_nll(p, target) if omega == "negentropy" else bx.losses.surrogate(p, target),
        "path_nll": bx.losses.path_nll(p, target) if omega == "negentropy" else p.value,
        "hinge": bx.losses.structured_hinge(p, target),
        "perceptron": bx.losses.structured_perceptron(p, target),
    }
    gradient = torch.autograd.grad(sum(loss.sum() for loss in results.values()), theta)
    return results | {f"gradient {n}": g for n, g in enumerate(gradient)}


def same(there: dict[str, Tensor], here: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for name, got in there.items():
        assert got.device == HERE, name
        wanted = here[name]
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(
            got.detach().cpu().to(wanted.dtype), wanted.detach(), rtol=tolerance, atol=tolerance, msg=message
        )


@pytest.fixture(params=[False, True], ids=["all_dtypes", "without_float64"])
def _dtypes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not request.param:
        yield
        return
    forbid_float64(monkeypatch, device.NAME)
    with device.without(torch.float64):
        yield


# --- the device itself


def test_an_operation_that_mixes_devices_raises() -> None:
    here = torch.ones(3, device=HERE)
    for mix in (
        lambda: here + torch.ones(3),
        lambda: torch.cat((here, torch.ones(1))),
        lambda: here.add_(torch.ones(3)),
    ):
        with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
            mix()
    with device.without(torch.float64), pytest.raises(TypeError, match=r"has no torch\.float64"):
        here.double()
    assert (here + 1).tolist() == [2, 2, 2]


def test_a_native_kernel_refuses_its_tensors() -> None:
    theta = torch.zeros(1, 2, 2, 2, device=HERE)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        BACKENDS["native"].sweeps("chain").forward([theta], (), bx.Negentropy())


# --- programs


@pytest.mark.usefixtures("_dtypes")
@pytest.mark.parametrize("omega", ["negentropy", "l2"])
@every_structure
def test_results_equal_the_cpu(build: Build, omega: str) -> None:
    assert build(on_device, omega)[0].backend == "detour"
    same(verbs(build, on_device, omega), verbs(build, on_cpu, omega))


@pytest.mark.usefixtures("_dtypes")
@pytest.mark.parametrize("omega", ["negentropy", "l2"])
# The chain has an empty sequence.
@pytest.mark.parametrize("build", [build for build in STRUCTURES if build is not chain])
def test_losses(build: Build, omega: str) -> None:
    same(losses(build, on_device, omega), losses(build, on_cpu, omega))


@pytest.mark.parametrize("_dtypes", [True], indirect=True)
@pytest.mark.usefixtures("_dtypes")
@every_structure
def test_the_reference_runs_without_float64(build: Build) -> None:
    wanted = verbs(build, on_cpu, "negentropy")
    with bx.use_backend("reference"):
        assert build(on_device, "negentropy")[0].backend == "reference"
        same(verbs(build, on_device, "negentropy"), wanted)


@pytest.mark.usefixtures("_dtypes")
@every_structure
def test_samples_are_paths(build: Build) -> None:
    p, _ = build(on_device, "negentropy")
    drawn = p.sample((200,))
    assert drawn.device == HERE
    assert bool(p.support.check(drawn).all())
    torch.testing.assert_close(drawn.mean(0).cpu(), p.expected_path.detach().cpu(), rtol=0, atol=0.2)


def layers(put: Put) -> dict[str, Tensor]:
    torch.manual_seed(0)
    emissions, tags = leaf(scores(2, 4, 3), put), put(torch.tensor([[0, 1, 2, 0], [1, 1, -100, -100]]))
    crf, attention = CRF(3).to(emissions.device), SegmentationAttention(2, 3).to(emissions.device)
    query, keys = put(scores(2, 4, 2)), leaf(scores(2, 5, 3), put)
    results = {"crf": crf(emissions, tags), "decoded": crf.decode(emissions)}
    results["attended"], results["weights"] = attention(query, keys)
    heads = SegmentationAttention(2, 3, num_heads=3).to(emissions.device)
    results["attended by heads"], results["weights of heads"] = heads(query, keys, is_causal=True)
    results["ctc"] = CTCLoss()(emissions, put(torch.tensor([[1], [2]])))
    x, y = leaf(scores(9, 6, 1), put), put(scores(3, 8, 1))
    results["dtw"] = bx.dtw(x, y[:1], divergence="debiased")
    results["pairs"] = bx.dtw_cdist(x.detach(), y)
    total = results["crf"] + results["weights"].square().sum() + results["ctc"].sum() + results["dtw"].sum()
    total = total + results["attended by heads"].square().sum()
    gradients = torch.autograd.grad(total, (emissions, keys, x, *crf.parameters(), *heads.parameters()))
    return results | {f"gradient {n}": g for n, g in enumerate(gradients)}


@pytest.mark.usefixtures("_dtypes")
def test_layers_and_series() -> None:
    same(layers(on_device), layers(on_cpu))


def test_third_derivatives_stay_on_the_device() -> None:
    def third(put: Put) -> Tensor:
        p, (theta, *_) = chain(put, "negentropy")
        (first,) = torch.autograd.grad(p.value.sum(), theta, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), theta, create_graph=True)
        return torch.autograd.grad(second.square().sum(), theta)[0]

    same({"third": third(on_device)}, {"third": third(on_cpu)})


def test_transforms_of_torch() -> None:
    def value(theta: Tensor) -> Tensor:
        return bx.Chain(theta).value

    theta = scores(3, 4, 2, 2)
    for transform in (
        torch.vmap(value),
        torch.vmap(torch.func.grad(value)),
        torch.func.vmap(torch.func.hessian(value)),
    ):
        same({"result": transform(theta.to(HERE))}, {"result": transform(theta)})


def test_torch_compile() -> None:
    def gradient(put: Put) -> Tensor:
        theta = leaf(scores(2, 4, 3, 3), put)
        compiled = torch.compile(lambda t: bx.Chain(t).value.sum(), fullgraph=True, backend="aot_eager")
        return torch.autograd.grad(compiled(theta), theta)[0]

    same({"gradient": gradient(on_device)}, {"gradient": gradient(on_cpu)})


def test_fake_tapes_have_the_device_and_shape_of_real_ones() -> None:
    for build in STRUCTURES:
        p, _ = build(on_device, "negentropy")
        tape, empty = tapes(p, "detour")
        assert tape.device.type == empty.device.type == "cpu", program_name(p)
        assert (tape.shape, tape.dtype) == (empty.shape, empty.dtype), program_name(p)


# --- copies


def crossed(program: Callable[[], object]) -> list[tuple[str, tuple[int, ...]]]:
    device.copies.clear()
    program()
    return [(to, shape) for to, shape, _ in device.copies]


def test_scores_are_copied_once() -> None:
    theta = scores(2, 4, 3, 3).to(HERE).requires_grad_()
    there, back = ("cpu", (2, 4, 3, 3)), (device.NAME, (2, 4, 3, 3))
    p = bx.Chain(theta)
    seed = ("cpu", (1,))  # a sum's gradient is one number, expanded
    assert crossed(lambda: p.value) == [there, (device.NAME, (2,))]
    assert crossed(lambda: p.value.sum().backward()) == [seed, back]
    with torch.no_grad():
        theta.mul_(2)  # the copy is outdated
    assert crossed(lambda: p.value) == [there, (device.NAME, (2,))]


def test_changes_of_data_are_seen_by_the_next_program() -> None:
    theta, lengths = torch.zeros(1, 3, 2, 2, device=HERE), torch.tensor([3], device=HERE)
    values = [bx.Chain(theta, lengths=lengths).value.item()]
    theta.data.add_(1)
    lengths.data.sub_(1)
    values.append(bx.Chain(theta, lengths=lengths).value.item())
    assert values == pytest.approx([math.log(8), math.log(4) + 2])


def test_a_copy_is_freed_with_its_tensor() -> None:
    before = copies_on_cpu()
    theta = scores(2, 4, 3, 3).to(HERE)
    value = bx.Chain(theta).value
    assert copies_on_cpu() > before
    del theta, value
    assert copies_on_cpu() == before


def test_in_place_changes_are_seen_in_inference_mode() -> None:
    with torch.inference_mode():
        theta = torch.zeros(2, 2, 2, device=HERE)
        values = [bx.Chain(theta).value.item(), bx.Chain(theta.add_(1)).value.item()]
    assert values == pytest.approx([math.log(4), math.log(4) + 2])


def test_indices_of_a_graph_are_copied_once() -> None:
    graph = diamond().to(HERE)
    crossed(lambda: graph.paths(scores(2, 10).to(HERE)).value)
    again = crossed(lambda: graph.paths(scores(2, 10).to(HERE)).value)
    assert again == [(device.NAME, (2, 10)), ("cpu", (2, 10)), (device.NAME, (2,))]


# --- errors, choice of the backend, warnings


def test_errors_equal_the_errors_on_the_cpu() -> None:
    def messages(put: Put) -> list[str]:
        bad, texts = torch.zeros(2, 3, 2, 2), []
        bad[1, 2, 0, 1] = math.inf
        wrong = [
            lambda: bx.Chain(put(bad)).value,
            lambda: bx.Chain(put(torch.zeros(2, 3, 2, 2)), lengths=put(torch.tensor([3, 4]))).value,
            lambda: bx.DTW(put(-bad[1, :, :, 1])).value,
            lambda: bx.SpanTrees(put(bad[1, 2])).value,
            lambda: diamond().to(put(bad).device).paths(put(bad.new_full((10,), math.nan))).topk(2),
        ]
        for program in wrong:
            with pytest.raises(ValueError, match="must be") as error:
                program()
            texts.append(str(error.value))
        return texts

    assert messages(on_device) == messages(on_cpu)


def test_backends_of_devices() -> None:
    class Custom(bx.Negentropy):
        pass

    theta = torch.zeros(3, 2, 2, device=HERE)
    assert bx.Chain(theta).backend == bx.backend_info(HERE)[str(HERE)] == "detour"
    assert bx.Chain(theta, omega=Custom()).backend == "reference"
    assert bx.Chain(theta, omega=Custom()).value.item() == pytest.approx(math.log(8))
    assert bx.Chain(theta.cpu()).to(HERE).backend == "detour"
    assert bx.Chain(theta).to("cpu").backend == "native"
    with bx.use_backend("reference"):
        assert bx.Chain(theta).backend == bx.backend_info(HERE)[str(HERE)] == "reference"
    with bx.use_backend("detour"):
        assert (bx.Chain(theta).backend, bx.Chain(theta.cpu()).backend) == ("detour", "native")
    with bx.use_backend("native"):
        for program in (lambda: bx.Chain(theta), lambda: bx.backend_info(HERE)):
            with pytest.raises(ValueError, match="the native backend runs on the CPU, got tensors on elsewhere:0"):
                program()


def test_one_warning_per_process() -> None:
    warn_again()
    theta = torch.zeros(3, 2, 2, device=HERE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bx.use_backend("reference"):
            assert bx.Chain(theta).value.isfinite()
        assert not caught
        bx.Chain(theta).value.item()
        bx.DTW(theta[0]).expected_path.sum().item()
    (one,) = caught
    assert one.category is RuntimeWarning
    for word in ("copies the tensors to the CPU", "tensor.cpu()", 'bx.use_backend("reference")'):
        assert word in str(one.message)
