"""Execution-mode predicates: eager, torch.compile, torch.func, forward mode, dispatch modes and tensor subclasses.

This table shows where each predicate is True, for a float32 tensor on the CPU that requires grad:

=================================  ========  ===========  ==========  ========  ==============  ==========
mode                               is_eager  is_readable  is_checked  is_plain  is_transformed  needs_grad
=================================  ========  ===========  ==========  ========  ==============  ==========
eager                              True      True         True        True                      True
no_grad, inference_mode            True      True         True        True
torch.compile                                                         True      True            True
vmap                                                                  True      True
torch.func.jvp                               True         True        True      True
torch.func.grad                              True         True        True      True            True
forward mode (a dual level)        True      True         True        True      True            True
meta device                        True                               True                      True
fake tensor in its mode                      True         True                  True            True
fake tensor outside its mode       True      True         True                  True            True
tensor subclass                    True      True         True                  True            True
another dispatch mode                        True         True        True      True            True
torch.jit.trace                              True         True        True      True            True
=================================  ========  ===========  ==========  ========  ==============  ==========

``tests/test_modes.py`` checks it. A fake tensor has no values although ``is_readable`` is True: operators handle it
before any value is read.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_F = TypeVar("_F", bound=Callable[..., Any])


def is_readable(x: Tensor) -> bool:
    """True if Python code may read the values of x: False under torch.compile and vmap, and on the meta device."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return True


def is_checked(x: Tensor) -> bool:
    """True if the values of x should be validated: readable and on the CPU. A GPU would have to synchronize."""
    return x.is_cpu and is_readable(x)


def is_eager() -> bool:
    """True if operations run when they are called: no compilation, tracing, torch.func or dispatch mode is active."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def cached_when_eager(make: _F) -> _F:
    """Decorate a function of hashable arguments: cache what it returns, in eager mode only.

    In other modes a tensor belongs to a trace or a transform and must not outlive it. Callers share the cached tensors
    and must not modify them.
    """

    @lru_cache(maxsize=64)
    def cached(*args: Any) -> Any:
        with torch.inference_mode(False):  # later calls may need to save the tensor for a backward
            return make(*args)

    @wraps(make)
    def call(*args: Any) -> Any:
        return cached(*args) if is_eager() else make(*args)

    return cast(_F, call)


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave torch.func, dispatch modes, inference mode and the default device, to build tensors that are cached."""
    with (
        torch._C._DisableFuncTorch(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.device("cpu"),
    ):
        yield


def is_plain(tensors: Iterable[Tensor]) -> bool:
    """True if all tensors are plain Tensors or Parameters. A subclass may wrap other tensors."""
    return _PLAIN.issuperset(map(type, tensors))


def is_transformed(*tensors: Tensor) -> bool:
    """True under torch.compile, tracing, torch.func, forward mode or a dispatch mode, or for a tensor subclass.

    Callers must then run kernels through operators, and must not read values.
    """
    return not is_eager() or forward_ad._current_level >= 0 or not is_plain(tensors)


def needs_grad(*tensors: Tensor) -> bool:
    """True if autograd records operations on these tensors for a backward."""
    return torch.is_grad_enabled() and True in [tensor.requires_grad for tensor in tensors]


class _DynamoImportHook(importlib.abc.MetaPathFinder):
    """Import hook that calls a function right after the first import of ``torch._dynamo``, then removes itself."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.is_searching = False  # so that the nested find_spec skips this hook

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self.function()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def once_dynamo_is_imported(function: Callable[[], None]) -> None:
    """Call a function that configures ``torch._dynamo``, now or when that module is first imported.

    The import takes seconds, and most programs never compile.
    """
    if "torch._dynamo" in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _DynamoImportHook(function))
