"""Numerical tests of a custom regularizer.

The private functions yield one message per failed test, so that a user sees all independent mistakes at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from bellmax.regularizers import Regularizer
from bellmax.tensors import inner

_STEP = 1e-5  # finite-difference step
_TOLERANCE = 1e-5


def check_regularizer(omega: Regularizer) -> None:
    """Test the three methods of a custom regularizer, and report every mistake.

    The tests use γ = 1 and random vectors of several sizes, with ties and with −∞. They check that:

    - ``project(x)`` returns a probability vector q that maximizes ⟨q, x⟩ − ``penalty(q)``, and q is the gradient of
      this maximum with respect to x;
    - ``jacobian_product(q, y)`` is the derivative of ``project`` in the direction y, its matrix is symmetric, and
      autograd can differentiate it with respect to q;
    - if an entry of −∞ is appended to x, the results for the other entries do not change.

    Args:
        omega: The regularizer to test.

    Raises:
        ValueError: If a test fails. The message has one line per failed test.

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
    for size in (5, 2, 1):
        messages = list(_failures(omega.at_unit_gamma(), size, generator))
        if messages:
            raise ValueError("\n- ".join((f"{type(omega).__name__} is not a regularizer yet:", *messages)))


def _failures(omega: Regularizer, size: int, generator: torch.Generator) -> Iterator[str]:
    """Run all tests on random vectors with ``size`` entries."""

    def draw() -> Tensor:
        return torch.randn(16, size, generator=generator, dtype=torch.float64)

    x, y, z = 2 * draw(), draw(), draw()
    tied = torch.cat((x.round(), torch.zeros(1, size, dtype=x.dtype)))
    x, tied = (t - t.amax(-1, keepdim=True) for t in (x, tied))
    batched = (t.float().reshape(2, -1, size) for t in (x, y))
    for vectors, directions in ((x, y), (tied, tied), batched):
        message = next(_output_failures(omega, vectors, directions), None)
        if message:  # the other tests would only repeat this mistake
            yield message
            return
    q = omega.project(x)
    yield from _projection_failures(omega, x, q, draw().exp())
    yield from _jacobian_failures(omega, x, q, y, z)
    yield from _infinity_failures(omega, x, q, y)


def _output_failures(omega: Regularizer, x: Tensor, y: Tensor) -> Iterator[str]:
    """Test type, shape, dtype and finiteness of each method's output, and that ``project`` gives probabilities."""
    q = omega.project(x)
    for name, compute, shape in (
        ("project(x)", lambda: q, x.shape),
        ("penalty(q)", lambda: omega.penalty(q), x.shape[:-1]),
        ("jacobian_product(q, y)", lambda: omega.jacobian_product(q, y), x.shape),
    ):
        output = compute()
        if not isinstance(output, Tensor):
            yield f"{name} must be a tensor, got {type(output).__name__}"
            return
        if output.shape != shape or output.dtype != x.dtype:
            forms = (shape, x.dtype), (output.shape, output.dtype)
            needed, got = (f"shape {tuple(size)} and dtype {dtype}" for size, dtype in forms)
            yield f"{name} must have {needed}, got {got}"
        elif not bool(output.isfinite().all()):
            is_bad = ~output.isfinite()
            yield f"{name} must be finite, got {output[is_bad][0].item()} for x = {_first_row(x, is_bad)}"
        elif output is q and bool((q < 0).any()):
            yield f"project(x) must be at least 0, got {q.min().item():.4g} for x = {_first_row(x, q < 0)}"
        elif output is q and bool(((q.sum(-1) - 1).abs() > _TOLERANCE).any()):
            is_off = (q.sum(-1) - 1).abs() > _TOLERANCE
            yield f"project(x) must add up to 1, got {q.sum(-1)[is_off][0].item():.6g} for x = {_first_row(x, is_off)}"


def _projection_failures(omega: Regularizer, x: Tensor, q: Tensor, weights: Tensor) -> Iterator[str]:
    """Test that q = project(x) maximizes ⟨q, x⟩ − Ω(q), and is the gradient of the maximum.

    ``weights``, positive and of x's shape, are normalized to random competitors of q.
    """

    def objective(p: Tensor, at: Tensor) -> Tensor:
        return inner(p, at) - omega.penalty(p)

    random = weights / weights.sum(-1, keepdim=True)
    vertices = torch.eye(x.shape[-1], dtype=x.dtype).unsqueeze(1).expand(-1, *x.shape)
    corners = torch.cat((random.unsqueeze(0), vertices))
    competitors = torch.cat([q + distance * (corners - q) for distance in (1.0, 0.1, 0.01)])
    gain = max((objective(competitor, x) - objective(q, x)).max().item() for competitor in competitors)
    if gain > _TOLERANCE:
        yield f"project(x) must maximize <q, x> - penalty(q), but another q is better by {gain:.4g}"
    differences = torch.stack(
        [
            objective(omega.project(x + step), x + step) - objective(omega.project(x - step), x - step)
            for step in _STEP * torch.eye(x.shape[-1], dtype=x.dtype)
        ],
        -1,
    )
    requirement = "project(x) must be the gradient of the greatest <q, x> - penalty(q)"
    yield from _difference_failures(requirement, q, differences / (2 * _STEP))


