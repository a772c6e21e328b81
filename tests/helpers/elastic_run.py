"""A real run in attempts that differ in ranks, layout, microbatches and workers, and the samples that it is made of."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_kinds import SEQ_LEN, STREAMS, write_data
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.evidence import read_heartbeats
from meshwright.fault_tolerance.step_ledger import read_ledger
from meshwright.prover.quiet_output import output_in
from meshwright.spec.fault import Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import samples_by_step
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.launch import train_locally
from meshwright.trainer.launch.rank import RankConfig
from training_runs import TINY_MODEL

BATCH, STEPS = 12, 8
MAX_RANKS = 4
LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2}],
    3: [{"dp_shard": 3}, {"dp_replicate": 3}],
    4: [
        {"dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        *({"dp_shard": 2, axis: 2} for axis in ("cp", "tp", "pp")),
    ],
}
PHASES = ("data", "forward", "backward", "gradients", "optimizer", "agree", "checkpoint", "restore")
Uses = Counter[tuple[int, str]]
"""How many ranks took the sample of which slot, with its hash."""


@dataclass(frozen=True)
class Attempt:
    """An attempt, and what ends it in its `num_steps`-th step, or a little later where that does not happen."""

    layout: dict[str, int]
    microbatch_size: int = 1
    num_workers: int = 0
    interval: int = 2
    mode: Literal["sync", "async"] = "sync"
    end: Literal["done", "stop", "SIGTERM", "SIGKILL", "lost worker"] = "done"
    num_steps: int = STEPS
    rank: int = 0
    phase: str = "data"

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the layout."""
        return self.num_copies * self.dp

    @property
    def dp(self) -> int:
        """Return the ranks among which a global batch is divided."""
        return self.layout.get("dp_shard", 1) * self.layout.get("dp_replicate", 1)

    @property
    def num_copies(self) -> int:
        """Return how many ranks take each sample."""
        return self.layout.get("cp", 1) * self.layout.get("tp", 1) * self.layout.get("pp", 1)


def draw_attempt(draw: random.Random, kind: str) -> Attempt:
    """Return a random attempt of a run on data of a kind."""
    num_ranks = draw.randint(1, MAX_RANKS)
    layout = draw.choice(LAYOUTS[num_ranks])
    dp = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    num_workers = 0 if kind in STREAMS else draw.randint(0, 3)
    end = draw.choice(("stop", "SIGTERM", "SIGKILL", "SIGKILL", *["lost worker"] * min(num_workers, 2)))
    return Attempt(
        layout=layout,
        microbatch_size=draw.choice([size for size in (1, 2, 3) if BATCH % (dp * size) == 0]),
        num_workers=num_workers,
        interval=draw.randint(1, 3),
        mode=draw.choice(("sync", "async")),
        end=end,
        # Some steps pass before a lost worker is missed.
        num_steps=1 if end == "lost worker" else draw.randint(1, 4),
        rank=draw.randrange(num_ranks),
        phase=draw.choice(PHASES),
    )


