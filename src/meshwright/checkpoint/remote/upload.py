"""upload: one checkpoint to a RemoteStore: data first, index last, what is already there skipped.

As a process (meshwright.checkpoint.background.step_worker) it uploads a run's checkpoints while it trains, until its
input ends. A killed upload leaves no index at the URL, and the next one continues it.
"""

from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from meshwright.checkpoint.background.helper_process import serve_steps
from meshwright.checkpoint.examine.describe_run import loss_of
from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.manifest import read_index
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.errors import DamagedCheckpoint
from meshwright.spec.run.retention import RetentionRule, kept_because
from meshwright.spec.run.run import Run

_BLOCK_BYTES = 8 << 20


def upload(store: RemoteStore, run: Run, step: int) -> int:
    """Upload the checkpoint after `step` and return the bytes sent; on return it is complete at the URL.

    It is verified first: a copy of damaged files is none. An upload that was interrupted is continued: its files are
    skipped where size and hash are equal. Raises CheckpointError.
    """
    folder = run.checkpoint(step)
    index = read_index(folder)
    remote = store.contents(step)
    if remote is not None and remote.get("save_id") == index.save_id:
        return 0
    if damages := verify_checkpoint(folder, num_threads=1).damages:
        raise DamagedCheckpoint(f"{folder} is damaged and was not uploaded: {damages[0].file} {damages[0].what}")
    if remote is not None:
        store.hide(step)  # an earlier save of this step
    sent = 0
    for path in files_before_index(folder):
        if not _is_equal(store, step, path):
            store.put(path, step, path.name)
            sent += path.stat().st_size
    for path in (run.manifest, run.job):
        if path.is_file():
            store.put_run_file(path.name, path.read_bytes())
    store.put(folder / FILE_NAME, step, FILE_NAME)
    return sent + (folder / FILE_NAME).stat().st_size


def files_before_index(folder: Path) -> list[Path]:
    """Return the files of a checkpoint but its index: data, then manifests."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != FILE_NAME]
    return sorted(files, key=lambda path: (path.suffix != ".bin", path.name))


def prune_remote(store: RemoteStore, run: Run, rule: RetentionRule) -> list[int]:
    """Remove what `rule` does not keep at the URL, and incomplete steps that this run no longer has; return them.

    Only the process that uploads for a run may call it, between uploads.
    """
    contents = {step: store.contents(step) for step in store.all_steps()}
    losses = {step: loss_of(found.get("metadata", {})) for step, found in contents.items() if found is not None}
    kept = kept_because(losses, rule)
    local = set(run.checkpoint_steps())
    removed = [step for step in contents if step not in kept and (step in losses or step not in local)]
    for step in removed:
        store.remove(step)
    return removed


def _is_equal(store: RemoteStore, step: int, path: Path) -> bool:
    """Return whether a file is at the URL already, with the same bytes."""
    if store.size(step, path.name) != path.stat().st_size:
        return False
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return store.hash_of(step, path.name) == digest.hexdigest()


def main(options: dict[str, Any]) -> None:
    """Upload the steps that arrive on standard input, until it ends.

    What a rank that is gone has saved is uploaded when the run is resumed.
    """
    run, rule = Run(options["run"]), RetentionRule.from_dict(options["rule"])
    # Made by the first upload: an error is an answer then.
    store = cache(lambda: RemoteStore(options["url"]))

    def act(step: int) -> int:
        num_bytes = upload(store(), run, step)
        prune_remote(store(), run, rule)
        return num_bytes

    serve_steps(options["niceness"], act)
