"""doctor under torchrun: the nodes of a cluster, the paths between them, and what needs attention."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.app.results.result import Result
from meshwright.errors import ConfigError, LostPeer
from meshwright.spec.machine.node_report import ClusterReport, NodeReport, PathTest
from meshwright.trainer.cluster.cluster_warnings import rate_text
from meshwright.units import counted, format_bytes, format_duration

if TYPE_CHECKING:
    from torch.distributed import Store

_TIMEOUT_S = 120.0
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, repr=False)
class ClusterCheckup(Result):
    """What was found on the nodes of a cluster. Data frame: a row for each test between neighbouring nodes."""

    report: ClusterReport
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `meshwright doctor --json` prints."""
        return {**self.report.model_dump(mode="json"), "warnings": list(self.warnings)}

    def _summary(self) -> str:
        return f"ClusterCheckup: {counted(len(self.report.nodes), 'node')}, {counted(len(self.warnings), 'warning')}"

    def _page(self) -> Iterator[RenderableType]:
        for node in self.report.nodes:
            yield Text(f"node {node.node}: {node.host}", "bold")
            for what, found in self._facts(node):
                yield Text(f"  {what:<15}{found}")
        if self.report.tests:
            yield Text("between nodes (one TCP stream)", "bold")
            yield self._tests()
        if self.report.folder is not None and not self.report.blind_nodes and len(self.report.nodes) > 1:
            yield Text(f"All nodes see {self.report.folder}.")
        for warning in self.warnings:
            yield Text(f"warning: {warning}", "yellow")
        if not self.warnings:
            yield Text("Nothing to correct.", "bold")

    def _facts(self, node: NodeReport) -> Iterator[tuple[str, str]]:
        for path in node.paths:
            where = "no address" if path.address is None else f"{path.address} on {path.interface or 'no interface'}"
            speed = "" if path.bytes_per_s is None else f", {rate_text(path.bytes_per_s)}"
            yield path.name, f"{where}{speed} ({path.why})"
        for clock in self.report.clocks:
            if clock.node == node.node:
                ahead = f"{clock.offset_s * 1e3:+.2f} ms of node 0's, +- {clock.error_s * 1e3:.2f} ms"
                yield "clock", ahead
        shared = "none" if node.shared_memory_bytes is None else format_bytes(node.shared_memory_bytes)
        yield "/dev/shm", shared
        files = "no limit" if node.max_open_files is None else str(node.max_open_files)
        locked = "no limit" if node.max_locked_bytes is None else format_bytes(node.max_locked_bytes)
        yield "limits", f"open files {files}, locked memory {locked}"
        yield "versions", ", ".join(f"{name} {version}" for name, version in node.versions.items())

    def _tests(self) -> Table:
        table = Table("nodes", "path", "latency", "bandwidth", box=None, pad_edge=False, header_style="")
        for test in self.report.tests:
            hosts = " - ".join(self.report.nodes[node].host for node in test.nodes)
            latency = "-" if test.latency_s is None else format_duration(test.latency_s)
            rate = "none" if test.bytes_per_s is None else rate_text(test.bytes_per_s)
            table.add_row(hosts, ", ".join(test.names), latency, rate)
        return table

    def _rows(self) -> list[dict[str, Any]]:
        return [self._row(test) for test in self.report.tests]

    def _row(self, test: PathTest) -> dict[str, Any]:
        hosts = [self.report.nodes[node].host for node in test.nodes]
        return {**test.model_dump(), "nodes": " - ".join(hosts), "names": ", ".join(test.names)}


def cluster_doctor(folder: Path, environment: Mapping[str, str] = os.environ) -> ClusterCheckup | None:
    """Return what was found on all nodes, as one of the ranks that torchrun started; None on all but rank 0.

    `folder` is one that all nodes are to see. The first rank of each node takes part, the others return at once.
    Raises LostPeer where the other nodes do not answer within 120 s.
    """
    missing = [name for name in _VARIABLES if name not in environment]
    if missing:
        raise ConfigError(
            f"the environment has RANK={environment.get('RANK')} but no {', '.join(missing)}, so this is no rank that "
            "torchrun started: unset RANK to check this machine alone, or start doctor with torchrun on every node"
        )
    if not folder.is_dir():
        raise ConfigError(f"--folder {folder}: no such folder on this node: name the one that will hold run.dir")
    if environment["LOCAL_RANK"] != "0":
        return None
    from meshwright.trainer.cluster.cluster_check import check_cluster
    from meshwright.trainer.cluster.cluster_warnings import cluster_warnings
    from meshwright.trainer.cluster.node_store import NodeStore

    num_ranks = int(environment["WORLD_SIZE"])
    try:
        nodes = NodeStore(_store(environment), int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"]))
        report = check_cluster(nodes, folder, num_ranks)
        nodes.gather(None)
    except RuntimeError as error:
        raise LostPeer(
            f"the other nodes did not answer at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']} within "
            f"{_TIMEOUT_S:.0f} s: {str(error).splitlines()[0]}"
        ) from error
    return ClusterCheckup(report, tuple(cluster_warnings(report))) if nodes.node == 0 else None


def _store(environment: Mapping[str, str]) -> Store:
    from meshwright.trainer.launch.rank_store import join_store

    return join_store(int(environment["RANK"]), int(environment["WORLD_SIZE"]), _TIMEOUT_S, "doctor-", environment)
