"""Who holds up the others, by what each rank has begun."""

import pytest

from meshwright.fault_tolerance.replicas.silence import Pulse, Silence

NOW_S = 1000.0


def pulse(*begun: int, silent_s: float, num_steps: int = 10, is_long: bool = False, mute_s: float = 0.5) -> Pulse:
    """Return the pulse of a replica whose ranks have begun so many sums, the last one `silent_s` before NOW."""
    heard_s = dict.fromkeys(range(len(begun)), NOW_S - mute_s)
    return Pulse(dict(enumerate(begun)), num_steps, {0} if is_long else set(), NOW_S - silent_s, heard_s)


LIMIT = Silence(5.0, least_s=60.0, longest_s=100.0)


@pytest.mark.parametrize(
    ("pulses", "culprits"),
    [
        ({0: pulse(3, silent_s=9), 1: pulse(4, silent_s=9)}, {0}),
        ({0: pulse(3, silent_s=9), 1: pulse(4, silent_s=1)}, set()),
        ({0: pulse(4, silent_s=9), 1: pulse(4, silent_s=9)}, set()),
        ({0: pulse(4, 3, silent_s=9), 1: pulse(4, 4, silent_s=9)}, {0}),
        ({0: pulse(1, silent_s=9), 1: pulse(4, silent_s=9), 2: pulse(3, silent_s=9)}, {0, 2}),
        ({0: pulse(3, silent_s=9, num_steps=2), 1: pulse(4, silent_s=9)}, set()),
        ({0: pulse(3, silent_s=9, is_long=True), 1: pulse(4, silent_s=9)}, set()),
        ({0: pulse(3, silent_s=101, is_long=True), 1: pulse(4, silent_s=101)}, {0}),
        ({0: pulse(4, silent_s=9, mute_s=9), 1: pulse(3, silent_s=9)}, {0}),
        ({0: pulse(4, silent_s=9, mute_s=9, is_long=True), 1: pulse(3, silent_s=9)}, {0}),
        ({0: pulse(4, silent_s=9, mute_s=9, num_steps=1), 1: pulse(3, silent_s=9)}, {0}),
        ({0: pulse(4, silent_s=9, mute_s=4), 1: pulse(3, silent_s=9)}, set()),
        ({0: pulse(4, silent_s=1, mute_s=9), 1: pulse(3, silent_s=1)}, set()),
        ({0: pulse(4, silent_s=9, mute_s=9), 1: pulse(3, silent_s=9, mute_s=9)}, {0, 1}),
        ({0: pulse(4, silent_s=9, mute_s=9), 1: pulse(3, silent_s=9, mute_s=4)}, {0}),
        ({0: pulse(4, silent_s=9, mute_s=9)}, {0}),
        ({0: pulse(4, silent_s=7, mute_s=7), 1: pulse(3, silent_s=7, mute_s=7)}, set()),
        ({0: pulse(4, silent_s=4, mute_s=4), 1: pulse(3, silent_s=4, mute_s=4)}, set()),
        ({}, set()),
    ],
)
def test_those_waited_for_or_frozen_are_accused(pulses: dict[int, Pulse], culprits: set[int]) -> None:
    assert LIMIT.culprits(pulses, {}, NOW_S).keys() == culprits


def test_one_that_is_not_ready_holds_up_those_that_are() -> None:
    pulses = {0: pulse(4, silent_s=9), 1: pulse(4, silent_s=9)}
    assert LIMIT.culprits(pulses, {0: ...}, NOW_S).keys() == {1}
    assert LIMIT.culprits(pulses, {0: ..., 1: ...}, NOW_S).keys() == set()


def test_a_frozen_replica_in_no_quorum_has_the_long_limit() -> None:
    pulses = {2: pulse(0, silent_s=200, mute_s=99), 3: pulse(0, silent_s=200, mute_s=101)}
    assert LIMIT.frozen(pulses, NOW_S).keys() == {3}


def test_the_usual_step_sets_the_limit_where_none_is_given() -> None:
    silence = Silence(None, least_s=60.0, longest_s=1000.0)
    assert silence.limit_s == 60
    for step_s in (10.0, 10.0, 90.0):
        silence.add_step(step_s)
    assert silence.limit_s == 200


@pytest.mark.parametrize(("steps_between_quorums", "limit_s"), [(1, 200.0), (4, 50.0), (64, 20.0)])
def test_the_limit_is_that_of_as_many_steps_where_quorums_are_rarer(steps_between_quorums: int, limit_s: float) -> None:
    silence = Silence(None, 0.0, 1e6, steps_between_quorums)
    silence.add_step(10.0)
    assert silence.limit_s == limit_s
