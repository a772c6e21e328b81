"""One more replica for a run whose replicas are independent, started by a launcher of its own, here or elsewhere.

The run's launcher leaves an invitation in the run folder, which only its owner can read: it holds the job's token.
"""

import os
import shutil
import socket
from typing import Final

from meshwright.errors import ConfigError, ExitCode, Retryable
from meshwright.fault_tolerance.hangs.launcher_watch import LauncherWatch
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.log import progress
from meshwright.spec.frozen import Frozen
from meshwright.spec.run.quorum import ReplicaPlace
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.launch.local.local_rank_group import LocalRankGroup, wait_for_ends
from meshwright.trainer.launch.local.rank_ends import code_of, raise_stop, report_failures
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.run.run_folder import read_manifest

_ANSWER_S: Final = 30.0
"""In which a launcher that runs answers, on any network."""


class Invitation(Frozen):
    """What a replica needs in order to join a run."""

    config: RankConfig
    host: str
    """Where the coordinator listens."""
    port: int
    token: str
    num_ranks: int
    """Of one replica."""
    num_threads: int
    """Of one rank."""


def invite(run: Run, invitation: Invitation) -> None:
    """Let replicas of other launchers join a run."""
    run.invitation.unlink(missing_ok=True)
    descriptor = os.open(run.invitation, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(invitation.to_json())


def join(run: Run) -> ExitCode:
    """Train as one more replica of a run until it ends, and return the exit code.

    Raises ConfigError where no run with independent replicas trains in this folder, Retryable where its launcher does
    not answer.
    """
    invitation = _invitation(run)
    _require_answer(run, invitation)
    number = _claim_number(run)
    own = run.of_replica(number)
    section = invitation.config.job.run
    address = (invitation.host, invitation.port)
    config = invitation.config.replace(replica=ReplicaPlace.of(number, address, invitation.token), warms_up=True)
    threads = invitation.num_threads
    progress.info("joining %s as replica %d", run.folder, number)
    with StopSignals() as stops, LauncherWatch(own, section) as watch:
        environment = {"OMP_NUM_THREADS": str(threads)}
        with LocalRankGroup.start(config, invitation.num_ranks, environment, num_threads=threads) as group:
            while not group.poll():
                if wait_for_ends([group], [stops.descriptor]):
                    for signal_ in stops.take():
                        group.stop(signal_, section.grace_s)
        raise_stop(stops, "the replica was asked to stop")
        failures = [end for end in group.ends if end.exit_code]
        report_failures([end for end in failures if end.pid not in watch.killed], group.killed, own)
        return code_of(group.ends, own)


def _invitation(run: Run) -> Invitation:
    """Return what a running launcher left for others; raises ConfigError where there is none."""
    try:
        return Invitation.from_json(run.invitation.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(_why_none(run, read_manifest(run))) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run.invitation} cannot be read ({error}): join as the user who started the run, with the same version "
            "of Meshwright"
        ) from error


def _why_none(run: Run, manifest: Manifest | None) -> str:
    """Return why a folder has no invitation, and what to do."""
    if manifest is None or not manifest.job.replicas.independent:
        return (
            f"{run.folder} holds no run that replicas can join: start the run with replicas.independent = true, and "
            "join it while it trains"
        )
    if manifest.exit == ExitCode.DONE:
        return f"the run in {run.folder} has ended, with all its steps done: there is nothing left to join"
    how = "no launcher trains it" if manifest.exit is None else f"it ended with exit code {manifest.exit}"
    return (
        f"nothing trains in {run.folder}, {how}: start it again (`meshwright train {run.folder} --resume`), and join "
        "it while it trains"
    )


def _require_answer(run: Run, invitation: Invitation) -> None:
    """Raise Retryable where nothing listens at the address of the run's launcher."""
    address = (invitation.host, invitation.port)
    try:
        socket.create_connection(address, timeout=_ANSWER_S).close()
    except OSError as error:
        raise Retryable(
            f"the launcher of the run in {run.folder} does not answer at {invitation.host}:{invitation.port} "
            f"({error.strerror or error}): if it was killed, start the run again (`meshwright train {run.folder} "
            "--resume`), then join; if it trains on another machine, replicas.address must be an address of it that "
            "this machine reaches"
        ) from error


def _claim_number(run: Run) -> int:
    """Return the lowest number that no replica of the run has had, with its folders."""
    number = 0
    while True:
        own = run.of_replica(number)
        try:
            own.folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        for folder in (own.heartbeats, own.hangs, own.logs):
            folder.mkdir()
        return number


def clear_replicas(run: Run) -> None:
    """Remove what earlier replicas of a run have left, but for the checkpoints that they resume from."""
    run.invitation.unlink(missing_ok=True)
    run.invitation.parent.mkdir(exist_ok=True)
    for own in run.replicas():
        for path in own.folder.iterdir():
            if path != own.checkpoints:
                shutil.rmtree(path, ignore_errors=True)
        if not own.checkpoint_steps():
            shutil.rmtree(own.folder, ignore_errors=True)
