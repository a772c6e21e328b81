"""Known-bad controls of the chaos matrix: other programs under faults, judged by the functions that judge ours.

Each trains the network of benchmarks.recovery in the peer's own code on gloo; each has a sound counterpart, the same
without the flaw, which must pass, so that the oracle fails for the flaw and not for the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import meshwright as mw
from benchmarks.recovery.peer_runs import Way, report, restarted_together, torchft, torchrun, torchrun_with_prefix
from meshwright.spec.fault import Fault
from meshwright.spec.run.chaos_report import ChaosReport

ROOT = Path(__file__).resolve().parent.parent
_KILL = Fault(kind="crash", rank=1, step=8, phase="backward")
_KILLS = tuple(_KILL.replace(step=step) for step in (8, 13, 18, 23))
_TORN = Fault(kind="crash", rank=1, step=10, phase="checkpoint")
_LOST = Fault(kind="missing-shard", rank=1, step=5, phase="checkpoint")
_NUM_STEPS = 15
_COUNTING = '''
class Counted:
    """Numbers that depend on how many others were read before; read twice, one is the same."""

    def __init__(self):
        self._places = {}

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        from workload import Numbers
        return Numbers()[self._places.setdefault(index, len(self._places))]
'''


@dataclass(frozen=True)
class Control:
    """A program that must fail, and its sound counterpart, which must not."""

    name: str
    flaw: str
    bad: Callable[[Path, Path], ChaosReport]
    """Takes the peers' interpreter and a new folder."""
    sound: Callable[[Path, Path], ChaosReport]
    is_by_chance: bool = False
    """Whether it may pass: it depends on which rank is faster."""


def _of(
    way: Way, faults: tuple[Fault, ...], num_steps: int = _NUM_STEPS, reference: Way | None = None
) -> Callable[[Path, Path], ChaosReport]:
    return lambda python, folder: report(way, python, folder, faults, num_steps, reference)


def _ours(source: str) -> Callable[[Path, Path], ChaosReport]:
    def run(python: Path, folder: Path) -> ChaosReport:
        jobs = folder.parent / f"{folder.name}-job"
        jobs.mkdir(parents=True)
        ranks = ROOT / "benchmarks" / "recovery" / "ranks"
        for name in ("job.toml", "workload.py"):
            (jobs / name).write_text((ranks / name).read_text(encoding="utf-8"), encoding="utf-8")
        (jobs / "counted.py").write_text(_COUNTING, encoding="utf-8")
        keys = (f"data.source={source}", f"train.steps={_NUM_STEPS}", "run.hang_limit_s=30", "run.timeout_s=60")
        return mw.chaos(jobs / "job.toml", *keys, faults=[_KILL], ranks=2, keep=folder)

    return run


_DCP = partial(restarted_together, program="dcp_overwrite_rank")
_DCP_ANEW = partial(restarted_together, program="dcp_overwrite_rank", SAVES_ANEW="1")
_HF = partial(restarted_together, program="hf_shard_rank", num_ranks=4)
_HF_WHOLE = partial(restarted_together, program="hf_shard_rank", num_ranks=4, KEEPS_SHARDS="1")
_LIVE = partial(torchft, MIN_GROUPS="2")

CONTROLS = (
    Control(
        "torch DCP, overwriting",
        "a rank dies in the save before its first write",
        _of(_DCP, (_TORN,)),
        _of(_DCP_ANEW, (_TORN,)),
    ),
    Control(
        "torch DCP, Hugging Face files",
        "the shard of the second of four ranks is missing",
        _of(_HF, (_LOST,)),
        _of(_HF_WHOLE, (_LOST.replace(kind="crash"),)),
    ),
    Control(
        "torchrun --max-restarts",
        "restarts share one store without a prefix; four kills, four restarts",
        _of(torchrun, _KILLS, 25),
        _of(torchrun_with_prefix, _KILLS, 25),
        is_by_chance=True,
    ),
    Control(
        "torchft PureDistributedDataParallel",
        "no fault at all; compared with the same all-reduces, waited for",
        _of(partial(_LIVE, WRAPPER="PureDistributedDataParallel"), (), reference=_LIVE),
        _of(_LIVE, ()),
    ),
    Control(
        "meshwright, data that counts reads",
        "what a sample is depends on how many were read before",
        _ours("counted:Counted"),
        _ours("workload:Numbers"),
    ),
)
