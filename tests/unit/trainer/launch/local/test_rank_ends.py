"""What the ends of ranks mean together, in whichever order they were noticed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.spec.run.rank_records import Heartbeat
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.local.local_rank_group import RankEnd
from meshwright.trainer.launch.local.rank_ends import code_of


def code(folder: Path, *ends: tuple[int, str]) -> set[ExitCode]:
    """Return the exit codes of ranks with these exit codes and last phases, in every order."""
    run = Run(folder)
    run.heartbeats.mkdir()
    for rank, (_, phase) in enumerate(ends):
        beat = Heartbeat(
            rank=rank,
            num_ranks=len(ends),
            pid=100 + rank,
            host="here",
            started_ticks=None,
            step=7,
            phase=phase,
            waits_for_rank=None,
            time_s=0.0,
        )
        run.heartbeat(rank).write_text(beat.to_json(), encoding="utf-8")
    found = [RankEnd(rank, 100 + rank, code) for rank, (code, _) in enumerate(ends)]
    return {code_of(order, run) for order in itertools.permutations(found)}


def test_ranks_that_have_trained_all_their_steps_are_done(tmp_path: Path) -> None:
    assert code(tmp_path, (0, "ended"), (0, "ended")) == {ExitCode.DONE}


def test_a_rank_that_ends_well_in_a_step_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rank that waited for it fails within the same moment, and may be noticed first."""
    assert code(tmp_path, (75, "failed"), (0, "gradients")) == {ExitCode.RETRY}
    said = [record.message.split(",")[0] for record in caplog.records]
    assert said == ["rank 1 ended with exit code 0 in step 7"] * 2


def test_what_a_rank_says_of_its_own_failure_counts_more(tmp_path: Path) -> None:
    assert code(tmp_path, (ExitCode.BAD_INPUT, "failed"), (0, "data"), (75, "failed")) == {ExitCode.BAD_INPUT}
