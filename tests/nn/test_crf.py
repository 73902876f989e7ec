"""The CRF layer against enumeration of its sequences, and as a torch module."""

from __future__ import annotations

import copy
import io
import math
import pickle
import runpy
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import bellmax as bx
import bellmax.losses as losses
from bellmax.nn import CRF, tag_constraints

LABELS = ["O", "B-X", "I-X", "B-Y", "I-Y"]
IOB2 = tag_constraints(LABELS, "IOB2")
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0]]).bool()
BOTH_LOSSES = pytest.mark.parametrize("loss", ["surrogate", "relaxed"])
TWO_OMEGAS = pytest.mark.parametrize("name", ["negentropy", "l2"])


def layer(constraints=IOB2, seed: int = 1, **options) -> CRF:
    """Five tags, random parameters, float64."""
    crf = CRF(5, constraints=constraints, **options).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in (crf.transition_scores, crf.start_scores, crf.end_scores):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return crf


def scores(*batch: int, steps: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*batch, steps, 5, generator=generator, dtype=torch.float64)


def gold(crf: CRF, mask: Tensor) -> Tensor:
    """Tags that the constraints allow, −100 at skipped steps."""
    torch.manual_seed(3)
    drawn = bx.Chain.from_scores(
        torch.zeros(*mask.shape, 5),
        torch.zeros(5, 5).masked_fill(~crf.allowed_transitions, -math.inf),
        start=torch.zeros(5).masked_fill(~crf.allowed_starts, -math.inf),
        mask=mask,
    ).sample_sequences()
    return drawn.masked_fill(~mask, -100)


def listed(crf: CRF, emissions: Tensor) -> tuple[Tensor, Tensor]:
    """Every sequence of tags (N, T) for emissions (T, S), and its score (N,), −∞ if it is forbidden."""
    steps = len(emissions)
    y = torch.cartesian_prod(*[torch.arange(5)] * steps).reshape(-1, steps)
    total = crf.start_scores[y[:, 0]] + crf.end_scores[y[:, -1]] + emissions[torch.arange(steps), y].sum(-1)
    total = total + crf.transition_scores[y[:, 1:], y[:, :-1]].sum(-1)
    fine = crf.allowed_starts[y[:, 0]] & crf.allowed_ends[y[:, -1]]
    fine &= crf.allowed_transitions[y[:, 1:], y[:, :-1]].all(-1)
    return y, total.detach().masked_fill(~fine, -math.inf)


def test_is_the_likelihood_of_the_tags_by_enumeration(backend: str) -> None:
    crf, emissions, tags = layer(), scores(4), gold(layer(), MASK)
    emissions[~MASK] = math.nan
    loss = crf(emissions, tags, mask=MASK, reduction="none")
    best_scores, best = crf.topk(emissions, 7, mask=MASK)
    marginals = crf.marginals(emissions, mask=MASK)
    for b in range(3):
        steps = MASK[b]
        y, total = listed(crf, emissions[b][steps])
        right = total[(y == tags[b][steps]).all(-1)].squeeze()
        torch.testing.assert_close(loss[b], total.logsumexp(0) - right)
        wanted, order = total.topk(7)
        torch.testing.assert_close(best_scores[b], wanted)
        assert torch.equal(best[b][:, steps], y[order])
        assert (best[b][:, ~steps] == -1).all()
        one_hot = torch.nn.functional.one_hot(y, 5).double()
        torch.testing.assert_close(marginals[b][steps], torch.einsum("n,nts->ts", total.softmax(0), one_hot))
    assert torch.equal(crf.decode(emissions, mask=MASK), best[:, 0])


@BOTH_LOSSES
def test_is_the_loss_of_that_name(loss: str, omega: bx.Regularizer, backend: str) -> None:
    crf, emissions = layer(omega=omega, loss=loss), scores(4).requires_grad_()
    tags = gold(crf, MASK)
    p = crf.distribution(emissions, mask=MASK)
    inputs = (emissions, *crf.parameters())
    got, wanted = crf(emissions, tags), getattr(losses, loss)(p, tags)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@BOTH_LOSSES
