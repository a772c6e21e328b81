"""choose_cluster: what NAME:COUNT means, and what is said when it means nothing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalogue_entries import INTER_NODE, INTRA_NODE, MY_CLUSTER
from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import cluster_names, device_names, load_cluster, load_device
from meshwright.hardware.choice import choose_cluster, named_cluster

OWN_NODE = (
    MY_CLUSTER.replace('"x1"', '"h100-sxm"\nis_usual = true')
    .replace(INTER_NODE, "")
    .replace("num_nics_per_node = 2\n", "")
    .replace("num_devices = 16\ndevices_per_node = 8", "num_devices = 4\ndevices_per_node = 4")
)


def test_a_cluster_and_a_count() -> None:
    cluster = choose_cluster("h100-roce400:16384")
    assert (cluster.name, cluster.num_devices) == ("h100-roce400", 16384)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100:256", "h100-ib400"),
        ("h100-sxm:8", "h100-ib400"),
        ("h100:4", "h100-ib400"),
        ("a100:16", "dgx-a100-hdr"),
        ("gb200:144", "gb200-nvl72"),
        ("mi300x:8", "mi300x-roce400"),
        ("4090:1", "rtx-4090-eth100"),
        ("H100:8", "h100-ib400"),
        ("MI300X:8", "mi300x-roce400"),
        ("DGX-H100:8", "dgx-h100"),
    ],
)
def test_a_bare_device_takes_its_commonest_network(text: str, name: str) -> None:
    cluster = choose_cluster(text)
    assert (cluster.name, cluster.num_devices) == (name, int(text.split(":")[1]))


@pytest.mark.slow
@given(st.sampled_from(range(1, 9)), st.sampled_from(["h100-ib400", "dgx-h100", "h100", "l40s"]))
def test_a_part_of_a_node_is_a_cluster(count: int, name: str) -> None:
    assert choose_cluster(f"{name}:{count}").num_devices == count


@pytest.mark.slow
def test_every_device_that_trains_here_has_a_usual_cluster() -> None:
    for name in device_names():
        if load_device(name).vendor != "google":
            assert choose_cluster(f"{name}:1").device.name == name


def test_no_device_has_two_usual_clusters() -> None:
    usual = [load_cluster(name).device.name for name in cluster_names() if load_cluster(name).is_usual]
    assert len(usual) == len(set(usual))


def test_no_two_devices_share_a_short_name() -> None:
    short = [nick for name in device_names() for nick in load_device(name).short_names]
    assert len(short) == len(set(short))
    assert not set(short) & {*device_names(), *cluster_names()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-ib40:8", "did you mean 'h100-ib400'"),
        ("h10:8", "did you mean 'h100'"),
        ("B100:8", "did you mean 'b200'"),
        ("x:8", "is no cluster and no device"),
        ("h100", "the number of devices is missing"),
        ("h100:", "the number of devices is missing"),
        ("h100:0", "--cluster h100:0: COUNT = 0; must be"),
        ("h100:-8", "COUNT = -8;"),
        ("h100:many", "COUNT = many;"),
        ("h100:8.5", "COUNT = 8.5;"),
        ("h100:8:8", "COUNT = 8:8;"),
        ("a100:64,h100:64", "--cluster a100:64,h100:64: several clusters; must be one NAME:COUNT"),
        ("", "the number of devices is missing"),
        ("h100:12", "set it to 8 or 16"),
        ("dgx-h100:16", "a single node of 8 devices"),
        ("tpu-v5p:8", "no cluster is usual for"),
    ],
)
def test_what_means_nothing_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_cluster(text)


def test_the_users_usual_cluster_comes_before_ours(mine: Path) -> None:
    text = MY_CLUSTER.replace('"x1"', '"h100-sxm"\nis_usual = true')
    (mine / "clusters" / "rack.toml").write_text(text)
    assert choose_cluster("h100:16").name == "rack"


def test_a_usual_cluster_that_is_too_small_leaves_larger_ones_to_ours(mine: Path) -> None:
    (mine / "clusters" / "node.toml").write_text(OWN_NODE)
    assert [choose_cluster(f"h100:{count}").name for count in (2, 4, 8)] == ["node", "node", "h100-ib400"]
    assert named_cluster("h100").name == "node"
    with pytest.raises(ConfigError, match=r"h100-ib400 nodes \(8 devices each\): set it to 8 or 16"):
        choose_cluster("h100:12")


def test_a_usual_cluster_that_is_broken_is_told_and_passed(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = mine / "clusters" / "node.toml"
    file.write_text(OWN_NODE.replace(INTRA_NODE, ""))
    assert choose_cluster("h100:4").name == "h100-ib400"
    assert f"{file}: intra_node: is missing" in caplog.text
    assert "h100-ib400 is taken instead" in caplog.text
    with pytest.raises(ConfigError, match="intra_node: is missing"):
        choose_cluster("node:4")
