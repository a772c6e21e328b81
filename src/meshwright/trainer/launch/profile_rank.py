"""profile_rank: what each rank of `meshwright profile` does: steps of the job, the last of them profiled."""

import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.profiler.window import ProfilerWindow
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.compile_cache import load_cache
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.loop import take_step
from meshwright.trainer.run.peak_flops import PeakFlops
from meshwright.trainer.step.training import Training


class ProfileOrder(NamedTuple):
    """What every rank profiles."""

    job: str
    """The resolved job as JSON."""
    module_dir: str
    """The folder of modules that the job names."""
    run_dir: str
    """The job's own run folder, of which only a compile cache is read."""
    folder: str
    """Where the Chrome traces go."""
    num_threads: int
    warm_up: int
    """Steps that are neither timed nor profiled."""
    num_timed: int
    """Steps that are timed without the profiler."""
    num_profiled: int

    @property
    def first_profiled(self) -> int:
        """Return the first profiled step, from 1."""
        return self.warm_up + self.num_timed + 1

    @property
    def last_step(self) -> int:
        """Return the last step."""
        return self.warm_up + self.num_timed + self.num_profiled


def profile_rank(order: ProfileOrder) -> list[float]:
    """Return the seconds of the timed steps on this rank, and write its trace of the profiled ones; a collective.

    No checkpoint is read or written: weights start as in step 1 of the job.
    """
    # As `meshwright train` has them.
    torch.set_num_threads(order.num_threads)
    silence_known_warnings()
    # Code of the job's own is found in its folder.
    sys.path.insert(0, order.module_dir)
    job = Job.from_json(order.job)
    ranks = Ranks.joined(job.run)
    if job.layout.compiles_anything:
        load_cache(job, Run(order.run_dir), ranks)
    training, speed, steps_s = Training.build(job, ranks), PeakFlops(None, None, None), []
    window = ProfilerWindow(Path(order.folder), ranks.rank, order.first_profiled, order.num_profiled, with_memory=False)
    with window:
        for step in range(1, order.last_step + 1):
            window.before_step(step)
            started_s = time.perf_counter()
            take_step(training, step, speed, None)
            steps_s.append(time.perf_counter() - started_s)
            window.after_step(step)
    training.loader.close()
    return steps_s[order.warm_up : order.warm_up + order.num_timed]
