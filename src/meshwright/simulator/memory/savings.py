"""savings_of: what holding less at a rank's peak would cost, tensors of one line of the program together.

    again      seconds of computing each of them again, each alone (simulator/memory/liveness.py), added up
    moved      bytes to the host and back / PCIe; none where the host itself computes

Ignored: that making one of them again makes others that it is made from, so that lines do not add up.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.simulator.checks.starred import starred
from meshwright.spec.step.liveness import Liveness, SavedTensors, Saving

_NUM_BEST = 8
_LEAST_SHARE = 0.005
"""Of the peak: less is not worth a line."""


def savings_of(live: Liveness, *, is_host: bool) -> tuple[SavedTensors, ...]:
    """Return the activations that a rank holds at its peak and that are cheapest to do without, best first.

    `is_host` says that the host itself computes (Device.is_host).
    """
    lines: dict[tuple[str, str, bool], list[Saving]] = defaultdict(list)
    for saving in live.savings:
        where = starred(saving.tensor.scope)
        lines[saving.tensor.op, where, saving.recompute_s is None].append(saving)
    found = [_together(own, where, is_host) for (_, where, _), own in lines.items()]
    worth = [saved for saved in found if saved.seconds and saved.num_bytes >= _LEAST_SHARE * live.peak_bytes]
    return tuple(sorted(worth, key=lambda saved: -saved.num_bytes / min(saved.seconds)))[:_NUM_BEST]


def _together(own: list[Saving], where: str, is_host: bool) -> SavedTensors:
    again = [saving.recompute_s for saving in own if saving.recompute_s is not None]
    return SavedTensors(
        num_bytes=sum(saving.tensor.num_bytes for saving in own),
        count=len(own),
        op=own[0].tensor.op,
        scope=where,
        again_s=sum(again) if again else None,
        moved_s=None if is_host else sum(saving.offload_s for saving in own),
    )
