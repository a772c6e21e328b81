"""LocalRankGroup: local ranks that train together, started, watched and ended independently of other groups."""

import math
import os
import signal
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

from meshwright.channels.channel import new_token
from meshwright.checkpoint.signed_objects import TOKEN_VARIABLE
from meshwright.fault_tolerance.hangs.launcher_watch import GRACE_S
from meshwright.fault_tolerance.stop_request import ignores_hangup
from meshwright.hardware.machine import num_usable_cores
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.local.rank_fork_server import (
    SentDescriptor,
    fork_server,
    hidden_script,
    wait_for_processes,
)
from meshwright.trainer.launch.local.store_file import StoreFile, loopback_interfaces
from meshwright.trainer.launch.rank import RankConfig, RankStart, rank_process

_HOST = "localhost"
"""Not the host's full name, which a laptop's network may not look up."""
_KILL_AFTER_S = GRACE_S + 5.0
"""Seconds from a failure to the kill of ranks that are left; LauncherWatch, which writes a diagnosis, is earlier."""
_SERVER_DIED = 255
"""What multiprocessing reports of a process whose fork server is gone; the process itself may still run."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    pid: int
    exit_code: int
    """Negative: the signal that killed it."""


class LocalRankGroup:
    """Ranks 0 to N - 1 of one process group on this machine, each a process forked from the warm fork server.

    A launcher may have several, each with a store of its own; it starts, stops and starts them again one by one:

        group = LocalRankGroup.start(config, 2, {"OMP_NUM_THREADS": "1"}, num_threads=1)
        while not group.poll():
            wait_for_ends([group])
        group.close()

    Nothing here polls or blocks but `close`: `wait_for_ends` returns as soon as a rank of any group has ended, or a
    deadline of one has passed, and `poll` then acts on it. Once a rank has failed, `poll` asks the others to end
    (SIGTERM), which mostly lost their connection to it, and kills those that have not after 15 s. However a rank has
    ended, `poll` kills the processes that it has started and left, unless they lead a session of their own. No method
    raises because a process has ended already. Of one thread only.
    """

    def __init__(self, store: StoreFile) -> None:
        self._store = store
        self._processes: list[BaseProcess] = []
        self.pids: list[int] = []
        """Process ids by rank, those of ended ranks included."""
        self.ends: list[RankEnd] = []
        """The ranks that have ended, by the last `poll`, in the order in which that was noticed."""
        self.killed: set[int] = set()
        """Process ids of the ranks that `kill`, or `poll` after a deadline, has killed."""
        self._kill_at_s = math.inf

    @classmethod
    def start(
        cls, config: RankConfig, num_ranks: int, environment: Mapping[str, str], *, num_threads: int
    ) -> "LocalRankGroup":
        """Fork `num_ranks` ranks that train as `config` says, and return at once; they join by a new store.

        They have the variables of this process, those of `environment`, which win, and those that torchrun would set.
        What they print goes to what are standard output and error of this process now.
        """
        store = StoreFile()
        group = cls(store)
        shared = {**loopback_interfaces(os.environ), **os.environ, **environment, **_place_of_group(num_ranks)}
        shared[TOKEN_VARIABLE] = new_token()
        text, run_section = config.to_json(), config.job.run
        try:
            for rank in range(num_ranks):
                start = RankStart(
                    config=text,
                    environment=shared | {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
                    num_threads=num_threads,
                    grace_s=run_section.grace_s,
                    ignores_hangup=ignores_hangup(),
                    stdout=SentDescriptor(1),
                    stderr=SentDescriptor(2),
                    store=SentDescriptor(store.descriptor),
                )
                process = fork_server().Process(target=rank_process, args=(start,), name=f"rank-{rank}")
                with hidden_script():
                    process.start()
                group._add(process)
        except BaseException:
            group.close()
            raise
        return group

    def _add(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._processes.append(process)
        self.pids.append(process.pid)

    @property
    def sentinels(self) -> list[int]:
        """Return what multiprocessing.connection.wait accepts, one for each rank not known to have ended."""
        return [self._processes[rank].sentinel for rank in self.running]

    @property
    def running(self) -> list[int]:
        """Return the ranks not known to have ended."""
        ended = {end.rank for end in self.ends}
        return [rank for rank in range(len(self._processes)) if rank not in ended]

    @property
    def exit_codes(self) -> dict[int, int]:
        """Return the exit code of each rank that has ended, by rank."""
        return {end.rank: end.exit_code for end in self.ends}

    @property
    def time_left_s(self) -> float | None:
        """Return the seconds until `poll` should be called even though no rank has ended; None: until one has."""
        return None if self._kill_at_s == math.inf else max(0.0, self._kill_at_s - time.monotonic())

    def poll(self) -> bool:
        """Note which ranks have ended, end the others if one failed, and return whether all have ended."""
        had_failed = self._has_failed
        for rank in self.running:
            process = self._processes[rank]
            if (code := process.exitcode) is None:
                continue
            if code == _SERVER_DIED:
                self._signal(rank, signal.SIGKILL)
            self._kill_started(rank)
            self.ends.append(RankEnd(rank, self.pids[rank], code))
        if self._has_failed and not had_failed:
            self.stop(signal.SIGTERM, _KILL_AFTER_S)
        if time.monotonic() >= self._kill_at_s:
            self.kill()
        return not self.running

    @property
    def _has_failed(self) -> bool:
        return any(end.exit_code for end in self.ends)

    def stop(self, number: signal.Signals, grace_s: float) -> None:
        """Send a signal to the ranks that run, which save and stop on SIGTERM, SIGHUP and SIGINT.

        Ranks that have not ended `grace_s` after the first such call are killed by `poll`.
        """
        for rank in self.running:
            self._signal(rank, number)
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)

    def terminate(self, grace_s: float) -> None:
        """Ask the ranks to save and stop, as `stop` with SIGTERM."""
        self.stop(signal.SIGTERM, grace_s)

    def kill(self) -> None:
        """Kill the ranks that run (SIGKILL); `poll` then finds them ended."""
        for rank in self.running:
            self.killed.add(self.pids[rank])
            self._signal(rank, signal.SIGKILL)
            self._kill_started(rank)
        self._kill_at_s = math.inf

    def _kill_started(self, rank: int) -> None:
        """Kill what a rank has started, such as workers of a torch DataLoader; it leads a process group of its own."""
        # PermissionError: what is left has another user's rights.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pids[rank], signal.SIGKILL)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def close(self) -> None:
        """Kill what runs, wait until all have ended, and close the store and the descriptors of the group."""
        self.kill()
        while not self.poll():
            wait_for_processes(self.sentinels)
        for process in self._processes:
            process.close()
        self._processes = []
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def wait_for_ends(
    groups: Collection[LocalRankGroup], others: Iterable[int] = (), within_s: float | None = None
) -> list[int]:
    """Return when a rank of a group has ended, `poll` of one is due, or one of `others`, descriptors, can be read.

    `within_s` at the latest, where that is given. The result is those of `others` that can be read. Returns at once
    where all groups have ended.
    """
    others = [*others]
    due = [left_s for left_s in (within_s, *(group.time_left_s for group in groups)) if left_s is not None]
    sentinels = [sentinel for group in groups for sentinel in group.sentinels]
    if not sentinels:
        return []
    ready = wait_for_processes([*sentinels, *others], min(due, default=None))
    return [other for other in others if other in ready]


def _place_of_group(num_ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets on a single machine, apart from those of each rank."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(num_ranks))
    return {
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": _HOST,
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        # Every attempt is a new group with a new store.
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def threads_of_rank(job: Job, num_ranks: int) -> int:
    """Return a local rank's threads: OMP_NUM_THREADS, or its share of the cores; more make every rank slower.

    One where sums are exact (train.exact_elastic): with other numbers of threads matmuls have other bits.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit():
        return int(given)
    return 1 if job.train.exact_elastic else max(1, num_usable_cores() // num_ranks)
