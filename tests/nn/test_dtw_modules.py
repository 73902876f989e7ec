"""DTW as a loss and as a layer."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
from support.problems import potentials
from torch import Tensor, nn
from torch.autograd import gradcheck

import bellmax as bx
from bellmax.nn import DTWAlignment, DTWLoss

LENGTHS = torch.tensor([4, 2, 1]), torch.tensor([5, 3, 5])
SMOOTH = [bx.Negentropy(0.7), bx.SquaredL2(0.9)]


def series(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    return potentials(3, 4, 2, requires_grad=requires_grad), potentials(3, 5, 2, seed=1, requires_grad=requires_grad)


class Learned(nn.Module):
    """A cost with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.embed(x).unsqueeze(-2) - self.embed(y).unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("divergence", [None, "debiased", "sharp", "mean_cost"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_equals_the_function(divergence: str | None, reduction: str, backend: str) -> None:
    x, y = series()
    options = {"cost": "euclidean", "band": 1, "omega": bx.SquaredL2(0.9), "divergence": divergence}
    loss = DTWLoss(**options, reduction=reduction)
    for lengths in (None, LENGTHS, (3, LENGTHS[1])):
        got, expected = loss(x, y, lengths=lengths), bx.dtw(x, y, lengths=lengths, reduction=reduction, **options)
        assert torch.equal(got, expected)
    assert torch.equal(DTWLoss()(x, y), bx.dtw(x, y, reduction="mean"))


@pytest.mark.parametrize("band", [None, 1])
def test_alignment_equals_the_distribution(omega: bx.Regularizer, band: float | None, backend: str) -> None:
    x, y = series()
    align = DTWAlignment(omega, band=band)
    costs = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    torch.testing.assert_close(align(x, y), bx.DTW(costs, band=band, omega=omega).expected_path)
    expected = bx.DTW(costs, lengths=LENGTHS, band=band, omega=omega).expected_path
    for b in range(3):
        x[b, LENGTHS[0][b] :], y[b, LENGTHS[1][b] :] = torch.nan, torch.nan
    torch.testing.assert_close(align(x, y, lengths=LENGTHS), expected)
    torch.testing.assert_close(align(x[1], y[1], lengths=(2, 3)), expected[1])


def test_alignment_broadcasts() -> None:
    x, y = series()
    align = DTWAlignment(bx.SquaredL2(torch.tensor([[0.5], [2.0]]).double()))
    both = align(x[0], y, lengths=(LENGTHS[0], 4))
    assert both.shape == (2, 3, 4, 5)
    alone = DTWAlignment(bx.SquaredL2(2.0))(x[0], y[2], lengths=(1, 4))
    torch.testing.assert_close(both[1, 2], alone)


@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_gradients(omega: bx.Regularizer, backend: str) -> None:
    x, y = series(requires_grad=True)
    for layer in (DTWLoss(omega, divergence="sharp"), DTWAlignment(omega, band=2)):
        assert gradcheck(lambda x, y, layer=layer: layer(x, y, lengths=LENGTHS), (x, y), fast_mode=True)


def test_padding_gets_no_gradient(backend: str) -> None:
    x, y = series()
    for b in range(3):
        x[b, LENGTHS[0][b] :], y[b, LENGTHS[1][b] :] = torch.nan, torch.nan
    leaves = x.requires_grad_(), y.requires_grad_()
    for layer in (DTWLoss(), DTWAlignment()):
        grads = torch.autograd.grad(layer(x, y, lengths=LENGTHS).square().sum(), leaves)
        for leaf, grad in zip(leaves, grads, strict=True):
            assert grad.isfinite().all()
            assert not grad[leaf.isnan()].any()


@pytest.mark.parametrize("kind", [DTWLoss, DTWAlignment])
def test_costs_and_gamma_are_parameters_of_the_module(kind: type[nn.Module]) -> None:
    x, y = series()
    made = [kind(bx.Negentropy(nn.Parameter(torch.tensor(gamma).double())), Learned()) for gamma in (2.0, 1.0)]
    file = io.BytesIO()
    torch.save(made[0].state_dict(), file)
    file.seek(0)
    made[1].load_state_dict(torch.load(file, weights_only=True))
    result = made[0](x, y)
    assert torch.equal(made[1](x, y), result)
    assert torch.equal(deepcopy(made[0])(x, y), result)
    grads = torch.autograd.grad(result.square().sum(), [made[0].gamma, made[0].cost.embed.weight])
    assert all(grad.any() for grad in grads)


@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_compiles_and_exports(omega: bx.Regularizer, backend: str) -> None:
    x, y = series()
    x.requires_grad_()
    for layer in (DTWLoss(omega, divergence="debiased"), DTWAlignment(omega)):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        results = [run(x, y, lengths=LENGTHS) for run in (compiled, layer)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result.square().sum(), x) for result in results))
        exported = torch.export.export(layer, (x.detach(), y), {"lengths": LENGTHS}).module()
        torch.testing.assert_close(exported(x.detach(), y, lengths=LENGTHS), results[1].detach())


