"""Coalesced collectives (_coalescing_manager(), as for the buckets of Megatron-LM) and batched messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.distributed import distributed_c10d

from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.torch_patches.torch_names import replace

_WITHOUT_FAKES = ("allreduce_coalesced_", "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")
_META = torch._C.DispatchKey.Meta


def coalesce_collectives(mode: RecordingMode) -> None:
    """Make fake tensors work in coalesced collectives, whose wait waits for each of them, permanently."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _WITHOUT_FAKES:
        if not getattr(torch.ops.c10d, name).default.has_kernel_for_dispatch_key(_META):
            library.impl(name, lambda *_, **__: FakeWork().boxed(), "Meta")
    _kept.append(library)
    started = list[int]()

    def start(_: ProcessGroup, __: torch.device) -> None:
        started.append(mode.recorder.num_works)
        mode.num_batches += 1

    def end(_: ProcessGroup, __: torch.device) -> _Together:
        mode.num_batches -= 1
        return _Together(mode.works_since(started.pop()))

    # The fake group itself would return an unrelated work.
    replace(ProcessGroup, "_start_coalescing", lambda _: start)
    replace(ProcessGroup, "_end_coalescing", lambda _: end)
    # A fake group runs the messages of a batch one by one.
    batched = _batched(dist.batch_isend_irecv, mode)
    replace(dist, "batch_isend_irecv", lambda _: batched)
    replace(distributed_c10d, "batch_isend_irecv", lambda _: batched)


def _batched(send_and_receive: Callable[..., Any], mode: RecordingMode) -> Callable[..., Any]:
    @functools.wraps(send_and_receive)
    def called(*args: Any, **kwargs: Any) -> Any:
        mode.num_batches += 1
        try:
            return send_and_receive(*args, **kwargs)
        finally:
            mode.num_batches -= 1

    return called


class _Together:
    """A Work object for several works."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        """Return True: a trace has no time."""
        return True


_kept: list[torch.library.Library] = []
