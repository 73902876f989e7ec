"""Labels on trees against enumeration of labelings, and against chains."""

from __future__ import annotations

import copy
import math
import pickle
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.checks import close
from support.kernels import needs_kernels, took
from support.problems import Array, for_second_order, one_of_each_kind, potentials, solve, two_kinds
from torch import Tensor
from torch.distributions import kl_divergence

import bellmax as bx
from bellmax import losses


class Enumerated(NamedTuple):
    """One tree with one set of scores, solved by listing its labelings."""

    value: float
    labellings: Array  # (labelings, V)
    probabilities: Array

    @property
    def entropy(self) -> float:
        p = self.probabilities[self.probabilities > 0]
        return float(-(p * np.log(p)).sum())

    def marginals(self, states: int) -> Array:
        one_hot = self.labellings[..., None] == np.arange(states)
        return np.asarray(np.einsum("n,nvk->vk", self.probabilities, one_hot))


def enumerate_labels(parents: list[int], unary: Tensor, pairwise: Tensor, omega: bx.Regularizer) -> Enumerated:
    """q by the recursion: q[u][s] is the distribution of u's label given the parent's label s (0 for the root)."""
    size, states = unary.shape
    pairs = pairwise if pairwise.ndim == 3 else pairwise.expand(size, states, states)
    q: dict[tuple[int, int], list[float]] = {}

    @cache
    def message(u: int, s: int) -> float:
        children = [c for c in range(size) if parents[c] == u]
        scores = []
        for t in range(states):
            score = float(unary[u, t]) + (float(pairs[u, s, t]) if parents[u] >= 0 else 0.0)
            scores.append(score + sum(message(c, t) for c in children))
        value, q[u, s] = solve(omega, scores)
        return value

    value = message(parents.index(-1), 0)
    labellings = np.array(list(product(range(states), repeat=size)))
    above = [[labels[p] if p >= 0 else 0 for p in parents] for labels in labellings]
    probabilities = [
        math.prod(q[u, s][t] for u, (s, t) in enumerate(zip(higher, labels, strict=True)))
        for higher, labels in zip(above, labellings, strict=True)
    ]
    return Enumerated(value, labellings, np.array(probabilities))


def score_of(parents: list[int], unary: Tensor, pairwise: Tensor, labels: Array) -> float:
    pairs = pairwise if pairwise.ndim == 3 else pairwise.expand(len(parents), *pairwise.shape)
    total = sum(float(unary[u, t]) for u, t in enumerate(labels))
    return total + sum(float(pairs[u, labels[p], labels[u]]) for u, p in enumerate(parents) if p >= 0)


TREES = [
    [-1],
    [1, -1],
    [-1, 0, 0, 0],
    [2, 4, -1, 2, 2],
    [4, 0, 0, 4, -1, 3],
]


