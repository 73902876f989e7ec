"""compat.torchcrf against pytorch-crf 0.7.2, argument by argument, in float64."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from support.checks import close
from torch import Tensor

from bellmax.compat.torchcrf import CRF

original = pytest.importorskip("torchcrf", reason="pytorch-crf is not installed")

STEPS, BATCH, TAGS = 6, 4, 3
LENGTHS = torch.tensor([6, 1, 4, 3])
BATCH_FIRST = pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])


def pair(batch_first: bool = False, tags: int = TAGS) -> tuple[CRF, torch.nn.Module]:
    theirs = original.CRF(tags, batch_first=batch_first).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours = CRF(tags, batch_first).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def batch(batch_first: bool, steps: int = STEPS, states: int = TAGS) -> tuple[Tensor, Tensor, Tensor]:
    emissions = torch.randn(steps, BATCH, states, dtype=torch.float64)
    tags, mask = torch.randint(states, (steps, BATCH)), torch.arange(steps).unsqueeze(1) < LENGTHS
    return tuple(x.transpose(0, 1) if batch_first else x for x in (emissions, tags, mask))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "token_mean"])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.uint8], ids=["no_mask", "bool", "uint8"])
@BATCH_FIRST
@pytest.mark.filterwarnings("ignore:.*uint8 condition tensor:UserWarning")
def test_values_gradients_and_decoded_paths(
    backend: str, batch_first: bool, dtype: torch.dtype | None, reduction: str
) -> None:
    ours, theirs = pair(batch_first)
    emissions, tags, mask = batch(batch_first)
    typed_mask = None if dtype is None else mask.to(dtype)
    gradients = []
    for crf in (ours, theirs):
        x = emissions.clone().requires_grad_()
        value = crf(x, tags, typed_mask, reduction=reduction)
        gradients.append((value, *torch.autograd.grad(value.sum(), (x, *crf.parameters()))))
    for actual, expected in zip(*gradients, strict=True):
        close(actual, expected)
    assert ours.decode(emissions, typed_mask) == theirs.decode(emissions, typed_mask)


@pytest.mark.parametrize(("steps", "states"), [(1, 3), (5, 1), (1, 1)])
def test_one_step_and_one_tag(backend: str, steps: int, states: int) -> None:
    ours, theirs = pair(tags=states)
    emissions, tags, mask = batch(False, steps, states)
    close(ours(emissions, tags, mask), theirs(emissions, tags, mask))
    assert ours.decode(emissions, mask) == theirs.decode(emissions, mask)


def test_ties_are_decoded_as_in_the_original(backend: str) -> None:
    ours, theirs = pair()
    for crf in (ours, theirs):
        for parameter in crf.parameters():
            parameter.data.round_()
    emissions, _, mask = batch(False)
    assert ours.decode(emissions.round(), mask) == theirs.decode(emissions.round(), mask)
    assert ours.decode(torch.zeros_like(emissions)) == theirs.decode(torch.zeros_like(emissions))


def test_loads_a_trained_state_dict_and_decodes_identically(backend: str) -> None:
    emissions, tags, mask = batch(True)
    trained = original.CRF(TAGS, batch_first=True)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (-trained(emissions.float(), tags, mask)).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    ours = CRF(TAGS, batch_first=True)
    ours.load_state_dict(torch.load(file, weights_only=True))
    many = torch.randn(64, 20, TAGS)
    assert ours.decode(many) == trained.decode(many)
    original.CRF(TAGS).load_state_dict(ours.state_dict())


def test_initialisation_and_repr_equal_the_original() -> None:
    torch.manual_seed(3)
    ours = CRF(5)
    torch.manual_seed(3)
    theirs = original.CRF(5)
    for (name, a), (expected, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == expected
        assert torch.equal(a, b)
    assert repr(ours) == repr(theirs)
    ours.reset_parameters()
    assert not torch.equal(ours.transitions, theirs.transitions)


ERRORS: dict[str, Callable[[type], object]] = {
    "num_tags": lambda crf: crf(0),
    "rank": lambda crf: crf(3)(torch.zeros(2, 3), torch.zeros(2, 3).long()),
    "tags_of_emissions": lambda crf: crf(3).decode(torch.zeros(2, 1, 4)),
    "tags_shape": lambda crf: crf(3)(torch.zeros(2, 1, 3), torch.zeros(1, 2).long()),
    "mask_shape": lambda crf: crf(3).decode(torch.zeros(2, 1, 3), torch.ones(1, 2).bool()),
    "first_step": lambda crf: crf(3).decode(torch.zeros(2, 1, 3), torch.tensor([[False], [True]])),
    "first_step_batch_first": lambda crf: crf(3, True).decode(torch.zeros(1, 2, 3), torch.tensor([[False, True]])),
    "all_off": lambda crf: crf(3)(torch.zeros(2, 1, 3), torch.zeros(2, 1).long(), torch.zeros(2, 1).bool()),
    "reduction": lambda crf: crf(3)(torch.zeros(2, 1, 3), torch.zeros(2, 1).long(), reduction="max"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_equal_the_original(name: str) -> None:
    messages = []
    for crf in (CRF, original.CRF):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
            ERRORS[name](crf)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# --- differences from the original


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_tags_that_are_not_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"tags must be of an integer type, got {dtype}"):
        CRF(3)(torch.zeros(2, 1, 3), torch.ones(2, 1, dtype=dtype))


def test_sequences_without_steps() -> None:
    with pytest.raises(ValueError, match=r"emissions must have at least one step, got shape \(0, 2, 3\)"):
        CRF(3).decode(torch.zeros(0, 2, 3))


def test_tags_out_of_range() -> None:
    crf, (emissions, tags, mask) = CRF(TAGS), batch(False)
    expected = crf(emissions, tags, mask)
    assert torch.equal(crf(emissions, tags.masked_fill(~mask, -100), mask), expected)  # ignored
    assert torch.equal(crf(emissions, tags.to(torch.uint8), mask), expected)
    tags[2, 3] = -1
    with pytest.raises(ValueError, match="tags must be from 0 to 2, got -1 in sequence 3 at step 2"):
        crf(emissions, tags)


@BATCH_FIRST
def test_holes_equal_the_sequence_without_them(backend: str, batch_first: bool) -> None:
    crf, _ = pair(batch_first)
    emissions, tags, mask = batch(True)
    mask = torch.ones_like(mask)
    mask[:, 2] = mask[:, 5] = False
    (x, y, m), (short, its_tags) = (emissions, tags, mask), (emissions[:, mask[0]], tags[:, mask[0]])
    if not batch_first:
        x, y, m, short, its_tags = (z.transpose(0, 1) for z in (x, y, m, short, its_tags))
    close(crf(x, y, m, "none"), crf(short, its_tags, None, "none"))
    assert crf.decode(x, m) == crf.decode(short)


def test_unreachable_tags_have_zero_gradient(backend: str) -> None:
    crf, _ = pair()
    with torch.no_grad():
        crf.transitions[:, 2] = crf.start_transitions[2] = -math.inf
    emissions, tags, _ = batch(False)
    emissions.requires_grad_()
    crf(emissions, tags.clamp(max=1)).backward()
    assert not emissions.grad[..., 2].any()
    assert all(parameter.grad.isfinite().all() for parameter in crf.parameters())


def test_sequences_without_a_path(backend: str) -> None:
    crf, (emissions, _, _) = CRF(TAGS), batch(False)
    emissions[1, 2] = -math.inf
    assert [len(best) for best in crf.decode(emissions)] == [STEPS, STEPS, 0, STEPS]


def test_second_order_and_brute_force(backend: str) -> None:
    crf = CRF(2).double()
    emissions, tags = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True), torch.tensor([[1], [0], [0]])
    total = torch.stack([crf(emissions, torch.tensor(y).unsqueeze(1)) for y in itertools.product((0, 1), repeat=3)])
    close(total.exp().sum(), total.new_ones(()))
    assert torch.autograd.gradcheck(lambda x: crf(x, tags), emissions)
    assert torch.autograd.gradgradcheck(lambda x: crf(x, tags), emissions)


def test_compiles_in_one_graph() -> None:
    crf, (emissions, tags, mask) = CRF(TAGS), batch(False)
    compiled = torch.compile(crf, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(emissions, tags, mask), crf(emissions, tags, mask))
