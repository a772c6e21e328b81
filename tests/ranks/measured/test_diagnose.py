"""`meshwright diagnose` on real runs of the trainer that hang: the rank, the collective and the module are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from meshwright.config.write import to_toml
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.evidence import read_heartbeats
from meshwright.spec.job.job import Job
from meshwright.spec.run.rank_records import Diagnosis, Heartbeat
from meshwright.spec.run.run import Run
from training_runs import tiny_job

MESHWRIGHT = (sys.executable, "-m", "meshwright")
NOTICE = "no rank has moved for"
TIMES_OUT: dict[str, object] = {"hang_after_s": 0.0, "timeout_s": 10.0}

# A model and data whose fault is on one rank, some steps into the run.
MODULE = """
import ctypes
import os
import time
import torch
import torch.distributed as dist
from torch import nn

BLAMED = int(os.environ["RANK"]) == 1

class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fault, self.num_forwards = fault, 0

    def forward(self, x):
        self.num_forwards += 1
        is_due = BLAMED and self.num_forwards >= 18
        if self.fault == "sleeps" and is_due:
            time.sleep(1000)
        if self.fault == "holds" and is_due:
            # A lock taken twice, with Python's own lock held.
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        if self.fault == "skips" and not is_due:
            dist.all_reduce(x.detach().mean(0))
        return x + self.inner(x)

class Deep(nn.Module):
    first_parts, last_parts, stage_width = ("embedding",), ("head",), 8

    def __init__(self, fault="none"):
        super().__init__()
        self.embedding = nn.Embedding(288, 8)
        self.blocks = nn.ModuleList(Block(fault if n == 2 else "none") for n in range(4))
        self.head = nn.Linear(8, 288)

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = x if block is None else block(x)
        return x if self.head is None else self.head(x)

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if BLAMED and index == 20:
            time.sleep(1000)
        return torch.full((16,), index), torch.full((16,), index)
