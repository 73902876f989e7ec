"""Token-and-duration transducers against enumeration, hand-written graphs and transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.checks import close
from support.problems import Enumerated, for_second_order, potentials, two_kinds
from support.transducers import Arc, log_likelihood, tdt_arcs, tdt_end, tdt_paths, tdt_score
from torch import Tensor

import bellmax as bx
from bellmax import lattice as L
from bellmax.nn import TDTLoss, TransducerLoss

DURATIONS = [(0, 1, 2, 3, 4), (1, 2, 3, 4), (0, 2, 4), (1,), (0, 1, 2, 4, 8)]
TARGETS = torch.tensor([[2, 1, 2], [3, 3, 0], [1, 0, 0], [3, 0, 0]])
LENGTHS = torch.tensor([6, 4, 5, 1]), torch.tensor([3, 2, 0, 1])
SIZES = [(int(n), int(m)) for n, m in zip(*LENGTHS, strict=True)]

each_set = pytest.mark.parametrize("durations", DURATIONS, ids=str)


def joints(durations: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token logits and duration logits, with NaN in the padding."""
    outside = (torch.arange(6)[:, None] >= LENGTHS[0][:, None, None]) | (torch.arange(4) > LENGTHS[1][:, None, None])
    sizes = 4, len(durations)
    tokens, times = (potentials(4, 6, 4, size, seed=seed + n) for n, size in enumerate(sizes))
    return tuple(x.masked_fill(outside.unsqueeze(-1), math.nan).requires_grad_() for x in (tokens, times))  # type: ignore[return-value]


def enumerated(
    member: int, tokens: Tensor, times: Tensor, durations: tuple[int, ...], sigma: float
) -> tuple[list[list[Arc]], Tensor]:
    """Every path of a member of the batch, and the scores of the paths."""
    (frames, labels), targets = SIZES[member], TARGETS[member]
    tokens, times = (x[member, :frames, : labels + 1].log_softmax(-1) for x in (tokens, times))
    arcs, paths = tdt_arcs(frames, labels, durations), tdt_paths(frames, labels, durations)
    number = {arc: n for n, arc in enumerate(arcs)}
    uses = tokens.new_zeros(len(paths), len(arcs))
    for row, path in zip(uses, paths, strict=True):
        row[[number[arc] for arc in path]] = 1
    return paths, uses @ torch.stack([tdt_score(arc, tokens, times, targets, durations, sigma) for arc in arcs])


def log_sums(tokens: Tensor, times: Tensor, durations: tuple[int, ...], sigma: float) -> Tensor:
    """log p(targets) of each member; −∞ without a gradient if there is no path."""
    scores = [enumerated(n, tokens, times, durations, sigma)[1] for n in range(4)]
    return torch.stack([x.logsumexp(0) if len(x) else x.new_tensor(-math.inf) for x in scores])


# --- against enumeration


@each_set
def test_loss_and_gradient_equal_enumeration(durations: tuple[int, ...], backend: str) -> None:
    inputs = joints(durations)
    loss = TDTLoss(durations, sigma=0.05, reduction="none")(*inputs, TARGETS, lengths=LENGTHS)
    wanted = -log_sums(*inputs, durations, 0.05)
    close(loss, wanted)
    assert bool(wanted.isinf().any()) == (durations in [(1, 2, 3, 4), (1,), (0, 2, 4)])
    is_finite = wanted.isfinite()
    ours = torch.autograd.grad(loss.sum(), inputs)
    for gradient, exact in zip(ours, torch.autograd.grad(wanted[is_finite].sum(), inputs), strict=True):
        close(gradient, exact.nan_to_num(0))
        assert not gradient[~is_finite].any()


@each_set
def test_equals_transformers_where_it_is_finite(durations: tuple[int, ...]) -> None:
    theirs = pytest.importorskip("transformers.loss.loss_tdt", reason="needs transformers >= 5").tdt_loss
    tokens, times = (x.detach().nan_to_num(0).requires_grad_() for x in joints(durations, seed=5))
    for reduction in ("none", "sum", "mean_batch", "mean_volume", "mean"):
        chosen = [n for n in range(4) if durations != (0, 2, 4) or n == 1]
        chosen = [n for n in chosen if reduction != "mean" or SIZES[n][1]]  # a target without labels: 0 / 0 in theirs
        is_path = [bool(tdt_paths(*SIZES[n], durations)) for n in chosen]
        chosen = [n for n, exists in zip(chosen, is_path, strict=True) if exists]
        args = tokens[chosen], times[chosen], TARGETS[chosen]
        lengths = LENGTHS[0][chosen], LENGTHS[1][chosen]
        ours = TDTLoss(durations, sigma=0.1, reduction=reduction)(*args, lengths=lengths)
        wanted = theirs(*args, *lengths, 0, list(durations), sigma=0.1, reduction=reduction)
        close(ours.float(), wanted, 1e-5)
        gradients = (torch.autograd.grad(x.sum(), (tokens, times), retain_graph=True) for x in (ours, wanted))
        for gradient, other in zip(*gradients, strict=True):
            assert bool(gradient.isfinite().all())
            if 0 in durations and 1 in durations:  # theirs are NaN without
                close(gradient, other, 1e-5)


