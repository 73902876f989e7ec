"""Who looks at what is computed: autograd alone, or a compiler, torch.func, forward mode, a dispatch mode."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
_F = TypeVar("_F", bound=Callable[..., Any])


def is_readable(x: Tensor) -> bool:
    """Whether the values of x can be read: not while tracing, not under vmap, not on the meta device."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return True


def is_checked(x: Tensor) -> bool:
    """Whether the values of x are checked: where they can be read, and on a GPU the host would have to wait."""
    return x.device.type == "cpu" and is_readable(x)


def is_eager() -> bool:
    """Whether operations run as they are called: no compiler, no torch.func, no dispatch mode."""
    if torch.compiler.is_compiling():
        return False
    return not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def kept(make: _F) -> _F:
    """A decorator: tensors that nobody changes are made once for the same arguments, where operations run at once."""

    @lru_cache(maxsize=64)
    def keep(*args: Any) -> Any:
        with torch.inference_mode(False):
            return make(*args)

    @wraps(make)
    def call(*args: Any) -> Any:
        return keep(*args) if is_eager() else make(*args)

    return cast(_F, call)


def is_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors hold their numbers themselves: no subclass that stands for others."""
    return all(type(tensor) in _PLAIN for tensor in tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether something other than reverse mode looks: then kernels go through operators, and nothing is read."""
    return not is_eager() or forward_ad._current_level >= 0 or not is_plain(tensors)


def needs_grad(*tensors: Tensor) -> bool:
    """Whether reverse mode records what is computed from these."""
    return torch.is_grad_enabled() and True in [tensor.requires_grad for tensor in tensors]


class _OnceDynamoIsImported(importlib.abc.MetaPathFinder):
    """Runs a function when the front end of torch.compile is first imported, which costs seconds."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.asking = False  # for the finders that come after this one

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo" or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_run(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self.function()

        spec.loader.exec_module = execute_and_run  # type: ignore[method-assign]
        return spec


def once_dynamo_is_imported(function: Callable[[], None]) -> None:
    """Run a function that marks others for torch.compile: now, or when its front end is first imported."""
    if "torch._dynamo" in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _OnceDynamoIsImported(function))