"""


class HangingRun:
    """A training command in a folder of its own, and what is asked about it."""

    def __init__(self, folder: Path, **sections: dict[str, object]) -> None:
        self.folder, self.run, self.output = folder, Run(folder / "run"), folder / "output.txt"
        own = {"run": {"device": "cpu", "dir": str(self.run.folder), "hang_after_s": 2.0}, "train": {"steps": 2000}}
        own["layout"] = {"microbatch_size": 1}
        (folder / "faulty.py").write_text(MODULE)
        merged = {name: {**own.get(name, {}), **keys} for name, keys in (own | sections).items()}
        (folder / "job.toml").write_text(to_toml(Job.from_dict(tiny_job(folder, **merged))))

    @contextmanager
    def started(self, num_ranks: int, start: Sequence[str] | None = None) -> Iterator[None]:
        """Train meanwhile; afterwards every process of it is killed. `start` replaces our own launcher."""
        command = start or [*MESHWRIGHT, "train", "job.toml", "--ranks", str(num_ranks)]
        with self.output.open("w") as output:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                yield
            finally:
                for pid in [self.beat(rank).pid for rank in range(num_ranks) if self.run.heartbeat(rank).exists()]:
                    kill(pid)
                kill(self._process.pid)
                self._process.wait()

    def beat(self, rank: int) -> Heartbeat:
        return read_heartbeats(self.run)[rank]

    def wait_for_step(self, step: int) -> None:
        """Return once every rank has reached `step`."""
        self._wait(lambda: [one for one in read_heartbeats(self.run).values() if one.step >= step][1:] != [])

    def wait_for_notice(self) -> str:
        """Return the line in which the launcher says that the run hangs, once it is whole."""
        self._wait(lambda: "\n" in self.output.read_text().partition(NOTICE)[2])
        return next(line for line in self.output.read_text().splitlines() if NOTICE in line)

    def wait_for_end(self) -> None:
        """Return once the command has ended."""
        self._process.wait(600)
        self.code = self._process.returncode

    def diagnose(self) -> tuple[int, Diagnosis]:
        command = [*MESHWRIGHT, "diagnose", str(self.run.folder), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        return done.returncode, Diagnosis.from_json(done.stdout)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 600
        while not is_so():
            assert self._process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.1)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_rank_that_stays_in_a_module_is_named_with_the_collective_that_it_does_not_reach(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path, model={"source": "faulty:Deep", "options": {"fault": "sleeps"}})
    with hanging.started(2):
        notice = hanging.wait_for_notice()
        code, found = hanging.diagnose()
    assert (found.verdict, found.culprits, code) == ("busy", [1], ExitCode.RETRY)
    assert "faulty.py:21 in Block.forward, in module blocks.2" in found.headline
    assert found.collective is not None
    assert found.collective.startswith("all_gather")
    assert found.evidence[1].startswith("rank 1's next is all_gather of 36 in head (action 0B1)")
    assert found.module == "blocks.3"
    assert [(one.process, one.waits_for) for one in found.ranks] == [("running", [1]), ("running", [])]
    assert "rank 1 is in step 5, action 0F1, at " in notice
    assert f"meshwright diagnose {hanging.run.folder}" in notice


@pytest.mark.long
def test_a_suspended_rank_is_named_and_goes_on_when_it_is_let(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path)
    with hanging.started(2):
        hanging.wait_for_step(5)
        assert hanging.diagnose()[1].verdict == "moving"
        os.kill(hanging.beat(1).pid, signal.SIGSTOP)
        hanging.wait_for_notice()
        code, found = hanging.diagnose()
        assert (found.verdict, found.culprits, code) == ("stopped", [1], ExitCode.RETRY)
        assert found.ranks[0].waits_for == [1]
        assert found.collective is not None
        step = found.ranks[0].step
        os.kill(hanging.beat(1).pid, signal.SIGCONT)
        hanging.wait_for_step(step + 2)
        assert hanging.diagnose()[1].verdict == "moving"


@pytest.mark.long
def test_a_data_source_that_blocks_is_named_with_its_line(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path, data={"source": "faulty:Data"}, model={"source": "faulty:Deep", "options": {}})
    with hanging.started(2):
        hanging.wait_for_notice()
        _, found = hanging.diagnose()
    assert (found.verdict, found.culprits) == ("busy", [1])
    assert ", data, at " in found.headline
    assert found.collective is not None


@pytest.mark.long
def test_a_rank_that_skips_a_collective_is_told_from_the_one_that_asks_for_it(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path, model={"source": "faulty:Deep", "options": {"fault": "skips"}})
    with hanging.started(2):
        hanging.wait_for_notice()
        code, found = hanging.diagnose()
    assert (found.verdict, found.culprits, code) == ("departed", [1], ExitCode.DO_NOT_RETRY)
    assert found.module == "blocks.2"
    assert "in step 5 it asked for" in found.headline


@pytest.mark.long
def test_a_rank_whose_python_cannot_run_is_named_with_its_line(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path, model={"source": "faulty:Deep", "options": {"fault": "holds"}})
    with hanging.started(2):
        hanging.wait_for_notice()
        _, found = hanging.diagnose()
    assert (found.verdict, found.culprits) == ("busy", [1])
    assert "faulty.py:26 in forward" in found.headline
    assert "rank 1 could not write what collectives were entered" in found.evidence


@pytest.mark.long
def test_a_stage_of_a_pipeline_that_waits_for_another_is_not_blamed(tmp_path: Path) -> None:
    hanging = HangingRun(
        tmp_path, model={"source": "faulty:Deep", "options": {"fault": "sleeps"}}, layout={"pp": 2, "dp_shard": 1}
    )
    with hanging.started(2):
        hanging.wait_for_notice()
        _, found = hanging.diagnose()
    assert (found.verdict, found.culprits) == ("busy", [1])
    assert "in module blocks.2" in found.headline
    assert found.ranks[0].waits_for == [1]
    assert found.ranks[0].phase.startswith("action 0B")


@pytest.mark.long
def test_of_a_killed_rank_the_others_tell_where_it_was_missed(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path)
    with hanging.started(2):
        hanging.wait_for_step(5)
        kill(hanging.beat(1).pid)
        hanging.wait_for_end()
        code, found = hanging.diagnose()
    assert (found.verdict, found.culprits, code) == ("died", [1], ExitCode.RETRY)


@pytest.mark.long
def test_a_suspended_rank_is_ended_once_its_peer_has_timed_out(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path, run=TIMES_OUT)
    with hanging.started(2):
        hanging.wait_for_step(5)
        os.kill(hanging.beat(1).pid, signal.SIGSTOP)
        hanging.wait_for_end()
    assert hanging.code == ExitCode.RETRY
    assert "rank 1 did not end within 10 s after another rank had failed, and was killed" in hanging.output.read_text()
    code, found = hanging.diagnose()
    assert (found.verdict, found.culprits, code) == ("stopped", [1], ExitCode.RETRY)
    assert found.collective is not None


@pytest.mark.long
def test_under_torchrun_a_rank_ends_itself_once_its_peer_has_timed_out(tmp_path: Path) -> None:
    hanging = HangingRun(tmp_path, model={"source": "faulty:Deep", "options": {"fault": "sleeps"}}, run=TIMES_OUT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with hanging.started(2, [*torchrun, "-m", "meshwright", "train", "job.toml"]):
        hanging.wait_for_end()
    assert "rank 1 is still running 15 s after rank 0 failed (" in hanging.run.rank_log(1).read_text()
    code, found = hanging.diagnose()
    assert (found.verdict, found.culprits, code) == ("busy", [1], ExitCode.RETRY)
    assert "faulty.py:21 in Block.forward, in module blocks.2, and has not reached all_gather" in found.headline
