"""Every public name of bellmax in annotated code, which ``tests/test_typing.py`` runs and checks with mypy."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import bellmax as bx
from bellmax import cluster, compat, losses, nn, plots, sklearn
from bellmax import lattice as L


class Gini(bx.Regularizer):
    """Sparsemax as a custom regularizer: Ω(q) = ½ (‖q‖² − 1)."""

    def penalty(self, q: Tensor) -> Tensor:
        return (q.square().sum(-1) - 1) / 2

    def project(self, x: Tensor) -> Tensor:
        return bx.Tsallis(2).project(x)

    def jacobian_product(self, q: Tensor, y: Tensor) -> Tensor:
        return bx.Tsallis(2).jacobian_product(q, y)


def regularizers() -> None:
    x = torch.tensor([1.0, 0.5, -1.0])
    omegas: list[bx.Regularizer] = [bx.Negentropy(), bx.Tsallis(1.5, gamma=0.5), bx.SquaredL2(2.0), bx.Hard(), Gini()]
    for omega in omegas:
        value: Tensor = omega.max(x)
        q: Tensor = omega.argmax(x, dim=-1)
        _ = value, q, omega.min(x), omega.argmin(x), omega.hessian_product(q, x)
    bx.check_regularizer(Gini())


def describe(p: bx.PathDistribution) -> None:
    """Use the verbs that all distributions have."""
    value: Tensor = p.value
    expected: Tensor = p.expected_path
    best: Tensor = p.best_path()
    samples: Tensor = p.sample((2,))
    straight_through: Tensor = p.sample_straight_through((2,))
    scores: Tensor = p.topk(2)[0]
    entropy: Tensor = p.entropy()
    decoded: Tensor = p.decode()
    best_decoded: tuple[Tensor, Tensor] = p.topk_decoded(2)
    log_probs: Tensor = p.log_prob(p.sample_decoded((2,)))
    event: Tensor = p.encode(decoded)
    accurate: Tensor = p.most_accurate()
    gradient: dict[str, Tensor] = p.gradient
    bounds: Tensor = p.max_marginals
    _ = value, expected, best, samples, scores, entropy, p.batch_shape, p.event_shape, p.num_paths
    _ = straight_through, best_decoded, log_probs, event, accurate, gradient, bounds


def sequences() -> None:
    chain = bx.Chain(torch.zeros(4, 3, 3), omega="sparsemax")
    scored = bx.Chain.from_scores(torch.zeros(2, 4, 3), torch.zeros(3, 3), lengths=[4, 2])
    segments = bx.SemiMarkov.from_scores(torch.zeros(5, 2), torch.zeros(3, 2), torch.zeros(2, 2))
    for p in (chain, scored, segments):
        describe(p)
    log_probs: Tensor = chain.log_prob(chain.sample((2,)))
    tags: Tensor = scored.decode()
    values: Tensor = scored.node_values
    marginals: Tensor = chain.marginals
    value: Tensor = bx.viterbi(torch.zeros(4, 3, 3), omega="hard")
    _ = log_probs, tags, values, marginals, value


def alignments() -> None:
    labels = torch.tensor([1, 2])
    describe(bx.DTW(torch.rand(4, 5), band=2, open_end=True))
    describe(bx.CTC(torch.zeros(5, 4), labels, blank=0, lengths=(5, 2)))
    decoder = bx.CTCDecoder(["-", "a", "b", " "], blank=0, lexicon=["ab"], lm_weight=0.5, word_score=0.0)
    texts: list[str] = [text.text for text in decoder.greedy(torch.zeros(1, 5, 4), lengths=[5])]
    times = [
        (word.text, word.start, word.end, word.confidence) for word in decoder.decode(torch.zeros(1, 5, 4))[0][0].words
    ]
    _ = texts, times
    describe(bx.SequenceAlignment(torch.zeros(3, 4), gap_open=-1.0, gap_extend=-0.5, mode="local"))
    describe(bx.MonotonicAlignment(torch.zeros(5, 3)))
    describe(bx.Transducer.from_logits(torch.zeros(4, 3, 5), labels))


def trees() -> None:
    describe(bx.SpanTrees(torch.zeros(4, 4)))
    describe(bx.DependencyTrees(torch.zeros(4, 4), single_root=False))
    describe(bx.TreeModel([-1, 0, 0]).labels(torch.zeros(3, 2), torch.zeros(2, 2)))


def automata() -> None:
    words = bx.Automaton.lexicon({"yes": [5, 1, 7], "no": [3, 4]}, scores=torch.zeros(2))
    graph: bx.Automaton = bx.Automaton.ctc(vocab=8) @ words
    rows = bx.Automaton([("a", "b", 1), ("b", "c", -1, 2)], scores=[0.0, 1.0], start={"a": 0.0}, final={"c": 0.5})
    again: bx.Automaton = bx.Automaton.from_text(rows.to_text())
    union: bx.Automaton = rows.union(again).concatenate(again).reverse().trim().closure()
    batch = bx.Automaton.stack([bx.Automaton.ctc([1, 2]), bx.Automaton.linear(torch.tensor([3]))])
    scores: Tensor = batch.scores
    outputs: Tensor = graph.paths(torch.zeros(1, 8)).outputs(torch.tensor([0, -1]))
    _ = union, scores, outputs, graph.names(outputs), graph.arcs, graph.start, graph.final, graph.states


def own_programs() -> None:
    describe(bx.DAG([("a", "b"), ("a", "c"), ("b", "c")]).paths(torch.zeros(3), minimize=True))
    describe(bx.Hypergraph([("a", ()), ("b", ()), ("c", ("a", "b"))]).derivations(torch.zeros(3)))
    moves = [
        bx.Move(1, 1, score=L.cell("c", -1, -1) + L.scalar("bonus")),
        bx.Move(1, 0, score=L.row("up", -1)),
        bx.Move(0, 1, score=L.column("left", -1)),
    ]
    lattice = bx.Lattice(moves, start=L.corner(0), end=L.anywhere(0))
    tensors = {"c": torch.zeros(3, 4), "bonus": torch.zeros(()), "up": torch.zeros(3), "left": torch.zeros(4)}
    describe(lattice.paths(tensors))
    scores: list[L.Score] = [
        L.pair("change", "a", "b"),
        L.gather("p", "y"),
        L.at_class("p", 0),
        L.cell_class("joint", 1),
        L.cell_label("joint", "y"),
    ]
    beliefs = bx.BeliefPropagation([(0, 1), (1, 2), (2, 0)])(torch.zeros(3, 2), torch.zeros(3, 2, 2))
    marginals: Tensor = beliefs.beliefs
    _ = scores, marginals, L.along_row(0), L.along_column(0)


@bx.program("item")
def knapsack(value: Any, *, sizes: tuple[int, ...], room: int) -> Any:
    best: list[Any] = [0.0] * (room + 1)
    for v, size in zip(value, sizes, strict=True):
        best = [bx.max(best[r], best[r - size] + v) if r >= size else best[r] for r in range(room + 1)]
    return best[room]


@bx.program("step", max_edges=100)
def stairs(cost: Any) -> Any:
    total: list[Any] = [0.0, cost[0]]
    for c in cost[1:]:
        total.append(bx.min(total[-1], total[-2]) + c)
    return total[-1]


def recursions() -> None:
    describe(knapsack(torch.rand(3), sizes=(1, 2, 3), room=4, omega="sparsemax", gamma=0.5))
    describe(stairs(torch.rand(4)))
    values: Tensor = stairs([torch.rand(3), torch.rand(4)]).value
    graph: bx.Hypergraph = knapsack.graph((3,), sizes=(1, 2, 3), room=4)
    optimum: float = knapsack.function([1.0, 2.0], sizes=(1, 1), room=1)
    ok: bool = bx.check_program(stairs, torch.rand(4)).ok
    _ = values, graph, optimum, ok


def series() -> None:
    x, y = torch.rand(8), torch.rand(10)
    rows = [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    distance: Tensor = bx.dtw(x, y, omega="hard")
    distances: Tensor = bx.dtw_cdist(rows)
    nearest: Tensor = bx.dtw_neighbors(rows, k=1).indices
    mean: Tensor = bx.dtw_barycenter(rows, max_iter=2)
    with TemporaryDirectory() as folder:
        tasks: list[cluster.Task] = cluster.plan(bx.dtw_cdist, rows, checkpoint=Path(folder) / "run")
        for task in tasks:
            task.run()
    _ = distance, distances, nearest, mean


def layers() -> None:
    constraints: nn.TagConstraints = nn.tag_constraints(["O", "B-X", "I-X"])
    crf = nn.CRF(3, constraints=constraints)
    loss: Tensor = crf(torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64))
    ctc: Tensor = nn.CTCLoss()(torch.zeros(5, 4), torch.tensor([1, 2]))
    rnnt: Tensor = nn.TransducerLoss()(torch.zeros(4, 3, 5), torch.tensor([1, 2]))
    tdt: Tensor = nn.TDTLoss((1, 2))(torch.zeros(4, 3, 5), torch.zeros(4, 3, 2), torch.tensor([1, 2]))
    dtw: Tensor = nn.DTWLoss(gamma=0.1)(torch.rand(1, 6, 2), torch.rand(1, 5, 2))
    alignment: Tensor = nn.DTWAlignment("sparsemax")(torch.rand(6, 2), torch.rand(5, 2))
    pooled: Tensor = nn.SmoothedMax("sparsemax", dim=-2)(torch.rand(3, 4))
    context, weights = nn.SegmentationAttention(3, 4, num_heads=2)(
        torch.rand(2, 5, 3), torch.rand(2, 6, 4), mask=torch.ones(2, 5, 6).bool(), is_causal=True
    )
    hmm = nn.HMM(3, emission=torch.nn.Linear(2, 3), omega="entmax", max_duration=4)
    log_likelihood: Tensor = hmm(torch.rand(2, 5, 2), lengths=[5, 3]).value
    state, posterior = hmm.filter(torch.rand(2, 5, 2), hmm.start(2))
    forecast: Tensor = hmm.forecast(state, steps=3)
    solver = nn.Perturbed(lambda cost: bx.DTW(cost, omega="hard"), noise="normal", samples=3, sigma=0.5)
    value, path = solver(torch.rand(4, 3))
    _ = loss, ctc, rnnt, tdt, dtw, alignment, pooled, context, weights, value, path
    _ = log_likelihood, posterior, forecast, state.value


def all_losses() -> None:
    p = bx.Chain.from_scores(torch.zeros(4, 3), torch.zeros(3, 3))
    target = torch.tensor([0, 1, 2, 0])
    cost: Tensor = losses.hamming_cost(p, target)
    values: list[Tensor] = [
        losses.surrogate(p, target, cost),
        losses.crf_nll(p, target, reduction="sum"),
        losses.path_nll(p, target),
        losses.relaxed(p, target),
        losses.structured_hinge(p, target),
        losses.structured_perceptron(p, target),
        losses.expected_cost(p, cost),
        losses.risk(p, lambda tags: (tags != target).sum(-1), samples=4),
    ]
    warping = bx.DTW(torch.rand(3, 3))
    values.append(losses.alignment_area(warping, torch.eye(3)))
    values.append(losses.mean_absolute_deviation(torch.eye(3), torch.eye(3)))


def estimators() -> None:
    series, classes = np.random.default_rng(0).normal(size=(6, 5)), np.array([0, 0, 0, 1, 1, 1])
    sklearn.DTWNeighborsClassifier(n_neighbors=1).fit(series, classes).predict(series)
    sklearn.DTWNeighborsRegressor(n_neighbors=1).fit(series, classes).predict(series)
    sklearn.DTWNeighborsTransformer(n_neighbors=2).fit(series).transform(series)
    sklearn.DTWBarycenterClassifier(max_iter_barycenter=2).fit(series, classes).predict(series)
    sklearn.DTWKMeans(n_clusters=2, max_iter=1, max_iter_barycenter=2).fit(series)
    sklearn.DTWKernel().fit(series).transform(series)
    sklearn.HMM(1, max_iter=2, tol=None).fit(series).predict(series)


def figures() -> None:
    axes = Figure().subplots()
    plots.dag(bx.DAG([(0, 1), (0, 1)]).paths(torch.zeros(2)), ax=axes)
    plots.alignment(bx.DTW(torch.rand(4, 5)), ax=Figure().subplots())
    plots.automaton(bx.Automaton.ctc([1, 2]), ax=Figure().subplots())
    plots.program(stairs(torch.rand(4)), ax=Figure().subplots())


def replacements() -> None:
    scores = torch.zeros(1, 3, 2, 2)
    structures: list[compat.torch_struct.StructDistribution] = [
        compat.torch_struct.LinearChainCRF(scores),
        compat.torch_struct.SemiMarkovCRF(torch.zeros(1, 3, 2, 2, 2)),
        compat.torch_struct.AlignmentCRF(torch.zeros(1, 3, 3, 3)),
        compat.torch_struct.TreeCRF(torch.zeros(1, 3, 3, 1)),
        compat.torch_struct.DependencyCRF(torch.zeros(1, 3, 3)),
        compat.torch_struct.HMM(
            torch.zeros(2, 2), torch.zeros(3, 2), torch.zeros(2), torch.zeros(1, 4, dtype=torch.int64)
        ),
    ]
    partitions: list[Tensor] = [structure.partition for structure in structures]
    tags = torch.zeros(4, 1, dtype=torch.int64)
    likelihood: Tensor = compat.torchcrf.CRF(3)(torch.zeros(4, 1, 3), tags)
    x, y = torch.rand(1, 4, 2), torch.rand(1, 5, 2)
    distances: list[Tensor] = [
        compat.soft_dtw_cuda.SoftDTW(use_cuda=False)(x, y),
        compat.tslearn.SoftDTWLossPyTorch()(x, y),
    ]
    vector = torch.tensor([1.0, 0.5, -1.0])
    weights: list[Tensor] = [
        compat.entmax.sparsemax(vector),
        compat.entmax.entmax15(vector),
        compat.entmax.entmax_bisect(vector, 1.3),
        compat.entmax.Sparsemax()(vector),
        compat.entmax.Entmax15()(vector),
        compat.entmax.EntmaxBisect(1.3)(vector),
    ]
    log_probs, labels = torch.zeros(1, 6, 4).log_softmax(-1), torch.tensor([[1, 2]])
    frames, counts = torch.tensor([6]), torch.tensor([2])
    ctc: list[Tensor] = [
        compat.torch.ctc_loss(log_probs.transpose(0, 1), labels, frames, counts),
        compat.torch.CTCLoss()(log_probs.transpose(0, 1), labels, frames, counts),
    ]
    tokens, token_scores = compat.torchaudio.forced_align(log_probs, labels)
    spans: list[compat.torchaudio.TokenSpan] = compat.torchaudio.merge_tokens(tokens[0], token_scores[0])
    joint, short = torch.zeros(1, 4, 3, 5), labels.int()
    rnnt: list[Tensor] = [
        compat.torchaudio.rnnt_loss(joint, short, torch.tensor([4]).int(), counts.int(), blank=0),
        compat.torchaudio.RNNTLoss(blank=0)(joint, short, torch.tensor([4]).int(), counts.int()),
    ]
    path: Tensor = compat.monotonic_align.maximum_path(torch.zeros(1, 3, 5), torch.ones(1, 3, 5))
    _ = partitions, likelihood, distances, weights, ctc, spans, rnnt, path


def settings() -> None:
    version: str = bx.__version__
    info: dict[str, str] = bx.backend_info()
    with bx.use_backend("reference"):
        describe(bx.DTW(torch.rand(2, 3)))
    _ = version, info


def modules() -> tuple[object, ...]:
    return bx.cluster, bx.compat, bx.lattice, bx.losses, bx.nn, bx.plots, bx.sklearn


def main() -> None:
    for part in (
        regularizers, sequences, alignments, trees, automata, own_programs, recursions, series, layers, all_losses,
        estimators, figures, replacements, settings, modules,
    ):  # fmt: skip
        part()


if __name__ == "__main__":
    main()
