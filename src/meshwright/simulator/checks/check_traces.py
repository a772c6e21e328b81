"""check(): whether a step of these ranks can end, and if not, which rank is the culprit.

    groups      all ranks make the same process groups in the same order: torch.distributed.new_group() is a collective
                of all ranks, members or not, unless called with use_local_synchronization=True
    channels    all members of a group run the same collectives in the same order; every send has its receive, of the
                same bytes and dtype; at the first difference the minority is the culprit (disagreements.py)
    deadlocks   if these agree, the step is executed with zero durations: whether it ends does not depend on them, since
                no stream chooses what to wait for. If it does not end, ranks wait in a cycle, or for one that stopped

Ignored: blocking inside a communication library, such as for buffers, or behind another message of the same pair.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from meshwright.simulator.checks.call_sites import call_site_of, missing_call_site, ordinal, some_ranks
from meshwright.simulator.checks.deadlock import deadlock_problems
from meshwright.simulator.checks.disagreements import Blame, Disagreement, blamed, call_signatures, first_disagreement
from meshwright.simulator.engine.collective_times import CommOpTimes
from meshwright.simulator.engine.conditions import USUAL, Conditions
from meshwright.simulator.engine.execute import Costs, execute
from meshwright.simulator.engine.matching import CommOps, match
from meshwright.simulator.engine.program import RecordTimes
from meshwright.simulator.engine.rank_classes import split_classes
from meshwright.spec.trace.trace import NONE, GroupCall, Trace
from meshwright.spec.trace.trace_problem import UNRECORDED, CallSite, TraceProblem, along
from meshwright.spec.trace.traces import Traces

_EARLIER = "in the builder or the first call of the step"


def check(traces: Traces, conditions: Conditions = USUAL) -> tuple[TraceProblem, ...]:
    """Return why the step deadlocks or its communication mismatches; empty for a valid step."""
    mismatched = mismatches(traces, conditions)
    if mismatched:
        return mismatched
    traces = split_classes(traces, [fault.rank for fault in conditions.faults])
    comm_ops = match(traces)
    nothing = np.zeros(len(comm_ops))
    no_time = {rank: _no_time(trace) for rank, trace in traces.traces.items()}
    costs = Costs(no_time, CommOpTimes(nothing, nothing, nothing, nothing, nothing))
    return deadlock_problems(traces, comm_ops, execute(traces, comm_ops, costs, conditions))


def with_earlier(traces: Traces, problems: tuple[TraceProblem, ...]) -> tuple[TraceProblem, ...]:
    """Return the problems of a step; instead those of the builder and of earlier calls, if the step does not have the
    same, since they end the program before the step starts.
    """
    if traces.earlier is None:
        return problems
    earlier = check(traces.earlier)
    if not earlier or _key(earlier[0]) in {_key(problem) for problem in problems}:
        return problems
    return tuple(problem.replace(rule=f"{_EARLIER}: {problem.rule}") for problem in earlier)


def _key(problem: TraceProblem) -> tuple[object, ...]:
    """Return the fields that identify a problem across calls."""
    culprit = problem.culprit
    return problem.kind, culprit.rank, culprit.op, culprit.line, culprit.num_bytes, culprit.dtype, problem.group


def mismatches(traces: Traces, conditions: Conditions = USUAL) -> tuple[TraceProblem, ...]:
    """Return the mismatched groups and communication; if there are none, the step may still deadlock (check())."""
    if found := group_problems(traces):
        return found
    traces = split_classes(traces, [fault.rank for fault in conditions.faults])
    return tuple(_mismatches(traces, match(traces)))


def _no_time(trace: Trace) -> RecordTimes:
    return RecordTimes(np.zeros(len(trace.records)), np.zeros(len(trace.records)))


def _mismatches(traces: Traces, comm_ops: CommOps) -> list[TraceProblem]:
    """Return the first disagreement of each culprit and the number of its others, the most certain first."""
    asked = [call_signatures(traces, channel) for channel in comm_ops.channels]
    pairs = zip(comm_ops.channels, asked, strict=True)
    found = [one for channel, theirs in pairs if (one := first_disagreement(traces, channel, theirs))]
    first: dict[int, list[Blame]] = {}
    for blame in blamed(traces, found, comm_ops.channels, asked):
        # A pipeline rank with too few microbatches, for example, disagrees with all its neighbours.
        first.setdefault(blame.rank, []).append(blame)
    return [_problem(traces, blame).replace(num_more=len(more)) for blame, *more in first.values()]


def _problem(traces: Traces, blame: Blame) -> TraceProblem:
    """Return the problem of an operation of a channel whose members call it differently."""
    one, culprit, is_tie = blame
    channel = one.channel
    places = [
        call_site_of(traces.traces[rank], int(rows[one.number]), channel.axis)
        if one.number < len(rows)
        else missing_call_site(traces.traces[rank], rows)
        for rank, rows in zip(channel.members, channel.rows, strict=True)
    ]
    members = [member for member in range(len(places)) if member != culprit]
    others = [member for member in members if one.at[member] != one.at[culprit]] or members
    return TraceProblem(
        kind="message" if channel.is_message else "collective",
        culprit=places[culprit],
        rule=_rule(one),
        others=tuple(places[other] for other in others)[:3],
        group=channel.ranks,
        is_tie=is_tie,
        hint=_hint(one, culprit),
    )


def _rule(one: Disagreement) -> str:
    channel, at = one.channel, one.at
    axis = along(channel.axis)
    if not channel.is_message:
        broken = one.rule or "run the same collectives in the same order"
        group = f"ranks {some_ranks(channel.ranks)}"
        return f"all ranks of a group{axis} have to {broken}; the {ordinal(one.number)} collective of {group} differs"
    sender, receiver = channel.ranks
    message = f"the {ordinal(one.number)} message from rank {sender} to rank {receiver}{axis}"
    if None in at:
        return f"{message} has no {'receive' if at[1] is None else 'send'}"
    return f"{message} is {_sent_and_received(at)}"


def _sent_and_received(at: Sequence[Hashable]) -> str:
    """Return in what the two ends of a message differ."""
    sent, received = (one if isinstance(one, tuple) else (0, "", None) for one in at)
    if sent[0] != received[0]:
        return f"{sent[0]:,} bytes at the sender and {received[0]:,} bytes at the receiver"
    if sent[1] != received[1]:
        return f"sent as {sent[1]} and received as {received[1]}"
    return "of one stage or microbatch at the sender and of another at the receiver"


def _hint(one: Disagreement, culprit: int) -> str:
    """Return that an earlier collective may be the cause, where the culprit runs more or fewer than the others."""
    if one.channel.is_message or not one.number:
        return ""
    counts = [len(rows) for rows in one.channel.rows]
    own, (usual, _) = counts[culprit], Counter(counts).most_common(1)[0]
    if own == usual:
        return ""
    which = "the extra one may be this or an earlier one" if own > usual else "the missing one may be an earlier one"
    return f"rank {one.channel.members[culprit]} runs {own:,} collectives in this group, most ranks {usual:,}: {which}"


_GROUP_RULE = (
    "all ranks have to call new_group(), members or not, with the same ranks in the same order (or only the members, "
    "with use_local_synchronization=True); the {} call differs"
)


def group_problems(traces: Traces) -> tuple[TraceProblem, ...]:
    """Return the first call of new_group() that ranks make differently; empty where there is none.

    The culprit is a rank without the call, else one that passes other ranks than most. In a tie either side may be
    wrong, such as where each rank makes only its own group.
    """
    calls = {rank: trace.group_calls for rank, trace in traces.traces.items()}
    for number in range(max(map(len, calls.values()), default=0)):
        at = {rank: own[number].ranks if number < len(own) else None for rank, own in calls.items()}
        if len(set(at.values())) > 1:
            culprit, is_tie = _group_culprit(traces, at)
            others = [rank for rank in at if at[rank] is not None and at[rank] != at[culprit]]
            places = (_group_call_site(traces.traces[rank], number) for rank in others[:3])
            rule, place = _GROUP_RULE.format(ordinal(number)), _group_call_site(traces.traces[culprit], number)
            return (TraceProblem(kind="collective", culprit=place, rule=rule, others=tuple(places), is_tie=is_tie),)
    return ()


def _group_culprit(traces: Traces, at: dict[int, tuple[int, ...] | None]) -> tuple[int, bool]:
    """Return the culprit, and whether the vote of the ranks is a tie."""
    if None in at.values():
        return next(rank for rank, ranks in at.items() if ranks is None), False
    votes = Counter(at[rank] for rank in traces.class_of_rank.tolist())
    (usual, most), (_, second), *_ = votes.most_common()
    return max(rank for rank, ranks in at.items() if ranks != usual), most == second


def _group_call_site(trace: Trace, number: int) -> CallSite:
    """Return a rank's call of new_group(); after its last one, the last call without a record."""
    calls, rank = trace.group_calls, trace.traced.rank
    if number < len(calls):
        return CallSite(rank=rank, record=UNRECORDED, op=_group_words(calls[number]), line=calls[number].line)
    if not calls:
        return CallSite(rank=rank, record=NONE, op="")
    return CallSite(rank=rank, record=NONE, op=_group_words(calls[-1]), line=calls[-1].line)


def _group_words(call: GroupCall) -> str:
    return f"new_group(ranks {some_ranks(call.ranks)})" if call.ranks else "new_group()"
