"""A test for custom regularizers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.regularizers import Regularizer
from bellmax.tensors import inner

_STEP = 1e-5  # of the finite differences
_TOLERANCE = 1e-5


def check_regularizer(omega: Regularizer) -> None:
    """Test the three methods of a regularizer, and report what is wrong.

    The tests, at γ = 1, on random vectors of several sizes, with ties and with −∞: ``project`` gives probability
    vectors; they maximise ⟨q, x⟩ − ``penalty(q)``, and are the gradient of the maximum; ``jacobian_product`` is the
    derivative of ``project``, symmetric, and differentiable in q; an entry of −∞ changes nothing.

    Raises:
        ValueError: one line per failed test.

    >>> import bellmax as bx
    >>> check_regularizer(bx.Tsallis(1.5))
    >>> class Doubled(bx.Negentropy):
    ...     def jacobian_product(self, q, y):
    ...         return 2 * super().jacobian_product(q, y)
    >>> check_regularizer(Doubled())
    Traceback (most recent call last):
    ValueError: Doubled is not a regularizer yet:
    - jacobian_product(q, y) must be the derivative of project(x) along y, got ... where finite differences give ...
    """
    if not isinstance(omega, Regularizer):
        raise ValueError(f"omega must be a Regularizer, got {omega!r}")
    generator = torch.Generator().manual_seed(0)
    wrong: list[str] = []
    for size in (5, 2, 1):
        wrong = list(_complaints(omega.at_unit_gamma(), size, generator))
        if wrong:
            break
    if wrong:
        raise ValueError("\n- ".join((f"{type(omega).__name__} is not a regularizer yet:", *wrong)))


def _complaints(omega: Regularizer, size: int, generator: torch.Generator) -> Iterator[str]:
    def draw() -> Tensor:
        return torch.randn(16, size, generator=generator, dtype=torch.float64)

    x, y, z = 2 * draw(), draw(), draw()
    tied = torch.cat((x.round(), torch.zeros(1, size, dtype=x.dtype)))
    x, tied = (t - t.amax(-1, keepdim=True) for t in (x, tied))
    in_blocks = (t.float().reshape(2, -1, size) for t in (x, y))
    for vectors, directions in ((x, y), (tied, tied), in_blocks):
        fatal = next(_malformed(omega, vectors, directions), None)
        if fatal:  # further errors would only follow from it
            yield fatal
            return
    q = omega.project(x)
    yield from _not_the_maximiser(omega, x, q, draw().exp())
    yield from _not_the_derivative(omega, x, q, y, z)
    yield from _moved_by_infinity(omega, x, q, y)


def _malformed(omega: Regularizer, x: Tensor, y: Tensor) -> Iterator[str]:
    q = omega.project(x)
    for name, find, shape in (
        ("project(x)", lambda: q, x.shape),
        ("penalty(q)", lambda: omega.penalty(q), x.shape[:-1]),
        ("jacobian_product(q, y)", lambda: omega.jacobian_product(q, y), x.shape),
    ):
        found = find()
        if not isinstance(found, Tensor):
            yield f"{name} must be a tensor, got {type(found).__name__}"
            return
        if found.shape != shape or found.dtype != x.dtype:
            needed, got = (f"shape {tuple(s)} and dtype {d}" for s, d in ((shape, x.dtype), (found.shape, found.dtype)))
            yield f"{name} must have {needed}, got {got}"
        elif not bool(found.isfinite().all()):
            bad = ~found.isfinite()
            yield f"{name} must be finite, got {found[bad][0].item()} for x = {_first(x, bad)}"
        elif found is q and bool((q < 0).any()):
            yield f"project(x) must be at least 0, got {q.min().item():.4g} for x = {_first(x, q < 0)}"
        elif found is q and bool(((q.sum(-1) - 1).abs() > _TOLERANCE).any()):
            off = (q.sum(-1) - 1).abs() > _TOLERANCE
            yield f"project(x) must add up to 1, got {q.sum(-1)[off][0].item():.6g} for x = {_first(x, off)}"


def _not_the_maximiser(omega: Regularizer, x: Tensor, q: Tensor, others: Tensor) -> Iterator[str]:
    def objective(p: Tensor, at: Tensor) -> Tensor:
        return inner(p, at) - omega.penalty(p)

    others = others / others.sum(-1, keepdim=True)
    vertices = torch.eye(x.shape[-1], dtype=x.dtype).unsqueeze(1).expand(-1, *x.shape)
    rivals = torch.cat((others.unsqueeze(0), vertices))
    between = torch.cat([q + share * (rivals - q) for share in (1.0, 0.1, 0.01)])
    gain = max((objective(rival, x) - objective(q, x)).max().item() for rival in between)
    if gain > _TOLERANCE:
        yield f"project(x) must maximise <q, x> - penalty(q), but another q is better by {gain:.4g}"
    slopes = torch.stack(
        [
            objective(omega.project(x + step), x + step) - objective(omega.project(x - step), x - step)
            for step in _STEP * torch.eye(x.shape[-1], dtype=x.dtype)
        ],
        -1,
    )
    yield from _differs("project(x) must be the gradient of the greatest <q, x> - penalty(q)", q, slopes / (2 * _STEP))


def _not_the_derivative(omega: Regularizer, x: Tensor, q: Tensor, y: Tensor, z: Tensor) -> Iterator[str]:
    found = omega.jacobian_product(q, y)
    wide, narrow = (
        (omega.project(x + step * y) - omega.project(x - step * y)) / (2 * step) for step in (4 * _STEP, _STEP)
    )
    smooth = ((wide - narrow).abs() < _TOLERANCE).all(-1)  # a sparse Ω has kinks
    what = "jacobian_product(q, y) must be the derivative of project(x) along y"
    yield from _differs(what, found[smooth], narrow[smooth])
    one, other = inner(z, found), inner(y, omega.jacobian_product(q, z))
    if bool(((one - other).abs() > _TOLERANCE).any()):
        yield (
            "jacobian_product must be symmetric, <z, J y> = <y, J z>, "
            f"got {one[(one - other).abs().argmax()].item():.4g} and {other[(one - other).abs().argmax()].item():.4g}"
        )
    yield from _not_differentiable(omega, x[smooth], y[smooth], z[smooth])


def _not_differentiable(omega: Regularizer, x: Tensor, y: Tensor, z: Tensor) -> Iterator[str]:
    """Compare the gradient of <z, J(q) y> in q with finite differences along x."""
    q = omega.project(x).requires_grad_()
    product = inner(z, omega.jacobian_product(q, y.clone().requires_grad_()))
    gradient = None
    if product.requires_grad:
        (gradient,) = torch.autograd.grad(product.sum(), q, allow_unused=True)
    q = q.detach()
    found = inner(torch.zeros_like(q) if gradient is None else gradient, omega.jacobian_product(q, z))
    ahead, behind = (inner(z, omega.jacobian_product(omega.project(x + step * z), y)) for step in (_STEP, -_STEP))
    what = "jacobian_product(q, y) must consist of operations that are differentiable in q: its derivative is"
    yield from _differs(what, found, (ahead - behind) / (2 * _STEP))


def _moved_by_infinity(omega: Regularizer, x: Tensor, q: Tensor, y: Tensor) -> Iterator[str]:
    longer = pad(x, (1, 1), value=-math.inf)
    whole = omega.project(longer)
    if bool(whole[:, [0, -1]].any()) or not torch.allclose(whole, pad(q, (1, 1)), atol=_TOLERANCE):
        got = f"{_numbers(whole[0])} for {_numbers(longer[0])}"
        yield f"project(x) must be 0 where x is -inf, and must not change elsewhere, got {got}"
        return
    if not torch.allclose(omega.penalty(whole), omega.penalty(q), atol=_TOLERANCE):
        yield "penalty(q) must not change with an entry of 0"
    product = omega.jacobian_product(whole, pad(y, (1, 1), value=1.0))
    if not torch.allclose(product, pad(omega.jacobian_product(q, y), (1, 1)), atol=_TOLERANCE):
        got = _numbers(product[0])
        yield f"jacobian_product(q, y) must be 0 where x is -inf, and must not change elsewhere, got {got}"


def _differs(what: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
    error = (found - wanted).abs()
    if error.numel() and error.max().item() > 10 * _TOLERANCE:
        place = error.argmax()
        got, needed = found.flatten()[place].item(), wanted.flatten()[place].item()
        yield f"{what}, got {got:.4g} where finite differences give {needed:.4g}"


def _first(x: Tensor, where: Tensor) -> str:
    rows = x.reshape(-1, x.shape[-1])
    return _numbers(rows[int(where.reshape(len(rows), -1).any(-1).nonzero()[0])])


def _numbers(x: Tensor) -> str:
    return "[" + ", ".join(f"{entry:.4g}" for entry in x.tolist()) + "]"
