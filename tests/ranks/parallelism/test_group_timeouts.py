"""Groups of a mesh wait as long as run.timeout_s says, not as long as torch's own limit."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from meshwright.parallelism.mesh import build_meshes
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks

LIMIT_S = 2.0


def wait_alone() -> float:
    """Return the seconds after which a sum ended that one of two ranks has entered; of the others, 0."""
    assert dist.group.WORLD is not None
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=LIMIT_S))
    meshes = build_meshes(Layout(dp_replicate=2, dp_shard=2), "cpu")
    group = meshes.group("fsdp")
    assert group.size() < dist.get_world_size()
    started_s = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"Timed out|timed out|timeout"):
            dist.all_reduce(torch.ones(1), group=group)
        return time.monotonic() - started_s
    # Not gone: a closed connection would end it at once.
    time.sleep(LIMIT_S + 1.0)
    return 0.0


def test_a_sum_within_a_mesh_gives_up_when_the_run_says() -> None:
    # All have ended: torch's own limit is 30 minutes.
    assert run_ranks(wait_alone, 4, timeout_s=120)[0] >= LIMIT_S
