"""python -m benchmarks.checkpoints.corruption: which damage is loaded as if it were the state that was saved?

Saves two steps with each format, on two ranks where the format has ranks, then damages a copy of the second in one
random way at a time and loads it. A load that raises nothing and returns other bits than were saved has accepted the
damage. Exit code 1 if ours accepts any, or if no control accepts any: then the oracle would be blind.

Expected, written before the first run: ours 0 of 1,000; DCP and safetensors accept nearly all flipped bits and zeroed
pages, DCP the shards of another step, and safetensors a missing file. Where they are installed, orbax accepts none, as
its store has checksums, and torch-checkpointing nearly all flipped bits and zeroed pages; files of theirs are neither
swapped nor taken from another step, since orbax gives each file a new name.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.checkpoints.other_libraries import Library, installed
from benchmarks.checkpoints.states import (
    DCP,
    OURS,
    SAFETENSORS,
    Format,
    State,
    equal,
    fresh_copy,
    make_state,
    save_on_this_rank,
    zeros_like,
)
from meshwright.trainer.launch.local.local_ranks import run_ranks

NUM_ELEMENTS = 300_000


def flip_bit(folder: Path, other: Path, chosen: random.Random) -> None:
    """Flip one bit of one file."""
    path, data = _random_file(folder, chosen)
    data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    path.write_bytes(data)


def zero_page(folder: Path, other: Path, chosen: random.Random) -> None:
    """Replace one page of 4 KiB by zeros."""
    path, data = _random_file(folder, chosen)
    start = chosen.randrange(0, len(data), 4096)
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def truncate(folder: Path, other: Path, chosen: random.Random) -> None:
    """Cut one file anywhere."""
    path, data = _random_file(folder, chosen)
    path.write_bytes(data[: chosen.randrange(len(data))])


def swap(folder: Path, other: Path, chosen: random.Random) -> None:
    """Exchange two files of one kind."""
    files = [path for path in _files(folder) if path.suffix in (".bin", ".distcp", ".safetensors")]
    first, second = chosen.sample(files, 2)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def from_another_step(folder: Path, other: Path, chosen: random.Random) -> None:
    """Replace one or more files by those of the step before."""
    files = _files(folder)
    for path in chosen.sample(files, chosen.randrange(1, len(files))):
        shutil.copy(other / path.name, path)


def remove(folder: Path, other: Path, chosen: random.Random) -> None:
    """Remove one file."""
    chosen.choice(_files(folder)).unlink()


DAMAGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "bit flipped": flip_bit,
    "page zeroed": zero_page,
    "truncated": truncate,
    "files swapped": swap,
    "of another step": from_another_step,
    "file missing": remove,
}
OF_ONE_FILE = ["bit flipped", "page zeroed", "truncated", "file missing"]


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # DCP logs each refusal with its traceback
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for each in (OURS, DCP, SAFETENSORS):
            results[each.name] = accepted(each, Path(folder) / each.name, arguments.trials, arguments.seed)
        for library in installed():
            tested = as_format(library)
            results[tested.name] = accepted(tested, Path(folder) / tested.name, arguments.trials, arguments.seed)
    table = Table("damage", *results, title=f"Damage accepted, of {arguments.trials} trials for each format")
    for damage in DAMAGES:
        table.add_row(
            damage, *(f"{bad[damage]} of {total[damage]}" if total[damage] else "" for bad, total in results.values())
        )
    table.add_row("all", *(f"{bad.total()} of {total.total()}" for bad, total in results.values()))
    Console().print(table)
    ours, *controls = (results[each.name][0].total() for each in (OURS, DCP, SAFETENSORS))
    return 1 if ours or not all(controls) else 0


def as_format(library: type[Library]) -> Format:
    """Return how a library saves a state from one process, and loads it."""

    def load(folder: Path, state: State) -> None:
        for name, tensor in library(state["model"]).load(folder).items():
            state["model"][name].copy_(tensor)

    return Format(library.name, lambda folder, state: library(state["model"]).save(folder), load)


def accepted(tested: Format, folder: Path, trials: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Return by damage how many were accepted, and how many were tried."""
    steps = [folder / "step-1", folder / "step-2"]
    for number, step in enumerate(steps):
        if tested in (OURS, DCP):
            run_ranks(save_on_this_rank, 2, tested.name, step, number, NUM_ELEMENTS)
        else:
            tested.save(step, make_state(number, NUM_ELEMENTS))
    saved = make_state(1, NUM_ELEMENTS)
    damaged = folder / "damaged"
    fresh_copy(steps[1], damaged)
    undamaged = zeros_like(saved)
    tested.load(damaged, undamaged)
    if not equal(undamaged, saved):
        raise RuntimeError(f"{tested.name} does not load what it saved")
    chosen = random.Random(seed)
    bad: Counter[str] = Counter()
    total: Counter[str] = Counter()
    damages = [*DAMAGES] if tested in (OURS, DCP, SAFETENSORS) else OF_ONE_FILE
    for _ in track(range(trials), description=tested.name, transient=True):
        fresh_copy(steps[1], damaged)
        damage = chosen.choice(damages)
        DAMAGES[damage](damaged, steps[0], chosen)
        total[damage] += 1
        bad[damage] += _loads_other_bits(tested, damaged, saved)
    return bad, total


def _loads_other_bits(tested: Format, folder: Path, saved: dict[str, dict[str, object]]) -> bool:
    found = zeros_like(saved)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tested.load(folder, found)
    except BaseException:  # DCP raises CheckpointException, which is none of Exception's
        return False
    return not equal(found, saved)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _random_file(folder: Path, chosen: random.Random) -> tuple[Path, bytearray]:
    """Return a file, each byte of the folder equally likely for half of the trials, else each file."""
    files = _files(folder)
    weights = [path.stat().st_size if chosen.random() < 0.5 else 1 for path in files]
    path = chosen.choices(files, weights)[0]
    return path, bytearray(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
