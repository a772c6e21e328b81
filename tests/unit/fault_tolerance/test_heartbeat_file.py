"""Heartbeats are what the loop said last, whole at any moment, and cheap."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from meshwright.fault_tolerance.evidence import HeartbeatFile, process_state, read_heartbeats
from meshwright.spec.run.run import Run


def test_the_newest_mark_is_read_whatever_came_before(tmp_path: Path) -> None:
    file = HeartbeatFile(Run(tmp_path), rank=1, num_ranks=2)
    assert read_heartbeats(Run(tmp_path)) == {}
    file.mark("action 12SEND_F345", step=1234567, waits_for_rank=1023)
    file.mark("data", step=7)
    file.mark("agree")
    beat = read_heartbeats(Run(tmp_path))[1]
    assert (beat.step, beat.phase, beat.waits_for_rank, beat.num_ranks) == (7, "agree", None, 2)
    assert abs(beat.time_s - time.time()) < 60
    assert process_state(beat) == "running"
    assert process_state(beat.replace(host="another")) == "elsewhere"
    assert process_state(beat.replace(started_ticks=1)) == "gone"
    file.close()


def test_a_reader_never_sees_half_a_mark(tmp_path: Path) -> None:
    run = Run(tmp_path)
    file = HeartbeatFile(run, rank=0, num_ranks=1)
    file.mark("start")
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            file.mark("action 0F0" * (os.urandom(1)[0] % 3 + 1), step=os.urandom(1)[0])

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert all(0 in read_heartbeats(run) for _ in range(300))
    finally:
        over.set()
        thread.join()
        file.close()


def test_a_mark_costs_microseconds_of_the_loop(tmp_path: Path) -> None:
    file = HeartbeatFile(Run(tmp_path), rank=0, num_ranks=1)
    best_s = float("inf")
    for _ in range(20):
        started_s = time.process_time()
        for _ in range(100):
            file.mark("action 0F0", step=1)
        best_s = min(best_s, time.process_time() - started_s)
    file.close()
    print(f"a mark: {best_s / 100 * 1e6:.1f} us")
    assert best_s / 100 < 1e-3
