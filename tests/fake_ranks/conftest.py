"""One process that takes itself for one of hundreds of ranks."""

from collections.abc import Iterator

import pytest
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(params=[0.0, 0.26, 1.0], ids=["first", "amid", "last"])
def fake_rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """The rank that this process is, out of as many as NUM_RANKS of the test's module says."""
    num_ranks: int = request.module.NUM_RANKS
    rank = round(request.param * (num_ranks - 1))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    yield rank
    dist.destroy_process_group()
