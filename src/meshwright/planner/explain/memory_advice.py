"""What a rank was predicted to hold, and the one key whose change is predicted to free what an allocation missed."""

from pathlib import Path

import numpy as np

from meshwright.config.load import ResolvedJob
from meshwright.hardware.catalogue import LOCAL
from meshwright.planner.candidate import candidate_at, judge, layout_at
from meshwright.planner.explain.explain import changes, listed, neighbours
from meshwright.planner.explain.managed_states import MANAGED_STATES, with_managed_states
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import SHORT_PIPELINE
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import memory_of_ranks, price
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Candidate
from meshwright.spec.step.estimate import MemoryUse


class SmallerLayout(Frozen):
    """A change of one key of a job, as the planner predicts it."""

    change: str
    """As a job would write it in `section`."""
    section: str = "layout"
    memory_bytes: float
    """Of the fullest rank's device, with the allocator's gaps and the context."""
    step_s: float


class MemoryAdvice(Frozen):
    """The prediction for one pipeline rank, and what takes less."""

    rank: MemoryUse
    memory_bytes: float
    """Of the fullest rank's device, with the allocator's gaps and the context."""
    step_s: float
    smaller: SmallerLayout | None = None
    """The fastest change that frees enough; None where no single key does."""


def memory_advice(job: Job, layout: Layout, pp_rank: int, missing_bytes: float, device_type: str) -> MemoryAdvice:
    """Return the prediction for pipeline rank `pp_rank` of a job, and the key whose change frees `missing_bytes`.

    Ranks on "cpu" are this machine's processors, whatever cluster the job names. Raises ConfigError or
    UnsupportedError for what the planner cannot price.
    """
    cluster = job.cluster.replace(num_devices=layout.num_ranks)
    cluster = cluster.replace(name=LOCAL, device=None) if device_type == "cpu" else cluster
    resolved = ResolvedJob(job.replace(cluster=cluster), {}, Path("job.toml"))
    request = plan_request(resolved, Options(takes_example=True))
    now = judge(layout, request)
    memory_bytes = now.estimate.memory.needed_bytes
    most_bytes = memory_bytes - max(missing_bytes, memory_bytes - request.cluster.device.usable_memory_bytes, 1.0)
    changes_that_free = (_smaller(now, request, most_bytes), _managed(layout, request, most_bytes))
    found = [one for one in changes_that_free if one is not None]
    return MemoryAdvice(
        rank=memory_of_ranks(layout, request)[pp_rank],
        memory_bytes=now.estimate.memory.device_bytes,
        step_s=now.step_s,
        smaller=min(found, key=lambda one: one.step_s, default=None),
    )


def _smaller(now: Candidate, request: PlanRequest, most_bytes: float) -> SmallerLayout | None:
    priced = price(neighbours(now.layout, request, menu_of(request)), request, only_fitting=False)
    for row in np.argsort(priced.total_s, kind="stable").tolist():
        change = changes(now.layout, layout_at(priced.layouts, row, request))
        # What all blocks save takes the place of what each saves: two keys, and one change.
        is_one = len(change.keys() - {"activation_checkpoint_blocks"}) == 1
        if is_one and priced.memory.needed_bytes[row] <= most_bytes:
            found = candidate_at(priced, row, request, SHORT_PIPELINE)
            taken = found.estimate.memory.device_bytes
            return SmallerLayout(change=listed(change), memory_bytes=taken, step_s=found.step_s)
    return None


def _managed(layout: Layout, request: PlanRequest, most_bytes: float) -> SmallerLayout | None:
    """Return what optimizer states in managed memory take, if that frees enough."""
    managed = with_managed_states(request)
    found = None if managed is None else judge(layout, managed)
    if found is None or found.estimate.memory.needed_bytes > most_bytes:
        return None
    section, _, change = MANAGED_STATES.partition(".")
    taken = found.estimate.memory.device_bytes
    return SmallerLayout(change=change, section=section, memory_bytes=taken, step_s=found.step_s)
