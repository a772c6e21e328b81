"""A step on two streams, for the tracer: (device, rank, world_size, is_told) -> step."""

from __future__ import annotations

from collections.abc import Callable

import torch


def build(device: torch.device, rank: int, world_size: int, is_told: str) -> Callable[[], None]:
    """Return a step whose second stream reads a tensor that the first one frees, and may tell the allocator so."""
    accelerator = torch.get_device_module(device)
    side = accelerator.Stream()

    def step() -> None:
        y = torch.zeros(64, device=device)
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            y.mul(2)
        if is_told:
            y.record_stream(side)
        del y
        torch.zeros(64, device=device)

    return step
