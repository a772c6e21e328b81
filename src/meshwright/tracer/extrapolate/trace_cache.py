"""TraceCache: traces of a job's ranks on disk, keyed by the job, the versions and the code that traced them.

It holds what was traced, a few ranks with a few microbatches, not what is extrapolated from it, which is faster than
reading it. Writes are atomic: a file is written under another name and renamed. The key covers everything that a step
depends on, so entries never become stale; damaged files are traced again.
"""

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
from meshwright.spec.layout.schedule.action import orders_to_csv
from meshwright.spec.layout.schedule.schedule import Schedule
from meshwright.spec.trace.trace import Trace

Part = Literal["whole", "part"]
"""Whether a rank was traced with all microbatches of its step, or with the subset for extrapolation."""

_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


class TraceCache:
    """The folder of one job's traces, which may not exist yet."""

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
        """Return the cached, undamaged traces among `ranks`."""
        found = {}
        for rank in ranks:
            file = self._file(part, rank)
            try:
                found[rank] = Trace.load(file)
            except FileNotFoundError:
                continue
            except _DAMAGED as error:
                logger.warning("cached trace %s is damaged (%s): tracing again", file, error)
        return found

    def save(self, part: Part, traces: Mapping[int, Trace]) -> None:
        """Write the traces; a failure is logged only, since they are in memory."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="partial-") as partial:
                for rank, trace in traces.items():
                    file = Path(partial) / f"{rank}.npz"
                    trace.save(file)
                    file.rename(self._file(part, rank))
        except OSError as error:
            logger.warning("traces are not cached: %s: set data.cache_dir to a writable folder", error)

    def _file(self, part: Part, rank: int) -> Path:
        return self.folder / f"{part}-rank{rank}.npz"


def _step_of(job: Job, layout: Layout, schedule: Schedule) -> list[object]:
    """Return the parts of a job that change a step."""
    sections = [job.model, job.train, job.optimizer, job.precision, layout]
    documents = [job.data.mask_documents, job.data.restarts_positions, job.data.document_tokens]
    return [*(section.to_dict() for section in sections), *documents, orders_to_csv(schedule.actions)]


def _versions() -> list[str]:
    return [importlib.metadata.version("torch"), importlib.metadata.version("numpy"), platform.python_version()]


def _own_code() -> str:
    """Return a hash of Meshwright's own source, which changes between releases of equal version."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(meshwright.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


def _code_of(source: str) -> str:
    """Return a hash of the file that defines a user's model; files that it imports are not included."""
    found = importlib.util.find_spec(source.partition(":")[0])
    if found is None or found.origin is None:
        return ""
    return hashlib.blake2b(Path(found.origin).read_bytes(), digest_size=16).hexdigest()
