"""LocalRankGroup: groups of ranks in one launcher start, fail and end independently of each other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ExitCode
from meshwright.prover.quiet_output import output_in
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.local.local_rank_group import LocalRankGroup, wait_for_ends
from meshwright.trainer.launch.rank import RankConfig
from training_runs import tiny_job


def start(folder: Path, num_ranks: int, data: dict[str, Any] | None = None, **train: Any) -> tuple[LocalRankGroup, Run]:
    """Start ranks that train a tiny job into a new folder, and print into output.txt there."""
    folder.mkdir()
    run = Run(folder / "run")
    job = Job.from_dict(tiny_job(folder, data=data or {}, train=train, run={"device": "cpu", "dir": str(run.folder)}))
    config = RankConfig(job=job, run_dir=str(run.folder), module_dir=str(folder))
    with output_in(folder / "output.txt"):
        return LocalRankGroup.start(config, num_ranks, {"OMP_NUM_THREADS": "1"}, num_threads=1), run


def wait_for_a_step(group: LocalRankGroup, run: Run) -> None:
    """Return once the first step is on disk; an ended rank fails the test."""
    while not run.metrics.exists() or not run.metrics.read_text():
        assert not group.poll(), group.ends
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_rank_ends_its_own_group_only(tmp_path: Path) -> None:
    killed, killed_run = start(tmp_path / "killed", 2, steps=1_000_000)
    other, other_run = start(tmp_path / "other", 1, steps=3)
    with killed, other:
        assert len(killed.sentinels) == 2
        wait_for_a_step(killed, killed_run)
        os.kill(killed.pids[1], signal.SIGKILL)
        while not all([killed.poll(), other.poll()]):
            assert wait_for_ends([killed, other]) == []
        assert killed.exit_codes == {0: ExitCode.RETRY, 1: -signal.SIGKILL}
        assert [end.rank for end in killed.ends] == [1, 0]
        assert other.exit_codes == {0: ExitCode.DONE}
        assert not killed.killed
        assert not killed.sentinels
        assert all(map(is_gone, [*killed.pids, *other.pids]))
    assert other_run.checkpoint_steps()[-1] == 3
    assert "step 3/3" in (tmp_path / "other" / "output.txt").read_text()


def test_what_a_killed_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    """Forked workers of torch's that hang also hold the connections of their rank open."""
    pids_file = tmp_path / "pids"
    data = {"source": "helped_stream:Helped", "options": {"pids_file": str(pids_file), "hangs_at": 100}}
    group, run = start(tmp_path / "killed", 2, data, steps=1_000)
    with group:
        wait_for_a_step(group, run)
        pids = [int(pid) for pid in pids_file.read_text().split()]
        assert len(pids) == 3
        assert not any(map(is_gone, pids))
        os.kill(group.pids[0], signal.SIGKILL)
        while not group.poll():
            wait_for_ends([group])
        assert group.exit_codes == {0: -signal.SIGKILL, 1: ExitCode.RETRY}
        assert not group.killed
    deadline_s = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline_s, pids
        time.sleep(0.02)


def test_a_frozen_fork_server_is_woken_to_fork_and_to_see_ranks_end(tmp_path: Path) -> None:
    endless, run = start(tmp_path / "endless", 1, steps=1_000_000)
    with endless:
        wait_for_a_step(endless, run)
        server = parent_of(endless.pids[0])
        os.kill(server, signal.SIGSTOP)
        other, other_run = start(tmp_path / "other", 1, steps=3)
        with other:
            os.kill(server, signal.SIGSTOP)
            while not other.poll():
                wait_for_ends([other])
            assert other.exit_codes == {0: ExitCode.DONE}
        assert other_run.checkpoint_steps()[-1] == 3
        os.kill(server, signal.SIGSTOP)
    assert is_gone(endless.pids[0])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
def test_a_rank_that_does_not_stop_is_killed_at_its_deadline(tmp_path: Path) -> None:
    group, run = start(tmp_path / "stopped", 1, steps=1_000_000)
    with group:
        assert group.time_left_s is None
        wait_for_a_step(group, run)
        os.kill(group.pids[0], signal.SIGSTOP)
        group.stop(signal.SIGTERM, 0.1)
        while not group.poll():
            wait_for_ends([group])
        assert group.exit_codes == {0: -signal.SIGKILL}
        assert group.killed == set(group.pids)


@pytest.mark.long
def test_a_signal_that_arrives_before_the_first_line_of_a_rank_is_not_lost(tmp_path: Path) -> None:
    group, run = start(tmp_path / "early", 1, steps=1_000_000)
    with group:
        group.terminate(3600)
        while not group.poll():
            wait_for_ends([group])
        assert group.exit_codes == {0: ExitCode.RETRY}
    assert not run.checkpoint_steps()
