"""`meshwright doctor` under torchrun on two nodes: paths, clocks, limits, and what a slow or a wrong network shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from two_nodes import ADDRESSES, INTERFACE, OWN_IS_LOOPBACK, TwoNodes, throttle


def checkup(nodes: TwoNodes, folder: Path, **options: Any) -> dict[str, Any]:
    """Return what `doctor --json` prints under torchrun on both nodes."""
    nodes.start_command("doctor", "--json", "--folder", str(folder), **options)
    outputs = nodes.wait()
    lines = outputs[0].splitlines()
    assert "{" in lines, outputs
    start = lines.index("{")
    return json.loads("\n".join(lines[start : lines.index("}", start) + 1]))


@pytest.mark.long
def test_two_nodes_report_their_paths_clocks_and_bandwidth(tmp_path: Path, namespaces: tuple[str, ...]) -> None:
    found = checkup(TwoNodes(tmp_path, namespaces), tmp_path, options=("--nproc-per-node", "2"))
    assert [node["host"] for node in found["nodes"]] == ["node0", "node1"]
    for node, address in zip(found["nodes"], ADDRESSES, strict=True):
        by_name = {path["name"]: path for path in node["paths"]}
        assert (by_name["gloo"]["address"], by_name["gloo"]["interface"]) == (address, INTERFACE)
    assert found["num_ranks"] == 4
    [clock] = found["clocks"]
    assert clock["least_s"] <= 0.0 <= clock["most_s"]  # one clock
    assert any("gloo" in test["names"] and test["bytes_per_s"] > 0 for test in found["tests"])
    assert found["blind_nodes"] == []
    assert not any("no other node reaches" in warning or "clock" in warning for warning in found["warnings"])


@pytest.mark.long
def test_a_throttled_network_and_a_wrong_hosts_file_are_named(tmp_path: Path, namespaces: tuple[str, ...]) -> None:
    for name in namespaces:
        throttle(name, INTERFACE, "10mbit")
    found = checkup(TwoNodes(tmp_path, namespaces), tmp_path, hosts=OWN_IS_LOOPBACK)
    gloo, rendezvous = (next(one for one in found["tests"] if name in one["names"]) for name in ("gloo", "rendezvous"))
    assert gloo["error"] is not None
    warnings = "\n".join(found["warnings"])
    assert "gloo of node0 takes 127.0.1.1, which no other node reaches" in warnings
    assert "set GLOO_SOCKET_IFNAME" in warnings
    # node1 finds the store of node0 by the cable.
    assert 0.2e6 < rendezvous["bytes_per_s"] < 3e6

    found = checkup(TwoNodes(tmp_path, namespaces), tmp_path, hosts=OWN_IS_LOOPBACK, GLOO_SOCKET_IFNAME=INTERFACE)
    gloo = next(one for one in found["tests"] if "gloo" in one["names"])
    # 10 Mbit/s are 1.25 MB/s.
    assert 0.2e6 < gloo["bytes_per_s"] < 3e6
    assert any("Mbit/s in one TCP stream" in warning for warning in found["warnings"])
