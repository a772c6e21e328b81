"""checkpoint.remote before ranks start: whether the URL can be used, and the newest checkpoint fetched from it."""

import os

from meshwright.app.progress import elapsed
from meshwright.checkpoint.remote.fetch import fetch_newest
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.log import progress
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import hold
from meshwright.units import counted


def remote_problems(job: Job, *, resume: bool) -> list[str]:
    """Return why checkpoint.remote cannot be used; a small file is written there and removed.

    A new run needs a URL without checkpoints: two runs in one would remove each other's.
    """
    url = job.checkpoint.remote
    if url is None:
        return []
    try:
        store = RemoteStore(url)
        if "memory" in store.protocols:
            return [f"checkpoint.remote = {url!r} is the memory of one process, gone when it ends: name another URL"]
        store.require_writable()
        steps = [] if resume else store.steps()
    except MeshwrightError as error:
        return [str(error)]
    if steps:
        held = f"{counted(len(steps), 'checkpoint')}, the newest after step {steps[-1]}"
        return [
            f"checkpoint.remote = {url!r} already holds {held}: continue that run with --resume, or set another URL"
        ]
    return []


def fetch_if_empty(job: Job, run: Run, *, resume: bool) -> None:
    """Fetch the newest checkpoint of checkpoint.remote if `resume` and `run` has none; nothing happens without one.

    Raises ConfigError for a URL that cannot be used, DamagedCheckpoint where every checkpoint there is damaged.
    """
    url = job.checkpoint.remote
    if not resume or url is None or run.checkpoint_steps():
        return
    if problems := remote_problems(job, resume=True):
        raise ConfigError("\n".join(problems))
    store = RemoteStore(url)
    if not store.steps():
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    descriptor = hold(run)
    try:
        with elapsed(f"fetching the newest checkpoint from {url}"):
            step = fetch_newest(store, run)
        progress.info("fetched the checkpoint after step %s from %s", step, url)
    finally:
        os.close(descriptor)