def _jacobian_failures(omega: Regularizer, x: Tensor, q: Tensor, y: Tensor, z: Tensor) -> Iterator[str]:
    """Test ``jacobian_product`` against finite differences along y, its symmetry, and its derivative along z."""
    product = omega.jacobian_product(q, y)
    wide, narrow = (
        (omega.project(x + step * y) - omega.project(x - step * y)) / (2 * step) for step in (4 * _STEP, _STEP)
    )
    is_smooth = ((wide - narrow).abs() < _TOLERANCE).all(-1)  # at a kink of a sparse Ω, the two step sizes disagree
    requirement = "jacobian_product(q, y) must be the derivative of project(x) along y"
    yield from _difference_failures(requirement, product[is_smooth], narrow[is_smooth])
    z_j_y, y_j_z = inner(z, product), inner(y, omega.jacobian_product(q, z))
    asymmetry = (z_j_y - y_j_z).abs()
    if bool((asymmetry > _TOLERANCE).any()):
        worst = asymmetry.argmax()
        yield (
            "jacobian_product must be symmetric, <z, J y> = <y, J z>, "
            f"got {z_j_y[worst].item():.4g} and {y_j_z[worst].item():.4g}"
        )
    yield from _second_order_failures(omega, x[is_smooth], y[is_smooth], z[is_smooth])


def _second_order_failures(omega: Regularizer, x: Tensor, y: Tensor, z: Tensor) -> Iterator[str]:
    """Compare autograd's derivative of ⟨z, J(q) y⟩ along z, by way of q, with finite differences in x."""
    q = omega.project(x).requires_grad_()
    product = inner(z, omega.jacobian_product(q, y.clone().requires_grad_()))
    gradient = None
    if product.requires_grad:
        (gradient,) = torch.autograd.grad(product.sum(), q, allow_unused=True)
    q = q.detach()
    derivative = inner(torch.zeros_like(q) if gradient is None else gradient, omega.jacobian_product(q, z))
    after, before = (inner(z, omega.jacobian_product(omega.project(x + step * z), y)) for step in (_STEP, -_STEP))
    requirement = "jacobian_product(q, y) must consist of operations that are differentiable in q: its derivative is"
    yield from _difference_failures(requirement, derivative, (after - before) / (2 * _STEP))


def _infinity_failures(omega: Regularizer, x: Tensor, q: Tensor, y: Tensor) -> Iterator[str]:
    """Test that entries of −∞ before and after x have probability 0 and do not change the other entries."""
    padded = pad(x, (1, 1), value=-math.inf)
    padded_q = omega.project(padded)
    if bool(padded_q[:, [0, -1]].any()) or not torch.allclose(padded_q, pad(q, (1, 1)), atol=_TOLERANCE):
        got = f"{_format(padded_q[0])} for {_format(padded[0])}"
        yield f"project(x) must be 0 where x is -inf, and must not change elsewhere, got {got}"
        return
    if not torch.allclose(omega.penalty(padded_q), omega.penalty(q), atol=_TOLERANCE):
        yield "penalty(q) must not change with an entry of 0"
    product = omega.jacobian_product(padded_q, pad(y, (1, 1), value=1.0))
    if not torch.allclose(product, pad(omega.jacobian_product(q, y), (1, 1)), atol=_TOLERANCE):
        got = _format(product[0])
        yield f"jacobian_product(q, y) must be 0 where x is -inf, and must not change elsewhere, got {got}"


def _difference_failures(requirement: str, actual: Tensor, numerical: Tensor) -> Iterator[str]:
    """Yield a message that ``requirement`` is violated, if the actual derivative differs from finite differences."""
    error = (actual - numerical).abs()
    if error.numel() and error.max().item() > 10 * _TOLERANCE:
        worst = error.argmax()
        got, needed = actual.flatten()[worst].item(), numerical.flatten()[worst].item()
        yield f"{requirement}, got {got:.4g} where finite differences give {needed:.4g}"


def _first_row(x: Tensor, is_wrong: Tensor) -> str:
    """Format the first vector of x (..., D) for which ``is_wrong``, (..., D) or (...), is True."""
    rows = x.reshape(-1, x.shape[-1])
    return _format(rows[int(is_wrong.reshape(len(rows), -1).any(-1).nonzero()[0])])


def _format(x: Tensor) -> str:
    """Format a vector (D,) for a message, with four digits per entry."""
    return "[" + ", ".join(f"{entry:.4g}" for entry in x.tolist()) + "]"
