"""Decoding in onnxruntime against torch. Each module is exported once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bellmax as bx
from bellmax.nn import CRF, tag_constraints

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
from bellmax.onnx import translations

# a warning of torch.onnx.export
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
DYNAMIC = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
SIZES = [(1, 1), (1, 7), (2, 1), (3, 2), (4, 6), (9, 25)]


class Decoder(nn.Module):
    def __init__(self, decode: Callable[..., Any], crf: CRF | None = None) -> None:
        super().__init__()
        self.decode, self.crf = decode, crf

    def forward(self, *inputs: Tensor) -> Any:
        return self.decode(*inputs)


def exported(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> torch.onnx.ONNXProgram:
    table = translations()
    program = torch.onnx.export(
        module.eval(), inputs, dynamic_shapes=shapes, dynamo=True, custom_translation_table=table, verbose=False
    )
    assert program is not None
    return program


def layer(tags: int, **options: Any) -> CRF:
    crf = CRF(tags, **options)
    for parameter in crf.parameters():
        nn.init.normal_(parameter)
    return crf


def some_mask(batch: int, steps: int) -> Tensor:
    """Masks with left padding, right padding and no step in the first three rows; then with holes."""
    step = torch.arange(steps)
    mask = torch.rand(batch, steps) < 0.6
    for row, steps_of_row in enumerate((step >= steps // 2, step <= steps // 2, step < 0)[:batch]):
        mask[row] = steps_of_row
    return mask


def test_mask_and_constraints() -> None:
    crf = layer(5, constraints=tag_constraints(["O", "B-X", "I-X", "B-Y", "I-Y"], scheme="IOB2"))
    module = Decoder(lambda emissions, mask: crf.decode(emissions, mask=mask), crf)
    program = exported(module, (torch.randn(3, 4, 5), some_mask(3, 4)), ((DYNAMIC, DYNAMIC),))
    for batch, steps in SIZES:
        mask = some_mask(batch, steps)
        emissions = torch.randn(batch, steps, 5).masked_fill(~mask.unsqueeze(-1), math.nan)
        (decoded,) = program(emissions, mask)
        assert decoded.equal(module(emissions, mask))
        assert (decoded >= 0).equal(mask)


def test_all_steps_count() -> None:
    crf, of_one_state = layer(4), layer(1)
    module = Decoder(lambda emissions: (crf.decode(emissions), of_one_state.decode(emissions[..., :1])), crf)
    program = exported(module, (torch.randn(3, 5, 4),), ((DYNAMIC,),))
    for batch, steps in [*SIZES, (0, 3)]:
        emissions = torch.randn(batch, steps, 4)
        for got, wanted in zip(program(emissions), module(emissions), strict=True):
            assert got.equal(wanted)


def test_ties_and_no_path() -> None:
    """The first of equal states wins, and the result is −1 if the constraints allow no sequence."""
    allowed = torch.ones(3, 3, dtype=torch.bool).tril()  # only the same or a higher state may follow
    crf = CRF(3, constraints=(allowed, torch.tensor([True, True, False]), torch.tensor([True, False, True])))
    module = Decoder(lambda emissions, lengths: crf.decode(emissions, lengths=lengths), crf)
    lengths = torch.tensor([4, 2, 0, 1, 3])
    program = exported(module, (torch.zeros(5, 4, 3), lengths), (({0: torch.export.Dim.DYNAMIC},) * 2,))
    for _ in range(10):
        emissions = torch.randint(-1, 2, (5, 4, 3)).float()
        emissions[0, 2, 1:] = -math.inf
        emissions[0, 1, 0] = -math.inf
        (decoded,) = program(emissions, lengths)
        assert decoded.equal(module(emissions, lengths))
        assert decoded[0].eq(-1).all()


def test_scores_of_each_step_in_half_precision() -> None:
    def decode(emissions: Tensor, transitions: Tensor, start: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return bx.Chain.from_scores(emissions, transitions, start=start, mask=mask).topk_sequences(1)

    def inputs(batch: int, steps: int) -> tuple[Tensor, ...]:
        scores = torch.randn(batch, steps, 3), torch.randn(batch, steps - 1, 3, 3), torch.randn(batch, 3)
        return *(score.half() for score in scores), some_mask(batch, steps)

    module, batch = Decoder(decode), {0: torch.export.Dim.DYNAMIC}
    program = exported(module, inputs(3, 6), ((DYNAMIC, DYNAMIC, batch, DYNAMIC),))
    for size in SIZES:
        tensors = inputs(*size)
        for got, wanted in zip(program(*tensors), module(*tensors), strict=True):
            torch.testing.assert_close(got, wanted)


def test_unsupported_programs_do_not_export() -> None:
    topk = translations()[torch.ops.bellmax.topk.default]
    for structure, k in (("scores", 2), ("chain", 1), ("dtw", 1)):
        with pytest.raises(ValueError, match=f"exports to ONNX, got k={k} for the structure '{structure}'"):
            topk(structure, "native", math.inf, 0.0, [], k, [])
