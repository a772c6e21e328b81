"""diagnose: each kind of hang from hand-made flight records."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli.verbs.reports.diagnose import command, exit_code_of, worst_exit_code
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.evidence import Evidence
from meshwright.spec.run.rank_records import (
    Collective,
    Departure,
    FlightRecord,
    Frame,
    Heartbeat,
    ProcessGroupRecord,
    ProcessState,
)
from meshwright.spec.run.run import Run

NOW_S = 1000.0
WORLD = ProcessGroupRecord(name="0", axis="world", ranks=[0, 1, 2, 3])
PAIRS = [ProcessGroupRecord(name="a", axis="tp", ranks=[0, 1]), ProcessGroupRecord(name="b", axis="tp", ranks=[2, 3])]


def heartbeat(rank: int, silent_s: float = 100.0, **changes: Any) -> Heartbeat:
    beat = Heartbeat(
        rank=rank,
        num_ranks=4,
        pid=10 + rank,
        host="h",
        started_ticks=1,
        step=7,
        phase="action 0F1",
        waits_for_rank=None,
        time_s=NOW_S - silent_s,
    )
    return beat.replace(**changes)


def entered(group: str, *ops: str, is_open: bool = False, sizes: int = 4) -> list[Collective]:
    """Return collectives of a group from its first on; of `is_open` ones the last is incomplete."""
    last = len(ops) if is_open else 0
    return [
        Collective(group=group, sequence=n, op=op, sizes=[[sizes]], is_done=n != last, step=7, module=f"blocks.{n}")
        for n, op in enumerate(ops, start=1)
    ]


def record(rank: int, collectives: list[Collective], **changes: Any) -> FlightRecord:
    own = FlightRecord(
        rank=rank,
        pid=10 + rank,
        reason="asked",
        time_s=NOW_S,
        groups=[WORLD, PAIRS[rank // 2]],
        collectives=collectives,
        stack=[Frame(file="mine.py", line=5, function="read", module=None)],
    )
    return own.replace(**changes)


def evidence(
    records: list[FlightRecord],
    beats: list[Heartbeat] | None = None,
    processes: dict[int, ProcessState] | None = None,
) -> Evidence:
    beats = beats or [heartbeat(rank) for rank in range(4)]
    states: dict[int, ProcessState] = dict.fromkeys(range(4), "running")
    known = {one.rank: one for one in records}
    stacks = {beat.rank: known[beat.rank].stack if beat.rank in known else [] for beat in beats}
    return Evidence({beat.rank: beat for beat in beats}, states | (processes or {}), known, stacks, NOW_S, 5.0)


def test_the_last_of_a_chain_of_waits_is_to_blame() -> None:
    # 2 waits for 3 in their pair; 0 and 1 wait for both in the world.
    waiting = entered("0", "all_reduce", "all_gather", is_open=True)
    found = diagnose(
        evidence(
            [
                record(0, waiting),
                record(1, waiting),
                record(2, [*entered("0", "all_reduce"), *entered("b", "all_reduce", is_open=True)]),
                record(3, entered("0", "all_reduce")),
            ],
            [*(heartbeat(rank) for rank in range(3)), heartbeat(3, phase="data")],
        )
    )
    assert (found.verdict, found.culprits) == ("busy", [3])
    assert found.headline.startswith("rank 3 is in step 7, data, at mine.py:5 in read, and has not reached all_")
    assert [one.waits_for for one in found.ranks] == [[2, 3], [2, 3], [3], []]


def test_different_collectives_in_one_place_are_told_with_who_has_which() -> None:
    found = diagnose(
        evidence(
            [
                record(0, entered("a", "all_reduce", "all_gather", is_open=True)),
                record(1, entered("a", "all_reduce", "broadcast", is_open=True)),
                record(2, []),
                record(3, []),
            ]
        )
    )
    assert (found.verdict, found.culprits) == ("mismatch", [0, 1])
    place = "in blocks.2 at mine.py:5 in read"
    assert f"rank 0 all_gather of 4 {place}; rank 1 broadcast of 4 {place}" in found.headline


def test_different_sizes_are_a_mismatch_of_a_reduction_and_none_of_an_exchange_of_parts() -> None:
    for op, verdict in (("all_reduce", "mismatch"), ("alltoall_base", "network")):
        ranks = [record(rank, entered("a", op, is_open=True, sizes=rank + 1)) for rank in (0, 1)]
        assert diagnose(evidence([*ranks, record(2, []), record(3, [])])).verdict == verdict


def test_a_rank_that_left_its_own_order_is_to_blame_for_the_mismatch() -> None:
    known, got = entered("a", "all_reduce", "all_gather"), entered("a", "all_reduce", "broadcast", is_open=True)
    left = Departure(found=got[-1], known=known[-1])
    found = diagnose(
        evidence(
            [
                record(0, entered("a", "all_reduce", "all_gather", is_open=True)),
                record(1, got, departure=left),
                record(2, []),
                record(3, []),
            ]
        )
    )
    assert (found.verdict, found.culprits, found.module) == ("departed", [1], "blocks.2")
    told = "asked for broadcast of 4 in blocks.2 at mine.py:5 in read, where its first step had all_gather of 4"
    assert told in found.headline


def test_an_extra_collective_is_named_with_the_module_and_the_line_that_call_it() -> None:
    known = entered("a", "all_reduce", "all_gather")
    extra = entered("a", "all_reduce", "barrier", is_open=True)[-1].replace(module=None)
    stack = [
        Frame(file="train.py", line=3, function="step", module=None),
        Frame(file="model.py", line=8, function="Mine.forward", module="blocks.1.mine"),
    ]
    own = record(1, [known[0], extra], departure=Departure(found=extra, known=known[-1]), stack=stack)
    found = diagnose(evidence([record(0, known), own, record(2, []), record(3, [])]))
    assert (found.verdict, found.culprits, found.module) == ("departed", [1], "blocks.1.mine")
    assert "at model.py:8 in Mine.forward, in module blocks.1.mine" in found.headline


def test_a_skipped_collective_is_named_with_its_own_module_and_not_where_the_rank_continued() -> None:
    known = entered("a", "all_reduce", "all_reduce", "all_gather")
    found = known[2].replace(sequence=2, is_done=False)
    departure = Departure(found=found, known=known[1], is_skip=True)
    stack = [Frame(file="model.py", line=8, function="Mine.forward", module="blocks.3")]
    own = record(1, [known[0], found], departure=departure, stack=stack)
    assert diagnose(evidence([record(0, known[:2]), own, record(2, []), record(3, [])])).module == "blocks.2"


def test_a_rank_whose_record_is_stale_is_said_to_have_moved_since() -> None:
    found = diagnose(replace(evidence([record(rank, []) for rank in range(3)]), stale=(3,)))
    assert any(one.startswith("rank 3's flight record is older than its last mark") for one in found.evidence)


def test_a_collective_that_all_have_entered_is_the_networks() -> None:
    found = diagnose(evidence([record(rank, entered("0", "all_reduce", is_open=True)) for rank in range(4)]))
    assert (found.verdict, found.culprits, found.collective) == ("network", [], "all_reduce 1 of all ranks")


@pytest.mark.parametrize(
    ("process", "verdict"), [("gone", "died"), ("stopped", "stopped"), ("elsewhere", "busy"), ("running", "busy")]
)
def test_what_became_of_the_process_comes_first(process: ProcessState, verdict: str) -> None:
    waiting = [record(rank, entered("0", "all_reduce", is_open=True)) for rank in range(3)]
    found = diagnose(evidence(waiting, processes={3: process}))
    assert (found.verdict, found.culprits) == (verdict, [3])
    assert "rank 3 could not write what collectives were entered" in found.evidence
    assert found.collective == "all_reduce 1 of all ranks"


def test_a_pipeline_that_waits_for_a_tensor_points_at_its_sender() -> None:
    beats = [heartbeat(rank, waits_for_rank=rank + 1 if rank < 3 else None) for rank in range(4)]
    found = diagnose(evidence([record(rank, []) for rank in range(4)], beats))
    assert (found.verdict, found.culprits) == ("busy", [3])


def test_ranks_that_wait_for_each_other_have_none_to_blame_alone() -> None:
    beats = [heartbeat(0, waits_for_rank=1), heartbeat(1), heartbeat(2), heartbeat(3)]
    one = entered("a", "all_reduce", is_open=True)
    found = diagnose(evidence([record(0, []), record(1, one), record(2, []), record(3, [])], beats))
    assert (found.verdict, found.culprits) == ("mismatch", [0, 1])
    assert "rank 0 waits for rank 1; rank 1 waits for rank 0" in found.headline


def test_a_run_that_moves_or_has_ended_does_not_hang() -> None:
    moving = [heartbeat(rank, silent_s=1.0) for rank in range(4)]
    assert diagnose(evidence([], moving)).verdict == "moving"
    ended = [heartbeat(rank, phase="ended") for rank in range(4)]
    found = evidence([], ended, dict.fromkeys(range(4), "gone"))
    assert diagnose(found).verdict == "ended"
    # A resume that finds all steps done begins none.
    assert diagnose(replace(found, saved_step=12)).headline == "all ranks exited normally after step 12"


@pytest.mark.parametrize(
    ("saved_step", "kept"), [(6, "checkpoint is of step 6"), (0, "without a checkpoint it starts")]
)
def test_a_run_that_was_preempted_is_to_be_resumed(saved_step: int, kept: str) -> None:
    ended = [heartbeat(rank, phase="ended") for rank in range(4)]
    found = evidence([], ended, dict.fromkeys(range(4), "gone"))
    stopped = diagnose(replace(found, saved_step=saved_step, exit_code=ExitCode.RETRY))
    assert stopped.headline == (
        "all ranks stopped when asked to, after step 7 and before the run's last (exit code 75)"
    )
    assert stopped.advice.startswith("Start the same command with --resume: ")
    assert kept in stopped.advice


def test_a_rank_that_a_signal_ended_after_its_training_is_named() -> None:
    ended = [heartbeat(rank, phase="ended") for rank in range(4)]
    found = replace(evidence([], ended, dict.fromkeys(range(4), "gone")), exit_code=ExitCode.RETRY)
    died = diagnose(replace(found, signals={2: "SIGABRT"}))
    assert (died.verdict, died.culprits) == ("died", [2])
    assert died.headline == "rank 2 was killed by SIGABRT after all ranks had ended their training, after step 7"
    several = diagnose(replace(found, signals={2: "SIGABRT", 0: "SIGABRT", 1: "SIGSEGV"}))
    assert several.headline.startswith("ranks 0 and 2 were killed by SIGABRT, rank 1 was killed by SIGSEGV after all")


def test_the_signal_of_a_rank_that_died_in_a_step_is_named() -> None:
    found = evidence([], processes={1: "gone"})
    assert diagnose(replace(found, signals={1: "SIGKILL"})).headline.endswith(": rank 1 was killed by SIGKILL")
    assert "killed by" not in diagnose(found).headline


def test_the_first_error_of_several_is_told() -> None:
    beats = [heartbeat(rank, phase="failed") for rank in range(4)]
    records = [
        record(rank, entered("0", "all_reduce", is_open=True), error="LostPeer: gone", time_s=NOW_S + rank)
        for rank in range(3)
    ]
    own = record(3, [], error="ValueError: only here", time_s=NOW_S - 1)
    found = diagnose(evidence([*records, own], beats, dict.fromkeys(range(4), "gone")))
    assert (found.verdict, found.culprits) == ("failed", [3])
    assert exit_code_of(found) is ExitCode.DO_NOT_RETRY
    assert "ValueError: only here" in found.headline


def test_after_wrong_numbers_the_advice_is_the_runs_own() -> None:
    advice = "take node-7 out of the run, test its memory and devices, and continue on others with --resume"
    error = f"CorruptionError: step 4: norm.weight differs: numbers of rank 0 on node-7 were wrong 3 times: {advice}"
    beats = [heartbeat(rank, phase="failed") for rank in range(2)]
    records = [record(rank, [], error=error, time_s=NOW_S - rank) for rank in range(2)]
    found = diagnose(evidence(records, beats, dict.fromkeys(range(2), "gone")))
    assert (found.verdict, found.culprits) == ("failed", [])
    assert found.advice == f"T{advice[1:]}."
    assert "numbers of rank 0 on node-7 were wrong 3 times" in found.headline


def test_data_that_was_out_of_reach_is_tried_again() -> None:
    own = record(0, [], error="DataUnavailable: step 3: reading sample 7 of data.source = 'mine:Data' raised OSError")
    found = diagnose(evidence([own], [heartbeat(0, phase="failed")], {0: "gone"}))
    assert found.advice == "Such errors mostly pass: start the same command with --resume."
    assert exit_code_of(found) is ExitCode.RETRY


def test_a_rank_that_outlived_a_timeout_is_to_blame_for_it() -> None:
    # 0 to 2 time out one after the other; 3 answers then, and is ended.
    beats = [*(heartbeat(rank, phase="failed") for rank in range(3)), heartbeat(3)]
    waiting = [
        record(rank, entered("0", "all_reduce", is_open=True), error="Timed out", is_lost_peer=True)
        for rank in range(3)
    ]
    late = record(3, [], time_s=NOW_S + 1)
    found = diagnose(evidence([*waiting, late], beats, dict.fromkeys(range(4), "gone")))
    assert (found.verdict, found.culprits, found.collective) == ("busy", [3], "all_reduce 1 of all ranks")
    # Without an answer it was gone before.
    early = diagnose(evidence([*waiting, late.replace(time_s=NOW_S - 1)], beats, dict.fromkeys(range(4), "gone")))
    assert (early.verdict, early.culprits) == ("died", [3])


def test_a_timeout_of_all_ranks_is_the_networks_or_the_first_ones() -> None:
    beats = [heartbeat(rank, phase="failed") for rank in range(4)]
    for collectives, verdict in ((entered("0", "all_reduce", is_open=True), "network"), ([], "failed")):
        records = [record(rank, collectives, error="Timed out", is_lost_peer=True) for rank in range(4)]
        assert diagnose(evidence(records, beats, dict.fromkeys(range(4), "gone"))).verdict == verdict


@pytest.mark.slow
def test_a_hang_is_diagnosed_without_torch() -> None:
    script = (
        "import sys, meshwright.fault_tolerance.diagnose, meshwright.fault_tolerance.hangs.launcher_watch;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_independent_replicas_are_diagnosed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("run")
    for replica, phase in enumerate(("ended", "gradients")):
        own = run.of_replica(replica)
        own.heartbeats.mkdir(parents=True)
        own.hangs.mkdir()
        beat = heartbeat(0, num_ranks=1, phase=phase, step=7 + replica)
        own.heartbeat(0).write_text(beat.to_json(), encoding="utf-8")
    # One that has not started yet.
    run.of_replica(2).folder.mkdir()
    words = [str(run.folder), "--wait", "0", *["--json"] * as_json]
    result = CliRunner().invoke(command, words)
    if as_json:
        assert [one["verdict"] for one in json.loads(result.output)] == ["ended", "unknown"]
    else:
        assert [line for line in result.output.splitlines() if line.startswith("run/")] == [
            "run/replicas/0: ended",
            "run/replicas/1: unknown",
        ]
    assert result.exit_code == ExitCode.RETRY


def test_the_worst_of_several_replicas_is_the_exit_code() -> None:
    assert worst_exit_code([ExitCode.DO_NOT_RETRY, ExitCode.RETRY, ExitCode.DONE]) is ExitCode.DO_NOT_RETRY
    assert worst_exit_code([ExitCode.DONE, ExitCode.RETRY]) is ExitCode.RETRY


def test_ranks_that_failed_without_a_record_have_failed() -> None:
    """Their disk is full: only the heartbeats, whose room was taken before, say so."""
    beats = [heartbeat(rank, phase="failed") for rank in range(4)]
    found = diagnose(evidence([], beats, dict.fromkeys(range(4), "gone")))
    assert (found.verdict, found.culprits) == ("failed", [0, 1, 2, 3])
    assert found.headline.endswith("ended with an error, in step 7, and could not write a flight record")


def test_the_first_that_failed_is_named_where_another_could_record_that_it_lost_it() -> None:
    lost = record(1, [], error="RuntimeError: Connection closed by peer", is_lost_peer=True)
    beats = [heartbeat(rank, phase="failed") for rank in range(4)]
    seen = replace(evidence([lost], beats, dict.fromkeys(range(4), "gone")), failure="rank 2 failed (OSError: full)")
    found = diagnose(seen)
    assert (found.verdict, found.culprits) == ("failed", [2])
    assert found.headline.startswith("rank 2 failed (OSError: full), in step 7")
