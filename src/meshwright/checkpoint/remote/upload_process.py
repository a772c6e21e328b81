"""The process that uploads the checkpoints of a run: steps as lines of JSON on standard input, answers on output.

    python -m meshwright.checkpoint.remote.upload_process '{"url": ..., "run": ..., "rule": {...}, "niceness": 10}'

It ends when its input does. A killed upload leaves no index at the URL, and the next one continues it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from meshwright.checkpoint.helper_process import answer, requests_of_rank
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.checkpoint.remote.upload import prune_remote, upload
from meshwright.errors import MeshwrightError
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run


def main(options: dict[str, Any]) -> None:
    """Upload the steps that arrive on standard input, until it ends.

    What a rank that is gone has saved is uploaded when the run is resumed.
    """
    run, rule = Run(options["run"]), RetentionRule.from_dict(options["rule"])
    store: RemoteStore | None = None
    for step in requests_of_rank(options["niceness"]):
        started_s = time.perf_counter()
        ended: dict[str, Any] = {"step": step, "error": None, "num_bytes": 0, "num_skipped": 0}
        try:
            store = store or RemoteStore(options["url"])
            ended |= upload(store, run, step)._asdict()
            prune_remote(store, run, rule)
        except MeshwrightError as error:
            ended["error"] = str(error)
        except Exception as error:
            ended["error"] = f"{type(error).__name__}: {error}"
        answer(ended | {"duration_s": time.perf_counter() - started_s})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
