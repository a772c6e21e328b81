"""What ranks, streams and communication ops do to each other's times, on steps written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hand_traces import ALL_GATHER, Script, all_of, execute_scripts, moments
from meshwright.spec.trace.trace import NONE
from meshwright.spec.trace.traces import Traces

BOTH = (0, 1)


def test_operations_of_a_stream_run_one_after_the_other_and_streams_beside_each_other() -> None:
    script = Script()
    script.op(2.0)
    script.op(3.0)
    script.op(1.0, stream=1)
    found = moments(script)[0]
    assert found.start_s.tolist() == [0.0, 2.0, 0.0]
    assert found.end_s.tolist() == [2.0, 5.0, 1.0]


def test_a_stream_waits_for_what_stood_before_the_event() -> None:
    script = Script()
    script.op(2.0)
    event = script.record_event()
    script.op(5.0)
    wait = script.wait_event(event, stream=1)
    after = script.op(1.0, stream=1)
    found = moments(script)[0]
    assert (found.start_s[wait], found.end_s[wait]) == (0.0, 2.0)
    assert found.start_s[after] == 2.0


def test_an_event_recorded_again_is_waited_for_as_it_was_when_the_wait_was_asked_for() -> None:
    script = Script()
    event = script.record_event()
    wait = script.wait_event(event, stream=1)
    script.op(2.0)
    script._add(5, 0, event=event)
    again = script.wait_event(event, stream=1)
    found = moments(script)[0]
    assert (found.end_s[wait], found.end_s[again]) == (0.0, 2.0)


def test_a_wait_for_what_was_recorded_before_the_step_takes_no_time() -> None:
    script = Script()
    script.wait_event(77)
    script.wait(99)
    script.op(1.0)
    assert moments(script)[0].end_s[-1] == 1.0


def test_the_host_hands_over_one_record_after_the_other() -> None:
    script = Script()
    script.op(1.0, host_s=3.0)
    script.op(1.0, host_s=3.0)
    assert moments(script)[0].start_s.tolist() == [3.0, 6.0]


def test_the_host_waits_for_its_stream_and_goes_on_from_there() -> None:
    script = Script()
    script.op(10.0, host_s=1.0)
    script.sync()
    script.op(1.0, stream=1, host_s=1.0)
    assert moments(script)[0].start_s.tolist() == [1.0, 11.0, 12.0]


def test_the_host_waits_for_an_event_and_not_for_what_follows_it() -> None:
    script = Script()
    script.op(2.0)
    event = script.record_event()
    script.op(10.0)
    script.sync(event=event)
    last = script.op(1.0, stream=1)
    assert moments(script)[0].start_s[last] == 2.0


def test_a_collective_begins_when_all_have_come_and_the_streams_go_on() -> None:
    first, second = Script(0, 2), Script(1, 2)
    for script, before_s in ((first, 1.0), (second, 4.0)):
        script.op(before_s)
        work = script.collective(BOTH, wire_s=5.0)
        script.op(2.0)
        script.wait(work)
        script.op(1.0)
    found = moments(first, second)
    for rank, end_s in ((0, 3.0), (1, 6.0)):
        assert (found[rank].start_s[1], found[rank].end_s[1]) == (4.0, 9.0)
        assert found[rank].end_s[2] == end_s
        assert (found[rank].start_s[3], found[rank].end_s[3]) == (end_s, 9.0)
        assert found[rank].start_s[4] == 9.0


def test_collectives_of_a_group_run_one_after_the_other() -> None:
    script = Script()
    script.collective((0,), wire_s=3.0)
    script.collective((0,), wire_s=2.0)
    found = moments(script)[0]
    assert found.end_s.tolist() == [3.0, 5.0]


def test_a_message_travels_once_it_is_sent_and_wanted() -> None:
    sender, receiver = Script(0, 2), Script(1, 2)
    sender.op(4.0)
    sender.send(1, BOTH, wire_s=2.0)
    sender.op(1.0)
    work = receiver.receive(0, BOTH, wire_s=2.0)
    receiver.op(1.0)
    receiver.wait(work)
    found = moments(sender, receiver)
    assert (found[1].start_s[0], found[1].end_s[0]) == (4.0, 6.0)
    assert found[1].end_s[2] == 6.0
    assert found[0].end_s[2] == 5.0


def test_messages_each_way_are_matched_by_their_order() -> None:
    first, second = Script(0, 2), Script(1, 2)
    first.send(1, BOTH, wire_s=1.0)
    first.send(1, BOTH, wire_s=4.0)
    back = first.receive(1, BOTH, wire_s=2.0)
    first.wait(back)
    works = [second.receive(0, BOTH, wire_s=1.0), second.receive(0, BOTH, wire_s=4.0)]
    second.wait(works[0])
    second.wait(works[1])
    second.send(0, BOTH, wire_s=2.0)
    found = moments(first, second)
    assert found[1].end_s[[2, 3]].tolist() == [1.0, 5.0]
    assert found[0].end_s[3] == 7.0


def test_on_a_host_that_computes_itself_a_wait_blocks_the_host_and_a_collective_runs_beside() -> None:
    script = Script(device="cpu")
    work = script.collective((0,), wire_s=5.0)
    script.op(1.0, host_s=2.0)
    script.wait(work)
    script.op(1.0, stream=3)
    found = moments(script)[0]
    assert found.end_s[1] == 3.0
    assert (found.end_s[2], found.start_s[3]) == (5.0, 5.0)


def test_two_equal_transfers_at_once_take_twice_as_long() -> None:
    script = Script()
    script.collective((0,), wire_s=3.0, axis="tp")
    script.collective((0,), wire_s=3.0, axis="fsdp")
    assert moments(script)[0].end_s.tolist() == [6.0, 6.0]


def test_half_loads_do_not_slow_each_other() -> None:
    script = Script()
    script.collective((0,), wire_s=3.0, axis="tp")
    script.collective((0,), wire_s=3.0, axis="fsdp")
    found = execute_scripts(all_of(script), (script,), load=0.5)[2]
    assert found[0].end_s.tolist() == [3.0, 3.0]


def test_a_transfer_speeds_up_when_the_other_has_ended() -> None:
    script = Script()
    script.collective((0,), wire_s=1.0, axis="tp")
    script.collective((0,), wire_s=3.0, axis="fsdp")
    assert moments(script)[0].end_s.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(("computing_s", "communicating_s"), [(8.0, 3.0), (3.0, 8.0), (5.0, 5.0), (0.0, 4.0)])
def test_computing_and_communicating_at_once_slows_both(computing_s: float, communicating_s: float) -> None:
    script = Script()
    work = script.collective((0,), wire_s=communicating_s)
    for _ in range(4):
        script.op(computing_s / 4)
    script.wait(work)
    script.op()
    _, execution, found = execute_scripts(all_of(script), (script,), slowdown=0.25)
    shorter_s, longer_s = sorted((computing_s, communicating_s))
    assert execution.end_s == longer_s + 0.25 * shorter_s
    computed_s = (found[0].end_s - found[0].start_s)[1:5].sum()
    # What is added is the communication's.
    assert computed_s == computing_s


def _pipeline(rank: int, world_size: int, num_stages: int, draw: np.random.Generator) -> Script:
    """Return a rank of `num_stages` stages, each of world_size / num_stages ranks that share their gradients."""
    width = world_size // num_stages
    stage, place = divmod(rank, width)
    column = tuple(place + width * other for other in range(num_stages))
    row = tuple(stage * width + other for other in range(width))
    script = Script(rank, world_size)
    seconds = draw.uniform(0.5, 2.0, num_stages)[stage]
    for _ in range(3):
        if stage > 0:
            script.wait(script.receive(rank - width, column, wire_s=0.3))
        script.op(seconds, host_s=0.1)
        work = script.collective(row, wire_s=0.4, op=ALL_GATHER, axis="fsdp")
        script.op(seconds / 3)
        script.wait(work)
        if stage < num_stages - 1:
            script.send(rank + width, column, wire_s=0.3)
    script.wait(script.collective(tuple(range(world_size)), wire_s=1.0))
    script.sync()
    return script


@pytest.mark.parametrize(("world_size", "num_stages"), [(4, 2), (8, 2), (8, 4), (6, 1)])
def test_classes_of_ranks_play_what_all_ranks_play(world_size: int, num_stages: int) -> None:
    scripts = [_pipeline(rank, world_size, num_stages, np.random.default_rng(3)) for rank in range(world_size)]
    width = world_size // num_stages
    class_of_rank = np.arange(world_size) // width * width
    few = tuple(scripts[rank] for rank in range(0, world_size, width))
    classes = Traces(world_size, {script.traced.rank: script.trace() for script in few}, class_of_rank)
    by_class = execute_scripts(classes, few)[2]
    full = moments(*scripts)
    for rank in range(world_size):
        np.testing.assert_array_equal(full[rank].start_s, by_class[int(class_of_rank[rank])].start_s)
        np.testing.assert_array_equal(full[rank].end_s, by_class[int(class_of_rank[rank])].end_s)


def test_a_ring_within_one_class_meets_itself() -> None:
    ring = (0, 1, 2, 3)
    scripts = []
    for rank in ring:
        script = Script(rank, 4)
        script.send((rank + 1) % 4, ring, wire_s=1.0)
        script.wait(script.receive((rank - 1) % 4, ring, wire_s=1.0))
        scripts.append(script)
    by_class = execute_scripts(Traces(4, {0: scripts[0].trace()}, np.zeros(4, np.int64)), (scripts[0],))[2]
    assert by_class[0].end_s.tolist() == moments(*scripts)[2].end_s.tolist()


def test_what_never_comes_is_never_played() -> None:
    first, second = Script(0, 2), Script(1, 2)
    first.wait(first.collective(BOTH))
    first.op(1.0)
    second.op(1.0)
    _, execution, found = execute_scripts(all_of(first, second), (first, second))
    assert not execution.is_done
    assert np.isnan(found[0].end_s[2])
    assert execution.ended_at.tolist() == [NONE]
