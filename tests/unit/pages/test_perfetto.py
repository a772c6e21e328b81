"""The Perfetto file keeps the rules of the trace-event format, and says what the timeline says."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.pages.figures.intervals import Message
from meshwright.pages.perfetto import write_perfetto
from meshwright.spec.trace.timeline import SpanKind, Timeline
from simulated_steps import NAMES, SEND, simulated_step

MESSAGES = [(2, 9), (5, 30)]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulated_step()


@pytest.fixture(scope="module")
def events(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("perfetto") / "step.json.gz"
    write_perfetto(timeline, file, [Message(*one) for one in MESSAGES])
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        record = json.load(stream)
    found: list[dict[str, Any]] = record["traceEvents"]
    return found


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def nanoseconds(us: float) -> int:
    return round(us * 1e3)


def test_every_span_is_a_slice_with_its_times_and_place(timeline: Timeline, events: list[dict[str, Any]]) -> None:
    slices, spans = of_phase(events, "X"), timeline.spans
    assert len(slices) == len(spans)
    for row, one in enumerate(slices):
        assert one["ts"] == pytest.approx(spans.start_s[row] * 1e6, abs=1e-3)
        assert one["ts"] + one["dur"] == pytest.approx(spans.end_s[row] * 1e6, abs=2e-3)
        assert one["cat"] == SpanKind(spans.kind[row]).name.lower()
    assert {one["args"].get("action") for one in slices} > {"0F0", "3B7"}
    sends = [one for one in slices if one["name"] == NAMES[SEND]]
    assert {one["args"]["axis"] for one in sends} == {"pp"}
    assert {one["args"]["bytes"] for one in sends} == {2**20}


def test_slices_of_a_thread_do_not_overlap(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for one in of_phase(events, "X"):
        assert one["dur"] >= 0
        threads[one["pid"], one["tid"]].append((nanoseconds(one["ts"]), nanoseconds(one["ts"] + one["dur"])))
    assert len(threads) == 4 * 3
    for slices in threads.values():
        slices.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(slices))


def test_ranks_and_streams_are_named_and_no_thread_is_taken_for_a_process(events: list[dict[str, Any]]) -> None:
    names = of_phase(events, "M")
    assert {e["args"]["name"] for e in names if e["name"] == "process_name"} >= {"rank 0 (as 1 more)"}
    assert {e["args"]["name"] for e in names if e["name"] == "thread_name"} == {"compute", "fsdp", "pp"}
    processes = {event["pid"] for event in events}
    threads = {event["tid"] for event in events if "tid" in event}
    assert 0 not in processes | threads
    assert not processes & threads


def test_arrows_begin_and_end_inside_of_slices(events: list[dict[str, Any]]) -> None:
    slices = of_phase(events, "X")
    begins, ends = of_phase(events, "s"), of_phase(events, "f")
    assert [one["id"] for one in begins] == [one["id"] for one in ends] == [1, 2]
    assert all(one["bp"] == "e" for one in ends)
    for (sent, received), begin, end in zip(MESSAGES, begins, ends, strict=True):
        for row, arrow in ((sent, begin), (received, end)):
            inside = slices[row]
            assert (arrow["pid"], arrow["tid"]) == (inside["pid"], inside["tid"])
            assert inside["ts"] <= arrow["ts"] <= inside["ts"] + inside["dur"]


def test_memory_is_counted_by_class_and_keeps_its_peak(timeline: Timeline, events: list[dict[str, Any]]) -> None:
    values = defaultdict(list)
    for one in of_phase(events, "C"):
        values[one["pid"], one["name"]].append(one["args"]["MiB"])
    assert {name for _, name in values} == {
        "parameter",
        "optimizer_state",
        "activation",
        "temporary",
        "allocated",
        "reserved",
    }
    for curve in timeline.memory:
        assert max(values[curve.rank + 1, "allocated"]) == curve.allocated_bytes.max() / 2**20


def test_a_counter_is_written_when_it_changes(timeline: Timeline, events: list[dict[str, Any]]) -> None:
    counters: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in of_phase(events, "C"):
        counters[event["pid"], event["name"]].append(event["args"]["MiB"])
    assert counters
    for values in counters.values():
        assert all(before != after for before, after in pairwise(values))
    assert any(len(values) < len(timeline.memory[0].at_s) for values in counters.values())


@pytest.mark.slow
def test_long_curves_are_thinned_to_their_peaks(tmp_path: Path) -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=400, num_ops=1)
    write_perfetto(timeline, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    shown = [e["args"]["MiB"] for e in of_phase(events, "C") if e["name"] == "allocated" and e["pid"] == 1]
    assert len(shown) <= 4_000 < len(timeline.memory[0].at_s)
    assert max(shown) == timeline.memory[0].allocated_bytes.max() / 2**20
    assert np.diff([e["ts"] for e in of_phase(events, "C") if e["name"] == "allocated" and e["pid"] == 1]).min() >= 0
