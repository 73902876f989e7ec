"""Measure the error of derivatives of other libraries that are wrong, and of bellmax for the same function.

A gradient is compared with finite differences of the loss of the library. A Hessian product is compared with finite
differences of the gradient of the library. Libraries that are not installed are left out.

    python benchmarks/mistakes.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rivals import peer
from torch import Tensor
from torch.nn.functional import ctc_loss

import bellmax as bx
from bellmax.compat import torch as ours_for_torch
from bellmax.compat import torchaudio as ours_for_torchaudio

Loss = Callable[[Tensor], Tensor]

STEP = {torch.float32: 1e-2, torch.float64: 1e-4}


def gradient(loss: Loss, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def hessian_product(loss: Loss, x: Tensor, z: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad((first * z).sum(), x)[0]


def slope(function: Loss, x: Tensor, z: Tensor) -> Tensor:
    """Directional derivative along z, by central differences."""
    step = STEP[x.dtype]
    return (function(x + step * z) - function(x - step * z)) / (2 * step)


def error(computed: Tensor, expected: Tensor) -> str:
    """Norm of the error relative to the norm of ``expected``, in percent."""
    return f"{100 * float((computed - expected).norm() / expected.norm()):.2g} %"


def of_gradient(losses: Sequence[Loss], x: Tensor) -> list[str]:
    """Error of ⟨gradient, z⟩ over 20 random directions z for each loss. The first loss is differenced."""
    directions = [torch.randn_like(x) for _ in range(20)]
    expected = torch.stack([slope(losses[0], x, z) for z in directions])
    return [error(torch.stack([(gradient(loss, x) * z).sum() for z in directions]), expected) for loss in losses]


def of_hessian(theirs: Loss, ours: Loss, x: Tensor) -> list[str]:
    """Error of the Hessian product in a random direction, for another library and for bellmax."""
    z = torch.randn_like(x)
    expected = slope(lambda at: gradient(theirs, at), x, z)
    return [error(hessian_product(loss, x, z), expected) for loss in (theirs, ours)]


def transducers() -> dict[str, tuple[Loss, Loss, Tensor]]:
    logits, targets = torch.randn(3, 12, 6, 8), torch.randint(1, 8, (3, 5)).int()
    lengths = torch.full((3,), 12).int(), torch.full((3,), 5).int()
    cases: dict[str, tuple[Loss, Loss, Tensor]] = {}
    if loss := peer("warprnnt_numba", "RNNTLossNumba"):
        criterion = loss(blank=0, reduction="sum")
        cases["warprnnt_numba"] = (
            lambda x: criterion(x.log_softmax(-1), targets, *lengths).sum(),
            lambda x: -bx.Transducer.from_logits(x, targets).value.sum(),
            logits,
        )
    if audio := peer("torchaudio.functional", "rnnt_loss"):
        arguments = targets, *lengths, 0
        cases["torchaudio rnnt_loss"] = (
            lambda x: audio(x, *arguments, reduction="sum"),
            lambda x: ours_for_torchaudio.rnnt_loss(x, *arguments, reduction="sum"),
            logits,
        )
    return cases


def main() -> None:
    torch.manual_seed(0)
    log_probs, targets = torch.randn(20, 2, 6, dtype=torch.float64).log_softmax(-1), torch.randint(1, 6, (2, 5))
    arguments = targets, (20, 20), (5, 5)
    losses = [
        lambda x: ctc_loss(x, *arguments, reduction="sum"),
        lambda x: ours_for_torch.ctc_loss(x, *arguments, reduction="sum"),
    ]
    rows = [["torch ctc_loss, gradient with respect to log_probs", *of_gradient(losses, log_probs)]]
    rows += [[f"{name}, Hessian product", *of_hessian(*problem)] for name, problem in transducers().items()]
    if decoder := peer("deepblast.nw", "NeedlemanWunschDecoder"):
        scores, gaps = torch.randn(2, 2, 5, 6, dtype=torch.float64)
        align = decoder("softmax")
        rows.append(
            [
                "DeepBLAST, gradient with respect to the gap scores",
                *of_gradient([lambda x: align(scores, x).sum()], gaps),
                "–",
            ]
        )
    print("| derivative | error of the library | error of bellmax |", "| --- | --- | --- |", sep="\n")
    for row in rows:
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
