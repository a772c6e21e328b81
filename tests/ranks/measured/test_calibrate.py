"""measure on real ranks: every size of the menu has a time, and what is made of them can be written."""

import dataclasses

import pytest

from meshwright.calibrator.calibrated_machine import this_machine
from meshwright.calibrator.describe import describe
from meshwright.calibrator.measure import Measurements, mean_of, measure
from meshwright.calibrator.timing import SizeGrid
from meshwright.hardware.entry import cluster_toml, device_toml
from run_ranks import run_ranks

SMALL = SizeGrid(
    dtypes=("float32",),
    matmul_rows=(8,),
    matmul_widths=(8, 16),
    seq_lens=(16,),
    head_dims=(8,),
    num_heads=2,
    num_elements=(1024,),
    collective_bytes=(64, 4096),
)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_size_is_measured_on_every_rank(num_ranks: int) -> None:
    ranks: list[Measurements] = run_ranks(measure, num_ranks, "cpu", SMALL, 0.1, 1)
    measured = mean_of(ranks)
    assert len(measured.matmul_s) == 4
    assert len(measured.forward_attention_s) == len(measured.backward_attention_s) == 1
    assert {op for op, *_ in measured.forward_memory_op_s} == {
        *("add", "swiglu", "norm", "rope", "loss", "update", "clip")
    }
    assert len(measured.collective_s) == (12 if num_ranks > 1 else 0)
    seconds = [s for field in dataclasses.fields(measured) for s in getattr(measured, field.name).values()]
    assert all(second > 0 for second in seconds)
    device, cluster = describe(this_machine("cpu", num_ranks, None), SMALL, measured)
    assert device_toml(device)
    assert cluster_toml(cluster)
    assert cluster.num_devices == num_ranks


@pytest.mark.long
def test_groups_of_every_size_are_measured() -> None:
    small = dataclasses.replace(SMALL, collective_bytes=(64,))
    measured: Measurements = run_ranks(measure, 4, "cpu", small, 0.1, 1)[0]
    assert {num_ranks for _, num_ranks, _ in measured.collective_s} == {2, 4}