def by_hand(
    member: int, tokens: Tensor, times: Tensor, durations: tuple[int, ...], omega: bx.Regularizer
) -> tuple[Enumerated, list[Arc | None]]:
    """The graph over nodes (t, u) with a source, its weights, and the arc of each edge."""
    (frames, labels), targets = SIZES[member], TARGETS[member]
    tokens, times = (x[member, :frames, : labels + 1].detach().log_softmax(-1) for x in (tokens, times))
    arcs = tdt_arcs(frames, labels, durations)
    nodes = [(t, u) for t in range(frames) for u in range(labels + 1)]
    number = {node: 1 + n for n, node in enumerate([*nodes, (frames, labels)])}
    # Edges of weight −∞ lead to all nodes, since some nodes have no other edge.
    edges, weights = [(0, n) for n in number.values()], [0.0] + [-math.inf] * (len(number) - 1)
    arc_of: list[Arc | None] = [None] * len(number)
    for arc in arcs:
        if tdt_end(arc) in number:
            edges.append((number[arc[1:3]], number[tdt_end(arc)]))
            weights.append(float(tdt_score(arc, tokens, times, targets, durations, 0.0)))
            arc_of.append(arc)
    return Enumerated(edges, 1 + len(number), weights, omega), arc_of


@pytest.mark.parametrize("durations", [(0, 1, 2), (1, 3)], ids=str)
def test_every_omega_equals_the_graph_by_hand(omega: bx.Regularizer, durations: tuple[int, ...], backend: str) -> None:
    inputs = joints(durations)
    p = TDTLoss(durations, omega=omega).distribution(*inputs, TARGETS, lengths=LENGTHS)
    for member in (1, 2):
        wanted, arcs = by_hand(member, *inputs, durations, omega)
        close(p.value[member].detach(), wanted.value)
        close(p.entropy()[member].detach(), wanted.entropy, 1e-9)
        expected = {name: torch.zeros_like(g[member]) for name, g in p.gradient.items()}
        for arc, mass in zip(arcs, wanted.expected_path, strict=True):
            if arc is not None:
                kind, t, u, d = arc
                expected["emit" if kind == "label" else kind][t, u] += float(mass)
                expected["durations"][t, u, durations.index(d)] += float(mass)
        for name, gradient in p.gradient.items():
            close(gradient[member].detach(), expected[name].detach(), 1e-9)


@for_second_order
def test_derivatives(omega: bx.Regularizer, backend: str) -> None:
    durations = (0, 1, 3)
    inputs = tuple(x.detach()[:2].nan_to_num(0).requires_grad_() for x in joints(durations, seed=3))

    def loss(tokens: Tensor, times: Tensor) -> Tensor:
        module = TDTLoss(durations, sigma=0.1, omega=omega)
        return module(tokens, times, TARGETS[:2], lengths=(LENGTHS[0][:2], LENGTHS[1][:2]))

    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, fast_mode=True)


@two_kinds
def test_lengths_equal_sequences_without_padding(omega: bx.Regularizer, backend: str) -> None:
    durations = (0, 1, 2, 3, 4)
    inputs = joints(durations)
    module = TDTLoss(durations, reduction="none", omega=omega)
    p = module.distribution(*inputs, TARGETS, lengths=LENGTHS)
    for member, (frames, labels) in enumerate(SIZES):
        own = [x[member, :frames, : labels + 1] for x in inputs]
        q = module.distribution(*own, TARGETS[member, :labels])
        close(p.value[member], q.value)
        times = p.timestamps(p.decode())[member]
        assert times[:labels].equal(q.timestamps(q.decode()))
        assert bool((times[labels:] == -1).all())
        close(p.marginals[member, :frames, :labels], q.marginals)
    assert p.lengths.equal(torch.stack(LENGTHS, -1))


# --- corner cases


