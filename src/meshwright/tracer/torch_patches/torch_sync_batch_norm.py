"""SyncBatchNorm on the simulated accelerator: its operators exist on CUDA only; checked in torch 2.13.

Their output shapes are registered here. Its forward excludes ranks without rows by a mask, which makes the host wait on
CUDA; all ranks are assumed to have rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import _functions

from meshwright.spec.trace.trace import RecordKind
from meshwright.tracer.record.simulated_device import device
from meshwright.tracer.torch_patches.torch_names import register_kernels, replace, with_values


def normalize_over_ranks() -> None:
    """Make SyncBatchNorm work under fake tensors, permanently."""
    shapes: dict[str, Callable[..., Any]] = {
        "batch_norm_stats": lambda x, _: _per_channel(x, 2),
        "batch_norm_gather_stats_with_counts": lambda x, *_: _per_channel(x, 2),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_backward_reduce": lambda _, x, *__: _per_channel(x, 4),
        "batch_norm_backward_elemt": lambda _, x, *__: torch.empty_like(x),
    }
    register_kernels("aten", shapes, "Meta")
    replace(_functions.SyncBatchNorm, "forward", _without_mask)


def _per_channel(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return `count` float32 tensors with a number for each channel of `x` [batch, channels, ...]."""
    return tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(count))


def _without_mask(forward: Callable[..., Any]) -> Any:
    @functools.wraps(forward)
    def normalized(*args: Any) -> Any:
        device.on(None, RecordKind.HOST_SYNC)
        with with_values(device, is_capturing=True):
            return forward(*args)

    return staticmethod(normalized)
