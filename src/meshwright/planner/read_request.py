"""A PlanRequest from a job, or from names on a command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from meshwright.config.load import COMMAND_LINE, DEFAULT, ResolvedJob, inspect_text, raise_problems
from meshwright.cost.stack_factors import OURS, load_stack
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import ConfigError, InfeasibleLayout, UnsupportedError, problems_raised_by
from meshwright.hardware.catalogue import LOCAL, with_example_rates
from meshwright.hardware.choice import choose_cluster, cluster_of_section
from meshwright.planner.float8_choice import Float8Choice, choose_float8
from meshwright.planner.recompute_choice import with_recompute
from meshwright.planner.request import PlanRequest, rate_problem
from meshwright.planner.search.menu import divisors
from meshwright.spec.job.job import Job
from meshwright.spec.job.rules.attention_rules import device_problem
from meshwright.spec.job.rules.memory_rules import pool_device_problems
from meshwright.spec.job.rules.size_rules import length_problems
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.validity import with_fix
from meshwright.spec.layout.device_rules import layout_device_problems
from meshwright.spec.layout.layout import AXES, Layout, LayoutRequest
from meshwright.spec.layout.rank_misfit import rank_misfit
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.wide_matmuls import with_wide_matmuls
from meshwright.spec.problem import did_you_mean
from meshwright.spec.step.adapter import Adapter
from meshwright.spec.step.workload import FLOAT8_PRECISIONS, Precision, Workload
from meshwright.units import counted, format_count

_BATCH_TOLERANCE = 0.05
_MAX_BATCH_TOKENS = 10**12
"""Tokens of a step at most: as many as whole pretraining runs have, ten thousand times DeepSeek-V3's 63M a step."""


@dataclass(frozen=True)
class Named:
    """What a command line says in place of a job file."""

    model: str
    """A preset, or the config.json of a Hugging Face model."""
    cluster: str
    """NAME:COUNT."""
    seq_len: int | None
    """Tokens in one sequence; None for 8192, or what the model is meant for if that is less."""
    global_batch_tokens: int | None
    """Tokens of a step, taken to the nearest number of sequences that many ranks can share."""
    global_batch_size: int | None
    """Sequences of a step."""


@dataclass(frozen=True)
class Options:
    """What a command line adds to either."""

    cluster: str | None = None
    """NAME:COUNT in place of the job's cluster."""
    precision: str | None = None
    """Format of the blocks' matmuls."""
    stack: str = OURS
    """The software to predict."""
    adapter: Adapter | None = None
    """What is trained in place of what the job says; None for the job's."""
    takes_example: bool = False
    """Whether a machine without a calibration is planned for with the rates of an example, with a notice."""
    keeps_overrides: bool = False
    """Whether keys of [layout] on a command line are kept in a search around the layout of a file."""


def resolve_named(named: Named, overrides: tuple[str, ...]) -> ResolvedJob:
    """Return names on a command line as a job that leaves the layout to the planner; raises ConfigError."""
    architecture = resolve_architecture(ModelSection(source=named.model))
    if architecture is None:
        raise _unsupported(named.model)
    seq_len = min(8192, architecture.max_seq_len) if named.seq_len is None else named.seq_len
    said = [
        f"model.source={named.model}",
        f"train.seq_len={seq_len}",
        "precision.compute=bfloat16",
        "layout.search=true",
    ]
    inspection, of_batch = inspect_text(Path("plan"), "", (*said, *overrides)), []
    if "train" not in inspection.unknown:
        try:
            said.append(f"train.global_batch_size={num_sequences(named, inspection.resolved.job.train.seq_len)}")
            inspection = inspect_text(Path("plan"), "", (*said, *overrides))
        except ConfigError as error:
            of_batch.append(str(error))
    raise_problems("the command line", [*inspection.problems, *of_batch])
    return inspection.resolved


def option_problems(options: Options) -> list[str]:
    """Return what is wrong with options whatever is planned."""
    problems, precisions = problems_raised_by(lambda: load_stack(options.stack)), get_args(Precision)
    if options.precision is not None and options.precision not in precisions:
        meant = _meant_precision(options.precision, precisions)
        problems.append(f"--precision {options.precision} must be one of {', '.join(precisions)}{meant}")
    return problems


