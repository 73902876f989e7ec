"""Drop-in replacements for classes and functions of other libraries, with the same arguments and results.

Only the import line changes: ``from torchcrf import CRF`` becomes ``from bellmax.compat.torchcrf import CRF``. The
modules are :mod:`~bellmax.compat.torchcrf`, :mod:`~bellmax.compat.soft_dtw_cuda`, :mod:`~bellmax.compat.tslearn`,
:mod:`~bellmax.compat.torch_struct`, :mod:`~bellmax.compat.entmax`, :mod:`~bellmax.compat.torch` (its CTC loss),
:mod:`~bellmax.compat.torchaudio` and :mod:`~bellmax.compat.monotonic_align`. None of them imports the library that it
replaces, except for torch.
"""

from importlib import import_module
from typing import Any

__all__ = ["entmax", "monotonic_align", "soft_dtw_cuda", "torch", "torch_struct", "torchaudio", "torchcrf", "tslearn"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"bellmax.compat.{name}")
    raise AttributeError(f"module 'bellmax.compat' has no attribute {name!r}")
