"""The short check of the nodes of a run before its first step: addresses, limits, versions and clocks; no test."""

import os
import time
from collections.abc import Mapping

from meshwright.hardware.network import resolved_address
from meshwright.log import logger
from meshwright.spec.machine.node_report import NodeReport
from meshwright.trainer.cluster.clock_bounds import ClockBounds
from meshwright.trainer.cluster.cluster_check import report_node, served_address
from meshwright.trainer.cluster.cluster_warnings import node_warnings
from meshwright.trainer.launch.ranks import Ranks

_NUM_EXCHANGES = 4


def warn_of_nodes(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> None:
    """Log on rank 0 what of the nodes needs attention; a collective of a run of several nodes, else nothing."""
    if int(environment.get("GROUP_WORLD_SIZE", "1")) == 1:
        return
    node, is_leader = int(environment["GROUP_RANK"]), environment.get("LOCAL_RANK", "0") == "0"
    found = ranks.gather((node, resolved_address(environment["MASTER_ADDR"])))
    served = served_address([address for _, address in sorted(dict(found).items())], node)
    has_gpus = ranks.device.type == "cuda"
    gathered: list[NodeReport | None] = ranks.gather(
        report_node(environment, has_gpus=has_gpus, served=served) if is_leader else None
    )
    leaders = {report.node: rank for rank, report in enumerate(gathered) if report is not None}
    bounds = {node: ClockBounds() for node in sorted(leaders) if node != 0}
    started_s = time.time()
    for _ in range(_NUM_EXCHANGES):
        # No rank has the times of all before the last rank has sent its own.
        times_s = ranks.gather(started_s)
        arrived_s = ranks.gather(time.time())
        for node, bound in bounds.items():
            rank, first = leaders[node], leaders[0]
            bound.add(times_s[first], arrived_s[rank], times_s[rank], arrived_s[first])
        started_s = time.time()
    if ranks.is_first:
        nodes = sorted((report for report in gathered if report is not None), key=lambda report: report.node)
        for warning in node_warnings(nodes, [bound.offset(node) for node, bound in bounds.items()], ranks.num_ranks):
            logger.warning("%s", warning)
