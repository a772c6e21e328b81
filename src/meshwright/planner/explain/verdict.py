"""verdict: whether the layout that a job sets fits its cluster, its step time, and changes that make it fit.

A simulation says how much memory is missing, the formulas how much less each change takes than the layout as it is, and
what the step would then be; so that an error that the formulas make with both does not count.
"""

from dataclasses import dataclass, replace

from meshwright.cost.layout_table import concatenate, layout_table
from meshwright.errors import InfeasibleLayout
from meshwright.planner.candidate import candidate_at, judge, layout_at
from meshwright.planner.explain.explain import changes, listed, neighbours
from meshwright.planner.explain.managed_states import MANAGED_STATES, with_managed_states
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import HostUse, host_use, memory_of_ranks, price
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Candidate, Fix
from meshwright.spec.step.estimate import tight_words
from meshwright.units import format_bytes_apart, format_duration

_NUM_FIXES, _NUM_FIXES_NAMED = 5, 3


@dataclass(frozen=True)
class Verdict:
    """What is expected of the layout that a job sets."""

    candidate: Candidate
    fullest_rank: int
    """The pipeline rank that needs most memory."""
    usable_bytes: float
    """What tensors can take of one device."""
    margin_bytes: float
    """What a layout that the planner chooses would leave free."""
    host: HostUse | None
    """What waits in the host's memory; None where nothing does."""
    fixes: tuple[Fix, ...]
    """The changes of one key with which it fits, those that cost least time first; empty if it fits."""

    @property
    def needed_bytes(self) -> float:
        """Return what the fullest rank must have of its device; it reserves cached blocks, too, where there is room."""
        return self.candidate.estimate.memory.needed_bytes

    @property
    def reserved_bytes(self) -> float:
        """Return what the allocator of that rank reserves (torch.cuda.max_memory_reserved)."""
        return self.candidate.estimate.memory.reserved_bytes

    def problem(self) -> InfeasibleLayout | None:
        """Return the error of a layout that does not fit; None if it does."""
        if self.candidate.fits:
            return None
        cure = f"set {self._fix_words}" if self.fixes else "no change of one key is enough"
        return InfeasibleLayout(
            f"[layout] does not fit: {self._excess}: {cure}; `meshwright plan` searches all layouts for one that fits"
        )

    @property
    def _excess(self) -> str:
        """Return which memory is too small, with what is needed of it and what it has."""
        if self.host is not None and self.candidate.is_limited_by_host(self.usable_bytes):
            return self.host.words
        who = f"pipeline rank {self.fullest_rank}" if self.candidate.layout.pp > 1 else "a rank"
        needed, usable = format_bytes_apart(self.needed_bytes, self.usable_bytes)
        return f"{who} needs {needed} of a device that can give {usable}"

    @property
    def tight(self) -> str:
        """Return what to know of a layout that fits at the limit of its devices alone; "" of others."""
        if not self.candidate.is_tight:
            return ""
        words = tight_words(self.needed_bytes, self.usable_bytes)
        return f"{words}: to avoid it, set {self._fix_words}" if self.fixes else words

    @property
    def _fix_words(self) -> str:
        fixes = (f"{fix.change} ({format_duration(fix.step_s)} a step)" for fix in self.fixes[:_NUM_FIXES_NAMED])
        return ", or ".join(fixes)


def verdict(request: PlanRequest) -> Verdict:
    """Return the verdict on the layout that the request gives; raises MeshwrightError where it cannot be priced."""
    assert request.given is not None, "no layout is set"
    candidate = judge(request.given, request)
    ranks = [memory.needed_bytes for memory in memory_of_ranks(request.given, request)]
    missing = -candidate.headroom_bytes
    return Verdict(
        candidate=candidate,
        fullest_rank=ranks.index(max(ranks)),
        usable_bytes=request.cluster.device.usable_memory_bytes,
        margin_bytes=request.margin_bytes,
        host=host_use(request.given, request),
        fixes=memory_fixes(request.given, request, missing) if missing > 0 else (),
    )


def memory_fixes(layout: Layout, request: PlanRequest, missing_bytes: float) -> tuple[Fix, ...]:
    """Return the fastest change of each key that frees `missing_bytes` or more of the fullest rank's memory, fastest
    first.
    """
    free = replace(request, fixed={})
    nearby = neighbours(layout, free, menu_of(free))
    priced = price(concatenate([layout_table([layout]), nearby]), free, only_fitting=False)
    freed = priced.headroom_bytes - priced.headroom_bytes[0]
    fixes: dict[tuple[str, ...], Fix] = {}
    for row in priced.by_time.tolist():
        if row and freed[row] >= missing_bytes and len(fixes) < _NUM_FIXES:
            other = layout_at(priced.layouts, row, free)
            changed = changes(layout, other)
            if (keys := tuple(changed)) in fixes:
                continue
            # Another degree takes its ranks from dp_shard, which a job has to say, too.
            ranks = {} if other.dp_shard == layout.dp_shard else {"dp_shard": other.dp_shard}
            change = listed({f"layout.{key}": value for key, value in (changed | ranks).items()})
            step_s = candidate_at(priced, row, free, max_actions=0).step_s
            fixes[keys] = Fix(change=change, step_s=step_s)
    if (managed := with_managed_states(request)) is not None and not layout.cpu_offload:
        moved = judge(layout, managed)
        if moved.headroom_bytes - priced.headroom_bytes[0] >= missing_bytes:
            fixes[MANAGED_STATES,] = Fix(change=MANAGED_STATES, step_s=moved.step_s)
    return tuple(sorted(fixes.values(), key=lambda fix: fix.step_s))
