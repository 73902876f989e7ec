"""DTW of a batch of pairs as one node of the autograd graph, from the series to the values."""

from __future__ import annotations

from torch import Tensor

from bellmax.autograd import Shortcut
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
    p = measure.over(power_costs(x, y, power), lengths_x, lengths_y)
    (theta,), unit_value, tape = p._solver.eager_forward()
    solver, flat = p._solver.without_scores(), p._solver.batch
    batch, cost, omega, needed = p.cost.shape[:-2], measure.cost, p.omega, (x.requires_grad, y.requires_grad)

    def vjp(inputs: Tensors, saved: Tensors, grad: Tensor) -> list[Tensor | None]:
        theta, tape, *unit_value = saved
        seed = flat.seed(grad, [theta])
        (path,) = flat.run("backward", [theta], tape, seed)
        gradients = power_gradients(inputs[0], inputs[1], path.reshape(*batch, *path.shape[-2:]), power, needed)
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


def _gamma_gradient(unit_value: Tensor, paid: Tensor, seed: Tensor) -> Tensor:
    """∂(γ v(C/γ))/∂γ = v(C/γ) − ⟨E, C/γ⟩, times the seed (B,); 0 for pairs without an alignment.

    ``unit_value`` is v(C/γ), and ``paid`` is ⟨E, C/γ⟩ times the seed.
    """
    is_impossible = unit_value.isinf()
    return (seed * unit_value.masked_fill(is_impossible, 0) - paid).masked_fill(is_impossible, 0)
