"""python -m benchmarks.axis_overhead: prints the table of README.md, or the same as JSON."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.axis_overhead.rounds import measure_axis
from benchmarks.axis_overhead.workload import AXES, SIZES


@click.command()
@click.option("--axis", "axes", multiple=True, type=click.Choice(list(AXES)), help="Only these; default: all.")
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SIZES)), default=("small", "mid"))
@click.option("--rounds", default=30, show_default=True, help="Timed steps of each way.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(axes: tuple[str, ...], sizes: tuple[str, ...], rounds: int, as_json: bool) -> None:
    """Measure what each axis costs: Meshwright's step and torch's own, over the same written by hand."""
    load_before = os.getloadavg()[0]
    rows = []
    for size in sizes:
        for axis in axes or AXES:
            click.echo(f"{axis}, {size} ...", err=True)
            rows.append(measure_axis(axis, size, rounds))
    context = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": os.cpu_count(),
        "load_before": round(load_before, 1),
    }
    if as_json:
        click.echo(json.dumps({**context, "rows": rows}, indent=2))
    else:
        Console().print(_table(rows), ", ".join(f"{name} {value}" for name, value in context.items()), sep="\n")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "axis", "size", title="median step and its ratio to the step by hand: wall, and CPU time of a process"
    )
    for column in ("by hand\nms", "ours\nms", "torch\nms", "ours\nwall", "torch\nwall", "ours\nCPU", "torch\nCPU"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [_shown(row["ms"].get(way), ".1f") for way in ("by hand", "ours", "torch")]
        ratios = [_shown(row[kind].get(way), ".2f") for kind in ("ratio", "cpu_ratio") for way in ("ours", "torch")]
        table.add_row(row["axis"], row["size"], *times, *ratios)
    return table


def _shown(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


if __name__ == "__main__":
    main()
