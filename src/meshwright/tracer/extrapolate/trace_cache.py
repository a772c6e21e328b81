"""TraceCache: what ranks of a job were traced to do, found again on disk by the job and by the code that traced them.

Kept is what was traced, a few ranks with a few microbatches, and not what is told from it, which takes less time than
to read it. A reader sees a rank's whole trace or none: it is written under another name and renamed. The key is
everything that a step depends on, so that nothing in a folder grows old; what is damaged is traced again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

import meshwright
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import Schedule
from meshwright.spec.layout.schedule.schedule_csv import orders_to_csv
from meshwright.spec.trace.trace import Trace

Part = Literal["whole", "part"]
"""Whether a rank was traced with all microbatches of its step, or with those that tell the others."""

_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


class TraceCache:
    """The folder of one job's traces, there already or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, job: Job, layout: Layout, schedule: Schedule, *how: str) -> Self:
        """Return the cache of a job traced in some way, below data.cache_dir."""
        parts = [*how, _step_of(job, layout, schedule), _versions(), _own_code()]
        if is_object_source(job.model.source):
            parts.append(_code_of(job.model.source))
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        return cls(Path(os.path.expanduser(job.data.cache_dir)) / f"traces-{key}")

    def load(self, part: Part, ranks: Iterable[int]) -> dict[int, Trace]:
        """Return the traces of those of `ranks` that are there and undamaged."""
        found = {}
        for rank in ranks:
            file = self._file(part, rank)
            try:
                found[rank] = Trace.load(file)
            except FileNotFoundError:
                continue
            except _DAMAGED as error:
                logger.warning("the trace in %s is damaged (%s) and is made again", file, error)
        return found

    def save(self, part: Part, traces: Mapping[int, Trace]) -> None:
        """Write the traces; where that is impossible, say so and go on: they are in memory."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="partial-") as partial:
                for rank, trace in traces.items():
                    file = Path(partial) / f"{rank}.npz"
                    trace.save(file)
                    file.rename(self._file(part, rank))
        except OSError as error:
            logger.warning("the traces are not kept: %s; data.cache_dir names another folder", error)

    def _file(self, part: Part, rank: int) -> Path:
        return self.folder / f"{part}-rank{rank}.npz"


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
