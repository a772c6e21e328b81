"""python -m benchmarks.peers: training llama-15m on two CPU ranks, next to accelerate, HF Trainer, FSDP2 and litgpt.

Every way trains the same model from the same weights on the same tokens in the same order with the same AdamW and
clipping, in float32, on two gloo ranks of one thread: 512 tokens, 2 sequences a rank and step. Ours is the trainer of
`meshwright train`, with its metrics and records; a step is one whole iteration of each program's loop. Peers have
environments of their own, which the command makes. All ranks live at the same time; in each round each way takes one
step, in random order, so that what else the machine does hits all alike. A way whose losses are not those of the
reference, step by step, is not comparable. Rounds are kept in the JSON file, and the command continues from there.

Expected, written down before measuring (2026-11-26), times as fast as the best peer, which is accelerate's DDP: ours
DDP 0.95, FSDP2 0.90, DDP compiled 1.1, FSDP2 compiled 1.05; HF Trainer 0.97, transformers under FSDP2 0.90, litgpt 1.0.
Losses within 2e-4 of each other after 20 steps. The bar is 1.2 for ours, compiled or not.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.peers.environments import python_of, variables_of, versions_of
from benchmarks.peers.prepare import NUM_RANKS, SIZES, cpu_job, prepare
from benchmarks.peers.results import Results, Row, paired_ratio, rows_of
from benchmarks.peers.rounds import NUM_WARM_UP, Program, measure
from benchmarks.peers.ways import WAYS, Way
from meshwright.units import format_bytes

BAR = 1.2
"""Times as fast as the best peer."""


@click.command()
@click.option("--rounds", default=20, show_default=True, help="Timed steps of each way.")
@click.option("--way", "names", multiple=True, type=click.Choice(list(WAYS)), default=list(WAYS), help="Only these.")
@click.option("--size", default="mid", type=click.Choice(list(SIZES)), show_default=True)
@click.option("--out", default=".peers/results.json", type=click.Path(path_type=Path), show_default=True)
@click.option("--environments", default=".peers", type=click.Path(path_type=Path), show_default=True)
@click.option("--here", is_flag=True, help="Peers run in this environment, which has their packages.")
def main(rounds: int, names: tuple[str, ...], size: str, out: Path, environments: Path, here: bool) -> None:
    """Measure, and print the table."""
    failures: dict[str, str] = {}
    chosen = [replace(WAYS[name], environment=None) if here else WAYS[name] for name in names]
    pythons = _pythons(chosen, environments.absolute(), failures)
    ways = [way for way in chosen if way.name not in failures]
    versions = {way.name: versions_of(pythons[way.environment], way.packages) for way in ways}
    setting = {"size": size, "ways": list(names), "machine": machine(), "versions": versions}
    results = Results.kept(out, setting)
    results.failures |= failures
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, cpu_job(folder, SIZES[size]), NUM_WARM_UP + rounds + 1)
        programs = [_program(way, pythons[way.environment], folder) for way in ways]
        measure(programs, folder, NUM_RANKS, results, rounds, lambda: results.write(out))
    results.write(out)
    Console(width=130).print(table_of(results))
    found = {f"{package} {text}" for of_way in versions.values() for package, text in of_way.items()}
    print(f"\n{', '.join(sorted(found))}\n{verdict(results)}\n{out}")


def _pythons(ways: list[Way], folder: Path, failures: dict[str, str]) -> dict[str | None, Path]:
    pythons: dict[str | None, Path] = {}
    for way in ways:
        try:
            if way.environment not in pythons:
                pythons[way.environment] = python_of(way.environment, folder)
        except subprocess.CalledProcessError:
            failures[way.name] = f"pip cannot install {way.environment}.txt here"
    return pythons


def _program(way: Way, python: Path, folder: Path) -> Program:
    command = (str(python), "-m", way.module, str(folder), *way.arguments)
    return Program(way.name, command, variables_of(way.environment))


def machine() -> dict[str, Any]:
    """Return what a row says of its machine and day."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def table_of(results: Results) -> Table:
    """Return a row for each way, failed ones last."""
    size, where = SIZES[results.setting["size"]], results.setting["machine"]
    title = f"{size.model}, {NUM_RANKS} ranks, {len(results.rounds)} rounds; {where['cores']} x {where['cpu']}"
    columns = (
        "way",
        "step, ms",
        "spread",
        "tokens/s",
        "of best peer",
        "CPU-s",
        "of its CPU-s",
        "loss",
        "off by",
        "peak",
    )
    table = Table(*columns, title=f"{title}, {where['date']}", box=None)
    rows = rows_of(results, _reference(results))
    best = best_peer(rows)
    for row in rows:
        figures = [f"{row.step_s * 1e3:.0f}", f"{row.spread:.0%}", f"{size.tokens_per_step / row.step_s:.0f}"]
        if not row.is_comparable or best is None:
            ratios = ["not comparable" if not row.is_comparable else "", ""]
        else:
            ratios = [f"{paired_ratio(results, row.name, best.name, index):.2f}" for index in (0, 1)]
        loss = [f"{row.last_loss:.5f}", f"{row.loss_difference:.0e}", format_bytes(int(row.peak_bytes))]
        table.add_row(row.name, *figures, ratios[0], f"{row.cpu_s:.2f}", ratios[1], *loss)
    for name, reason in results.failures.items():
        table.add_row(name, reason)
    return table


def _reference(results: Results) -> str:
    """Return the way whose losses are the others' reference: the first peer, so that ours is judged too."""
    names = list(results.losses)
    return next((name for name in names if name in WAYS and not WAYS[name].is_ours), names[0])


def best_peer(rows: list[Row]) -> Row | None:
    """Return the fastest comparable row that is not ours; None if there is none."""
    peers = [row for row in rows if row.is_comparable and not WAYS[row.name].is_ours]
    return min(peers, key=lambda row: row.step_s, default=None)


def verdict(results: Results) -> str:
    """Return one line: the bar, and the best of ours."""
    rows = rows_of(results, _reference(results))
    best, ours = best_peer(rows), [row for row in rows if row.is_comparable and WAYS[row.name].is_ours]
    if best is None or not ours:
        return f"bar {BAR} x the best peer: nothing to compare"
    fastest = min(ours, key=lambda row: row.step_s)
    ratio = paired_ratio(results, fastest.name, best.name, 0)
    word = "met" if ratio >= BAR else "missed"
    return f"bar {BAR} x the best peer: {word}: {fastest.name} is {ratio:.2f} times as fast as {best.name}"


if __name__ == "__main__":
    sys.exit(main())
