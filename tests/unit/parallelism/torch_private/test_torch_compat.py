"""The torch at hand still does what torch_compat relies on."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.app.doctor import TORCH_SERIES
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box, persistent_buffers


@pytest.fixture
def third_of_four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


def test_this_torch_is_a_supported_one() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert TORCH_SERIES[0] <= (major, minor) <= TORCH_SERIES[1]


@pytest.mark.usefixtures("third_of_four")
@pytest.mark.parametrize(("rows", "offset", "num_rows"), [(8, 4, 2), (5, 4, 1), (3, 2, 1), (2, 2, 0)])
def test_a_shard_knows_where_it_begins(rows: int, offset: int, num_rows: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    local, offsets = local_box(distribute_tensor(torch.zeros(rows, 3), mesh, [Shard(0)]))
    assert local.shape == (num_rows, 3)
    assert tuple(offsets) == (offset, 0)


@pytest.mark.usefixtures("third_of_four")
def test_a_replica_begins_at_the_beginning() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    local, offsets = local_box(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0), Replicate()]))
    assert local.shape == (2, 3)
    assert tuple(offsets) == (2, 0)


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor = torch.zeros(2, 3)
    assert local_box(tensor) == (tensor, (0, 0))


def test_wrappers_do_not_show_in_names() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    names = [name for name, _ in canonical_parameters(model)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_only_buffers_that_are_state_are_persistent() -> None:
    block = nn.BatchNorm1d(2)
    block.register_buffer("table", torch.zeros(2), persistent=False)
    model = nn.ModuleDict({"block": checkpoint_wrapper(block)})
    names = {name for name in model.state_dict() if "running" in name or "tracked" in name}
    assert len(names) == 3
    assert persistent_buffers(model).keys() == names
