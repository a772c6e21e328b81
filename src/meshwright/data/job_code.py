"""Errors of the code that a job names in model.source and data.source, distinguished from our own."""

import sys
import traceback
from types import TracebackType

from meshwright.errors import MeshwrightError
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source

_READERS = ("meshwright.data.user_data", "meshwright.data.streams.sample_stream")
"""Modules that call a user's data, by name: importing the second imports torch, which data commands do not need."""


def job_code_error(job: Job, error: Exception, advice: str) -> MeshwrightError | None:
    """Return the one line that says where the job's own code raised `error`, having shown its traceback on stderr.

    None where the error did not pass through the modules that model.source and data.source name.
    """
    found = first_frame_of_job(job, error)
    if found is None:
        return None
    key, source, start = found
    traceback.print_exception(type(error), error, start)
    place = traceback.extract_tb(start)[0]
    # What the system refused, such as space, is not the code's fault.
    what = str(error) if isinstance(error, OSError) else type(error).__name__
    return MeshwrightError(
        f"{key} = {source!r}: {what} came out of the job's own code, {place.filename}:{place.lineno} "
        f"in {place.name}, shown above: {advice}"
    )


def first_frame_of_job(job: Job, error: Exception) -> tuple[str, str, TracebackType] | None:
    """Return key, value and first frame of the job's own code that `error` passed through; None where it did not."""
    model, data = ("model.source", job.model.source), ("data.source", job.data.source)
    if is_object_source(data[1]) and (called := _called_by_readers(error.__traceback__)) is not None:
        # Its class may be imported from another module.
        return *data, _first_frame_in(data[1], called) or called
    for key, source in (model, data):
        if (start := _first_frame_in(source, error.__traceback__)) is not None:
            return key, source, start
    return None


def _called_by_readers(trace: TracebackType | None) -> TracebackType | None:
    """Return the frame that the code that reads samples has called; None where the error came not through it."""
    called = None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in _READERS:
            called = trace.tb_next
        trace = trace.tb_next
    return called


def _first_frame_in(source: str, trace: TracebackType | None) -> TracebackType | None:
    if not is_object_source(source):
        return None
    file = getattr(sys.modules.get(source.partition(":")[0]), "__file__", None)
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace
