"""A lost connection between nodes, from hand-made flight records of four ranks on two hosts."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.evidence import Evidence
from meshwright.spec.run.rank_records import Collective, FlightRecord, Heartbeat, ProcessGroupRecord

NOW_S = 1000.0
WORLD = ProcessGroupRecord(name="0", axis="world", ranks=[0, 1, 2, 3])
HOSTS = ["a", "a", "b", "b"]
TIMEOUT = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"
CLOSED = "RuntimeError: Connection closed by peer [10.0.0.1]:5"


def beat(rank: int, host: str, **changes: Any) -> Heartbeat:
    own = Heartbeat(
        rank=rank,
        num_ranks=4,
        pid=10 + rank,
        host=host,
        started_ticks=1,
        step=7,
        phase="failed",
        waits_for_rank=None,
        time_s=NOW_S - 60,
    )
    return own.replace(**changes)


def ended(rank: int, error: str | None = TIMEOUT, waited_s: float = 20.0, *, is_in: bool = True) -> FlightRecord:
    """Return the record of a rank that ended in all_reduce 2 of all ranks, or before it."""
    ops = [Collective(group="0", sequence=n, op="all_reduce", sizes=[[4]], is_done=n == 1) for n in (1, 2)]
    return FlightRecord(
        rank=rank,
        pid=10 + rank,
        reason="the rank ended",
        time_s=NOW_S - 60 + rank,
        groups=[WORLD],
        collectives=ops if is_in else ops[:1],
        stack=[],
        error=error,
        is_lost_peer=error is not None,
        waited_s=None if error is None else waited_s,
    )


def evidence(records: list[FlightRecord], hosts: list[str] = HOSTS, **changes: Any) -> Evidence:
    beats = {rank: beat(rank, host, **changes) for rank, host in enumerate(hosts)}
    known = {one.rank: one for one in records}
    return Evidence(beats, dict.fromkeys(beats, "elsewhere"), known, {rank: [] for rank in beats}, NOW_S, 5.0)


def test_two_nodes_whose_ranks_all_timed_out_have_lost_their_connection() -> None:
    found = diagnose(evidence([ended(rank) for rank in range(4)]))
    assert (found.verdict, found.culprits) == ("network", [])
    assert found.headline == (
        "the connection between a (ranks 0 and 1) and b (ranks 2 and 3) was lost, in all_reduce 2 of all ranks"
    )
    assert found.advice.startswith("No rank is to blame. Look at the network between a and b")
    assert any(
        "rank 2 on b ended after 20 s without progress with RuntimeError: Timed" in one for one in found.evidence
    )


def test_a_rank_that_a_neighbour_closed_on_and_a_node_that_waits_still_are_the_networks() -> None:
    records = [ended(0), ended(1, CLOSED), ended(2, None), ended(3, None)]
    assert "was lost" in diagnose(evidence(records)).headline


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([ended(0), ended(1), ended(2)], "a rank without a record may be dead"),
        ([ended(0), ended(1), ended(2, CLOSED), ended(3, CLOSED)], "b was closed on, so a process ended there"),
        ([ended(0), ended(1), ended(2, CLOSED, 0.1), ended(3)], "rank 2 arrived late"),
        ([ended(0), ended(1), ended(2), ended(3, is_in=False)], "rank 3 had not entered the collective"),
    ],
)
def test_another_cause_that_is_possible_is_not_taken_for_the_network(records: list[FlightRecord], why: str) -> None:
    assert "was lost" not in diagnose(evidence(records)).headline, why


def test_one_host_has_no_connection_to_lose() -> None:
    found = diagnose(evidence([ended(rank) for rank in range(4)], ["a"] * 4))
    assert found.headline.startswith("every rank has entered all_reduce 2")


def test_an_exchange_of_a_pipeline_between_nodes_is_one() -> None:
    records = [ended(rank).replace(collectives=[]) for rank in range(4)]
    found = evidence(records)
    waiting = {1: found.heartbeats[1].replace(waits_for_rank=2), 2: found.heartbeats[2].replace(waits_for_rank=1)}
    found = Evidence(**{**vars(found), "heartbeats": {**found.heartbeats, **waiting}})
    assert diagnose(found).headline == "the connection between a (ranks 0 and 1) and b (ranks 2 and 3) was lost"


def test_a_lost_peer_whose_side_is_silent_blames_no_rank_that_reported() -> None:
    found = diagnose(evidence([ended(2).replace(collectives=[])], HOSTS))
    assert found.verdict == "failed"
    assert "Another rank, or the network to its host, was lost" in found.advice


def test_ranks_that_still_wait_name_the_nodes_to_look_between() -> None:
    found = diagnose(evidence([ended(rank, None) for rank in range(4)], HOSTS, phase="agree"))
    assert found.verdict == "network"
    assert "Look at the network between a (ranks 0 and 1) and b (ranks 2 and 3)" in found.advice
