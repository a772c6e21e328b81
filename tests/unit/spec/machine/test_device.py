"""Device, Link and Cluster: validation, what is unknown stays unknown, JSON both ways."""

import pytest
from pydantic import ValidationError

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import Device, Figure, MatmulRates, Source

SOURCE = Source(title="a datasheet", url="https://example.org", date="2026-01", kind="datasheet")


def figure(value: float) -> Figure:
    return Figure(value=value, source=SOURCE)


def device(**changes: object) -> Device:
    fields: dict[str, object] = {
        "name": "x1",
        "title": "Example X1",
        "vendor": "example",
        "memory_bytes": figure(80e9),
        "dense_flops_per_s": MatmulRates(bfloat16=figure(1e15)),
    }
    return Device.model_validate({**fields, **changes})


def cluster(**changes: object) -> Cluster:
    fields: dict[str, object] = {
        "name": "c1",
        "title": "Example cluster",
        "device": device(),
        "num_devices": 32,
        "devices_per_node": 8,
        "intra_node": Link(name="fast", bytes_per_s=figure(450e9)),
        "inter_node": Link(name="slow", bytes_per_s=figure(50e9), latency_s=figure(2e-6)),
        "num_nics_per_node": 4,
        "source": SOURCE,
    }
    return Cluster.model_validate({**fields, **changes})


def test_peak_of_a_known_dtype_is_its_figure() -> None:
    assert device().peak_flops_per_s("bfloat16") == 1e15


def test_peak_of_an_unpublished_dtype_is_none() -> None:
    assert device().peak_flops_per_s("float8") is None


def test_a_dtype_that_does_not_exist_raises_and_names_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match="did you mean 'bfloat16'"):
        device().peak_flops_per_s("bf16")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_figure_is_a_positive_finite_number(value: float) -> None:
    with pytest.raises(ValidationError):
        Figure(value=value, source=SOURCE)


@pytest.mark.parametrize("date", ["2026", "2026-01", "2026-01-31"])
def test_dates_may_be_as_precise_as_they_are_known(date: str) -> None:
    assert SOURCE.replace(date=date).date == date


@pytest.mark.parametrize("date", ["", "26-01", "January 2026", "2026-1"])
def test_other_dates_are_refused(date: str) -> None:
    with pytest.raises(ValidationError):
        SOURCE.replace(date=date)


def test_a_device_survives_json() -> None:
    original = device(aliases=("Example X1 80GB",), num_sms=figure(132))
    assert Device.from_json(original.to_json()) == original
    assert Device.from_dict(original.to_dict()) == original


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="memory_byte"):
        device(memory_byte=figure(1.0))


def test_a_cluster_survives_json() -> None:
    original = cluster()
    assert Cluster.from_json(original.to_json()) == original
    assert Cluster.from_dict(original.to_dict()) == original


def test_network_share_of_a_device_counts_every_card_of_its_node() -> None:
    assert cluster().inter_node_bytes_per_s_per_device == 25e9
    assert cluster(inter_node=None, num_nics_per_node=None, num_devices=8).inter_node_bytes_per_s_per_device is None


def test_nodes_and_nvlink_domains() -> None:
    rack = cluster(num_devices=144, devices_per_node=4, nvlink_domain_size=72)
    assert (rack.num_nodes, rack.domain_size) == (36, 72)
    assert cluster().domain_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 12}, "whole nodes"),
        ({"nvlink_domain_size": 12}, "must divide the other"),
        ({"num_nics_per_node": None}, "belong together"),
        ({"inter_node": None, "num_nics_per_node": None}, "more than one node"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cluster(**changes)


def test_a_cluster_takes_another_size() -> None:
    assert cluster().with_num_devices(64).num_nodes == 8
    assert cluster().with_num_devices(4).num_nodes == 1


def test_a_size_that_fills_no_nodes_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="set it to 8 or 16"):
        cluster().with_num_devices(12)


def test_a_single_node_does_not_grow() -> None:
    node = cluster(inter_node=None, num_nics_per_node=None, num_devices=8)
    with pytest.raises(ConfigError, match="single node of 8 devices"):
        node.with_num_devices(16)


def test_a_host_computes_in_its_own_memory_with_kernels_of_a_cpu() -> None:
    host, accelerator = device(is_host=True), device()
    assert (host.torch_type, accelerator.torch_type) == ("cpu", "cuda")
    assert not host.has_own_memory
    assert accelerator.has_own_memory
    assert host.emulates_float8
    assert not accelerator.emulates_float8
