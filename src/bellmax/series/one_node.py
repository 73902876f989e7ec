"""DTW of a batch of pairs as one node of the autograd graph, from the series to the values."""

from __future__ import annotations

from torch import Tensor

from bellmax.autograd import Shortcut
from bellmax.backends.fused import DifferentiableKernel, PairCosts
from bellmax.regularizers import with_gamma
from bellmax.series.costs import as_power, pairwise, power_costs, power_gradients
from bellmax.series.measure import Measure
from bellmax.tensors import Tensors, inner


def one_node_values(
    measure: Measure, x: Tensor, y: Tensor, lengths_x: Tensor | None, lengths_y: Tensor | None
) -> Tensor:
    """DTW_Ω of each pair of series (..., N, D) and (..., M, D), for costs that are powers of the distance.

    The costs add no nodes to the graph: the node saves θ = C/γ and the tape. γ is an input of the node
    if it is a tensor that requires a gradient.
    """
    power, gamma = as_power(measure.cost, x.shape[-1]), measure.omega.gamma
    assert power is not None
    inputs: Tensors = (x, y)
    if isinstance(gamma, Tensor):
        inputs = (x, y, gamma) if gamma.requires_grad else (x, y)
        measure = measure.with_gamma(gamma.detach()).with_number_gamma(x)
    learns_gamma = len(inputs) == 3
    fused = _pair_costs(measure, x, y, power)
    costs = None if fused is None else fused.run(PairCosts(*_flat(x, y), power))
    if costs is None:
        costs = power_costs(x, y, power)
    p = measure.over(costs if costs.ndim == max(x.ndim, y.ndim) else costs[0], lengths_x, lengths_y)
    if p.cost.numel() != costs.numel():  # γ has more batch dimensions than the series
        fused = None
    (theta,), unit_value, tape = p._solver.eager_forward()
    solver, flat = p._solver.without_scores(), p._solver.batch
    batch, cost, omega, needed = p.cost.shape[:-2], measure.cost, p.omega, (x.requires_grad, y.requires_grad)

    def vjp(inputs: Tensors, saved: Tensors, grad: Tensor) -> list[Tensor | None]:
        theta, tape, *unit_value = saved
        seed = flat.seed(grad, [theta])
        (path,) = flat.run("backward", [theta], tape, seed)
        if fused is None:
            gradients = power_gradients(inputs[0], inputs[1], path.reshape(*batch, *path.shape[-2:]), power, needed)
        else:
            flat_gradients = fused.vjp(PairCosts(*_flat(*inputs[:2]), power), None, path)
            gradients = [
                g.reshape(s.shape) if n else None for g, s, n in zip(flat_gradients, inputs, needed, strict=False)
            ]
        if learns_gamma:
            gradient = _gamma_gradient(unit_value[0], inner(path, theta, 2), seed)
            gradients.append(gradient.reshape(batch).sum_to_size(inputs[2].shape).to(inputs[2].dtype))
        return gradients

    def general(inputs: Tensors, saved: Tensors) -> Tensor:
        costs = pairwise(inputs[0], inputs[1], cost)
        under = with_gamma(omega, inputs[2]) if learns_gamma else omega
        return solver.with_scores((costs.expand(*batch, *costs.shape[-2:]),), under).value()

    is_scaled = isinstance(omega.gamma, Tensor) or omega.gamma != 1
    # The tape may share the memory of unit_value.
    values = flat.rescale(unit_value if is_scaled else unit_value.clone(), omega.gamma)
    saved = (theta, tape, unit_value) if learns_gamma else (theta, tape)
    return Shortcut(vjp, general).attach(values, inputs, saved)


def _pair_costs(
    measure: Measure, x: Tensor, y: Tensor, power: int
) -> DifferentiableKernel[PairCosts, Tensor, None] | None:
    """Return the fused kernel of costs, if there is one for these series."""
    if x.ndim not in (2, 3) or x.ndim != y.ndim:
        return None
    fused = measure.fused_kernels(x.device).pair_costs
    return fused if fused is not None and fused.supports(PairCosts(*_flat(x, y), power)) else None


def _flat(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return series (..., N, D) as batches (B, N, D) without a graph."""
    x, y = x.detach(), y.detach()
    return (x, y) if x.ndim == 3 else (x.unsqueeze(0), y.unsqueeze(0))


def _gamma_gradient(unit_value: Tensor, paid: Tensor, seed: Tensor) -> Tensor:
    """∂(γ v(C/γ))/∂γ = v(C/γ) − ⟨E, C/γ⟩, times the seed (B,); 0 for pairs without an alignment.

    ``unit_value`` is v(C/γ), and ``paid`` is ⟨E, C/γ⟩ times the seed.
    """
    is_impossible = unit_value.isinf()
    return (seed * unit_value.masked_fill(is_impossible, 0) - paid).masked_fill(is_impossible, 0)