def num_sequences(named: Named, seq_len: int) -> int:
    """Return the sequences of a step. A number of tokens means about so many: of the numbers of sequences within 5 %
    of it, one that as many devices as possible can share, and that has most factors of two: what 4M tokens mean.
    """
    if named.global_batch_size is not None:
        return named.global_batch_size
    if named.global_batch_tokens is None:
        raise ConfigError("the batch is missing: give --global-batch-tokens, such as 4M, or --global-batch-size")
    exact = named.global_batch_tokens / seq_len
    if exact < 1:
        raise ConfigError(
            f"--global-batch-tokens {named.global_batch_tokens} is less than one sequence of {seq_len} tokens: "
            f"set it to {seq_len} or more, or lower --seq-len"
        )
    if exact == int(exact):
        return int(exact)
    # A multiple of the number of devices all of them can share, of its half all in pipelines of two, and so on.
    counts = reversed(divisors(choose_cluster(named.cluster).num_devices))
    return next((found for count in counts if (found := _rounded(exact, count))), round(exact))


def _rounded(exact: float, count: int) -> int | None:
    """Return the multiple of `count` within 5 % of `exact` that has most factors of two; None if there is none."""
    found = None
    while abs((near := round(exact / count) * count) / exact - 1) <= _BATCH_TOLERANCE:
        found, count = near, 2 * count
    return found


def plan_request(resolved: ResolvedJob, options: Options) -> PlanRequest:
    """Return what a job asks; raises ConfigError or UnsupportedError for what cannot be planned."""
    raise_problems("the command line", option_problems(options))
    job = resolved.job
    architecture = resolve_architecture(job.model)
    if architecture is None:
        raise _unsupported(job.model.source)
    if problems := length_problems(architecture, job.train.seq_len):
        raise ConfigError(problems[0])
    fixed = set_layout_keys(resolved)
    cluster = cluster_of(job, options, fixed)
    cluster = with_example_rates(cluster) if options.takes_example else cluster
    kept = _kept_keys(resolved, options)
    # A job that sets no layout, or searches, leaves it to the planner.
    layout = None if job.layout.search or not fixed else _given_layout(cluster, job, options, kept)
    float8 = _float8_choice(job, cluster, options)
    workload = job.replace(precision=float8.precision).workload
    if options.adapter is not None:
        workload = workload.replace(adapter=options.adapter)
    if options.precision is not None and not _is_own_float8(options):
        workload = workload.replace(precision=options.precision)
    model = with_wide_matmuls(model_spec(architecture), float8.precision.float8_skip)
    request = PlanRequest(
        model_name=job.model.source,
        architecture=architecture,
        setup=TrainingSetup(model, workload, cluster, load_stack(options.stack), memory=job.memory),
        fixed=kept,
        given=layout,
        memory_margin=job.planner.memory_margin,
        asked_precision=job.precision.matmuls if options.precision is None else options.precision,
        float8_note=float8.note,
    )
    backend = job.layout.attention_backend
    if (missing := device_problem(backend, job.precision.compute, cluster.device.torch_type)) is not None:
        raise UnsupportedError(f"device {cluster.device.name}: {missing}")
    lacking = [*pool_device_problems(job.memory, cluster.device), *layout_device_problems(job.layout, cluster.device)]
    if lacking and request.setup.is_own:
        raise UnsupportedError(lacking[0])
    _check_batch(request.workload)
    if problem := rate_problem(cluster.device, workload.precision, is_option=options.precision is not None):
        raise UnsupportedError(problem)
    return with_recompute(request, job.layout.memory_budget_bytes)


def _float8_choice(job: Job, cluster: Cluster, options: Options) -> Float8Choice:
    """Return what float8 the step is priced with: none of the job's where --precision names another format.

    A recipe that --precision names runs where the job's own would, with the layers that the job leaves in compute.
    """
    asked = job.precision
    if options.precision in (None, asked.matmuls):
        return choose_float8(job, cluster)
    notes, option = [], f"--precision {options.precision}"
    if asked.float8 != "none":
        notes.append(f'precision.float8 = "{asked.float8}" of the job is not priced: {option} replaces it')
    if not _is_own_float8(options):
        if options.precision == "nvfp4" and options.stack == OURS:
            notes.append(f"{option}: Meshwright cannot train in it; the figure is of its step with such kernels")
        plain = asked.replace(float8="none", float8_filter="none", float8_experts=False)
        return Float8Choice(plain, "; ".join(notes))
    recipe = next(recipe for recipe, name in FLOAT8_PRECISIONS.items() if name == options.precision)
    # As for a job without float8: what is not a matmul of a block is in bfloat16.
    compute = "bfloat16" if asked.float8 == "none" else asked.compute
    found = choose_float8(job.replace(precision=asked.replace(float8=recipe, compute=compute)), cluster, option=option)
    return found._replace(note="; ".join(filter(None, (*notes, found.note))))


def _is_own_float8(options: Options) -> bool:
    """Return whether --precision names a recipe of our own trainer, which a device runs or replaces."""
    return options.stack == OURS and options.precision in FLOAT8_PRECISIONS.values()


