"""The decoded form of every structure: answers are valid inputs, and equal to an enumeration of all paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.decoded import ENUMERATE, as_tuples, units
from support.problems import for_derivatives, potentials
from support.structures import HYPER, LABELS, STRUCTURES
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L
from bellmax import losses

UNIQUE = [name for name in STRUCTURES if name not in ("Lattice", "SequenceAlignment, semiglobal", "Automaton")]
"""Structures whose events determine the path."""


def make(name: str, omega: bx.Regularizer | str = "negentropy", *batch: int, seed: int = 0) -> bx.PathDistribution:
    structure = STRUCTURES[name]
    x = potentials(*batch, *structure.shape, seed=seed)
    return structure.make(x, omega=omega)


# --- against an enumeration of all paths


@pytest.mark.parametrize("name", list(ENUMERATE))
def test_topk_decoded_equals_enumeration(name: str, backend: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(*structure.shape, seed=3)
    paths = ENUMERATE[name](x.tolist())
    p = structure.make(x)
    scores, decoded = p.topk_decoded(len(paths) + 1)
    assert scores[-1] == structure.absent
    assert as_tuples(decoded[-1]) == () or set(as_tuples(decoded[-1])) == {0}
    found = {as_tuples(path): float(score) for path, score in zip(decoded, scores[:-1], strict=False)}
    assert found == pytest.approx(paths)
    assert (structure.sense * scores[:-1].diff() <= 0).all()


@pytest.mark.parametrize("name", list(ENUMERATE))
def test_probabilities_of_all_paths_sum_to_one(name: str, omega: bx.Regularizer, backend: str) -> None:
    p = make(name, omega, seed=4)
    _, decoded = p.topk_decoded(int(p.num_paths))
    log_prob = p.log_prob(decoded)
    assert float(log_prob.exp().sum()) == pytest.approx(1)
    if name in UNIQUE and name != "Hypergraph":
        assert torch.allclose(log_prob, p.log_prob(p.encode(decoded)))


def expected_distance(name: str, path: Any, paths: list[Any], probabilities: list[float]) -> float:
    return sum(q * len(units(name, path) ^ units(name, other)) for other, q in zip(paths, probabilities, strict=True))


@pytest.mark.parametrize("name", [name for name in ENUMERATE if name != "Hypergraph"])
def test_most_accurate_equals_enumeration(name: str, omega: bx.Regularizer, backend: str) -> None:
    p = make(name, omega, seed=5)
    _, decoded = p.topk_decoded(int(p.num_paths))
    paths, probabilities = [as_tuples(path) for path in decoded], p.log_prob(decoded).exp().tolist()
    best = min(expected_distance(name, path, paths, probabilities) for path in paths)
    answer = as_tuples(p.most_accurate())
    assert answer in paths
    assert expected_distance(name, answer, paths, probabilities) == pytest.approx(best)


def test_most_accurate_differs_from_the_best_path() -> None:
    differs = sum(
        not torch.equal(p.most_accurate(), p.decode())
        for p in (bx.DTW(potentials(6, 6, seed=seed).abs(), gamma=3.0) for seed in range(20))
    )
    assert differs >= 5


def test_most_accurate_tags_are_the_most_probable() -> None:
    p = bx.Chain.from_scores(potentials(4, 6, 3), potentials(3, 3, seed=1), lengths=[6, 3, 1, 0])
    expected = p.marginals.argmax(-1).masked_fill(torch.arange(6) >= p.lengths.unsqueeze(-1), -1)
    assert torch.equal(p.most_accurate(), expected)


def test_most_accurate_tags_obey_constraints() -> None:
    """The most probable tags 0, 1 are forbidden in this order."""
    transitions = torch.zeros(3, 3, dtype=torch.float64)
    transitions[1, 0] = -torch.inf
    emissions = torch.tensor([[1.0, 0.0, 0.9], [0.0, 1.0, 0.9]], dtype=torch.float64)
    p = bx.Chain.from_scores(emissions, transitions)
    tags = p.most_accurate()
    assert p.log_prob(tags).isfinite()
    assert tags.tolist() != [0, 1]


def test_most_accurate_of_a_hypergraph() -> None:
    with pytest.raises(ValueError, match="a path can use a unit twice"):
        HYPER.derivations(torch.zeros(5)).most_accurate()
    words = [("a", ()), ("b", ()), ("c", ())]
    pairs = [("ab", ("a", "b")), ("bc", ("b", "c"))]
    h = bx.Hypergraph([*words, *pairs, ("abc", ("ab", "c")), ("abc", ("a", "bc"))])
    p = h.derivations(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.5, 0.0, 0.0]))
    assert p.most_accurate() == p.decode() == [6, 0, 4, 1, 2]


def test_most_accurate_walk_of_shared_entries() -> None:
    """A path can read an entry of the matrix twice, but the units are rows of the walk, which it has once."""
    lattice = bx.Lattice([bx.Move(1, 0, score=L.pair("m", "a", "b")), bx.Move(0, 1, score=L.pair("m", "b", "a"))])
    labels = {"a": torch.tensor([0, 1, 1]), "b": torch.tensor([1, 0, 1])}
    p = lattice.paths({"m": potentials(2, 2), **labels}, grid=(3, 3))
    _, walks = p.topk_decoded(int(p.num_paths))
    paths, probabilities = [as_tuples(walk) for walk in walks], p.log_prob(walks).exp().tolist()
    distances = {path: expected_distance("Lattice", path, paths, probabilities) for path in paths}
    assert len(distances) == 6
    assert distances[as_tuples(p.most_accurate())] == pytest.approx(min(distances.values()))


# --- answers are inputs


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_decoded_paths_are_inputs(name: str, omega: bx.Regularizer, backend: str) -> None:
    p = make(name, omega, 3, seed=6)
    decoded = p.decode()
    assert p.support.check(decoded).all()
    assert p.support.check(p.encode(decoded)).all()
    assert torch.equal(p.encode(decoded), p.best_path())
    log_prob = p.log_prob(decoded)
    assert log_prob.shape == (3,)
    assert (log_prob <= 1e-9).all()
    surrogate = losses.surrogate(p, decoded, reduction="none")
    assert surrogate.shape == (3,)
    assert (surrogate >= 0).all()
    assert torch.allclose(losses.path_nll(p, decoded, reduction="none"), -log_prob)
    assert torch.allclose(losses.structured_perceptron(p, decoded, reduction="none"), surrogate.new_zeros(3), atol=1e-9)
    if name in UNIQUE:
        event = p.encode(decoded) > 0
        assert torch.allclose(surrogate, losses.surrogate(p, event, reduction="none"), atol=1e-9)
        if name != "Hypergraph":
            assert torch.allclose(losses.path_nll(p, event, reduction="none"), -log_prob)


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_samples_are_inputs(name: str, omega: bx.Regularizer, backend: str) -> None:
    p = make(name, omega, 2, seed=7)
    torch.manual_seed(0)
    samples = p.sample_decoded((4, 3))
    torch.manual_seed(0)
    events = p.sample((4, 3))
    assert p.support.check(samples).shape == (4, 3, 2)
    assert p.support.check(samples).all()
    assert torch.equal(p.encode(samples), events)
    if name == "SequenceAlignment, semiglobal":
        return
    log_prob = p.log_prob(samples)
    assert log_prob.shape == (4, 3, 2)
    assert log_prob.isfinite().all()
    if name in UNIQUE:
        assert torch.allclose(log_prob, p.log_prob(events))


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_costs_are_about_decoded_targets(name: str) -> None:
    p = make(name, "sparsemax", 2, seed=8)
    target = p.sample_decoded()
    cost = losses.hamming_cost(p, target)
    assert cost.shape[0] == 2
    hinge = losses.structured_hinge(p, target, reduction="none")
    assert (hinge >= losses.structured_perceptron(p, target, reduction="none") - 1e-9).all()
    assert losses.relaxed(p, target).isfinite()
    if name in UNIQUE:
        assert torch.equal(cost, losses.hamming_cost(p, p.encode(target) > 0))


def test_semiglobal_samples_have_log_probabilities(omega: bx.Regularizer) -> None:
    """Pairs determine the path if they list a row and a column. Walks always do."""
    p = make("SequenceAlignment, semiglobal", omega, seed=9)
    pairs, walks = [], []
    for _ in range(40):
        state = torch.get_rng_state()
        pairs.append(p.sample_decoded())
        torch.set_rng_state(state)
        walks.append(p.sample_walks())
    determined = 0
    for pair, walk in zip(pairs, walks, strict=True):
        if bool((pair >= 0).any(0).all()):
            assert torch.allclose(p.log_prob(pair), p.log_prob(walk))
            determined += 1
        else:
            with pytest.raises(ValueError, match="path must list a row and a column"):
                p.log_prob(pair)
    assert determined >= 20 or isinstance(omega, bx.Hard)


def test_semiglobal_walks_sum_to_one() -> None:
    """Enough samples have every path of two rows and two columns."""
    p = bx.SequenceAlignment(potentials(2, 2), gap_open=-0.5, gap_extend=-0.2, mode="semiglobal")
    walks = p.sample_walks((5000,)).unique(dim=0)
    assert len(walks) == int(p.num_paths)
    assert float(p.log_prob(walks).exp().sum()) == pytest.approx(1)


def test_losses_of_semiglobal_alignments_without_pairs() -> None:
    """The best alignment has no pair. Its score does not depend on where the free gaps are."""
    p = bx.SequenceAlignment(torch.full((2, 2), -50.0), gap_open=-1.0, mode="semiglobal")
    decoded = p.decode()
    assert (decoded == -1).all()
    assert losses.structured_perceptron(p, decoded) == 0
    assert (losses.hamming_cost(p, decoded) == 1).all()
    sparse = bx.SequenceAlignment(torch.full((2, 2), -50.0), gap_open=-1.0, mode="semiglobal", omega="sparsemax")
    with pytest.raises(ValueError, match="target must list a row and a column"):
        losses.path_nll(sparse, decoded)


# --- batches with lengths

LENGTHS: dict[str, Any] = {
    "Chain": (lambda n, **o: bx.Chain(potentials(2, 4, 3, 3), lengths=[4, n], **o), [0, 1, 3]),
    "ScoredChain": (
        lambda n, **o: bx.Chain.from_scores(potentials(2, 4, 3), potentials(3, 3), lengths=[4, n], **o),
        [0, 1, 3],
    ),
    "Chain, holes": (
        lambda n, **o: bx.Chain(
            potentials(2, 4, 3, 3), mask=torch.tensor([[True, n > 1, False, n > 2], [True] * 4]), **o
        ),
        [1, 2, 3],
    ),
    "DTW": (lambda n, **o: bx.DTW(potentials(2, 4, 3), lengths=([4, n], [3, 2]), **o), [1, 2, 3]),
    "CTC": (
        lambda n, **o: bx.CTC(potentials(2, 6, 3), torch.stack([LABELS, LABELS]), lengths=([6, 4], [3, n]), **o),
        [0, 1, 2],
    ),
    "MonotonicAlignment": (
        lambda n, **o: bx.MonotonicAlignment(potentials(2, 5, 3), lengths=([5, 3], [3, n]), **o),
        [1, 2, 3],
    ),
    "SequenceAlignment": (
        lambda n, **o: bx.SequenceAlignment(potentials(2, 4, 3), gap_open=-1.0, lengths=([4, n], [3, 2]), **o),
        [0, 1, 3],
    ),
    "SequenceAlignment, local": (
        lambda n, **o: bx.SequenceAlignment(
            potentials(2, 4, 3), gap_open=-1.0, mode="local", lengths=([4, n], [3, 2]), **o
        ),
        [1, 3],
    ),
    "Transducer": (
        lambda n, **o: bx.Transducer(potentials(2, 4, 3), potentials(2, 4, 2, seed=1), lengths=([4, 2], [2, n]), **o),
        [0, 1, 2],
    ),
    "SemiMarkov": (
        lambda n, **o: bx.SemiMarkov(potentials(2, 4, 2, 2), potentials(2, 2, seed=1), lengths=[4, n], **o),
        [1, 3],
    ),
    "ScoredSemiMarkov": (
        lambda n, **o: bx.SemiMarkov.from_scores(
            potentials(2, 4, 2), potentials(3, 2), potentials(2, 2), lengths=[4, n], **o
        ),
        [1, 3],
    ),
    "SpanTrees": (lambda n, **o: bx.SpanTrees(potentials(2, 4, 4), lengths=[4, n], **o), [1, 2, 3]),
    "SpanTrees, labels": (
        lambda n, **o: bx.SpanTrees(potentials(2, 4, 4, 2), labels=True, lengths=[4, n], **o),
        [1, 3],
    ),
    "DependencyTrees": (lambda n, **o: bx.DependencyTrees(potentials(2, 4, 4), lengths=[3, n], **o), [1, 2]),
}
"""Batches of two members, the second (or the mask of the first) of length n, and some lengths."""


@for_derivatives
@pytest.mark.parametrize("name", list(LENGTHS))
def test_batches_with_lengths(name: str, omega: bx.Regularizer, backend: str) -> None:
    build, lengths = LENGTHS[name]
    for n in lengths:
        p = build(n, omega=omega)
        for decoded in (p.decode(), p.most_accurate(), p.sample_decoded((3,)), p.topk_decoded(1)[1].movedim(1, 0)):
            assert p.support.check(decoded).all()
            assert torch.allclose(p.log_prob(decoded), p.log_prob(p.encode(decoded)))
        assert p.log_prob(p.sample_decoded((3,))).isfinite().all()
        assert losses.surrogate(p, p.decode()).isfinite()
        member = p[1]
        assert torch.equal(member.decode(), p.decode()[1])
        assert torch.allclose(member.log_prob(member.decode()), p.log_prob(p.decode())[1])


@pytest.mark.parametrize("name", list(LENGTHS))
def test_a_path_of_another_length_is_no_path(name: str) -> None:
    """The best path of the whole first member is not a path of the second, which is shorter."""
    build, lengths = LENGTHS[name]
    p = build(lengths[-1])
    other = p.decode()[:1].expand(2, *p.decode().shape[1:])
    if "Chain" in name or name == "DependencyTrees":
        return  # states and heads in the padding are ignored
    if name == "CTC":
        other = torch.tensor([[1, 2, 0, 2, 0, 0], [1, 0, 1, 0, 2, 2]])
    if name == "SequenceAlignment, local":
        other = torch.tensor([[[0, 0]], [[3, 2]]])
    assert p.support.check(other).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"^path\[1"):
        p.log_prob(other)


# --- no path, empty batches, one path


NEEDS_NO_ENTRY = {"SequenceAlignment", "SequenceAlignment, semiglobal"}
"""Structures that have a path without any entry of x: all elements are in gaps."""


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - NEEDS_NO_ENTRY))
def test_no_path(name: str) -> None:
    structure = STRUCTURES[name]
    p = structure.make(torch.full(structure.shape, structure.absent, dtype=torch.float64))
    assert p.value == structure.absent
    decoded = p.decode()
    assert as_tuples(decoded) == () or set(as_tuples(decoded)) == {0}
    assert not p.support.check(decoded).any()
    with pytest.raises(ValueError, match="path"):
        p.log_prob(decoded)


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_empty_batches(name: str) -> None:
    p = make(name, "negentropy", 0)
    decoded = p.decode()
    assert len(decoded) == 0
    assert p.log_prob(decoded).shape == (0,)
    assert p.encode(decoded).shape == (0, *p.event_shape)


OTHER_EVENTS = {"ScoredChain", "ScoredChain, transitions", "ScoredSemiMarkov", "Transducer"}
"""Structures whose events do not have the shape of x."""


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - OTHER_EVENTS))
def test_forbidden_paths_have_probability_zero(name: str) -> None:
    """A path through an entry of −∞ is a path of the graph with probability 0, and no loss takes it."""
    structure = STRUCTURES[name]
    x = potentials(*structure.shape, seed=12)
    p = structure.make(x)
    decoded, used = p.decode(), p.best_path() != 0
    assert used.any()
    closed = structure.make(x.masked_fill(used, structure.absent))
    assert closed.support.check(decoded).all()
    assert closed.log_prob(decoded) == -torch.inf
    with pytest.raises(ValueError, match="target"):
        losses.surrogate(closed, decoded)


# --- gradients and modes


@pytest.mark.parametrize("name", list(STRUCTURES))
@pytest.mark.parametrize("omega", ["negentropy", "sparsemax"])
def test_gradients_of_log_probabilities(name: str, omega: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(*structure.shape, seed=12, requires_grad=True)
    p = structure.make(x.detach(), omega=omega, gamma=2.0)
    decoded = p.decode()
    if p.log_prob(decoded) == -torch.inf:
        return
    assert torch.autograd.gradcheck(lambda x: structure.make(x, omega=omega, gamma=2.0).log_prob(decoded), x)


@pytest.mark.parametrize("name", ["Chain", "ScoredChain", "CTC", "DTW", "DAG", "TreeModel", "SpanTrees"])
def test_log_prob_of_decoded_paths_under_torch_func(name: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(4, *structure.shape, seed=13)
    decoded = structure.make(x).decode()
    expected = structure.make(x).log_prob(decoded)
    mapped = torch.func.vmap(lambda x, d: structure.make(x).log_prob(d))(x, decoded)
    assert torch.allclose(mapped, expected)
    gradient = torch.func.grad(lambda x: structure.make(x).log_prob(decoded).sum())(x)
    x.requires_grad_()
    (usual,) = torch.autograd.grad(structure.make(x).log_prob(decoded).sum(), x)
    assert torch.allclose(gradient, usual)


@pytest.mark.parametrize("name", ["Chain", "DTW", "CTC", "MonotonicAlignment", "SpanTrees", "TreeModel", "DAG"])
def test_compile_of_losses(name: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(2, *structure.shape, seed=14)
    target = structure.make(potentials(2, *structure.shape, seed=15)).decode()
    compiled = torch.compile(lambda x, y: losses.surrogate(structure.make(x), y), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, target), losses.surrogate(structure.make(x), target))


@pytest.mark.parametrize("name", ["Chain", "ScoredChain"])
def test_compile_of_log_prob(name: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(2, *structure.shape, seed=14)
    decoded = structure.make(x).decode()
    compiled = torch.compile(lambda x, d: structure.make(x).log_prob(d), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, decoded), structure.make(x).log_prob(decoded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(STRUCTURES))
def test_narrow_dtypes(name: str, dtype: torch.dtype) -> None:
    structure = STRUCTURES[name]
    p = structure.make(potentials(2, *structure.shape, seed=15).to(dtype))
    decoded = p.decode()
    assert p.encode(decoded).dtype == dtype
    assert p.log_prob(decoded).dtype == torch.float32
    assert losses.surrogate(p, decoded).isfinite()


def test_tensor_gamma() -> None:
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    p = bx.CTC(potentials(2, 5, 3), LABELS, gamma=gamma)
    decoded = p.decode()
    alone = [bx.CTC(potentials(2, 5, 3)[n], LABELS, gamma=gamma[n].item()).log_prob(decoded[n]) for n in range(2)]
    assert torch.allclose(p.log_prob(decoded), torch.stack(alone))
    (gradient,) = torch.autograd.grad(p.log_prob(decoded).sum(), gamma)
    assert (gradient.abs() > 1e-6).all()


def test_shared_paths_broadcast() -> None:
    p = bx.Chain(potentials(3, 4, 2, 2))
    tags = torch.tensor([0, 1, 1, 0])
    assert torch.allclose(p.log_prob(tags), p.log_prob(tags.expand(3, 4)))
    one = bx.Chain(potentials(1, 4, 2, 2))
    both = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    assert torch.allclose(one.log_prob(both), torch.stack([one[0].log_prob(tags) for tags in both]))
    assert one.encode(both).shape == (2, 4, 2, 2)


# --- one form for each structure


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("Chain", "best_sequence"),
        ("ScoredChain", "best_sequence"),
        ("DTW", "best_alignment"),
        ("CTC", "best_labels"),
        ("MonotonicAlignment", "durations"),
        ("SequenceAlignment", "best_alignment"),
        ("Transducer", "best_frames"),
        ("SemiMarkov", "best_segments"),
        ("ScoredSemiMarkov", "best_segments"),
        ("SpanTrees", "best_tree"),
        ("DependencyTrees", "best_heads"),
        ("TreeModel", "best_labels"),
        ("Lattice", "best_walk"),
    ],
)
def test_the_other_name_of_decode(name: str, other: str) -> None:
    p = make(name, "sparsemax", 2)
    assert torch.equal(getattr(p, other)(), p.decode())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Chain", (3,)),
        ("DTW", (6, 2)),
        ("CTC", (5,)),
        ("MonotonicAlignment", (3,)),
        ("SequenceAlignment", (6, 2)),
        ("Transducer", (2,)),
        ("SemiMarkov", (3, 3)),
        ("SpanTrees", (2, 2)),
        ("SpanTrees, labels", (5, 3)),
        ("DependencyTrees", (3,)),
        ("TreeModel", (3,)),
        ("DAG", (3,)),
        ("Lattice", (5, 4)),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    p = make(name, "negentropy", 2)
    assert p.decode().shape == (2, *shape)
    assert p.sample_decoded((4,)).shape == (4, 2, *shape)
    assert p.topk_decoded(3)[1].shape == (2, 3, *shape)
    assert p.decode().dtype == torch.int64


def test_derivations_are_nested_lists() -> None:
    p = HYPER.derivations(potentials(2, 5))
    assert [len(edges) for edges in p.decode()] == [len(set(edges)) for edges in p.decode()]
    samples = p.sample_decoded((3,))
    assert (len(samples), len(samples[0])) == (3, 2)
    assert p.log_prob(samples).shape == (3, 2)
    scores, best = p.topk_decoded(2)
    assert (len(best), len(best[0])) == (2, 2)
    assert torch.allclose(scores[0, 0], potentials(2, 5)[0][best[0][0]].sum())
    assert HYPER.derivations(potentials(2, 5)[0]).decode() == p.decode()[0]


def test_derivations_that_use_two_edges_into_a_node(omega: bx.Regularizer) -> None:
    """The edges of this derivation contain other derivations, which must not count."""
    h = bx.Hypergraph([("a", ()), ("a", ()), ("b", ("a", "a"))])
    p = h.derivations(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), omega=omega)
    assert torch.allclose(losses.path_nll(p, [2, 0, 1]), -p.log_prob([2, 0, 1]))


def test_targets_of_any_integer_type_broadcast() -> None:
    """Losses read what log_prob reads: int32, and one path for the whole batch."""
    for name in ("Chain", "DTW", "CTC", "SemiMarkov", "ScoredSemiMarkov", "SpanTrees", "DependencyTrees", "TreeModel"):
        p = make(name, "sparsemax", 2)
        shared = p.decode()[0].int()
        expected = losses.surrogate(p, p.encode(shared) > 0, reduction="none")
        assert torch.allclose(losses.surrogate(p, shared, reduction="none"), expected), name


def test_a_batch_of_one_takes_many_segmentations() -> None:
    q = bx.SemiMarkov.from_scores(torch.randn(1, 4, 2), torch.randn(3, 2), torch.randn(2, 2))
    segments = torch.tensor([[[0, 2, 0], [2, 4, 1]], [[0, 1, 0], [1, 4, 1]]])
    assert torch.allclose(q.log_prob(segments), torch.stack([q[0].log_prob(s) for s in segments]))
    segments[1, 1, 2] = 7
    assert error(q, segments) == "path[1, 1] has label 7, which must be from 0 to 1"


@pytest.mark.parametrize("name", ["DTW", "CTC", "DAG", "Chain"])
def test_losses_of_decoded_targets_under_vmap(name: str) -> None:
    structure = STRUCTURES[name]
    x = potentials(3, *structure.shape)
    target = structure.make(potentials(3, *structure.shape, seed=1)).decode()
    loss = lambda x, y: losses.surrogate(structure.make(x), y)  # noqa: E731
    mapped = torch.func.vmap(loss)(x, target)
    assert torch.allclose(mapped, losses.surrogate(structure.make(x), target, reduction="none"))
    gradients = torch.func.vmap(torch.func.grad(loss))(x, target)
    assert torch.allclose(
        gradients, torch.stack([torch.func.grad(loss)(*pair) for pair in zip(x, target, strict=True)])
    )


# --- errors


def error(p: bx.PathDistribution, path: Any) -> str:
    with pytest.raises(ValueError, match=r"^path") as caught:
        p.log_prob(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("Chain", [0, 2, 1], "path[1] must be a state from 0 to 1, got 2"),
        ("Chain", [0, 1], "path must have shape (..., 3) for integers, got (2,)"),
        (
            "DTW",
            [[0, 0], [2, 1], [2, 3]],
            "path[1] must follow (0, 0) by a step of (1, 1), (1, 0) or (0, 1), got (2, 1)",
        ),
        ("DTW", [[0, 0], [1, 4]], "path[1] must be a cell of (3, 4), got (1, 4)"),
        ("DTW", [[0, 0], [1, 1]], "path must lead from (0, 0) to (2, 3), got (0, 0) to (1, 1)"),
        (
            "CTC",
            [1, 2, 2, 0, 0],
            "path must give the labels [1, 2, 2] if repeats are merged and blanks are removed, but gives [1, 2]",
        ),
        ("MonotonicAlignment", [1, 1, 1], "path must hold durations that add up to 4 frames, got [1, 1, 1]"),
        ("MonotonicAlignment", [2, 0, 2], "path must hold at least 1 frame for each of 3 tokens, got [2, 0, 2]"),
        ("Transducer", [2, 1], "path must hold frames from 0 to 2 in ascending order, got [2, 1]"),
        ("Transducer", [1, 3], "path must hold frames from 0 to 2 in ascending order, got [1, 3]"),
        (
            "SequenceAlignment",
            [[0, 0], [1, 1]],
            "path is not a global alignment of 3 rows and 3 columns: elements must be in order",
        ),
        ("SemiMarkov", [[0, 2, 0], [2, 3, 2]], "path[1] has label 2, which must be from 0 to 1"),
        ("SpanTrees", [[0, 2], [0, 3]], "path[1] must be a span [first word, last word] below [3, 3], got [0, 3]"),
        ("SpanTrees", [[0, 2]], "path is not a binary tree: no two of its spans make up the span [0, 2]; binarize"),
        ("DependencyTrees", [0, 4, 1], "path[1] must be a head from 0, the root, to 3, got 4"),
        ("DependencyTrees", [2, 1, 0], "path is not a tree: the arcs"),
        ("TreeModel", [0, 1, 2], "path[2] must be a label from 0 to 1, got 2"),
        ("DAG", [0, 4], "path[1] is an edge from 2, but the edge before it leads to 1"),
        ("DAG", [0, 7], "path[1] must be the number of an edge, from 0 to 4, got 7"),
        ("DAG", [0, 2], "path must lead from the start of the graph to its end, got a path from 0 to 2"),
        ("DTW", [[0, 0], [-1, -1], [1, 1], [2, 3]], "path[1] is padding, but another pair follows it"),
        ("DTW, open", [[1, 0], [2, 1]], "path must lead from the first row to the last row, got (1, 0) to (2, 1)"),
        ("DAG", [0, -1, 4], "path[1] is padding, but another edge follows it"),
        ("SemiMarkov", [[0, 2, 0], [-1, -1, -1], [2, 3, 1]], "path[1] is padding, but a segment follows it"),
        ("MonotonicAlignment", [9, 1, 1], "path must hold durations that add up to 4 frames, got [9, 1, 1]"),
        ("Lattice", [[0, 0, 0, -1], [2, 2, 0, 0]], "path[1] is not reached by its move, number 0"),
        ("Lattice", [[0, 0, 0, -1], [1, 3, 0, 0]], "path[1] must be a node of the grid, or -1 everywhere, got [1, 3,"),
        ("Lattice", [[0, 0, 0, -1], [1, 1, 0, 0]], "path is not a walk from the start to the end of the lattice"),
    ],
)
def test_wrong_paths_are_explained(name: str, path: Any, message: str) -> None:
    assert error(make(name), torch.tensor(path)).startswith(message)


def test_wrong_derivations_are_explained() -> None:
    p = HYPER.derivations(torch.zeros(2, 5))
    assert error(p, [[3, 0, 1], [9]]) == "path[1, 0] must be the number of an edge, from 0 to 4"
    assert error(p, [[3, 0, 1], [3, 10**30]]) == "path[1, 1] must be the number of an edge, from 0 to 4"
    assert error(p, [[3, 0, 1], [-1]]) == "path[1, 0] must be the number of an edge, from 0 to 4"
    assert error(p, [[3, 0, 1], [3, 0]]) == "path[1] is not a derivation of 'c'"
    assert error(p, [[3, "a"], [3]]) == "path must hold numbers of edges, got 'a'"
    assert p.support.check([[3, 0, 1], [9]]).tolist() == [True, False]
    with pytest.raises(
        ValueError, match="decoded must be a list of edge numbers, or nested lists for a batch, got Ten"
    ):
        p.encode(torch.zeros(2, 5))


def test_a_batch_shares_a_derivation() -> None:
    p = HYPER.derivations(potentials(2, 5))
    assert torch.allclose(p.log_prob([3, 0, 1]), p.log_prob([[3, 0, 1], [3, 0, 1]]))


def test_the_first_wrong_path_of_a_batch_is_named() -> None:
    p = make("Chain", "negentropy", 2)
    assert error(p, torch.tensor([[0, 1, 1], [0, -1, 1]])) == "path[1, 1] must be a state from 0 to 1, got -1"
    many = torch.zeros(4, 2, 3, dtype=torch.int64)
    many[2, 1, 0] = 5
    assert error(p, many) == "path[2, 1, 0] must be a state from 0 to 1, got 5"
    with pytest.raises(ValueError, match=r"^decoded\[2, 1, 0\] must be a state"):
        p.encode(many)
    assert p.support.check(many).sum() == 7


@pytest.mark.parametrize(
    "p",
    [
        bx.Chain(torch.zeros(3, 2, 2)),
        bx.TreeModel([-1, 0, 0]).labels(torch.zeros(3, 2), torch.zeros(2, 2)),
        bx.CTC(torch.zeros(4, 3), torch.tensor([1])),
        bx.DTW(torch.ones(3, 2)),
        bx.SpanTrees(torch.zeros(3, 3)),
        bx.DependencyTrees(torch.zeros(3, 3)),
        bx.SemiMarkov(torch.zeros(3, 2, 2), torch.zeros(2, 2)),
    ],
    ids=lambda p: f"{type(p).__name__} {tuple(p.event_shape)}",
)
def test_integer_events_are_refused(p: bx.PathDistribution) -> None:
    """Integers are the decoded form, so an event must be floating point or bool."""
    event = p.best_path()
    assert error(p, event.long()).endswith("For an event, pass floating point or bool: path.float()")
    assert torch.equal(p.log_prob(event.bool()), p.log_prob(event))
    with pytest.raises(ValueError, match=r"For an event, pass floating point or bool: target.float\(\)"):
        losses.surrogate(p, event.long())
    assert torch.equal(losses.surrogate(p, event.bool()), losses.surrogate(p, event))
    with pytest.raises(ValueError, match=f"decoded must hold integers, got dtype {event.dtype}"):
        p.encode(event)


def test_edges_or_an_event_of_a_graph() -> None:
    """A tensor with an entry for each edge is an event, even of integers, since no path has all edges."""
    p = make("DAG")
    event = p.best_path()
    assert torch.equal(p.log_prob(event.long()), p.log_prob(p.decode()))
    line = bx.DAG([(0, 1), (1, 2)]).paths(torch.zeros(2))
    assert line.decode().tolist() == [0, 1]
    assert line.log_prob(line.decode()) == 0


def test_samples_shaped_like_an_event_are_decoded() -> None:
    """As many samples as an event has rows: these integers could also be read as an event."""
    p = bx.TreeModel([-1, 0]).labels(torch.zeros(2, 2), torch.zeros(2, 2))
    assert torch.allclose(p.log_prob(torch.tensor([[0, 1], [1, 0]])).exp(), torch.full((2,), 0.25))
    q = bx.MonotonicAlignment(torch.zeros(1, 1))
    assert q.support.check(q.sample_decoded((1,))).all()


def test_events_that_share_entries_need_walks() -> None:
    p = make("Lattice")
    assert error(p, p.best_path()).startswith("path must be a walk, int64 (..., L, 4), such as decode() returns")


# --- names of gradients and marginals


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "Hypergraph"])
def test_marginals(name: str, omega: bx.Regularizer) -> None:
    """Marginals are probabilities of units, and equal to their frequencies among all paths."""
    p = make(name, omega, seed=16)
    marginals = p.marginals
    assert (marginals >= -1e-9).all()
    assert (marginals <= 1 + 1e-9).all()
    if name == "Lattice":
        _, walks = p.topk_decoded(int(p.num_paths))
        frequency = torch.zeros(3, 3, dtype=torch.float64)
        for walk, q in zip(walks, p.log_prob(walks).exp(), strict=True):
            for i, j, *_ in as_tuples(walk):
                frequency[i, j] += q
        assert torch.allclose(marginals, frequency)
    elif "Chain" not in name and "SemiMarkov" not in name and name != "Transducer":
        assert torch.allclose(marginals, p.expected_path)


@pytest.mark.parametrize("name", list(STRUCTURES))
@pytest.mark.parametrize("omega", ["negentropy", "l2"])
def test_gradients_by_name(name: str, omega: str) -> None:
    """Each is the gradient of the value that autograd finds, for the score that x is."""
    structure = STRUCTURES[name]
    x = potentials(2, *structure.shape, seed=17, requires_grad=True)
    p = structure.make(x, omega=omega)
    assert all(not key.startswith("_") for key in p.gradient)
    if name != "DTW, weighted":
        assert {key: value.shape for key, value in p.gradient.items()} == {k: s.shape for k, s in p.scores.items()}
    (expected,) = torch.autograd.grad(p.value.sum(), x)
    key = "transitions" if "transitions" in name else next(iter(p.gradient))
    got = torch.cat((p.gradient["blank"], p.gradient["emit"]), -1) if name == "Transducer" else p.gradient[key]
    assert torch.allclose(got, expected)


def test_gradient_of_the_steps_of_dtw() -> None:
    """Autograd of the value gives the same numbers."""
    cost = potentials(2, 3, 4, requires_grad=True)
    weights = torch.tensor([2.0, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    penalties = potentials(2, 3, seed=1, requires_grad=True)
    p = bx.DTW(cost, step_weights=weights, step_penalties=penalties)
    expected = torch.autograd.grad(p.value.sum(), (cost, weights, penalties))
    for value, wanted in zip(p.gradient.values(), expected, strict=True):
        assert torch.allclose(value, wanted)
    assert list(p.gradient) == ["cost", "step_weights", "step_penalties"]
    q = bx.DTW(cost, step_penalties=penalties)
    expected = torch.autograd.grad(q.value.sum(), (cost, penalties))
    assert list(q.gradient) == ["cost", "step_penalties"]
    for value, wanted in zip(q.gradient.values(), expected, strict=True):
        assert torch.allclose(value, wanted)


def test_gradients_of_a_chain_by_name() -> None:
    tensors = [potentials(2, 4, 3), potentials(3, 3, seed=1), potentials(3, seed=2), potentials(3, seed=3)]
    inputs: list[Tensor] = [t.requires_grad_() for t in tensors]
    p = bx.Chain.from_scores(inputs[0], inputs[1], start=inputs[2], end=inputs[3], omega="sparsemax")
    expected = torch.autograd.grad(p.value.sum(), inputs)
    assert list(p.gradient) == ["emissions", "transitions", "start", "end"]
    for value, wanted in zip(p.gradient.values(), expected, strict=True):
        assert torch.allclose(value, wanted)
    z = {"transitions": potentials(3, 3, seed=4)}
    by_name = p.hessian_product(z)
    by_position = p.hessian_product((None, z["transitions"], None, None))
    assert list(by_name) == list(p.gradient)
    assert all(torch.equal(a, b) for a, b in zip(by_name.values(), by_position, strict=True))
    slope = p.directional_derivative(z)
    assert torch.allclose(slope, p.directional_derivative((None, z["transitions"], None, None)))


def test_log_prob_of_the_k_best_paths_says_how_to_move_k() -> None:
    p = bx.Chain.from_scores(torch.randn(4, 5, 3), torch.randn(3, 3))
    _, paths = p.topk_decoded(2)
    with pytest.raises(ValueError, match=r"got \(4, 2, 5\). If it is of topk_decoded, pass path.movedim\(1, 0\)"):
        p.log_prob(paths)
    assert p.log_prob(paths.movedim(1, 0)).shape == (2, 4)
