"""Which address and interface each path takes, by settings and by default."""

from __future__ import annotations

import socket
import threading

import pytest

from meshwright.hardware.network import Interface, gloo_path, interfaces, nccl_path, rendezvous_path
from meshwright.hardware.tcp_test import listen, run_test, serve_test

KNOWN = [
    Interface("lo", "127.0.0.1", "127.0.0.0/8"),
    Interface("docker0", "172.17.0.1", "172.17.0.0/16"),
    Interface("eth0", "10.0.0.5", "10.0.0.0/24", 1.25e9),
    Interface("ib0", "10.1.0.5", "10.1.0.0/24", 5e10),
]


def test_the_loopback_interface_is_found() -> None:
    assert "127.0.0.1" in [one.address for one in interfaces()]


@pytest.mark.parametrize(
    ("setting", "interface"),
    [
        ("", "ib0"),
        ("eth", "eth0"),
        ("=eth0", "eth0"),
        ("=eth", None),
        ("^ib,docker,lo", "eth0"),
        ("^=ib0,lo,docker0", "eth0"),
        ("en", None),
    ],
)
def test_nccl_takes_prefixes_names_and_exclusions(setting: str, interface: str | None) -> None:
    found = nccl_path({"NCCL_SOCKET_IFNAME": setting}, KNOWN)
    assert found.interface == interface


def test_nccl_takes_docker_and_loopback_last_and_names_its_adapters() -> None:
    assert nccl_path({}, KNOWN[:3]).interface == "eth0"
    assert nccl_path({}, KNOWN[:2]).interface == "docker0"
    assert nccl_path({}, []).address is None
    assert "NCCL_IB_HCA=mlx5_0" in nccl_path({"NCCL_IB_HCA": "mlx5_0"}, KNOWN).why


def test_gloo_takes_its_variable_else_the_host_name_else_loopback() -> None:
    found = gloo_path({"GLOO_SOCKET_IFNAME": "eth0"}, KNOWN)
    assert (found.address, found.network, found.bytes_per_s) == ("10.0.0.5", "10.0.0.0/24", 1.25e9)
    assert gloo_path({"GLOO_SOCKET_IFNAME": "eth9"}, KNOWN).address is None
    assert gloo_path({}, KNOWN, named="127.0.1.1").is_loopback
    other = gloo_path({}, KNOWN, named="192.0.2.1")  # no address of this host
    assert other.is_loopback
    assert "no address of this host" in other.why


def test_the_rendezvous_takes_the_route_and_the_address_that_others_find() -> None:
    assert rendezvous_path("127.0.0.1", 1, KNOWN).interface == "lo"
    assert rendezvous_path("127.0.0.1", 1, KNOWN, served="10.0.0.5").interface == "eth0"
    lost = rendezvous_path("no-such-host.invalid", 1, KNOWN)
    assert lost.address is None


def test_a_connection_has_a_latency_and_a_bandwidth() -> None:
    with listen("127.0.0.1") as listener:
        thread = threading.Thread(target=serve_test, args=(listener, 20.0))
        thread.start()
        latency_s, bytes_per_s = run_test("127.0.0.1", "127.0.0.1", listener.getsockname()[1], 20.0)
        thread.join()
    assert 0 < latency_s < 1
    assert bytes_per_s > 1e5


def test_no_connection_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        run_test("127.0.0.1", "127.0.0.1", port, 5.0)
