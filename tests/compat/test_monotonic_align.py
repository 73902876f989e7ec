from __future__ import annotations

import math

import pytest
import torch
from support.problems import potentials

import bellmax as bx
from bellmax.compat.monotonic_align import maximum_path


def masks(tokens: torch.Tensor, frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    within = torch.arange(size[0])[:, None] < tokens[:, None, None], torch.arange(size[1]) < frames[:, None, None]
    return (within[0] & within[1]).float()


def test_equals_the_original() -> None:
    original = pytest.importorskip("monotonic_alignment_search")
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        tokens = torch.randint(1, 8, (6,), generator=generator)
        frames = tokens + torch.randint(0, 9, (6,), generator=generator)
        value, mask = potentials(6, 8, 16, seed=seed).float(), masks(tokens, frames, (8, 16))
        before = value.clone()
        path = maximum_path(value, mask)
        assert value.equal(before)
        assert path.equal(original.maximum_path(value.clone(), mask))
        rounded = value.round()  # ties: a frame stays with its token
        assert maximum_path(rounded, mask).equal(original.maximum_path(rounded.clone(), mask))


def test_equals_monotone_with_frames_first(backend: str) -> None:
    value = potentials(2, 3, 5)
    path = maximum_path(value, torch.ones_like(value))
    assert path.equal(bx.MonotonicAlignment(value.mT).best_path().mT)
    assert path.dtype == value.dtype


def test_padding_and_texts_without_a_path() -> None:
    value = torch.full((2, 3, 4), math.nan)
    value[0, :2, :3] = 0
    value[1, :3, :2] = 0
    path = maximum_path(value, masks(torch.tensor([2, 3]), torch.tensor([3, 2]), (3, 4)))
    assert path[0].tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert not path[1].any()


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="value must have shape"):
        maximum_path(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="mask must have the shape of value"):
        maximum_path(torch.zeros(1, 2, 3), torch.zeros(1, 3, 2))
