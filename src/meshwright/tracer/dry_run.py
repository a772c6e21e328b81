"""trace_job(): what all ranks of a job do in one step, from as few traced ranks as can stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from meshwright.config.load import load_job
from meshwright.errors import ConfigError
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.traces import Traces
from meshwright.tracer.trace import DeviceType, trace

_BUILD = "meshwright.trainer.build_step:build_step"
_NUM_PROCESSES = 2


def trace_job(
    job_file: str, overrides: Sequence[str] = (), num_ranks: int | None = None, *, device: DeviceType = "simgpu"
) -> Traces:
    """Return the traces of one step of a job on `num_ranks` ranks, or on as many as it names itself.

    A rank of each pipeline rank is traced, the first, whose shards are the largest. Raises ConfigError for a job that
    names no number of ranks, and UnsupportedError with what the program said where a rank cannot be traced.
    """
    layout = layout_of(load_job(job_file, overrides).job, num_ranks)
    size = layout.num_ranks // layout.pp
    firsts = range(0, layout.num_ranks, size)
    with ThreadPoolExecutor(_NUM_PROCESSES) as pool:
        found = pool.map(lambda rank: trace(_BUILD, rank, layout.num_ranks, [job_file, *overrides], device), firsts)
        traces = dict(zip(firsts, found, strict=True))
    return Traces(layout.num_ranks, traces, np.repeat(np.array(firsts, np.int64), size))


def layout_of(job: Job, num_ranks: int | None) -> Layout:
    """Return the concrete layout of a job on `num_ranks` ranks, or cluster.num_devices, or what its degrees come to."""
    if job.layout.search:
        raise ConfigError(
            "layout.search = true leaves the layout open, and a trace is of one: "
            "write down what `meshwright plan` chooses, or set layout.search to false"
        )
    found = num_ranks or job.cluster.num_devices
    if found is None and job.layout.rest_axis is not None:
        raise ConfigError(
            f"layout.{job.layout.rest_axis} = -1 takes the rest of the ranks, but nobody said how many there are: "
            "set cluster.num_devices, or give the number of ranks"
        )
    return job.layout.resolve(found or job.layout.num_fixed_ranks)
