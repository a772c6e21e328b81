"""What FSDP exposes in a whole backward: the formulas for blocks and for both ends, next to the calls one by one."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.blocks.block_positions import block_positions
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.data_parallel import DataParallel, block_collectives_s
from meshwright.cost.communication.fabric import FabricConstants, fabric_of
from meshwright.cost.communication.fsdp_ends import pass_ends_exposed_s
from meshwright.cost.communication.fsdp_exposed import UnitPasses, fsdp_exposed_s
from meshwright.cost.constants import fitted_constants
from meshwright.spec.layout.layout import Layout

CONSTANTS = {**fitted_constants(), "overlap_slowdown": 0.0}
LONG, NONE = np.array([10.0]), np.zeros(1)
"""A forward that hides all, and nothing."""


def called_one_by_one_s(num_blocks: int, block_s: float, gather_s: float, scatter_s: float) -> float:
    """Return a backward's seconds: the next block is gathered while one computes, by the reductions' communicator."""
    device_s = communicator_s = gathered_s = 0.0
    for block in reversed(range(num_blocks)):
        start_s = max(device_s, gathered_s)
        if block > 0:
            communicator_s += gather_s
            gathered_s = communicator_s
        device_s = start_s + block_s
        communicator_s = max(communicator_s, device_s) + scatter_s
    return communicator_s


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9, 1.1, 3.0])
@pytest.mark.parametrize("cluster", ["h100-ib400", "h100-tcpx"])
def test_a_backward_takes_what_its_calls_take_one_by_one(share: float, cluster: str) -> None:
    setup = training_setup("llama3-8b", cluster, "meshwright", global_batch_size=16)
    of = configs(setup, Layout(dp_shard=16))
    parallel, fabric = DataParallel(of, work_of(of)), fabric_of(setup.cluster, FabricConstants())
    (block,) = [one for one in block_positions(parallel.work) if one.kind == BLOCK]
    gather_s, scatter_s = (float(side[0]) for side in block_collectives_s(parallel, block.row, fabric))
    block_s, number = share * (gather_s + scatter_s), int(block.count[0])
    passes = UnitPasses((LONG, np.array([block_s])), (NONE, NONE), NONE, NONE)
    each_s = block_s + float(fsdp_exposed_s(parallel, block.row, fabric, CONSTANTS, passes)[0])
    ends_s = float(pass_ends_exposed_s(parallel, block.row, fabric, CONSTANTS, passes, (LONG, NONE))[0])
    expected_s = called_one_by_one_s(number, block_s, gather_s, scatter_s)
    assert number * each_s + ends_s == pytest.approx(expected_s)
