"""`meshwright simulate`: the job's own step, traced for all of its ranks and simulated on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.completion import cluster_names, job_words, model_names
from meshwright.cli.result_command import result_command
from meshwright.log import progress

if TYPE_CHECKING:
    from meshwright.spec.trace.traces import Traces

_FILE = click.Path(dir_okay=False, path_type=Path)


@result_command
@click.argument("words", nargs=-1, metavar="[JOB_FILE] [SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option(
    "--model", shell_complete=model_names, help="A preset, or a Hugging Face config.json, in place of a job file."
)
@click.option("--seq-len", type=int, help="Of --model, tokens in one sequence; default 8192.")
@click.option("--global-batch-tokens", help="Of --model, tokens of a step, such as 4M.")
@click.option("--global-batch-size", type=int, help="Of --model, sequences of a step.")
@click.option(
    "--cluster",
    shell_complete=cluster_names,
    help="NAME:COUNT of devices, such as h100-ib400:16384; default: the job's.",
)
@click.option("--build", help="A program in place of a job: FILE.py:FUNCTION or MODULE:FUNCTION that builds a step.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of the program; a job's are its cluster's devices.")
@click.option("--every-rank", is_flag=True, help="Trace all ranks of the program, also of more than 64.")
@click.option("--routing", default="balanced", show_default=True, help="Tokens to experts: balanced, zipf:1.2, worst.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed of --jitter.")
@click.option("--jitter", type=float, default=0.0, help="Spread of every operation's time on each rank: 0.05.")
@click.option("--slow-rank", multiple=True, help="RANK:FACTOR, such as 3:1.5: a rank that computes slower.")
@click.option("--html", type=_FILE, help="Write the report as one page that needs no network.")
@click.option("--perfetto", type=_FILE, help="Write the timeline for ui.perfetto.dev; gzipped if it ends in .gz.")
@click.option("--out", type=click.Path(path_type=Path), help="Write everything into this folder.")
@click.option("--no-cache", is_flag=True, help="Trace again what was traced before.")
def command(words: tuple[str, ...], **given: Any) -> None:
    """Run the step of JOB_FILE, or of --model on --cluster, on fake ranks, without a device, and report what it would
    do on the cluster. Of --model the planner chooses the layout, keeping keys given as layout.tp=8.

    Every rank's own program is traced (one rank of each kind), checked for deadlocks, and simulated.

    Exit code 0: the step ends and fits; 2: it would hang, or does not fit, or bad input.
    """
    from meshwright.app.progress import elapsed
    from meshwright.app.simulate import simulated
    from meshwright.cli.output_files import files_of, write_files
    from meshwright.errors import ExitCode

    files = files_of(given)
    found = simulated(words, given, lambda *traced: progress.info("%s", _traced(*traced)))
    run = found.run
    if given["as_json"]:
        click.echo(run.to_json())
    else:
        found.show()
    with elapsed("writing files"):
        write_files(run, found.timeline, found.traces, files)
    sys.exit(ExitCode.BAD_INPUT if run.problems or run.misfits else ExitCode.DONE)


def _traced(traces: Traces, took_s: float) -> str:
    """Return what there is to simulate."""
    from meshwright.units import counted

    num_records = sum(len(trace.records) for trace in traces.traces.values())
    return (
        f"traced after {took_s:.0f} s; checking and simulating {counted(traces.world_size, 'rank')} "
        f"in {counted(len(traces.traces), 'class', 'classes')}, {num_records:,} records"
    )
