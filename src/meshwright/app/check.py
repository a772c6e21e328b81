"""check: what is wrong with a job, or what it would do; starts nothing and needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from meshwright.app.expectation import estimate, rate_problems, search_problem
from meshwright.app.job_problems import check_job
from meshwright.app.results.result import Result
from meshwright.app.summary import summary
from meshwright.config.load import ResolvedJob, inspect_job, raise_problems
from meshwright.errors import InfeasibleLayout
from meshwright.spec.problem import distinct


@dataclass(frozen=True, repr=False)
class Checked(Result):
    """A valid job."""

    lines: tuple[tuple[str, str], ...]
    """Label and text of each thing to know: the model, the batch, the layout, the step and memory expected."""
    misfit: InfeasibleLayout | None
    """Why the layout does not fit the devices of the job's cluster; None where it does, or that is unknown."""

    def _summary(self) -> str:
        return f"Check {dict(self.lines)['job']}{'' if self.misfit is None else ', does not fit'}"

    def _page(self) -> Iterator[Text]:
        # Not wrapped: lines of a log are searched.
        yield Text("\n".join(f"{label:<8}{text}" for label, text in self.lines))

    def _rows(self) -> list[dict[str, Any]]:
        return [{"label": label, "text": text} for label, text in self.lines]


def check(
    job: Path | str | ResolvedJob,
    *overrides: str,
    ranks: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Checked:
    """Return what the job would do on `ranks` ranks (None: as the layout says); `resume` and `overwrite` as for train.

    Raises one ConfigError with all that is wrong, and InfeasibleLayout where the planner is to choose the layout and
    none fits.
    """
    path = job.path if isinstance(job, ResolvedJob) else Path(job)
    inspection = inspect_job(path, (*job.overrides, *overrides) if isinstance(job, ResolvedJob) else overrides)
    resolved, unknown = inspection.resolved, inspection.unknown
    layout = resolved.job.layout
    if ranks is None and layout.is_open and layout.num_ranks > 1:  # one rank is no layout: the planner is to choose it
        ranks = resolved.job.cluster.num_devices
    found = check_job(resolved, ranks, resume=resume, overwrite=overwrite, unknown=unknown)
    found += [resolved.located(text) for text in rate_problems(resolved.job)]
    problems = [*inspection.problems, *(text for text in found if not inspection.is_about_wrong(text))]
    raise_problems(resolved.path, distinct(problems))
    if (unsearchable := search_problem(resolved, ranks)) is not None:
        raise unsearchable
    expected, misfit = estimate(resolved, ranks)
    return Checked((*summary(resolved, ranks), *expected), misfit)
