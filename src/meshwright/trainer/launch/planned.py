"""The layout of a job that leaves it to the planner, or what its blocks save: settled once, before any rank starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError
from meshwright.planner.ask import Options, question_of
from meshwright.planner.plan import make_plan
from meshwright.planner.question import Question
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.noun import Noun
from meshwright.spec.run.plan import Candidate
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.launch.recompute_budget import settle_checkpoints
from meshwright.trainer.run.run_folder import read_manifest


class Planned(Noun):
    """What the launcher tells each rank in place of what the job leaves open."""

    layout: Layout
    """The layout that all ranks take."""
    estimate: Estimate | None = None
    """What the planner expects of it; None where a run that is resumed has none."""

    def job(self, job: Job) -> Job:
        """Return the job with the layout set."""
        return job.replace(layout=LayoutRequest.model_validate(self.layout.model_dump()))


Choose = Callable[[ResolvedJob, Question], Candidate]
"""What chooses a job's layout."""


def by_formula(_: ResolvedJob, question: Question) -> Candidate:
    """Return the planner's pick."""
    return make_plan(question, min_scored=0).pick


def plan_layout(
    resolved: ResolvedJob, run: Run, num_ranks: int | None, *, resume: bool, choose: Choose = by_formula
) -> Planned:
    """Return the layout of a job that searches for one: that of the run which is resumed, or else what `choose` picks.

    `num_ranks` are the ranks asked for; None takes the cluster's devices. Raises ConfigError for a job that cannot be
    planned, and for other ranks than the run which is resumed has.
    """
    manifest = read_manifest(run) if resume else None
    if manifest is not None and manifest.attempts:
        layout = manifest.attempts[-1].layout
        if num_ranks not in (None, layout.num_ranks):
            raise ConfigError(
                f"--ranks {num_ranks}: the run in {run.folder} has a layout of {layout.num_ranks} ranks, which a "
                "resume keeps: leave --ranks out, or set layout.search to false and the degrees by hand"
            )
        return Planned(layout=layout, estimate=manifest.estimate)
    question = question_of(resolved, Options())
    if num_ranks is not None:
        question = question.with_setting(cluster=question.cluster.with_num_devices(num_ranks))
    pick = choose(resolved, question)
    return Planned(layout=pick.layout, estimate=pick.estimate)


def budget_layout(
    resolved: ResolvedJob, run: Run, num_ranks: int, overrides: Sequence[str], *, resume: bool
) -> Planned:
    """Return the layout of a job with activation_checkpoint = "auto": what its blocks save in the run that is resumed
    by as many ranks, or else what a traced step has memory for; raises InfeasibleLayout where nothing fits.
    """
    manifest = read_manifest(run) if resume else None
    if manifest is not None and manifest.attempts and manifest.attempts[-1].layout.num_ranks == num_ranks:
        return Planned(layout=manifest.attempts[-1].layout)
    return Planned(layout=settle_checkpoints(resolved, num_ranks, overrides))