def test_impossible_targets_and_classes_have_finite_gradients(backend: str) -> None:
    durations = (1, 2)
    tokens, times = potentials(3, 3, 3, 4), potentials(3, 3, 3, 2, seed=1)
    tokens[1, ..., 2] = -math.inf  # the label 2 is impossible
    times[2] = -math.inf  # all durations are impossible
    tokens[0, 2, 1] = -math.inf  # a row without a class, on some paths
    inputs = tokens.requires_grad_(), times.requires_grad_()
    loss = TDTLoss(durations, reduction="none")(*inputs, torch.tensor([1, 2]), lengths=(3, [1, 2, 2]))
    assert loss.isinf().tolist() == [False, True, True]
    for gradient in torch.autograd.grad(loss.sum(), inputs):
        assert bool(gradient.isfinite().all())
        assert not gradient[1:].any()
        assert bool(gradient[0].any())
    for n in range(2):
        longer = TDTLoss(durations)(*(x.detach()[0, : n + 1] for x in inputs), torch.tensor([1, 3]))
        assert longer == math.inf  # three steps do not fit into two frames


def test_one_frame_no_labels_and_an_empty_batch(backend: str) -> None:
    tokens, times = potentials(2, 1, 1, 4), potentials(2, 1, 1, 3, seed=1)
    targets = torch.empty(2, 0, dtype=torch.int64)
    module = TDTLoss((0, 1, 2), reduction="none")
    loss = module(tokens, times, targets)
    close(loss, -(tokens.log_softmax(-1)[..., 0] + times.log_softmax(-1)[..., 1]).flatten())
    assert module.distribution(tokens, times, targets).timestamps(torch.tensor([[0, 0, 0, -1]])).shape == (2, 0, 2)
    one = module(potentials(1, 2, 4), potentials(1, 2, 3), torch.tensor([1]))
    assert bool(one.isfinite())
    for reduction in ("sum", "mean", "mean_batch", "mean_volume"):
        assert TDTLoss(reduction=reduction)(tokens[:0], torch.zeros(0, 1, 1, 5), targets[:0]) == 0


def test_more_durations_than_native_moves_use_the_graph(backend: str) -> None:
    durations = tuple(range(9))
    inputs = joints(durations)
    loss = TDTLoss(durations, reduction="none")(*inputs, TARGETS, lengths=LENGTHS)
    wanted = -log_sums(*inputs, durations, 0.0)
    close(loss, wanted)
    for gradient, exact in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (loss, wanted)), strict=True):
        close(gradient, exact.nan_to_num(0))


def test_half_precision_slices_and_broadcasting() -> None:
    joint = potentials(2, 5, 3, 4 + 3).bfloat16().requires_grad_()  # one head for tokens and durations
    targets = torch.tensor([1, 3])
    loss = TDTLoss((0, 1, 2), reduction="none")(joint[..., :4], joint[..., 4:], targets)
    assert loss.dtype == torch.float32
    wide = joint.detach().double()
    close(loss.detach().double(), TDTLoss((0, 1, 2), reduction="none")(wide[..., :4], wide[..., 4:], targets), 1e-4)
    loss.sum().backward()
    assert joint.grad is not None
    assert joint.grad.dtype == torch.bfloat16
    shared = TDTLoss((0, 1, 2), reduction="none")(wide[:1, ..., :4], wide[..., 4:], targets.expand(2, 2))
    assert shared.shape == (2,)


def test_gamma_is_learnt_by_sequence() -> None:
    gamma = torch.nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))
    tokens, times, targets = potentials(2, 5, 3, 4), potentials(2, 5, 3, 5), torch.tensor([[1, 2], [3, 3]])
    loss = TDTLoss(reduction="none", omega=bx.Negentropy(gamma))(tokens, times, targets)
    for n in range(2):
        alone = TDTLoss(gamma=float(gamma[n].detach()))(tokens[n], times[n], targets[n])
        close(loss[n].detach(), alone)
    loss.sum().backward()
    assert gamma.grad is not None
    assert bool(gamma.grad.isfinite().all())


# --- alignments


