"""Terminal output: of rank 0, until a rank fails; then of the first rank that failed."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import TracebackType
from typing import Self

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.log import logger
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks


class Terminal:
    """Redirection of a rank's output to its log; the first rank that fails gets the terminal's stderr back.

    Ranks that fail later have mostly lost that peer, and would print misleading advice.
    """

    def __init__(self, ranks: Ranks, run: Run) -> None:
        self._ranks, self._run = ranks, run
        self._owns_terminal = True

    def __enter__(self) -> Self:
        self._stderr = os.dup(2)
        return self

    def leave_to_rank_0(self) -> None:
        """Redirect the output of this rank to its log, unless it is rank 0."""
        if self._ranks.is_first:
            return
        try:
            self._redirect((1, 2))
            self._owns_terminal = False
        except OSError as error:
            log = self._run.rank_log(self._ranks.rank)
            raise ConfigError(f"cannot write {log}: {error.strerror}: set run.dir to a shared folder") from error
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
        logger.info("rank %d, pid %d", self._ranks.rank, os.getpid())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            if self._ranks.fails_first():
                self._print_error(error)
            else:
                self._silence()
        os.close(self._stderr)

    def _print_error(self, error: Exception) -> None:
        if self._owns_terminal:
            return
        traceback.print_exception(error)
        sys.stderr.flush()
        os.dup2(self._stderr, 2)
        if not isinstance(error, MeshwrightError):
            print(f"rank {self._ranks.rank} of {self._ranks.num_ranks}:", file=sys.stderr, flush=True)

    def _silence(self) -> None:
        try:
            self._redirect((2,))
        except OSError:
            # No log: the run folder was rejected.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def _redirect(self, descriptors: tuple[int, ...]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(self._run.rank_log(self._ranks.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in descriptors:
            os.dup2(log, descriptor)
        os.close(log)
