"""execute(): traces, converted to programs and matched, run on the engine."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.cost.communication.links import Links
from meshwright.simulator.engine.channel_instances import PodWays
from meshwright.simulator.engine.collective_times import CommOpTimes
from meshwright.simulator.engine.conditions import USUAL, Conditions, dropped_by, stops_of
from meshwright.simulator.engine.engine import PENDING, EngineState, Execution, run_programs
from meshwright.simulator.engine.matching import Channel, CommOps
from meshwright.simulator.engine.program import EventIds, RankProgram, RecordTimes, program_of
from meshwright.spec.trace.traces import Traces


@dataclass(frozen=True)
class Costs:
    """Durations of all records and communication ops."""

    records: Mapping[int, RecordTimes]
    """By representative."""
    comm_ops: CommOpTimes
    slowdown: float = 0.0
    """Of concurrent computation and usual communication (engine.py), without a limit on its SMs."""
    adapt_program: Callable[[RankProgram], RankProgram] = lambda program: program
    """Adapts a rank's program to the device."""


def execute(traces: Traces, comm_ops: CommOps, costs: Costs, conditions: Conditions = USUAL) -> Execution:
    """Return the execution of the traces; `costs` already include the slow ranks and links of `conditions`."""
    ids = EventIds(len(comm_ops))
    stops = stops_of(conditions, traces)
    programs = []
    for rank, trace in sorted(traces.traces.items()):
        program = program_of(trace, comm_ops.of_record[rank], costs.records[rank], ids)
        program = costs.adapt_program(program)
        programs.append(program.failing(stops.get(rank), dropped_by(conditions, traces, rank)))
    return run_programs(programs, _engine_state(programs, comm_ops, costs, ids))


def _engine_state(programs: list[RankProgram], comm_ops: CommOps, costs: Costs, ids: EventIds) -> EngineState:
    times, place = costs.comm_ops, {program.rank: number for number, program in enumerate(programs)}
    uses: list[list[tuple[int, float]]] = []
    members: list[tuple[int, ...]] = []
    is_first = np.zeros(len(comm_ops), bool)
    is_last = np.zeros(len(comm_ops), bool)
    inside, network, spine = times.inside.tolist(), times.network.tolist(), times.spine.tolist()
    pod_ways = _distinct_ways(times.pod_ways)
    pair_links = _pair_links(comm_ops, times, place)
    for position, channel in enumerate(comm_ops.channels):
        numbers = range(channel.first, channel.first + channel.num_comm_ops)
        is_first[channel.first] = is_last[numbers[-1]] = True
        ways = _ways(channel, place)
        inside_links = pair_links.get(position, [2 * way for way in ways])
        members += [tuple(place[rank] for rank in channel.members)] * len(numbers)
        to_pods = pod_ways.get(position, ())
        kinds: dict[tuple[float, float, float], list[tuple[int, float]]] = {}
        for at in numbers:
            loads = (inside[at], network[at], spine[at])
            if loads not in kinds:
                within = [(link, loads[0]) for link in inside_links if loads[0] > 0]
                cards = [(2 * way + 1, loads[1]) for way in ways if loads[1] > 0]
                kinds[loads] = within + cards + [(-1 - way, share * loads[2]) for way, share in to_pods]
            uses.append(kinds[loads])
    completed_at = [PENDING] * ids.count
    completed_at[ids.always] = 0.0
    return EngineState(
        links=Links(times.latency_s.tolist(), times.wire_s.tolist(), uses),
        completed_at=completed_at,
        missing=[len(one) for one in members],
        members=members,
        slowdown=np.broadcast_to(costs.slowdown * times.slows, len(comm_ops)).tolist(),
        is_last=is_last.tolist(),
        is_first=is_first.tolist(),
        arrived_at=[0.0] * len(comm_ops),
        began_at=[PENDING] * len(comm_ops),
    )


def _ways(channel: Channel, place: Mapping[int, int]) -> list[int]:
    """Return the link directions of a channel's ops: 2 x the program for sending, + 1 for receiving (full duplex)."""
    if channel.is_message:
        sender, receiver = channel.members
        return [2 * place[sender], 2 * place[receiver] + 1]
    return [2 * place[rank] + way for rank in channel.members for way in (0, 1)]


def _pair_links(comm_ops: CommOps, times: CommOpTimes, place: Mapping[int, int]) -> dict[int, list[int]]:
    """Return by channel the links between its members and their peers, numbered after all other links."""
    numbers: dict[tuple[int, int], int] = {}
    found = {}
    for position, peers in times.peers.items():
        channel = comm_ops.channels[position]
        # Each end of a message uses one direction, a member of a collective both.
        of_ways = peers if channel.is_message else [others for others in peers for _ in (0, 1)]
        ways = zip(_ways(channel, place), of_ways, strict=True)
        pairs = dict.fromkeys((way, other) for way, others in ways for other in others)
        found[position] = tuple((4 * len(place) + numbers.setdefault(pair, len(numbers)), 1.0) for pair in pairs)
    return {position: [link for link, _ in links] for position, links in _distinct_ways(found).items()}


def _distinct_ways(pod_ways: Mapping[int, PodWays]) -> dict[int, PodWays]:
    """Return `pod_ways` without duplicates: links that the same channels use equally are always equally busy."""
    users: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for channel, ways in pod_ways.items():
        for way, share in ways:
            users[way].append((channel, share))
    first = {tuple(found): way for way, found in reversed(users.items())}
    kept = set(first.values())
    return {channel: tuple(one for one in ways if one[0] in kept) for channel, ways in pod_ways.items()}
