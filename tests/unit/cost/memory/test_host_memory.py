"""Copies between host and device take PCIe's time, the host's own operators that of its memory."""

from __future__ import annotations

import pytest

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.memory.host_memory import HOST_BYTES_PER_S, PCIE_BYTES_PER_S, host_seconds
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.trace.trace import OpPlace, Signature, TensorShape

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