@pytest.mark.parametrize("omega", [bx.Negentropy(), bx.SquaredL2(4.0)], ids=["negentropy", "l2"])
def test_learns_a_constrained_task(omega: bx.Regularizer, loss: str) -> None:
    # A token shows whether it is outside or opens a segment; only the last token of a segment shows its type.
    # The relaxed loss under l2 has no gradient if a correct tag has probability 0; a large γ and zero weights avoid it.
    crf, model = CRF(5, omega=omega, constraints=IOB2, loss=loss), torch.nn.Linear(4, 5)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tags = CRF(5, constraints=IOB2).distribution(torch.zeros(64, 8, 5)).sample_sequences()
    after = torch.cat((tags[:, 1:], torch.zeros_like(tags[:, :1])), 1)
    opens = (tags == 1) | (tags == 3)
    closes = (tags > 0) & (after != 2) & (after != 4)
    features = torch.stack((tags == 0, opens, closes & (tags < 3), closes & (tags >= 3)), -1).float()
    optimizer = torch.optim.Adam([*model.parameters(), *crf.parameters()], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        crf(model(features), tags).backward()
        optimizer.step()
    assert torch.equal(crf.decode(model(features)), tags)
    assert (model(features).argmax(-1) != tags).any()  # impossible without the transitions


@pytest.mark.parametrize("scheme", ["IOB2", "IOBES"])
def test_never_emits_forbidden_tags(scheme: str, omega: bx.Regularizer, backend: str) -> None:
    labels = LABELS if scheme == "IOB2" else ["O", "B-X", "I-X", "E-X", "S-X"]
    allowed = tag_constraints(labels, scheme)
    crf, emissions = layer(allowed, omega=omega), 5 * scores(40)
    mask = torch.rand(40, 6) < 0.7
    p = crf.distribution(emissions, mask=mask)
    sequences = torch.cat((crf.topk(emissions, 4, mask=mask)[1].movedim(1, 0), p.sample_sequences((5,)))).flatten(0, 1)
    assert torch.equal(crf.decode(emissions, mask=mask), sequences[:40])
    for sequence in sequences:
        y = sequence[sequence >= 0]
        if len(y):
            assert allowed.starts[y[0]]
            assert allowed.ends[y[-1]]
            assert allowed.transitions[y[1:], y[:-1]].all()
    marginals = crf.marginals(emissions, mask=mask)
    torch.testing.assert_close(marginals.sum(-1), mask.double())
    assert not p.pairwise_marginals[..., ~allowed.transitions].any()
    first = mask & (mask.cumsum(-1) == 1)
    assert not marginals[first][:, ~allowed.starts].any()


@BOTH_LOSSES
def test_holes_equal_the_sequence_without_them(loss: str, omega: bx.Regularizer, backend: str) -> None:
    crf = layer(omega=omega, loss=loss)
    emissions, tags = scores(4).requires_grad_(), gold(crf, MASK)
    padded = emissions.masked_fill(~MASK.unsqueeze(-1), math.nan)
    by_mask = crf(padded, tags.masked_fill(~MASK, 99), mask=MASK, reduction="none")
    by_tags = crf(padded, tags, reduction="none")
    assert torch.equal(by_mask, by_tags)
    assert (by_mask >= 0).all()
    (gradient,) = torch.autograd.grad(by_mask.sum(), emissions)
    assert not gradient[~MASK].any()
    for b in range(4):
        steps = MASK[b]
        squeezed = emissions[b][steps].unsqueeze(0)
        alone = crf(squeezed, tags[b][steps].unsqueeze(0), reduction="none")[0]
        torch.testing.assert_close(by_mask[b], alone)
        torch.testing.assert_close(gradient[b], torch.autograd.grad(alone, emissions)[0][b])


@BOTH_LOSSES
def test_lengths_and_reductions(loss: str, backend: str) -> None:
    crf, emissions, lengths = layer(loss=loss), scores(2, 3), torch.tensor([[6, 4, 2], [1, 5, 3]])
    mask = torch.arange(6) < lengths.unsqueeze(-1)
    tags = gold(crf, mask)
    tags[0, 0, 2:4] = -100
    tags[0, 0, 4] = 1
    each = crf(emissions, tags, lengths=lengths, reduction="none")
    assert each.shape == (2, 3)
    torch.testing.assert_close(each, crf(emissions, tags, mask=mask, reduction="none"))
    torch.testing.assert_close(crf(emissions, tags, lengths=lengths), each.mean())
    torch.testing.assert_close(crf(emissions, tags, lengths=lengths, reduction="sum"), each.sum())
    torch.testing.assert_close(crf(emissions[1, 1], tags[1, 1], lengths=lengths[1, 1]), each[1, 1])
    assert torch.equal(crf.decode(emissions, lengths=lengths), crf.decode(emissions, mask=mask))
    other = tags.masked_fill(tags == -100, 77)
    torch.testing.assert_close(crf(emissions, other, lengths=lengths, ignore_index=77), each.mean())


def test_sets_of_allowed_tags(backend: str) -> None:
    crf, emissions, tags = layer(), scores(4), gold(layer(), MASK)
    sets = torch.nn.functional.one_hot(tags.clamp(min=0), 5).bool()
    whole = crf(emissions, tags, mask=MASK, reduction="none")
    torch.testing.assert_close(crf(emissions, sets, mask=MASK, reduction="none"), whole)
    nothing = crf(emissions, torch.ones_like(sets), mask=MASK, reduction="none")
    torch.testing.assert_close(nothing, torch.zeros(4).double())
    sets[0, 2] = True
    y, total = listed(crf, emissions[0])
    fits = sets[0][torch.arange(6), y].all(-1)
    wanted = total.logsumexp(0) - total[fits].logsumexp(0)
    partial = crf(emissions, sets, mask=MASK, reduction="none")
    torch.testing.assert_close(partial[0], wanted)
    assert partial[0] < whole[0]


@BOTH_LOSSES
@TWO_OMEGAS
def test_forbidden_transitions_have_zero_gradient_and_others_do_not(name: str, loss: str, backend: str) -> None:
    crf = layer(omega=name, loss=loss)
    crf(scores(4), gold(crf, MASK), mask=MASK).backward()
    for parameter in crf.parameters():
        assert parameter.grad.isfinite().all()
    assert not crf.transition_scores.grad[~IOB2.transitions].any()
    assert not crf.start_scores.grad[~IOB2.starts].any()
    assert crf.transition_scores.grad.any()


@BOTH_LOSSES
def test_small_sizes(loss: str, omega: bx.Regularizer, backend: str) -> None:
    one = CRF(1, omega=omega, loss=loss)
    emissions = torch.randn(2, 1, 1, requires_grad=True)
    value = one(emissions, torch.zeros(2, 1, dtype=torch.int64))
    value.backward()
    assert value == 0
    assert one.decode(emissions).tolist() == [[0], [0]]
    assert one.decode(emissions[:, :0]).shape == (2, 0)
    assert not emissions.grad.any()
    five = layer(omega=omega, loss=loss)
    assert five(scores(2, steps=1), torch.ones(2, 1, dtype=torch.int64)).isfinite()


@pytest.mark.filterwarnings("ignore:no sequence of the scheme")
def test_batches_without_an_allowed_sequence() -> None:
    crf = CRF(2, constraints=tag_constraints(["B-X", "I-X"], "IOBES"))  # no tag may end a sequence
    emissions = torch.randn(2, 3, 2)
    assert (crf.decode(emissions) == -1).all()
    assert not crf.marginals(emissions).any()
    with pytest.raises(ValueError, match=r'tags\[0, 2\] = 1 .* no sequence to end with tag 1 \("I-X"\)'):
        crf(emissions, torch.tensor([[0, 1, 1], [0, 1, 1]]))


@BOTH_LOSSES
@TWO_OMEGAS
def test_forbidden_tags_are_named(name: str, loss: str, backend: str) -> None:
    crf, emissions = CRF(5, constraints=IOB2, omega=name, loss=loss), torch.zeros(3, 4, 5)
    tags = torch.tensor([[0, 1, 2, 2], [1, 2, 4, 0], [2, 0, 0, 0]])
    after = r'the constraints allow no transition from tag 2 \("I-X"\) to tag 4 \("I-Y"\)\.'
    with pytest.raises(ValueError, match=rf"^tags\[1, 2\] = 4 is forbidden: {after}"):
        crf(emissions, tags)
    start = r'the constraints allow no sequence to start with tag 2 \("I-X"\)\.'
    with pytest.raises(ValueError, match=rf"^tags\[0, 0\] = 2 is forbidden: {start}"):
        crf(emissions[2:], tags[2:])
    with pytest.raises(ValueError, match=rf"^tags\[0, 1, 2\] = 4 is forbidden: {after}"):
        crf(emissions.unsqueeze(0), tags.unsqueeze(0))
    with pytest.raises(ValueError, match=rf"^tags\[2\] = 4 is forbidden: {after}"):
        crf(emissions[1], tags[1])
    across = r'from tag 0 \("O"\) at step 1 to tag 2 \("I-X"\)'
    with pytest.raises(ValueError, match=rf"^tags\[0, 3\] = 2 is forbidden: .* {across}"):
        crf(emissions[:1], torch.tensor([[1, 0, -100, 2]]))
    assert crf(emissions[:1], torch.tensor([[1, -100, -100, 2]])) > 0
    sets = torch.zeros(1, 4, 5, dtype=torch.bool)
    sets[:, :, 0] = True
    sets[0, 3] = torch.tensor([False, False, True, False, True])
    either = r'from tag 0 \("O"\) to tag 2 \("I-X"\) or tag 4 \("I-Y"\)'
    with pytest.raises(ValueError, match=rf"^tags\[0, 3\] is forbidden: the constraints allow no transition {either}"):
        crf(emissions[:1], sets)
    emissions[0, 1, 1] = -math.inf
    with pytest.raises(ValueError, match=r"^tags\[0, 1\] = 1 is forbidden: emissions\[0, 1, 1\] is -inf$"):
        crf(emissions[:1], tags[:1])


@pytest.mark.filterwarnings("ignore:no sequence of the scheme")
@pytest.mark.parametrize(
    ("scheme", "labels", "tags", "advice"),
    [
        (
            "IOB2",
            ["O", "B-PER", "I-PER"],
            [0, 2, 0],
            r'valid in the scheme "IOB1": .* or convert the data to "IOB2"\.$',
        ),
        ("IOB2", ["O", "B-PER", "I-PER"], [0, 0, 2], r'or convert the data to "IOB2"\.$'),
        (
            "IOB2",
            ["O", "B-PER", "I-PER"],
            [2, 2, 0],
            r'"IOB1".*window.* starts inside .*starts=torch\.ones_like\(constraints\.starts\)',
        ),
        ("IOBES", ["O", "B-PER", "I-PER"], [0, 1, 0], r'valid in the scheme "IOB2"'),
        ("IOBES", ["O", "B", "I", "E", "S"], [0, 1, 2], r"data\. If .* window .* ends inside an entity, .*ends=torch"),
        ("IOB2", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], [1, 4, 3], r"\. Check the tagging scheme of the data\.$"),
    ],
)
def test_the_likely_cause_of_a_forbidden_tag_is_named(
    scheme: str, labels: list[str], tags: list[int], advice: str
) -> None:
    crf = CRF(len(labels), constraints=tag_constraints(labels, scheme))
    emissions = torch.zeros(2, 3, len(labels))
    with pytest.raises(ValueError, match=advice):
        crf(emissions, torch.tensor([[0, 0, 0], tags]))
    with pytest.raises(ValueError, match=advice):
        copy.deepcopy(crf).eval()(emissions, torch.tensor([[0, 0, 0], tags]))


