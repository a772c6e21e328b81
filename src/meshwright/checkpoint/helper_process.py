"""The loop of a process that works for a rank: requests as lines of JSON on standard input, answers on output."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def requests_of_rank(niceness: int) -> Iterator[Any]:
    """Return the requests of the rank that started this process, until it sends null.

    From this call on signals are ignored, since the rank decides when to stop, and the process ends at once where the
    input ends without null: then the rank is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(niceness)
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    return iter(requests.get, None)


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
