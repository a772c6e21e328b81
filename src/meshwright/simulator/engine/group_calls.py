"""group_problems(): whether all ranks made the same process groups, in the same order.

torch.distributed.new_group() is a collective of all ranks, members of the new group or not, unless it is called with
use_local_synchronization=True: a rank that leaves it out lets the others wait until they time out.
"""

from __future__ import annotations

from collections import Counter

from meshwright.simulator.checks.places import ordinal, some_ranks
from meshwright.spec.trace.problem import UNRECORDED, Place, Problem
from meshwright.spec.trace.trace import NONE, GroupCall, Trace
from meshwright.spec.trace.traces import Traces

_RULE = (
    "all ranks have to call new_group(), members or not, with the same ranks in the same order (or the members alone, "
    "with use_local_synchronization=True); the {} call differs"
)


def group_problems(traces: Traces) -> tuple[Problem, ...]:
    """Return the first call of new_group() that not all ranks make alike; empty where there is none.

    To blame is a rank that leaves the call out, else one that passes other ranks than most. In a tie either side may be
    wrong, such as where each rank makes its own group only.
    """
    calls = {rank: trace.group_calls for rank, trace in traces.traces.items()}
    for number in range(max(map(len, calls.values()), default=0)):
        at = {rank: own[number].ranks if number < len(own) else None for rank, own in calls.items()}
        if len(set(at.values())) > 1:
            culprit, is_tie = _culprit(traces, at)
            others = [rank for rank in at if at[rank] is not None and at[rank] != at[culprit]]
            places = (_place(traces.traces[rank], number) for rank in others[:3])
            rule, place = _RULE.format(ordinal(number)), _place(traces.traces[culprit], number)
            return (Problem(kind="collective", culprit=place, rule=rule, others=tuple(places), is_tie=is_tie),)
    return ()


def _culprit(traces: Traces, at: dict[int, tuple[int, ...] | None]) -> tuple[int, bool]:
    """Return a rank to blame, and whether as many ranks do as it does as do anything else."""
    if None in at.values():
        return next(rank for rank, ranks in at.items() if ranks is None), False
    votes = Counter(at[rank] for rank in traces.class_of_rank.tolist())
    (usual, most), (_, second), *_ = votes.most_common()
    return max(rank for rank, ranks in at.items() if ranks != usual), most == second


def _place(trace: Trace, number: int) -> Place:
    """Return a rank's call of new_group(), or that it makes no more of them after its last one."""
    calls, rank = trace.group_calls, trace.traced.rank
    if number < len(calls):
        return Place(rank=rank, record=UNRECORDED, op=_words(calls[number]), line=calls[number].line)
    if not calls:
        return Place(rank=rank, record=NONE, op="")
    return Place(rank=rank, record=NONE, op=_words(calls[-1]), line=calls[-1].line)


def _words(call: GroupCall) -> str:
    return f"new_group(ranks {some_ranks(call.ranks)})" if call.ranks else "new_group()"
