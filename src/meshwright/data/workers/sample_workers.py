"""SampleWorkers: data.num_workers processes of a rank that read samples by their numbers.

They are started anew (spawn), not forked: a fork of a rank would hold its connections open, so that the others would
not notice when that rank is killed.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Final

from meshwright import errors
from meshwright.data.dataset import Sample
from meshwright.data.workers.worker_process import ReadFailure, begin, read_samples
from meshwright.errors import DataUnavailable, MeshwrightError
from meshwright.spec.job.sections import DataSection

_CLOSE_TIMEOUT_S: Final = 5.0


class SampleWorkers:
    """Worker processes, of which none outlives `close` or the process that has them."""

    def __init__(self, section: DataSection, seq_len: int) -> None:
        """Prepare data.num_workers processes; each is started when there is work for it."""
        self._section = section
        self._context = _RecordingContext()
        self._pool = ProcessPoolExecutor(section.num_workers, self._context, begin, (section, seq_len))

    def submit(self, indices: Sequence[int]) -> Callable[[], list[Sample]]:
        """Begin to read samples in a worker, and return what waits for them and returns them in order.

        That raises DataUnavailable where a worker has died, and MeshwrightError with its traceback where code of the
        user's failed.
        """
        try:
            future = self._pool.submit(read_samples, [int(index) for index in indices])
        except BrokenProcessPool as error:
            raise self._lost_worker() from error
        return lambda: self._received(future)

    def _received(self, future: Future[bytes]) -> list[Sample]:
        try:
            received: list[Sample] | ReadFailure = pickle.loads(future.result())
        except BrokenProcessPool as error:
            raise self._lost_worker() from error
        if isinstance(received, ReadFailure):
            raise self._error(received)
        return received

    def _error(self, failure: ReadFailure) -> MeshwrightError:
        if failure.kind is not None:
            kind: type[MeshwrightError] = getattr(errors, failure.kind)
            return kind(failure.text)
        doing = "building it" if failure.number is None else f"reading sample {failure.number}"
        return MeshwrightError(
            f"data.source = {self._section.source!r}: {doing} in a worker process (data.num_workers = "
            f"{self._section.num_workers}) raised an error: correct that code, then start again with --resume\n"
            f"{failure.text.rstrip()}"
        )

    def _lost_worker(self) -> DataUnavailable:
        # The pool ends the others by SIGTERM before it says so.
        ends = [f"pid {one.pid}: {_end(one.exitcode)}" for one in self._context.started if one.exitcode != -15]
        return DataUnavailable(
            f"a worker process of data.num_workers = {self._section.num_workers} died ({', '.join(ends) or 'SIGTERM'}) "
            "while it read samples: the kernel kills processes where memory is short, so lower data.num_workers or "
            "data.prefetch_batches if it does so again; start again with --resume, or let run.max_restarts do so"
        )

    def close(self) -> None:
        """End the processes, also one that hangs in a read."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._context.started:
            process.kill()
        sentinels = [process.sentinel for process in self._context.started]
        while sentinels and (ended := wait(sentinels, _CLOSE_TIMEOUT_S)):
            sentinels = [one for one in sentinels if one not in ended]


def _end(exit_code: int | None) -> str:
    if exit_code is None:
        return "still running"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


class _RecordingContext(SpawnContext):
    """Keeps the processes that a pool starts, which it does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        process = multiprocessing.get_context("spawn").Process(*args, **kwargs)
        self.started.append(process)
        return process
