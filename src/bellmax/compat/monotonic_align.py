"""The interface of ``monotonic_alignment_search``, and of ``monotonic_align`` in Glow-TTS and its successors."""

from __future__ import annotations

import torch
from torch import Tensor

from bellmax.inputs import check_tensor
from bellmax.structures.monotone import Monotone

__all__ = ["maximum_path"]


def maximum_path(value: Tensor, mask: Tensor) -> Tensor:
    """The best monotone alignment of tokens with frames, 0/1 of ``value``'s shape and dtype, without gradient.

    Every frame has one token, the first frame the first token, the last the last, and no token is left out. Unlike in
    the original, ``value`` may be on any device, −∞ may forbid a pair, and a text that is longer than its frames gives
    zeros.

    Args:
        value: (B, T_x, T_y) ``[token, frame]``: the score of each pair. In VITS the caller's axes are the other way
            round, frames before tokens: there ``maximum_path(value.mT, mask.mT).mT``, or :class:`bellmax.Monotone`.
        mask: (B, T_x, T_y), 1 within the tokens and frames of each text, 0 in the padding.

    >>> value = torch.tensor([[[2.0, 1.0, 0.0, 3.0], [0.0, 1.5, 1.0, 0.0]]])
    >>> maximum_path(value, torch.ones_like(value))
    tensor([[[1., 0., 0., 0.],
             [0., 1., 1., 1.]]])
    """
    if check_tensor("value", value).ndim != 3:
        raise ValueError(f"value must have shape (B, T_x, T_y), got {tuple(value.shape)}")
    if check_tensor("mask", mask).shape != value.shape:
        raise ValueError(f"mask must have the shape of value, {tuple(value.shape)}, got {tuple(mask.shape)}")
    kept = mask != 0
    tokens, frames = kept[:, :, 0].sum(1), kept[:, 0].sum(1)
    with torch.no_grad():
        scores = value.detach().masked_fill(~kept, 0).mT
        scores = scores if scores.is_floating_point() else scores.float()
        path = Monotone(scores, lengths=(frames, tokens), omega="hard").expected_path
    return path.mT.to(value.dtype)
