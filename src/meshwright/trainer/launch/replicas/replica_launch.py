"""Starts independent replicas on this machine, each a group of ranks of its own, and replaces those that are lost.

The coordinator, by which replicas know of each other, runs here: it outlives them. A replica that hangs is killed as
soon as the coordinator gives it up; whatever ends a replica, the others train on, and get it back, run.max_restarts
times in all.
"""

import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from meshwright.channels.channel import new_token
from meshwright.config.paths import with_absolute_paths
from meshwright.errors import ConfigError, ExitCode
from meshwright.fault_tolerance.evidence import ask
from meshwright.fault_tolerance.hangs.stopped_hang import note_hang, note_hang_until_killed
from meshwright.fault_tolerance.replicas.coordinator import Coordinator
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import GivenUp, Silence
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.log import logger
from meshwright.spec.job.replicas_section import layout_of_replica
from meshwright.spec.run.finding import RankFinding
from meshwright.spec.run.quorum import ReplicaPlace
from meshwright.spec.run.run_events import append_event
from meshwright.trainer.launch.local.local_rank_group import LocalRankGroup, RankEnd, threads_of_rank, wait_for_ends
from meshwright.trainer.launch.local.rank_ends import code_of, combined, raise_stop, report_failures
from meshwright.trainer.launch.local.restart_backoff import RestartBackoff
from meshwright.trainer.launch.rank import RankConfig, note_training_began
from meshwright.trainer.launch.replicas.joining import Invitation, clear_replicas, invite
from meshwright.trainer.run.open_run import claim

_LEAST_EXTRA_S: Final = 60.0
_WRITING_STACKS_S: Final = 0.5
"""Time for a hung replica to write its stacks before it is killed."""


def train_replicas(config: RankConfig, num_ranks: int, after_loss: Callable[[], None] = lambda: None) -> ExitCode:
    """Train in independent replicas, and return the exit code of the run; `after_loss` is called after each loss.

    Raises ConfigError for the folder of another run, Preempted or KeyboardInterrupt after a signal.
    """
    launched_s = time.time()
    held = claim(config.run, config.job, resume=config.resume, overwrite=config.overwrite)
    with suppress(OSError):  # a full disk
        append_event(config.run, "launched", time_s=launched_s)
    try:
        return _train_replicas(config, num_ranks, after_loss)
    finally:
        with suppress(OSError):
            append_event(config.run, "ended")
        # In Python this process may go on, and resume the run.
        os.close(held)


def _train_replicas(config: RankConfig, num_ranks: int, after_loss: Callable[[], None]) -> ExitCode:
    clear_replicas(config.run)
    section = config.job.run
    layout = config.job.layout.resolve(num_ranks)
    ranks_of_replica = num_ranks // layout.dp_replicate
    most = config.job.num_microbatches(layout_of_replica(config.job, ranks_of_replica))
    limit_s = None if section.hang_limit_s == "auto" else section.hang_limit_s or section.timeout_s
    between = config.job.replicas.steps_between_syncs
    silence = Silence(limit_s, section.hang_after_s + _LEAST_EXTRA_S, section.timeout_s, between)
    token = new_token()
    roll_call = RollCall(layout.dp_replicate, config.job.replicas.minimum, most)
    try:
        server = Coordinator(config.job.replicas.address, token, roll_call, silence, section.timeout_s)
    except OSError as error:
        raise ConfigError(
            f'replicas.address = "{config.job.replicas.address}": {error.strerror or error}: it must be an address of '
            "this machine, or a name of one, by which the machines of other replicas reach it"
        ) from error
    with StopSignals() as stops, server as coordinator:
        note_training_began()
        host, port = coordinator.address
        threads = threads_of_rank(config.job, num_ranks)
        invitation = Invitation(
            config=in_any_folder(config),
            host=host,
            port=port,
            token=token,
            num_ranks=ranks_of_replica,
            num_threads=threads,
        )
        invite(config.run, invitation)
        launcher = _ReplicaLauncher(config, coordinator, token, ranks_of_replica, num_ranks)
        launcher.after_loss = after_loss
        code = launcher.run(range(layout.dp_replicate), stops)
        config.run.invitation.unlink(missing_ok=True)
        if code is not ExitCode.DONE:
            raise_stop(stops, "the replicas were asked to save and stop")
        return code


