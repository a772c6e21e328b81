"""Limits on the CTAs of NCCL's kernels: none of a group of another backend, and options of its own for each group."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.torch_private.torch_nccl import (
    limited_options,
    max_ctas_of,
    meshes_limited_like,
    new_group_like,
)
from meshwright.spec.layout.layout import Layout

UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT."""


class StandInOptions:
    """What torch's own options have, in builds that have them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=UNDEFINED)
        self._timeout = timedelta(minutes=10)


class StandInNCCL:
    """A process group's part for CUDA tensors."""

    Options = StandInOptions

    def __init__(self) -> None:
        self.options = StandInOptions(is_high_priority_stream=True)
        self.options._timeout = timedelta(seconds=7)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


@pytest.fixture
def nccl(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> StandInNCCL:
    backend = StandInNCCL()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandInNCCL, raising=False)
    monkeypatch.setattr(type(group), "_get_backend", lambda _, device: backend if device == torch.device("cuda") else 0)
    return backend


def test_groups_of_other_backends_have_no_limit(group: dist.ProcessGroup) -> None:
    assert limited_options(4) is None
    assert max_ctas_of(group) is None
    meshes = build_meshes(Layout(dp_shard=2, tp=2, communication_sms=4), "cpu")
    assert max_ctas_of(meshes.group("fsdp")) is None
    with meshes_limited_like(group):
        assert device_mesh.init_device_mesh("cpu", (2, 2)).size() == 4


def test_each_group_gets_options_of_its_own_with_the_timeout_of_the_run(nccl: StandInNCCL) -> None:
    one, other = limited_options(4), limited_options(4)
    assert one is not other
    assert (one.config.max_ctas, one._timeout, one.is_high_priority_stream) == (4, timedelta(seconds=7), True)
    assert limited_options(None) is None


def test_a_group_made_next_to_another_takes_its_limit(
    group: dist.ProcessGroup, nccl: StandInNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: given.append(options) or group)
    assert new_group_like(group, [0]) is group
    nccl.options.config.max_ctas = 8
    assert max_ctas_of(group) == 8
    new_group_like(group, [0], "mesh_tp")
    assert "pg_options" not in given[0]
    assert given[1]["pg_options"].config.max_ctas == 8
    assert (given[1]["timeout"], given[1]["group_desc"]) == (timedelta(seconds=7), "mesh_tp")


def test_meshes_made_by_others_take_it_too_until_the_end(
    group: dist.ProcessGroup, nccl: StandInNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(device_mesh, "new_group", lambda **options: given.append(options))
    make = device_mesh.new_group
    nccl.options.config.max_ctas = 8
    with meshes_limited_like(group):
        device_mesh.new_group(ranks=[0, 1], timeout=None)
    device_mesh.new_group(ranks=[0, 1])
    assert device_mesh.new_group is make
    assert given[0]["pg_options"].config.max_ctas == 8
    assert given[0]["timeout"] == timedelta(seconds=7)
    assert given[1] == {"ranks": [0, 1]}
