"""How much of a core a computing rank gets while a machine is calibrated; other programs take the rest.

Kernels are timed by the thread's own CPU time, which other programs do not lengthen; waits between ranks, and later
training steps, take wall time, which they do.
"""

import time

import torch

LEAST_IDLE = 0.95
"""Of a core: above this the rest is the kernel's and the clock's."""
_WIDTH, _PROBE_S = 256, 0.3


def core_share() -> float:
    """Return the CPU time over the wall time of matmuls of this thread alone, 0 to 1, measured in 0.3 s."""
    x = torch.randn(_WIDTH, _WIDTH)
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started_s < _PROBE_S:
        x @ x
    return min(1.0, (time.thread_time() - cpu_s) / (time.perf_counter() - started_s))


def relative_error_of(share: float) -> float | None:
    """Return what other programs took, which a step may be longer or shorter by, as a share; None on an idle machine.

    By an order of magnitude alone: what they take while a step runs may be more or less.
    """
    return None if share >= LEAST_IDLE else 1.0 - share