def set_layout_keys(resolved: ResolvedJob) -> dict[str, Any]:
    """Return the keys of [layout] that the job sets, with their values; a degree of -1 and "auto", which leave the
    value open, are not.
    """
    values = {name: getattr(resolved.job.layout, name) for name in Layout.model_fields}
    return {
        name: value
        for name, value in values.items()
        if resolved.origins.get(f"layout.{name}", DEFAULT) != DEFAULT
        and value != -1
        and (name, value) not in (("compile", "auto"), ("activation_checkpoint", "auto"))
    }


def _kept_keys(resolved: ResolvedJob, options: Options) -> dict[str, Any]:
    """Return the keys of [layout] that the search may not change, with their values."""
    found = set_layout_keys(resolved)
    if resolved.job.layout.search:
        return found
    origins = resolved.origins if options.keeps_overrides else {}
    return {name: value for name, value in found.items() if origins.get(f"layout.{name}") == COMMAND_LINE}


def _given_layout(cluster: Cluster, job: Job, options: Options, kept: dict[str, Any]) -> Layout | None:
    """Return the job's own layout on all devices of `cluster`; None where degrees on the command line, which are kept,
    go with others than the file's: these are free.
    """
    if not kept.keys().isdisjoint(AXES) and rank_misfit(job.layout, cluster.num_devices, lambda _: ()) is not None:
        return None
    return layout_on(cluster, job, options)


def cluster_of(job: Job, options: Options, fixed: dict[str, Any]) -> Cluster:
    """Return the cluster with as many devices as are said, or as a layout that is set needs, or as it has."""
    if options.cluster is not None:
        return choose_cluster(options.cluster)
    section = job.cluster
    if section.num_devices is not None:
        return cluster_of_section(section).with_num_devices(section.num_devices)
    if not _sets_ranks(job, fixed):
        return cluster_of_section(section)
    num_ranks = job.layout.num_fixed_ranks
    cluster = cluster_of_section(section.replace(num_devices=num_ranks))
    return cluster.with_num_devices(num_ranks, f"a layout of {counted(num_ranks, 'rank')}")


def takes_all_devices(resolved: ResolvedJob) -> bool:
    """Return whether a job names a cluster and neither a number of devices nor a layout of one."""
    section = resolved.job.cluster
    is_limited = section.num_devices is not None or _sets_ranks(resolved.job, set_layout_keys(resolved))
    return section.name != LOCAL and not is_limited


def _sets_ranks(job: Job, fixed: dict[str, Any]) -> bool:
    return not job.layout.search and job.layout.rest_axis is None and any(axis in fixed for axis in AXES)


def layout_on(cluster: Cluster, job: Job, options: Options) -> Layout:
    """Return the job's own layout on all devices of `cluster`; raises InfeasibleLayout that says what names them."""
    count, section = cluster.num_devices, job.cluster
    problem = rank_misfit(job.layout, count, partial(_numbers_of_devices, job.layout, cluster), of_devices=True)
    if problem is None:
        return job.layout.resolve(count)
    named = f'cluster.name = "{section.name}"' if section.num_devices is None else "cluster.num_devices"
    named = named if options.cluster is None else f"--cluster {options.cluster}"
    working = problem.working(lambda fix: not with_fix(job, fix).problems(num_ranks=count))
    raise InfeasibleLayout(f"{named}: {working}")


def _numbers_of_devices(request: LayoutRequest, cluster: Cluster, needed: int) -> list[int]:
    """Return the numbers of devices next to those of `cluster`, as it can have them, that `request` can run on."""
    if request.taking_rest is not None:
        return cluster.nearest_multiples(needed)
    return [needed] if cluster.takes(needed) else []


def _meant_precision(text: str, choices: Sequence[str]) -> str:
    """Return ": did you mean x?" with the precision that `text` is a part of, fp8 being float8, or the nearest."""
    spelt = text.casefold().replace("fp", "float")
    same = next((name for name in choices if name.startswith(spelt) or name.endswith(text.casefold())), None)
    return f": did you mean {same}?" if same else did_you_mean(spelt, choices)


def _check_batch(workload: Workload) -> None:
    """Raise ConfigError for a step of so many tokens that the number can only be a mistake."""
    if workload.global_batch_tokens > _MAX_BATCH_TOKENS:
        raise ConfigError(
            f"a global batch of {workload.global_batch_size} sequences of {workload.seq_len} tokens is "
            f"{format_count(workload.global_batch_tokens)} tokens a step, more than {format_count(_MAX_BATCH_TOKENS)}: "
            "lower train.global_batch_size or train.global_batch_tokens (--global-batch-tokens 4M is usual)"
        )


def _unsupported(source: str) -> UnsupportedError:
    return UnsupportedError(
        f"model.source = {source!r} is a class of your own, whose operations are not known before it is built: "
        "plan for a preset or a config.json of the same sizes, and set the layout by hand"
    )
