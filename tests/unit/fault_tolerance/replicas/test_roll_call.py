"""Which replicas take part in a step, by what they say before it."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.spec.run.quorum import Quorum, Readiness


def said(step: int | None, incarnation: str = "a", *, has_failed: bool = False) -> Readiness:
    return Readiness(replica=0, incarnation=incarnation, step=step, has_failed=has_failed)


def live(replicas: Iterable[int], incarnation: str = "a") -> dict[int, str]:
    return dict.fromkeys(replicas, incarnation)


def started(num_replicas: int, step: int, *, minimum: int = 1, most: int = 8) -> RollCall:
    """Return the roll call of a run whose replicas have all loaded a checkpoint after `step`."""
    roll_call = RollCall(num_replicas, minimum, most)
    replicas = range(num_replicas)
    first = roll_call.decide({one: said(None) for one in replicas}, live(replicas), is_late=False)
    assert first is not None
    assert first.restores
    second = roll_call.decide({one: said(step) for one in replicas}, live(replicas), is_late=False)
    assert second is not None
    assert not second.restores
    return roll_call


def test_a_run_begins_once_all_replicas_are_there_or_have_been_waited_for() -> None:
    roll_call = RollCall(num_expected=2, minimum=1, most=8)
    assert roll_call.decide({0: said(None)}, live({0}), is_late=False) is None
    quorum = roll_call.decide({0: said(None)}, live({0}), is_late=True)
    assert quorum is not None
    assert quorum.members == (0,)


def test_fewer_than_the_minimum_wait_and_give_up() -> None:
    roll_call = started(2, 5, minimum=2)
    assert roll_call.decide({0: said(6)}, live({0}), is_late=False) is None
    quorum = roll_call.decide({0: said(6)}, live({0}), is_late=True)
    assert quorum is not None
    assert quorum.too_few


def test_a_live_member_is_waited_for_and_a_lost_one_is_not() -> None:
    roll_call = started(2, 5)
    assert roll_call.decide({0: said(6)}, live({0, 1}), is_late=True) is None
    quorum = roll_call.decide({0: said(6)}, live({0}), is_late=False)
    assert quorum is not None
    assert (quorum.members, quorum.step, quorum.sources) == ((0,), 6, {})


def test_a_newcomer_gets_the_state_of_a_member_with_the_newest_step() -> None:
    roll_call = started(2, 5)
    quorum = roll_call.decide({0: said(6), 1: said(6), 2: said(None)}, live({0, 1, 2}), is_late=False)
    assert quorum is not None
    assert (quorum.members, quorum.step, quorum.sources) == ((0, 1, 2), 6, {2: 0})


def test_a_member_that_has_started_again_is_not_waited_for_unless_all_have() -> None:
    """It may compile for minutes, or load for long: the others have lost one step already."""
    roll_call = started(2, 5)
    quorum = roll_call.decide({0: said(6)}, live({0}) | live({1}, "b"), is_late=False)
    assert quorum is not None
    assert quorum.members == (0,)
    roll_call = started(2, 5)
    assert roll_call.decide({0: said(None, "b")}, live({0, 1}, "b"), is_late=False) is None


def test_a_newcomer_that_is_not_ready_holds_up_no_one() -> None:
    roll_call = started(2, 5)
    quorum = roll_call.decide({0: said(6), 1: said(6)}, live({0, 1, 2}), is_late=False)
    assert quorum is not None
    assert quorum.members == (0, 1)


def test_a_member_that_dropped_a_step_gets_the_state_of_one_that_did_not() -> None:
    roll_call = started(3, 5)
    quorum = roll_call.decide({0: said(5, has_failed=True), 1: said(6), 2: said(6)}, live({0, 1, 2}), is_late=False)
    assert quorum is not None
    assert (quorum.step, quorum.sources, quorum.writer) == (6, {0: 1}, 1)


def test_newcomers_have_several_sources() -> None:
    roll_call = started(2, 5)
    ready = {0: said(6), 1: said(6), 2: said(None), 3: said(None)}
    quorum = roll_call.decide(ready, live(ready), is_late=False)
    assert quorum is not None
    assert quorum.sources == {2: 0, 3: 1}


def test_where_all_that_had_the_state_are_gone_all_load_a_checkpoint() -> None:
    roll_call = started(2, 5)
    roll_call.decide({0: said(6), 1: said(6)}, live({0, 1}), is_late=False)
    quorum = roll_call.decide({1: said(None, "b")}, live({1}), is_late=False)
    assert quorum is not None
    assert quorum.restores
    after = roll_call.decide({1: said(4, "b")}, live({1}), is_late=False)
    assert after is not None
    assert (after.step, after.restores) == (4, False)


def test_connections_are_made_anew_for_other_replicas_processes_and_after_a_failure() -> None:
    roll_call = started(2, 5)

    def epoch(**replicas: Readiness) -> int:
        ready = {int(name[1:]): one for name, one in replicas.items()}
        quorum = roll_call.decide(ready, live(ready), is_late=False)
        assert quorum is not None
        return quorum.epoch

    same = epoch(r0=said(6), r1=said(6))
    assert epoch(r0=said(7), r1=said(7)) == same
    assert epoch(r0=said(8), r1=said(8, "b")) == same + 1
    assert epoch(r0=said(9, has_failed=True), r1=said(9, "b")) == same + 2
    assert epoch(r0=said(10)) == same + 3


def test_more_replicas_than_the_batch_has_parts_for_wait_to_replace_a_lost_one() -> None:
    roll_call = started(2, 5, most=2)
    ready = {0: said(6), 1: said(6), 2: said(None)}
    quorum = roll_call.decide(ready, live(ready), is_late=False)
    assert quorum is not None
    assert quorum.members == (0, 1)
    quorum = roll_call.decide({0: said(7), 2: said(None)}, live({0, 2}), is_late=False)
    assert quorum is not None
    assert (quorum.members, quorum.sources) == ((0, 2), {2: 0})


def test_one_that_stops_is_let_go_and_the_last_one_writes() -> None:
    roll_call = started(2, 5)
    first = roll_call.let_go(0, said(6).replace(stop=15), {0, 1})
    assert (first.members, first.writer, first.stop) == ((1,), 1, 15)
    last = roll_call.let_go(1, said(6).replace(stop=15), {1})
    assert (last.members, last.writer) == ((1,), 1)


@given(st.data())
def test_no_sequence_of_losses_and_returns_loses_a_committed_step(data: st.DataObject) -> None:
    """Members train in lockstep from what the quorum says; a step that one of them has is never done from less."""
    roll_call = RollCall(3, 1, 3)
    states: dict[int, int | None] = dict.fromkeys(range(3))
    incarnations = dict.fromkeys(range(3), 0)
    saved = 0
    for _ in range(data.draw(st.integers(1, 25))):
        alive = data.draw(st.sets(st.sampled_from(range(3)), min_size=1))
        for replica in set(range(3)) - alive:
            states[replica], incarnations[replica] = None, incarnations[replica] + 1
        ready = {one: said(states[one], str(incarnations[one])) for one in alive}
        quorum = roll_call.decide(ready, live(alive), is_late=True)
        assert quorum is not None
        newest = max((step for one in alive if (step := states[one]) is not None), default=None)
        _check(quorum, newest, states)
        for member in quorum.members:
            states[member] = saved if quorum.restores else quorum.step
        if quorum.restores:
            continue
        committed = data.draw(st.sets(st.sampled_from(quorum.members)))
        for member in committed:
            states[member] = quorum.step + 1
        if committed and data.draw(st.booleans()):
            saved = quorum.step + 1


def _check(quorum: Quorum, newest: int | None, states: dict[int, int | None]) -> None:
    assert quorum.restores == (newest is None)
    if quorum.restores:
        return
    assert quorum.step == newest
    for member in quorum.members:
        assert (states[member] == newest) != (member in quorum.sources)
    assert all(states[source] == newest for source in quorum.sources.values())
    assert quorum.writer in quorum.members
    assert quorum.writer not in quorum.sources
