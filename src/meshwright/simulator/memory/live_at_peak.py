"""savings_of(): activations that are live at the memory peak of a traced step, and what doing without them costs.

    peak        the record before which live storages have the most bytes; the first of equals
    recompute   seconds of the operations that wrote a storage, and of their inputs, back to what is kept for
                backward anyway, parameters, or parameters to be all-gathered again; infinite across communication,
                since all ranks would have to repeat it
    offload     2 x bytes / PCIe bandwidth; only if the host has memory of its own (`can_offload`)

The tensors of one line of the program are added up. Each storage is evaluated alone: two of which one is made from the
other do not add up, and shared inputs are counted for each. Ignored: offload copies that overlap computation, and the
allocator's rounding.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.cost.memory.host_memory import PCIE_BYTES_PER_S
from meshwright.simulator.checks.call_sites import COMMUNICATION, without_numbers
from meshwright.simulator.memory.memory_curve import first_writers, live_at, roles_of
from meshwright.spec.step.simulation_report import SavedTensors
from meshwright.spec.trace.timeline import Floats, TensorRole
from meshwright.spec.trace.trace import NONE, Ints, Trace

_NUM_BEST = 8
_LEAST_SHARE = 0.005
"""Share of the peak below which tensors are not listed."""
_KEPT = (TensorRole.PARAMETER, TensorRole.UNSHARDED_PARAMETER, TensorRole.ACTIVATION, TensorRole.OTHER)
"""Roles of the storages that a recomputed forward starts from."""


class _Saving(NamedTuple):
    """One activation that is live at the peak, and what recomputing or offloading it alone would cost."""

    num_bytes: int
    op: str
    """The operation that wrote to it first; "" if it was allocated before the step."""
    scope: str
    """The module in whose code that was; "" outside of modules."""
    recompute_s: float | None
    """Seconds of the device to recompute it from what is kept; None if that would need communication."""
    offload_s: float
    """To the host's memory and back, if nothing hides it."""

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes that a second of the cheaper one buys; infinite for a second look at other memory."""
        seconds = self.offload_s if self.recompute_s is None else min(self.offload_s, self.recompute_s)
        return self.num_bytes / seconds if seconds else float("inf")


def savings_of(trace: Trace, signature_s: Floats, *, can_offload: bool) -> tuple[SavedTensors, ...]:
    """Return the recompute and offload candidates at the peak of a rank's step, best first.

    `signature_s` has the seconds of each signature.
    """
    live = trace.live_bytes()
    peak = min(int(live.argmax()), len(trace.records) - 1)
    lines: dict[tuple[str, str, bool], list[_Saving]] = defaultdict(list)
    for saving in sorted(_savings(trace, peak, signature_s), key=lambda saving: -saving.bytes_per_s):
        lines[saving.op, without_numbers(saving.scope), saving.recompute_s is None].append(saving)
    found = [_together(own, where, can_offload) for (_, where, _), own in lines.items()]
    worth = [saved for saved in found if saved.seconds and saved.num_bytes >= _LEAST_SHARE * int(live[peak])]
    return tuple(sorted(worth, key=lambda saved: -saved.num_bytes / min(saved.seconds)))[:_NUM_BEST]


def _savings(trace: Trace, peak: int, signature_s: Floats) -> Iterator[_Saving]:
    """Yield the activations that are live at record `peak`, the largest first."""
    roles, makers, num_bytes, rows = (
        roles_of(trace),
        first_writers(trace),
        trace.storages.num_bytes,
        live_at(trace, peak),
    )
    recompute_s = _recompute_s(trace, roles, signature_s)
    for at in rows[np.argsort(-num_bytes[rows], kind="stable")]:
        if roles[at] == TensorRole.ACTIVATION:
            op, scope = _made_by(trace, makers[at])
            again_s = float(recompute_s[at]) if np.isfinite(recompute_s[at]) else None
            yield _Saving(int(num_bytes[at]), op, scope, again_s, 2 * float(num_bytes[at]) / PCIE_BYTES_PER_S)


def _made_by(trace: Trace, record: int) -> tuple[str, str]:
    """Return the operation of a record, and its module."""
    if record == NONE:
        return "", ""
    signature = trace.records.signature[record]
    return "" if signature == NONE else trace.signatures[signature].op, trace.scopes[trace.records.scope[record]]


def _recompute_s(trace: Trace, roles: Ints, signature_s: Floats) -> Floats:
    """Return the seconds that recompute each storage [storages]; infinite across communication."""
    signature = trace.records.signature
    own_s = np.where(signature == NONE, 0.0, np.append(signature_s, 0.0)[signature])
    own_s[np.isin(trace.records.kind, COMMUNICATION)] = np.inf
    is_kept = np.isin(roles, _KEPT).tolist()
    costs_s = [0.0] * len(trace.storages)
    starts = np.searchsorted(trace.uses.record, np.arange(len(trace.records) + 1)).tolist()
    storage, writes = trace.uses.storage.tolist(), (trace.uses.writes == 1).tolist()
    for record, seconds in enumerate(own_s.tolist()):
        uses = range(starts[record], starts[record + 1])
        written = {storage[use] for use in uses if writes[use]}
        for read in {storage[use] for use in uses} - written:
            if not is_kept[read]:
                seconds += costs_s[read]
        for one in written:
            costs_s[one] += seconds
    return np.array(costs_s, np.float64)


def _together(own: list[_Saving], where: str, can_offload: bool) -> SavedTensors:
    again = [saving.recompute_s for saving in own if saving.recompute_s is not None]
    return SavedTensors(
        num_bytes=sum(saving.num_bytes for saving in own),
        num_tensors=len(own),
        op=own[0].op,
        scope=where,
        recompute_s=sum(again) if again else None,
        offload_s=sum(saving.offload_s for saving in own) if can_offload else None,
    )
