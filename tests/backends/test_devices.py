"""Tensors on the meta device instead of a GPU: code that reads a value or calls a native kernel fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.inside import BACKENDS, WARPING, index, scores
from support.problems import diamond
from torch import Tensor

import bellmax as bx
from bellmax.nn import CRF, SegmentationAttention

Made = Callable[..., Tensor]


def graph(make: Made) -> list[Tensor]:
    weights = make(2, 10)
    p = diamond().to(weights.device).paths(weights)
    return [p.value, p.expected_path, p.hessian_product(weights), p.entropy(), p.best_path(), p.sample((3,))]


def chain(make: Made) -> list[Tensor]:
    theta, lengths = make(2, 4, 3, 3), make(2).long()
    p = bx.Chain(theta, lengths=lengths)
    return [p.value, p.expected_path, p.hessian_product(theta), p.best_sequence(), p.sample_sequences((3,))]


def two_states(make: Made) -> list[Tensor]:
    p = bx.Chain.from_scores(make(2, 4, 2), make(2, 2), mask=make(2, 4).bool())
    return [p.value, p.marginals, p.best_sequence()]


def alignment(make: Made) -> list[Tensor]:
    cost, lengths = make(2, 3, 4), (make(2).long() + 1, make(2).long() + 1)
    p = bx.DTW(cost, lengths=lengths, band=1)
    return [p.value, p.expected_path, p.hessian_product(cost), p.best_alignment(), p.sample_alignments((3,))]


def expansions(make: Made) -> list[Tensor]:
    """Results that need a graph with a weight for each edge."""
    programs = [
        bx.Chain.from_scores(make(2, 4, 3), make(3, 3), omega="l2"),
        bx.DTW(make(2, 3, 4)),
        bx.DTW(make(2, 3, 4), open_end=True, step_weights=(2, 1, 1)),
        bx.MonotonicAlignment(make(2, 5, 3)),
        bx.SemiMarkov(make(2, 4, 2, 3), make(3, 3)),
        bx.CTC(make(2, 5, 3), make(2, 2).long()),
    ]
    return [result for p in programs for result in (p.entropy(), *p.topk(2), p.best_path(), p.sample((3,)))]


def series(make: Made) -> list[Tensor]:
    # The last pair is computed in blocks.
    return [
        bx.dtw(make(2, 3, 1), make(2, 4, 1)),
        bx.dtw(make(1100, 1), make(4000, 1)),
    ]


def layers(make: Made) -> list[Tensor]:
    emissions = make(2, 4, 3)
    crf = CRF(3).to(emissions.device)
    attention = SegmentationAttention(2, 3).to(emissions.device)
    heads = SegmentationAttention(2, 4, num_heads=2).to(emissions.device)
    attended = *attention(make(2, 4, 2), make(2, 5, 3)), *heads(make(2, 4, 2), make(2, 5, 4), is_causal=True)
    return [crf(emissions, make(2, 4).long()), crf.decode(emissions), *attended]


@pytest.mark.parametrize("program", [graph, chain, two_states, alignment, expansions, series, layers])
def test_another_device_has_the_shapes_and_types_of_the_cpu(program: Callable[[Made], list[Tensor]]) -> None:
    there = program(lambda *shape: torch.ones(shape, device="meta"))
    for got, wanted in zip(there, program(torch.ones), strict=True):
        assert got.device.type == "meta"
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)


def test_the_reference_serves_other_devices() -> None:
    cost = torch.ones(3, 4, device="meta", requires_grad=True)
    p = bx.DTW(cost)
    assert p.backend == "reference"
    (gradient,) = torch.autograd.grad(p.value, cost)
    assert gradient.shape == (3, 4)
    assert gradient.device.type == "meta"


def test_checks_read_no_value_on_other_devices() -> None:
    make = lambda *shape: torch.ones(shape, device="meta")  # noqa: E731
    lengths = make(2).long()
    for structure, p in {
        "dag": diamond().to("meta").paths(make(2, 10)),
        "chain": bx.Chain(make(2, 4, 3, 3), lengths=lengths),
        WARPING.name: bx.DTW(make(2, 3, 4), lengths=(lengths, lengths)),
    }.items():
        BACKENDS["reference"].sweeps(structure).check(scores(p), index(p))  # reading one would raise


def test_the_native_kernels_need_the_cpu(backend: str) -> None:
    cost = torch.ones(3, 4, device="meta")
    if backend == "native":
        with pytest.raises(ValueError, match="the native backend runs on the CPU, got tensors on meta"):
            bx.DTW(cost)
    else:
        assert bx.DTW(cost).value.shape == ()
