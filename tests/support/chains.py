"""Chains as explicit graphs, and checks against enumeration of their sequences."""

from __future__ import annotations

import torch

import bellmax as bx
from support.checks import close
from support.problems import Enumerated

STEP_MASKS = {
    "lengths": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool(),
    "mask": torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]]).bool(),
}


def trellis(steps: int, states: int) -> tuple[bx.DAG, torch.Tensor]:
    """The trellis of a chain, and for each edge but those into the end the index of its potential in (T·S·S)."""
    node = 1 + torch.arange(steps * states).reshape(steps, states)
    edges = [(0, int(node[0, i])) for i in range(states)]
    offsets = [i * states for i in range(states)]
    for t in range(1, steps):
        for i in range(states):
            for j in range(states):
                edges.append((int(node[t - 1, j]), int(node[t, i])))
                offsets.append((t * states + i) * states + j)
    edges += [(int(node[-1, i]), steps * states + 1) for i in range(states)]
    return bx.DAG(edges), torch.tensor(offsets)


def on_trellis(theta: torch.Tensor, length: int, omega: bx.Regularizer) -> tuple[bx.PathDistribution, torch.Tensor]:
    """The DAG's distribution for the first ``length`` steps of θ (T, S, S)."""
    dag, offsets = trellis(length, theta.shape[-1])
    weights = torch.cat((theta[:length].flatten()[offsets], theta.new_zeros(theta.shape[-1])))
    return dag.paths(weights, omega=omega), offsets


def to_chain(values: torch.Tensor, offsets: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scatter numbers of the trellis' edges (..., E) into (..., T, S, S)."""
    flat = values.new_zeros((*values.shape[:-1], shape.numel()))
    flat[..., offsets] = values[..., : len(offsets)]
    return flat.reshape(*values.shape[:-1], *shape)


def steps_of(padding: str) -> dict[str, torch.Tensor]:
    return {"mask": STEP_MASKS["mask"]} if padding == "mask" else {"lengths": STEP_MASKS["lengths"].sum(-1)}


def assert_enumerated(p: bx.Chain, thetas: list[torch.Tensor], mask: torch.Tensor) -> None:
    """Compare p with all sequences of states; ``thetas`` are the potentials (K, S, S) of the unmasked steps."""
    steps, states = p.event_shape[:2]
    all_states = torch.cartesian_prod(*[torch.arange(states)] * steps)
    log_prob = p.log_prob(p.sequence_to_path(torch.where(mask, all_states.unsqueeze(1), -1)))
    best_scores, best = p.topk_sequences(1)

    for b, theta in enumerate(thetas):
        distinct = (all_states[:, ~mask[b]] == 0).all(-1)
        now = all_states[distinct][:, mask[b]]
        before = torch.cat((torch.zeros_like(now[:, :1]), now[:, :-1]), 1)
        step = torch.arange(len(theta))
        paths = theta.new_zeros(len(now), *theta.shape)
        paths[torch.arange(len(now)).unsqueeze(-1), step, now, before] = 1
        scores = theta[step, now, before].sum(-1)
        dag, offsets = trellis(len(theta), states)
        weights = torch.cat((theta.flatten()[offsets], theta.new_zeros(states))).tolist()
        value, q = Enumerated(dag.edges.tolist(), dag.num_nodes, weights, p.omega).nodes
        edges, ends = torch.tensor(q, dtype=theta.dtype).split((len(offsets), states))
        probabilities = to_chain(edges, offsets, theta.shape)[step, now, before].prod(-1) * ends[now[:, -1]]
        expected = (probabilities[:, None, None, None] * paths).sum(0)
        close(probabilities.sum(), theta.new_ones(()))
        close(log_prob[distinct, b].exp(), probabilities)
        close(p.value[b], theta.new_tensor(value[-1]))
        close(p.expected_path[b][mask[b]], expected)
        close(p.marginals[b][mask[b]], expected.sum(-1))
        assert not p.expected_path[b][~mask[b]].any()
        close(best_scores[b, 0], scores.max())
        assert torch.equal(best[b, 0][mask[b]], now[scores.argmax()])
        if isinstance(p.omega, bx.Negentropy):
            close(p.value[b], p.omega.gamma * (scores / p.omega.gamma).logsumexp(0))
            close(probabilities, (scores / p.omega.gamma).softmax(0))
        if isinstance(p.omega, bx.Hard):
            close(p.value[b], scores.max())
