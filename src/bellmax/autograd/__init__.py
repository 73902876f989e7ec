"""The sweeps as differentiable functions."""

from bellmax.autograd.functions import (
    directional_derivative,
    expected_path,
    forward,
    hessian_product,
    log_transitions,
    max_marginals,
    node_values,
    sample,
    topk,
    value,
)
from bellmax.autograd.operators import Route
from bellmax.autograd.shortcut import Shortcut, attach

__all__ = ["Route", "Shortcut", "attach", "directional_derivative", "expected_path", "forward", "hessian_product"]
__all__ += ["log_transitions", "max_marginals", "node_values", "sample", "topk", "value"]