def in_any_folder(config: RankConfig) -> RankConfig:
    """Return a configuration that holds in any working directory."""
    run_dir, module_dir = os.path.abspath(config.run_dir), os.path.abspath(config.module_dir)
    return config.replace(job=with_absolute_paths(config.job), run_dir=run_dir, module_dir=module_dir)


class _ReplicaLauncher:
    """The replicas of one run."""

    def __init__(
        self, config: RankConfig, coordinator: Coordinator, token: str, ranks_of_replica: int, num_ranks: int
    ) -> None:
        self._config, self._coordinator, self._token = config, coordinator, token
        self._num_ranks, self._threads = ranks_of_replica, threads_of_rank(config.job, num_ranks)
        self._groups: dict[int, LocalRankGroup] = {}
        self._due_s: dict[int, float] = {}
        """When replicas are to be started, on the clock of time.monotonic."""
        self._restarts_left = config.job.run.max_restarts
        self._has_failed = False
        """Whether a replica failed for a reason that no restart takes away."""
        self._backoff = RestartBackoff(config.job.run.restart_backoff_s)
        self._num_interrupts = 0
        self._asked_s = math.inf
        """When a signal first asked the launcher to stop, in seconds since 1970."""
        self._codes: dict[int, ExitCode] = {}
        """How each replica has ended last."""
        self._dismissed: set[int] = set()
        """Replicas that were still starting as the others ended."""
        self._given_up: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        coordinator.give_up = self._give_up
        self.after_loss: Callable[[], None] = lambda: None

    def run(self, replicas: range, stops: StopSignals) -> ExitCode:
        """Start the replicas, and replace what is lost, until all have ended."""
        for replica in replicas:
            self._start(replica, warms_up=False)
        try:
            while self._groups or self._due_s:
                self._wait(stops)
                while not self._given_up.empty():
                    self._end_hung(*self._given_up.get())
                for number in stops.take():
                    self._stop(number)
                for replica in [one for one, group in self._groups.items() if group.poll()]:
                    self._ended(replica, is_stopping=stops.first is not None)
                for replica in [one for one, due_s in self._due_s.items() if due_s <= time.monotonic()]:
                    del self._due_s[replica]
                    self._start(replica, warms_up=True)
        finally:
            for group in self._groups.values():
                group.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        # A replica that ended well has seen the last step.
        return ExitCode.DONE if ExitCode.DONE in self._codes.values() else combined([*self._codes.values()])

    def _stop(self, number: signal.Signals) -> None:
        """Pass a signal on, and start no replica any more; a second interrupt ends all at once."""
        self._due_s.clear()
        if self._asked_s == math.inf:
            self._asked_s = time.time()
            note_hang(self._config.run, [self._config.run.of_replica(replica) for replica in self._groups])
        self._num_interrupts += number is signal.SIGINT
        for group in self._groups.values():
            if self._num_interrupts > 1:
                group.kill()
            else:
                group.stop(number, self._config.job.run.grace_s)

    def _wait(self, stops: StopSignals) -> None:
        if self._groups:
            timeout_s = min(self._due_s.values(), default=None)
            left_s = None if timeout_s is None else max(0.0, timeout_s - time.monotonic())
            if self._wake_read in wait_for_ends([*self._groups.values()], [stops.descriptor, self._wake_read], left_s):
                os.read(self._wake_read, 4096)
        else:
            stops.sleep(max(0.0, min(self._due_s.values()) - time.monotonic()))

    def _start(self, replica: int, *, warms_up: bool) -> None:
        own = self._config.run.of_replica(replica)
        for folder in (own.heartbeats, own.hangs):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (own.heartbeats, own.hangs, own.logs):
            folder.mkdir(parents=True, exist_ok=True)
        place = ReplicaPlace.of(replica, self._coordinator.address, self._token)
        config = self._config.replace(replica=place, warms_up=warms_up)
        environment = {"OMP_NUM_THREADS": str(self._threads)}
        self._groups[replica] = LocalRankGroup.start(config, self._num_ranks, environment, num_threads=self._threads)

    def _ended(self, replica: int, *, is_stopping: bool) -> None:
        """Note how a replica has ended, and have it started again where it was lost."""
        group = self._groups.pop(replica)
        if replica in self._dismissed:
            group.close()
            return
        failures = [end for end in group.ends if end.exit_code]
        report_failures(failures, group.killed, self._config.run.of_replica(replica), f"replica {replica}, ")
        if failures and not is_stopping:
            self._record(replica, failures)
        if group.killed and is_stopping:
            note_hang_until_killed(self._config.run, self._config.run.of_replica(replica), self._asked_s, group.killed)
        self._codes[replica] = code = code_of(group.ends, self._config.run.of_replica(replica))
        group.close()
        if code is ExitCode.DONE:
            self._dismiss_newcomers()
        if code is ExitCode.DONE or is_stopping or (code is ExitCode.RETRY and self._has_reached_stop()):
            return
        self.after_loss()
        if code is not ExitCode.RETRY:
            # The others run the same job.
            for other in self._groups.values():
                other.terminate(self._config.job.run.grace_s)
            self._restarts_left, self._has_failed = 0, True
        elif self._restarts_left and self._is_needed():
            self._restarts_left -= 1
            delay_s = self._backoff.delay_s(0 if (quorum := self._coordinator.quorum) is None else quorum.step)
            self._due_s[replica] = time.monotonic() + delay_s
            logger.error("replica %d is started again, %d restarts are left", replica, self._restarts_left)
        else:
            self._coordinator.expect_fewer()
            if not self._has_failed:
                used_up = self._config.job.run.max_restarts
                logger.error("replica %d is lost for good: run.max_restarts = %d are used up", replica, used_up)

    def _dismiss_newcomers(self) -> None:
        """Kill the replicas that are not part of the step that was the last one: nothing is left for them to do."""
        self._due_s.clear()
        members = () if (quorum := self._coordinator.quorum) is None else quorum.members
        for replica in self._groups.keys() - set(members) - self._dismissed:
            self._dismissed.add(replica)
            self._groups[replica].kill()

    def _record(self, replica: int, failures: Sequence[RankEnd]) -> None:
        """Add the loss of a replica to the run's findings, which its report shows."""
        first, quorum = failures[0], self._coordinator.quorum
        how = signal.Signals(-first.exit_code).name if first.exit_code < 0 else f"exit code {first.exit_code}"
        finding = RankFinding(
            kind="lost replica",
            time_s=time.time(),
            step=0 if quorum is None else min(quorum.step + 1, self._config.job.train.last_step),
            ranks=(replica * self._num_ranks + first.rank,),
            hosts=(socket.gethostname(),),
            action="none",
            what=f"replica {replica} was lost: rank {first.rank} of it ended by {how}",
        )
        with self._config.run.findings.open("a", encoding="utf-8") as file:
            file.write(finding.model_dump_json() + "\n")

    def _is_needed(self) -> bool:
        """Return whether the run has not ended: no replica has seen its last step."""
        return ExitCode.DONE not in self._codes.values()

    def _has_reached_stop(self) -> bool:
        """Return whether the replicas have agreed on the step after which train.stop_after ends them."""
        stop_after, quorum = self._config.job.train.stop_after, self._coordinator.quorum
        return stop_after is not None and quorum is not None and quorum.step >= stop_after

    def _give_up(self, given_up: Mapping[int, GivenUp]) -> None:
        """Have replicas killed; called from the coordinator's thread."""
        with suppress(OSError):  # a full disk
            append_event(self._config.run, "hang", duration_s=max(one.held_up_s for one in given_up.values()))
        for replica, one in given_up.items():
            self._given_up.put((replica, one.why))
        os.write(self._wake_write, b"x")

    def _end_hung(self, replica: int, why: str) -> None:
        """Kill a replica, after a moment in which its ranks write where they are."""
        group = self._groups.get(replica)
        if group is None:
            return
        ask(self._config.run.of_replica(replica), _WRITING_STACKS_S)
        logger.error("replica %d is killed: %s", replica, why)
        group.kill()
