"""Collectives that a program has torch run as one, by _coalescing_manager(), as Megatron-LM does for its buckets."""

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
    """Have fake tensors go through torch's coalesced collectives, and who waits for them wait for each, for good."""
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

    # Up to now the group itself would answer with a work that is none of theirs.
    replace(ProcessGroup, "_start_coalescing", lambda _: start)
    replace(ProcessGroup, "_end_coalescing", lambda _: end)
    # A fake group takes the messages of a batch one by one.
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
    """What torch calls a Work: several that are waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        """Return whether all of them are done: in a trace, which keeps no time, they are."""
        return True


_kept: list[torch.library.Library] = []
