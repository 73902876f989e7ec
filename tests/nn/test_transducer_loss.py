from __future__ import annotations

import pytest
import torch
from support.checks import close
from support.problems import potentials
from support.transducers import log_likelihood

import bellmax as bx

TARGETS = torch.tensor([[2, 1, 3], [3, 3, 1]], dtype=torch.int32)


def test_under_negentropy_it_is_the_usual_loss() -> None:
    logits = potentials(2, 4, 4, 5)
    lengths = torch.tensor([4, 3]), torch.tensor([3, 2])
    wanted = -torch.stack([log_likelihood(logits[b], TARGETS[b], 0, 4 - b, 3 - b) for b in range(2)])
    for reduction, reduced in (("none", wanted), ("mean", wanted.mean()), ("sum", wanted.sum())):
        close(bx.nn.TransducerLoss(reduction=reduction)(logits, TARGETS, lengths=lengths), reduced)


@pytest.mark.parametrize("omega", ["l2", "sparsemax", "entmax", "hard", "negentropy"])
@pytest.mark.parametrize("gamma", [0.3, 1.0])
def test_for_gamma_up_to_one_it_bounds_the_usual_loss_from_above(omega: str, gamma: float) -> None:
    usual = bx.nn.TransducerLoss(reduction="none")
    other = bx.nn.TransducerLoss(reduction="none", omega=omega, gamma=None if omega == "hard" else gamma)
    for seed in range(10):
        logits = 2 * potentials(2, 4, 4, 5, seed=seed)
        least, loss = usual(logits, TARGETS), other(logits, TARGETS)
        assert bool((loss >= least - 1e-9).all())
        assert bool((least >= 0).all())


def test_it_is_a_module() -> None:
    loss = bx.nn.TransducerLoss(blank=4, reduction="sum", gamma=0.5)
    assert repr(loss) == "TransducerLoss(blank=4, reduction='sum', omega=Negentropy(gamma=0.5))"
    with pytest.raises(ValueError, match="reduction must be one of"):
        bx.nn.TransducerLoss(reduction="average")
