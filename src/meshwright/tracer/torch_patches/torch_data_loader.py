"""DataLoader without workers, since worker processes cannot send fake tensors; checked in torch 2.13."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from meshwright.tracer.torch_patches.torch_names import replace

_OF_WORKERS = (
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def read_without_workers() -> None:
    """Make each new DataLoader read without worker processes and pinned memory."""
    replace(DataLoader, "__init__", _without_workers)


def _without_workers(make: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        loader, more = given.pop("self"), given.pop("kwargs", {})
        make(loader, **{name: value for name, value in given.items() if name not in _OF_WORKERS}, **more)

    return made
