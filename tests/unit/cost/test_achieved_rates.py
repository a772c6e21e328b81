"""Rates are shares of the datasheet's, and a figure that nobody gave is named, not guessed."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.achieved_rates import Rates, architecture_of, matmul_share, peaks_of, rates_of
from meshwright.cost.attention_rates import AttentionRates, attention_rates_of
from meshwright.cost.constants import fitted_constants
from meshwright.cost.stack_factors import stacks
from meshwright.cost.step_times import step_times
from meshwright.errors import UnsupportedError
from meshwright.hardware.catalogue import cluster_names, load_cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster


def rates(cluster: str | Cluster, stack: str = "generic", precision: str = "bfloat16") -> Rates:
    of = (training_setup(cluster=cluster, stack=stack, precision=precision),)
    return rates_of(of, peaks_of(of), fitted_constants())


def attention_rates(cluster: str, stack: str = "generic", precision: str = "bfloat16") -> AttentionRates:
    of = (training_setup(cluster=cluster, stack=stack, precision=precision),)
    return attention_rates_of(of, peaks_of(of), fitted_constants())


@pytest.mark.parametrize("name", sorted(set(cluster_names()) - {"cpu-local", "local"}))
def test_no_rate_is_more_than_the_datasheet_has(name: str) -> None:
    device = load_cluster(name).device
    for precision, dtype in (
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("mxfp8", "float8"),
        ("nvfp4", "float4"),
    ):
        peak, peak16 = device.peak_flops_per_s(dtype), device.peak_flops_per_s("float16")
        if peak is None or peak16 is None:
            continue
        for stack in stacks():
            reached, attention = rates(name, stack, precision), attention_rates(name, stack, precision)
            assert 0.2 * peak < reached.matmul[0] < peak
            assert 0.1 * peak16 < attention.flops_per_s[0] < peak16
            assert device.memory_bytes_per_s is not None
            assert 0.5 < reached.memory[0] / device.memory_bytes_per_s.value < 1


def test_the_architecture_is_the_catalogues() -> None:
    expected = {
        "h800-ib400": "hopper",
        "dgx-a100": "ampere",
        "gb300-nvl72": "blackwell-ultra",
        "l40s-node": "ada",
        "rtx-4090-node": "ada",
        "rtx-a6000-node": "ampere",
    }
    assert {name: architecture_of(load_cluster(name).device) for name in expected} == expected
    device = load_cluster("dgx-b200").device
    assert architecture_of(device.replace(name="another-chip")) == "blackwell"


@pytest.mark.parametrize("architecture", [None, "rubin"])
def test_an_unknown_architecture_is_refused_unless_the_device_was_measured(architecture: str | None) -> None:
    device = load_cluster("dgx-b200").device.replace(architecture=architecture)
    with pytest.raises(UnsupportedError, match=rf"b200: architecture = {architecture!r} has no constants .*blackwell"):
        architecture_of(device)
    assert architecture_of(load_cluster("cpu-local").device) == "ampere"


def test_a_format_without_a_constant_is_refused() -> None:
    device = load_cluster("dgx-a100").device
    with pytest.raises(UnsupportedError, match=r"no constant matmul8.ampere"):
        matmul_share(device, "float8", "float8-tensorwise", fitted_constants())


@pytest.mark.parametrize("stack", sorted(stacks()))
def test_every_architecture_has_its_constants(stack: str) -> None:
    for name in ("v100-opa400", "dgx-a100", "h100-ib400", "dgx-b200", "dgx-b300", "mi300x-node", "l40s-node"):
        assert np.isfinite(attention_rates(name, stack, "float16").flops_per_s).all()


def test_a_lower_power_cap_lowers_matmuls_and_not_memory() -> None:
    cluster = load_cluster("h100-96gb-node")
    assert cluster.device.power_w is not None
    capped = cluster.device.replace(power_w=cluster.device.power_w.replace(value=cluster.device.power_w.value / 2))
    own, lower = rates(cluster), rates(cluster.replace(device=capped))
    assert 0.5 * own.matmul < lower.matmul < own.matmul
    assert lower.memory == own.memory


@pytest.mark.parametrize(
    ("cluster", "precision", "field"),
    [
        ("v100-opa400", "bfloat16", "dense_flops_per_s.bfloat16"),
        ("v100-opa400", "float8-tensorwise", "dense_flops_per_s.float8"),
        ("v100-opa400", "nvfp4", "dense_flops_per_s.float4"),
    ],
)
def test_a_rate_that_nobody_gave_is_named(cluster: str, precision: str, field: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"v100-sxm-32gb has no {field}: add it to its catalogue entry"):
        step_times(configs(training_setup(cluster=cluster, precision=precision), Layout()))


def test_a_format_that_no_device_has_a_rate_for_is_named() -> None:
    with pytest.raises(UnsupportedError, match="float64"):
        step_times(configs(training_setup(precision="float64"), Layout()))


def test_memory_bandwidth_that_nobody_gave_is_named() -> None:
    cluster = load_cluster("h100-ib400")
    unknown = cluster.replace(device=cluster.device.replace(memory_bytes_per_s=None))
    with pytest.raises(UnsupportedError, match="h100-sxm has no memory_bytes_per_s"):
        step_times(configs(training_setup(cluster=unknown), Layout()))


def test_matmuls_of_our_own_steps_take_the_rate_that_was_measured_in_them() -> None:
    own, published = rates("h200-efa", "meshwright"), rates("h200-efa")
    c = fitted_constants()
    assert own.matmul / c["plain_compute"] == pytest.approx(989.4e12 * c["matmul_own.hopper"], rel=0.001)
    assert published.matmul == pytest.approx(989.4e12 * c["matmul.hopper"], rel=0.001)
    assert rates("dgx-b200", "meshwright").matmul == rates("dgx-b200").matmul
