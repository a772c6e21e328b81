"""Time that a thread waits for collectives and P2P ops on processors; the two functions that wait are torch's (2.13).

All of eager code waits in one of them: a Work, from c10d, or wait_tensor, from functional collectives. On CUDA neither
blocks the host.
"""

import threading
import time
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist

_WORK: Any = dist.Work
_OPS: Any = torch.ops._c10d_functional


class WaitClock:
    """Counts the seconds that the thread which made it waits for others; use it in a `with`."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._thread = threading.get_ident()
        self._wait, self._wait_tensor = _WORK.wait, _OPS.wait_tensor

    def __enter__(self) -> Self:
        wait, wait_tensor, clock, work_class, ops = self._wait, self._wait_tensor, self, _WORK, _OPS

        def timed_wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return wait(work, *args, **kwargs)
            finally:
                clock._add(started_s)

        def timed_wait_tensor(tensor: torch.Tensor) -> Any:
            started_s = time.perf_counter()
            try:
                return wait_tensor(tensor)
            finally:
                clock._add(started_s)

        # Looked up by the policies of activation checkpointing.
        timed_wait_tensor.default = wait_tensor.default  # type: ignore[attr-defined]
        work_class.wait, ops.wait_tensor = timed_wait, timed_wait_tensor
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _WORK.wait, _OPS.wait_tensor = self._wait, self._wait_tensor

    def _add(self, started_s: float) -> None:
        if threading.get_ident() == self._thread:
            self.waited_s += time.perf_counter() - started_s
