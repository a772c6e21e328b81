"""Memory that a second stream uses is freed too early, unless the program calls record_stream."""

from __future__ import annotations

import pytest

from meshwright.simulator.checks.races import races_of
from meshwright.tracer.programs.trace_ranks import trace


@pytest.mark.parametrize(("is_told", "kinds"), [("yes", []), ("", ["freed across streams"])])
def test_record_stream_keeps_memory(is_told: str, kinds: list[str]) -> None:
    found = trace("stream_steps:build", 0, 1, [is_told])
    assert [race.kind for race in races_of(found)] == kinds
