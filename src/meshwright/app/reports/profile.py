"""profile: a few steps of a job under torch.profiler, and where their time goes, from the floor up."""

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from meshwright.app.arguments import JobSource, NotNegative, Positive, checked
from meshwright.app.job.job_problems import run_folder
from meshwright.app.job.jobs import as_job
from meshwright.app.reports.run_waterfall import MeasuredStep, waterfall_of
from meshwright.app.results.result import PlottedResult
from meshwright.app.train import settled
from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.log import logger, progress
from meshwright.pages.figures.run_figures import measured_waterfall_figure
from meshwright.pages.tables.waterfall_lines import waterfall_page
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run import Run, how_to_profile
from meshwright.spec.step.step_waterfall import Waterfall
from meshwright.units import counted, format_duration

_NAN = float("nan")


@dataclass(frozen=True, repr=False)
class ProfileResult(PlottedResult):
    """A profiled step by cause. Data frame: a row for each cause. Plot: waterfall."""

    job: str
    """The job file, as it was named."""
    layout: Layout
    """The concrete layout that was profiled."""
    waterfall: Waterfall
    folder: Path | None = None
    """Where the Chrome traces are; None where they were not kept."""

    def to_json(self) -> str:
        """Return what `meshwright profile --json` prints."""
        about = {"job": self.job, "layout": self.layout.to_dict(), "waterfall": self.waterfall.to_dict()}
        return json.dumps(about | ({} if self.folder is None else {"folder": str(self.folder)}), indent=2)

    def _summary(self) -> str:
        found = self.waterfall
        text = f"Profile of {self.job}: {layout_text(self.layout.effective) or 'one rank'}"
        text = f"{text}, {format_duration(found.measured_s)}/step measured"
        return text if found.predicted is None else f"{text}, {format_duration(found.predicted.total_s)} predicted"

    def _page(self) -> Iterator[RenderableType]:
        ranks = counted(self.layout.num_ranks, "rank")
        yield f"[bold]{self.job}[/], {ranks}: {layout_text(self.layout.effective) or 'one rank'}"
        yield ""
        yield from waterfall_page(self.waterfall, how_to_profile())
        if self.folder is not None:
            yield f"Traces for ui.perfetto.dev and `meshwright compare`: {self.folder}"

    def _rows(self) -> list[dict[str, Any]]:
        columns = {who: f"{who}_s" for who in self.waterfall.columns}
        return [
            {"cause": row.words, **{columns[who]: value for who, value in row.by_column_s.items()}}
            for row in self.waterfall.rows
        ]

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        return {"waterfall": partial(measured_waterfall_figure, self.waterfall)}


@checked
def profile(
    job: JobSource,
    *overrides: str,
    ranks: Positive | None = None,
    steps: Positive = 3,
    warm_up: NotNegative = 3,
    out: Path | str | None = None,
    timeout_s: float = 3600.0,
) -> ProfileResult:
    """Train a few steps of `job` on local ranks and return where the time of a step goes, predicted and measured.

    After `warm_up` steps as many are timed without the profiler as are profiled, `steps`; the profiled step of median
    duration is taken apart. Weights start as in step 1; nothing is written to the job's run folder. `out` is a new
    folder that keeps the traces. Raises ConfigError for a job that cannot train, before any process starts.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "profile starts its own ranks, but the environment has RANK, as torchrun sets it: unset RANK, or set "
            "run.profile_start in the job that torchrun trains, and read its run with `meshwright report`"
        )
    own = as_job(job, overrides)
    kept = None if out is None else _new_folder(Path(out))
    if any(override.partition("=")[0].strip() == "run.dir" for override in overrides):
        logger.warning("profile writes nothing to run.dir: --out FOLDER keeps its traces")
    with tempfile.TemporaryDirectory(prefix="meshwright-profile-") as folder:
        resolved = as_job(job, (*overrides, f"run.dir={folder}"))
        # A module that the job names may lie next to the job file.
        sys.path.insert(0, str(resolved.folder))
        resolved, num_ranks, _ = settled(resolved, ranks, resume=False, overwrite=False)
        steps_s = _run_ranks(resolved, own, num_ranks, (warm_up, steps), timeout_s)
        # They took torch, which a mistake in the job should not wait for.
        from meshwright.profiler.profiled_timeline import median_step_of, profiled_files

        files = profiled_files(Path(folder))
        profiled = median_step_of(files, str(own.path))
        if kept is not None:
            shutil.copytree(Run(folder).timelines, Run(kept).timelines)
    layout = resolved.job.layout.resolve(num_ranks)
    timed = f"steps {warm_up + 1} to {warm_up + steps}" if steps > 1 else f"step {warm_up + 1}"
    measured = MeasuredStep(statistics.median(steps_s), timed, _NAN, profiled)
    return ProfileResult(str(own.path), layout, waterfall_of(resolved, layout, measured), kept)


def _run_ranks(
    resolved: ResolvedJob, own: ResolvedJob, num_ranks: int, counts: tuple[int, int], timeout_s: float
) -> list[float]:
    """Profile on `num_ranks` local ranks and return the seconds of the timed steps, on rank 0."""
    from meshwright.trainer.launch.local.local_rank_group import threads_of_rank
    from meshwright.trainer.launch.local.local_ranks import RanksFailed, run_ranks
    from meshwright.trainer.launch.profile_rank import ProfileOrder, profile_rank
    from meshwright.trainer.launch.ranks import choose_device_type

    warm_up, steps = counts
    job = resolved.job
    order = ProfileOrder(
        job=job.replace(train=job.train.replace(steps=max(job.train.steps, warm_up + 2 * steps))).to_json(),
        module_dir=str(resolved.folder),
        run_dir=str(run_folder(own).folder),
        folder=str(Run(resolved.run_dir).timelines),
        num_threads=threads_of_rank(resolved.job, num_ranks),
        warm_up=warm_up,
        num_timed=steps,
        num_profiled=steps,
    )
    progress.info(
        "profiling on %s: %s to warm up, %d timed, %d profiled",
        counted(num_ranks, "rank"),
        counted(warm_up, "step"),
        steps,
        steps,
    )
    try:
        found: list[list[float]] = run_ranks(
            profile_rank, num_ranks, order, timeout_s=timeout_s, device=choose_device_type(job.run)
        )
    except RanksFailed as failure:
        logger.error("%s", failure)
        raise MeshwrightError(f"profile failed: {failure.reason}") from None
    return found[0]


def _new_folder(folder: Path) -> Path:
    """Return `folder`; raises ConfigError where something is there already, or it cannot be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} exists and is no empty folder: name a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be made ({error.strerror}): name another folder") from None
    return folder
