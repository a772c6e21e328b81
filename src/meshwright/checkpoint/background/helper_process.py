"""A process that works for a rank: requests as lines of JSON on standard input, answers on standard output.

    python -m meshwright.checkpoint.background.helper_process MODULE '{"niceness": 10, ...}'

The `main` of MODULE takes the options. The process ends when its input does.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.garbage import kept_garbage


def command_of(module: str, options: dict[str, Any]) -> list[str]:
    """Return the command line of the process whose work is `module`."""
    return [sys.executable, "-m", "meshwright.checkpoint.background.helper_process", module, json.dumps(options)]


def requests_of_rank(niceness: int) -> Iterator[Any]:
    """Return the requests of the rank that started this process, until it sends null.

    From this call on signals are ignored, since the rank decides when to stop, and the process ends at once where the
    input ends without null: then the rank is gone.
    """
    _ignore_signals()
    os.nice(niceness)
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    return iter(requests.get, None)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def serve_steps(niceness: int, act: Callable[[int], int]) -> None:
    """Do `act`, which returns bytes, for each step that a StepWorker sends, and answer with how it ended."""
    for step in requests_of_rank(niceness):
        started_s = time.perf_counter()
        error, num_bytes = None, 0
        try:
            num_bytes = act(step)
        except MeshwrightError as explained:
            error = str(explained)
        except Exception as unknown:
            error = f"{type(unknown).__name__}: {unknown}"
        answer({"step": step, "error": error, "num_bytes": num_bytes, "duration_s": time.perf_counter() - started_s})


def answer(values: dict[str, Any]) -> None:
    """Send one answer to the rank."""
    with suppress(BrokenPipeError):  # the rank is gone
        print(json.dumps(values), flush=True)


def _read(requests: queue.Queue[Any]) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        requests.put(request)
        if request is None:
            return
    os._exit(1)


if __name__ == "__main__":
    # A launcher that stops the ranks sends its signal to their helpers, too, which may be importing torch.
    _ignore_signals()
    # A third of the second or two that torch takes.
    with kept_garbage():
        work = importlib.import_module(sys.argv[1])
    work.main(json.loads(sys.argv[2]))
