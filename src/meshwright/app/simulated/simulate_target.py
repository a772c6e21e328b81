"""What `meshwright simulate` runs: a job or a program on a cluster, its conditions, and the traces of its ranks."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.app.job.compile_choice import settled_on
from meshwright.app.job.job_problems import layout_problems_of
from meshwright.app.job.jobs import as_job
from meshwright.app.job.settle_float8 import settle_float8
from meshwright.app.simulated.run_traces import Subject
from meshwright.config.load import ResolvedJob, raise_problems
from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import with_example_rates
from meshwright.hardware.choice import choose_cluster
from meshwright.log import progress
from meshwright.planner.plan import make_plan
from meshwright.planner.read_request import Options, cluster_of, layout_on, plan_request, set_layout_keys
from meshwright.simulator.engine.conditions import Conditions
from meshwright.spec.fault import Fault
from meshwright.spec.layout.layout import LayoutRequest
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.layout.schedule.action import is_csv
from meshwright.spec.machine.allocator_settings import has_expandable_segments, set_allocator
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.extrapolate.routing import parse_routing
from meshwright.units import counted

_MOST_JITTER = 1.0
"""At which one operation in 40 takes 4 times its cost; no machine is as noisy as that."""
_MOST_SLOWER = 1e6


def conditions_of(given: dict[str, Any]) -> Conditions:
    """Return how the step departs from the usual one; raises ConfigError for a value that means nothing."""
    parse_routing(given["routing"])
    jitter = given["jitter"]
    if not 0 <= jitter <= _MOST_JITTER:
        raise ConfigError(
            f"--jitter {jitter} is the spread of the logarithm of every operation's time, 0 to {_MOST_JITTER:g}: "
            "write 0.05 for 5 %"
        )
    environment = dict(os.environ)
    if not given["build"]:
        set_allocator(environment)
    return Conditions(
        seed=given["seed"],
        jitter=jitter,
        faults=tuple(_slow_rank(text) for text in given["slow_rank"]),
        has_expandable_segments=has_expandable_segments(environment),
    )


def require_ranks(conditions: Conditions, num_ranks: int) -> None:
    """Raise ConfigError for a slow rank that a step on `num_ranks` ranks does not have."""
    for fault in conditions.faults:
        if fault.rank >= num_ranks:
            raise ConfigError(
                f"--slow-rank {fault.rank}:{fault.argument:g}: the rank must be less than the "
                f"{counted(num_ranks, 'rank')} of the step: write 0 to {num_ranks - 1}, or a larger --cluster"
            )


def _slow_rank(text: str) -> Fault:

    rank, _, factor = text.partition(":")
    try:
        number, slower = int(rank), float(factor)
    except ValueError:
        raise ConfigError(f"--slow-rank {text} is no rank and how many times slower it is: write 3:1.5") from None
    if number < 0 or not 0 < slower <= _MOST_SLOWER:
        raise ConfigError(
            f"--slow-rank {text}: the rank must be 0 or more and the factor more than 0 and at most {_MOST_SLOWER:g}; "
            "write 3:1.5 for a rank 3 that takes half as long again"
        )
    return Fault(kind="slow-rank", rank=number, argument=slower)


def trace_of_job(words: tuple[str, ...], given: dict[str, Any], conditions: Conditions) -> tuple[Subject, Traces]:
    """Return the job named by `words` and its traces; raises ConfigError for a bad argument before it traces."""
    from meshwright.tracer.programs.job_steps import layout_of
    from meshwright.tracer.programs.trace_ranks import device_type_of
    from meshwright.tracer.trace_job import TraceOptions, trace_job
    from meshwright.trainer.step.step_builder import TRAINER_STEP

    files, overrides = _split(words)
    _require_job(files, given)
    name = files[0] if files else given["model"]
    resolved = as_job(name, overrides, cluster=given["cluster"]) if files else _named_model(given, overrides)
    require_ranks(conditions, _named_cluster(resolved, given["cluster"]).num_devices)
    resolved = _settled(resolved, given["cluster"])
    resolved, note = settle_float8(resolved, _cluster(resolved, given["cluster"]))
    if note:
        progress.info("note: %s", note)
    cluster, request = _asked(resolved, given["cluster"])
    if not resolved.job.layout.search:
        layout_on(cluster, resolved.job, Options(given["cluster"]))
        raise_problems(resolved.path, layout_problems_of(resolved, cluster.num_devices))
    layout = layout_of(resolved.job, cluster.num_devices)
    subject = Subject(name, resolved.job.model.source, cluster, layout, resolved.job.workload, request, overrides)
    progress.info("tracing %s", " ".join(words))
    traces = trace_job(
        TRAINER_STEP,
        resolved,
        cluster.num_devices,
        device=device_type_of(cluster.device),
        how=TraceOptions(routing=given["routing"], use_cache=not given["no_cache"]),
    )
    return subject, traces


def _require_job(files: list[str], given: dict[str, Any]) -> None:
    """Raise ConfigError unless one job is named, without what belongs to a program."""
    if given["ranks"]:
        raise ConfigError("--ranks is for --build; a job's ranks are its cluster's devices: give --cluster NAME:COUNT")
    if given["every_rank"]:
        raise ConfigError("--every-rank is for --build; a job's ranks are traced by class: leave it out")
    of_model = [f"--{name.replace('_', '-')}" for name in (*_OF_MODEL, "model") if given.get(name) is not None]
    if files and of_model:
        raise ConfigError(
            f"{files[0]!r} names a job file, which says the model and the batch already: leave out "
            f"{', '.join(of_model)}, or write an override as section.key=value"
        )
    if given.get("model") is not None:
        return
    if of_model:
        raise ConfigError(f"{', '.join(of_model)} belong to --model: give it, or name a job file and leave them out")
    if len(files) != 1:
        named = f"{' and '.join(files)} are {len(files)} job files" if files else "no job file is named"
        raise ConfigError(
            f"{named}: name one, give --model and --cluster, or --build and --ranks for a program of your own"
        )


_OF_MODEL = ("seq_len", "global_batch_tokens", "global_batch_size")


def _named_model(given: dict[str, Any], overrides: tuple[str, ...]) -> ResolvedJob:
    """Return --model with its batch as a job in the layout that the planner chooses, keeping the keys that are set."""
    from meshwright.app.plan import PlanArguments

    named: dict[str, Any] = {name: given.get(name) for name in (*_OF_MODEL, "model", "cluster")}
    arguments = PlanArguments(overrides=overrides, **named)
    resolved = arguments.resolved()
    layout = make_plan(arguments.request(resolved)).pick.layout
    progress.info("layout %s, as planned", layout_text(layout.effective) or "one rank")
    return replace(resolved, job=resolved.job.replace(layout=LayoutRequest.model_validate(layout.model_dump())))


def _settled(resolved: ResolvedJob, text: str | None) -> ResolvedJob:
    """Return the job with what it compiles and what its blocks save, where open chosen as before training."""
    if resolved.leaves_compile_open:
        resolved = settled_on(resolved, _cluster(resolved, text))
    if resolved.job.layout.activation_checkpoint != "auto":
        return resolved
    from meshwright.app.job.recompute_budget import settle_checkpoints

    cluster = _cluster(resolved, text)
    settled = settle_checkpoints(resolved, cluster.num_devices, cluster.device)
    keys = ("activation_checkpoint", "activation_checkpoint_blocks")
    layout = resolved.job.layout.replace(**{key: getattr(settled, key) for key in keys}, memory_budget_bytes=None)
    return replace(resolved, job=resolved.job.replace(layout=layout))


def _cluster(resolved: ResolvedJob, text: str | None) -> Cluster:

    return with_example_rates(_named_cluster(resolved, text))


def _named_cluster(resolved: ResolvedJob, text: str | None) -> Cluster:
    """Return the cluster as --cluster or the job names it, whether its rates are measured or not."""
    return cluster_of(resolved.job, Options(text, takes_example=True), set_layout_keys(resolved))


def _asked(resolved: ResolvedJob, text: str | None) -> tuple[Cluster, Any]:
    """Return the cluster, and the planner's request; None for what its formulas do not know."""
    is_unpriced = is_csv(resolved.job.layout) or resolved.job.layout.attention_backend == "math"
    if resolve_architecture(resolved.job.model) is None or is_unpriced:
        return _cluster(resolved, text), None
    request = plan_request(resolved, Options(text, takes_example=True))
    return request.cluster, request