def scores(size: int, states: int, seed: int, missing: float = 0.1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    unary, pairwise = potentials(size, states, seed=seed), potentials(size, states, states, seed=seed + 100)
    for tensor in (unary, pairwise):
        tensor[torch.rand(tensor.shape, generator=generator) < missing] = -math.inf
    return unary, pairwise


# --- against enumeration


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_equals_enumeration(parents: list[int], omega: bx.Regularizer, backend: str) -> None:
    states = 3 if len(parents) < 5 else 2
    unary, pairwise = scores(len(parents), states, seed=len(parents) + parents[0])
    pairwise[parents.index(-1)] = math.nan  # is ignored
    p = bx.TreeModel(parents).labels(unary, pairwise, omega=omega)
    assert p.backend == backend
    wanted = enumerate_labels(parents, unary, pairwise, omega)
    close(p.value, wanted.value)
    close(p.marginals, wanted.marginals(states), 1e-9)
    assert p.marginals.equal(p.expected_path)
    close(p.entropy(), wanted.entropy, 1e-9)
    close(p.log_prob(torch.from_numpy(wanted.labellings)).exp(), wanted.probabilities, 1e-9)
    every = np.array([score_of(parents, unary, pairwise, labels) for labels in wanted.labellings])
    assert int(p.num_paths) == np.isfinite(every).sum()
    pairs = torch.zeros_like(pairwise)
    for labels, probability in zip(wanted.labellings, wanted.probabilities, strict=True):
        for u, parent in enumerate(parents):
            if parent >= 0:
                pairs[u, labels[parent], labels[u]] += probability
    close(p.edge_marginals, pairs, 1e-9)
    close(p.gradient["pairwise"], pairs, 1e-9)
    close(p.gradient["unary"], p.marginals)
    best_scores, labels = p.topk_labels(4)
    best = np.sort(every)[::-1][:4]
    close(best_scores, np.concatenate((best, np.full(4 - len(best), -math.inf))))
    for score, labelling in zip(best_scores.tolist(), labels.numpy(), strict=True):
        if score > -math.inf:
            assert score_of(parents, unary, pairwise, labelling) == pytest.approx(score)
        else:
            assert (labelling == -1).all()
    assert p.best_labels().equal(labels[0])
    assert p.best_path().argmax(-1).equal(labels[0])


def test_samples_have_the_probabilities(omega: bx.Regularizer, backend: str) -> None:
    parents, draws = [3, 3, 3, 4, -1], 2000
    unary, pairwise = scores(5, 2, seed=1)
    p = bx.TreeModel(parents).labels(unary, pairwise, omega=omega)
    wanted = enumerate_labels(parents, unary, pairwise, omega)
    drawn = p.sample_labels((draws,))
    share = [(drawn.numpy() == labels).all(1).mean() for labels in wanted.labellings]
    np.testing.assert_allclose(share, wanted.probabilities, atol=4 * math.sqrt(0.25 / draws))
    assert p.sample((3,)).shape == (3, 5, 2)
    assert p.support.check(p.sample((3,))).all()


def test_support_and_mode(omega: bx.Regularizer, backend: str) -> None:
    parents = [3, 3, 3, 4, -1]
    unary, pairwise = scores(5, 2, seed=2)
    p = bx.TreeModel(parents).labels(unary, pairwise, omega=omega)
    wanted = enumerate_labels(parents, unary, pairwise, omega)
    paths, probabilities = p.support_paths()
    close(probabilities, np.sort(wanted.probabilities[wanted.probabilities > 0])[::-1], 1e-9)
    close((paths * probabilities[:, None, None]).sum(0), p.marginals, 1e-9)
    assert p.mode.argmax(-1).tolist() == wanted.labellings[wanted.probabilities.argmax()].tolist()


def test_kl_divergence(omega: bx.Regularizer, backend: str) -> None:
    tree, parents = bx.TreeModel([1, -1, 1]), [1, -1, 1]
    first, second = scores(3, 3, seed=1), scores(3, 3, seed=2, missing=0)
    p, r = tree.labels(*first, omega=omega), bx.TreeModel(parents).labels(*second, gamma=1.5)
    a = enumerate_labels(parents, *first, omega).probabilities
    b = enumerate_labels(parents, *second, bx.Negentropy(1.5)).probabilities
    close(kl_divergence(p, r), (a[a > 0] * np.log(a[a > 0] / b[a > 0])).sum(), 1e-9)
    with pytest.raises(ValueError, match="paths of the same graph"):
        kl_divergence(p, bx.TreeModel([-1, 0, 1]).labels(*second))


# --- the same program as a chain


def test_a_path_is_a_chain(omega: bx.Regularizer, backend: str) -> None:
    steps, states = 5, 3
    emissions, transitions = potentials(2, steps, states), potentials(states, states, seed=1)
    emissions[0, 1, 2] = transitions[1, 0] = -math.inf
    chain = bx.Chain.from_scores(emissions, transitions, omega=omega)
    # The root is the last step, and each step is the parent of the step before.
    tree = bx.TreeModel([*range(1, steps), -1]).labels(emissions, transitions, omega=omega)
    vertex = 0.45 if isinstance(omega, bx.SquaredL2) else 0.0  # a chain has one more node, at its start
    close(tree.value, chain.value + vertex)
    close(tree.marginals, chain.marginals)
    close(tree.edge_marginals[:, :-1], chain.pairwise_marginals)
    close(tree.entropy(), chain.entropy())
    assert tree.best_labels().equal(chain.best_sequence())
    close(tree.topk(4)[0], chain.topk(4)[0])
    z = potentials(2, steps, states, seed=3)
    inputs = emissions.clone().requires_grad_()
    chain_marginals = bx.Chain.from_scores(inputs, transitions, omega=omega).marginals
    close(tree.hessian_product(z), torch.autograd.grad(chain_marginals, inputs, z)[0])
    target = chain.sample_sequences()
    for loss in (losses.surrogate, losses.crf_nll, losses.structured_hinge, losses.path_nll):
        if loss is losses.path_nll and isinstance(omega, bx.Hard):
            continue
        close(loss(tree, target), loss(chain, target))


def test_the_root_does_not_matter_under_negentropy(backend: str) -> None:
    unary, edges = 0.3 * potentials(4, 2), [(0, 1), (1, 2), (1, 3)]
    pairs = 0.3 * potentials(3, 2, 2, seed=1)  # [edge, label of the first end, label of the second]
    values = {"negentropy": [], "l2": []}
    for parents in ([-1, 0, 1, 1], [1, -1, 1, 1], [1, 2, -1, 1]):
        pairwise = torch.zeros(4, 2, 2, dtype=torch.float64)
        for (a, b), pair in zip(edges, pairs, strict=True):
            if parents[b] == a:
                pairwise[b] = pair
            else:
                pairwise[a] = pair.T
        for name, by_root in values.items():
            by_root.append(float(bx.TreeModel(parents).labels(unary, pairwise, omega=name).value))
    assert max(values["negentropy"]) - min(values["negentropy"]) < 1e-12
    assert max(values["l2"]) - min(values["l2"]) > 1e-4


# --- derivatives


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    tree = bx.TreeModel([2, 2, 3, -1])
    unary, pairwise = potentials(2, 4, 2, requires_grad=True), potentials(4, 2, 2, seed=1, requires_grad=True)
    shared = potentials(2, 2, seed=2, requires_grad=True)
    for second in (pairwise, shared):

        def value(a: Tensor, b: Tensor) -> Tensor:
            return tree.labels(a, b, omega=omega).value

        def marginals(a: Tensor, b: Tensor) -> Tensor:
            return tree.labels(a, b, omega=omega).marginals

        def pairs(a: Tensor, b: Tensor) -> Tensor:
            return tree.labels(a, b, omega=omega).edge_marginals

        def entropy(a: Tensor, b: Tensor) -> Tensor:
            return tree.labels(a, b, omega=omega).entropy()

        for function in (value, marginals, pairs, entropy):
            assert torch.autograd.gradcheck(function, (unary, second), fast_mode=backend == "reference")
        assert torch.autograd.gradgradcheck(value, (unary, second), fast_mode=backend == "reference")
        assert torch.autograd.gradgradcheck(marginals, (unary, second), fast_mode=True)


@two_kinds
def test_hessian_product_and_direction(omega: bx.Regularizer, backend: str) -> None:
    tree = bx.TreeModel([2, 2, 3, -1])
    unary, pairwise = potentials(3, 4, 2), potentials(2, 2, seed=1)
    z = {"unary": potentials(3, 4, 2, seed=2), "pairwise": potentials(2, 2, seed=3)}
    p = tree.labels(unary, pairwise, omega=omega)
    assert {name: tuple(g.shape) for name, g in p.gradient.items()} == {"unary": (3, 4, 2), "pairwise": (2, 2)}
    inputs = (unary.clone().requires_grad_(), pairwise.clone().requires_grad_())
    q = tree.labels(*inputs, omega=omega)
    slope = q.directional_derivative(z)
    close(slope, (p.marginals * z["unary"]).sum((-2, -1)) + (p.edge_marginals.sum(1) * z["pairwise"]).sum((-2, -1)))
    products = torch.autograd.grad(slope.sum(), inputs)
    for got, wanted in zip(p.hessian_product(z).values(), products, strict=True):
        close(got, wanted)


def test_under_transforms(backend: str) -> None:
    tree = bx.TreeModel([2, 2, 3, -1])
    unary, pairwise = potentials(3, 4, 2), potentials(2, 2, seed=1)
    p = tree.labels(unary, pairwise)
    gradient = torch.func.vmap(torch.func.grad(lambda a, b: tree.labels(a, b).value), (0, None))(unary, pairwise)
    close(gradient, p.marginals)
    compiled = torch.compile(lambda a: tree.labels(a, pairwise).marginals, fullgraph=True, backend="eager")
    close(compiled(unary), p.marginals)


# --- shapes


@two_kinds
def test_batches_of_any_shape(omega: bx.Regularizer, backend: str) -> None:
    tree, parents = bx.TreeModel([2, 2, 3, -1]), [2, 2, 3, -1]
    unary = potentials(2, 3, 4, 2)
    for shape in ((2, 2), (4, 2, 2), (1, 2, 2), (3, 4, 2, 2), (2, 1, 4, 2, 2), (2, 3, 1, 2, 2)):
        pairwise = potentials(*shape, seed=1)
        p = tree.labels(unary, pairwise, omega=omega)
        assert (p.batch_shape, p.event_shape) == ((2, 3), (4, 2))
        full = pairwise.expand(2, 3, 4, 2, 2)
        for b in product(range(2), range(3)):
            wanted = enumerate_labels(parents, unary[b], full[b], omega)
            close(p.value[b], wanted.value)
            close(p.marginals[b], wanted.marginals(2), 1e-9)
        assert p.gradient["pairwise"].shape == shape
        torch.testing.assert_close(p[1].value, p.value[1])
    none = tree.labels(torch.zeros(0, 4, 2), torch.zeros(2, 2), omega=omega)
    assert none.marginals.shape == (0, 4, 2)
    assert none.edge_marginals.shape == (0, 4, 2, 2)
    assert none.sample_labels((2,)).shape == (2, 0, 4)
    assert none.topk_labels(2)[1].shape == (0, 2, 4)
    wide = tree.labels(torch.zeros(4, 2), potentials(5, 4, 2, 2), omega=omega)
    assert wide.batch_shape == (5,)
    assert wide.marginals.shape == (5, 4, 2)


@one_of_each_kind
def test_corners(omega: bx.Regularizer, backend: str) -> None:
    alone = bx.TreeModel([-1]).labels(torch.tensor([[1.0, 3.0]]), torch.full((2, 2), math.nan), omega=omega)
    close(alone.value, solve(omega, [1.0, 3.0])[0], 1e-6)
    assert alone.best_labels().tolist() == [1]
    assert not alone.edge_marginals.any()
    one_label = bx.TreeModel([-1, 0]).labels(torch.ones(2, 1), torch.full((1, 1), 2.0), omega=omega)
    assert one_label.marginals.tolist() == [[1.0], [1.0]]
    unary = torch.zeros(3, 2, requires_grad=True)
    impossible = bx.TreeModel([-1, 0, 0]).labels(unary, torch.full((3, 2, 2), -math.inf), omega=omega)
    assert impossible.value == -math.inf
    assert not torch.autograd.grad(impossible.value, unary)[0].any()
    assert not impossible.marginals.any()
    assert impossible.best_labels().tolist() == [-1] * 3
    assert impossible.sample_labels((2,)).tolist() == [[-1] * 3] * 2
    assert impossible.num_paths == 0


@needs_kernels
@pytest.mark.parametrize("parents", [[-1, *[0] * 300], [*range(1, 300), -1], [-1, *[n // 2 for n in range(300)]]])
def test_large_trees(parents: list[int]) -> None:
    """A star, a path and a binary tree in float32, against the reference in float64."""
    unary, pairwise = potentials(2, len(parents), 4), potentials(4, 4, seed=1)
    tree = bx.TreeModel(parents)
    with took("dag_forward"), took("dag_backward"):
        p = tree.labels(unary.float(), pairwise.float())
        marginals = p.marginals
    with bx.use_backend("reference"):
        q = tree.labels(unary, pairwise)
    torch.testing.assert_close(p.value.double(), q.value, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(marginals.double(), q.marginals, rtol=1e-4, atol=1e-5)
    assert p.sample_labels((3,)).shape == (3, 2, len(parents))


# --- targets


@one_of_each_kind
def test_losses_take_labels(omega: bx.Regularizer, backend: str) -> None:
    parents = [3, 3, 3, -1]
    unary, pairwise = potentials(2, 4, 3, requires_grad=True), potentials(3, 3, seed=1)
    p = bx.TreeModel(parents).labels(unary, pairwise, omega=omega)
    target = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 0]])
    one_hot = torch.nn.functional.one_hot(target, 3)
    for loss in (
        losses.surrogate,
        losses.crf_nll,
        losses.structured_hinge,
        losses.structured_perceptron,
        losses.relaxed,
    ):
        by_labels = loss(p, target, reduction="none")
        assert by_labels.equal(loss(p, one_hot.bool(), reduction="none"))
        assert by_labels.equal(loss(p, one_hot.double(), reduction="none"))
        assert (by_labels >= 0).all()
    loss = losses.surrogate(p, target, reduction="none")
    for b in range(2):
        only = unary[b].detach().masked_fill(one_hot[b] == 0, -math.inf)
        wanted = [enumerate_labels(parents, each, pairwise, omega).value for each in (unary[b].detach(), only)]
        close(loss[b], wanted[0] - wanted[1])
    (slope,) = torch.autograd.grad(loss.sum(), unary)
    close(slope, p.marginals - one_hot)
    partial = target.clone()
    partial[:, 1], partial[:, 3] = -1, -100
    if not isinstance(omega, bx.Hard):
        nll = losses.path_nll(p, partial, reduction="none")
        for b in range(2):
            listed = enumerate_labels(parents, unary[b].detach(), pairwise, omega)
            is_consistent = (listed.labellings[:, 0] == target[b, 0].item()) & (
                listed.labellings[:, 2] == target[b, 2].item()
            )
            mass = listed.probabilities[is_consistent].sum()
            close(nll[b], -math.log(mass) if mass > 0 else math.inf)
    assert losses.hamming_cost(p, target).equal((1 - one_hot).double())


def test_invalid_targets_raise() -> None:
    p = bx.TreeModel([-1, 0]).labels(torch.zeros(3, 2, 2), torch.zeros(2, 2))
    with pytest.raises(
        ValueError, match="target must be from 0 to 1, or -1 or -100 for any, got 2 at node 1 of sequence 2"
    ):
        losses.surrogate(p, torch.tensor([[0, 0], [0, 1], [1, 2]]))
    with pytest.raises(
        ValueError, match=r"target must have shape \(3, 2, 2\) of 0 and 1 or \(3, 2\) int64, got \(3,\)"
    ):
        losses.surrogate(p, torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="target must be a single path"):
        losses.relaxed(p, torch.full((3, 2), -1))
    with pytest.raises(ValueError, match=r"path\[0, 0\] must be a label from 0 to 1, got -1"):
        p.log_prob(torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match=r"path must have shape \(..., 2\) for integers, got \(3,\)"):
        p.log_prob(torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match=r"path.* is not a path of the graph"):
        p.log_prob(torch.ones(2, 2))


# --- construction


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], r"parents must have shape \(V,\) with V >= 1, got \(0,\)"),
        ([[0, -1]], r"parents must have shape \(V,\) with V >= 1, got \(1, 2\)"),
        ([0.0, -1.0], "parents must hold integers, got dtype torch.float32"),
        ([-1, 2], "parents must hold nodes below 2, or -1 for the root, got 2 for node 1"),
        ([-1, -2], "parents must hold nodes below 2, or -1 for the root, got -2 for node 1"),
        ([-1, -1, 0], r"parents must have exactly one root \(of parent -1\), got 2: nodes 0, 1"),
        ([-1, 2, 1], "parents must not form a cycle, got (1 → 2 → 1|2 → 1 → 2)"),
        ([1, 0], "parents must not form a cycle"),
    ],
)
def test_bad_trees_are_named(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.TreeModel(parents)


def test_bad_scores_are_named(backend: str) -> None:
    tree = bx.TreeModel([-1, 0, 0])
    for unary, pairwise, message in (
        (torch.zeros(2, 2), torch.zeros(2, 2), r"unary must have shape \(..., 3, K\), got \(2, 2\)"),
        (torch.zeros(3), torch.zeros(2, 2), r"unary must have shape \(..., 3, K\), got \(3,\)"),
        (torch.zeros(3, 0), torch.zeros(0, 0), r"unary must have shape \(..., 3, K\), got \(3, 0\)"),
        (torch.zeros(3, 2), torch.zeros(2, 3), r"pairwise must have shape \(..., 3, 2, 2\) or \(2, 2\), got \(2, 3\)"),
        (torch.zeros(3, 2), torch.zeros(2, 2, 2), r"pairwise must have shape .*, got \(2, 2, 2\)"),
        (torch.zeros(3, 2), torch.zeros(2), r"pairwise must have shape .*, got \(2,\)"),
        (torch.zeros(4, 3, 2), torch.zeros(5, 3, 2, 2), "the batch dimensions of unary and pairwise must broadcast"),
        (torch.zeros(3, 2).long(), torch.zeros(2, 2), "unary must be floating point"),
    ):
        with pytest.raises(ValueError, match=message):
            tree.labels(unary, pairwise)
    bad = torch.zeros(3, 2, 2)
    bad[0] = math.inf  # of the root
    assert tree.labels(torch.zeros(3, 2), bad).value.isfinite()
    bad[2, 1, 0] = math.nan
    with pytest.raises(ValueError, match=r"pairwise must be finite or -inf, got nan at event index \(2, 1, 0\)"):
        _ = tree.labels(torch.zeros(3, 2), bad).value
    with pytest.raises(ValueError, match=r"unary must be finite or -inf, got inf at event index \(0, 0\)"):
        _ = tree.labels(torch.full((3, 2), math.inf), torch.zeros(2, 2)).value


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_and_moves(duplicate) -> None:
    tree = bx.TreeModel(np.array([-1, 0, 0]))
    assert repr(tree) == "TreeModel(num_nodes=3, root=0)"
    unary, pairwise = potentials(2, 3, 2), potentials(2, 2)
    p, q = tree.labels(unary, pairwise), duplicate(tree).labels(unary, pairwise)
    assert p.value.equal(q.value)
    assert pickle.loads(pickle.dumps(p)).value.equal(p.value)
    torch.testing.assert_close(kl_divergence(p, q), torch.zeros(2, dtype=torch.float64))
    assert p.to(torch.float32).value.dtype == torch.float32
    assert p.to("meta").value.is_meta
