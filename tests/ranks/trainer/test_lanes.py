"""Sums over a lane, many of them under way at once, and what becomes of them when a member is lost."""

from __future__ import annotations

import torch
from torch import distributed as dist

from meshwright.channels.channel import new_token
from meshwright.fault_tolerance.replicas.coordinator import Coordinator
from meshwright.fault_tolerance.replicas.lanes import Lane
from meshwright.fault_tolerance.replicas.member import Member
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import Silence
from meshwright.spec.run.quorum import ReplicaPlace
from run_ranks import run_ranks

TIMEOUT_S = 60.0
NUM_SUMS, SIZE = 24, 100_000


def sum_twice(address: tuple[str, int], token: str) -> tuple[list[float], bool, float, bool]:
    """Return each sum of three replicas, of which the last leaves in the middle; and one of those that are left."""
    replica = dist.get_rank()
    member = Member(ReplicaPlace.of(replica, address, token), 0, 1, TIMEOUT_S)
    lane = Lane(member, 0, TIMEOUT_S)
    member.ready(None)
    lane.form(member.ready(0))
    tensors = [torch.full((SIZE,), float(1 + replica + number)) for number in range(NUM_SUMS)]
    started = [lane.start_sum(tensor) for tensor in tensors[: NUM_SUMS // 2]]
    for one in started:
        one.wait()
    # All have begun to sum before one of them ends its connections.
    dist.barrier()
    if replica == 2:
        lane.abandon()
        member.close()
        return [], True, 0.0, True
    started = [lane.start_sum(tensor) for tensor in tensors[NUM_SUMS // 2 :]]
    for one in started:
        one.wait()
    had_failed = lane.has_failed
    quorum = member.ready(0, has_failed=had_failed)
    assert quorum.members == (0, 1)
    lane.form(quorum)
    again = torch.full((SIZE,), float(1 + replica))
    lane.sum(again)
    member.leave()
    member.close()
    return (
        [float(tensor.unique()) for tensor in tensors[: NUM_SUMS // 2]],
        had_failed,
        float(again.unique()),
        lane.has_failed,
    )


def test_sums_that_are_under_way_end_where_a_member_is_lost() -> None:
    token = new_token()
    silence = Silence(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)
    with Coordinator("127.0.0.1", token, RollCall(3, 1, 3), silence, TIMEOUT_S) as server:
        *survivors, _ = run_ranks(sum_twice, 3, server.address, token)
    expected = [float(6 + 3 * number) for number in range(NUM_SUMS // 2)]
    assert survivors == [(expected, True, 3.0, False)] * 2
