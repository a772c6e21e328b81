"""Traces on disk, found again by the job and by the code that made them.

A reader sees all of a job's traces or none: they are written into a folder of another name, which is then renamed. The
key is everything that a step depends on, so that nothing in a folder grows old; what is damaged is traced again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Self

import numpy as np

import meshwright
from meshwright.log import logger
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.schedule import Schedule
from meshwright.spec.schedule_csv import orders_to_csv
from meshwright.spec.trace import Trace
from meshwright.spec.traces import Traces
from meshwright.spec.user_object import is_object_source
from meshwright.tracer.job_steps import JobSteps

_INDEX = "classes.npz"
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


class TraceCache:
    """The folder of one job's traces, there already or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, steps: JobSteps, *how: str) -> Self:
        """Return the cache of a job traced in some way, below data.cache_dir."""
        parts = [*how, _step_of(steps.job, steps.layout, steps.schedule), _versions(), _own_code()]
        if is_object_source(steps.job.model.source):
            parts.append(_code_of(steps.job.model.source))
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        return cls(Path(os.path.expanduser(steps.job.data.cache_dir)) / f"traces-{key}")

    def load(self) -> Traces | None:
        """Return the traces, or None if they are missing or damaged."""
        if not self.folder.is_dir():
            return None
        try:
            with np.load(self.folder / _INDEX, allow_pickle=False) as arrays:
                class_of_rank = arrays["class_of_rank"]
            traces = {int(rank): Trace.load(self._file(self.folder, rank)) for rank in np.unique(class_of_rank)}
            return Traces(len(class_of_rank), traces, class_of_rank)
        except _DAMAGED as error:
            logger.warning("the traces in %s are damaged (%s) and are made again", self.folder, error)
            return None

    def save(self, traces: Traces) -> None:
        """Write the traces; where that is impossible, say so and go on: they are in memory."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix="traces-", suffix=".partial") as made:
                partial = Path(made) / "traces"
                partial.mkdir()
                np.savez_compressed(partial / _INDEX, class_of_rank=traces.class_of_rank)
                for rank, trace in traces.traces.items():
                    trace.save(self._file(partial, rank))
                if self.folder.exists():
                    shutil.rmtree(self.folder)
                partial.rename(self.folder)
        except OSError as error:
            logger.warning("the traces are not kept: %s; data.cache_dir names another folder", error)

    @staticmethod
    def _file(folder: Path, rank: int) -> Path:
        return folder / f"rank{rank}.npz"


def _step_of(job: Job, layout: Layout, schedule: Schedule) -> list[object]:
    """Return what of a job changes a step."""
    sections = [job.model, job.train, job.optimizer, job.precision, layout]
    return [*(section.to_dict() for section in sections), job.data.mask_documents, orders_to_csv(schedule.actions)]


def _versions() -> list[str]:
    return [importlib.metadata.version("torch"), importlib.metadata.version("numpy"), platform.python_version()]


def _own_code() -> str:
    """Return a hash of Meshwright's own source: between releases its version does not tell what it does."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(meshwright.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


def _code_of(source: str) -> str:
    """Return a hash of the file that a model of the user's own is in; other files that it imports are not seen."""
    found = importlib.util.find_spec(source.partition(":")[0])
    if found is None or found.origin is None:
        return ""
    return hashlib.blake2b(Path(found.origin).read_bytes(), digest_size=16).hexdigest()
