"""Tag constraints against enumeration of the segmentations that each scheme can write."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from bellmax.nn import tag_constraints

PREFIXES = {"IOB1": "IB", "IOB2": "BI", "IOBES": "BIES", "BILOU": "BILU", "BMES": "BMES"}


def segments(count: int) -> list[list[tuple[int, int, str]]]:
    """Every way to put segments (first, last, type) of two types on some of ``count`` tokens."""
    if count <= 0:
        return [[]] if count == 0 else []
    listed = list(segments(count - 1))
    for size in range(1, count + 1):
        here = (count - size, count - 1)
        listed += [[*before, (*here, kind)] for before in segments(count - size) for kind in ("X", "Y-Z")]
    return listed


def written(scheme: str, count: int, spans: list[tuple[int, int, str]]) -> tuple[str, ...]:
    """The tags by which a scheme writes segments down."""
    tags = ["O"] * count
    for n, (first, last, kind) in enumerate(spans):
        for t in range(first, last + 1):
            if scheme == "IOB1":
                touches = n > 0 and spans[n - 1][1:] == (first - 1, kind)
                letter = "B" if t == first and touches else "I"
            elif scheme == "IOB2":
                letter = "B" if t == first else "I"
            else:
                begin, inside, end, single = {"IOBES": "BIES", "BILOU": "BILU", "BMES": "BMES"}[scheme]
                letter = single if first == last else begin if t == first else end if t == last else inside
            tags[t] = f"{letter}-{kind}"
    return tuple(tags)


@pytest.mark.parametrize("scheme", PREFIXES)
def test_constraints_allow_exactly_the_sequences_of_the_scheme(scheme: str) -> None:
    labels = ["O", *(f"{p}-{kind}" for kind in ("X", "Y-Z") for p in PREFIXES[scheme])]
    allowed = tag_constraints(labels, scheme)
    assert allowed.transitions.shape == (len(labels), len(labels))
    for count in (1, 2, 3, 4):
        valid = {written(scheme, count, spans) for spans in segments(count)}
        assert len(valid) == len(segments(count))
        got = set()
        for sequence in product(range(len(labels)), repeat=count):
            steps = all(allowed.transitions[now, before] for before, now in pairwise(sequence))
            if steps and allowed.starts[sequence[0]] and allowed.ends[sequence[-1]]:
                got.add(tuple(labels[tag] for tag in sequence))
        assert got == valid


def test_prefixes_without_a_type() -> None:
    plain, typed = tag_constraints("BMES", "BMES"), tag_constraints(["B-W", "M-W", "E-W", "S-W"], "BMES")
    for a, b in zip(plain, typed, strict=True):
        assert torch.equal(a, b)
    assert plain.transitions[:, 1].tolist() == [False, True, True, False]  # after M comes M or E


@pytest.mark.parametrize(
    ("labels", "scheme", "message"),
    [
        (["O", "B-X"], "IOB3", r"scheme must be one of 'IOB1', .*'BMES', got 'IOB3'"),
        (["O", "E-X"], "IOB2", r"labels of scheme 'IOB2' must be 'O', 'B-…', 'I-…' .*, got 'E-X'"),
        (["O", "PER"], "IOB2", r"got 'PER'"),
        (["O-X"], "IOBES", r"got 'O-X'"),
        (["B-"], "IOBES", r"got 'B-'"),
        (["O", "b-X"], "IOB2", r"got 'b-X'"),
        (["O", "B-X", "O"], "IOB2", r"labels must differ from each other, got 'O' twice"),
        ([], "IOB2", r"labels must hold at least one label"),
        ({0: "O", 1: "B-X"}, "IOB2", r"labels must be a sequence of strings, such as list\(id2label.values\(\)\)"),
        (["LABEL_0", "LABEL_1"], "IOB2", r"got 'LABEL_0'. These are the default names in transformers: pass id2label"),
        (["O", "B-X"], "iob2", r"got 'iob2'; iob2 is called IOB2 here"),
    ],
)
def test_errors(labels: list[str], scheme: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tag_constraints(labels, scheme)


@pytest.mark.parametrize(
    ("labels", "scheme", "unused"),
    [(["O", "B-X", "I-Y"], "IOB2", "I-Y"), (["O", "B-X"], "IOBES", "B-X"), (["O", "E-X", "S-X"], "IOBES", "E-X")],
)
def test_a_label_that_no_sequence_can_contain_is_named(labels: list[str], scheme: str, unused: str) -> None:
    with pytest.warns(UserWarning, match=f"no sequence of the scheme '{scheme}' can contain '{unused}'"):
        tag_constraints(labels, scheme)
