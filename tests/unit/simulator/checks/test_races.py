"""Uses of one tensor that nothing orders are found, and those that an event, a wait or the host orders are not."""

from __future__ import annotations

import pytest

from hand_traces import Script, all_of
from meshwright.simulator.checks.hazards import hazards
from meshwright.simulator.checks.races import races_of

PAIR = (0, 1)


def _two_streams(order: str) -> Script:
    """Return a step in which stream 1 reads what stream 0 wrote."""
    script = Script()
    script.op(1.0)
    storage = script.allocate(64)
    script.use(storage, writes=True)
    match order:
        case "event":
            script.wait_event(script.record_event(0), 1)
        case "early event":
            script.wait_event(script.record_event(1), 1)
        case "host":
            script.sync(0)
        case "host of the other":
            script.sync(1)
    script.op(1.0, stream=1)
    script.use(storage)
    return script


@pytest.mark.parametrize(
    ("order", "is_found"),
    [("none", True), ("event", False), ("early event", True), ("host", False), ("host of the other", True)],
)
def test_streams_are_ordered_by_events_and_by_the_host(order: str, is_found: bool) -> None:
    races = races_of(_two_streams(order).trace())
    assert [race.kind for race in races] == ["across streams"] * is_found


def test_reads_on_two_streams_are_no_race() -> None:
    script = Script()
    storage = script.allocate(64)
    for stream in (0, 1):
        script.op(1.0, stream=stream)
        script.use(storage)
    assert races_of(script.trace()) == ()


def _collective(waits: str) -> Script:
    """Return a step that reads the result of a collective."""
    script = Script(0, 2)
    storage = script.allocate(64)
    work = script.collective(PAIR)
    script.use(storage, writes=True)
    if waits == "before":
        script.wait(work)
    if waits == "on another stream":
        script.wait(work, stream=1)
    if waits == "for a later one":
        script.wait(script.collective(PAIR))
    script.op(1.0)
    script.use(storage)
    if waits == "after":
        script.wait(work)
    return script


@pytest.mark.parametrize(
    ("waits", "kind"),
    [
        ("before", None),
        ("for a later one", None),
        ("never", "never waited for"),
        ("after", "used before its wait"),
        ("on another stream", "across streams"),
    ],
)
def test_a_collective_is_waited_for_before_its_result_is_used(waits: str, kind: str | None) -> None:
    races = races_of(_collective(waits).trace())
    assert [race.kind for race in races] == ([] if kind is None else [kind])


def test_work_that_nothing_waits_for_is_found_though_its_result_is_not_used() -> None:
    script = Script(0, 2)
    script.collective(PAIR)
    (race,) = races_of(script.trace())
    assert (race.kind, race.first, race.second) == ("never waited for", 0, -1)


def test_a_step_that_waits_for_the_last_steps_works_leaves_its_own_to_the_next() -> None:
    script = Script(0, 2)
    script.wait(99)
    script.collective(PAIR)
    assert races_of(script.trace()) == ()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_memory_that_another_stream_uses_is_not_handed_out_again(is_ordered: bool) -> None:
    script = Script()
    script.op(1.0)
    storage = script.allocate(64)
    script.use(storage, writes=True)
    script.wait_event(script.record_event(0), 1)
    script.op(1.0, stream=1)
    script.use(storage)
    if is_ordered:
        script.wait_event(script.record_event(1), 0)
    script.free(storage)
    script.op(1.0)
    script.use(script.allocate(64), writes=True)
    assert [race.kind for race in races_of(script.trace())] == ["freed across streams"] * (not is_ordered)


def test_two_collectives_on_one_tensor_are_not_reported() -> None:
    script = Script(0, 2)
    storage = script.allocate(64)
    works = []
    for axis in ("a", "b"):
        works.append(script.collective(PAIR, axis=axis))
        script.use(storage, writes=True)
    for work in works:
        script.wait(work)
    assert races_of(script.trace()) == ()


def test_ranks_that_do_the_same_are_one_warning() -> None:
    scripts = [Script(rank, 2) for rank in PAIR]
    for script in scripts:
        script.collective(PAIR)
        script.collective(PAIR)
    (hazard,) = hazards(all_of(*scripts))
    assert (hazard.count, hazard.num_ranks) == (2, 2)
    assert "2 times (and 1 other ranks)" in str(hazard)
