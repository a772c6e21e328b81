"""What a job reads from files: looked for in the job file's folder, then in the working directory, as modules are."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.hf.hub_cache import is_hub_id
from meshwright.spec.model.presets import PRESETS

_STDLIB = DataSection().source
_KEYS = (
    ("model", "source"),
    ("model", "initial_weights"),
    ("adapter", "initial"),
    ("data", "source"),
    ("data", "tokenizer"),
    ("data", "chat_template"),
    ("layout", "schedule"),
)
"""Keys that may name a file or folder to read; their defaults name something else."""


def with_paths_of(folder: Path, job: Job, is_in_file: Callable[[str], bool]) -> Job:
    """Return the job with each relative path of its file that lies in the file's `folder` joined to it.

    Paths from the command line are left as they are: they are relative to the working directory.
    """
    if folder.resolve() == Path.cwd():
        return job
    found = {(section, name): path for section, name, path in relative_paths(job) if is_in_file(f"{section}.{name}")}
    job = _with_mixture_paths(job, lambda path: str(folder / path)) if is_in_file("data.mixture") else job
    return _with_values(job, {key: str(folder / path) for key, path in found.items() if _exists(str(folder / path))})


def with_absolute_paths(job: Job) -> Job:
    """Return the job with absolute paths in place of relative ones that exist, so that it holds in any folder."""
    found = {(section, name): path for section, name, path in relative_paths(job) if _exists(path)}
    job = _with_mixture_paths(job, os.path.abspath)
    return _with_values(job, {key: os.path.abspath(path) for key, path in found.items()})


def relative_paths(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and value of every relative path to read, whether there is such a file or not."""
    for section, name in _KEYS:
        part = getattr(job, section)
        value = getattr(part, name)
        if not value or value == type(part).model_fields[name].default or value in PRESETS or is_object_source(value):
            continue
        if not os.path.isabs(os.path.expanduser(value)) and (section != "layout" or value.endswith(".csv")):
            yield section, name, value


def searched(folder: Path, job: Job, path: Sequence[str]) -> str:
    """Return where the file that the key at `path` names was looked for, if it is in neither place; else ""."""
    values = {(section, name): value for section, name, value in relative_paths(job)}
    value = values.get((path[0], path[-1]), "")
    is_name = not value or is_hub_id(value) or (path[0] == "model" and path[-1] == "source" and "/" not in value)
    if is_name or os.path.exists(value) or folder.resolve() == Path.cwd():
        return ""
    return f" (looked for in the job file's folder {folder.resolve()}, then in the working directory {Path.cwd()})"


def _with_mixture_paths(job: Job, join: Callable[[str], str]) -> Job:
    """Return the job with the sources of [[data.mixture]] joined where that is a file."""
    if not job.data.mixture:
        return job
    joined = [
        table.replace(source=join(table.source))
        if table.source != _STDLIB
        and not os.path.isabs(os.path.expanduser(table.source))
        and _exists(join(table.source))
        else table
        for table in job.data.mixture
    ]
    return job.replace(data=job.data.replace(mixture=joined))


def _exists(source: str) -> bool:
    """Return whether a source is there: a file, a folder, or the prefix of Megatron's two files."""
    return os.path.exists(source) or os.path.exists(f"{source}.idx")


def _with_values(job: Job, values: dict[tuple[str, str], str]) -> Job:
    for (section, name), value in values.items():
        # A copy, in which a dp_shard that was left out still is.
        job = job.replace(**{section: getattr(job, section).model_copy(update={name: value})})
    return job
