"""`meshwright plan`: the best layout for a job or a model on a cluster, and why; starts nothing and needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.completion import cluster_names, job_words, model_names
from meshwright.cli.finite_range import FiniteRange
from meshwright.cli.result_command import print_result, result_command
from meshwright.garbage import kept_garbage
from meshwright.log import progress

if TYPE_CHECKING:
    from meshwright.app.plan import PlanArguments
    from meshwright.app.run_budget import RunArguments
    from meshwright.config.load import ResolvedJob
    from meshwright.spec.machine.cluster import Cluster
    from meshwright.spec.run.layout_plan import Plan

_UNIT_DAYS = {"d": 1.0, "h": 1 / 24, "w": 7.0}
_RATE = FiniteRange(min=0, max=1e9)
"""A price, failures or minutes: the bound keeps days and cost of any run within the range of a float."""


@result_command
@click.argument("words", nargs=-1, metavar="[JOB_FILE] [SECTION.KEY=VALUE]...", shell_complete=job_words)
@click.option(
    "--model", shell_complete=model_names, help="A preset, or a Hugging Face config.json, in place of a job file."
)
@click.option(
    "--cluster",
    multiple=True,
    shell_complete=cluster_names,
    help="NAME:COUNT of devices, such as h100:256; several with --tokens.",
)
@click.option("--seq-len", type=int, help="Tokens in one sequence; default 8192.")
@click.option("--global-batch-tokens", help="Tokens of a step, such as 4M; rounded so that ranks divide it.")
@click.option("--global-batch-size", type=int, help="Sequences of a step.")
@click.option("--precision", help="Format of the matmuls, such as bfloat16 or float8-rowwise.")
@click.option("--adapter", help="Train adapters on a frozen model in place of all parameters: lora or dora.")
@click.option("--adapter-rank", type=int, help="Default 16.")
@click.option("--adapter-targets", multiple=True, help="Layers, as 'blocks.*.attention.*'; default: all linear ones.")
@click.option("--stack", help="Software to predict; default: meshwright.")
@click.option(
    "--given", multiple=True, type=click.Path(path_type=Path), help="Measured runs to fit to: CSV, run folder."
)
@click.option("--tokens", help="Tokens of the whole run, such as 15T: adds days, failures and cost.")
@click.option("--price-per-gpu-hour", type=_RATE, multiple=True, help="One for each --cluster.")
@click.option("--deadline", help="Days that the run may take, such as 60d.")
@click.option("--frontier", is_flag=True, help="With --tokens: the same run on fewer devices and on more.")
@click.option("--failures-per-gpu-day", type=_RATE, help="Default: the job's, Llama 3's 4.7e-4.")
@click.option("--restart-minutes", type=_RATE, help="From a failure to new steps; default 15.")
@click.option("--top", type=int, default=8, show_default=True, help="Layouts to show.")
@click.option("--simulate", type=int, help="Finalists to trace and simulate before one is picked.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with tables and plots.")
@click.option("--write", is_flag=True, help="Put the layout into the job file.")
def command(words: tuple[str, ...], **given: Any) -> None:
    """Find the best layout for JOB_FILE, or for --model on --cluster, and explain the choice.

    Keys of [layout] given as layout.tp=8 are kept; those of a job file only with layout.search = true.
    Exit code 0: there is a layout; 2: bad input, or nothing fits.
    """
    with kept_garbage():
        _answer(words, given)


def _answer(words: tuple[str, ...], given: dict[str, Any]) -> None:
    from meshwright.app.plan import answer

    _check(words, given)
    arguments, run = _arguments(words, given), _run_arguments(given)
    resolved = arguments.resolved()
    plan = answer(arguments, resolved, run)
    if given["write"]:
        # Before anything is printed: the reader of a pipe may close it early.
        _write(resolved, plan)
    if given["html"] is not None:
        plan.to_html(given["html"])
    print_result(plan, as_json=given["as_json"])


def _arguments(words: tuple[str, ...], given: dict[str, Any]) -> PlanArguments:
    from meshwright.app.plan import PlanArguments
    from meshwright.cost.stack_factors import OURS

    overrides, files = (tuple(word for word in words if ("=" in word) == is_override) for is_override in (True, False))
    names = ("model", "seq_len", "global_batch_tokens", "global_batch_size", "precision")
    more_names = ("adapter", "adapter_rank", "adapter_targets", "given", "simulate", "top")
    return PlanArguments(
        job=files[0] if files else None,
        overrides=overrides,
        cluster=given["cluster"][0] if given["cluster"] else None,
        stack=given["stack"] or OURS,
        **{name: given[name] for name in (*names, *more_names)},
    )


def _check(words: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that do not belong together, or for a page that cannot be written."""
    from meshwright.cli.output_files import require_page
    from meshwright.errors import ConfigError
    from meshwright.hardware.choice import choose_cluster

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)} are {len(files)} job files: plan one at a time")
    clusters = [choose_cluster(text) for text in given["cluster"]]
    if given["html"] is not None:
        require_page("--html", given["html"])
    if given["write"] and not files:
        raise ConfigError("--write puts the layout into a job file: name one in place of --model")
    others = [word for word in words if "=" in word and not word.startswith("layout.")]
    if given["write"] and clusters:
        others += _cluster_changes(files[0], clusters[0])
    others += [f"precision.compute={given['precision']}"] * bool(given["precision"])
    others += [f"adapter.kind={given['adapter']}"] * bool(given["adapter"])
    if given["write"] and others:
        raise ConfigError(
            f"--write would write a layout for what {files[0]} does not say: first set {', '.join(others)} in it"
        )


def _run_arguments(given: dict[str, Any]) -> RunArguments:
    from meshwright.app.run_budget import RunArguments

    names = ("tokens", "price_per_gpu_hour", "frontier", "failures_per_gpu_day", "restart_minutes")
    deadline_days = None if given["deadline"] is None else _days(given["deadline"])
    return RunArguments(deadline_days=deadline_days, clusters=given["cluster"], **{name: given[name] for name in names})


def _days(text: str) -> float:
    from meshwright.errors import ConfigError

    number, unit = text[:-1], text[-1:]
    try:
        days = float(number) * _UNIT_DAYS[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"--deadline {text} is no duration: write days, hours or weeks, such as 60d") from None
    if not 0 < days < math.inf:
        raise ConfigError(f"--deadline {text} must be a positive time: write days, hours or weeks, such as 60d")
    return days


def _cluster_changes(file: str, cluster: Cluster) -> Iterator[str]:
    """Yield what the job file has to say of its cluster, and does not, for a plan on `cluster` to be its own."""
    from meshwright.config.load import load_job
    from meshwright.hardware.choice import cluster_of_section

    section = load_job(file).job.cluster
    if cluster_of_section(section).name != cluster.name:
        yield f"cluster.name={cluster.name}"
    if section.num_devices != cluster.num_devices:
        yield f"cluster.num_devices={cluster.num_devices}"


def _write(resolved: ResolvedJob, plan: Plan) -> None:
    from meshwright.config.write import with_layout

    path = Path(resolved.path)
    if plan.keeps_given:
        progress.info("%s keeps its layout, which is predicted to be faster than all that were searched", path)
        return
    path.write_text(with_layout(path.read_text(encoding="utf-8"), plan.pick.layout), encoding="utf-8")
    progress.info("the layout is now in %s", path)
