"""is_running: ranks of this host by their process, those of others by the age of their heartbeat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.fault_tolerance.evidence import SILENT_ELSEWHERE_S, is_running, started_ticks
from meshwright.spec.run.run import Run

TIME_S = 1000.0


def write_heartbeat(run: Run, **changed: Any) -> None:
    run.heartbeats.mkdir(parents=True, exist_ok=True)
    own = {"rank": 0, "num_ranks": 1, "pid": os.getpid(), "host": os.uname().nodename}
    own |= {"started_ticks": started_ticks(os.getpid()), "step": 3, "phase": "data", "waits_for_rank": None}
    run.heartbeat(0).write_text(json.dumps(own | {"time_s": TIME_S} | changed))


@pytest.mark.parametrize(
    ("changed", "silent_s", "expected"),
    [
        ({}, 1e9, True),
        ({"phase": "ended"}, 1.0, False),
        ({"started_ticks": 1}, 1.0, False),  # another process with the same id
        ({"host": "elsewhere"}, SILENT_ELSEWHERE_S - 1, True),
        ({"host": "elsewhere"}, SILENT_ELSEWHERE_S + 1, False),
        ({"host": "elsewhere", "phase": "failed"}, 1.0, False),
    ],
)
def test_a_live_rank_is_a_running_run(tmp_path: Path, changed: dict[str, Any], silent_s: float, expected: bool) -> None:
    write_heartbeat(Run(tmp_path), **changed)
    assert is_running(Run(tmp_path), now_s=lambda: TIME_S + silent_s) is expected


def test_a_folder_without_heartbeats_is_not_running(tmp_path: Path) -> None:
    assert not is_running(Run(tmp_path))
