"""`meshwright simulate`: the job's own step, run dry for all of its ranks and played on a cluster."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from meshwright.cli.dry_run import Subject
    from meshwright.config.load import ResolvedJob
    from meshwright.simulator.conditions import Conditions
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.dry_run import DryRun
    from meshwright.spec.timeline import Timeline
    from meshwright.spec.traces import Traces

_LEAST_WIDTH = 80
_MOST_JITTER = 1.0
"""At which one operation in 40 takes 4 times its cost; no machine is as noisy as that."""
_MOST_SLOWER = 1e6
_FILE = click.Path(dir_okay=False, path_type=Path)


class Files(NamedTuple):
    """What to write; None of what is not asked for."""

    html: Path | None
    perfetto: Path | None
    out: Path | None


@click.command()
@click.argument("words", nargs=-1, metavar="[JOB_FILE] [SECTION.KEY=VALUE]...")
@click.option("--cluster", help="NAME:COUNT of devices, such as h100-ib400:16384; default: the job's.")
@click.option("--build", help="A program in place of a job: FILE.py:FUNCTION or MODULE:FUNCTION that builds a step.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of the program; a job's are its cluster's devices.")
@click.option("--every-rank", is_flag=True, help="Trace all ranks of the program, also of more than 64.")
@click.option("--routing", default="balanced", show_default=True, help="Tokens to experts: balanced, zipf:1.2, worst.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn by chance.")
@click.option("--jitter", type=float, default=0.0, help="Spread of every operation's time on each rank: 0.05.")
@click.option("--slow-rank", multiple=True, help="RANK:FACTOR, such as 3:1.5: a rank that computes slower.")
@click.option("--html", type=_FILE, help="Write the report as one page that needs no network.")
@click.option("--perfetto", type=_FILE, help="Write the timeline for ui.perfetto.dev; packed if it ends in .gz.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write everything into this folder.")
@click.option("--no-cache", is_flag=True, help="Trace again what was traced before.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(words: tuple[str, ...], **given: Any) -> None:
    """Run the step of JOB_FILE on fake ranks, without a device, and tell what it would do on the cluster.

    Every rank's own program is traced (one rank of each kind), checked for deadlocks, and played.

    Exit code 0: the step ends and fits; 2: it would hang, or does not fit, or bad input.
    """
    from meshwright.cli.dry_run import dry_run
    from meshwright.errors import ExitCode
    from meshwright.simulator.apart import apart

    conditions = _conditions(given)
    files, start_s = _files(given), time.monotonic()
    click.echo(f"tracing {given['build'] or ' '.join(words)}", err=True)
    subject, traces = _program(words, given) if given["build"] else _job(words, given)
    click.echo(_progress(traces, time.monotonic() - start_s), err=True)
    traces = apart(traces, [fault.rank for fault in conditions.faults])
    run, timeline = dry_run(subject, traces, conditions)
    if given["as_json"]:
        click.echo(run.to_json())
    else:
        _show(run)
    _write(run, timeline, traces, files)
    sys.exit(ExitCode.BAD_INPUT if run.problems or run.misfits else ExitCode.DONE)


def _progress(traces: Traces, took_s: float) -> str:
    """Return what there is to simulate."""
    num_records = sum(len(trace.records) for trace in traces.traces.values())
    return (
        f"traced after {took_s:.0f} s; checking and simulating {traces.world_size} ranks "
        f"in {len(traces.traces)} classes, {num_records:,} records"
    )


def _job(words: tuple[str, ...], given: dict[str, Any]) -> tuple[Subject, Traces]:
    from meshwright.cli.dry_run import Subject
    from meshwright.config.load import load_job
    from meshwright.errors import ConfigError
    from meshwright.tracer.dry_run import How, trace_job
    from meshwright.tracer.job_steps import layout_of
    from meshwright.tracer.trace import device_type_of

    files, overrides = _split(words)
    if len(files) != 1 or given["ranks"]:
        told = f"{' and '.join(files)} are {len(files)} job files" if files else "no job file is named"
        raise ConfigError(
            "--ranks is for --build; a job's ranks are its cluster's devices: give --cluster NAME:COUNT"
            if given["ranks"]
            else f"{told}: name one, or give --build and --ranks for a program of your own"
        )
    resolved, overrides = _settled(load_job(files[0], overrides), overrides, given["cluster"])
    cluster, question = _asked(resolved, given["cluster"])
    layout = layout_of(resolved.job, cluster.num_devices)
    subject = Subject(files[0], resolved.job.model.source, cluster, layout, resolved.job.workload, question)
    traces = trace_job(
        files[0],
        overrides,
        cluster.num_devices,
        device=device_type_of(cluster.device),
        how=How(routing=given["routing"], use_cache=not given["no_cache"]),
    )
    return subject, traces


def _settled(
    resolved: ResolvedJob, overrides: tuple[str, ...], text: str | None
) -> tuple[ResolvedJob, tuple[str, ...]]:
    """Return the job with what its blocks save, chosen as before training if it leaves that open, and its overrides."""
    from meshwright.config.load import load_job

    if resolved.job.layout.activation_checkpoint != "auto":
        return resolved, overrides
    from meshwright.trainer.recompute_budget import checkpoint_keys, settle_checkpoints

    cluster = _cluster(resolved, text)
    layout = settle_checkpoints(resolved, cluster.num_devices, overrides, cluster.device)
    overrides = (*overrides, *checkpoint_keys(layout))
    return load_job(resolved.path, overrides), overrides


def _cluster(resolved: ResolvedJob, text: str | None) -> Cluster:
    from meshwright.hardware.catalogue import with_example_rates
    from meshwright.planner.ask import Options, cluster_of, set_layout_keys

    return with_example_rates(cluster_of(resolved.job, Options(text, takes_example=True), set_layout_keys(resolved)))


def _asked(resolved: ResolvedJob, text: str | None) -> tuple[Cluster, Any]:
    """Return the cluster, and what the planner would be asked, None for a model that its formulas do not know."""
    from meshwright.planner.ask import Options, question_of
    from meshwright.spec.model_source import resolve_architecture

    if resolve_architecture(resolved.job.model) is None:
        return _cluster(resolved, text), None
    question = question_of(resolved, Options(text, takes_example=True))
    return question.cluster, question


def _program(words: tuple[str, ...], given: dict[str, Any]) -> tuple[Subject, Traces]:
    from meshwright.cli.dry_run import Subject
    from meshwright.errors import ConfigError
    from meshwright.hardware.choice import choose_cluster
    from meshwright.tracer.program_ranks import trace_program
    from meshwright.tracer.trace import Program

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
    program = Program(_importable(given["build"]), given["ranks"], tuple(words), routing=given["routing"])
    traces = trace_program(program, every_rank=given["every_rank"])
    return Subject(given["build"], given["build"], cluster, None, None, None), traces


def _importable(build: str) -> str:
    """Return a builder as module:function; the folder of one that is in a file is where modules are looked for."""
    place, colon, function = build.partition(":")
    if not colon:
        from meshwright.errors import ConfigError

        raise ConfigError(f"--build {build} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION")
    file = Path(place)
    if file.suffix != ".py":
        return build
    sys.path.insert(0, str(file.resolve().parent))
    return f"{file.stem}:{function}"


def _split(words: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """Return what names files and what sets keys."""
    return [word for word in words if "=" not in word], tuple(word for word in words if "=" in word)


def _conditions(given: dict[str, Any]) -> Conditions:
    """Return how the step departs from the usual one; raises ConfigError for a value that means nothing."""
    from meshwright.errors import ConfigError
    from meshwright.simulator.conditions import Conditions
    from meshwright.spec.allocator_settings import has_expandable_segments, set_allocator

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


def _slow_rank(text: str) -> Any:
    from meshwright.errors import ConfigError
    from meshwright.spec.fault import Fault

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


def _files(given: dict[str, Any]) -> Files:
    """Return the files to write, all of them with --out; raises before anything is traced where they cannot be."""
    from meshwright.extras import import_extra
    from meshwright.report.timeline_figures import PURPOSE

    html, perfetto, out = given["html"], given["perfetto"], given["out"]
    if out is not None:
        _require_writable("--out", out)
        html, perfetto = html or out / "report.html", perfetto or out / "timeline.perfetto.json.gz"
    for option, file in (("--html", given["html"]), ("--perfetto", given["perfetto"])):
        if file is not None:
            _require_writable(option, file.parent)
    if html is not None:
        import_extra("plotly", PURPOSE)
    return Files(html, perfetto, out)


def _require_writable(option: str, folder: Path) -> None:
    """Make the folder and a file in it, which is gone again; raises ConfigError where either fails."""
    import tempfile

    from meshwright.errors import ConfigError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot write to the folder {folder} ({error.strerror or error}): name one that can be written"
        ) from error


def _write(run: DryRun, timeline: Timeline | None, traces: Traces, files: Files) -> None:
    """Write the files that are asked for."""
    from meshwright.report.dry_run_html import write_html
    from meshwright.report.messages import messages_of
    from meshwright.report.perfetto import write_perfetto

    if files.out is not None:
        (files.out / "dry_run.json").write_text(run.to_json() + "\n", encoding="utf-8")
        if timeline is not None:
            timeline.save(files.out / "timeline.npz")
    if files.html is not None:
        write_html(run, timeline, files.html)
    if files.perfetto is not None and timeline is not None:
        write_perfetto(timeline, files.perfetto, messages_of(timeline, traces))


def _show(run: DryRun) -> None:
    from rich.console import Console

    from meshwright.report.dry_run_table import dry_run_page

    console = Console(highlight=False)
    # Figures side by side take as much, also on a narrower terminal.
    console.width = max(console.width, _LEAST_WIDTH)
    for part in dry_run_page(run):
        console.print(part)
