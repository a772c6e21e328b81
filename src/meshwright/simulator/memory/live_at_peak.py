"""liveness_of(): live storages at the memory peak of a traced step, and the cost of recomputing or offloading them.

    peak        the record before which live storages have the most bytes; the first of equals
    recompute   seconds and FLOPs of the operations that wrote a storage, and of their inputs, back to what is kept for
                backward anyway, parameters, or parameters to be all-gathered again; infinite across communication,
                since all ranks would have to repeat it
    offload     2 x bytes / PCIe bandwidth; only if the host has memory of its own (`can_offload`)

savings_of() adds these up for the tensors of one line of the program. Each storage is evaluated alone: two of which one
is made from the other do not add up, and shared inputs are counted for each. Ignored: offload copies that overlap
computation, and the allocator's rounding.
"""

from collections import defaultdict

import numpy as np

from meshwright.cost.memory.host_memory import PCIE_BYTES_PER_S
from meshwright.simulator.checks.call_sites import COMMUNICATION, without_numbers
from meshwright.simulator.memory.memory_curve import bytes_by_role, first_writers, live_at, roles_of
from meshwright.spec.step.liveness import Liveness, LiveStorage, SavedTensors, Saving
from meshwright.spec.trace.timeline import Floats, TensorRole
from meshwright.spec.trace.trace import NONE, Ints, Trace

_NUM_LARGEST = 20
_KEPT = (TensorRole.PARAMETER, TensorRole.UNSHARDED_PARAMETER, TensorRole.ACTIVATION, TensorRole.OTHER)
"""Roles of the storages that a recomputed forward starts from."""


def liveness_of(trace: Trace, signature_s: Floats, host_bytes_per_s: float = PCIE_BYTES_PER_S) -> Liveness:
    """Return the live storages at the peak of a step; `signature_s` has the seconds of each signature."""
    roles = roles_of(trace)
    live = trace.live_bytes()
    peak = min(int(live.argmax()), len(trace.records) - 1)
    num_bytes, found, rows = trace.storages.num_bytes, _Live(trace, roles), live_at(trace, peak)
    by_size = rows[np.argsort(-num_bytes[rows], kind="stable")]
    recompute_s, recompute_flops = _recompute_costs(trace, roles, signature_s)
    savings = [
        Saving(
            tensor=found.storage(int(at)),
            recompute_flops=int(recompute_flops[at]) if np.isfinite(recompute_flops[at]) else None,
            recompute_s=float(recompute_s[at]) if np.isfinite(recompute_s[at]) else None,
            offload_s=2 * float(num_bytes[at]) / host_bytes_per_s,
        )
        for at in by_size
        if roles[at] == TensorRole.ACTIVATION
    ]
    by_role = bytes_by_role(trace, roles)[peak]
    return Liveness(
        rank=trace.traced.rank,
        peak_bytes=int(live[peak]),
        record=peak,
        op=found.op(peak),
        scope=trace.scopes[trace.records.scope[peak]],
        phase=trace.phases[trace.records.phase[peak]],
        by_role={role.name.lower(): int(by_role[role]) for role in TensorRole},
        largest=tuple(found.storage(int(at)) for at in by_size[:_NUM_LARGEST]),
        savings=tuple(sorted(savings, key=lambda saving: -saving.bytes_per_s)),
    )


class _Live:
    """Describes storages by their first writers."""

    def __init__(self, trace: Trace, roles: Ints) -> None:
        self.trace, self.roles = trace, roles
        self._maker = first_writers(trace)

    def storage(self, at: int) -> LiveStorage:
        """Return the storage at a position of Trace.storages."""
        trace, maker = self.trace, self._maker[at]
        return LiveStorage(
            storage=at,
            num_bytes=int(trace.storages.num_bytes[at]),
            role=TensorRole(self.roles[at]).name.lower(),
            op="" if maker == NONE else self.op(maker),
            scope="" if maker == NONE else trace.scopes[trace.records.scope[maker]],
            phase="" if maker == NONE else trace.phases[trace.records.phase[maker]],
        )

    def op(self, record: int) -> str:
        """Return the operation of a record."""
        signature = self.trace.records.signature[record]
        return "" if signature == NONE else self.trace.signatures[signature].op


def _recompute_costs(trace: Trace, roles: Ints, signature_s: Floats) -> tuple[Floats, Floats]:
    """Return the (seconds, FLOPs) that recompute each storage [storages]; infinite across communication."""
    signature = trace.records.signature
    own_s = np.where(signature == NONE, 0.0, np.append(signature_s, 0.0)[signature])
    flops = np.array([*(one.flops for one in trace.signatures), 0], np.float64)[signature]
    own_s[np.isin(trace.records.kind, COMMUNICATION)] = np.inf
    is_kept = np.isin(roles, _KEPT).tolist()
    costs: list[tuple[float, float]] = [(0.0, 0.0)] * len(trace.storages)
    starts = np.searchsorted(trace.uses.record, np.arange(len(trace.records) + 1)).tolist()
    storage, writes = trace.uses.storage.tolist(), (trace.uses.writes == 1).tolist()
    for record, (seconds, work) in enumerate(zip(own_s.tolist(), flops.tolist(), strict=True)):
        uses = range(starts[record], starts[record + 1])
        written = {storage[use] for use in uses if writes[use]}
        for read in {storage[use] for use in uses} - written:
            if not is_kept[read]:
                seconds, work = seconds + costs[read][0], work + costs[read][1]
        for one in written:
            costs[one] = (costs[one][0] + seconds, costs[one][1] + work)
    made_s, made_flops = np.array(costs, np.float64).reshape(-1, 2).T
    return made_s, np.where(np.isfinite(made_s), made_flops, np.inf)


_NUM_BEST = 8
_LEAST_SHARE = 0.005
"""Share of the peak below which tensors are not listed."""


def savings_of(live: Liveness, *, can_offload: bool) -> tuple[SavedTensors, ...]:
    """Return the recompute and offload candidates at a rank's peak, best first."""
    lines: dict[tuple[str, str, bool], list[Saving]] = defaultdict(list)
    for saving in live.savings:
        where = without_numbers(saving.tensor.scope)
        lines[saving.tensor.op, where, saving.recompute_s is None].append(saving)
    found = [_together(own, where, can_offload) for (_, where, _), own in lines.items()]
    worth = [saved for saved in found if saved.seconds and saved.num_bytes >= _LEAST_SHARE * live.peak_bytes]
    return tuple(sorted(worth, key=lambda saved: -saved.num_bytes / min(saved.seconds)))[:_NUM_BEST]


def _together(own: list[Saving], where: str, can_offload: bool) -> SavedTensors:
    again = [saving.recompute_s for saving in own if saving.recompute_s is not None]
    return SavedTensors(
        num_bytes=sum(saving.tensor.num_bytes for saving in own),
        num_tensors=len(own),
        op=own[0].tensor.op,
        scope=where,
        recompute_s=sum(again) if again else None,
        offload_s=sum(saving.offload_s for saving in own) if can_offload else None,
    )