def test_timestamps_are_those_of_enumerated_paths(backend: str) -> None:
    durations = (0, 1, 2, 4)
    inputs = joints(durations)
    p = TDTLoss(durations).distribution(*inputs, TARGETS, lengths=LENGTHS)
    paths, scores = enumerated(0, *inputs, durations, 0.0)
    assert p.num_paths[0] == len(paths)
    k_best = scores.detach().topk(5)
    values, walks = p[0].topk_decoded(5)
    close(values, k_best.values)
    rows = [[[t, d] for kind, t, _, d in paths[n] if kind == "label"] for n in k_best.indices.tolist()]
    assert p[0].timestamps(walks).tolist() == rows
    close(p[0].log_prob(walks), scores.log_softmax(0)[k_best.indices])
    samples = p.sample_decoded((4,))
    assert p.timestamps(samples).shape == (4, 4, 3, 2)
    for row in ([2, 0, 0, 9], [2, 0, 0, 5], [2, 5, 0, 5]):
        with pytest.raises(ValueError, match=r"walks must be paths, such as decode\(\) returns, got the row"):
            p[0].timestamps(torch.tensor([[0, 0, 0, -1], row]))


def test_a_target_without_a_path_has_no_timestamps(backend: str) -> None:
    p = TDTLoss((1,)).distribution(potentials(2, 3, 4), potentials(2, 3, 1), torch.tensor([1, 2]))
    assert p.value == -math.inf
    assert p.timestamps(p.decode()).tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in Dynamo
def test_compiles() -> None:
    module = TDTLoss((0, 1, 2), fastemit=0.1)
    x, y = torch.randn(2, 5, 3, 4, requires_grad=True), torch.randn(2, 5, 3, 3, requires_grad=True)
    targets, lengths = torch.tensor([[1, 0], [2, 2]]), (torch.tensor([5, 4]), torch.tensor([1, 2]))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    losses = [f(x, y, targets, lengths=lengths) for f in (compiled, module)]
    close(*losses, 1e-5)
    for gradients in zip(*(torch.autograd.grad(loss, (x, y)) for loss in losses), strict=True):
        close(*gradients, 1e-5)


def test_under_vmap_and_func_grad() -> None:
    module = TDTLoss((0, 1, 2), fastemit=0.1)
    x, y = potentials(2, 5, 3, 4), potentials(2, 5, 3, 3, seed=1)
    targets = torch.tensor([[1, 1], [2, 2]])
    gradient = torch.func.vmap(torch.func.grad(lambda *a: module(*a)))(x, y, targets)
    x.requires_grad_()
    close(gradient, torch.autograd.grad(module(x, y, targets) * 2, x)[0])


# --- in a Hugging Face model


