"""share(): a conversion whose work several processes share: new local ones, or the ranks that torchrun started."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from meshwright.checkpoint.format.leftovers import remove_leftovers
from meshwright.checkpoint.peers import GroupPeers
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError, Preempted
from meshwright.log import logger
from meshwright.spec.job.sections import RunSection
from meshwright.trainer.launch.local.local_ranks import RanksFailed, run_ranks
from meshwright.trainer.launch.ranks import Ranks

T = TypeVar("T")
_TIMEOUT_S = 7 * 24 * 3600.0
"""A conversion takes what the disk takes."""


class _Stopped(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt no Exception, so that no handler of errors catches it."""


@contextmanager
def preemptible(target: Path) -> Iterator[None]:
    """Let SIGTERM end the block, which writes `target`, as Ctrl-C does; raises Preempted then."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Stopped:
        raise Preempted(
            f"SIGTERM: {target} was not written, and what was begun is removed: start the command again"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def share(work: Callable[..., T], arguments: dict[str, Any], ranks: int, target: Path) -> T:
    """Return rank 0's `work(**arguments, peers=...)`, run by `ranks` processes of this machine, or here if that is 1.

    `work` is a collective at the top level of a module that writes `target`, and what it raises it raises on all ranks.
    Warnings of rank 0 are logged here. Ranks that are killed leave nothing.
    """
    if ranks == 1:
        return work(**arguments, peers=GroupPeers(is_alone=True))
    try:
        outcome, warnings = run_ranks(_of_rank, ranks, work, arguments, timeout_s=_TIMEOUT_S)[0]
    except RanksFailed as failure:
        remove_leftovers(target)
        raise CheckpointError(f"a process of the conversion failed: {failure.reason}") from None
    except BaseException:
        remove_leftovers(target)
        raise
    for text in warnings:
        logger.warning("%s", text)
    if isinstance(outcome, MeshwrightError):
        raise outcome
    result: T = outcome
    return result


def is_under_torchrun() -> bool:
    """Return whether this process is one of several ranks that torchrun started."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def share_under_torchrun(work: Callable[..., T], arguments: dict[str, Any], ranks: int) -> T | None:
    """Return on rank 0 what `work` returned there, elsewhere None; all ranks of torchrun share the work."""
    if ranks != 1:
        raise ConfigError(f"--ranks {ranks}, but torchrun started the ranks already: leave --ranks out")
    try:
        with Ranks.join(RunSection(device="cpu")) as joined:
            result = work(**arguments, peers=GroupPeers())
            return result if joined.is_first else None
    except MeshwrightError as error:
        # All ranks raise the same, which one of them says.
        if os.environ["RANK"] != "0":
            sys.exit(error.exit_code)
        raise


def _of_rank(work: Callable[..., T], arguments: dict[str, Any]) -> tuple[T | MeshwrightError, list[str]]:
    warnings: list[str] = []
    handler = _Collector(warnings)
    logger.addHandler(handler)
    try:
        return work(**arguments, peers=GroupPeers()), warnings
    except MeshwrightError as error:
        return error, warnings
    finally:
        logger.removeHandler(handler)


class _Collector(logging.Handler):
    """Appends the text of each warning to a list."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())
