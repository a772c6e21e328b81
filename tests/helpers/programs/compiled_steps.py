"""The trainer's step with compiled graphs that run each time they are called, and with ones that must be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.tracer.compiled import compiled_graph
from meshwright.tracer.compiled.graph_replay import Capture
from meshwright.trainer.step.build_step import build_step


def build_run(device: torch.device, rank: int, world_size: int, *arguments: str) -> Callable[[], None]:
    """Return the step, in which no call is replayed."""
    compiled_graph.MAX_CAPTURES = 0
    return counted_step(build_step(device, rank, world_size, *arguments), must_replay=False)


def build_replayed(device: torch.device, rank: int, world_size: int, *arguments: str) -> Callable[[], None]:
    """Return the step; it fails where no call can be replayed."""
    return counted_step(build_step(device, rank, world_size, *arguments), must_replay=True)


def counted_step(step: Callable[[], Any], *, must_replay: bool) -> Callable[[], None]:
    """Return the step, which fails unless it has calls to replay as it must; both kinds have the same lines."""
    finish, num_captured = Capture.finish, 0

    def counted(*args: Any) -> Any:
        nonlocal num_captured
        found = finish(*args)
        num_captured += found is not None
        return found

    Capture.finish = counted  # type: ignore[method-assign]

    def run() -> None:
        step()
        assert (num_captured > 0) == must_replay

    return run
