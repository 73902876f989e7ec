"""Chains as explicit graphs, and checks against enumeration of their sequences."""

from __future__ import annotations

import torch

import bellmax as bx
from support.checks import close
from support.problems import Enumerated

KEPT = {
    "lengths": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool(),
    "mask": torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]]).bool(),
}


def trellis(steps: int, states: int) -> tuple[bx.DAG, torch.Tensor]:
    """The trellis of a chain, and for each edge but those into the end the index of its potential in (T·S·S)."""
    node = 1 + torch.arange(steps * states).reshape(steps, states)
    edges = [(0, int(node[0, i])) for i in range(states)]
    place = [i * states for i in range(states)]
    for t in range(1, steps):
        for i in range(states):
            for j in range(states):
                edges.append((int(node[t - 1, j]), int(node[t, i])))
                place.append((t * states + i) * states + j)
    edges += [(int(node[-1, i]), steps * states + 1) for i in range(states)]
    return bx.DAG(edges), torch.tensor(place)


def on_trellis(theta: torch.Tensor, length: int, omega: bx.Regularizer) -> tuple[bx.PathDistribution, torch.Tensor]:
    """The DAG's distribution for the first ``length`` steps of θ (T, S, S)."""
    dag, place = trellis(length, theta.shape[-1])
    weights = torch.cat((theta[:length].flatten()[place], theta.new_zeros(theta.shape[-1])))
    return dag.paths(weights, omega=omega), place


def to_chain(values: torch.Tensor, place: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scatter numbers of the trellis' edges (..., E) into (..., T, S, S)."""
    flat = values.new_zeros((*values.shape[:-1], shape.numel()))
    flat[..., place] = values[..., : len(place)]
    return flat.reshape(*values.shape[:-1], *shape)


def steps_of(kept_by: str) -> dict[str, torch.Tensor]:
    return {"mask": KEPT["mask"]} if kept_by == "mask" else {"lengths": KEPT["lengths"].sum(-1)}


def assert_enumerated(p: bx.Chain, thetas: list[torch.Tensor], kept: torch.Tensor) -> None:
    """Compare p with all sequences of states; ``thetas`` are the potentials (K, S, S) of the unmasked steps."""
    steps, states = p.event_shape[:2]
    all_states = torch.cartesian_prod(*[torch.arange(states)] * steps)
    log_prob = p.log_prob(p.sequence_to_path(torch.where(kept, all_states.unsqueeze(1), -1)))
    best_scores, best = p.topk_sequences(1)

    for b, theta in enumerate(thetas):
        distinct = (all_states[:, ~kept[b]] == 0).all(-1)
        now = all_states[distinct][:, kept[b]]
        before = torch.cat((torch.zeros_like(now[:, :1]), now[:, :-1]), 1)
        step = torch.arange(len(theta))
        paths = theta.new_zeros(len(now), *theta.shape)
        paths[torch.arange(len(now)).unsqueeze(-1), step, now, before] = 1
        scores = theta[step, now, before].sum(-1)
        dag, place = trellis(len(theta), states)
        weights = torch.cat((theta.flatten()[place], theta.new_zeros(states))).tolist()
        value, q = Enumerated(dag.edges.tolist(), dag.num_nodes, weights, p.omega).nodes
        edges, ends = torch.tensor(q, dtype=theta.dtype).split((len(place), states))
        probabilities = to_chain(edges, place, theta.shape)[step, now, before].prod(-1) * ends[now[:, -1]]
        expected = (probabilities[:, None, None, None] * paths).sum(0)
        close(probabilities.sum(), theta.new_ones(()))
        close(log_prob[distinct, b].exp(), probabilities)
        close(p.value[b], theta.new_tensor(value[-1]))
        close(p.expected_path[b][kept[b]], expected)
        close(p.marginals[b][kept[b]], expected.sum(-1))
        assert not p.expected_path[b][~kept[b]].any()
        close(best_scores[b, 0], scores.max())
        assert torch.equal(best[b, 0][kept[b]], now[scores.argmax()])
        if isinstance(p.omega, bx.Negentropy):
            close(p.value[b], p.omega.gamma * (scores / p.omega.gamma).logsumexp(0))
            close(probabilities, (scores / p.omega.gamma).softmax(0))
        if isinstance(p.omega, bx.Hard):
            close(p.value[b], scores.max())
