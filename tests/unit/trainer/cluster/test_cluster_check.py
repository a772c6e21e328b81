"""Nodes of a cluster: clock bounds, the exchange over a store, and what a report warns of."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from meshwright.spec.machine.node_report import ClockOffset, ClusterReport, NetworkPath, NodeReport, PathTest
from meshwright.trainer.cluster.clock_bounds import ClockBounds
from meshwright.trainer.cluster.cluster_check import check_cluster
from meshwright.trainer.cluster.cluster_warnings import cluster_warnings
from meshwright.trainer.cluster.node_store import NodeStore
from meshwright.trainer.launch.store_socket import connections_to, limit_silence


def test_bounds_hold_the_offset_and_each_exchange_narrows_them() -> None:
    # The other clock is 100 s ahead; a message takes 3 s there and 1 s back.
    bounds = ClockBounds()
    bounds.add(10.0, 113.0, 113.0, 14.0)
    found = bounds.offset(1)
    assert (found.least_s, found.most_s) == (99.0, 103.0)
    bounds.add(20.0, 120.5, 120.5, 22.0)
    found = bounds.offset(1)
    assert (found.least_s, found.most_s) == (99.0, 100.5)
    assert found.offset_s == pytest.approx(99.75)
    assert found.error_s == pytest.approx(0.75)


def on_nodes(num_nodes: int, act: Callable[[NodeStore], Any]) -> list[Any]:
    """Return what `act` returns on each node: threads on one store."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    with ThreadPoolExecutor(num_nodes) as pool:
        return list(pool.map(lambda node: act(NodeStore(store, node, num_nodes)), range(num_nodes)))


def test_nodes_agree_on_the_offsets_of_one_clock() -> None:
    offsets = on_nodes(3, NodeStore.clock_offsets)
    assert offsets[0] == offsets[1] == offsets[2]
    assert [one.node for one in offsets[0]] == [1, 2]
    assert all(one.least_s <= 0.0 <= one.most_s for one in offsets[0])


def test_each_pair_of_neighbours_is_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    reports = on_nodes(3, lambda nodes: check_cluster(nodes, tmp_path, 3))
    assert reports[0] == reports[2]
    assert sorted(tuple(one.nodes) for one in reports[0].tests if "rendezvous" in one.names) == [(0, 1), (1, 2), (2, 0)]
    assert all(one.error is None for one in reports[0].tests if "rendezvous" in one.names)
    assert reports[0].blind_nodes == []
    assert not list(tmp_path.iterdir())


def node(number: int, gloo: str = "10.0.0.{}", **changes: Any) -> NodeReport:
    address = gloo.format(number)
    path = NetworkPath(
        name="gloo", address=address, interface="eth0", network="10.0.0.0/24", bytes_per_s=1.25e9, why="the host name"
    )
    own = NodeReport(
        node=number,
        host=f"n{number}",
        paths=[path],
        shared_memory_bytes=2**33,
        max_open_files=65536,
        max_locked_bytes=None,
        has_infiniband=False,
        versions={"torch": "2.13.0"},
    )
    return own.replace(**changes)


def warnings_of(nodes: list[NodeReport], **changes: Any) -> str:
    tests = [PathTest(names=["gloo"], nodes=[0, 1], latency_s=1e-5, bytes_per_s=1e9)]
    report = ClusterReport(nodes=nodes, clocks=[], tests=tests, num_ranks=16)
    return "\n".join(cluster_warnings(report.replace(**changes)))


def test_nothing_is_said_of_a_cluster_that_is_well() -> None:
    assert warnings_of([node(0), node(1)], clocks=[ClockOffset(node=1, least_s=-0.1, most_s=0.4)]) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_open_files": 256}, "n1 lets a process open 256 files: ulimit -n 65536"),
        ({"shared_memory_bytes": 2**26}, "/dev/shm of n1 is 64 MiB"),
        ({"has_infiniband": True, "max_locked_bytes": 2**16}, "n1 has InfiniBand and lets a process lock 64 KiB"),
        ({"versions": {"torch": "2.12.0"}}, "torch differs between nodes: 2.13.0 on n0; 2.12.0 on n1"),
    ],
)
def test_limits_and_versions_are_named(changes: dict[str, Any], said: str) -> None:
    assert said in warnings_of([node(0), node(1, **changes)])


def test_addresses_that_no_other_node_reaches_are_named() -> None:
    assert "gloo of n1 takes 127.0.1.1, which no other node reaches" in warnings_of([node(0), node(1, "127.0.1.1")])
    slow = node(1).paths[0]
    elsewhere = slow.replace(address="192.168.0.1", network="192.168.0.0/24", interface="eth1")
    found = warnings_of([node(0), node(1, paths=[elsewhere])])
    assert "gloo takes different networks: eth0 (10.0.0.0) on n0, eth1 (192.168.0.1) on n1" in found
    fast = slow.replace(name="NCCL", interface="ib0", bytes_per_s=5e10, network="10.1.0.0/24", address="10.1.0.1")
    assert "GLOO_SOCKET_IFNAME=ib0 is faster" in warnings_of([node(0), node(1, paths=[slow, fast])][1:], tests=[])


def test_one_node_alone_may_use_loopback() -> None:
    assert "no other node" not in warnings_of([node(0, "127.0.1.1")], tests=[])


def test_a_clock_that_is_certainly_off_is_named() -> None:
    found = warnings_of([node(0), node(1)], clocks=[ClockOffset(node=1, least_s=-3.1, most_s=-2.9)])
    assert "the clock of n1 is 3 s behind that of n0" in found


def test_a_link_that_is_slow_for_its_interface_or_its_neighbours_is_named() -> None:
    slow = PathTest(names=["gloo"], nodes=[0, 1], latency_s=1e-5, bytes_per_s=1e7)
    assert "80 Mbit/s in one TCP stream, where the interface has 10 Gbit/s" in warnings_of(
        [node(0), node(1)], tests=[slow]
    )
    fast = [slow.replace(nodes=pair, bytes_per_s=1e9) for pair in ([1, 2], [2, 0])]
    found = warnings_of([node(0), node(1), node(2)], tests=[slow, *fast])
    assert "where the median of all neighbours is 8 Gbit/s" in found
    other = slow.replace(names=["NCCL"], bytes_per_s=1e9)
    assert "where NCCL has 8 Gbit/s" in warnings_of([node(0), node(1)], tests=[slow, other])
    closed = slow.replace(bytes_per_s=None, error="no connection from a to b: timed out")
    assert "gloo between n0 and n1: no connection" in warnings_of([node(0), node(1)], tests=[closed])


def test_a_folder_that_a_node_does_not_see_is_named() -> None:
    assert "n1 does not see /runs of n0" in warnings_of([node(0), node(1)], folder="/runs", blind_nodes=[1])


def test_every_connection_to_the_store_has_a_limit() -> None:
    store = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    limit_silence(store, 12.5)
    limits_ms = []
    for one in connections_to(store.port):
        with one:
            limits_ms.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert limits_ms
    assert set(limits_ms) == {12500}
