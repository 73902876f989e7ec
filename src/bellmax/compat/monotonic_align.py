"""A replacement for ``monotonic_alignment_search``, and for ``monotonic_align`` in Glow-TTS and its successors."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.inputs import check_tensor
from bellmax.structures.monotone import MonotonicAlignment

__all__ = ["maximum_path"]


def maximum_path(value: Tensor, mask: Tensor) -> Tensor:
    """Return the best monotonic alignment of tokens with frames, as ``monotonic_align.maximum_path`` does.

    The result is a 0/1 tensor of the shape and dtype of ``value``, without gradient. Every frame has one token, and
    every token has at least one frame. The first frame has the first token, and the last frame has the last token.
    Unlike in the original, ``value`` may be on any device, and −∞ forbids a pair. If there are more tokens than frames,
    the result is 0.

    Args:
        value: The score (B, T_x, T_y) ``[token, frame]`` of each pair. In VITS, frames come before tokens. For this
            layout, call ``maximum_path(value.mT, mask.mT).mT``, or use :class:`bellmax.MonotonicAlignment`.
        mask: A mask (B, T_x, T_y), 1 within the tokens and frames of each text, 0 in the padding.

    >>> value = torch.tensor([[[2.0, 1.0, 0.0, 3.0], [0.0, 1.5, 1.0, 0.0]]])
    >>> maximum_path(value, torch.ones_like(value))
    tensor([[[1., 0., 0., 0.],
             [0., 1., 1., 1.]]])
    """
    if check_tensor("value", value).ndim != 3:
        raise ValueError(f"value must have shape (B, T_x, T_y), got {tuple(value.shape)}")
    if check_tensor("mask", mask).shape != value.shape:
        raise ValueError(f"mask must have the shape of value, {tuple(value.shape)}, got {tuple(mask.shape)}")
    tokens, frames = (mask[:, :, 0] != 0).sum(1), (mask[:, 0] != 0).sum(1)
    with torch.no_grad():
        scores = value.detach().mT.contiguous()  # once, for two sweeps
        scores = scores if scores.is_floating_point() else scores.float()
        path = MonotonicAlignment(scores, lengths=(frames, tokens), omega="hard").expected_path
    return path.mT.to(value.dtype)
