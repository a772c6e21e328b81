"""Runs of peers under planned kills, ended as runs of ours end, so that the same function judges both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import variables_of
from meshwright.prover.chaos_judge import EndedRun, judge
from meshwright.spec.fault import Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import ChaosReport, Injection
from meshwright.spec.run.run import Run

NUM_RANKS = 2
TIMED_OUT = 124
_RANKS = "benchmarks.recovery.ranks"
_JUST_AFTER_S = 1e-6


@dataclass(frozen=True)
class PeerRun:
    """One run of a peer."""

    python: Path
    folder: Path
    faults: Sequence[Fault]
    """Crashes of ranks in steps."""
    num_steps: int
    timeout_s: float = 180.0

    def variables(self, **own: str) -> dict[str, str]:
        """Return the variables of its processes."""
        common = {"RECOVERY_RUN": str(self.folder), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        # Ranks that wait for one that is gone, a level of torch's, must not print a stack each.
        return {**variables_of("recovery"), **common, "TORCH_CPP_LOG_LEVEL": "ERROR", **own}

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process that prints to NAME.log, in a group of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self.python), *command], env=variables, stdout=log, stderr=log, start_new_session=True
            )

    def program(self, name: str) -> list[str]:
        """Return the command of one rank's program."""
        return ["-m", f"{_RANKS}.{name}", str(self.num_steps)]


Way = Callable[[PeerRun], int]
"""Runs a peer to its end and returns the exit code."""


def torchrun(run: PeerRun, program: str = "torchrun_rank", **variables: str) -> int:
    """Let torchrun restart all ranks, once for each kill."""
    options = ["--standalone", f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={len(run.faults)}"]
    command = ["-m", "torch.distributed.run", *options, *run.program(program)]
    return _ended([run.start("torchrun", command, run.variables(**variables))], run.timeout_s)


def torchrun_with_prefix(run: PeerRun) -> int:
    """Do the same with a prefix in torchrun's store for each attempt, as the program has to add it."""
    return torchrun(run, STORE_PREFIX="1")


def nvrx(run: PeerRun) -> int:
    """Let NVRx start again in the processes that are left."""
    port = free_port()
    processes = []
    for rank in range(NUM_RANKS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_PORT": str(port)}
        processes.append(run.start(f"rank-{rank}", run.program("nvrx_rank"), run.variables(**own)))
    # A rank that was killed stays so.
    codes = [_ended([process], run.timeout_s) for process in processes]
    return max(code for code in codes if code != -signal.SIGKILL)


def torchft(run: PeerRun, **variables: str) -> int:
    """Start a lighthouse and two groups, and a killed group again at once, as a launcher of each does."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    lighthouse = [str(run.python.with_name("torchft_lighthouse")), "--bind", f"[::]:{port}", "--min_replicas", "1"]
    lighthouse += ["--join_timeout_ms", "1000", "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1000"]
    with (run.folder / "lighthouse.log").open("wb") as log:
        server = subprocess.Popen(lighthouse, env=run.variables(), stdout=log, stderr=log, start_new_session=True)
    try:
        own = {"TORCHFT_LIGHTHOUSE": address, "WORLD_SIZE": str(NUM_RANKS), **variables}
        return _kept_alive(
            run,
            lambda rank: run.start(f"group-{rank}", run.program("torchft_group"), run.variables(RANK=str(rank), **own)),
        )
    finally:
        server.kill()
        server.wait()


def restarted_together(run: PeerRun, program: str, num_ranks: int = NUM_RANKS, **variables: str) -> int:
    """Start the ranks again, all of them, once for each kill, with a store of their own each time."""
    code = 0
    for _ in range(len(run.faults) + 1):
        own = {"WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(free_port()), **variables}
        processes = [
            run.start(f"rank-{rank}", run.program(program), run.variables(RANK=str(rank), LOCAL_RANK=str(rank), **own))
            for rank in range(num_ranks)
        ]
        code = _ended_together(processes, run.timeout_s)
        if code == 0:
            break
    return code


def torchft_wrapper(run: PeerRun) -> int:
    """Do the same with torchft's own DistributedDataParallel."""
    return torchft(run, WRAPPER="DistributedDataParallel")


def report(
    way: Way, python: Path, folder: Path, faults: Sequence[Fault], num_steps: int, reference: Way | None = None
) -> ChaosReport:
    """Return how a peer's run under kills compares with one of `reference`, by default the same peer, without."""
    expected = run_of(reference or way, PeerRun(python, folder / "without", (), num_steps))
    found = run_of(way, PeerRun(python, folder / "with", faults, num_steps))
    num_ranks = len(list((folder / "without" / "ledger").iterdir()))
    return judge(Job.from_dict({}), num_ranks, faults, expected, found)


def run_of(way: Way, run: PeerRun) -> EndedRun:
    """Run a peer and return what it left, as a run of ours."""
    run.folder.mkdir(parents=True)
    kills = [(fault.rank, fault.step) for fault in run.faults]
    (run.folder / "kills.json").write_text(json.dumps(kills), encoding="utf-8")
    started_s = time.monotonic()
    code = way(run)
    took_s = time.monotonic() - started_s
    files = [Run(run.folder).injected_fault(number) for number in range(len(kills))]
    injected = [Injection.from_json(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    hashes = {path.read_text(encoding="utf-8") for path in run.folder.glob("hash-*")}
    # Replicas that differ have no parameters that are the run's.
    digest = hashes.pop() if len(hashes) == 1 and code == 0 else None
    ended = [one.time_s + _JUST_AFTER_S for one in injected]
    return EndedRun(Run(run.folder), code, digest, ended, took_s)


def free_port() -> int:
    """Return a port that no process listens on, nor on the next."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _kept_alive(run: PeerRun, start: Callable[[int], subprocess.Popen[bytes]]) -> int:
    """Return the largest exit code of the ranks, each of which is started again after each of its kills."""
    processes = {rank: start(rank) for rank in range(NUM_RANKS)}
    end_s, num_left = time.monotonic() + run.timeout_s, len(run.faults)
    while time.monotonic() < end_s:
        killed = [rank for rank, process in processes.items() if process.poll() == -signal.SIGKILL][:num_left]
        num_left -= len(killed)
        processes |= {rank: start(rank) for rank in killed}
        if all(process.poll() is not None for process in processes.values()):
            return max(abs(int(process.returncode)) for process in processes.values())
        time.sleep(0.01)
    return _ended(list(processes.values()), 0.0)


def _ended_together(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> int:
    """Return the exit code of the first that fails, whose peers are then killed; 0 where none does."""
    end_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
        if any(process.returncode for process in processes):
            break
        time.sleep(0.02)
    first = next((process.returncode for process in processes if process.returncode), 0)
    is_late = any(process.poll() is None for process in processes)
    for process in processes:
        process.kill()
        process.wait()
    return first or (TIMED_OUT if is_late else 0)


def _ended(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> int:
    """Return the largest exit code; processes that do not end in time are killed with all that they started."""
    code = 0
    for process in processes:
        try:
            code = max(code, process.wait(timeout_s), key=abs)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print(f"{process.args!r} did not end in {timeout_s:.0f} s", file=sys.stderr)
            code = TIMED_OUT
    return code