def parakeet(kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model with random weights, and a batch whose second sequence is shorter."""
    hf: Any = pytest.importorskip("transformers")
    if not hasattr(hf, kind):
        pytest.skip(f"this version of transformers has no {kind}")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    off = dict.fromkeys(("dropout", "layerdrop", "attention_dropout", "activation_dropout"), 0.0)
    encoder = hf.ParakeetEncoderConfig(num_mel_bins=16, subsampling_conv_channels=4, **sizes, **off)
    of_decoder = {"vocab_size": 9, "decoder_hidden_size": 8, "num_decoder_layers": 1}
    padding = 7 if kind == "ParakeetForTDT" else 8  # ParakeetForRNNT counts labels that are not the blank
    config = getattr(hf, kind.replace("For", "") + "Config")
    model = getattr(hf, kind)(config(encoder_config=encoder, blank_token_id=8, pad_token_id=7, **of_decoder))
    labels = torch.tensor([[1, 2, 3], [4, 5, padding]])
    batch = {
        "input_features": torch.randn(2, 96, 16),
        "attention_mask": (torch.arange(96) < torch.tensor([[96], [60]])).long(),
        "labels": labels,
        "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=8),
    }
    return model, batch


def test_it_replaces_the_loss_of_a_hugging_face_model() -> None:
    model, batch = parakeet("ParakeetForTDT")
    wanted = model(**batch).loss
    wanted.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()

    def tdt_loss(
        token_logits: Tensor,
        duration_logits: Tensor,
        labels: Tensor,
        logit_lengths: Tensor,
        label_lengths: Tensor,
        blank_token_id: int,
        durations: list[int],
        **_: Any,
    ) -> Tensor:
        criterion = TDTLoss(durations, blank_token_id, reduction="mean")
        return criterion(token_logits, duration_logits, labels, lengths=(logit_lengths, label_lengths))

    model.loss_function = tdt_loss
    loss = model(**batch).loss
    loss.backward()
    close(loss.detach(), wanted.detach(), 1e-5)
    for name, x in model.named_parameters():
        if name in gradients:
            close(x.grad, gradients[name], 1e-4)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert model(**batch).loss < loss


def test_it_trains_a_hugging_face_transducer_without_torchaudio() -> None:
    model, batch = parakeet("ParakeetForRNNT")

    def rnnt_loss(
        logits: Tensor, labels: Tensor, logit_lengths: Tensor, label_lengths: Tensor, blank_token_id: int, **_: Any
    ) -> Tensor:
        assert label_lengths.tolist() == [3, 2]
        criterion = TransducerLoss(blank_token_id, reduction="mean_volume")
        loss: Tensor = criterion(logits, labels, lengths=(logit_lengths, label_lengths))
        sizes = zip(range(2), logit_lengths.tolist(), label_lengths.tolist(), strict=True)
        close(loss, -sum(log_likelihood(logits[b], labels[b], blank_token_id, n, m) for b, n, m in sizes) / 5, 1e-5)
        return loss

    model.loss_function = rnnt_loss
    loss = model(**batch).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert model(**batch).loss < loss


# --- multi-blank transducers, the recipe of the page


def test_multi_blank_recipe_equals_enumeration(backend: str) -> None:
    blanks, sigma = {0: 1, 4: 2, 5: 4}, 0.05  # class of each blank, and its frames
    moves = [bx.Move(d, 0, score=L.cell_class("log_probs", c, -d)) for c, d in blanks.items()]
    moves.append(bx.Move(0, 1, score=L.cell_label("log_probs", "targets", 0, -1), where=L.row("is_frame")))
    logits = potentials(4, 6, 4, 6, requires_grad=True)
    tensors = {
        "log_probs": logits.log_softmax(-1) - sigma,
        "targets": TARGETS,
        "is_frame": torch.arange(7) < LENGTHS[0].unsqueeze(-1),
    }
    p = bx.Lattice(moves).paths(tensors, grid=(LENGTHS[0] + 1, LENGTHS[1] + 1))
    class_of = {d: c for c, d in blanks.items()}
    wanted = []
    for member, (frames, labels) in enumerate(SIZES):
        log_probs = tensors["log_probs"][member]
        scores = [
            sum(log_probs[t, u, int(TARGETS[member, u]) if kind == "label" else class_of[d]] for kind, t, u, d in path)
            for path in tdt_paths(frames, labels, (0, 1, 2, 4))
            if all(d == 0 for kind, _, _, d in path if kind == "label")
        ]
        wanted.append(torch.stack(scores).logsumexp(0))
    close(p.value, torch.stack(wanted))
    close(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (p.value, torch.stack(wanted))))


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durations": (0, 1, 1)}, r"durations must be different integers .*, got \(0, 1, 1\)"),
        ({"durations": (0,)}, "durations must be different integers of at least 0, with one of at least 1, got"),
        ({"durations": (-1, 2)}, "durations must be different integers"),
        ({"durations": ()}, "durations must be different integers"),
        ({"durations": 4}, "durations must be different integers .* got 4"),
        ({"durations": (0.5, 1)}, "durations must be different integers"),
        ({"sigma": math.inf}, "sigma must be a finite number, got inf"),
        ({"fastemit": -0.1}, "fastemit must be a number of at least 0, got -0.1"),
        ({"reduction": "average"}, "reduction must be one of 'none', 'sum', 'mean_batch', 'mean_volume', 'mean'"),
    ],
)
def test_errors_in_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TDTLoss(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_logits": torch.zeros(3, 4)}, r"token_logits must have shape \(..., T, U \+ 1, V\), got \(3, 4\)"),
        ({"duration_logits": torch.zeros(2, 5, 2, 3)}, r"duration_logits must have shape \(..., 5, 3, D\), got"),
        ({"duration_logits": torch.zeros(2, 5, 3, 4)}, r"duration_logits must have one class for each of the dur"),
        ({"duration_logits": torch.zeros(2, 5, 3, 3).long()}, "duration_logits must be floating point, got dtype"),
        ({"duration_logits": torch.zeros(3, 5, 3, 3)}, "the batch dimensions of tensors and lengths must broadcast"),
        ({"targets": torch.tensor([[1, 0], [1, 1]])}, "targets must not hold the blank 0, got it at label 1 of seq"),
        ({"targets": torch.tensor([[1, 2, 3]])}, r"targets must have shape \(..., 2\)"),
        ({"lengths": ([5, 6], [2, 2])}, r"lengths\[0\] must be from 1 to 5, got 6"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "token_logits": torch.zeros(2, 5, 3, 4),
        "duration_logits": torch.zeros(2, 5, 3, 3),
        "targets": torch.tensor([[1, 2], [3, 1]]),
    }
    with pytest.raises(ValueError, match=message):
        TDTLoss((0, 1, 2))(**(arguments | change))
