"""Texts of problem reports: scopes, ordinals, mismatched messages and groups."""

from __future__ import annotations

import pytest

from hand_traces import Script, all_of
from meshwright.simulator.checks.call_sites import ordinal, without_numbers
from meshwright.simulator.checks.check_traces import check

WORLD = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("scope", "name"), [("h.11.mlp", "h.*.mlp"), ("PP:2SEND_F0", "PP:*SEND_F*"), ("train2.py:40", "train2.py:40")]
)
def test_blocks_are_numbered_and_lines_are_not(scope: str, name: str) -> None:
    assert without_numbers(scope) == name


def test_ordinals() -> None:
    assert [ordinal(number) for number in (0, 1, 2, 3, 10, 11, 20, 1000)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "1,001st")
    ]


def test_ends_of_a_message_that_differ_in_size() -> None:
    one, other = Script(0, 2), Script(1, 2)
    one.send(1, (0, 1), num_bytes=4096)
    other.wait(other.receive(0, (0, 1), num_bytes=8192))
    assert "is 4,096 bytes at the sender and 8,192 bytes at the receiver" in str(check(all_of(one, other))[0])


def test_a_rank_with_a_collective_too_many_may_have_run_it_earlier() -> None:
    scripts = [Script(rank, 4) for rank in WORLD]
    for script in scripts:
        for _ in range(3 if script.traced.rank == 2 else 2):
            script.wait(script.collective(WORLD))
    said = str(check(all_of(*scripts))[0])
    assert "the 3rd collective of ranks 0, 1, 2 and 3 differs" in said
    assert "rank 2 runs 3 collectives in this group, most ranks 2" in said
