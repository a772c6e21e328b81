"""Distinguishes exceptions of code that a job names from our own, and shows only the frames of that code."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from meshwright.errors import MeshwrightError
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source


def blame_job_code(job: Job, error: Exception) -> MeshwrightError | None:
    """Return the one line that says where the job's own code raised `error`, having shown its traceback on stderr.

    None where the error did not pass through the modules that model.source and data.source name.
    """
    for key, source in (("model.source", job.model.source), ("data.source", job.data.source)):
        start = _first_frame_in(source, error.__traceback__)
        if start is not None:
            traceback.print_exception(type(error), error, start)
            place = traceback.extract_tb(start)[0]
            return MeshwrightError(
                f"{key} = {source!r}: {type(error).__name__} came out of the job's own code, {place.filename}:"
                f"{place.lineno} in {place.name}, shown above: correct it, then start again with --resume"
            )
    return None


def _first_frame_in(source: str, trace: TracebackType | None) -> TracebackType | None:
    if not is_object_source(source):
        return None
    file = getattr(sys.modules.get(source.partition(":")[0]), "__file__", None)
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace
