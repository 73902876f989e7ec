"""Input conversion: lists, arrays, frames and tensors of the same numbers give the same results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import bellmax as bx
from bellmax.nn import CRF, CTCLoss, DTWAlignment, DTWLoss, SegmentationAttention, SmoothedMax, TransducerLoss
from bellmax.sklearn import DTWKMeans, DTWNeighborsClassifier

X, Y = [0.0, 1.5, 2.0, 1.0], [0.5, 2.0, 2.0]
ROWS = [[0.0, 1.0, 2.0, 1.0], [3.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 2.0]]
FRAMES, JOINT, LABELS = torch.zeros(3, 3), torch.zeros(3, 2, 3), torch.tensor([1])
PAIR = r"lengths=\(input_lengths, target_lengths\)"
FORMS: dict[str, Callable[[list[float]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "column": lambda v: np.array(v)[:, None],
    "reversed": lambda v: np.array(v[::-1])[::-1],
    "strided": lambda v: np.repeat(v, 2)[::2],
    "big-endian": lambda v: np.array(v, dtype=">f8"),
    "long double": lambda v: np.array(v, dtype=np.longdouble),
    "objects": lambda v: np.array(v, dtype=object),
    "pandas": pd.Series,
    "pandas, other index": lambda v: pd.Series(v, index=[3, 2, 1, 0][: len(v)]),
    "row": lambda v: pd.DataFrame([v], index=["a"]).loc["a"],
    "tensors": lambda v: [torch.tensor(entry, dtype=torch.float64) for entry in v],
}


def series(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


@pytest.mark.parametrize("form", FORMS)
def test_two_series_in_any_form(form: str) -> None:
    give = FORMS[form]
    wanted = bx.dtw(series(X), series(Y))
    assert wanted.dtype == torch.float64
    for got in (bx.dtw(give(X), give(Y)), bx.dtw(give(X), series(Y)), DTWLoss()(give(X), give(Y))):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(DTWAlignment()(give(X), give(Y)), DTWAlignment()(series(X), series(Y)))


def test_dtypes_are_promoted_and_integers_become_the_default() -> None:
    x, y = torch.tensor(X), np.array(Y)
    assert bx.dtw(x, y.astype(np.float32)).dtype == torch.float32
    assert bx.dtw(x, y).dtype == torch.float64
    assert bx.dtw(x, [1, 2]).dtype == torch.float32
    assert bx.dtw(np.arange(5.0), [0, 1, 2], omega="hard").equal(torch.tensor(5.0, dtype=torch.float64))
    assert bx.dtw([0, 1, 2], np.array([0, 2], dtype=np.uint8), omega="hard").equal(torch.tensor(1.0))
    assert bx.dtw([True, False], [0, 1], omega="hard").dtype == torch.get_default_dtype()
    assert bx.dtw(x.half(), [1, 2]).dtype == torch.float32
    assert DTWAlignment()(x.half(), [1, 2]).dtype == torch.float16
    assert bx.dtw_cdist([[0, 1], [2, 3]]).dtype == torch.get_default_dtype()
    assert bx.dtw_cdist([torch.tensor([0.0, 1.0]), np.array([2.0])]).dtype == torch.float64


def test_arrays_are_neither_changed_nor_kept() -> None:
    x = np.array(X)
    x.setflags(write=False)
    with_gradient = torch.tensor(Y, requires_grad=True)
    bx.dtw(x, with_gradient).backward()
    assert with_gradient.grad is not None
    assert x.tolist() == X


def test_costs_in_any_form() -> None:
    cost = [[0, 4, 9], [1, 1, 4]]
    wanted = bx.DTW(torch.tensor(cost).float())
    for form in (cost, np.array(cost), pd.DataFrame(cost), torch.tensor(cost)):
        assert bx.DTW(form).value.equal(wanted.value)


@pytest.mark.parametrize("omega", ["negentropy", "hard"])
def test_rows_of_a_frame_are_series(omega: str) -> None:
    wanted = bx.dtw_cdist(np.array(ROWS), omega=omega)
    assert wanted.shape == (3, 3)
    frame = pd.DataFrame(ROWS, index=["b", "a", "c"], columns=[f"t{t}" for t in range(4)])
    nested = pd.Series([np.array(row) for row in ROWS], index=[2, 0, 1])
    for form in (
        frame,
        frame.astype(object),
        nested,
        nested.rename(index=dict(enumerate("abc"))),
        nested.to_frame(),
        ROWS,
        [pd.Series(row) for row in ROWS],
        (row for row in ROWS),
        np.array([*map(np.array, ROWS)], dtype=object),
    ):
        torch.testing.assert_close(bx.dtw_cdist(form, omega=omega), wanted)
    ragged = frame.astype(float)
    ragged.iloc[1, 2:] = math.nan
    trimmed = [row if n != 1 else row[:2] for n, row in enumerate(ROWS)]
    torch.testing.assert_close(bx.dtw_cdist(ragged, omega=omega), bx.dtw_cdist(trimmed, omega=omega))
    torch.testing.assert_close(bx.dtw_cdist(frame, trimmed), bx.dtw_cdist(np.array(ROWS), trimmed))


def test_a_frame_is_one_series_for_dtw() -> None:
    frame = pd.DataFrame(np.array(ROWS).T)  # four steps, three features
    assert bx.dtw(frame, frame.iloc[:2]).equal(bx.dtw(torch.tensor(ROWS).T.double(), torch.tensor(ROWS).T[:2].double()))


def test_dtypes_of_arrays_and_frames() -> None:
    a = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    objects = np.empty(2, dtype=object)
    objects[0], objects[1] = a, 2 * a
    for form in ([a, 2 * a], [[a], [2 * a]], objects):
        (grad,) = torch.autograd.grad(bx.dtw(form, [1.0, 2.0]), a)
        assert grad != 0
    frame = pd.DataFrame(ROWS).astype("Float64")
    frame.iloc[1, 2:] = pd.NA
    wanted = bx.dtw_cdist([ROWS[0], ROWS[1][:2], ROWS[2]])
    torch.testing.assert_close(bx.dtw_cdist(frame), wanted)
    torch.testing.assert_close(bx.dtw_cdist(frame.astype(object)), wanted)
    cost = np.array([[0.0, 4.0], [1.0, 2.0]])
    p = bx.DTW(cost)
    value = p.value
    cost[:] = 7.0
    assert p.value.equal(value)
    assert bx.DTW(np.zeros((2, 4, 4)), lengths=(np.int64(3), 3)).value.shape == (2,)
    assert bx.Chain(torch.zeros(2, 4, 3, 3), lengths=3).lengths.tolist() == [3, 3]
    assert bx.Chain(torch.zeros(0, 4, 3, 3), lengths=[]).value.shape == (0,)
    weights = pd.Series([1, 2, 1], index=[5, 6, 7])
    assert bx.dtw_barycenter(ROWS, weights, max_iter=1).equal(bx.dtw_barycenter(ROWS, [1, 2, 1], max_iter=1))


def test_lists_of_lengths_under_compile() -> None:
    x, crf, align = torch.randn(2, 4, 3), CRF(3), DTWAlignment()
    for program in (
        lambda t: align(t, t, lengths=(3, [2, 4])),
        lambda t: bx.Chain.from_scores(t, torch.zeros(3, 3), lengths=[3, 2]).value,
        lambda t: crf.decode(t, mask=[[1, 1, 0, 1], [0, 1, 1, 1]]),
    ):
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), program(x))


@pytest.mark.parametrize(
    "call",
    [
        bx.dtw_cdist,
        lambda cases: bx.dtw_cdist([cases[0]], cases),
        lambda cases: bx.dtw_neighbors(cases, k=1),
        lambda cases: bx.dtw_barycenter(cases, max_iter=1),
        lambda cases: DTWKMeans(2, max_iter=1).fit(cases),
        lambda cases: DTWNeighborsClassifier(1).fit(cases, [0, 1, 0, 1]),
    ],
)
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_many_features_of_few_steps_may_be_transposed(call: Callable[[Any], Any], make: Callable[[Any], Any]) -> None:
    cases = np.random.default_rng(0).normal(size=(4, 3, 40))  # (cases, channels, time)
    with pytest.warns(UserWarning, match=r"3 steps with 40 features\. .*\(cases, channels, time\).*swapaxes\(1, 2\)"):
        call(make(cases))
    for fine in (cases.swapaxes(1, 2), list(cases), cases[:, :, :11], np.zeros((4, 20, 300))):
        bx.dtw_cdist(make(fine) if isinstance(fine, np.ndarray) else fine)


def test_series_of_equal_channels_and_other_lengths_may_be_transposed() -> None:
    rng = np.random.default_rng(0)
    cases = [rng.normal(size=(3, time)) for time in (5, 7)]  # (channels, time) of other lengths
    hint = r"got 7\. If the layout is \(channels, time\), .*X\.swapaxes\(1, 2\), or x\.T of each series"
    with pytest.raises(ValueError, match=r"xs\[1\] must have 5 features like xs\[0\], " + hint):
        bx.dtw_cdist(cases)
    with pytest.raises(ValueError, match=r"ys\[0\] must have 5 features like xs\[0\], " + hint):
        bx.dtw_neighbors(cases[:1], cases[1:], k=1)
    with pytest.raises(ValueError, match=r"X\[0\] must have 5 features, as the series of fit, " + hint):
        DTWNeighborsClassifier(1).fit(cases[:1], [0]).predict(cases[1:])
    with pytest.raises(ValueError, match=r"must have 5 features like xs\[0\], got 3\. If"):
        bx.dtw_cdist(cases[:1], [cases[0].T])


@pytest.mark.parametrize("call", [bx.dtw_cdist, bx.dtw_barycenter])
def test_the_layout_of_aeon_is_named(call: Callable[..., Tensor]) -> None:
    cases = np.random.default_rng(0).normal(size=(5, 1, 30))  # (cases, channels, time)
    with pytest.raises(ValueError, match=r"xs must hold series .*length 1 with 30 features.*swapaxes\(1, 2\)"):
        call(cases)
    with pytest.raises(ValueError, match="swapaxes"):
        call(list(cases))
    with pytest.raises(ValueError, match=r"length 1 with 30 features.* or x.T of each"):
        call([cases[0], cases[1][:, :20]])
    call(cases.swapaxes(1, 2))
    with pytest.raises(ValueError, match=r"xs and ys must hold"):
        bx.dtw_cdist(cases, cases)
    assert bx.dtw_cdist([[1.0], [2.0]]).shape == (2, 2)  # with one feature the layout is unambiguous


def test_barycenter_of_frames_and_lists() -> None:
    wanted = bx.dtw_barycenter(np.array(ROWS), [1, 1, 2], init=np.array(ROWS[0])[:, None], gamma=0.1)
    got = bx.dtw_barycenter(pd.DataFrame(ROWS), np.array([1, 1, 2]), init=ROWS[0], gamma=0.1)
    assert got.equal(wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bx.dtw("abc", X), "x must hold numbers, got dtype <U3"),
        (lambda: bx.dtw([{"a": 1}, 1.0], X), "x must hold numbers, got a dict"),
        (lambda: bx.dtw(["a", 1.0], X), "x must hold numbers, got dtype <U"),
        (
            lambda: bx.dtw([[1.0], [1.0, 2.0]], X),
            "x must be a rectangular array, .* dtw_cdist takes ragged collections",
        ),
        (lambda: bx.dtw([torch.zeros(1), torch.zeros(2)], X), "x must be a rectangular array"),
        (lambda: bx.dtw(pd.Series(["a", "b"]), X), "x must hold numbers"),
        (lambda: bx.dtw(pd.to_datetime(["2026-01-01"]), X), r"x must hold numbers, got dtype datetime64"),
        (lambda: bx.dtw(np.ma.masked_array(X, mask=[0, 0, 0, 1]), Y), "x must be an array without a mask"),
        (lambda: bx.Chain(torch.zeros(2, 4, 2, 2), lengths=[3, None]), "lengths must hold (numbers|integers)"),
        (lambda: bx.Chain(torch.zeros(2, 4, 2, 2), lengths=["3", "2"]), "lengths must hold numbers, got dtype <U1"),
        (lambda: bx.Chain(torch.zeros(2, 4, 2, 2), lengths=[[3], [2, 1]]), "lengths must be a rectangular array"),
        (lambda: CRF(2, constraints=3), r"constraints must be a triple \(transitions, starts, ends\), got 3"),
        (lambda: bx.dtw_barycenter(ROWS, "abc"), "weights must hold numbers"),
        (lambda: bx.dtw_cdist({"a": X}), "xs must be a collection of series, got a dict"),
        (lambda: bx.dtw_cdist("abc"), "xs must be a collection of series, got a str"),
        (lambda: bx.dtw_cdist(3), "xs must be a collection of series, got a int"),
        (lambda: bx.dtw_cdist(np.array(X)), r"xs must have shape \(K, N\) or \(K, N, D\), got \(4,\)"),
        (lambda: bx.dtw_cdist(X), r"xs\[0\] must have shape \(length,\) or \(length, features\), got \(\)"),
        (lambda: bx.dtw_cdist(pd.DataFrame({"a": ["x", "y"], "b": [1, 2]})), "xs must hold numbers, got 'x'"),
        (
            lambda: bx.Chain(np.zeros((3, 2, 2))),
            r"potentials must be a tensor, got ndarray: pass torch.as_tensor\(potentials\)",
        ),
        (lambda: bx.viterbi([[[0.0]]]), "potentials must be a tensor, got list"),
        (lambda: bx.Chain.from_scores(torch.zeros(3, 2), [[0, 0], [0, 0]]), "transitions must be a tensor, got list"),
        (lambda: bx.Chain.from_scores([[0.0]], torch.zeros(1, 1)), "emissions must be a tensor, got list"),
        (lambda: bx.Chain.from_scores(torch.zeros(3, 2), torch.zeros(2, 2), start=[0, 1]), "start must be a tensor"),
        (lambda: bx.DAG([(0, 1)]).paths([1.0]), "weights must be a tensor, got list"),
        (lambda: bx.DAG([(0, 1)]).paths(torch.ones(1)).log_prob([1]), "path must be a tensor"),
        (lambda: bx.Chain(torch.zeros(1, 2, 2)).hessian_product(0), "z must be a tensor, got int"),
        (lambda: bx.losses.surrogate(bx.Chain(torch.zeros(1, 2, 2)), [0]), "target must be a tensor, got list"),
        (lambda: SegmentationAttention(2, 2)(np.zeros((1, 2)), torch.zeros(1, 2)), "queries must be a tensor"),
    ],
)
def test_invalid_data_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- lengths and masks

MASK = [[1, 1, 1, 0], [1, 1, 0, 0]]
LENGTHS = [3, 2]


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.uint8)])
def test_lengths_and_masks_in_any_form(form: Callable[[Any], Any]) -> None:
    theta, tags = torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 0], [2, 1, 0, 0]])
    scores, transitions = torch.randn(2, 4, 3), torch.randn(3, 3)
    crf = CRF(3)
    programs: list[Callable[..., Tensor]] = [
        lambda **steps: bx.Chain(theta.unsqueeze(-1).expand(2, 4, 3, 3), **steps).value,
        lambda **steps: bx.Chain.from_scores(scores, transitions, **steps).value,
        lambda **steps: bx.viterbi(theta.unsqueeze(-1).expand(2, 4, 3, 3), **steps),
        lambda **steps: crf(scores, tags, **steps),
        lambda **steps: crf.decode(scores, **steps),
        lambda **steps: crf.marginals(scores, **steps),
    ]
    for program in programs:
        wanted = program(lengths=torch.tensor(LENGTHS))
        assert program(lengths=form(LENGTHS)).equal(wanted)
        torch.testing.assert_close(program(mask=form(MASK)), wanted)
    cost = torch.rand(2, 4, 5)
    wanted = bx.DTW(cost, lengths=(torch.tensor(LENGTHS), 5)).value
    assert bx.DTW(cost, lengths=(form(LENGTHS), 5)).value.equal(wanted)
    x, y = torch.randn(2, 4, 3), torch.randn(2, 5, 3)
    assert bx.dtw(x, y, lengths=(form(LENGTHS), 5)).equal(bx.dtw(x, y, lengths=(torch.tensor(LENGTHS), 5)))
    attention, keys = SegmentationAttention(3, 3), torch.randn(2, 4, 3)
    whole = attention(keys, keys, mask=torch.tensor(MASK).bool())
    assert attention(keys, keys, mask=form(MASK))[0].equal(whole[0])


def test_one_length_for_an_unbatched_chain() -> None:
    theta = torch.randn(4, 2, 2)
    assert bx.Chain(theta, lengths=2).value.equal(bx.Chain(theta[:2]).value)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"mask": torch.ones(2, 4)}, "mask must be bool, or integers 0 and 1, .* got dtype torch.float32"),
        ({"mask": [[1, 1, 1, 2], [1, 0, 0, 0]]}, r"mask must hold 0 and 1, got 2 at \(0, 3\)"),
        ({"mask": [1, 1, 1, 1]}, r"mask must have shape \(2, 4\), got \(4,\)"),
        ({"lengths": [1.5, 2.0]}, "lengths must hold integers, got dtype torch.float64"),
        ({"lengths": [1, 2, 3]}, r"lengths must have the batch shape \(2,\), got \(3,\)"),
        (
            {"lengths": torch.tensor([1, 2], device="meta")},
            "lengths must be on the device of the scores, cpu, got meta",
        ),
    ],
)
def test_wrong_lengths_and_masks_are_named(steps: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bx.Chain(torch.zeros(2, 4, 3, 3), **steps)


# --- common mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bx.dtw(X, Y, window=3), r"dtw\(\) has no argument 'window': use band="),
        (lambda: bx.dtw(X, Y, temperature=0.1), "use gamma="),
        (lambda: bx.dtw_cdist(ROWS, sakoe_chiba_radius=1), "use band="),
        (lambda: bx.dtw_cdist(ROWS, n_jobs=-1), r"no argument 'n_jobs': use torch.set_num_threads\(n\)"),
        (lambda: bx.dtw_cdist(ROWS, metric="cityblock"), "use cost="),
        (lambda: bx.dtw_barycenter(ROWS, tau=1.0), "use gamma="),
        (lambda: bx.DTW(torch.zeros(2, 2), bandwidth=1), "use band="),
        (lambda: bx.Chain(torch.zeros(1, 2, 2), temperature=2.0), "use gamma="),
        (lambda: bx.Chain.from_scores(torch.zeros(1, 2), torch.zeros(2, 2), attention_mask=None), "use mask="),
        (lambda: bx.DAG([(0, 1)]).paths(torch.zeros(1), temperature=2.0), "use gamma="),
        (lambda: CRF(3)(torch.zeros(1, 3), torch.zeros(1), attention_mask=None), "use mask="),
        (lambda: CRF(3).decode(torch.zeros(1, 3), attention_mask=None), "use mask="),
        (lambda: CRF(3, temperature=2.0), "use gamma="),
        (lambda: DTWLoss(temperature=2.0), "use gamma="),
        (lambda: SmoothedMax(temperature=2.0), "use gamma="),
        (lambda: bx.dtw(X, Y, colour=3), "'colour': its arguments are x, y, cost, lengths, band"),
        (lambda: CTCLoss()(FRAMES, LABELS, input_lengths=[3]), r"CTCLoss.forward\(\) has no .*: use " + PAIR),
        (lambda: CTCLoss().distribution(FRAMES, LABELS, target_lengths=[3]), "'target_lengths': use " + PAIR),
        (lambda: bx.CTC(FRAMES, LABELS, target_lengths=[1]), "'target_lengths': use " + PAIR),
        (lambda: TransducerLoss()(JOINT, LABELS, logit_lengths=[3]), "'logit_lengths': use " + PAIR),
        (lambda: bx.Transducer.from_logits(JOINT, LABELS, logit_lengths=[3]), "'logit_lengths': use " + PAIR),
        (lambda: TransducerLoss(fastemit_lambda=0.01), "use fastemit="),
        (lambda: DTWLoss()(FRAMES, FRAMES, input_lengths=[3]), "'input_lengths': use " + PAIR),
        (lambda: bx.Chain(torch.zeros(1, 2, 2), input_lengths=1), "'input_lengths': use lengths=$"),
        (lambda: CRF(3, batch_first=True), r"'batch_first': inputs are always batch-first, \(batch, time, \.\.\.\)"),
        (lambda: CTCLoss(batch_first=False), r"swap .* with x.transpose\(0, 1\)"),
        (lambda: CRF(3).decode(torch.zeros(1, 3), padding_mask=None), "use mask=~padding_mask, True at the steps"),
        (lambda: CRF(num_labels=3), "use num_tags="),
        (lambda: CRF(3)(torch.zeros(1, 3), labels=torch.zeros(1)), "use tags="),
        (lambda: bx.SequenceAlignment(torch.zeros(2, 2), gap_penalty=1), "use gap_open="),
        (lambda: bx.SequenceAlignment.from_sequences(torch.eye(2), LABELS, LABELS, gap_extension=1), "use gap_extend="),
    ],
)
def test_argument_names_of_other_libraries_get_a_hint(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: CTCLoss()(FRAMES, LABELS, [3], [1]),
            r"CTCLoss.forward\(\) takes 2 positional arguments \(scores, targets\), got 4: pass the others as " + PAIR,
        ),
        (lambda: TransducerLoss()(JOINT, LABELS, [3], [1]), r"\(logits, targets\), got 4: pass the others as " + PAIR),
        (lambda: CRF(3)(torch.zeros(1, 3), torch.zeros(1), torch.ones(1)), "pass the others as mask=, lengths="),
        (lambda: bx.Chain.from_scores(FRAMES, torch.zeros(3, 3), torch.zeros(3)), "pass the others as start=, end=,"),
        (lambda: bx.dtw(X, Y, "cityblock"), r"dtw\(\) takes 2 positional arguments \(x, y\), got 3: .* cost="),
    ],
)
def test_positional_use_of_keyword_arguments_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bx.dtw(X, Y, omega=0.1), "omega must be .* got 0.1; for the strength .* write gamma=0.1"),
        (lambda: DTWLoss(0.1), "got 0.1; .* write gamma=0.1"),
        (lambda: bx.dtw(X, Y, omega=bx.Negentropy), r"write Negentropy\(\), an instance"),
        (lambda: bx.dtw(X, Y, omega=bx.Negentropy(2.0), gamma=0.1), "gamma must be left out if omega is a Regularizer"),
        (lambda: bx.dtw(X, Y, omega="hard", gamma=0.1), "gamma must be left out with omega='hard'"),
        (lambda: bx.dtw(X, Y, gamma="small"), "gamma must be a finite number > 0, got 'small'"),
        (lambda: bx.dtw(X, Y, gamma=-1), "gamma must be a finite number > 0, got -1"),
    ],
)
def test_misspelt_names_of_omega_get_a_hint(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_gamma_with_a_name_of_omega_is_accepted_everywhere() -> None:
    theta, scores, cost = torch.randn(3, 2, 2), torch.randn(3, 2), torch.rand(3, 4)
    dag, weights = bx.DAG([(0, 1), (0, 1)]), torch.tensor([0.0, 1.0])
    for name, omega in (
        ("softmax", bx.Negentropy(0.3)),
        ("negentropy", bx.Negentropy(0.3)),
        ("l2", bx.SquaredL2(0.3)),
        ("sparsemax", bx.Tsallis(2.0, 0.3)),
        ("entmax", bx.Tsallis(1.5, 0.3)),
    ):
        entries: list[Callable[..., Any]] = [
            lambda **o: bx.Chain(theta, **o).value,
            lambda **o: bx.Chain.from_scores(scores, theta[0], **o).value,
            lambda **o: bx.viterbi(theta, **o),
            lambda **o: bx.DTW(cost, **o).value,
            lambda **o: dag.paths(weights, **o).value,
            lambda **o: bx.dtw(X, Y, **o),
            lambda **o: bx.dtw_cdist(ROWS, **o),
            lambda **o: bx.dtw_barycenter(ROWS, max_iter=2, **o),
            lambda **o: CRF(2, **o)(scores, torch.tensor([0, 1, 1])).detach(),
            lambda **o: DTWLoss(**o)(X, Y),
            lambda **o: DTWAlignment(**o)(X, Y),
            lambda **o: SmoothedMax(**o)(scores),
        ]
        for entry in entries:
            torch.testing.assert_close(entry(omega=name, gamma=0.3), entry(omega=omega), rtol=0, atol=0)
        assert repr(SegmentationAttention(2, 2, omega=name, gamma=0.3).omega) == repr(omega)


@pytest.mark.parametrize("normalize", ["path", "length"])
def test_normalised_losses_do_not_grow_with_the_series(normalize: str) -> None:
    x, y = torch.randn(3, 6, 2, dtype=torch.float64), torch.randn(3, 9, 2, dtype=torch.float64, requires_grad=True)
    p = bx.DTW((x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1))
    by = p.expected_path.sum((-1, -2)) if normalize == "path" else 15
    torch.testing.assert_close(bx.dtw(x, y, normalize=normalize), p.value / by)
    torch.testing.assert_close(DTWLoss(normalize=normalize)(x, y), (p.value / by).mean())
    lengths = torch.tensor([6, 2, 4]), torch.tensor([9, 3, 8])
    padded = bx.dtw(x, y, lengths=lengths, normalize=normalize)
    for b in range(3):
        alone = bx.dtw(x[b, : lengths[0][b]], y[b, : lengths[1][b]], normalize=normalize)
        torch.testing.assert_close(padded[b], alone)
    assert torch.autograd.gradcheck(lambda t: bx.dtw(x, t, normalize=normalize), y)
    debiased = bx.dtw(x, y, divergence="debiased")
    torch.testing.assert_close(bx.dtw(x, y, divergence="debiased", normalize=normalize), debiased / by)
    with pytest.raises(ValueError, match="normalize must be None or one of 'path', 'length', got 'mean'"):
        DTWLoss(normalize="mean")


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 2), (0, 0)])
def test_an_array_without_series_is_an_empty_collection(shape: tuple[int, ...]) -> None:
    assert bx.dtw_cdist(torch.zeros(shape), torch.zeros(2, 3)).shape == (0, 2)


@pytest.mark.parametrize("shape", [(2, 0), (2, 3, 0)])
def test_series_without_elements_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"xs\[0\] must have shape \(length,\)"):
        bx.dtw_cdist(torch.zeros(shape))
