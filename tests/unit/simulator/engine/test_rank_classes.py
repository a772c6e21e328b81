"""Ranks that do the same are simulated once, in the times of all of them."""

from __future__ import annotations

import numpy as np

from hand_traces import Script, all_of, execute_scripts
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.engine.rank_classes import group_equivalent

FOUR = (0, 1, 2, 3)


def _scripts(num_ops: tuple[int, ...] = (1, 1, 1, 1)) -> tuple[Script, ...]:
    """Return four ranks that compute, pass a message around and reduce."""
    scripts = tuple(Script(rank, 4) for rank in FOUR)
    for rank, script in enumerate(scripts):
        for _ in range(num_ops[rank]):
            script.op(1.0)
        sent = script.send((rank + 1) % 4, FOUR, wire_s=0.5)
        received = script.receive((rank - 1) % 4, FOUR, wire_s=0.5)
        script.wait(sent)
        script.wait(received)
        script.wait(script.collective(FOUR, wire_s=2.0))
    return scripts


def test_a_ring_is_one_class() -> None:
    scripts = _scripts()
    classes = group_equivalent(all_of(*scripts))
    assert classes.class_of_rank.tolist() == [0, 0, 0, 0]
    assert check(classes) == ()
    by_class, by_rank = (execute_scripts(classes, scripts[:1])[1], execute_scripts(all_of(*scripts), scripts)[1])
    assert by_class.end_s == by_rank.end_s


def test_neighbours_of_another_rank_are_other_classes() -> None:
    classes = group_equivalent(all_of(*_scripts((2, 1, 1, 1))))
    assert classes.class_of_rank.tolist() == [0, 1, 2, 3]
    assert check(classes) == ()


def test_stages_of_a_pipeline_that_do_the_same_stay_apart() -> None:
    scripts = tuple(Script(rank, 4) for rank in FOUR)
    for rank, script in enumerate(scripts):
        if rank:
            script.wait(script.receive(rank - 1, FOUR))
        script.op(1.0)
        if rank < 3:
            script.wait(script.send(rank + 1, FOUR))
    classes = group_equivalent(all_of(*scripts))
    assert np.unique(classes.class_of_rank).tolist() == [0, 1, 2, 3]
    assert check(classes) == ()
