"""The process that uploads the checkpoints of a run: steps as lines of JSON on standard input, answers on output.

    python -m meshwright.checkpoint.remote.upload_process '{"url": ..., "run": ..., "rule": {...}, "niceness": 10}'

It ends when its input does. A killed upload leaves no index at the URL, and the next one continues it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.checkpoint.remote.upload import prune_remote, upload
from meshwright.errors import MeshwrightError
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run


def main(options: dict[str, Any]) -> None:
    """Upload the steps that arrive on standard input, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(options["niceness"])
    requests: queue.Queue[int | None] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    run, rule = Run(options["run"]), RetentionRule.from_dict(options["rule"])
    store: RemoteStore | None = None
    while (step := requests.get()) is not None:
        started_s = time.perf_counter()
        answer: dict[str, Any] = {"step": step, "error": None, "num_bytes": 0, "num_skipped": 0}
        try:
            store = store or RemoteStore(options["url"])
            answer |= upload(store, run, step)._asdict()
            prune_remote(store, run, rule)
        except MeshwrightError as error:
            answer["error"] = str(error)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer | {"duration_s": time.perf_counter() - started_s}), flush=True)


def _read_requests(requests: queue.Queue[int | None]) -> None:
    for line in sys.stdin:
        step = json.loads(line)
        requests.put(step)
        if step is None:
            return
    # The rank is gone: what it has saved is uploaded when the run is resumed.
    os._exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
