"""Information about this installation: its backends, and the kernels that they choose."""

from __future__ import annotations

import torch

from bellmax.backends.choice import backend_states
from bellmax.names import answers_near_misses
from bellmax.series.routes import describe_routes


@answers_near_misses
def backend_info(device: str | torch.device = "cpu", *, routes: bool = False) -> dict[str, str]:
    """Return a dictionary that tells which backend runs on a device, and which backends are available.

    The dictionary has these keys:

    - the name of the device, for example "cpu": the name of the backend that runs there, for every Ω that bellmax
      provides;
    - "native" and "triton": the state of these two backends, for example whether they are available;
    - "instructions": the processor instruction set of the compiled kernels;
    - "threads": the number of CPU threads.

    The backends are:

    - ``native``: compiled kernels on the CPU;
    - ``triton``: kernels for GPUs;
    - ``detour``: the CPU fallback, which copies tensors to the CPU and the results back;
    - ``reference``: plain torch on the device.

    Args:
        device: The device, default "cpu".
        routes: If True, add the key "dtw_routes". Its value is a text that lists the algorithms of ``bx.dtw`` and
            ``bx.dtw_cdist`` on this device, with conditions. A call uses the first algorithm in the list whose
            conditions all hold. Default False.

    >>> import bellmax as bx
    >>> sorted(bx.backend_info())
    ['cpu', 'instructions', 'native', 'threads', 'triton']
    >>> bx.backend_info("meta")["meta"]
    'reference'
    >>> print(bx.backend_info("meta", routes=True)["dtw_routes"])  # most routes need compiled kernels
    1. one node, for a batch of pairs if
       - a gradient is recorded
       - divergence is None or "debiased"
       - no step weights or penalties, no open ends
       - cost is "sqeuclidean", "cityblock" or, for one feature, "euclidean"
       - no torch.compile, torch.func or forward mode
       - gamma is a number, or a tensor of no wider dtype than the series
    2. distribution, for a batch of pairs otherwise
    """
    device = torch.device(device)
    states = backend_states(device)
    return states | {"dtw_routes": describe_routes(states[str(device)])} if routes else states
