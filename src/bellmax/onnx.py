"""Export of :meth:`bellmax.nn.CRF.decode` to ONNX. The exported model runs without torch and bellmax.

The module needs the package ``onnxscript``, as :func:`torch.onnx.export` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import BOOL, DOUBLE, INT64, graph, opset18, script
from onnxscript.values import Opset

op: Any = opset18  # Any: its annotations exclude Python numbers, which it accepts


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the argument ``custom_translation_table`` for :func:`torch.onnx.export`.

    The table translates two methods: ``CRF.decode``, and ``best_sequence`` of chains from
    :meth:`bellmax.Chain.from_scores`. You can export both methods with a mask, with lengths, or with neither of them.
    The batch size and the number of steps can be dynamic. onnxruntime needs at least one step. The exported graph adds
    up scores in float64 and does not check them, for example for NaN.
    """
    return {torch.ops.bellmax.topk.default: _topk}


def _topk(
    structure: str,
    backend: str,
    omega: str,
    parameters: Sequence[float],
    theta: Sequence[Any],
    k: int,
    index: Sequence[Any],
) -> tuple[Any, Any]:
    """Translate the operator ``bellmax::topk`` for k = 1 and a chain from scores: scores (B, 1), sequences (B, 1, T).

    The signature is the operator's. θ holds emissions, transitions, start and end scores. ``index`` is empty, or holds
    lengths, or lengths and a mask.
    """
    if structure != "scored_chain" or k != 1:
        raise ValueError(
            "only the best sequence of a chain from scores (CRF.decode, Chain.from_scores(...).best_sequence) "
            f"exports to ONNX, got k={k} for the structure {structure!r}"
        )
    emissions, transitions, start, end = (op.Cast(scores, to=DOUBLE.dtype) for scores in theta)
    if len(theta[1].shape) == 3:
        transitions = op.Unsqueeze(transitions, [1])
    if len(index) == 2:
        mask = index[1]
    elif index:
        mask = op.Less(op.Range(0, op.Squeeze(op.Shape(emissions, start=1, end=2)), 1), op.Unsqueeze(index[0], [1]))
    else:
        mask = op.Expand(True, op.Shape(emissions, start=0, end=2))
    best_scores, sequences = _viterbi(emissions, transitions, start, end, mask)
    return op.CastLike(best_scores, theta[0]), sequences


@script(Opset("bellmax", 1), default_opset=opset18)
def _viterbi(emissions: DOUBLE, transitions: DOUBLE, start: DOUBLE, end: DOUBLE, mask: BOOL) -> tuple[DOUBLE, INT64]:
    """Return the best scores (B, 1) and sequences (B, 1, T), −1 where ``mask`` (B, T) is False.

    Emissions are (B, T, S), transitions (B or 1, T − 1 or 1, S, S), start and end scores (B or 1, S).
    """
    steps = op.Range(0, op.Squeeze(op.Shape(emissions, start=1, end=2)), 1)
    rows = op.Min(steps, op.Squeeze(op.Shape(transitions, start=1, end=2)))
    padded = op.Pad(transitions, [0, 1, 0, 0, 0, 0, 0, 0])  # padded[:, rows[t]] leads to step t
    # Scan could go along axis 1, but there onnxruntime 1.31 crashes (SIGFPE) if the batch is empty.
    by_step = op.Transpose(emissions, perm=[1, 0, 2])
    mask_by_step = op.Unsqueeze(op.Transpose(mask, perm=[1, 0]), [-1])

    @graph()
    def forward(best, has_begun, emission, row, is_step):  # type: ignore[no-untyped-def]
        candidates, origin = op.TopK(op.Gather(padded, row, axis=1) + op.Unsqueeze(best, [1]), [1])
        extended = op.Where(has_begun, op.Squeeze(candidates, [-1]), best) + emission
        return op.Where(is_step, extended, best), op.Or(has_begun, is_step), op.Squeeze(origin, [-1])

    @graph()
    def backtrack(state, origin, is_step):  # type: ignore[no-untyped-def]
        return op.Where(is_step, op.GatherElements(origin, state, axis=1), state), op.Where(is_step, state, -1)

    batch = op.Shape(emissions, end=1)
    starts = op.Expand(start, op.Concat(batch, op.Shape(start, start=1), axis=0))
    never = op.Expand(False, op.Concat(batch, [1], axis=0))
    best, has_steps, origins = op.Scan(starts, never, by_step, rows, mask_by_step, body=forward, num_scan_inputs=3)
    top, state = op.TopK(best + end, [1])
    score = op.Where(has_steps, top, op.CastLike(0.0, top))
    _, states = op.Scan(
        state,
        origins,
        mask_by_step,
        body=backtrack,
        num_scan_inputs=2,
        scan_input_directions=[1, 1],
        scan_output_directions=[1],
    )
    is_forbidden = op.Unsqueeze(op.IsInf(score), [-1])
    return score, op.Where(is_forbidden, -1, op.Transpose(states, perm=[1, 2, 0]))
