"""Tests of all named programs: transforms, compilation, batch members, copies and moves."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from support.checks import close
from support.inside import scores, with_scores
from support.problems import potentials
from torch import Tensor

import bellmax as bx
from bellmax.compat.torch import ctc_loss
from bellmax.compat.torchaudio import forced_align, rnnt_loss
from bellmax.nn import CTCLoss, TransducerLoss

Program = Callable[[Tensor], bx.PathDistribution]
PAIR = torch.tensor([3, 2]), torch.tensor([2, 1])
TARGETS = torch.tensor([[1, 2], [3, 1]])
PROGRAMS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "global": (lambda x: bx.SequenceAlignment(x, gap_open=-1.0, lengths=PAIR), (2, 3, 4)),
    "local": (lambda x: bx.SequenceAlignment(x, gap_open=-1.0, mode="local"), (2, 3, 4)),
    "semiglobal": (lambda x: bx.SequenceAlignment(x, gap_open=-1.0, mode="semiglobal", lengths=PAIR), (2, 3, 4)),
    "monotone": (lambda x: bx.MonotonicAlignment(x, lengths=PAIR), (2, 5, 3)),
    "transducer": (lambda x: bx.Transducer.from_logits(x, TARGETS, lengths=PAIR), (2, 3, 3, 4)),
    "additive": (lambda x: bx.Transducer.from_additive(x, x[:, :3], TARGETS), (2, 4, 4)),
    "semi_markov": (lambda x: bx.SemiMarkov(x, torch.eye(2).to(x), lengths=torch.tensor([5, 3])), (2, 5, 3, 2)),
    "segments": (lambda x: bx.SemiMarkov.from_scores(x, torch.eye(2).to(x), torch.eye(2).to(x)), (2, 5, 2)),
}
of_all = pytest.mark.parametrize("name", PROGRAMS)


def total(program: Program) -> Callable[[Tensor], Tensor]:
    return lambda x: program(x).value.sum()


@of_all
def test_transforms_agree_with_autograd(name: str) -> None:
    program, shape = PROGRAMS[name]
    x, z = potentials(*shape, requires_grad=True), potentials(*shape, seed=1)
    value = total(program)
    (gradient,) = torch.autograd.grad(value(x), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * z).sum(), x)
    plain = x.detach()
    close(torch.func.grad(value)(plain), gradient.detach())
    close(torch.func.jvp(value, (plain,), (z,))[1], (gradient * z).sum().detach())
    close(torch.func.jvp(torch.func.grad(value), (plain,), (z,))[1], product, 1e-9)
    close(torch.func.vmap(value)(torch.stack((plain, z))), torch.stack((value(plain), value(z))))


@pytest.mark.parametrize("name", ["semiglobal", "transducer", "semi_markov", "segments"])
def test_compiled_without_a_break(name: str) -> None:
    program, shape = PROGRAMS[name]
    x = potentials(*shape, requires_grad=True)
    compiled = torch.compile(total(program), fullgraph=True, backend="aot_eager")
    value, wanted = compiled(x), total(program)(x)
    close(value, wanted)
    close(torch.autograd.grad(value, x)[0], torch.autograd.grad(wanted, x)[0])


@of_all
def test_members_copies_and_types(name: str, backend: str) -> None:
    program, shape = PROGRAMS[name]
    p = program(potentials(*shape))
    for b, one in enumerate(p):
        close(one.value, p.value[b])
    close(p.expand((3, 2)).value, p.value.expand(3, 2))
    close(copy.deepcopy(p).value, p.value)
    close(pickle.loads(pickle.dumps(p)).value, p.value)
    single = p.to(torch.float32)
    assert single.value.dtype == torch.float32
    close(single.value.double(), p.value, 1e-4)
    close(torch.distributions.kl_divergence(p, p), [0.0, 0.0])


@of_all
def test_gamma_is_learnt(name: str, backend: str) -> None:
    program, shape = PROGRAMS[name]
    p = program(potentials(*shape))
    gamma = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def value(gamma: Tensor) -> Tensor:
        return with_scores(p, scores(p), bx.Negentropy(gamma)).value

    close(value(gamma)[1].detach(), with_scores(p, scores(p), bx.Negentropy(2.0)).value[1])
    assert torch.autograd.gradcheck(value, gamma, fast_mode=True)


# --- bad input

CTC, JOINT, AM, LM = torch.zeros(2, 5, 4), torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 4), torch.zeros(2, 3, 4)
SEQUENCES = torch.tensor([[1, 2, 0], [3, 1, 1]]), torch.tensor([[1, 2], [2, 2]])
MATRIX = potentials(4, 4)
WITH_LABELS: dict[str, Callable[..., object]] = {
    "CTC": lambda y, **options: bx.CTC(CTC, y, **options),
    "CTCLoss": lambda y, **options: CTCLoss()(CTC, y, **options),
    "from_logits": lambda y, **options: bx.Transducer.from_logits(JOINT, y, **options),
    "from_additive": lambda y, **options: bx.Transducer.from_additive(AM, LM, y, **options),
    "TransducerLoss": lambda y, **options: TransducerLoss()(JOINT, y, **options),
    "ctc_loss": lambda y, lengths=([5, 5], [2, 2]): ctc_loss(CTC.transpose(0, 1), y, *lengths),
    "forced_align": lambda y, lengths=([5, 5], [2, 2]): forced_align(CTC, y, *map(torch.tensor, lengths)),
    "rnnt_loss": lambda y, lengths=([5, 5], [2, 2]): rnnt_loss(JOINT, y, *map(torch.tensor, lengths), blank=0),
}
AS_TORCHAUDIO = "forced_align", "rnnt_loss"  # torch raises a RuntimeError for lengths and devices
of_labels = pytest.mark.parametrize("name", WITH_LABELS)


@of_labels
def test_bad_labels_and_lengths_are_named(name: str) -> None:
    call, error = WITH_LABELS[name], RuntimeError if name in AS_TORCHAUDIO else ValueError
    with pytest.raises(ValueError, match="targets must not hold the blank"):
        call(TARGETS * torch.tensor([1, 0]))
    for wrong, label in ((TARGETS + 3, 4), (TARGETS - 3, -2)):
        with pytest.raises(ValueError, match=f"targets must .*from 0 to 3, got {label}"):
            call(wrong)
    for lengths, message in (
        (([5, 6], [2, 2]), r"lengths(\[0\])? must be from \d to 5, got 6"),
        (([5, 5], [2, 3]), r"lengths(\[1\])? must be from 0 to 2, got 3"),
        (([5, 5], [-1, 2]), r"lengths(\[1\])? must be from 0 to 2, got -1"),
        (([5, 5, 5], [2, 2, 2]), "must broadcast, got .*'lengths.0.': .3,.|lengths must (be 2 numbers|have shape)"),
    ):
        with pytest.raises(error, match=message):
            call(TARGETS, lengths=lengths)
    if name != "ctc_loss":  # as torch does
        with pytest.raises(error, match=r"targets must be on the .*device.* cpu, got meta"):
            call(TARGETS.to("meta"))


def value_of(result: object) -> Tensor:
    if isinstance(result, bx.PathDistribution):
        return result.value
    return result[1] if isinstance(result, tuple) else result  # type: ignore[return-value]


@of_labels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_other_integers_are_cast(name: str, dtype: torch.dtype) -> None:
    call = WITH_LABELS[name]
    close(value_of(call(TARGETS.to(dtype))), value_of(call(TARGETS)))


@of_labels
def test_no_labels(name: str) -> None:
    call, frames = WITH_LABELS[name], [5, 3]
    none = value_of(call(torch.tensor([[0, 99], [-1, 0]]), lengths=(frames, [0, 0])))
    if name in ("CTC", "ctc_loss", "forced_align"):  # unnormalized scores
        assert not none.any()
    elif name in ("from_logits", "from_additive"):
        close(none, -torch.tensor(frames) * math.log(4))
    else:
        close(none, sum(frames) / 2 * math.log(4))


def test_sequences_and_lengths_that_do_not_fit_raise() -> None:
    a, b = SEQUENCES
    align = bx.SequenceAlignment.from_sequences
    for name, sequences in (("a", (a + 3, b)), ("a", (a - 1, b)), ("b", (a, b + 3)), ("b", (a, b - 3))):
        with pytest.raises(ValueError, match=f"{name} must hold labels from 0 to 3, got"):
            align(MATRIX, *sequences)
    with pytest.raises(ValueError, match=r"must broadcast, got shapes \{.*'lengths\[0\]': \(3,\)"):
        align(MATRIX, a, b, lengths=([3, 3, 3], [2, 2, 2]))
    with pytest.raises(ValueError, match=r"broadcast, got shapes \{'matrix': \(4, 4\), 'a': \(2, 3\), 'b': \(3, 2\)"):
        align(MATRIX, a, b.repeat(2, 1)[:3])
    with pytest.raises(ValueError, match="a must be on the potentials' device cpu, got meta"):
        align(MATRIX, a.to("meta"), b)
    padded = a.masked_fill(torch.tensor([[False, False, True], [False, False, False]]), 77)
    close(align(MATRIX, padded.int(), b, lengths=([2, 3], [2, 2])).value[0], align(MATRIX, a[0, :2], b[0]).value)


def test_a_gap_per_pair_differs_from_a_gap_per_position() -> None:
    scores, gap = potentials(3, 3, 3), torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    p = bx.SequenceAlignment(scores, gap_open=gap, gap_extend=-0.5)
    for b in range(3):
        close(p.value[b], bx.SequenceAlignment(scores[b], gap_open=float(gap[b]), gap_extend=-0.5).value)
    rows = bx.SequenceAlignment(scores, row_gaps=(gap, -0.5), gap_open=-1.0, gap_extend=-0.5)
    assert not torch.isclose(rows.value, p.value).any()
    with pytest.raises(
        ValueError, match=r"gap_open must be a number or broadcast to the batch shape \(\); row_gaps and"
    ):
        bx.SequenceAlignment(scores[0], gap_open=gap)


def test_padding_of_transducers_may_hold_any_number() -> None:
    blank, emit, am, lm = potentials(2, 4, 3), potentials(2, 4, 2), potentials(2, 4, 5), potentials(2, 3, 5)
    lengths, targets = ([4, 2], [2, 1]), torch.tensor([[1, 2], [3, 99]])
    inputs = [t.requires_grad_() for t in (blank, emit, am, lm)]
    padded = [t.clone() for t in inputs]
    padded[0][1, 2:], padded[0][1, :, 2:] = math.nan, math.inf
    padded[1][1, 2:], padded[1][1, :, 1:] = math.inf, math.nan
    padded[2][1, 2:], padded[3][1, 2:] = math.nan, math.inf
    p = bx.Transducer(*padded[:2], lengths=lengths)
    q = bx.Transducer.from_additive(*padded[2:], targets, lengths=lengths)
    close(p.value[1], bx.Transducer(blank[1, :2, :2], emit[1, :2, :1]).value)
    close(q.value[1], bx.Transducer.from_additive(am[1, :2], lm[1, :2], targets[1, :1]).value)
    assert all(g.isfinite().all() for g in torch.autograd.grad((p.value + q.value).sum(), inputs))


def test_a_wildcard_is_a_class_with_score_0() -> None:
    log_probs = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]).log()
    with_star = torch.nn.functional.pad(log_probs, (0, 1))
    labels, scores = forced_align(with_star.unsqueeze(0), torch.tensor([[1, 3, 1]]))
    assert labels.tolist() == [[1, 3, 3, 1]]
    close(scores[0].exp(), [0.8, 1.0, 1.0, 0.8], 1e-6)
