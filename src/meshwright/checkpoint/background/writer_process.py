"""The writer process of one rank: takes saves as lines of JSON on standard input, answers on standard output.

WriterLink is its rank's end: it starts the process, sends saves, receives answers, and notices its death.

It ends when its input does: with the rank that started it, whose unfinished save is then left for the next to remove.
"""

import json
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.channels.key_value import KeyValueClient
from meshwright.checkpoint.background.helper_process import answer, command_of, requests_of_rank
from meshwright.checkpoint.background.staging import OpenedBuffer
from meshwright.checkpoint.background.store_peers import StorePeers
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.saving import Extent, SaveRequest, write_checkpoint
from meshwright.errors import CheckpointError

MODULE = __name__
"""Whose `main` the writer process runs; chaos runs have one whose disk fails."""


class Answer(NamedTuple):
    """How one save ended."""

    number: int
    error: str | None
    """None for a committed checkpoint."""
    duration_s: float
    """Seconds that the writer process spent on it."""


class WriterLink:
    """A running writer process."""

    def __init__(self, options: dict[str, Any], token: str | None, module: str | None = None) -> None:
        """`token` is that of the store in `options`, None without a store; `module` is the one whose `main` the process
        runs, this one by default.
        """
        command = command_of(module or MODULE, options)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._sending: queue.Queue[str | None] = queue.Queue()
        if token is not None:
            self.send({"token": token})
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, request: dict[str, Any]) -> None:
        """Send one save, without waiting."""
        self._sending.put(json.dumps(request) + "\n")

    def put(self, answer: Answer) -> None:
        """Let `receive` return `answer`, which the process did not give."""
        self._answers.put(answer)

    def receive(self, timeout_s: float | None) -> Answer | None:
        """Return the next answer; None once the process has ended. Raises queue.Empty after `timeout_s`."""
        answer = self._answers.get(timeout=timeout_s) if timeout_s != 0 else self._answers.get_nowait()
        if answer is None:
            self._answers.put(None)
        return answer

    def end_reason(self) -> str:
        """Return how the ended process ended."""
        code = self._process.wait()
        return f"its writer process (pid {self.pid}) " + (
            f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        )

    def close(self) -> None:
        """Let the process finish its saves and end, and wait for it."""
        self._sending.put("null\n")
        self._sending.put(None)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(Answer(**json.loads(line)))
        self._answers.put(None)

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._sending.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except BrokenPipeError:
            pass  # the process ended; `receive` says so


def main(options: dict[str, Any]) -> None:
    """Write the saves that arrive on standard input, until it ends."""
    requests = requests_of_rank(options["niceness"])
    store = None
    if options["store"] is not None:
        # Not among the options, which are on the command line.
        token = next(requests)["token"]
        host, port = options["store"]
        store = KeyValueClient((host, port), token, options["timeout_s"])
    for request in requests:
        started_s = time.perf_counter()
        error = _write(request, options, store)
        answer({"number": request["number"], "error": error, "duration_s": time.perf_counter() - started_s})


def _write(request: dict[str, Any], options: dict[str, Any], store: KeyValueClient | None) -> str | None:
    """Write one save; return the error, or None."""
    peers = StorePeers(store, f"save-{request['number']}", options["rank"], options["num_ranks"])
    try:
        with OpenedBuffer(request["buffer"]) as buffer:
            extents = buffer.extents(parsed_extents(request))
            write_checkpoint(save_request_of(request), extents, peers, _Pace(options["bytes_per_s"]))
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"saving failed on rank {options['rank']}: {type(error).__name__}: {error}"
    return None


def save_request_of(request: dict[str, Any]) -> SaveRequest:
    """Return what the ranks agree on, from the JSON of a request."""
    tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in request["tensors"].items()}
    return SaveRequest(Path(request["folder"]), request["metadata"], request["sections"], tensors)


def parsed_extents(request: dict[str, Any]) -> list[Extent]:
    """Return how the shards lie in the staged memory, from the JSON of a request."""
    return [
        Extent(name, dtype, tuple(shape), Box(tuple(offsets), tuple(sizes)), num_bytes)
        for name, dtype, shape, (offsets, sizes), num_bytes in request["extents"]
    ]


class _Pace:
    """Sleeps after each write, so that their mean rate stays below a limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._started_s, self._num_bytes = time.perf_counter(), 0

    def __call__(self, num_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        self._num_bytes += num_bytes
        early_s = self._num_bytes / self._bytes_per_s - (time.perf_counter() - self._started_s)
        if early_s > 0:
            time.sleep(early_s)
