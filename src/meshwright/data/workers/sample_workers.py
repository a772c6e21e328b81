"""SampleWorkers: data.num_workers processes of a rank that read samples by their numbers.

Each process is driven by a thread, so that what is submitted is a Future as any other. They are new processes (spawn),
not forked: a fork of a rank would hold its connections open, and the others would not notice that the rank is killed.
"""

import multiprocessing
import pickle
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshwright import errors
from meshwright.data.numbered_samples import Sample
from meshwright.data.workers.worker_process import ReadFailure, serve_samples
from meshwright.errors import DataUnavailable, MeshwrightError
from meshwright.spec.job.sections import DataSection, Task

_END_TIMEOUT_S = 5.0


class SampleWorkers:
    """Worker processes, of which none outlives `close` or the process that has them."""

    def __init__(self, section: DataSection, seq_len: int, task: Task = "pretrain") -> None:
        """Start data.num_workers processes for the dataset of a job's [data]."""
        self._section = section
        self._workers = [_Worker(section, seq_len, task) for _ in range(section.num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(section.num_workers, thread_name_prefix="sample-worker")

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.process.pid or 0 for worker in self._workers]

    def submit(self, numbers: Sequence[int]) -> Callable[[], list[Sample]]:
        """Begin to read samples in a worker, and return what waits for them and returns them in order.

        That raises DataUnavailable where the worker has died, and MeshwrightError with its traceback where code of the
        user's failed.
        """
        return self._threads.submit(self._read, [int(number) for number in numbers]).result

    def _read(self, numbers: list[int]) -> list[Sample]:
        # There are as many workers as threads.
        worker = self._idle.get()
        try:
            received = pickle.loads(worker.read(numbers))
        except (EOFError, OSError) as error:
            worker.process.join(_END_TIMEOUT_S)
            raise DataUnavailable(self._lost(worker.process)) from error
        finally:
            self._idle.put(worker)
        if isinstance(received, ReadFailure):
            raise self._error(received)
        samples: list[Sample] = received
        return samples

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

    def _lost(self, process: Any) -> str:
        code = process.exitcode
        how = "lost its connection" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return (
            f"worker process {process.pid} of data.num_workers = {self._section.num_workers} died ({how}) while it "
            "read samples: where memory is short the kernel kills processes (signal 9), which fewer workers or smaller "
            "data.prefetch_batches avoid; start again with --resume, or let run.max_restarts do so"
        )

    def close(self) -> None:
        """End the processes, also one that hangs in a read."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_END_TIMEOUT_S)


class _Worker:
    """One process and the connection to it."""

    def __init__(self, section: DataSection, seq_len: int, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve_samples, args=(theirs, section, seq_len, task), name="sample-worker", daemon=True
        )
        self.process.start()
        # The process has the only other end, so that the connection ends with it.
        theirs.close()

    def read(self, numbers: list[int]) -> bytes:
        """Return the answer of the process; raises EOFError or OSError where it is gone."""
        self._connection.send(numbers)
        return self._connection.recv_bytes()
