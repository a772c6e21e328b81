"""fetch_newest: the newest intact checkpoint at a URL into an empty run folder."""

import os
from pathlib import Path

from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.format.durable import commit, remove, temporary_sibling, write_durably
from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.manifest import data_name, manifest_name, read_index
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.log import logger, progress
from meshwright.spec.run.run import Run


def fetch_newest(store: RemoteStore, run: Run) -> int | None:
    """Fetch the newest checkpoint whose every byte is as it was saved, and the run's manifest; return its step.

    None where the URL holds no checkpoint. It appears in `run` by one rename, verified. Raises DamagedCheckpoint where
    all are damaged.
    """
    steps = store.steps()
    if not steps:
        return None
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    _fetch_manifest(store, run)
    problems = []
    for step in reversed(steps):
        progress.info("fetching step-%d from %s", step, store.url)
        temporary = temporary_sibling(run.checkpoint(step))
        temporary.mkdir()
        try:
            _fetch_files(store, step, temporary)
            damages = verify_checkpoint(temporary).damages
            if not damages:
                commit(temporary, run.checkpoint(step))
                return step
            problems.append(f"step-{step}: {damages[0].file} {damages[0].what}")
        except DamagedCheckpoint as error:
            problems.append(f"step-{step}: {error}")
        except CheckpointError:
            remove(temporary)
            raise
        remove(temporary)
        logger.warning("%s: %s: trying the next older one", store.url, problems[-1])
    raise DamagedCheckpoint(f"no checkpoint at {store.url} is intact:\n" + "\n".join(problems))


def _fetch_manifest(store: RemoteStore, run: Run) -> None:
    """Fetch the manifest of the run, before its checkpoint, without which the folder would be no run."""
    data = store.read_run_file(run.manifest.name)
    if data is not None and not run.manifest.exists():
        temporary = temporary_sibling(run.manifest)
        write_durably(temporary, data.decode("utf-8"))
        temporary.rename(run.manifest)


def _fetch_files(store: RemoteStore, step: int, folder: Path) -> None:
    """Download the files that the index of `step` names, durably."""
    store.get(step, FILE_NAME, folder / FILE_NAME)
    index = read_index(folder)
    names = [FILE_NAME]
    for rank, own in enumerate(index.ranks):
        names += [manifest_name(rank)] if index.manifests is None else []
        names += [data_name(rank)] if index.manifests is None or own.num_bytes else []
    for name in names:
        if name != FILE_NAME:
            if store.size(step, name) is None:
                raise DamagedCheckpoint(f"{name} is missing")
            store.get(step, name, folder / name)
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
