"""The risk of any cost against enumeration: exact by all paths, and within the standard error by samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import close
from support.problems import one_of_each_kind, potentials, smooth
from support.structures import STRUCTURES
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import bellmax as bx
from bellmax.losses import expected_cost, risk

AMBIGUOUS = "SequenceAlignment, semiglobal"
"""The structure whose decoded forms may not determine a path."""
RARE = "ScoredChain, transitions"
"""A structure with paths that are too rare for a standard error from samples."""


def cost(paths: Any) -> Any:
    """A cost of paths (K, batch, …), or nested lists, that is not a sum over entries. Padding does not matter."""
    if isinstance(paths, Tensor):
        codes = (paths + 1).flatten(2).double()
        return (codes * (1.7 + torch.arange(codes.shape[-1]))).sum(-1).sin()
    return [[math.sin(sum((n + 1.7) * (e + 1) for n, e in enumerate(path))) for path in row] for row in paths]


def exact(p: bx.PathDistribution) -> Tensor:
    """The risk of each member of a batch, by the log-probabilities of all paths, (batch,)."""
    risks = []
    for q in p:
        _, paths = q.topk_decoded(int(q.num_paths))
        costs = cost(paths[:, None] if isinstance(paths, Tensor) else [[path] for path in paths])
        risks.append((q.log_prob(paths).exp() * torch.as_tensor(costs, dtype=p.dtype).squeeze(1)).sum())
    return torch.stack(risks)


def chain(x: Tensor, omega: str = "negentropy", **options: Any) -> bx.Chain:
    return bx.Chain.from_scores(x, 0.7 * torch.eye(x.shape[-1]).to(x), omega=omega, **options)


def changes(tags: Tensor) -> Tensor:
    return (tags[..., 1:] != tags[..., :-1]).sum(-1)


# --- all paths


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != AMBIGUOUS])
def test_all_paths_give_the_exact_risk(name: str, omega: bx.Regularizer) -> None:
    """More paths are asked for than exist."""
    structure = STRUCTURES[name]
    x = potentials(2, *structure.shape, seed=3).requires_grad_()
    p = structure.make(x, omega=omega)
    loss, expected = risk(p, cost, topk=int(p.num_paths.max()) + 2, reduction="none"), exact(p)
    close(loss, expected)
    for one, other in zip(loss, expected, strict=True):
        close(*(grad(r, x, retain_graph=True, materialize_grads=True)[0] for r in (one, other)))


@pytest.mark.parametrize("omega", ["negentropy", "entmax", "l2"])
def test_derivatives_by_scores_and_gamma(omega: str) -> None:
    x, gamma = potentials(2, 3, 2).requires_grad_(), torch.tensor([0.7, 1.2], dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor, gamma: Tensor) -> Tensor:
        return risk(chain(x, omega, gamma=gamma), cost, topk=8, reduction="none")

    assert gradcheck(loss, (x, gamma))
    assert gradgradcheck(loss, (x, gamma))


def test_the_k_best_are_renormalized() -> None:
    p = chain(potentials(1, 4, 3).requires_grad_())
    _, tags = p[0].topk_decoded(5)
    weights = p[0].log_prob(tags).softmax(0)
    loss, expected = risk(p, changes, topk=5), (weights * changes(tags)).sum()
    close(loss, expected)
    close(*(grad(r, p.scores["emissions"], retain_graph=True)[0] for r in (loss, expected)))


def test_one_path_is_the_most_probable_of_a_sparse_distribution() -> None:
    """The path of the best score may have the probability 0."""
    p = chain(potentials(100, 6, 3), "sparsemax", gamma=2.0)
    assert not torch.equal(p.mode, p.best_path())
    paths: list[Tensor] = []
    risk(p, lambda tags: paths.append(tags) or torch.zeros(1, 100), topk=1)
    close(p.encode(paths[0][0]), p.mode)


# --- samples


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - {AMBIGUOUS, RARE}))
@smooth
def test_samples_are_unbiased(name: str, omega: bx.Regularizer) -> None:
    """The mean over members of a batch, which are independent estimates, is within four standard errors."""
    structure, members = STRUCTURES[name], 1000
    x = potentials(*structure.shape, seed=4).mul(0.3).requires_grad_()  # no path is rare
    copies = x.detach().expand(members, *x.shape).clone().requires_grad_()
    losses = risk(structure.make(copies, omega=omega), cost, samples=4, reduction="none")
    expected = exact(structure.make(x[None], omega=omega)).sum()
    agrees(losses.detach(), expected.detach())
    agrees(grad(losses.sum(), copies)[0], grad(expected, x)[0])


def agrees(estimates: Tensor, expected: Tensor) -> None:
    """Assert that the mean of estimates (R, …) is within four of its standard errors."""
    error = estimates.std(0) / math.sqrt(len(estimates))
    assert ((estimates.mean(0) - expected).abs() <= 4 * error + 1e-9).all()


@pytest.mark.parametrize("name", ["ScoredChain", "DTW", "Hypergraph"])
def test_second_derivatives_of_samples_are_unbiased(name: str) -> None:
    structure, members = STRUCTURES[name], 4000
    x, z = potentials(*structure.shape, seed=4).requires_grad_(), potentials(*structure.shape, seed=5)
    copies = x.detach().expand(members, *x.shape).clone().requires_grad_()

    def product(loss: Tensor, scores: Tensor) -> Tensor:
        (first,) = grad(loss, scores, create_graph=True)
        return grad((first * z).sum(), scores)[0]

    estimates = product(risk(structure.make(copies), cost, samples=4, reduction="sum"), copies)
    agrees(estimates, product(exact(structure.make(x[None])).sum(), x))


def test_gradient_of_samples_is_the_score_function_with_the_mean_of_the_others() -> None:
    x, drawn = potentials(2, 4, 3).requires_grad_(), []

    def keep(tags: Tensor) -> Tensor:
        drawn.append(tags)
        return changes(tags)

    p = chain(x, lengths=[4, 2])
    loss = risk(p, keep, samples=5, reduction="sum")
    (tags,) = drawn
    costs, log_prob, expected = changes(tags).double(), p.log_prob(tags), torch.zeros(())
    for n in range(5):
        others = [k for k in range(5) if k != n]
        expected = expected + ((costs[n] - costs[others].mean(0)) * log_prob[n]).sum() / 5
    close(loss, costs.mean(0).sum())
    close(grad(loss, x)[0], grad(expected, x)[0])


def test_a_constant_does_not_change_the_gradient_of_samples() -> None:
    x, gradients = potentials(2, 4, 3).requires_grad_(), []
    for constant in (0, 1e6):
        torch.manual_seed(1)
        loss = risk(chain(x), lambda tags, c=constant: changes(tags) + c, samples=3)
        gradients.append(grad(loss, x)[0])
    close(gradients[0], gradients[1], 1e-8)
    assert gradients[0].any()


@pytest.mark.parametrize("options", [{"topk": 100}, {"samples": 4000}])
def test_alignments_that_pairs_do_not_determine(options: dict[str, int]) -> None:
    """Some have no pairs, so that several paths have the same decoded form."""
    x = potentials(1, *STRUCTURES[AMBIGUOUS].shape, seed=4).requires_grad_()
    p = STRUCTURES[AMBIGUOUS].make(x - 1)
    loss = risk(p, lambda pairs: (pairs >= 0).all(-1).sum(-1), **options)
    expected = expected_cost(p, torch.ones_like(x))
    tolerance = 1e-9 if "topk" in options else 0.1
    close(loss, expected, tolerance)
    close(grad(loss, x)[0], grad(expected, x)[0], tolerance)


# --- corners


@pytest.mark.parametrize("options", [{"samples": 3}, {"topk": 3}])
def test_a_point_mass_has_no_gradient(options: dict[str, int]) -> None:
    x = potentials(2, 4, 3).requires_grad_()
    p = chain(x, "hard")
    loss = risk(p, changes, reduction="none", **options)
    close(loss, changes(p.decode()))
    assert not grad(loss.sum(), x)[0].any()


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - {"SequenceAlignment", AMBIGUOUS}))  # gaps are paths there
@pytest.mark.parametrize("options", [{"samples": 3}, {"topk": 3}])
@one_of_each_kind
def test_a_member_without_paths(name: str, options: dict[str, int], omega: bx.Regularizer) -> None:
    structure = STRUCTURES[name]
    x = potentials(2, *structure.shape, seed=3)
    x[1] = structure.absent
    p = structure.make(x.requires_grad_(), omega=omega)

    def nan_without_path(paths: Any) -> Tensor:
        return torch.as_tensor(cost(paths)) + torch.tensor([0, math.nan])

    loss = risk(p, nan_without_path, reduction="none", **options)
    assert loss[0].isfinite()
    assert loss[1] == 0
    (gradient,) = grad(loss.sum(), x, materialize_grads=True)
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@pytest.mark.parametrize("options", [{"samples": 4}, {"topk": 4}])
def test_batches_of_any_shape(options: dict[str, int]) -> None:
    x = potentials(2, 3, 5, 4)
    shapes = []

    def record(tags: Tensor) -> Tensor:
        shapes.append(tags.shape)
        return changes(tags)

    for scores, batch in ((x, (2, 3)), (x[0, 0], ()), (x[:0], (0, 3))):
        assert risk(chain(scores), record, reduction="none", **options).shape == batch
        assert shapes.pop() == (4, *batch, 5)
    each = risk(chain(x), changes, topk=4, reduction="none")
    close(risk(chain(x), changes, topk=4), each.mean())
    close(risk(chain(x), changes, topk=4, reduction="sum"), each.sum())
    close(risk(chain(x), changes, topk=4, reduction="token_mean"), each.mean() / 5)


def test_sequences_of_length_0_do_not_count() -> None:
    p = chain(potentials(3, 4, 2), lengths=[4, 0, 2])

    def edits(tags: Tensor) -> Tensor:
        return 1 + (tags == 1).sum(-1)

    each = risk(p, edits, topk=16, reduction="none")
    assert each[1] == 0
    close(risk(p, edits, topk=16), each.sum() / 2)
    close(risk(p, edits, topk=16, reduction="token_mean"), each.sum() / 6)


@pytest.mark.parametrize("options", [{"samples": 50}, {"topk": 16}])
def test_an_infinite_cost_gives_no_gradient(options: dict[str, int]) -> None:
    x = potentials(2, 4, 2).requires_grad_()

    def forbid(tags: Tensor) -> Tensor:
        costs = changes(tags).double()
        costs[:, 1] = costs[:, 1].masked_fill((tags[:, 1] == 0).any(-1), math.inf)
        return costs

    loss = risk(chain(x), forbid, reduction="none", **options)
    assert loss[0].isfinite()
    assert loss[1] == math.inf
    (gradient,) = grad(loss.sum(), x)
    assert gradient[0].any()
    assert not gradient[1].any()


def test_paths_outside_of_the_support_have_no_cost() -> None:
    x = potentials(4, 2).mul(20).requires_grad_()
    p = chain(x, "sparsemax")
    assert len(p.support_paths()[0]) < 16

    def cost_outside(tags: Tensor) -> Tensor:
        return torch.where((tags < 0).any(-1), math.nan, changes(tags))

    loss = risk(p, cost_outside, topk=16)
    close(loss, (p.log_prob(p.topk_decoded(16)[1]).exp() * changes(p.topk_decoded(16)[1])).sum())
    assert grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("options", [{"samples": 4}, {"topk": 8}])
def test_parameters_of_the_cost_get_a_gradient(options: dict[str, int]) -> None:
    weight, drawn = torch.tensor(2.0, requires_grad=True), []

    def weighted(tags: Tensor) -> Tensor:
        drawn.append(changes(tags))
        return weight * drawn[0]

    p = bx.Chain.from_scores(torch.zeros(3, 2), torch.zeros(2, 2))
    close(grad(risk(p, weighted, **options), weight)[0], drawn[0].float().mean(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{"samples": 4}, {"topk": 4}])
def test_precision(dtype: torch.dtype, options: dict[str, int]) -> None:
    for structure in (STRUCTURES["ScoredChain"], STRUCTURES["Hypergraph"]):
        p = structure.make(potentials(2, *structure.shape).to(dtype))
        assert risk(p, cost, **options).dtype == torch.promote_types(dtype, torch.float32)


def test_only_samples_use_the_random_state() -> None:
    p, losses = chain(potentials(6, 4)), []
    for _ in range(2):
        torch.manual_seed(3)
        with torch.no_grad():
            losses.append(risk(p, changes, samples=5))
    assert losses[0] == losses[1]
    assert not losses[0].requires_grad
    state = torch.get_rng_state()
    risk(p, changes, topk=5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [{"samples": 4}, {"topk": 8}])
def test_transforms(options: dict[str, int]) -> None:
    x = potentials(2, 3, 2)

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return risk(chain(x), changes, **options)

    leaf = x.clone().requires_grad_()
    close(torch.func.grad(loss)(x), grad(loss(leaf), leaf)[0])
    mapped = torch.vmap(lambda x: risk(chain(x), changes, **options), randomness="different")(x)
    assert mapped.shape == (2,)
    if "topk" in options:
        close(mapped.mean(), loss(x))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"samples": 4}, {"topk": 8}])
def test_compile(options: dict[str, int]) -> None:
    x = potentials(2, 3, 2).requires_grad_()
    compiled = torch.compile(lambda x: risk(chain(x), changes, **options), fullgraph=True, backend="aot_eager")
    loss = compiled(x)
    assert grad(loss, x)[0].isfinite().all()
    if "topk" in options:
        close(loss, risk(chain(x), changes, **options))


@bx.program("item, ")
def take(value, fee):
    best = 0.0
    for i in range(len(value)):
        best = bx.max(best, best + value[i] - fee)
    return best


@pytest.mark.parametrize("options", [{"topk": 10}, {"samples": 3000}])
def test_problems_of_different_sizes(options: dict[str, int]) -> None:
    values = [potentials(n, seed=n + k).requires_grad_() for k, n in enumerate((3, 2, 3, 1))]
    fee = potentials(1)[0]
    loss = risk(take(values, fee), cost, reduction="none", **options)
    expected = torch.cat([exact(take(v[None], fee)) for v in values])
    tolerance = 1e-9 if "topk" in options else 0.1
    close(loss, expected, tolerance)
    for own, other in zip(*(grad(r.sum(), values) for r in (loss, expected)), strict=True):
        close(own, other, tolerance)
    if "topk" in options:
        close(risk(take(values, fee), cost, **options), loss.mean())


CHAIN = chain(torch.zeros(2, 3, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: risk(torch.zeros(3), changes, samples=2), "p must be a distribution such as bx.Chain, got Tensor"),
        (lambda: risk(CHAIN, changes), "pass either samples or topk, got samples=None and topk=None"),
        (lambda: risk(CHAIN, changes, samples=2, topk=2), "either samples or topk, got samples=2 and topk=2"),
        (lambda: risk(CHAIN, changes, samples=1), "samples must be an integer of at least 2, got 1"),
        (lambda: risk(CHAIN, changes, samples=2.5), "samples must be an integer of at least 2, got 2.5"),
        (lambda: risk(CHAIN, changes, topk=0), "topk must be an integer of at least 1, got 0"),
        (
            lambda: risk(CHAIN, torch.zeros(2, 3, 2), topk=1),
            "got a Tensor: for a cost of each entry, use expected_cost",
        ),
        (lambda: risk(CHAIN, "edits", topk=1), "cost must be a function of paths, got str"),
        (
            lambda: risk(CHAIN, lambda tags: tags, topk=4),
            r"of shape \(4, 2\), with a cost of each path, got \(4, 2, 3\)",
        ),
        (lambda: risk(CHAIN, lambda tags: 1.0, samples=4), r"shape \(4, 2\), with a cost of each path, got \(\)"),
        (lambda: risk(CHAIN, lambda tags: changes(tags) * math.nan, topk=1), r"numbers or \+inf, got nan at \(0, 0\)"),
        (lambda: risk(CHAIN, lambda tags: -math.inf * (1 + changes(tags)), topk=1), r"\+inf, got -inf at \(0, 0\)"),
        (lambda: risk(CHAIN, changes, topk=1, reduction="max"), "reduction must be one of"),
        (lambda: risk(take([torch.zeros(2)], torch.zeros(())), cost, topk=1, reduction="token_mean"), "must be one of"),
        (
            lambda: risk(bx.DTW(torch.zeros(2, 2)), cost, topk=1, reduction="token_mean"),
            "is only for chains, got a DTW",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "message"), [("n_samples", "use samples="), ("k", "use topk="), ("target", "its arguments are")]
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument '{name}': {message}"):
        risk(CHAIN, changes, **{name: 3})
