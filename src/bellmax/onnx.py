"""Export of :meth:`bellmax.nn.CRF.decode` to ONNX, to run without torch and bellmax.

It needs ``onnxscript``, as :func:`torch.onnx.export` does, so bellmax does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import BOOL, DOUBLE, INT64, graph, opset18, script
from onnxscript.values import Opset

op: Any = opset18  # its annotations know no Python numbers, which it takes


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` for :func:`torch.onnx.export`.

    It covers ``CRF.decode``, and ``best_sequence`` of chains from :meth:`bellmax.Chain.from_scores`, with a mask, with
    lengths or with neither. Batch and steps may be dynamic; onnxruntime needs at least one step. The graph adds scores
    in float64, and does not check them.
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
    """The operator ``bellmax::topk``, for k = 1 and a chain from scores."""
    if structure != "scored_chain" or k != 1:
        raise ValueError(
            "only the best sequence of a chain from scores (CRF.decode, Chain.from_scores(...).best_sequence) "
            f"exports to ONNX, got k={k} for the structure {structure!r}"
        )
    emissions, transitions, start, end = (op.Cast(part, to=DOUBLE.dtype) for part in theta)
    if len(theta[1].shape) == 3:
        transitions = op.Unsqueeze(transitions, [1])
    if len(index) == 2:
        kept = index[1]
    elif index:
        kept = op.Less(op.Range(0, op.Squeeze(op.Shape(emissions, start=1, end=2)), 1), op.Unsqueeze(index[0], [1]))
    else:
        kept = op.Expand(True, op.Shape(emissions, start=0, end=2))
    scores, sequences = _viterbi(emissions, transitions, start, end, kept)
    return op.CastLike(scores, theta[0]), sequences


@script(Opset("bellmax", 1), default_opset=opset18)
def _viterbi(emissions: DOUBLE, transitions: DOUBLE, start: DOUBLE, end: DOUBLE, kept: BOOL) -> tuple[DOUBLE, INT64]:
    """Scores (B, 1) and sequences (B, 1, T), −1 where ``kept`` (B, T) is False, from θ as the sweeps take it."""
    steps = op.Range(0, op.Squeeze(op.Shape(emissions, start=1, end=2)), 1)
    places = op.Min(steps, op.Squeeze(op.Shape(transitions, start=1, end=2)))
    into = op.Pad(transitions, [0, 1, 0, 0, 0, 0, 0, 0])  # places[t] leads to step t
    # Scan could go along axis 1, but there onnxruntime 1.31 crashes (SIGFPE) if the batch is empty.
    by_step = op.Transpose(emissions, perm=[1, 0, 2])
    is_kept = op.Unsqueeze(op.Transpose(kept, perm=[1, 0]), [-1])

    @graph()
    def enter(best, begun, emission, place, here):  # type: ignore[no-untyped-def]
        ways, origin = op.TopK(op.Gather(into, place, axis=1) + op.Unsqueeze(best, [1]), [1])
        entered = op.Where(begun, op.Squeeze(ways, [-1]), best) + emission
        return op.Where(here, entered, best), op.Or(begun, here), op.Squeeze(origin, [-1])

    @graph()
    def leave(state, origin, here):  # type: ignore[no-untyped-def]
        return op.Where(here, op.GatherElements(origin, state, axis=1), state), op.Where(here, state, -1)

    batch = op.Shape(emissions, end=1)
    starts = op.Expand(start, op.Concat(batch, op.Shape(start, start=1), axis=0))
    none = op.Expand(False, op.Concat(batch, [1], axis=0))
    best, begun, origins = op.Scan(starts, none, by_step, places, is_kept, body=enter, num_scan_inputs=3)
    top, state = op.TopK(best + end, [1])
    score = op.Where(begun, top, op.CastLike(0.0, top))
    _, states = op.Scan(
        state, origins, is_kept, body=leave, num_scan_inputs=2, scan_input_directions=[1, 1], scan_output_directions=[1]
    )
    nowhere = op.Unsqueeze(op.IsInf(score), [-1])
    return score, op.Where(nowhere, -1, op.Transpose(states, perm=[1, 2, 0]))
