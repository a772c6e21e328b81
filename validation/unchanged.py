"""python -m validation.unchanged record FILE, then compare FILE: whether a change of the code moved any output.

Runs the command line and keeps every number and name of what it prints as JSON, and of the runs that it trained: for
changes that move or rename and must not change a prediction, a trace, a loss or a weight. Figures are compared as
written, to the last digit, so both must be made on one machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
_PLANNED = (
    "--model llama3-8b --cluster h100:8 --seq-len 8192 --global-batch-tokens 1M",
    "--model llama3-8b --cluster rtx-4090-eth100:32 --seq-len 4096 --global-batch-tokens 1M",
    "--model llama3-70b --cluster h100-ib400:256 --seq-len 8192 --global-batch-tokens 4M",
    "--model qwen3-30b-a3b --cluster h100-ib400:64 --seq-len 4096 --global-batch-tokens 4M",
    "--model llama3-8b --cluster h100-ib400:128 --seq-len 131072 --global-batch-tokens 16M",
    "examples/llama3-405b-16k.toml",
    "examples/deepseek-v3.toml",
    "--model llama3-8b --cluster h100:64 --global-batch-tokens 4M --tokens 15T --price-per-gpu-hour 2.5 --frontier",
)
_TINY = "cluster.name=h100-ib400 train.global_batch_size=32 layout.compile=false"
_SIMULATED = (
    f"examples/tiny.toml {_TINY} cluster.num_devices=8 layout.dp_shard=2 layout.tp=2 layout.pp=2",
    f"examples/tiny.toml {_TINY} cluster.num_devices=8 layout.dp_shard=2 layout.cp=2 layout.pp=2 --jitter 0.05",
    f"examples/tiny.toml {_TINY} cluster.num_devices=2 layout.pp=2 layout.schedule=ZBVZeroBubble",
    f"examples/tiny-moe.toml {_TINY} cluster.num_devices=8 layout.dp_shard=8 layout.ep=8 --routing zipf:1.2",
    "examples/llama3-8b.toml cluster.num_devices=8 layout.dp_shard=8 train.global_batch_tokens=262144",
    "--build examples/planted_faults.py:ring_deadlock --ranks 4",
)
_TRAINED = (
    "--ranks 1",
    "--ranks 2 layout.dp_shard=2 layout.gradient_sync=step",
    "--ranks 4 layout.tp=2 layout.pp=2",
    "--ranks 4 layout.cp=2 layout.dp_shard=2 layout.activation_checkpoint=full",
)
_VOLATILE = ("date", "version", "took", "cpu_s", "created", "path", "folder", "host", "pid", "git", "commit", "attempt")
"""Parts of names of what is not the same in two runs of one code."""


def _backtests() -> Iterator[tuple[str, object]]:
    yield "backtest", _printed("backtest validation/published_runs.csv --json")


def _plans() -> Iterator[tuple[str, object]]:
    for words in _PLANNED:
        yield f"plan {words}", _printed(f"plan {words} --json")


def _simulations() -> Iterator[tuple[str, object]]:
    for words in _SIMULATED:
        yield f"simulate {words}", _printed(f"simulate {words} --no-cache --json")


def _runs() -> Iterator[tuple[str, object]]:
    for model in ("tiny", "tiny-moe"):
        for words in _TRAINED:
            yield f"train {model} {words}", _trained(f"examples/{model}.toml {words}")


_PARTS: Mapping[str, Callable[[], Iterator[tuple[str, object]]]] = {
    "backtest": _backtests,
    "plan": _plans,
    "simulate": _simulations,
    "train": _runs,
}


def _meshwright(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )


def _printed(words: str) -> object:
    """Return what a command prints as JSON, with its exit code."""
    done = _meshwright(words)
    if not done.stdout.startswith(("{", "[")):
        raise click.ClickException(
            f"meshwright {words} printed no JSON and ended with {done.returncode}: {done.stderr}"
        )
    return {"exit_code": done.returncode, "printed": json.loads(done.stdout)}


def _trained(words: str) -> object:
    """Return the losses and gradient norms of six steps, and the hash of the weights after them."""
    with tempfile.TemporaryDirectory() as folder:
        done = _meshwright(
            f"train {words} train.steps=6 train.validation_interval=0 run.device=cpu run.dir={folder}/run"
        )
        if done.returncode:
            raise click.ClickException(f"meshwright train {words} ended with {done.returncode}: {done.stderr}")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        manifest = json.loads(Path(folder, "run", "manifest.json").read_text())
    kept = ("step", "loss", "grad_norm")
    steps = [{name: row[name] for name in kept if name in row} for row in rows if "loss" in row]
    return {"steps": steps, "parameter_hash": manifest["results"]["parameter_hash"]}


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield every figure and word within `value` with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not any(part in str(key) for part in _VOLATILE):
                yield from _flat(f"{name} / {key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _flat(f"{name} / {number}", inner)
    else:
        # Lines of our own files move with every edit above them.
        yield name, re.sub(r"\.py:\d+", ".py", value) if isinstance(value, str) else value


def _record(parts: tuple[str, ...]) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in parts or tuple(_PARTS):
        for name, value in _PARTS[part]():
            found.update(_flat(name, value))
            click.echo(f"recorded {name}", err=True)
    return found


@click.group()
def main() -> None:
    """Record what the program prints and trains, and compare a later state of the code with it."""
    os.environ["COLUMNS"] = "120"


_only = click.option("--only", "parts", multiple=True, type=click.Choice(list(_PARTS)), help="Parts to run.")
_file = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@main.command()
@_file
@_only
def record(file: Path, parts: tuple[str, ...]) -> None:
    """Write every output of today's code to FILE."""
    file.write_text(json.dumps(_record(parts), indent=0), encoding="utf-8")


@main.command()
@_file
@_only
@click.option("--values", is_flag=True, help="Compare values in order of appearance, whatever their names are now.")
def compare(file: Path, parts: tuple[str, ...], values: bool) -> None:
    """Print what is not as FILE has it; exit code 1 if anything is not."""
    before = json.loads(file.read_text(encoding="utf-8"))
    parts = parts or tuple(part for part in _PARTS if any(name.split()[0] == part for name in before))
    kept = tuple(name for name in before if name.split()[0] in parts)
    after = _record(parts)
    if values:
        apart = [
            f"{one}: {before[one]} -> {after[other]} ({other})"
            for one, other in zip(kept, after, strict=True)
            if before[one] != after[other]
        ]
    else:
        names = dict.fromkeys([*kept, *after])
        apart = [
            f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
            for name in names
            if name not in before or name not in after or before[name] != after[name]
        ]
    click.echo("\n".join(apart) or f"all {len(kept)} values are as recorded")
    sys.exit(bool(apart))


if __name__ == "__main__":
    main()
