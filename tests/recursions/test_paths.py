"""Distributions over derivations: counts and edges as targets, lines of edges, forbidden scores, no derivation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import bellmax as bx

NAN = math.nan


@bx.program("item")
def unbounded(value, *, sizes, room):
    best = [0.0]
    for r in range(1, room + 1):
        best.append(bx.max(best[r - 1], *(best[r - s] + value[i] for i, s in enumerate(sizes) if s <= r)))
    return best[room]


@bx.program("i j, ")
def edit(change, gap):
    rows, columns = change.shape
    row = [gap * j for j in range(columns + 1)]
    for i in range(rows):
        new = [row[0] + gap]
        for j in range(columns):
            new.append(bx.min(row[j] + change[i, j], row[j + 1] + gap, new[j] + gap))
        row = new
    return row[columns]


@bx.program("item")
def pairs(value):
    """Choose two values, or one of them twice for a fee of 0.5."""
    best = bx.max(value)
    return bx.max(best + best - 0.5, value[0] - value[1])


def _costs(*batch):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(*batch, 3, 4, generator=generator, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)


VALUES = torch.tensor([1.0, 1.4, 2.6], dtype=torch.float64)


def solve(values=VALUES, **options):
    return unbounded(values, sizes=(2, 3, 5), room=12, **options)


# --- targets


def test_losses_of_counts_equal_losses_of_edges(omega):
    p = solve(omega=omega)
    _, derivations = p.topk_decoded(40)
    for derivation in derivations[::7]:
        counts = p.encode(derivation)
        for loss in (
            bx.losses.surrogate,
            bx.losses.structured_perceptron,
            bx.losses.relaxed,
            bx.losses.structured_hinge,
        ):
            assert torch.allclose(loss(p, counts), loss(p, derivation)), (loss, counts)


def test_the_gradient_of_the_surrogate_loss_is_expected_minus_target_counts(omega):
    values = VALUES.clone().requires_grad_()
    p = solve(values, omega=omega)
    for counts in ([3.0, 2.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
        target = torch.tensor(counts, dtype=torch.float64)
        loss = bx.losses.surrogate(p, target)
        assert loss >= 0
        (gradient,) = torch.autograd.grad(loss, values)
        assert torch.allclose(gradient, p.expected_path - target)


def test_losses_of_counts_under_vmap_and_compiled():
    values = torch.stack((VALUES, VALUES / 2, -VALUES))
    counts = torch.tensor([[3.0, 2.0, 0.0], [0.0, 0.0, 2.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
    expected = bx.losses.surrogate(solve(values), counts, reduction="none")

    def loss(v, t):
        return bx.losses.surrogate(solve(v), t)

    assert torch.allclose(torch.func.vmap(loss)(values, counts), expected)
    assert torch.allclose(torch.compile(loss)(values[0], counts[0]), expected[0])


def test_of_several_derivations_with_the_same_counts_the_loss_takes_the_one_with_the_best_constant():
    for choose, sign in ((bx.max, 1), (bx.min, -1)):
        p = bx.program("i")(lambda value, c=choose: c(value[0] + 1.0, value[0] + 3.0, value[1]))(torch.zeros(2))
        best = 3.0 if sign > 0 else 1.0
        assert torch.allclose(bx.losses.surrogate(p, torch.tensor([1.0, 0.0])), sign * (p.value - best))


def test_counts_of_every_derivation_are_found_and_no_others():
    p = solve()
    possible = {tuple(event.tolist()) for event in p.enumerate_support()}
    assert len(possible) > 20
    for counts in torch.cartesian_prod(*(torch.arange(n) for n in (8, 6, 4))).double():
        assert bool(p.support.check(counts)) == (tuple(counts.tolist()) in possible), counts


def test_counts_of_entries_that_are_added_and_subtracted():
    """A trader who sells and buys on the same day has the count 0 of its price."""

    @bx.program("day")
    def trade(price):
        cash, share = 0.0, -math.inf
        for p in price:
            cash = bx.max(cash, share + p)
            share = bx.max(share, cash - p)
        return cash

    p = trade(torch.tensor([1.0, 3.0, 2.0, 5.0], dtype=torch.float64))
    _, derivations = p.topk_decoded(int(p.num_paths))
    for derivation in derivations:
        assert torch.allclose(bx.losses.surrogate(p, p.counts(derivation)), bx.losses.surrogate(p, derivation))
    q = bx.program("i")(lambda v: bx.max(v[0] - v[1] + bx.max(v[1], v[2]), v[3]))(torch.rand(4, dtype=torch.float64))
    for derivation in q.topk_decoded(3)[1]:
        assert torch.allclose(bx.losses.surrogate(q, q.counts(derivation)), bx.losses.surrogate(q, derivation))
    with pytest.raises(ValueError, match="no derivation with these counts"):
        bx.losses.surrogate(q, torch.tensor([0.0, -1.0, 1.0, 0.0]))


def test_counts_with_coefficients_and_constants():
    """Choosing i and j in either order has the same counts, and the same score."""
    p = pairs(VALUES)
    for derivation in p.topk_decoded(int(p.num_paths))[1]:
        counts = p.encode(derivation)
        assert torch.allclose(bx.losses.surrogate(p, counts), bx.losses.surrogate(p, derivation))


def test_several_scores_need_a_mapping_of_counts():
    change, gap = _costs(2)
    p = edit(change, gap, omega="entmax")
    derivations = p.decode()
    events = p.encode(derivations)
    gaps = 7 - 2 * events.sum((-1, -2))
    target = {"change": events, "gap": gaps}
    losses = bx.losses.surrogate(p, target, reduction="none")
    assert torch.allclose(losses, bx.losses.surrogate(p, derivations, reduction="none"))
    with pytest.raises(ValueError, match="must be a mapping with the keys change, gap, or nested lists"):
        bx.losses.surrogate(p, events)
    with pytest.raises(ValueError, match="got the keys change"):
        bx.losses.surrogate(p, {"change": events})
    with pytest.raises(ValueError, match=r"target\['gap'\] must have shape \(2,\)"):
        bx.losses.surrogate(p, {"change": events, "gap": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"target\[0\] must hold the counts of a derivation of edit"):
        bx.losses.surrogate(p, {"change": events, "gap": gaps + 1})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([9.0, 0.0, 0.0]), "must hold the counts of a derivation of unbounded, but no derivation with"),
        (torch.tensor([0.5, 0.0, 0.0]), "must hold the counts of a derivation"),
        (torch.tensor([NAN, 0.0, 0.0]), "must hold finite counts, got nan at"),
        (torch.zeros(4), r"must have shape \(3,\), got \(4,\)"),
        ([0, 1], "is not a derivation of unbounded: pass edge numbers, such as p.decode()"),
        ([10**6], "must be the number of an edge"),
        ("abc", "target must be a tensor"),
    ],
)
def test_wrong_targets(target, message):
    with pytest.raises(ValueError, match=message):
        bx.losses.surrogate(solve(), target)


def test_log_prob_and_the_likelihood_under_other_omegas_need_edges():
    p = solve(omega="entmax")
    with pytest.raises(ValueError, match="several derivations can have the same counts"):
        p.log_prob(p.best_path())
    with pytest.raises(ValueError, match="several derivations can have the same counts"):
        bx.losses.path_nll(p, p.best_path())
    assert torch.allclose(bx.losses.path_nll(p, p.decode()), -p.log_prob(p.decode()))


# --- derivations


def test_edges_name_the_line_that_made_them():
    p = edit(*_costs(), omega="hard")
    edges = p.derivation_edges(p.decode())
    lines = Path(__file__).read_text().splitlines()
    assert {lines[edge.line - 1].strip() for edge in edges} == {
        "new.append(bx.min(row[j] + change[i, j], row[j + 1] + gap, new[j] + gap))"
    }
    assert all(edge.source == lines[edge.line - 1].strip() for edge in edges)
    total = sum(
        sum(c * (_costs()[0][index] if name == "change" else _costs()[1]) for name, index, c in edge.scores)
        for edge in edges
    )
    assert torch.allclose(total, p.value)
    gap_edge = next(edge for edge in edges if edge.option > 0)
    assert "gap" in gap_edge.weight
    nested = edit(*_costs(2)).sample_decoded((3,))
    assert len(edit(*_costs(2)).derivation_edges(nested)) == 3
    with pytest.raises(ValueError, match="edge numbers below"):
        p.derivation_edges([p.hypergraph.num_edges])
    with pytest.raises(ValueError, match="must be a list of edge numbers"):
        p.derivation_edges(torch.zeros(3))


def test_an_edge_of_the_returned_sum_names_the_return_statement_and_its_constant():
    @bx.program("item")
    def shifted(value):
        best = bx.max(value)
        return best + 2.5

    p = shifted(VALUES)
    root, choice = p.derivation_edges(p.decode())
    assert (root.option, root.scores, root.constant, root.weight) == (0, (), 2.5, "2.5")
    assert root.source == "return best + 2.5"
    assert choice.source == "best = bx.max(value)"
    assert (root.node, root.tails, choice.node, choice.tails) == (1, (0,), 0, ())


def test_options_keep_their_position_if_others_are_left_out():
    @bx.program("item")
    def some(value):
        unused = bx.max(value)
        best = bx.max(-math.inf, value[0], bx.max([]), value[1], -math.inf, value[2])
        return bx.max(best, value[0], unused if len(value) > 9 else 0.0)

    p = some(VALUES)
    edges = p.derivation_edges(p.decode())
    assert [(edge.option, edge.weight) for edge in edges] == [(0, "0"), (5, "value[2]")]


def test_counts_of_derivations():
    change, gap = _costs(2)
    p = edit(change, gap)
    derivations = p.sample_decoded((3,))
    counts = p.counts(derivations)
    assert torch.equal(counts["change"], p.encode(derivations))
    assert torch.equal(counts["gap"], 7 - 2 * counts["change"].sum((-1, -2)))
    target = p.counts(p.decode())
    assert torch.allclose(bx.losses.surrogate(p, target), bx.losses.surrogate(p, p.decode()))
    with pytest.raises(ValueError, match="is not a derivation of edit"):
        edit(*_costs()).counts([0])


def test_counts_of_a_score_without_dimensions():
    p = bx.program("item, ")(lambda value, fee: bx.max(0.0, value[0] - fee, value[1] - fee))(VALUES, torch.ones(()))
    assert p.counts(p.decode())["fee"] == -1
    assert torch.allclose(bx.losses.crf_nll(p, p.counts(p.decode())), -p.log_prob(p.decode()))


def test_constants_are_no_scores_and_scores_may_have_any_name():
    p = bx.program("item, ")(lambda _worth, fee: bx.max(0.5, _worth[0] - fee))(VALUES, torch.ones(()))
    z = {"_worth": VALUES, "fee": torch.ones(())}
    for mapping in (p.scores, p.gradient, p.hessian_product(z), p.counts(p.decode())):
        assert list(mapping) == ["_worth", "fee"]
    with pytest.raises(ValueError, match=r"names of scores, out of _worth, fee, got '1'$"):
        p.directional_derivative({"1": torch.ones(1)})


def test_a_program_without_a_returned_node_pays_no_omega_for_it():
    for omega in ("l2", "negentropy", "sparsemax"):
        bare = bx.program("item")(lambda value: bx.max(value))(VALUES, omega=omega)
        shifted = bx.program("item")(lambda value: bx.max(value) + 1.0)(VALUES, omega=omega)
        assert torch.allclose(shifted.value, bare.value + 1)
        assert bx.program("item")(lambda value: value[0] + 1.0)(VALUES, omega=omega).value == VALUES[0] + 1


def test_sampled_and_best_derivations_have_their_scores():
    p = edit(*_costs(2), gamma=0.3)
    scores, derivations = p.topk_decoded(5)
    for member in range(2):
        for score, derivation in zip(scores[member], derivations[member], strict=True):
            edges = p.derivation_edges(derivation)
            costs = _costs(2)[0][member], _costs(2)[1]
            total = sum(c * costs[name == "gap"][index] for edge in edges for name, index, c in edge.scores)
            assert torch.allclose(total, score)
    assert torch.allclose(p.topk(5)[0], scores)
    torch.manual_seed(0)
    events = p.sample((4000,))
    assert (events.mean(0) - p.expected_path).abs().max() < 0.04


def test_most_accurate_and_node_values():
    p = solve()
    with pytest.raises(ValueError, match="a path can use a unit twice"):
        pairs(VALUES).most_accurate()
    assert bool(p.support.check(p.encode(p.most_accurate())))
    values = p.node_values
    assert values.shape == (p.hypergraph.num_nodes,)
    assert torch.allclose(values[-1], p.value)
    hard = solve(omega="hard").node_values
    assert torch.equal(hard, hard.sort().values)  # nodes are in the order of the program: more and more room


# --- forbidden scores, and programs without derivations


def test_forbidden_scores_remove_options():
    p = solve(torch.tensor([-math.inf, 1.4, 2.6], dtype=torch.float64))
    q = unbounded(torch.tensor([1.4, 2.6], dtype=torch.float64), sizes=(3, 5), room=12)
    assert torch.allclose(p.value, q.value)
    assert p.num_paths == q.num_paths
    assert p.expected_path[0] == 0
    blocked = edit(torch.full((3, 4), math.inf), torch.tensor(0.4))
    assert torch.allclose(edit(torch.full((3, 4), math.inf), torch.tensor(0.4), omega="hard").value, torch.tensor(2.8))
    assert not blocked.expected_path.any()


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_scores_that_are_not_allowed(value):
    with pytest.raises(ValueError, match=r"value must be finite or -inf, got (nan|inf) at event index \(1,\)"):
        _ = solve(torch.tensor([1.0, value, 2.0])).value


def test_costs_that_are_not_allowed_are_shown_as_they_were_passed():
    change, gap = _costs()
    change[1, 2] = -math.inf
    with pytest.raises(ValueError, match=r"change must be finite or \+inf, got -inf at event index \(1, 2\)"):
        _ = edit(change, gap).value
    with pytest.raises(ValueError, match=r"weights must be finite or \+inf, got -inf"):
        _ = bx.DAG([(0, 1)]).paths(torch.tensor([-math.inf]), minimize=True).value
    with pytest.raises(ValueError, match="cost must be a tensor shaped like the first score, change, got a mapping"):
        bx.losses.expected_cost(edit(*_costs()), {"change": change})


def test_a_forbidden_score_that_is_subtracted_is_refused():
    with pytest.raises(ValueError, match="must be finite where the program subtracts it"):
        _ = pairs(torch.tensor([0.0, -math.inf, 0.0])).value


def test_unused_scores_may_be_anything():
    p = bx.program("item")(lambda value: bx.max(value[0], value[1]))(torch.tensor([1.0, 2.0, NAN]))
    assert p.value.isfinite()
    assert p.expected_path[2] == 0


@pytest.mark.parametrize("sense", [1, -1])
def test_programs_without_derivations(sense, omega):
    choose = bx.max if sense > 0 else bx.min
    program = bx.program("item")(lambda value: choose([]) + value[0])
    p = program(VALUES.clone().requires_grad_(), omega=omega)
    assert p.value == -sense * math.inf
    assert p.decode() == []
    assert p.num_paths == 0
    assert p.entropy() == 0
    assert not p.expected_path.any()
    assert not p.sample((2,)).any()
    assert (p.topk(2)[0] == -sense * math.inf).all()
    (gradient,) = torch.autograd.grad(p.value, p.scores["value"])
    assert not gradient.any()


def test_programs_that_return_numbers():
    for result in (3, 0.0, -1.5):
        p = bx.program("item")(lambda value, r=result: r)(VALUES)
        assert torch.allclose(p.value, torch.tensor(float(result), dtype=torch.float64))
        assert p.num_paths == 1
        assert not p.expected_path.any()


def test_empty_inputs():
    empty = unbounded(torch.zeros(0), sizes=(), room=3)
    assert empty.value == 0
    assert empty.expected_path.shape == (0,)
    assert edit(torch.zeros(0, 3), torch.tensor(0.5)).value == 1.5


def test_kl_divergence_and_entropy():
    p, q = solve(), solve(VALUES / 2)
    kl = torch.distributions.kl_divergence(p, q)
    _, derivations = p.topk_decoded(int(p.num_paths))
    log_p = torch.stack([p.log_prob(d) for d in derivations])
    log_q = torch.stack([q.log_prob(d) for d in derivations])
    assert torch.allclose(log_p.exp().sum(), torch.ones((), dtype=torch.float64))
    assert torch.allclose(kl, (log_p.exp() * (log_p - log_q)).sum())
    assert torch.allclose(p.entropy(), -(log_p.exp() * log_p).sum())
    with pytest.raises(ValueError, match="paths of the same graph"):
        torch.distributions.kl_divergence(p, unbounded(VALUES, sizes=(2, 3, 4), room=12))


def test_to_expand_and_index():
    p = solve(torch.stack((VALUES, VALUES / 2)))
    assert p[1].value == p.value[1]
    assert p.to(torch.float32).value.dtype == torch.float32
    assert p.expand((3, 2)).value.shape == (3, 2)
    assert p[0].expand((4,)).log_prob(p[0].decode()).shape == (4,)