class ElasticRun:
    """One run folder, the attempts that trained into it, and the samples of each of its steps that count."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir()
        self.run = Run(folder / "run")
        self._folder, self._output = folder, folder / "output.txt"
        self._data, self._task = write_data(folder, kind)
        self.steps: dict[int, tuple[Uses, int]] = {}
        """Of each step, the samples and how many ranks were to take each."""
        self.was_hit = False
        """Whether the last attempt came to what was to end it."""

    @property
    def newest_step(self) -> int:
        """Return the step of the newest checkpoint."""
        return max(self.run.checkpoint_steps(), default=0)

    @property
    def losses(self) -> dict[int, float]:
        """Return the newest loss of each step."""
        rows = [json.loads(row) for row in self.run.metrics.read_text().splitlines()]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def train(self, attempt: Attempt) -> ExitCode:
        """Train from the newest checkpoint until the attempt ends, note its samples, and return its exit code."""
        begun_at, written = self.newest_step, [len(one) for one in self._ledgers()]
        last = begun_at + attempt.num_steps
        stop_after = min(last + 2, STEPS) if attempt.end in ("stop", "SIGTERM", "SIGKILL") else None
        config = RankConfig(
            job=self._job(attempt, stop_after),
            run_dir=str(self.run.folder),
            module_dir=str(self._folder),
            faults=tuple(_faults(attempt, last)),
            resume=True,
        )
        self.run.injected_fault(0).unlink(missing_ok=True)
        self._output.unlink(missing_ok=True)
        with output_in(self._output), self._workers_end(attempt, last):
            code = train_locally(config, attempt.num_ranks)
        killed_workers = "died (signal 9) while it read samples" in self._output.read_text()
        self.was_hit = self.run.injected_fault(0).exists() if attempt.end != "lost worker" else killed_workers
        used = samples_by_step([one[many:] for one, many in zip(self._ledgers(), written, strict=True)])
        assert not used or min(used) == begun_at + 1
        # What was done after the newest checkpoint does not count any more, even if this attempt came to no step.
        self.steps = {step: uses for step, uses in self.steps.items() if step <= begun_at}
        self.steps |= {step: (uses, attempt.num_copies) for step, uses in used.items()}
        return code

    def require_samples_of(self, other: ElasticRun) -> None:
        """Require that each step took each sample of that step of a run on one rank, in its slot, as often as it has
        ranks for it.
        """
        assert sorted(self.steps) == sorted(other.steps) == list(range(1, STEPS + 1))
        for step, (uses, num_copies) in self.steps.items():
            expected, _ = other.steps[step]
            assert sorted(slot for slot, _ in expected) == list(range(BATCH))
            assert uses == Counter(dict.fromkeys(expected, num_copies)), f"step {step}"

    def _ledgers(self) -> list[list[Any]]:
        return [read_ledger(self.run.ledger(rank)) for rank in range(MAX_RANKS)]

    def _job(self, attempt: Attempt, stop_after: int | None) -> Job:
        sections: dict[str, dict[str, Any]] = {
            "model": TINY_MODEL,
            "data": self._data | {"num_workers": attempt.num_workers, "prefetch_batches": 1},
            "train": {"steps": STEPS, "seq_len": SEQ_LEN, "global_batch_size": BATCH, "task": self._task},
            "layout": {"dp_shard": 1, **attempt.layout, "microbatch_size": attempt.microbatch_size},
            "checkpoint": {"interval": attempt.interval, "mode": attempt.mode},
            "run": {"device": "cpu", "dir": str(self.run.folder), "timeout_s": 60.0},
        }
        if stop_after is not None:
            sections["train"]["stop_after"] = stop_after
        return Job.from_dict(sections)

    @contextmanager
    def _workers_end(self, attempt: Attempt, step: int) -> Iterator[None]:
        """Kill a worker of the attempt's rank once that has done `step`, where that is its end."""
        over = threading.Event()
        killer = threading.Thread(target=self._kill_a_worker, args=(attempt.rank, step, over))
        if attempt.end == "lost worker":
            killer.start()
        try:
            yield
        finally:
            over.set()
            if killer.ident is not None:
                killer.join()

    def _kill_a_worker(self, rank: int, step: int, over: threading.Event) -> None:
        began_s = time.time()
        while not over.wait(0.01):
            entries = [one for one in read_ledger(self.run.ledger(rank)) if one.time_s >= began_s and one.step >= step]
            if entries and rank in (beats := read_heartbeats(self.run)):
                for pid in _workers_of(beats[rank].pid)[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return


def _faults(attempt: Attempt, step: int) -> list[Fault]:
    """Return the fault that ends an attempt in that step, or in the next one that is saved."""
    if attempt.end == "lost worker":
        # Time to kill the worker before the steps are over.
        return [Fault(kind="slow-rank", rank=attempt.rank, step=step + 1, argument=10)] if step < STEPS else []
    if attempt.end not in ("SIGTERM", "SIGKILL"):
        return []
    kind = "terminate" if attempt.end == "SIGTERM" else "crash"
    if attempt.phase == "restore":
        return [Fault(kind=kind, rank=attempt.rank, step=1, phase="restore")]
    if attempt.phase == "checkpoint":
        step = -(-step // attempt.interval) * attempt.interval
    return [Fault(kind=kind, rank=attempt.rank, step=min(step, STEPS), phase=attempt.phase)]


def _workers_of(pid: int) -> list[int]:
    """Return the worker processes that a rank has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return sorted(found)
