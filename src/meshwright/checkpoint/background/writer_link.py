"""A rank's end of its writer process: start it, send saves, receive answers, and notice its death."""

import json
import queue
import subprocess
import threading
from typing import Any, NamedTuple

from meshwright.checkpoint.background.helper_process import command_of


class Answer(NamedTuple):
    """How one save ended."""

    number: int
    error: str | None
    """None for a committed checkpoint."""
    duration_s: float
    """Seconds that the writer process spent on it."""


class WriterLink:
    """A running writer process."""

    def __init__(self, options: dict[str, Any]) -> None:
        command = command_of("meshwright.checkpoint.background.writer_process", options)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._sending: queue.Queue[str | None] = queue.Queue()
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
