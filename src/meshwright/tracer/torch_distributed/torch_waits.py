"""What FSDP2 and messages do without an operator: resized storages, and waits for torch's Work objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work

from meshwright.tracer.record.recording_mode import RecordingMode


@contextmanager
def resizing_watched(mode: RecordingMode) -> Iterator[None]:
    """FSDP frees what it gathered by giving its storage no bytes, which no operator tells."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        mode.resized(storage)
        return result

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def waiting_watched(mode: RecordingMode) -> Iterator[None]:
    """FSDP2 and messages wait for torch's Work objects, which no operator tells."""
    originals = [(kind, kind.wait) for kind in (FakeWork, Work)]

    def watched(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            mode.waited(work)
            return wait(work, *args, **kwargs)

        return waited

    for kind, wait in originals:
        kind.wait = watched(wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, wait in originals:
            kind.wait = wait  # type: ignore[method-assign]
