"""What is wrong between a job's fields; what is suggested was tried with its model, its devices and their memory."""

from collections.abc import Callable, Collection, Iterator
from functools import partial

from meshwright.app.job.compile_choice import choose_compile
from meshwright.app.job.cpu_training import trains_on_cpu
from meshwright.app.job.object_problems import object_problems
from meshwright.config.load import ResolvedJob
from meshwright.errors import InfeasibleLayout, problems_raised_by
from meshwright.hardware.catalogue import LOCAL
from meshwright.hardware.choice import named_cluster
from meshwright.spec.job.job import SPLIT_SECTIONS, FurtherRules, Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.job.validity import has_wrong_degree
from meshwright.spec.layout.rank_misfit import degree_fixes
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.problem import Fix, Problem
from meshwright.units import counted

_NUM_DEVICES = "cluster.num_devices"


def problems_between(
    resolved: ResolvedJob,
    num_ranks: int | None,
    unknown: Collection[str] = (),
    fits: Callable[[Job], bool] | None = None,
) -> list[Problem]:
    """Return what is wrong between the job's fields, its cluster's devices included, on `num_ranks` ranks.

    Changes with which the job does not fit its devices' memory are suggested only where none does, and with a note.
    """
    job, rules = _judged(resolved), _rules(resolved, num_ranks, unknown)
    found = job.problems(unknown, num_ranks, rules)
    if fits is None or not any(problem.fixes for problem in found):
        return found
    fitting = {one.what: one for one in job.problems(unknown, num_ranks, _with_memory(rules, fits))}
    return [
        other if (other := fitting[one.what]).fixes or not one.fixes else one.with_note(_DOES_NOT_FIT) for one in found
    ]


def fix_of_all(
    resolved: ResolvedJob,
    num_ranks: int | None,
    unknown: Collection[str] = (),
    fits: Callable[[Job], bool] | None = None,
) -> Fix | None:
    """Return changes after which `problems_between` finds nothing, and the job fits; None where none are found."""
    rules = _rules(resolved, num_ranks, unknown)
    return _judged(resolved).fix_of_all(unknown, num_ranks, rules if fits is None else _with_memory(rules, fits))


def _judged(resolved: ResolvedJob) -> Job:
    """Return the job as rules judge it: as it is where its device compiles nothing by default, as async_tp needs."""
    job = resolved.judged
    if job is resolved.job or trains_on_cpu(job):
        return resolved.job
    try:
        choice = choose_compile(resolved, job.layout.num_fixed_ranks, is_accelerator=True)
    except InfeasibleLayout:
        return job
    return job if choice.compiles else resolved.job


_DOES_NOT_FIT = "; with none of them does it fit the memory of the devices"
_SMALLER: tuple[Fix, ...] = (
    {"layout.microbatch_size": 1},
    {"layout.activation_checkpoint": "selective"},
    {"layout.activation_checkpoint": "full"},
)
"""What is tried together with another change so that a layout fits."""


def _with_memory(rules: FurtherRules, fits: Callable[[Job], bool]) -> FurtherRules:
    """Return `rules` and, of a job that breaks no other, that it fits the memory of its devices."""

    def broken(job: Job, own: list[Problem]) -> list[Problem]:
        found = [*rules(job, own)]
        return found if own or found or fits(job) else [Problem("[layout] does not fit", _SMALLER)]

    return broken


def _rules(resolved: ResolvedJob, num_ranks: int | None, unknown: Collection[str]) -> FurtherRules:
    """Return the rules about a model of the user's own, and about the number of devices of a job's cluster."""
    section = resolved.job.cluster
    named = partial(named_cluster, section.name, section.num_devices or num_ranks)
    is_open = "cluster" in unknown or section.name == LOCAL or problems_raised_by(named)
    cluster, knows_split = None if is_open else named(), not SPLIT_SECTIONS.intersection(unknown)

    def broken(job: Job, own: list[Problem]) -> Iterator[Problem]:
        if "model" not in unknown and is_object_source(job.model.source):
            found = object_problems("model", job.model, resolved.folder, job)
            yield from (problem for problem in found if isinstance(problem, Problem))
        if cluster is None:
            return
        yield from _size_problems(job, cluster)
        # The ranks that a wrong degree asks for are compared with nothing.
        if knows_split and not has_wrong_degree(own):
            yield from _count_problems(job, num_ranks, cluster)

    return broken


def _size_problems(job: Job, cluster: Cluster) -> Iterator[Problem]:
    """Yield why the job's cluster cannot have cluster.num_devices."""
    count = job.cluster.num_devices
    if count is not None and (refusal := cluster.count_refusal(count)) is not None:
        rule, numbers, after = refusal
        yield Problem(
            f"{_NUM_DEVICES} = {count} {rule}",
            [{_NUM_DEVICES: number} for number in numbers if number],
            after=after,
            otherwise="change cluster.num_devices and a degree in [layout]",
        )


def _count_problems(job: Job, num_ranks: int | None, cluster: Cluster) -> Iterator[Problem]:
    """Yield why the layout does not use the devices that the job's cluster has, more of them or fewer."""
    section = job.cluster
    is_open = job.layout.search or job.layout.is_open or job.layout.rest_axis is not None
    needed = num_ranks or (None if is_open else job.layout.num_ranks)
    available = section.num_devices or cluster.num_devices
    # Where the ranks are given, degrees do not change how many are needed.
    degrees = [*degree_fixes(job.layout, available)] if num_ranks is None else []
    if needed is not None and needed > available:
        key = "cluster.num_devices" if section.num_devices else "cluster.name"
        has = f"= {available}" if section.num_devices else f"= {section.name!r} has {counted(available, 'device')}"
        larger: list[Fix] = [{_NUM_DEVICES: needed}] if section.num_devices else []
        lower = "start fewer ranks" if num_ranks else "lower a degree in [layout]"
        yield Problem(
            f"{key} {has} but the layout needs {needed}",
            [*degrees, *larger],
            otherwise=f"change {key}, or {lower}",
        )
    elif num_ranks is None and needed not in (None, 1) and needed < (section.num_devices or 0):
        yield Problem(
            f"cluster.num_devices = {available} but the layout has {counted(needed, 'rank')}",
            [{_NUM_DEVICES: needed}, *degrees],
            otherwise="set both to one number",
        )
