"""What a job's rules say once one of their suggestions is followed."""

from __future__ import annotations

from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import layout_problems, with_fix
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Fix, Problem


def problems_left(job: Job, layout: Layout, fix: Fix) -> list[Problem]:
    """Return the problems of a layout for a job, both with the values that `fix` gives their keys."""
    changed = with_fix(job, {key: value for key, value in fix.items() if not key.startswith("layout.")})
    keys = {key.removeprefix("layout."): value for key, value in fix.items() if key.startswith("layout.")}
    return layout_problems(changed, layout.replace(**keys))
