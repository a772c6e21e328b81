"""What the ends of local ranks mean: one exit code for all of them, and what is said of those that failed."""

import signal
from collections.abc import Collection, Sequence

from meshwright.errors import ExitCode, Preempted
from meshwright.fault_tolerance.evidence import read_heartbeats
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.log import logger, warning_if_unwritten
from meshwright.spec.run.rank_records import LAST_PHASES, EndedBySignal
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.local.local_rank_group import RankEnd


def raise_stop(stops: StopSignals, what: str) -> None:
    """Raise what a signal that asked this launcher to stop means, if there was one."""
    stops.take()
    if stops.first is signal.SIGINT:
        raise KeyboardInterrupt
    if stops.first is not None:
        raise Preempted(f"{stops.first.name}: {what}; continue with --resume")


def combined(codes: Collection[int]) -> ExitCode:
    """Return the code that says most: a rank that knows why it failed outweighs those that only lost it."""
    for code in (ExitCode.BAD_INPUT, ExitCode.DO_NOT_RETRY, ExitCode.INTERRUPTED):
        if code in codes:
            return code
    # A negative code is a signal: the rank was killed. Code 1 is Python failing before it could say more.
    return ExitCode.DO_NOT_RETRY if 1 in codes else ExitCode.RETRY


def code_of(ends: Sequence[RankEnd], run: Run) -> ExitCode:
    """Return one exit code for ranks that have ended, by their codes and last heartbeats in `run`.

    A rank that ends with 0 in the middle of training, since something in it called exit, has not trained all its steps.
    """
    failures = [end.exit_code for end in ends if end.exit_code]
    early = _say_which_ended_early([end for end in ends if end.exit_code == 0], run)
    return combined([*failures, *early * [ExitCode.RETRY]]) if failures or early else ExitCode.DONE


def _say_which_ended_early(ends: Sequence[RankEnd], run: Run) -> int:
    """Return how many of these ranks, which ended with 0, had not trained all their steps, and name the first."""
    beats = read_heartbeats(run)
    last = {end.rank: beats[end.rank] for end in ends if end.rank in beats and beats[end.rank].pid == end.pid}
    early = [end.rank for end in ends if end.rank not in last or last[end.rank].phase not in LAST_PHASES]
    if early:
        where = f" in step {last[early[0]].step}" if early[0] in last else ""
        logger.error(
            "rank %d ended with exit code 0%s, before its training did: something in it, such as data.source or a "
            "library, called exit",
            early[0],
            where,
        )
    return len(early)


def report_failures(failures: Sequence[RankEnd], killed: Collection[int], run: Run, of: str = "") -> None:
    """Name the ranks that ended by themselves, the first in front of `failures`; those that we had to stop afterwards
    are no news, unless they did not. `of` is said before each rank, such as its replica.
    """
    signals: dict[int, str] = {}
    failed = {end.rank for end in failures}
    for end in sorted(failures, key=lambda end: end.rank):
        rank, code, log = end.rank, end.exit_code, run.rank_log(end.rank)
        # That of an independent replica's rank 0 is the terminal.
        where = f"; its log: {log}" if log.exists() else ""
        if end.pid in killed:
            logger.error("%srank %d (pid %d) did not end by itself, and was killed%s", of, rank, end.pid, where)
        elif code < 0 and (end is failures[0] or code != -signal.SIGTERM):
            signals[end.pid] = name = signal.Signals(-code).name
            logger.error("%srank %d (pid %d) was killed by %s%s", of, rank, end.pid, name, where)
        elif code > 0 and rank > 0 and 0 not in failed:
            logger.error("%srank %d ended with exit code %d: %s", of, rank, code, log)
    if signals and run.hangs.is_dir():
        with warning_if_unwritten(run.ended_by_signal):
            run.ended_by_signal.write_text(EndedBySignal(by_pid=signals).to_json(), encoding="utf-8")
