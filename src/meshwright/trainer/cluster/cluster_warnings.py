"""What of a ClusterReport or of some NodeReports needs attention, a sentence each with its remedy."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from meshwright.spec.machine.node_report import ClockOffset, ClusterReport, NetworkPath, NodeReport, PathTest
from meshwright.units import GiB, format_bytes, format_duration

_MAX_OFFSET_S: Final = 0.5
"""Clocks further apart confuse the order of events in `diagnose` and in logs."""
_LEAST_SHARED_BYTES: Final = 1 * GiB
_LEAST_OPEN_FILES: Final = 1024
_FILES_PER_RANK: Final = 4
"""Connections of a rank to each other rank, with a group for every axis of its layout."""
_SLOW: Final = 0.5
"""Part of the bandwidth of another path, or of other nodes, below which one is slow."""
_BELOW_SPEED: Final = 0.25
"""Part of the interface's own speed below which one TCP stream is slow."""
_VARIABLE: Final = {"gloo": "GLOO_SOCKET_IFNAME", "NCCL": "NCCL_SOCKET_IFNAME"}


def rate_text(bytes_per_s: float) -> str:
    """Return a bandwidth in the unit of network interfaces, such as "9.41 Gbit/s"."""
    bits_per_s = bytes_per_s * 8
    return f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g} Mbit/s"


def cluster_warnings(report: ClusterReport) -> list[str]:
    """Return what needs attention on several nodes."""
    hosts = [node.host for node in report.nodes]
    found = list(node_warnings(report.nodes, report.clocks, report.num_ranks))
    for node in report.blind_nodes:
        found.append(
            f"{hosts[node]} does not see {report.folder} of {hosts[0]}: run.dir must be one folder, under one path, on "
            "all nodes; name it with --folder"
        )
    return [*found, *_test_warnings(report.tests, report.nodes)]


def node_warnings(nodes: Sequence[NodeReport], clocks: Sequence[ClockOffset], num_ranks: int) -> Iterator[str]:
    """Yield what needs attention without a test between nodes."""
    for node in nodes:
        yield from _path_warnings(node, is_alone=len(nodes) == 1)
        yield from _limit_warnings(node, num_ranks)
    yield from _network_warnings(nodes)
    for clock in clocks:
        # What lies within the bounds is no finding.
        if max(clock.least_s, -clock.most_s) > _MAX_OFFSET_S:
            direction = "ahead of" if clock.offset_s > 0 else "behind"
            yield (
                f"the clock of {nodes[clock.node].host} is {format_duration(abs(clock.offset_s))} {direction} that of "
                f"{nodes[0].host}: `diagnose` orders what nodes wrote by their clocks; start an NTP client, such as "
                "chronyd"
            )
    for name in sorted({name for node in nodes for name in node.versions}):
        of_hosts: defaultdict[str, list[str]] = defaultdict(list)
        for node in nodes:
            of_hosts[node.versions.get(name, "missing")].append(node.host)
        if len(of_hosts) > 1:
            differ = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in of_hosts.items())
            yield f"{name} differs between nodes: {differ}: install one version on all of them"


def _path_warnings(node: NodeReport, *, is_alone: bool) -> Iterator[str]:
    for path in node.paths:
        variable = _VARIABLE.get(path.name)
        remedy = f"set {variable} to the interface that connects the nodes" if variable else "correct the endpoint"
        if path.address is None:
            yield f"{path.name} of {node.host} has no address: {path.why}: {remedy}"
        elif path.is_loopback and not is_alone and not (path.name == "rendezvous" and node.node == 0):
            yield f"{path.name} of {node.host} takes {path.address}, which no other node reaches ({path.why}): {remedy}"
    used = {path.interface: path for path in node.paths if path.bytes_per_s is not None and not path.is_loopback}
    fastest = max(used.values(), key=_speed_of, default=None)
    for path in used.values():
        if fastest is not None and _speed_of(path) < _SLOW * _speed_of(fastest) and path.name in _VARIABLE:
            yield (
                f"{path.name} of {node.host} takes {path.interface}, {rate_text(_speed_of(path))}, and {fastest.name} "
                f"{fastest.interface}, {rate_text(_speed_of(fastest))}: {_VARIABLE[path.name]}={fastest.interface} is "
                "faster"
            )


def _network_warnings(nodes: Sequence[NodeReport]) -> Iterator[str]:
    """Yield the paths that take different networks on different nodes."""
    for paths in zip(*(node.paths for node in nodes), strict=True):
        known = [(node, path) for node, path in zip(nodes, paths, strict=True) if not path.is_loopback]
        networks = {path.network for _, path in known if path.network is not None}
        name = paths[0].name
        if len(networks) > 1:
            taken = ", ".join(f"{path.interface} ({path.address}) on {node.host}" for node, path in known)
            variable = _VARIABLE.get(name)
            remedy = f": set {variable} where they do not reach each other" if variable else ""
            yield f"{name} takes different networks: {taken}{remedy}"


def _limit_warnings(node: NodeReport, num_ranks: int) -> Iterator[str]:
    if node.shared_memory_bytes is not None and node.shared_memory_bytes < _LEAST_SHARED_BYTES:
        size = format_bytes(node.shared_memory_bytes)
        yield (
            f"/dev/shm of {node.host} is {size}: NCCL needs {format_bytes(_LEAST_SHARED_BYTES)} or more between GPUs "
            "of one node: docker run --shm-size=8g"
        )
    least = max(_LEAST_OPEN_FILES, _FILES_PER_RANK * num_ranks)
    if node.max_open_files is not None and node.max_open_files < least:
        yield f"{node.host} lets a process open {node.max_open_files} files: ulimit -n {max(65536, least)}"
    if node.has_infiniband and node.max_locked_bytes is not None:
        locked = format_bytes(node.max_locked_bytes)
        yield f"{node.host} has InfiniBand and lets a process lock {locked} of memory: ulimit -l unlimited"


def _test_warnings(tests: Sequence[PathTest], nodes: Sequence[NodeReport]) -> Iterator[str]:
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for test in tests:
        if test.bytes_per_s is not None:
            for name in test.names:
                rates[name].append(test.bytes_per_s)
    for test in tests:
        first, second = (nodes[node] for node in test.nodes)
        what = f"{' and '.join(test.names)} between {first.host} and {second.host}"
        if test.error is not None:
            yield f"{what}: {test.error}"
        elif test.bytes_per_s is not None and (than := _expected(test, tests, rates, first)) is not None:
            yield f"{what}: {rate_text(test.bytes_per_s)} in one TCP stream, {than}: look at this link"


def _expected(test: PathTest, tests: Sequence[PathTest], rates: dict[str, list[float]], node: NodeReport) -> str | None:
    """Return what a test is slow compared with; None where it is not."""
    rate = test.bytes_per_s or 0.0
    of_pair = [one for one in tests if one.nodes == test.nodes and one.bytes_per_s is not None]
    best = max(of_pair, key=lambda one: one.bytes_per_s or 0.0)
    if rate < _SLOW * (best.bytes_per_s or 0.0):
        return f"where {' and '.join(best.names)} has {rate_text(best.bytes_per_s or 0.0)}"
    usual = statistics.median(rates[test.names[0]])
    if rate < _SLOW * usual:
        return f"where the median of all neighbours is {rate_text(usual)}"
    speed = next((path.bytes_per_s for path in node.paths if path.name == test.names[0]), None)
    if speed is not None and rate < _BELOW_SPEED * speed:
        return f"where the interface has {rate_text(speed)}"
    return None


def _speed_of(path: NetworkPath) -> float:
    return path.bytes_per_s or 0.0
