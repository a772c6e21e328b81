"""describe: seconds become rates of a Device and lines of a Cluster, which survive being written and read."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.calibrator.core_share import core_share
from meshwright.calibrator.describe import CalibratedMachine, describe, unread_rates
from meshwright.calibrator.measure import Measurements, mean_of
from meshwright.calibrator.profiled_step import OpSample, ProfiledStep
from meshwright.calibrator.timing import CPU_SIZES
from meshwright.cost.compute.op_time import op_seconds
from meshwright.errors import MeshwrightError
from meshwright.hardware.entry import build_cluster, cluster_toml, device_toml, read_cluster_values, read_device
from meshwright.hardware.rates import matmul_rates, memory_op_rates
from meshwright.planner.candidate import judge
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import CollectivePoint, Device, Figure, Source
from meshwright.spec.trace.trace import Signature, TensorShape
from questions import ask

SOURCE = Source(title="meshwright calibrate: 2 ranks", date="2026-11-21", kind="measured")


def machine(num_ranks: int = 2) -> CalibratedMachine:
    memory = Figure(value=8e9, source=SOURCE)
    device = Device(name="cpu-local", title="a test", vendor="any", memory_bytes=memory, is_host=True)
    return CalibratedMachine(device, "gloo", num_ranks, SOURCE)


def measurements(latency_s: float = 3e-4, s_per_byte: float = 5e-10, num_ranks: int = 2) -> Measurements:
    """What a machine of 100 GFLOP/s, 1 G element/s and the given line for collectives would have measured."""
    sizes = (4096, 2**20, 2**24)
    return Measurements(
        matmul_s={("float32", rows, 64, 64): 6 * rows * 64 * 64 / 100e9 for rows in (8, 64)},
        forward_attention_s={("float32", 128, 64): 1e-3},
        backward_attention_s={("float32", 128, 64): 2e-3},
        forward_memory_op_s={("norm", "float32", 1000): 1e-6, ("update", "float32", 1000): 1e-6},
        backward_memory_op_s={("norm", "float32", 1000): 2e-6},
        collective_s={
            **{("all-gather", num_ranks, size): latency_s + s_per_byte * size for size in sizes},
            **{("all-reduce", num_ranks, size): 2 * (latency_s + s_per_byte * size) for size in sizes},
            **{("async-all-reduce", num_ranks, size): latency_s + s_per_byte * size for size in sizes},
        },
        host_s={"kernel": 5e-6},
    )


def described(measured: Measurements) -> tuple[Device, Cluster]:
    return describe(machine(), CPU_SIZES, measured)


def point(cluster: Cluster, kind: str) -> CollectivePoint:
    assert cluster.intra_node is not None
    return next(point for point in cluster.intra_node.collectives if point.kind == kind)


def test_seconds_become_rates() -> None:
    device, _ = described(measurements())
    rate = device.measured_matmul_flops_per_s.float32
    matmul, (forward, backward) = matmul_rates(device, "float32"), memory_op_rates(device, "norm", "float32")
    assert rate is not None
    assert matmul is not None
    assert forward is not None
    assert backward is not None
    assert rate.value == pytest.approx(100e9)
    assert matmul(16, 64, 64) == pytest.approx(100e9)
    assert (float(forward(1000)), float(backward(1000))) == pytest.approx((1e9, 5e8))
    assert device.measured_memory_bytes_per_s is not None
    assert device.measured_memory_bytes_per_s.value == pytest.approx(28e9)


@pytest.mark.slow
@given(st.floats(2e-6, 1e-2), st.floats(1e-11, 1e-8))
def test_a_collective_that_is_a_line_is_that_line(latency_s: float, s_per_byte: float) -> None:
    _, cluster = described(measurements(latency_s, s_per_byte))
    gather = point(cluster, "all-gather")
    for size in (4096, 2**24):
        told = gather.latency_s.value + size / gather.bytes_per_s.value
        assert told == pytest.approx(latency_s + s_per_byte * size, rel=0.01)


def next_to_computation(seconds: list[float]) -> Measurements:
    """Return measurements in which an all-reduce of each size adds so much to computation."""
    measured = measurements()
    sizes = [at for at in measured.collective_s if at[0] == "async-all-reduce"]
    collective_s = measured.collective_s | dict(zip(sizes, seconds, strict=True))
    return Measurements(**{**vars(measured), "collective_s": collective_s})


@pytest.mark.slow
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_noise_never_makes_a_cluster_that_cannot_be(noise: list[float]) -> None:
    _, cluster = described(next_to_computation(noise))
    assert point(cluster, "async-all-reduce").latency_s.value > 0


def test_an_all_reduce_next_to_computation_whose_time_does_not_grow_takes_the_plain_one() -> None:
    noisy = next_to_computation([0.1, 0.1, 0.1])
    _, cluster = described(noisy)
    plain, adds = point(cluster, "all-reduce"), point(cluster, "async-all-reduce")
    assert (adds.bytes_per_s, adds.latency_s) == (plain.bytes_per_s, plain.latency_s)
    notes = unread_rates(machine(), noisy)
    assert [note.partition(",")[0] for note in notes] == ["no rate can be read from async-all-reduce of 2"]
    assert not unread_rates(machine(), measurements())


def test_a_collective_without_a_rate_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="no rate can be read from all-gather of 2, whose time does not grow"):
        described(measurements(s_per_byte=0.0))


def test_one_rank_has_no_link() -> None:
    alone = Measurements(**{**vars(measurements()), "collective_s": {}})
    _, cluster = describe(machine(num_ranks=1), CPU_SIZES, alone)
    assert (cluster.num_devices, cluster.intra_node) == (1, None)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    device, cluster = described(measurements())
    file = tmp_path / "cpu-local.toml"
    file.write_text(device_toml(device))
    assert read_device(file, "cpu-local") == device
    file.write_text(cluster_toml(cluster))
    assert build_cluster(file, "cpu-local", read_cluster_values(file), device) == cluster


def test_lines_of_operators_are_written_and_read_back(tmp_path: Path) -> None:
    shape = TensorShape(dtype="float32", dims=(512, 512))
    product = Signature(op="aten.mm.default", inputs=(shape, shape), outputs=(shape,), read_bytes=2**21)
    device, cluster = describe(
        machine(), CPU_SIZES, measurements(), [ProfiledStep([OpSample(product, 3, 2e-3)], 4, 0, 8e-3)]
    )
    file = tmp_path / "cpu-local.toml"
    file.write_text(device_toml(device))
    assert read_device(file, "cpu-local") == device
    assert op_seconds([product], device) == pytest.approx([2e-3], rel=1e-3)
    assert point(cluster, "exchange").latency_s.value == pytest.approx(2e-3)


def test_ranks_are_averaged() -> None:
    mean = mean_of([measurements(latency_s=1e-3), measurements(latency_s=3e-3)])
    assert mean.collective_s["all-gather", 2, 4096] == pytest.approx(
        measurements(2e-3).collective_s["all-gather", 2, 4096]
    )
    assert mean.host_s == {"kernel": 5e-6}


@pytest.mark.parametrize(("share", "error"), [(1.0, None), (0.97, None), (0.6, 0.4)])
def test_what_other_programs_took_widens_the_interval_of_predictions(
    tmp_path: Path, share: float, error: float | None
) -> None:
    device, _ = described(replace(measurements(), core_share={"core": share}))
    (tmp_path / "device.toml").write_text(device_toml(device))
    read = read_device(tmp_path / "device.toml", device.name)
    assert read == device
    found = read.calibration_error
    assert (None if found is None else found.value) == (None if error is None else pytest.approx(error))
    question, layout = ask("llama3-8b", 16), Layout(dp_shard=16)
    idle = judge(layout, question).estimate
    cluster = question.cluster.replace(device=question.cluster.device.replace(calibration_error=found))
    busy = judge(layout, question.with_setup(cluster=cluster)).estimate
    assert busy.step == idle.step
    assert busy.relative_error == pytest.approx(math.hypot(idle.relative_error, error or 0.0))


def test_the_share_of_a_core_is_that_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 < core_share() <= 1.0
    monkeypatch.setattr(time, "thread_time", lambda: time.perf_counter() / 4)
    assert core_share() == pytest.approx(0.25, rel=0.05)