def trace_of_program(words: tuple[str, ...], given: dict[str, Any], conditions: Conditions) -> tuple[Subject, Traces]:
    """Return the program of --build and its traces; raises ConfigError for a bad argument before it traces."""
    from meshwright.tracer.programs.program_ranks import trace_program
    from meshwright.tracer.programs.trace_ranks import Program

    files, _ = _split(words)
    if files:
        raise ConfigError(f"{files[0]} and --build {given['build']} both say what to run: leave out one of them")
    if not given["ranks"]:
        raise ConfigError("--build needs --ranks, how many ranks the program has, such as --ranks 4")
    cluster = choose_cluster(given["cluster"] or f"h100:{given['ranks']}")
    if cluster.num_devices != given["ranks"]:
        raise ConfigError(
            f"--ranks {given['ranks']} and --cluster {given['cluster']} differ: make COUNT {given['ranks']}"
        )
    require_ranks(conditions, given["ranks"])
    program = Program(_importable(given["build"]), given["ranks"], tuple(words), routing=given["routing"])
    progress.info("tracing %s", given["build"])
    traces = trace_program(program, every_rank=given["every_rank"])
    if not any(len(trace.records) for trace in traces.traces.values()):
        raise ConfigError(
            f"{given['build']}: its step runs no operation of the device on any rank, so there is nothing to simulate: "
            "return a step that computes on tensors of `device`"
        )
    return Subject(given["build"], given["build"], cluster, None, None, None), traces


def _importable(build: str) -> str:
    """Return a builder as module:function; the folder of one that is in a file is where modules are looked for."""
    place, colon, function = build.partition(":")

    if not colon or not function:
        raise ConfigError(f"--build {build} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION")
    file = Path(place)
    if file.suffix != ".py":
        return build
    if not file.is_file():
        raise ConfigError(f"--build {build}: there is no file {file.resolve()}: give the path of a Python file")
    sys.path.insert(0, str(file.resolve().parent))
    return f"{file.stem}:{function}"


def _split(words: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """Return what names files and what sets keys."""
    return [word for word in words if "=" not in word], tuple(word for word in words if "=" in word)
