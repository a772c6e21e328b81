"""[replicas]: whether replicas of the model are lost, replaced and joined one by one while the others train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Problem, shown_value

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job


class ReplicasSection(Frozen):
    """How replicas of the model (layout.dp_replicate of them) depend on each other."""

    independent: bool = False
    """Whether each replica starts, fails and is replaced by itself while the others train; false: all start again."""
    minimum: PositiveInt = 1
    """Fewest replicas that train; with fewer left, they wait run.timeout_s for others, then end with exit code 75."""
    address: str = "127.0.0.1"
    """Where replicas of other machines reach the coordinator; the default lets in this machine's only."""


_KEY = "replicas.independent"
_Rules = Iterator[tuple[str, Any, bool, Any, str]]
"""Of (key, its value, whether that is ruled out, a value that is not, why)."""


def replicas_problems(job: Job) -> Iterator[Problem]:
    """Yield what of a job does not go with independent replicas."""
    if not job.replicas.independent:
        return
    for key, value, is_ruled_out, default, why in _rules(job):
        if is_ruled_out:
            message = f"{key} = {shown_value(value)}: {why}, so {_KEY} = true refuses it"
            yield Problem(message, [{key: default}, {_KEY: False}])


def _rules(job: Job) -> _Rules:
    layout, optimizer = job.layout, job.optimizer
    own = "its graph sums gradients over replicas itself, and cannot drop one"
    yield "layout.compile", layout.compile, layout.compile == "model", True, own
    yield "layout.cuda_graphs", layout.cuda_graphs, layout.cuda_graphs, False, own
    early = "parameters change before it is known whether all replicas have summed the step"
    yield "optimizer.in_backward", optimizer.in_backward, optimizer.in_backward, False, early
    experts = "the loads of experts are not summed over independent replicas yet"
    yield "layout.ep", layout.ep, layout.ep > 1, 1, experts
    float8 = job.precision.float8
    yield "precision.float8", float8, float8 != "none", "none", "its scales are not shared by independent replicas yet"
    guards, returns = job.guards, job.guards.skips_any and job.guards.max_rollbacks > 0
    alone = "replicas do not return to an earlier checkpoint together yet"
    yield "guards.max_rollbacks", guards.max_rollbacks, returns, 0, alone
    compared, twice = guards.replica_check_interval, guards.recompute_interval
    unequal = "only one replica would return to a checkpoint"
    yield "guards.replica_check_interval", compared, compared > 0, 0, unequal
    yield "guards.recompute_interval", twice, twice > 0, 0, unequal
    interval = job.checkpoint.memory_interval
    yield "checkpoint.memory_interval", interval, interval > 0, 0, "a replica takes its state from the others' memory"
    few = f"there are only layout.dp_replicate = {layout.dp_replicate} of them"
    minimum = job.replicas.minimum
    yield "replicas.minimum", minimum, minimum > layout.dp_replicate, layout.dp_replicate, few


def layout_of_group(job: Job, num_ranks: int) -> Layout:
    """Return the layout of ranks that share one process group: all of them, or those of an independent replica."""
    layout = job.layout.replace(dp_replicate=1) if job.replicas.independent else job.layout
    return layout.resolve(num_ranks)
