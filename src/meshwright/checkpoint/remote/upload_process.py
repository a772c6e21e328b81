"""The process that uploads the checkpoints of a run; see meshwright.checkpoint.background.step_worker.

It ends when its input does. A killed upload leaves no index at the URL, and the next one continues it.
"""

from functools import cache
from typing import Any

from meshwright.checkpoint.background.helper_process import serve_steps
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.checkpoint.remote.upload import prune_remote, upload
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run


def main(options: dict[str, Any]) -> None:
    """Upload the steps that arrive on standard input, until it ends.

    What a rank that is gone has saved is uploaded when the run is resumed.
    """
    run, rule = Run(options["run"]), RetentionRule.from_dict(options["rule"])
    # Made by the first upload: an error is an answer then.
    store = cache(lambda: RemoteStore(options["url"]))

    def act(step: int) -> int:
        num_bytes = upload(store(), run, step).num_bytes
        prune_remote(store(), run, rule)
        return num_bytes

    serve_steps(options["niceness"], act)
