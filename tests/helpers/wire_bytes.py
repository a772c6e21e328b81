"""Bytes that one rank sends in a step: as the planner's formulas price them, and as a trace has them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np

from meshwright.cost.blocks.block_positions import block_positions
from meshwright.cost.blocks.block_table import BLOCK, LAST
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.communication import Communication
from meshwright.cost.communication.data_parallel import DataParallel, replicated_sums_s
from meshwright.cost.communication.fabric import Fabric, FabricConstants, fabric_of
from meshwright.cost.communication.fsdp_ends import ends_exposed_s
from meshwright.cost.communication.fsdp_exposed import UnitPasses, fsdp_exposed_s
from meshwright.cost.communication.pipeline_p2p import PipelineP2P
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Floats
from meshwright.cost.training_setup import Configurations
from meshwright.spec.trace.trace import NONE, RecordKind, Trace

Sent = Counter[tuple[str, str]]
"""Bytes by mesh axis and phase; fsdp, expert_dp_shard and dp_replicate are one axis, dp."""

_CONSTANTS = {
    **fitted_constants(),
    "cp_exposed": 1.0,
    "tp_again_exposed": 1.0,
    "overlap_slowdown": 1.0,
}
"""Nothing hides."""
_DP_AXES = ("fsdp", "expert_dp_shard", "dp_replicate")


def unit_fabric(of: Configurations) -> Fabric:
    """Return links that take a second for each byte that a rank sends, and nothing else."""
    nothing = {field.name: 0.0 for field in fields(FabricConstants) if field.name.endswith("_s")}
    fabric = fabric_of(of.setups[0].cluster, FabricConstants(all_to_all_efficiency=1.0, **nothing))
    one, most = np.asarray(1.0), np.asarray(np.inf)
    links = {"domain_size": np.asarray(1e6), "intra_bytes_per_s": one, "intra_bytes_per_s_per_peer": most}
    return replace(fabric, **links, nvls_bytes_per_s=np.asarray(0.0))


def sent_by_formulas(of: Configurations) -> Sent:
    """Return what the first rank of the only one of the cases sends; pipeline sends are left out."""
    work, fabric, total = work_of(of), unit_fabric(of), Sent()
    communication, parallel = Communication(of, work), DataParallel(of, work)
    pp, n = int(of.layouts.pp[0]), float(of.num_microbatches[0])
    zero = np.zeros(1)

    def add(axis: str, phase: str, seconds: Floats, times: float) -> None:
        total[axis, phase] += round(float(seconds[0]) * times)

    for position in block_positions(work):
        if position.kind == LAST and pp > 1:
            continue
        often = n * float(position.count[0]) / (pp if position.kind == BLOCK else 1)
        by_axis = {
            "tp": communication.tensor(position.row, fabric, _CONSTANTS, zero),
            "cp": communication.context(position.row, fabric, _CONSTANTS, zero, zero),
            "ep": communication.expert(position.row, fabric, _CONSTANTS),
        }
        for axis, (forward, backward) in by_axis.items():
            add(axis, "forward", forward, often)
            add(axis, "backward", backward, often)
        if position.kind == BLOCK:
            dp = fsdp_exposed_s(
                parallel, position.row, fabric, _CONSTANTS, UnitPasses((zero, zero), (zero, zero), zero, zero)
            )
        else:
            dp = ends_exposed_s(parallel, position.row, fabric, zero)
        add("dp", "", dp, often)
    if pp == 1:
        add("tp", "optimizer", replicated_sums_s(parallel, fabric), 1)
    return +total


def sent_to_next_stage(of: Configurations) -> int:
    """Return the bytes that the first rank of a pipeline sends to the next one in a step."""
    work = work_of(of)
    c = {**_CONSTANTS, "pp_exposed": 1.0, "send_s": 0.0}
    # Each microbatch there and back, and once more for each rank that the first one has to reach.
    num_sends = 2 * (of.num_microbatches + of.layouts.pp - 1)
    one = PipelineP2P(of, work).exposed_s(unit_fabric(of), c, of.num_microbatches) / num_sends
    return round(float(one[0] * of.num_microbatches[0]))


def sent_in_trace(found: Trace) -> tuple[Sent, Sent]:
    """Return what the traced rank sends: what formulas price, and by axis and kind what they leave out."""
    records, priced, left_out = found.records, Sent(), Sent()
    for row in np.flatnonzero((records.work != NONE) & (records.kind != RecordKind.WAIT)):
        # Dense parameters and experts have communicators of their own over the same replicas.
        axis = found.group_names[records.group[row]].partition(" (")[0]
        phase = found.phases[records.phase[row]]
        if axis == "pp" or records.kind[row] == RecordKind.RECEIVE:
            continue
        num_bytes = _sent_bytes(found, int(row))
        if kind := _left_out(found, int(row)):
            left_out[axis, kind] += num_bytes
        else:
            is_dp = axis in _DP_AXES
            priced["dp" if is_dp else axis, "" if is_dp else phase] += num_bytes
    return priced, left_out


def _sent_bytes(found: Trace, row: int) -> int:
    records = found.records
    num_bytes, num_ranks = int(records.num_bytes[row]), len(found.groups[records.group[row]])
    if records.kind[row] == RecordKind.SEND:
        return num_bytes
    is_all_reduce = "allreduce" in found.signatures[records.signature[row]].op.replace("all_reduce", "allreduce")
    return (2 if is_all_reduce else 1) * num_bytes * (num_ranks - 1) // num_ranks


def _left_out(found: Trace, row: int) -> str:
    """Return what kind of a thing formulas leave out this is, or nothing."""
    scope = found.scopes[found.records.scope[row]]
    is_size = found.signatures[found.records.signature[row]].inputs[0].dtype == "int64"
    names = {"router": "router" in scope, "loss": scope.startswith("collectives.py"), "sizes": is_size}
    name = found.group_names[found.records.group[row]]
    if name == "" or name.endswith("_heads"):
        return "shared heads" if name else "numbers"
    return next((name for name, is_it in names.items() if is_it), "")
