"""python -m benchmarks.checkpoints.speed: what do saves and loads take, next to the disk and to torch's own?

Two ranks with 1 GB of sharded float32 in all. In each round, in random order: a plain sequential writer of the
same bytes with fsync, ours, ours without hashes, DCP, safetensors (a file a rank), and orbax-checkpoint and
torch-checkpointing where they are installed (other_libraries.py says how); then reads of what they wrote, from the
disk. Then steps of matmuls alone, and while a save in the background is in flight. Figures are medians over rounds, of
the slowest rank.

Bars: call of an asynchronous save <= 5 % of a synchronous one and <= 0.03 s; a step while it is in flight <= 1.25 times
a step alone; hashes < 6 % of a save; save and load at >= 90 % of the plain writer and reader.

Expected, written before the first run: call 0.01 s, step 1.2, hashes 10 % (xxh3 at 5 GB/s next to a disk of 0.5), save
90 %, load 90 %.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoints.other_libraries import LIBRARIES, Library, installed
from benchmarks.checkpoints.states import State, drop_cached, make_state, zeros_like
from benchmarks.checkpoints.timing import Times, step_s, timed
from meshwright.checkpoint.background.saver import BackgroundSaver
from meshwright.checkpoint.checkpoint import load, save
from meshwright.checkpoint.saving import bytes_of
from meshwright.trainer.launch.local.local_ranks import run_ranks


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        times = run_ranks(measure, 2, Path(folder), arguments.rounds, arguments.gigabytes, timeout_s=3000)
    # Ranks start each part together, so the slowest one's time is the part's.
    slowest = {what: [max(row) for row in zip(*(own[what] for own in times), strict=True)] for what in times[0]}
    table = Table("what", "median", "next to", "ratio", title=f"{arguments.gigabytes} GB on 2 ranks")
    for what, values in slowest.items():
        base = _BASES.get(what)
        ratio = statistics.median(a / b for a, b in zip(values, slowest[base], strict=True)) if base else None
        ratio_text = "" if ratio is None else f"{ratio:.2f}"
        table.add_row(what, f"{statistics.median(values):.3f} s", base or "", ratio_text)
    for library in (library for library in LIBRARIES if library not in installed()):
        table.add_row(f"save, {library.name}", "not installed", "", "")
    Console().print(table)
    return 0


_BASES = {
    "save, ours": "write, plain",
    "save, ours without hashes": "save, ours",
    "save, DCP": "write, plain",
    "save, safetensors": "write, plain",
    "load, ours": "read, plain",
    "load, DCP": "read, plain",
    "load, safetensors": "read, plain",
    "call of a background save, ours": "save, ours",
    "call of a background save, DCP": "save, DCP",
    "step during a save, ours": "step",
    "step during a save, DCP": "step",
    **{f"save, {library.name}": "write, plain" for library in LIBRARIES},
    **{f"load, {library.name}": "read, plain" for library in LIBRARIES},
    **{f"call of a background save, {library.name}": f"save, {library.name}" for library in LIBRARIES},
    **{f"step during a save, {library.name}": "step" for library in LIBRARIES},
}


def measure(folder: Path, rounds: int, gigabytes: float) -> Times:
    """Return the seconds of each part on this rank, by round; a function for ranks."""
    torch.set_num_threads(1)
    times: Times = defaultdict(list)
    state = make_state(0, int(gigabytes * 250e6), num_ranks=dist.get_world_size())
    target = zeros_like(state)
    saver = BackgroundSaver("localhost")
    others = [library(state["model"]) for library in installed()]
    for number in range(rounds):
        own = folder / str(number)
        _measure_saves(own, state, others, times)
        _measure_loads(own, target, others, times)
        _measure_background(own, state, saver, times, is_warm=number > 0)
        for other in others:
            _measure_other_background(own, other, times, is_warm=number > 0)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(own)
    saver.close()
    for other in others:
        other.close()
    return dict(times)


def _measure_saves(folder: Path, state: State, others: Sequence[Library], times: Times) -> None:
    local = {name: tensor.to_local() for name, tensor in state["model"].items()}
    if dist.get_rank() == 0:
        folder.mkdir()
    file = folder / f"{dist.get_rank()}.safetensors"
    saves: dict[str, Callable[[], object]] = {
        "write, plain": lambda: _write_plain(folder / f"plain-{dist.get_rank()}", local),
        "save, ours": lambda: save(folder / "step-1", state, {}),
        "save, ours without hashes": lambda: _save_without_hashes(folder / "step-2", state),
        "save, DCP": lambda: dcp.save(state["model"], checkpoint_id=folder / "dcp"),
        "save, safetensors": lambda: _save_safetensors(file, local),
        **{f"save, {other.name}": partial(other.save, folder / other.name) for other in others},
    }
    # In another order each time, the same on all ranks, and from a disk without unwritten pages.
    names = random.Random(folder.name).sample(list(saves), len(saves))
    for name in names:
        os.sync()
        timed(times, name, saves[name])


def _measure_loads(folder: Path, target: State, others: Sequence[Library], times: Times) -> None:
    """Measure loads from the disk: what the page cache holds of the files is dropped before each."""
    local = {name: tensor.to_local() for name, tensor in target["model"].items()}
    _drop_cached(folder)
    timed(times, "read, plain", lambda: _read_plain(folder / f"plain-{dist.get_rank()}", local))
    _drop_cached(folder)
    timed(times, "load, ours", lambda: load(folder / "step-1", target))
    _drop_cached(folder)
    timed(times, "load, DCP", lambda: dcp.load(target["model"], checkpoint_id=folder / "dcp"))
    _drop_cached(folder)
    file = folder / f"{dist.get_rank()}.safetensors"
    timed(times, "load, safetensors", lambda: _load_safetensors(file, local))
    for other in others:
        _drop_cached(folder)
        timed(times, f"load, {other.name}", partial(other.load, folder / other.name))


def _measure_background(folder: Path, state: State, saver: BackgroundSaver, times: Times, *, is_warm: bool) -> None:
    """Measure the call of a save in the background, and the steps until it has ended."""
    times["step"].append(statistics.median(step_s() for _ in range(5)))
    if not is_warm:
        # Its processes start and its memory is allocated: once in a run.
        saver.save(folder / "step-0", state, {})
        saver.drain()
    timed(times, "call of a background save, ours", lambda: saver.save(folder / "step-3", state, {}))
    steps = [step_s(saver.wait_until_staged)]
    while not saver.finished():
        steps.append(step_s())
    times["step during a save, ours"].append(statistics.median(steps))
    dist.barrier()
    saves: list[Any] = []
    timed(
        times,
        "call of a background save, DCP",
        lambda: saves.append(
            dcp.async_save(
                state["model"],
                checkpoint_id=folder / "dcp-async",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
        ),
    )
    steps = [step_s()]
    while not saves[0].done():
        steps.append(step_s())
    times["step during a save, DCP"].append(statistics.median(steps))


def _measure_other_background(folder: Path, other: Library, times: Times, *, is_warm: bool) -> None:
    """Measure the same of another library."""
    if not is_warm:
        first = other.begin(folder / f"{other.name}-first")
        while not first.is_done():
            time.sleep(0.01)
    begun = []
    timed(
        times,
        f"call of a background save, {other.name}",
        lambda: begun.append(other.begin(folder / f"{other.name}-background")),
    )
    steps = [step_s(begun[0].wait_until_staged)]
    while not begun[0].is_done():
        steps.append(step_s())
    times[f"step during a save, {other.name}"].append(statistics.median(steps))
    dist.barrier()


def _save_without_hashes(folder: Path, state: State) -> None:
    with patch("meshwright.checkpoint.saving.hash_bytes", lambda data: ""):
        save(folder, state, {})


def _drop_cached(folder: Path) -> None:
    dist.barrier()
    drop_cached(folder)


def _write_plain(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            data = bytes_of(tensor)
            while len(data):
                data = data[file.write(data) :]
        os.fsync(file.fileno())


def _read_plain(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in tensors.values():
            data = bytes_of(tensor)
            while len(data):
                data = data[file.readinto(data) :]


def _save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _load_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in load_file(path).items():
        tensors[name].copy_(tensor)


if __name__ == "__main__":
    sys.exit(main())
