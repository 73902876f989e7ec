"""Drop-in replacements for classes and functions of other libraries: the arguments and results are the same.

Only the import line changes: ``from torchcrf import CRF`` becomes ``from bellmax.compat.torchcrf import CRF``. The
docstrings list all differences from the replaced classes and functions. The modules are
:mod:`~bellmax.compat.torchcrf`, :mod:`~bellmax.compat.soft_dtw_cuda`, :mod:`~bellmax.compat.tslearn`,
:mod:`~bellmax.compat.torch_struct`, :mod:`~bellmax.compat.entmax`, :mod:`~bellmax.compat.torch` (its CTC loss),
:mod:`~bellmax.compat.torchaudio` and :mod:`~bellmax.compat.monotonic_align`. You do not need to install the library
that a module replaces.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from bellmax.names import attribute_error

if TYPE_CHECKING:
    from bellmax.compat import (
        entmax,
        monotonic_align,
        soft_dtw_cuda,
        torch,
        torch_struct,
        torchaudio,
        torchcrf,
        tslearn,
    )

__all__ = ["entmax", "monotonic_align", "soft_dtw_cuda", "torch", "torch_struct", "torchaudio", "torchcrf", "tslearn"]

if not TYPE_CHECKING:  # a type checker reports unknown names itself

    def __getattr__(name):
        if name in __all__:
            return import_module(f"bellmax.compat.{name}")
        raise attribute_error("bellmax.compat", name)
