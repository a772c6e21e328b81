"""Managed memory takes bytes off the device and adds what the link to the host carries, by hand-counted bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import Footprint, footprint
from meshwright.cost.memory.host_memory import HOST_BYTES, PCIE_BYTES_PER_S, host_headroom_bytes
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from meshwright.hardware.catalogue import load_cluster
from meshwright.planner.plan import make_plan
from meshwright.planner.request import PlanRequest
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import Signature, TensorShape
from questions import ask

EMBEDDING = 128256 * 4096
"""Of llama3-8b."""
LAYOUT = Layout(dp_shard=8, microbatch_size=1)


def request_of(**memory: str) -> PlanRequest:
    return ask("llama3-8b", 8, batch=16).with_setup(memory=MemorySection.from_dict(memory))


def configs(layout: Layout = LAYOUT, optimizer: dict[str, Any] | None = None, **memory: str) -> Configurations:
    setup = request_of(**memory).setup
    setup = replace(setup, workload=setup.workload.replace(**(optimizer or {})))
    return Configurations.of_one(setup, layout_table([layout]))


def priced(**given: Any) -> tuple[StepTerms, Footprint]:
    of = configs(**given)
    return step_times(of), footprint(of)


def test_states_leave_the_device_and_cross_the_link_in_each_direction() -> None:
    (plain, before), (moved, after) = priced(), priced(optimizer_state="uvm")
    assert after.optimizer_state_bytes.tolist() == [0.0]
    assert after.parameters_bytes == pytest.approx(before.parameters_bytes)
    parameters = before.optimizer_state_bytes / 8
    on_device = plain.optimizer_s * 28 / 48
    assert moved.optimizer_s - plain.optimizer_s == pytest.approx(
        8 * parameters / PCIE_BYTES_PER_S - on_device, rel=1e-2
    )
    assert moved.total_s - plain.total_s == pytest.approx(moved.optimizer_s - plain.optimizer_s)


def test_an_embedding_leaves_the_device_and_is_read_for_each_microbatch() -> None:
    (plain, before), (moved, after) = priced(), priced(embedding="uvm")
    shard = EMBEDDING / 8
    assert before.parameters_bytes - after.parameters_bytes == pytest.approx([4 * shard])
    read_s = 4 * shard / PCIE_BYTES_PER_S
    assert moved.dp_communication_s - plain.dp_communication_s == pytest.approx([2 * read_s])
    # The kernel that updates all parameters takes longer than the link for those of the embedding.
    assert moved.optimizer_s == pytest.approx(plain.optimizer_s)


@pytest.mark.parametrize(
    ("optimizer", "num_bytes"),
    [({"optimizer_state_dtype": "bfloat16"}, 8), ({"optimizer": "muon"}, 8)],
)
def test_other_optimizers_read_and_write_before_and_after_their_kernels(
    optimizer: dict[str, str], num_bytes: int
) -> None:
    (plain, before), (moved, after) = priced(optimizer=optimizer), priced(optimizer=optimizer, optimizer_state="uvm")
    parameters = before.parameters_bytes / 4
    added = moved.optimizer_s - plain.optimizer_s
    assert added == pytest.approx(num_bytes * parameters / PCIE_BYTES_PER_S, rel=0.01)
    assert after.optimizer_state_bytes.tolist() == [0.0]


def test_a_pipeline_moves_the_embedding_of_its_first_stage_and_the_copy_of_its_last() -> None:
    layout = Layout(pp=2, dp_shard=4)
    setup = ask("qwen3-0.6b", 8, batch=16).setup
    moved = replace(setup, memory=MemorySection(embedding="uvm"))
    for of, pools in ((setup, False), (moved, True)):
        table = layout_table([layout])
        memory = footprint(Configurations.of_one(of, table))
        if not pools:
            whole = memory
    assert whole.parameters_bytes - memory.parameters_bytes == pytest.approx([4 * 151936 * 1024 / 4])


def test_what_is_managed_counts_as_the_host_s_memory() -> None:
    (left,) = host_headroom_bytes(configs(optimizer_state="uvm", embedding="uvm"))
    parameters = ask("llama3-8b", 8).setup.model.num_parameters
    assert left == pytest.approx(HOST_BYTES / 8 - parameters - 4 * EMBEDDING / 8)
    assert np.isinf(host_headroom_bytes(configs())).all()


def test_a_kernel_takes_what_the_link_takes_where_that_is_longer() -> None:
    shape = TensorShape(dtype="float32", dims=(1 << 28,))
    num_bytes = 4 << 28
    plain = Signature(op="aten.add_.Tensor", inputs=(shape, shape), outputs=(), read_bytes=2 * num_bytes)
    managed = plain.replace(managed_read_bytes=num_bytes, managed_written_bytes=num_bytes)
    seconds = op_seconds([plain, managed], load_cluster("h100-ib400").device)
    assert seconds[1] == pytest.approx(num_bytes / PCIE_BYTES_PER_S)
    assert seconds[0] < seconds[1] / 5


def test_a_host_and_other_software_have_no_pools() -> None:
    of = request_of(embedding="uvm", optimizer_state="uvm").setup
    assert of.pools_embedding
    assert of.pools_optimizer_state
    other = replace(of, stack=of.stack.replace(eager_mixtures=False))
    assert not other.pools_embedding
    assert not other.pools_optimizer_state


@pytest.mark.long
def test_a_plan_fits_with_pools_where_it_does_not_without() -> None:
    """A model whose states alone exceed the devices: the search finds a layout with them on the host."""
    roomy = make_plan(ask("llama3-70b", 16, batch=16).with_setup(memory=MemorySection(optimizer_state="uvm")))
    assert not roomy.pick.layout.cpu_offload
    assert roomy.pick.estimate.memory.optimizer_state_bytes == 0
