"""The sweeps of a graph in plain torch, node values in float64.

θ and ``index`` are as in :mod:`bellmax.layouts.graph`. The nodes of a group share their level and their number of
parents, so a group's edges are a slice that reshapes to (nodes, parents) without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bellmax.layouts.graph import check
from bellmax.layouts.graph import nodes as nodes_of
from bellmax.regularizers import Regularizer
from bellmax.tensors import Tensors

__all__ = ["backward", "check", "empty_tape", "forward", "hessian", "log_transitions", "log_transitions_jvp"]
__all__ += ["log_transitions_vjp", "sample", "topk", "value"]

Group = tuple[slice, slice, int]


def empty_tape(theta: Tensors, index: Tensors) -> Tensor:
    return theta[0].new_empty((theta[0].shape[0], *nodes_of(theta, index)), dtype=torch.float64)


def _groups(index: Tensors) -> list[Group]:
    """Nodes, edges and number of parents of each group after the source's, in topological order."""
    nodes = index[3].tolist()
    edges = index[0][index[3]].tolist()
    return [
        (slice(a, b), slice(e, f), (f - e) // (b - a))
        for a, b, e, f in zip(nodes[1:-1], nodes[2:], edges[1:-1], edges[2:], strict=True)
    ]


def _zeros(shape: Sequence[int], *like: Tensor) -> Tensor:
    """A float64 buffer that may be written with values computed from ``like``, under vmap too."""
    total = like[0].new_zeros(shape, dtype=torch.float64)
    for tensor in like[1:]:
        total = total + tensor.new_zeros(shape, dtype=torch.float64)
    return total


def _sort_edges(values: Tensor, index: Tensors) -> Tensor:
    return values.index_select(1, index[2]).double()


def _unsort_edges(parts: list[Tensor], index: Tensors, like: Tensor) -> Tensor:
    values = torch.cat(parts, -1).to(like.dtype)
    return values.index_select(-1, index[2].argsort())


def _local_scores(theta: Tensor, v: Tensor, index: Tensors, group: Group) -> Tensor:
    """θ_ij + v_j of a group's nodes: (B, nodes, parents)."""
    _, edges, parents = group
    x = theta[:, edges] + v.index_select(1, index[1][edges])
    scores: Tensor = x.unflatten(1, (-1, parents))
    return scores


def forward(inputs: Tensors, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    sorted_theta = _sort_edges(theta, index)
    v = _zeros((theta.shape[0], index[0].shape[0] - 1), theta)
    for group in _groups(index):
        v[:, group[0]] = omega.max(_local_scores(sorted_theta, v, index, group))
    return v[:, -1].to(theta.dtype, copy=True), v


def value(inputs: Tensors, index: Tensors, omega: Regularizer) -> Tensor:
    return forward(inputs, index, omega)[0]


def _walk_back(mass: Tensor, index: Tensors, theta: Tensor, edge_mass: Callable[[Group, Tensor], Tensor]) -> Tensor:
    """Run mass from the end node to the start. ``edge_mass`` spreads what a group's nodes hold over their edges."""
    parts = []
    for group in reversed(_groups(index)):
        nodes, edges, _ = group
        part = edge_mass(group, mass[..., nodes].clone()).flatten(-2)
        mass.index_add_(-1, index[1][edges], part)
        parts.append(part)
    return _unsort_edges(parts[::-1], index, theta)


def _at_end(shape: Sequence[int], *like: Tensor) -> Tensor:
    mass = _zeros(shape, *like)
    mass[..., -1] = 1
    return mass


def backward(inputs: Tensors, tape: Tensor, seed: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    sorted_theta = _sort_edges(theta, index)

    def spread(group: Group, mass: Tensor) -> Tensor:
        return omega.argmax(_local_scores(sorted_theta, tape, index, group)) * mass.unsqueeze(-1)

    return [_walk_back(_at_end(tape.shape, theta, tape), index, theta, spread) * seed.unsqueeze(-1)]


def hessian(
    inputs: Tensors, tape: Tensor, seed: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    sorted_theta, sorted_z = _sort_edges(theta, index), _sort_edges(z, index)
    groups = _groups(index)
    v_dot = _zeros(tape.shape, theta, tape, z)
    q, q_dot = {}, {}
    for group in groups:
        nodes = group[0].start
        q[nodes] = omega.argmax(_local_scores(sorted_theta, tape, index, group))
        y = _local_scores(sorted_z, v_dot, index, group).masked_fill(q[nodes] == 0, 0)
        v_dot[:, group[0]] = (q[nodes] * y).sum(-1)
        q_dot[nodes] = omega.jacobian_product(q[nodes], y)

    # Mass and its tangent run back together: Algorithm 2 of the paper.
    def spread(group: Group, mass: Tensor) -> Tensor:
        e, e_dot = mass.unsqueeze(-1)
        start = group[0].start
        source = q_dot[start].masked_fill(e == 0, 0) * e
        return torch.stack((q[start] * e, source + q[start] * e_dot))

    masses = torch.stack((_at_end(tape.shape, theta, tape, z), _zeros(tape.shape, theta, tape, z)))
    return [_walk_back(masses, index, theta, spread)[1] * seed.unsqueeze(-1)]


def log_transitions(inputs: Tensors, tape: Tensor, index: Tensors, omega: Regularizer) -> Tensors:
    (theta,) = inputs
    sorted_theta = _sort_edges(theta, index)
    parts = [omega.log_argmax(_local_scores(sorted_theta, tape, index, group)).flatten(1) for group in _groups(index)]
    return [_unsort_edges(parts, index, theta)]


def log_transitions_jvp(
    inputs: Tensors, tape: Tensor, direction: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (z,) = inputs, direction
    sorted_theta, sorted_z = _sort_edges(theta, index), _sort_edges(z, index)
    v_dot = _zeros(tape.shape, theta, tape, z)
    parts = []
    for group in _groups(index):
        x = _local_scores(sorted_theta, tape, index, group)
        q = omega.argmax(x)
        y = _local_scores(sorted_z, v_dot, index, group).masked_fill(x == -math.inf, 0)
        v_dot[:, group[0]] = (q * y).sum(-1)
        parts.append(omega.log_argmax_jvp(q, y).masked_fill(x == -math.inf, 0).flatten(1))
    return [_unsort_edges(parts, index, theta)]


def log_transitions_vjp(
    inputs: Tensors, tape: Tensor, cotangents: Tensors, index: Tensors, omega: Regularizer
) -> Tensors:
    (theta,), (cotangent,) = inputs, cotangents
    sorted_theta, sorted_cotangent = _sort_edges(theta, index), _sort_edges(cotangent, index)

    def spread(group: Group, mass: Tensor) -> Tensor:
        x = _local_scores(sorted_theta, tape, index, group)
        local = sorted_cotangent[:, group[1]].unflatten(1, (-1, group[2])).masked_fill(x == -math.inf, 0)
        q = omega.argmax(x)
        return omega.log_argmax_vjp(q, local) + q * mass.unsqueeze(-1)

    return [_walk_back(_zeros(tape.shape, theta, tape, cotangent), index, theta, spread)]


def sample(inputs: Tensors, tape: Tensor, uniforms: Tensor, index: Tensors, omega: Regularizer) -> Tensor:
    """Paths drawn with ``uniforms`` (B, K, choices): the n-th choice of a walk back from the end takes the n-th."""
    (theta,) = inputs
    sorted_theta = _sort_edges(theta, index)
    taken = torch.zeros(uniforms.shape[:2], dtype=torch.int64, device=theta.device)

    def spread(group: Group, visits: Tensor) -> Tensor:
        nonlocal taken
        q = omega.argmax(_local_scores(sorted_theta, tape, index, group)).unsqueeze(1)
        cumulative = q.cumsum(-1)
        uniform = uniforms.gather(2, taken.clamp(max=uniforms.shape[2] - 1).unsqueeze(-1)).unsqueeze(-1)
        taken = taken + visits.any(-1)
        target = uniform * cumulative[..., -1:]
        return ((cumulative - q <= target) & (target < cumulative)) * visits.unsqueeze(-1)

    visits = _at_end((*uniforms.shape[:2], tape.shape[1]), tape)
    return _walk_back(visits, index, theta, spread)


def topk(inputs: Tensors, k: int, index: Tensors, omega: Regularizer) -> tuple[Tensor, Tensor]:
    (theta,) = inputs
    batch, num_nodes = theta.shape[0], index[0].shape[0] - 1
    sorted_theta = _sort_edges(theta, index)
    scores = sorted_theta.new_full((batch, num_nodes, k), -math.inf)
    scores[:, 0, 0] = 0
    choice = index[1].new_zeros((batch, num_nodes, k))
    for nodes, edges, parents in _groups(index):
        x = sorted_theta[:, edges, None] + scores.index_select(1, index[1][edges])
        best = x.unflatten(1, (-1, parents)).flatten(2).sort(dim=-1, descending=True, stable=True)
        scores[:, nodes], choice[:, nodes] = best.values[..., :k], best.indices[..., :k]

    # A node holds 1 + the rank of the path that goes through it, 0 where none does.
    def spread(group: Group, held: Tensor) -> Tensor:
        nodes, _, parents = group
        picked = choice[:, nodes].transpose(1, 2).gather(1, (held.long() - 1).clamp(min=0))
        is_parent = (picked // k).unsqueeze(-1) == torch.arange(parents, device=theta.device)
        return is_parent * ((picked % k + 1) * (held > 0)).unsqueeze(-1).double()

    held = sorted_theta.new_zeros((batch, k, num_nodes))
    held[:, :, -1] = torch.arange(1, k + 1, device=theta.device) * (scores[:, -1] > -math.inf)
    paths = _walk_back(held, index, theta, spread) > 0
    return scores[:, -1].to(theta.dtype).contiguous(), paths.to(theta.dtype)
