"""ReadThread: a background thread that reads what is requested, in order."""

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

READ_THREAD = "meshwright-loader"
"""Name of the thread."""

_CLOSE_TIMEOUT_S = 5.0


class ReadThread:
    """One thread that reads, since a user's class need not be thread-safe."""

    def __init__(self) -> None:
        self.is_closed = False
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon: a read that hangs must not keep an interrupted process alive.
        self._thread = threading.Thread(target=self._serve, name=READ_THREAD, daemon=True)
        self._thread.start()
        # A thread inside of torch at interpreter exit would abort the process.
        atexit.register(self.close)

    def submit(self, read: Callable[[], T]) -> Future[T]:
        """Return the future result of `read`, which the thread calls after all that was submitted before."""
        assert not self.is_closed, "the loader is closed"
        future: Future[T] = Future()
        self._requests.put((read, future))
        return future

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread, after a `last` call; wait a few seconds at most.

        What was submitted before is still called: it should return early once `is_closed` is true.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if last is not None:
            self._requests.put((last, Future()))
        self._requests.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            read, future = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(read())
            except BaseException as error:
                # Re-raised in the thread that waits for the result.
                future.set_exception(error)