def test_constraints_without_labels_name_tags_by_number() -> None:
    crf = CRF(2, constraints=(torch.eye(2) > 0, torch.ones(2) > 0, torch.ones(2) > 0))
    message = r"^tags\[1\] = 1 is forbidden: .* from tag 0 to tag 1\. Check the tagging scheme of the data\.$"
    with pytest.raises(ValueError, match=message):
        crf(torch.zeros(2, 2), torch.tensor([0, 1]))


def test_labels_of_constraints_survive_changes_and_copies() -> None:
    made = tag_constraints(["O", "B-PER", "I-PER"])
    free = made._replace(starts=torch.ones(3, dtype=torch.bool))
    assert CRF(3, constraints=free)(torch.zeros(2, 3), torch.tensor([2, 2])) > 0
    for constraints in (free, pickle.loads(pickle.dumps(free)), copy.deepcopy(free)):
        with pytest.raises(ValueError, match=r'from tag 0 \("O"\) to tag 2 \("I-PER"\)'):
            CRF(3, constraints=constraints)(torch.zeros(2, 3), torch.tensor([0, 2]))
    transitions, starts, ends = made
    assert (transitions.shape, starts.shape, ends.shape) == ((3, 3), (3,), (3,))


def test_errors() -> None:
    crf, emissions, tags = CRF(3), torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64)
    wrong = tags.clone()
    wrong[1, 2] = 3
    negative = tags.clone()
    negative[1, 0] = -2
    lengths, mask = torch.tensor([4, 2]), torch.ones(2, 4, dtype=torch.bool)
    for call, message in [
        (lambda: crf(emissions[0, 0], tags), r"emissions must have shape \(..., T, 3\), got \(3,\)"),
        (lambda: crf.decode(torch.zeros(2, 4, 5)), r"emissions must have shape \(..., T, 3\), got \(2, 4, 5\)"),
        (lambda: crf(emissions.long(), tags), "emissions must be floating point"),
        (lambda: crf(emissions, tags[0]), r"tags must be integers of shape \(2, 4\).*got torch.int64 of shape \(4,\)"),
        (lambda: crf(emissions, tags.tolist()), r"tags must be a tensor, got list: pass torch.as_tensor\(tags\)"),
        (lambda: crf(emissions, tags.float()), r"got torch.float32 of shape \(2, 4\)"),
        (lambda: crf(emissions, tags.bool()), r"bool tags must have the shape of the emissions, \(2, 4, 3\)"),
        (
            lambda: crf(emissions, wrong),
            "tags must be from 0 to 2, -1 for any, or -100 .*, got 3 at step 2 of sequence 1",
        ),
        (lambda: crf(emissions, negative), "got -2 at step 0 of sequence 1"),
        (lambda: crf(emissions, tags, mask=mask, lengths=lengths), "pass either lengths or mask, not both"),
        (lambda: crf.decode(emissions, mask=mask, lengths=lengths), "pass either lengths or mask, not both"),
        (lambda: crf(emissions, tags, mask=mask.float()), "mask must be bool"),
        (lambda: crf(emissions, tags, mask=mask[0]), r"mask must have shape \(2, 4\), got \(4,\)"),
        (lambda: crf(emissions, tags, lengths=lengths + 1), "lengths must be from 0 to 4, got 5"),
        (lambda: crf(emissions, tags, lengths=lengths.float()), "lengths must hold integers, got dtype torch.float32"),
        (lambda: crf(emissions * math.nan, tags), "emissions must be finite or -inf, got nan"),
        (lambda: crf(emissions, tags, reduction="tokens"), "reduction must be"),
        (lambda: crf(emissions, tags, mask=mask.long() * 2), r"mask must hold 0 and 1, got 2 at \(0, 0\)"),
        (
            lambda: crf(emissions.numpy(), tags),
            r"emissions must be a tensor, got ndarray: pass torch.as_tensor\(emissions\)",
        ),
        (lambda: crf.topk(emissions, 0), "k must be at least 1"),
        (lambda: CRF(0), "num_tags must be at least 1, got 0"),
        (lambda: CRF(3, loss="hinge"), "loss must be one of 'surrogate', 'relaxed', got 'hinge'"),
        (lambda: CRF(3, omega="soft"), "omega must be"),
        (lambda: CRF(3, constraints=IOB2), r"transitions of constraints must be a bool tensor of shape \(3, 3\)"),
        (lambda: CRF(5, constraints=IOB2[:2]), r"constraints must be a triple \(transitions, starts, ends\), got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_state_dict_round_trip() -> None:
    crf, file = layer(), io.BytesIO()
    assert not {"transitions", "start_transitions", "end_transitions"} & crf.state_dict().keys()
    torch.save(crf.state_dict(), file)
    file.seek(0)
    fresh = CRF(5, constraints=IOB2).double()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    emissions = scores(20)
    assert torch.equal(fresh.decode(emissions), crf.decode(emissions))
    assert torch.equal(fresh.allowed_transitions, IOB2.transitions)
    assert fresh.to("meta").allowed_starts.is_meta
    assert IOB2.transitions.data_ptr() != crf.allowed_transitions.data_ptr()
    assert {name for name, _ in crf.named_parameters()} == {"transition_scores", "start_scores", "end_scores"}


def test_learns_gamma() -> None:
    gamma = torch.nn.Parameter(torch.tensor(2.0).double())
    crf, fixed = layer(omega=bx.Negentropy(gamma)), layer(omega=bx.Negentropy(2.0))
    emissions, tags = scores(4), gold(crf, MASK)
    loss = crf(emissions, tags, mask=MASK)
    torch.testing.assert_close(loss, fixed(emissions, tags, mask=MASK))
    assert torch.autograd.grad(loss, gamma)[0] > 0
    assert "gamma" in crf.state_dict()


def test_is_deterministic(backend: str) -> None:
    emissions, results = scores(4), []
    for _ in range(2):
        crf, leaf = layer(omega="l2"), emissions.clone().requires_grad_()
        crf(leaf, gold(crf, MASK), mask=MASK).backward()
        results.append((leaf.grad, crf.transition_scores.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "loss"), [("negentropy", "surrogate"), ("l2", "relaxed")])
def test_compile_forward_and_backward(name: str, loss: str) -> None:
    crf = layer(omega=name, loss=loss)
    emissions, tags = scores(4).requires_grad_(), gold(crf, MASK)
    inputs = (emissions, *crf.parameters())
    run = torch.compile(crf, fullgraph=True, backend="aot_eager")
    compiled = run(emissions, tags, mask=MASK)
    eager = crf(emissions, tags, mask=MASK)
    torch.testing.assert_close(compiled, eager)
    for got, wanted in zip(torch.autograd.grad(compiled, inputs), torch.autograd.grad(eager, inputs), strict=True):
        torch.testing.assert_close(got, wanted)
    for wrong in (2, 5, -2):  # I-X cannot start, and there is no tag 5 or -2
        tags[0, 0] = wrong
        assert run(emissions, tags, mask=MASK) == math.inf


def test_compile_decode() -> None:
    crf, emissions = layer(), scores(4)
    compiled = torch.compile(crf.decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(emissions, mask=MASK), crf.decode(emissions, mask=MASK))


@BOTH_LOSSES
def test_export(loss: str) -> None:
    crf, batch = layer(loss=loss), torch.export.Dim("batch")
    shapes = {"emissions": {0: batch}, "tags": {0: batch}, "mask": {0: batch}}
    program = torch.export.export(crf, (scores(4), gold(crf, MASK)), {"mask": MASK}, dynamic_shapes=shapes)
    for size in (crf.num_tags, 7):
        emissions, mask = scores(size), (torch.rand(size, 6) < 0.6) | (torch.arange(6) == 2)
        tags = gold(crf, mask)
        torch.testing.assert_close(program.module()(emissions, tags, mask=mask), crf(emissions, tags, mask=mask))


@BOTH_LOSSES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_emissions(dtype: torch.dtype, loss: str, backend: str) -> None:
    crf, tags = layer(loss=loss).float(), gold(layer(), MASK)
    emissions = scores(4).to(dtype).requires_grad_()
    value = crf(emissions, tags, mask=MASK)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, crf(emissions.float(), tags, mask=MASK))
    value.backward()
    assert emissions.grad.dtype == dtype
    linear = torch.nn.Linear(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = crf(linear(torch.randn(4, 6, 3)), tags, mask=MASK)
    value.backward()
    assert value.dtype == torch.float32
    assert linear.weight.grad.isfinite().all()
    assert linear.weight.grad.any()


PARALLEL = """
import sys
from datetime import timedelta

import torch
from bellmax.nn import CRF, tag_constraints

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.crf = CRF(3, constraints=tag_constraints(["O", "B-X", "I-X"]), omega="l2")

    def forward(self, x, tags):
        return self.crf(self.linear(x), tags)

def gradients(rows, wrap):
    torch.manual_seed(0)
    x, tags, model = torch.randn(6, 5, 4), torch.tensor([0, 1, 2, -100, 0]).repeat(6, 1), Tagger()
    wrapped = wrap(model)
    wrapped(x[rows], tags[rows]).backward()
    return {name: p.grad for name, p in model.named_parameters()}

def in_parallel(rank, folder):
    there = {"init_method": f"file://{folder}/meet", "timeout": timedelta(seconds=60)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, **there)
    try:
        return gradients(slice(rank, None, 2), torch.nn.parallel.DistributedDataParallel)
    finally:
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.save(in_parallel(1, sys.argv[1]), sys.argv[1] + "/other.pt")
"""


@pytest.mark.slow
def test_data_parallel_gives_the_gradients_of_one_process(tmp_path) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    functions = runpy.run_path(str(script))
    alone = functions["gradients"](slice(None), lambda model: model)
    first = functions["in_parallel"](0, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    other = torch.load(tmp_path / "other.pt", weights_only=True)
    assert alone.keys() == first.keys() == other.keys()
    for name, gradient in alone.items():
        assert gradient.any()
        torch.testing.assert_close(first[name], gradient)
        torch.testing.assert_close(other[name], gradient)


# --- configuration and state


def test_constraints_survive_a_foreign_state_dict() -> None:
    crf, free = CRF(5, constraints=IOB2), CRF(5)
    torch.nn.init.normal_(free.transition_scores)
    crf.load_state_dict(free.state_dict())
    assert crf.allowed_transitions.equal(IOB2.transitions)
    assert crf.allowed_starts.equal(IOB2.starts)
    assert crf.transition_scores.equal(free.transition_scores)
    assert set(crf.state_dict()) == {"transition_scores", "start_scores", "end_scores"}


def test_old_checkpoints_load() -> None:
    model = torch.nn.ModuleDict({"crf": CRF(5, constraints=IOB2)})
    old = {f"crf.allowed_{name}": tensor for name, tensor in IOB2._asdict().items()}
    old |= {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    state = dict(old)
    model.load_state_dict(old)
    assert old.keys() == state.keys()
    assert model["crf"].transition_scores.equal(old["crf.transition_scores"])
    with pytest.warns(UserWarning, match=r"crf.allowed_transitions, crf.allowed_starts of the state_dict are ignored"):
        torch.nn.ModuleDict({"crf": CRF(5)}).load_state_dict(old)


def test_meta_device_and_deferred_initialisation() -> None:
    gamma = torch.nn.Parameter(torch.tensor(2.0))
    with torch.device("meta"):
        crf = CRF(5, constraints=tag_constraints(LABELS, "IOB2"), omega=bx.Negentropy(gamma))
        attention = bx.nn.SegmentationAttention(3, 4)
    assert crf.transition_scores.is_meta
    for layer in (crf, attention):
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, 1e38)
        layer.reset_parameters()
    assert crf.gamma == 2
    assert not crf.transition_scores.any()
    assert not crf.start_scores.any()
    assert not crf.end_scores.any()
    assert crf.allowed_transitions.equal(IOB2.transitions)
    assert not attention.transitions.any()
    assert attention.weight.abs().max() < 10
    with torch.device("meta"), pytest.raises(ValueError, match="transitions of constraints must have values"):
        CRF(2, constraints=(torch.ones(2, 2).bool(), torch.ones(2).bool(), torch.ones(2).bool()))
    with torch.device("meta"):
        lost = CRF(2, omega=bx.Negentropy(torch.nn.Parameter(torch.tensor(2.0))))
    with pytest.raises(ValueError, match=r"gamma must have an initial value, .* device='cpu'"):
        lost.to_empty(device="cpu").reset_parameters()

    class Exp(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

        def right_inverse(self, gamma: Tensor) -> Tensor:
            return gamma.log()

    learnt = CRF(2, omega=bx.Negentropy(torch.nn.Parameter(torch.tensor(2.0))))
    torch.nn.utils.parametrize.register_parametrization(learnt, "gamma", Exp())
    torch.nn.init.zeros_(learnt.parametrizations.gamma.original)
    learnt.reset_parameters()
    torch.testing.assert_close(learnt.gamma.detach(), torch.tensor(2.0))
    learnt.to("meta").reset_parameters()
    pair = bx.nn.SmoothedMax(bx.Negentropy(torch.tensor([1.0, 3.0])))
    pair.to_empty(device="cpu").reset_parameters()
    assert pair.gamma.tolist() == [1.0, 3.0]


def test_attention_masks_of_tokenizers() -> None:
    crf, emissions, tags = layer(), scores(4), gold(layer(), MASK).masked_fill(~MASK, 0)
    assert crf(emissions, tags, mask=MASK.long()).equal(crf(emissions, tags, mask=MASK))
    assert crf.decode(emissions, mask=MASK.to(torch.uint8)).equal(crf.decode(emissions, mask=MASK))
    assert crf(emissions, tags.int(), mask=MASK).equal(crf(emissions, tags, mask=MASK))
    many, bytes_ = CRF(200), torch.tensor([[5, 156, 7]], dtype=torch.uint8)  # 156 is -100 in a byte
    torch.testing.assert_close(many(torch.zeros(1, 3, 200), bytes_), many(torch.zeros(1, 3, 200), bytes_.long()))


@BOTH_LOSSES
def test_rows_without_a_label_and_unknown_tags_under_compile(loss: str) -> None:
    crf, emissions = layer(loss=loss, omega=bx.SquaredL2(4.0)), scores(5)
    tags = torch.cat((gold(crf, MASK), torch.full((1, 6), -100)))
    tags[0, 2] = tags[1, 3] = -1
    run = torch.compile(crf, fullgraph=True, backend="aot_eager")
    each = crf(emissions, tags, reduction="none")
    assert each[4] == 0
    torch.testing.assert_close(run(emissions, tags, reduction="none"), each)
    torch.testing.assert_close(run(emissions, tags), each[:4].mean())


@BOTH_LOSSES
def test_rows_without_a_label_and_unknown_tags(loss: str, backend: str) -> None:
    crf, emissions = layer(loss=loss, omega=bx.SquaredL2(4.0)), scores(4)
    tags, run = gold(crf, MASK), crf
    each = run(emissions, tags, reduction="none")
    none = torch.full_like(tags[:1], -100)
    more, longer = torch.cat((emissions, emissions[:1])), torch.cat((tags, none))
    torch.testing.assert_close(run(more, longer, reduction="none"), torch.cat((each, each.new_zeros(1))))
    torch.testing.assert_close(run(more, longer), each.mean())
    torch.testing.assert_close(run(more, longer, reduction="token_mean"), each.sum() / MASK.sum())
    assert run(emissions[:1], none) == 0
    assert run(emissions, tags, lengths=[6, 0, 0, 0]) == each[0]
    unknown = tags.clone()
    unknown[0, 2] = unknown[1, 3] = -1
    sets = (unknown.unsqueeze(-1) == torch.arange(5)) | (unknown == -1).unsqueeze(-1)
    torch.testing.assert_close(
        run(emissions, unknown, reduction="none"), run(emissions, sets, mask=MASK, reduction="none")
    )
    torch.testing.assert_close(crf(emissions, unknown), getattr(losses, loss)(crf.distribution(emissions), unknown))
