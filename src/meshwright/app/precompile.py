"""precompile: compile a job's blocks before it trains, into a folder that its ranks read as they start."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.cuda import with_local_gpu
from meshwright.app.job.compile_choice import settle_for_training
from meshwright.app.job.job_problems import layout_problems_of, run_folder
from meshwright.app.job.jobs import as_job
from meshwright.app.job.settle_float8 import settle_float8_for_training
from meshwright.app.results.result import Result
from meshwright.app.train import num_ranks_of
from meshwright.config.load import raise_problems
from meshwright.cost.compile_time import shared_graphs
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.log import logger, progress
from meshwright.units import counted, format_duration


@dataclass(frozen=True, repr=False)
class CompiledJob(Result):
    """What `meshwright precompile` wrote. Data frame: one row."""

    folder: Path
    num_graphs: int
    """Graphs that the rank with most of them compiled."""
    wall_s: float
    """Seconds that the slowest rank spent in the compiler."""
    shared: str
    """Which graphs count once, as a note on their number; "" where no blocks are compiled one by one."""
    saved: str
    """Folder, number of artifacts and size, in words."""

    def to_json(self) -> str:
        """Return what `meshwright precompile --json` prints."""
        return json.dumps(self._rows()[0], indent=2)

    def _summary(self) -> str:
        graphs = f"{counted(self.num_graphs, 'graph')}{self.shared}"
        return f"Compiled {graphs} in {format_duration(self.wall_s)}; {self.saved}"

    def _page(self) -> Iterator[RenderableType]:
        yield Text(self._summary())

    def _rows(self) -> list[dict[str, Any]]:
        return [{"folder": str(self.folder), "num_graphs": self.num_graphs, "compile_s": self.wall_s}]


@checked
def precompile(
    job: JobSource, *overrides: str, ranks: Positive | None = None, timeout_s: float = 3600.0
) -> CompiledJob:
    """Compile the blocks of `job` on local ranks and save the code to layout.compile_cache, or to the run folder.

    The ranks, as many as train, run one step with tokens of zero. Raises ConfigError for a job that compiles nothing.
    """
    resolved = as_job(job, overrides, ranks)
    sys.path.insert(0, str(resolved.folder))
    num_ranks = num_ranks_of(resolved.job, ranks)
    raise_problems(resolved.path, layout_problems_of(resolved, num_ranks))
    resolved = settle_float8_for_training(settle_for_training(with_local_gpu(resolved), num_ranks))
    if not resolved.job.layout.compiles_anything or resolved.job.layout.compile_backend != "inductor":
        raise ConfigError(
            "precompile: the job compiles nothing that can be saved: set layout.compile to true and "
            'layout.compile_backend to "inductor"'
        )
    from meshwright.trainer.launch.compile_cache import cache_folder
    from meshwright.trainer.launch.local.local_rank_group import threads_of_rank
    from meshwright.trainer.launch.local.local_ranks import RanksFailed, run_ranks
    from meshwright.trainer.launch.precompile_rank import precompile_rank
    from meshwright.trainer.launch.ranks import choose_device_type, require_devices

    require_devices(resolved.job.run, num_ranks)
    folder = cache_folder(resolved.job, run_folder(resolved)).resolve()
    progress.info("compiling on %s", counted(num_ranks, "rank"))
    arguments = (resolved.job.to_json(), str(resolved.folder), str(folder), threads_of_rank(resolved.job, num_ranks))
    try:
        found = run_ranks(
            precompile_rank,
            num_ranks,
            *arguments,
            timeout_s=timeout_s,
            device=choose_device_type(resolved.job.run),
        )
    except RanksFailed as failure:
        logger.error("%s", failure)
        raise MeshwrightError(f"precompile failed: {failure.reason}") from None
    shared, wall_s = shared_graphs(resolved.job.layout), max(one.wall_s for one in found)
    return CompiledJob(folder, max(one.num_graphs for one in found), wall_s, shared, found[0].saved)
