"""What replicas that sum changes of parameters every few steps (replicas.sync_every) do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from meshwright.spec.problem import Problem, multiples_near, shown_value
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_KEY: Final = "replicas.sync_every"
_OUTER_KEYS: Final = ("outer_learning_rate", "outer_momentum", "merge_factor", "outer_dtype")
"""Keys without effect where gradients are summed in every step."""


def sync_problems(job: Job) -> Iterator[Problem]:
    """Yield what is wrong with the keys of sums every few steps, and what of the job does not go with them."""
    replicas = job.replicas
    if replicas.sync_every == 1:
        yield from _unused(job)
    elif not replicas.independent:
        what = (
            f"{_KEY} = {replicas.sync_every} is for replicas that train by themselves, and replicas.independent = false"
        )
        yield Problem(what, [{"replicas.independent": True}, {_KEY: 1}])
    yield from _fragment_problems(job)
    if replicas.trains_locally:
        yield from _interval_problems(job)
        for key, value, default, why in _refused(job):
            what = f"{key} = {shown_value(value)}: {why}, so {_KEY} = {replicas.sync_every} refuses it"
            yield Problem(what, [{key: default}, {_KEY: 1}])


def _unused(job: Job) -> Iterator[Problem]:
    defaults = type(job.replicas)()
    for name in _OUTER_KEYS:
        value, default = getattr(job.replicas, name), getattr(defaults, name)
        if value != default:
            what = f"replicas.{name} = {shown_value(value)} has no effect with {_KEY} = 1, which sums gradients"
            yield Problem(what, [{_KEY: 16}, {f"replicas.{name}": default}])


def _fragment_problems(job: Job) -> Iterator[Problem]:
    every, fragments, delay = job.replicas.sync_every, job.replicas.fragments, job.replicas.sync_delay_steps
    if every % fragments:
        what = f"{_KEY} = {every} is no multiple of replicas.fragments = {fragments}, which are summed in turn"
        fixes = [{_KEY: near} for near in multiples_near(every, fragments)]
        yield Problem(what, [*fixes, {"replicas.fragments": 1}])
    elif delay >= job.replicas.steps_between_syncs:
        between = job.replicas.steps_between_syncs
        what = (
            f"replicas.sync_delay_steps = {delay}: a sum ends before the next one begins, "
            f"{counted(between, 'step')} later ({_KEY} / replicas.fragments)"
        )
        yield Problem(what, [{"replicas.sync_delay_steps": between - 1}])


def _interval_problems(job: Job) -> Iterator[Problem]:
    between, last = job.replicas.steps_between_syncs, job.train.stop_after
    why = (
        f"a checkpoint is of a step in which replicas have summed, every {counted(between, 'step')} "
        f"({_KEY} / replicas.fragments)"
    )
    interval = job.checkpoint.interval
    if interval == "auto":
        what = 'checkpoint.interval = "auto" saves after any number of steps'
        yield Problem(f"{what}: {why}", [{"checkpoint.interval": between}])
    elif interval % between:
        what = f"checkpoint.interval = {interval} is no multiple of these steps: {why}"
        yield Problem(what, [{"checkpoint.interval": near} for near in multiples_near(interval, between)])
    if last is not None and not job.replicas.is_sync(last, job.train.steps):
        what = f"train.stop_after = {last} is no multiple of these steps: {why}"
        yield Problem(what, [{"train.stop_after": near} for near in multiples_near(last, between)])


def _refused(job: Job) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (key, its value, a value that is not ruled out, why) of keys that are."""
    if job.train.exact_elastic:
        apart = "replicas have other parameters between their sums, so a step depends on how many they are"
        yield "train.exact_elastic", True, False, apart
    own = "each replica would skip steps of its own, and return to checkpoints that others do not"
    if job.guards.not_finite != "stop":
        yield "guards.not_finite", job.guards.not_finite, "stop", own
    if job.guards.spike_deviations is not None:
        yield "guards.spike_deviations", job.guards.spike_deviations, None, own
