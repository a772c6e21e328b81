"""Cases of the chaos matrix: which faults befall which layouts, at which points, and a launcher that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshwright.spec.fault import Fault, FaultKind
from meshwright.spec.frozen import Frozen
from meshwright.spec.run.done_steps import read_step_times
from meshwright.spec.run.run import Run
from meshwright.spec.storage_fault import DAMAGES
from meshwright.trainer.run.run_folder import read_manifest

ROOT = Path(__file__).resolve().parent.parent
INTERVAL: Final = 3
FIRST_STEP: Final = 3 * INTERVAL
"""Of the first fault: two checkpoints exist."""
PROCESS_KINDS: tuple[FaultKind, ...] = (
    "crash",
    "segfault",
    "hang",
    "abort",
    "exception",
    "terminate",
    "hold-gil",
    "stop",
    "slow-rank",
)
KINDS: tuple[FaultKind, ...] = (*PROCESS_KINDS, *DAMAGES, "no-space", "io-error", "slow-disk")
POINTS: Final = ("data", "backward", "checkpoint", "forward", "optimizer", "gradients", "agree")
_ARGUMENTS: dict[FaultKind, float] = {"slow-rank": 3.0, "slow-disk": 0.02, "no-space": 3.0, "io-error": 5.0}
_SMALL = (
    "model.options.dim=32",
    "model.options.head_dim=8",
    "model.options.ffn_dim=48",
    "model.options.num_layers=2",
    "data.max_bytes=200000",
    "train.seq_len=32",
    "train.validation_interval=0",
    f"checkpoint.interval={INTERVAL}",
    "run.timeout_s=10",
)
_DENSE, _EXPERTS = ROOT / "examples" / "tiny.toml", ROOT / "examples" / "tiny-moe.toml"


@dataclass(frozen=True)
class LayoutCase:
    """A layout of the matrix."""

    name: str
    num_ranks: int
    keys: tuple[str, ...]
    job: Path = _DENSE

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the keys of its job, all but the number of steps."""
        small = _SMALL if self.job == _DENSE else tuple(key for key in _SMALL if "model." not in key)
        return (*small, *self.keys)


LAYOUTS = (
    LayoutCase("replicas", 2, ("layout.dp_replicate=2", "layout.dp_shard=1")),
    LayoutCase("FSDP2", 2, ("layout.dp_shard=2",)),
    LayoutCase("FSDP2, saves in the background", 2, ("layout.dp_shard=2", "checkpoint.mode=async")),
    LayoutCase("PP 2", 2, ("layout.pp=2", "layout.dp_shard=1")),
    LayoutCase("EP 2", 2, ("layout.ep=2", "layout.dp_shard=2"), _EXPERTS),
    LayoutCase("HSDP 2x2", 4, ("layout.dp_replicate=2", "layout.dp_shard=2")),
    LayoutCase("FSDP2 x TP 2", 4, ("layout.dp_shard=2", "layout.tp=2")),
)


def planned_faults(number: int, num_ranks: int, every: int) -> tuple[Fault, ...]:
    """Return the faults of layout `number`: one of `every` kinds, points and victims in turn, then those of two faults.

    Each is in a step of its own, after which a checkpoint is saved. The last are two ranks that crash at once, a crash
    at a call of a save, and one that restores after it.
    """
    kinds = [kind for place, kind in enumerate(KINDS) if (place + number) % every == 0]
    last, faults = num_ranks - 1, []
    for place, kind in enumerate(kinds):
        step = FIRST_STEP + INTERVAL * place
        phase = POINTS[(place + number) % len(POINTS)]
        if kind in _ARGUMENTS:
            phase = "gradients" if kind == "slow-rank" else "checkpoint"
        rank = (0, last)[(place + number) % 2]
        faults.append(Fault(kind=kind, rank=rank, step=step, phase=phase, argument=_ARGUMENTS.get(kind, 0.0)))
    step = FIRST_STEP + INTERVAL * len(kinds)
    faults += [Fault(kind="crash", rank=rank, step=step, phase="backward") for rank in (0, last)]
    faults.append(Fault(kind="crash", rank=last, step=step + INTERVAL, phase="checkpoint", argument=float(4 + number)))
    faults.append(Fault(kind="crash", rank=0, step=step + 2 * INTERVAL, phase="optimizer"))
    faults.append(Fault(kind="crash", rank=last, step=step + 2 * INTERVAL - 1, phase="restore"))
    return tuple(faults)


def num_steps_of(faults: Sequence[Fault]) -> int:
    """Return the steps of a run in which these faults happen, and some are left."""
    return max(fault.step or 0 for fault in faults) + INTERVAL + 1


class LauncherResult(Frozen):
    """A run whose launcher was killed and that was resumed by hand."""

    expected_hash: str | None
    found_hash: str | None
    next_step_s: float | None
    """Seconds from the kill until the resumed run finished a step; None where it did not."""

    @property
    def holds(self) -> bool:
        """Return whether it ended with the same parameters."""
        return self.expected_hash is not None and self.found_hash == self.expected_hash


LAUNCHER_CASES = (
    ("launcher killed, FSDP2 resumed on 2 ranks", (2, "layout.dp_shard=-1"), (2, "layout.dp_shard=-1")),
    (
        "launcher killed, exact_elastic: FSDP2 on 2 ranks resumed on 4",
        (2, "layout.dp_shard=-1"),
        (4, "layout.dp_shard=-1"),
    ),
    (
        "launcher killed, exact_elastic: FSDP2 on 4 ranks resumed as 2 replicas",
        (4, "layout.dp_shard=-1"),
        (2, "layout.dp_replicate=2"),
    ),
)


def kill_launcher(before: tuple[int, str], after: tuple[int, str], folder: Path) -> LauncherResult:
    """Train as `before`, ranks and a key, kill the launcher by SIGKILL after two checkpoints, and resume as `after`."""
    expected, found = Run(folder / "expected"), Run(folder / "found")
    _start(expected, before, ()).wait()
    process = _start(found, before, ())
    while process.poll() is None and len(found.checkpoint_steps()) < 2:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    killed_s = time.time()
    process.wait()
    _start(found, after, ("--resume",)).wait()
    # The kill is somewhere in a step: the first of the next attempt counts.
    after_s = [step.end_s for step in read_step_times(found) if step.end_s > killed_s and step.attempt > 1]
    next_step_s = after_s[0] - killed_s if after_s else None
    return LauncherResult(expected_hash=_hash(expected), found_hash=_hash(found), next_step_s=next_step_s)


def _start(run: Run, ranks: tuple[int, str], options: Sequence[str]) -> subprocess.Popen[bytes]:
    num_ranks, key = ranks
    shards = ("layout.dp_shard=1",) if "dp_replicate" in key else ()
    keys = (*_SMALL, "train.steps=30", "train.exact_elastic=true", "run.parameter_hash=true", key, *shards)
    command = [sys.executable, "-m", "meshwright", "train", str(_DENSE), "--ranks", str(num_ranks), *options, *keys]
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with run.folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([*command, f"run.dir={run.folder}"], stdout=log, stderr=log)


def _hash(run: Run) -> str | None:
    manifest = read_manifest(run)
    return None if manifest is None or manifest.exit != 0 else manifest.results.get("parameter_hash")
