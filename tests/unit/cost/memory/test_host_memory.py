"""Copies take PCIe's time, the host's operators that of its memory; offload takes both for what a rank keeps."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.host_memory import (
    HOST_BYTES,
    HOST_BYTES_PER_S,
    PCIE_BYTES_PER_S,
    host_headroom_bytes,
    host_seconds,
    host_update,
)
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import OpPlace, Signature, TensorShape
from questions import ask

NUM_ELEMENTS = 1 << 28
FULL = TensorShape(dtype="float32", dims=(NUM_ELEMENTS,))
NUM_BYTES = 4 * NUM_ELEMENTS


def copied(place: OpPlace, op: str = "aten._to_copy.default", num_inputs: int = 1) -> Signature:
    return Signature(
        op=op,
        inputs=(FULL,) * num_inputs,
        outputs=(FULL,),
        read_bytes=num_inputs * NUM_BYTES,
        written_bytes=NUM_BYTES,
        place=place,
    )


@pytest.mark.parametrize("place", ["to_device", "to_host"])
def test_a_copy_takes_what_its_bytes_take_on_pcie(place: OpPlace) -> None:
    device = load_cluster("h100-ib400").device
    seconds = op_seconds([copied(place), copied(place, "aten.copy_.default", num_inputs=2)], device)
    assert seconds == pytest.approx([NUM_BYTES / PCIE_BYTES_PER_S] * 2, rel=1e-3)


def test_what_runs_on_the_host_takes_the_device_no_time_and_the_host_its_share_of_bandwidth() -> None:
    on_host, on_device = copied("host"), copied("device")
    assert op_seconds([on_host], load_cluster("h100-ib400").device).tolist() == [0.0]
    assert host_seconds([on_host, on_device], 8) == pytest.approx([2 * NUM_BYTES * 8 / HOST_BYTES_PER_S, 0.0])


def offloaded(*layouts: Layout) -> Configurations:
    return Configurations.of_one(ask("llama3-8b", 8, batch=16).setup, layout_table(list(layouts)))


def test_without_offload_nothing_is_added() -> None:
    without = offloaded(Layout(dp_shard=8))
    assert host_update(without).total_s.tolist() == [0.0]
    assert np.isinf(host_headroom_bytes(without)).all()


def exposed_s(*layouts: Layout) -> list[float]:
    """Return the seconds of FSDP in a step that nothing hides, with its copies between device and host."""
    return [float(seconds) for seconds in step_times(offloaded(*layouts)).dp_communication_s]


def test_copies_take_the_longer_the_less_hides_them() -> None:
    layouts = [Layout(dp_shard=8, cpu_offload=offload, gradient_sync="step") for offload in (False, True)]
    none, few = exposed_s(*layouts)
    # The embedding and the head are copied for each of two microbatches, and their gradients once: nothing hides it.
    of_ends = 3 * 1.05e9 / 8 * 4 / PCIE_BYTES_PER_S
    # Blocks are gathered twice for each microbatch, and reduced once: they hide, but slow computation down a little.
    of_blocks = 5 * 6.98e9 / 8 * 4 / PCIE_BYTES_PER_S
    assert of_ends < few - none < of_ends + 0.1 * of_blocks
    (alone,) = exposed_s(Layout(dp_shard=4, dp_replicate=2, cpu_offload=True, gradient_sync="step"))
    assert alone > few


def test_gradients_of_each_microbatch_but_one_wait_for_the_host_that_adds_them() -> None:
    layouts = [Layout(dp_shard=8, cpu_offload=True), Layout(dp_shard=4, dp_replicate=2, cpu_offload=True)]
    each, each_of_two = exposed_s(*layouts)
    once, once_of_two = exposed_s(*(layout.replace(gradient_sync="step") for layout in layouts))
    # Of one microbatch the blocks' copies are exposed, and so are the reductions before them.
    assert each - once > 6.98e9 / 8 * 4 / PCIE_BYTES_PER_S
    assert each_of_two - once_of_two < each - once


def test_replicas_copy_gradients_to_the_host_once_a_step() -> None:
    # What each microbatch reduces stays on the device, so that reducing it adds no copies.
    offloaded = Layout(dp_shard=4, dp_replicate=2, cpu_offload=True)
    layouts = [offloaded, offloaded.replace(gradient_sync="step")]
    each, once = exposed_s(*layouts)
    each_kept, once_kept = exposed_s(*(layout.replace(cpu_offload=False) for layout in layouts))
    assert 0 < each - once <= each_kept - once_kept


def test_the_state_of_all_ranks_of_a_node_must_fit_its_memory() -> None:
    (left,) = host_headroom_bytes(offloaded(Layout(dp_shard=8, cpu_offload=True)))
    assert left == pytest.approx(HOST_BYTES / 8 - 16 * 8.03e9 / 8, rel=1e-3)


def test_the_host_sums_each_microbatch_that_is_reduced() -> None:
    few, many, once = host_update(
        offloaded(
            *(Layout(dp_shard=8, cpu_offload=True, microbatch_size=size) for size in (2, 1)),
            Layout(dp_shard=8, cpu_offload=True, gradient_sync="step"),
        )
    ).total_s
    # 48 bytes of each parameter for one microbatch, 60 for two, with 8 ranks a node at 614 GB/s.
    assert few == pytest.approx(48 * 8.03e9 / 614e9, rel=1e-3)
    assert many == pytest.approx(60 / 48 * few)
    assert once == few


def test_ranks_wait_for_the_one_with_most_parameters() -> None:
    layout = Layout(pp=2, dp_shard=4, cpu_offload=True, stage_boundaries=(24,))
    host_s, waited_s = (float(seconds[0]) for seconds in host_update(offloaded(layout)))
    embedding = head = 128_256 * 4096
    block = (8_030_261_248 - embedding - head - 4096) / 32
    # Of 48 bytes of each parameter 12 come before the norm; 8 ranks share a node's 614 GB/s.
    fullest, mean = (embedding + 24 * block) / 4, 8_030_261_248 / 8
    byte_s = 8 / 614e9
    assert host_s == pytest.approx((12 * mean + 36 * fullest) * byte_s, rel=1e-3)
    assert waited_s == pytest.approx(12 * (fullest - mean) * byte_s, rel=1e-3)
