"""Messages that NCCL takes otherwise than a program may mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hand_traces import Script, all_of
from meshwright.simulator.checks.hazards import message_hazards
from meshwright.spec.trace.trace_problem import Hazard

PAIR = (0, 1)
Ask = Callable[[Script, int], int]


def _send(script: Script, peer: int) -> int:
    return script.send(peer, PAIR)


def _receive(script: Script, peer: int) -> int:
    return script.receive(peer, PAIR)


def _batched(ask: Ask) -> Ask:
    return lambda script, peer: script.agreeing("batched", lambda: ask(script, peer))


def _of(*orders: tuple[Ask, ...]) -> tuple[Hazard, ...]:
    scripts = [Script(rank, 2) for rank in PAIR]
    for script, asks in zip(scripts, orders, strict=True):
        for work in [ask(script, 1 - script.traced.rank) for ask in asks]:
            script.wait(work)
    return message_hazards(all_of(*scripts))


@pytest.mark.parametrize(
    ("first", "second", "kind"), [(_send, _receive, "both send first"), (_receive, _send, "both receive first")]
)
def test_a_pair_that_asks_for_the_same_first_is_warned_of(first: Ask, second: Ask, kind: str) -> None:
    (hazard,) = _of((first, second), (first, second))
    assert (hazard.kind, hazard.first.rank, hazard.first.record) == (kind, 0, 0)
    assert hazard.second is not None
    assert (hazard.second.rank, hazard.second.record) == (1, 0)
    assert "batch_isend_irecv" in str(hazard)
    assert not hazard.is_race


def test_a_later_one_is_found() -> None:
    (hazard,) = _of((_send, _send, _receive), (_receive, _send, _receive))
    assert (hazard.kind, hazard.first.record) == ("both send first", 1)


def test_one_that_receives_first_or_batches_is_right() -> None:
    assert _of((_send, _receive), (_receive, _send)) == ()
    assert _of(*[(_batched(_send), _batched(_receive))] * 2) == ()


def test_tags_that_differ_are_warned_of_once() -> None:
    first, second = (Script(rank, 2) for rank in PAIR)
    for tag, other in ((1, 2), (2, 1)):
        first.wait(first.agreeing(f"tag {tag}", lambda: _send(first, 1)))
        second.wait(second.agreeing(f"tag {other}", lambda: _receive(second, 0)))
    (hazard,) = message_hazards(all_of(first, second))
    assert hazard.kind == "tags differ"
    assert "(tag 1)" in str(hazard.first)
    assert "(tag 2)" in str(hazard.second)
