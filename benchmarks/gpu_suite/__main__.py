"""python -m benchmarks.gpu_suite: in 8 minutes on one H100 or H200, whether our steps are as fast as we say.

Llama 3.2 1B, and Llama 3 8B with 6 of its 32 blocks (whose float32 states fit 80 GB) and, where 135 GB are there, with
16; 4 sequences of 8192 tokens a step, all at once or two at once, in bfloat16 and with tensorwise float8 in the blocks:
the trainer of `meshwright train` with compiled blocks and loss, next to litgpt (compiled) and HF Trainer with
torch_compile and without (SDPA attention, fused AdamW), in float8 by torchao. Same weights, same tokens, same AdamW and
clipping, nothing recomputed; each row in a process of its own: 3 steps of warm-up, then the median of 10, each ended by
a synchronisation. Peak is what torch allocated at most. A row whose losses are not those of its shape's first row, step
by step, is not comparable. MFU is of the peak in bfloat16, in float8 too.

    pip install -e '.[train,hf,torchao]' accelerate     once; nothing is downloaded after that
    python -m benchmarks.gpu_suite                      the table, and suite.json
    python -m benchmarks.gpu_suite --at-once 1          where less than 80 GB are free
    python -m benchmarks.gpu_suite --all                2,048 and 32,768 tokens and a mixture of experts, too
    python -m benchmarks.gpu_suite --toy                the same programs on a CPU, tiny, under a minute

Finished rows are kept in the JSON file: the command continues where it was ended, or where --limit-s ended it.

Expected, written down before any run (2026-11-26, one H200, one sequence at once, eager loss), as `plan` said then:
1B in bfloat16 676 ms and 44 % MFU, 578 in float8; the 8B shape 792 ms and 51 %, 635 in float8. HF Trainer, compiled:
700 and 830 ms; eager 1100 and 1200. Peaks of 44.9, 44.0, 62.1 and 60.8 GB within 1 %. Losses within 0.5 % in
bfloat16, 2 % in float8. Written down before rows of more sequences at once, with the loss compiled: 1B 595 ms and
50.3 % MFU; the 8B shape 720 ms, 600 in float8; HF Trainer, compiled, on the 8B shape 900. 16 blocks 1573
and 1221 ms. Written down before any run of --all: 1B 477 ms at 2,048 tokens, 1107 at 32,768, in float8 393 and 1023;
the mixture 393 and 388 ms.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.gpu_suite.cases import CASES, MORE_CASES, TOY_CASES, Case, suite_job
from benchmarks.gpu_suite.predicted import device_name
from benchmarks.gpu_suite.suite_run import NUM_STEPS, NUM_WARM_UP, Measured, run_case
from benchmarks.gpu_suite.suite_table import bars, table_of
from benchmarks.peers.prepare import Weights, prepare
from meshwright.config.write import to_toml

_ROW_S = 45.0
"""What a row takes at least; no row is started with less left."""
_PACKAGES = ("torch", "transformers", "accelerate", "torchao")


@click.command()
@click.option("--out", default="suite.json", type=click.Path(path_type=Path), show_default=True)
@click.option("--folder", default=".suite", type=click.Path(path_type=Path), show_default=True, help="Weights: 8 GB.")
@click.option("--limit-s", default=480.0, show_default=True, help="Seconds after which no row is started.")
@click.option("--toy", "chosen", flag_value="toy", help="A tiny model on the CPU.")
@click.option("--all", "chosen", flag_value="all", help="Other lengths and a mixture of experts, too: minutes more.")
@click.option("--only", default="", help="Only rows whose name has this text.")
@click.option("--at-once", type=click.Choice(["1", "2", "4"]), help="Sequences of a microbatch, where less memory is.")
def main(out: Path, folder: Path, limit_s: float, chosen: str | None, only: str, at_once: str | None) -> None:
    """Run what is not in the JSON file yet, and print the table."""
    started_s = time.monotonic()
    toy = chosen == "toy"
    if not toy and not torch.cuda.is_available():
        raise click.UsageError("torch sees no CUDA device: run it on a machine that has one, or take --toy")
    device = "cpu" if toy else "cuda"
    setting = setting_of(device)
    cases = [case for case in _cases(chosen) if only in case.name]
    if at_once:
        cases = [replace(case, shape=replace(case.shape, at_once=int(at_once))) for case in cases]
    rows = kept_rows(out, setting)
    for case in cases:
        known = rows.get(case.name)
        left_s = limit_s - (time.monotonic() - started_s)
        if (known is not None and not known.failure) or (not toy and left_s < _ROW_S):
            continue
        print(f"{case.name} ...", file=sys.stderr)
        rows[case.name] = _run(case, folder / case.shape.slug, device, max(left_s, _ROW_S))
        write_rows(out, setting, rows)
    title = f"{setting['device']}, torch {setting['torch']}, {setting['date']}: {NUM_STEPS} steps each"
    Console(width=170).print(table_of(cases, rows, title))
    print("\n".join(bars(cases, rows)))
    print(f"{time.monotonic() - started_s:.0f} s; {out}")


def _cases(chosen: str | None) -> list[Case]:
    """Return the rows that were asked for and that the device's memory can hold."""
    if chosen == "toy":
        return TOY_CASES
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    return [case for case in CASES + MORE_CASES * (chosen == "all") if case.shape.needed_bytes <= total_bytes]


def _run(case: Case, folder: Path, device: str, timeout_s: float) -> Measured:
    job = suite_job(case.shape, folder.absolute(), device)
    weights, num_steps = Weights(device, torch.bfloat16), NUM_WARM_UP + NUM_STEPS + 2
    finished = folder / "prepared"
    if not finished.exists() or finished.read_text() != to_toml(job):
        prepare(folder.absolute(), job, num_steps, weights, num_microbatches=case.shape.num_microbatches)
        finished.write_text(to_toml(job))
    return run_case(case, folder.absolute(), job, timeout_s)


def setting_of(device: str) -> dict[str, Any]:
    """Return what rows of one file share: hardware, versions and the day."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        **versions,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": device_name(device),
        "date": datetime.date.today().isoformat(),
    }


def kept_rows(path: Path, setting: dict[str, Any]) -> dict[str, Measured]:
    """Return the rows of `path` by name, if they are of this setting, whatever the day."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"setting": {}}
    if {**found["setting"], "date": ""} != {**setting, "date": ""}:
        return {}
    return {row["name"]: Measured(**{**row, "losses": tuple(row["losses"])}) for row in found["rows"]}


def write_rows(path: Path, setting: dict[str, Any], rows: dict[str, Measured]) -> None:
    """Write all rows, or leave the file as it was."""
    partial = path.with_suffix(".partial")
    text = json.dumps({"setting": setting, "rows": [row.to_json() for row in rows.values()]}, indent=1)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