def test_half_precision() -> None:
    x, y = (s.float() for s in series())
    loss, align = DTWLoss(), DTWAlignment()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(x, y), bx.dtw(x, y, reduction="mean"))
        torch.testing.assert_close(align(x, y), DTWAlignment()(x, y))
    assert align(x.bfloat16(), y.bfloat16()).dtype == torch.bfloat16
    assert loss(x.half(), y.half()).dtype == torch.float32


def test_repr() -> None:
    shown = "omega=Negentropy(gamma=1.0), cost='cosine', band=3"
    assert repr(DTWAlignment(cost="cosine", band=3)) == f"DTWAlignment({shown})"
    assert (
        repr(DTWLoss(cost="cosine", band=3)) == f"DTWLoss({shown}, divergence=None, normalize=None, reduction='mean')"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": "squared"}, "cost must be a function or one of .*, got 'squared'"),
        ({"band": -1}, "band must be at least 0, got -1"),
        ({"omega": "soft"}, "omega must be a Regularizer or one of .*, got 'soft'"),
        ({"divergence": "biased"}, "divergence must be None or one of .*, got 'biased'"),
        ({"reduction": "max"}, "reduction must be one of .*, got 'max'"),
    ],
)
def test_errors_of_construction(options: dict[str, object], message: str) -> None:
    for kind in (DTWLoss, DTWAlignment):
        if kind is DTWLoss or not {"divergence", "reduction"} & options.keys():
            with pytest.raises(ValueError, match=message):
                kind(**options)


@pytest.mark.parametrize(
    ("x", "y", "lengths", "message"),
    [
        (torch.zeros(1, 4, 2), torch.zeros(5, 3), None, "same number of features, got 2 in x .* and 3 in y"),
        (torch.tensor(4.0), torch.zeros(5, 3), None, r"x must have shape \(length,\) or \(..., length, features\)"),
        (torch.zeros(4, 2), "abcde", None, "y must hold numbers, got dtype <U5"),
        (torch.zeros(3, 4, 2), torch.zeros(2, 5, 2), None, r"batch shapes must broadcast, got x \(3,\), y \(2,\)"),
        (torch.zeros(1, 4, 2), torch.zeros(5, 2), 3, "lengths must be a pair"),
        (torch.zeros(1, 4, 2), torch.zeros(5, 2), (5, 5), "lengths.* must be from 1 to 4, got 5"),
        (torch.zeros(3, 4, 2), torch.zeros(5, 2), (LENGTHS[0].float(), 5), "lengths.* must hold integers"),
    ],
)
def test_errors(x: Tensor, y: Tensor, lengths: object, message: str) -> None:
    for layer in (DTWLoss(), DTWAlignment()):
        with pytest.raises(ValueError, match=message):
            layer(x, y, lengths=lengths)


def test_channels_before_time_are_refused() -> None:
    x = torch.randn(8, 1, 50)
    with pytest.raises(ValueError, match=r"got \(8, 1, 50\) and \(8, 1, 50\), series of one step.*pass x.mT and y.mT"):
        DTWLoss()(x, x)
    assert DTWLoss()(x.mT, x.mT).isfinite()
    torch.testing.assert_close(DTWLoss()(x, x + 1, lengths=(1, 1)), torch.tensor(50.0))
    assert DTWLoss()(x[..., :1], x[..., :1]).isfinite()


@pytest.mark.parametrize("shape", [(8, 50), (8, 40)])
def test_series_without_a_feature_dimension_are_refused(shape: tuple[int, int]) -> None:
    hint = r"x and y must have shape \(batch, length, features\), got \(8, 50\) .*unsqueeze\(-1\).*unsqueeze\(0\)"
    x, y = torch.randn(8, 50), torch.randn(shape)
    with pytest.raises(ValueError, match=hint):
        DTWLoss()(x, y)
    assert DTWLoss(reduction="none")(x.unsqueeze(-1), y.unsqueeze(-1)).shape == (8,)
    assert DTWLoss()(x[:, :1], y[:, :1]).ndim == 0  # one series of 8 steps
    assert DTWLoss(reduction="none")(torch.zeros(3, 4, 2), torch.zeros(5, 2)).shape == (3,)  # one for the batch


def test_alignment_of_different_precisions() -> None:
    x, y = torch.randn(4, 17), torch.randn(5, 17).double()
    torch.testing.assert_close(DTWAlignment()(x, y), DTWAlignment()(x.double(), y))
    with pytest.raises(ValueError, match="y must be on the device of x, cpu, got meta"):
        DTWAlignment()(x, torch.randn(5, 17, device="meta"))
