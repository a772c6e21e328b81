"""The catalogue: what ships is complete and sourced; the user's own entries win; bad files name file and field."""

import logging
from pathlib import Path

import pytest

from catalogue_entries import INTER_NODE, INTRA_NODE, MY_CLUSTER, OLD_COLLECTIVE, SHIPPED
from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import (
    CATALOGUE_VARIABLE,
    cluster_names,
    device_names,
    entries,
    load_cluster,
    load_device,
    recognise_device,
    with_example_rates,
)
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import Device

MY_DEVICE = """
title = "My X1"
vendor = "me"
aliases = ["Example X1-80GB"]
memory_bytes = { value = "80 GB", source = "sheet" }

[dense_flops_per_s]
bfloat16 = { value = "1 PFLOP/s", source = "sheet" }

[sources.sheet]
title = "X1 datasheet"
date = "2026-01"
kind = "datasheet"
"""


@pytest.mark.parametrize("name", SHIPPED["devices"])
def test_every_shipped_device_loads_and_survives_json(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert Device.from_json(device.to_json()) == device


@pytest.mark.parametrize("name", ["local", *SHIPPED["clusters"]])
def test_every_cluster_loads_and_survives_json(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_names_are_those_of_the_files() -> None:
    assert device_names() == SHIPPED["devices"]
    assert cluster_names() == ["local", *SHIPPED["clusters"]]


def test_no_two_devices_share_an_alias() -> None:
    aliases = [alias for name in device_names() for alias in load_device(name).aliases]
    assert len(aliases) == len(set(aliases))


@pytest.mark.parametrize("name", SHIPPED["devices"])
def test_every_device_says_what_a_prediction_reads(name: str) -> None:
    device = load_device(name)
    assert device.memory_bytes_per_s is not None
    assert device.peak_flops_per_s("float16") or device.peak_flops_per_s("bfloat16") or device.is_host
    assert 0.85 * device.memory_bytes.value < device.usable_memory_bytes <= device.memory_bytes.value
    if device.vendor in ("nvidia", "amd"):
        assert device.num_sms is not None
        assert device.communicator_bytes is not None
        # A traced step has matmuls in float32, such as a router's.
        assert device.peak_flops_per_s("float32")


@pytest.mark.parametrize("name", SHIPPED["clusters"])
def test_every_cluster_can_be_used(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.intra_node is not None
    assert cluster.num_devices <= cluster.domain_size or cluster.inter_node is not None
    for link in (cluster.intra_node, cluster.inter_node):
        if link is not None and link.efficiency is not None:
            assert 0.5 < link.efficiency.value < 1


@pytest.mark.parametrize("name", SHIPPED["devices"])
def test_measured_rates_stay_below_the_promised_ones(name: str) -> None:
    device = load_device(name)
    for dtype in type(device.dense_flops_per_s).model_fields:
        measured, promised = device.measured_matmul_flops_per_s.of(dtype), device.dense_flops_per_s.of(dtype)
        if measured is not None and not device.is_host:  # nobody promises what a rank on a few cores reaches
            assert promised is not None
            assert 0.4 * promised.value < measured.value < promised.value


@pytest.mark.parametrize(
    ("name", "dtype", "peak_flops_per_s"),
    [
        ("v100-sxm-32gb", "float16", 125e12),
        ("v100-sxm-32gb", "bfloat16", None),
        ("a100-sxm-80gb", "bfloat16", 312e12),
        ("h100-sxm", "bfloat16", 989e12),
        ("h100-sxm", "float8", 1979e12),
        ("b200", "float4", 9e15),
        ("b300", "float4", 13125e12),
        ("mi300x", "bfloat16", 1307.4e12),
        ("rtx-4090", "bfloat16", 165.2e12),
        ("rtx-a6000", "bfloat16", 154.8e12),
        ("mi350x", "bfloat16", 2292e12),
    ],
)
def test_peaks_are_the_datasheets(name: str, dtype: str, peak_flops_per_s: float | None) -> None:
    assert load_device(name).peak_flops_per_s(dtype) == peak_flops_per_s


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_are_recognised_by_what_torch_prints(printed: str, name: str) -> None:
    device = recognise_device(printed)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize(
    "printed", ["", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "cpu"]
)
def test_a_name_that_nobody_listed_is_unknown(printed: str) -> None:
    assert recognise_device(printed) is None


def test_racks_of_72_are_one_nvlink_domain() -> None:
    cluster = load_cluster("gb200-nvl72")
    assert (cluster.devices_per_node, cluster.domain_size) == (4, 72)


def test_local_promises_nothing_but_memory() -> None:
    local = load_cluster("local")
    assert local.device.memory_bytes.value > 0
    assert local.device.peak_flops_per_s("float32") is None
    assert local.intra_node is None


def test_local_is_what_calibrate_measured_here(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (mine / "devices" / "x1.toml").write_text(MY_DEVICE)
    (mine / "clusters" / "cpu-local.toml").write_text(MY_CLUSTER)
    local = load_cluster("local")
    assert (local.name, local.title, local.device.name) == ("local", "My rack", "x1")
    assert not caplog.records


def test_a_machine_that_nobody_measured_is_planned_for_with_an_example_that_says_so(
    mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = load_cluster("local")
    planned = with_example_rates(local)
    assert "this machine is not calibrated" in caplog.text
    assert (planned.name, planned.num_devices) == ("local", local.num_devices)
    assert planned.device.matmul_points
    # Ranks share the memory.
    assert planned.device.memory_bytes.value == local.device.memory_bytes.value / local.num_devices


def test_what_is_measured_needs_no_example(caplog: pytest.LogCaptureFixture) -> None:
    cluster = load_cluster("h100-ib400")
    assert with_example_rates(cluster) is cluster
    assert not caplog.records


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100-sxm'"):
        load_device("h100_sxm")
    with pytest.raises(ConfigError, match="did you mean 'h100-ib400'"):
        load_cluster("h100-ib40")


def test_the_users_own_entries_are_found(mine: Path) -> None:
    (mine / "devices" / "x1.toml").write_text(MY_DEVICE)
    (mine / "clusters" / "rack.toml").write_text(MY_CLUSTER)
    assert "x1" in device_names()
    assert load_cluster("rack").device.peak_flops_per_s("bfloat16") == 1e15
    assert load_cluster("rack").inter_node_bytes_per_s_per_device == 2 * 12.5e9 / 8
    recognised = recognise_device("Example X1-80GB")
    assert recognised is not None
    assert recognised.name == "x1"


def test_the_users_entry_replaces_ours_and_says_so(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (mine / "devices" / "h100-sxm.toml").write_text(MY_DEVICE)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert load_device("h100-sxm").title == "My X1"
    assert f"your {mine / 'devices' / 'h100-sxm.toml'} replaces the one that ships" in caplog.text
    assert entries("devices")["h100-sxm"].replaces_ours


def test_the_users_alias_wins(mine: Path) -> None:
    (mine / "devices" / "x1.toml").write_text(MY_DEVICE.replace("Example X1-80GB", "NVIDIA H200"))
    recognised = recognise_device("NVIDIA H200")
    assert recognised is not None
    assert recognised.name == "x1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"80 GB"', '"80 gigabytes"', "memory_bytes: '80 gigabytes' has the unit 'gigabytes'"),
        ('"80 GB"', "80", "memory_bytes: 80 is no number with a unit"),
        ('"80 GB", source = "sheet"', '"80 GB", source = "shet"', r"memory_bytes: source = 'shet' names no table"),
        ("memory_bytes = {", "memory_byts = {", "memory_byts: there is no such field: did you mean memory_bytes"),
        ("bfloat16 = {", "bf16 = {", "dense_flops_per_s.bf16: there is no such field: did you mean bfloat16"),
        (
            'bfloat16 = { value = "1 PFLOP/s", source = "sheet" }',
            "bfloat16 = 1e15",
            "dense_flops_per_s.bfloat16: write",
        ),
        ('vendor = "me"', "", "vendor: is missing"),
        ('kind = "datasheet"', 'kind = "rumour"', "memory_bytes.source.kind"),
        ('title = "My X1"', 'title = "My X1', "is no TOML"),
        ('title = "My X1"', 'name = "x1"\ntitle = "My X1"', "name: leave it out"),
    ],
)
def test_a_bad_file_names_file_and_field(mine: Path, old: str, new: str, message: str) -> None:
    file = mine / "devices" / "x1.toml"
    assert old in MY_DEVICE
    file.write_text(MY_DEVICE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as error:
        load_device("x1")
    assert all(line.startswith(str(file)) for line in str(error.value).splitlines())


def test_all_problems_of_a_file_are_told_at_once(mine: Path) -> None:
    (mine / "devices" / "x1.toml").write_text(
        MY_DEVICE.replace("80 GB", "80 gb").replace('vendor = "me"', "").replace("1 PFLOP/s", "1 PFLOPS")
    )
    with pytest.raises(ConfigError) as error:
        load_device("x1")
    text = str(error.value)
    assert all(field in text for field in ("memory_bytes:", "vendor:", "dense_flops_per_s.bfloat16:"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('device = "x1"', 'device = "x2"', "device: 'x2' must be one of"),
        ('device = "x1"', "", "device: write the catalogue name"),
        ("num_devices = 16", "num_devices = 12", "whole nodes"),
        ('"100 Gb/s"', '"100 Gbps"', "inter_node.bytes_per_s: '100 Gbps' has the unit 'Gbps'"),
        ('source = "wiki"\n\n', "\n\n", "source: is missing"),
        (INTRA_NODE, "", r"intra_node: is missing: add \[intra_node\], what joins the 8 devices"),
        (INTER_NODE, "", "inter_node and num_nics_per_node belong together"),
        (
            f'num_nics_per_node = 2\nsource = "wiki"\n\n{INTRA_NODE}{INTER_NODE}',
            f'source = "wiki"\n{INTRA_NODE}',
            "give inter_node and num_nics_per_node",
        ),
        (
            INTER_NODE,
            f"{INTER_NODE}{OLD_COLLECTIVE}",
            r"collectives.0.kind: unshard was written by an earlier version: run `meshwright calibrate` again",
        ),
    ],
)
def test_a_bad_cluster_names_file_and_field(mine: Path, old: str, new: str, message: str) -> None:
    (mine / "devices" / "x1.toml").write_text(MY_DEVICE)
    file = mine / "clusters" / "rack.toml"
    assert old in MY_CLUSTER
    file.write_text(MY_CLUSTER.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as error:
        load_cluster("rack")
    assert str(error.value).startswith(str(file))


def test_a_file_name_that_is_no_name_is_told(mine: Path) -> None:
    (mine / "devices" / "My X1.toml").write_text(MY_DEVICE)
    with pytest.raises(ConfigError, match="rename the file"):
        load_device("My X1")


def test_a_broken_file_is_in_the_way_of_nothing_else(mine: Path) -> None:
    (mine / "devices" / "My_X1.toml").write_text(MY_DEVICE)
    (mine / "devices" / "x2.toml").write_text("title = ")
    (mine / "devices" / "x3.toml").write_text("short_names = 3\naliases = [4]\n")
    assert load_cluster("h100-ib400").device == load_device("h100-sxm") == recognise_device("NVIDIA H100 80GB HBM3")


def test_a_catalogue_folder_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=CATALOGUE_VARIABLE):
        device_names()


def test_the_default_folder_need_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CATALOGUE_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "h100-sxm" in device_names()
    (tmp_path / "meshwright" / "devices").mkdir(parents=True)
    (tmp_path / "meshwright" / "devices" / "x1.toml").write_text(MY_DEVICE)
    assert "x1" in device_names()
