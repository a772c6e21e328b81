"""What a lost replica costs the others and how soon it is back, with 1 GB of state: `python -m
benchmarks.recovery.rejoin`.

Two independent replicas of one rank train a model of 85 million parameters (1.02 GB with AdamW's states); rank 1 is
killed in a backward. Bars of the project: the survivor continues within a heartbeat (1 s) and 0.1 s, and loses at most
one step; the lost one has finished a step 3.5 s after the fault; the survivor's steps meanwhile take at most 0.3 s
longer, once.

    usual      median time between two steps of the survivor with both replicas
    alone      the same while the other is away
    stall      time from the fault to the survivor's next step, less a step alone
    hand-over  the survivor's longest time between two steps around the return, less a usual one
    back       time from the fault to the next step that the lost replica has finished
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright.fault_tolerance.step_ledger import read_ledger
from meshwright.spec.fault import Fault
from meshwright.spec.run.chaos_report import LedgerEntry
from meshwright.spec.run.run import Run

_MODEL = ("dim=768", "num_layers=12", "num_heads=12", "num_kv_heads=12", "head_dim=64", "ffn_dim=2048")
_KEYS = (
    *(f"model.options.{field}" for field in _MODEL),
    *("train.steps=24", "train.seq_len=16", "train.global_batch_size=2", "train.validation_interval=0"),
    *("layout.dp_replicate=2", "layout.dp_shard=1", "layout.microbatch_size=1", "replicas.independent=true"),
    *("checkpoint.interval=0", "run.timeout_s=120", "run.hang_limit_s=60", "data.max_bytes=200000"),
)
_STEP = 8


def main() -> None:
    """Run it a few times, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    table = Table("usual, s", "alone, s", "stall, s", "hand-over, s", "back, s", "steps again")
    for _ in range(parser.parse_args().times):
        table.add_row(*_one_run())
    Console().print(table)


def _one_run() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        faults = [Fault(kind="crash", rank=1, step=_STEP, phase="backward")]
        kept = Path(folder) / "kept"
        report = mw.chaos("examples/tiny.toml", *_KEYS, faults=faults, ranks=2, keep=kept)
        run = Run(kept / "with-faults")
        survivor, lost = (_finished(run, rank) for rank in (0, 1))
    outcome = report.outcomes[0]
    assert outcome.injection is not None
    died_s = outcome.injection.time_s
    returned = next(entry for entry in lost if entry.time_s > died_s)
    times_s = {entry.step: entry.time_s for entry in survivor}
    took_s = {step: times_s[step] - times_s[step - 1] for step in times_s if step - 1 in times_s}
    usual_s = statistics.median([took_s[step] for step in took_s if step > returned.step + 3])
    without = [took_s[step] for step in took_s if _STEP < step < returned.step - 1]
    # One that is back in time for the next step leaves no step alone.
    alone_s = statistics.median(without) if without else usual_s
    next_s = min(entry.time_s for entry in survivor if entry.time_s > died_s)
    # The step of the fault, which is done again, is that of the stall.
    around = [step for step in (returned.step - 1, returned.step, returned.step + 1) if step > _STEP]
    handed_over_s = max(took_s[step] for step in around)
    figures = (usual_s, alone_s, next_s - died_s - alone_s, handed_over_s - usual_s, returned.time_s - died_s)
    return [*(f"{figure:.2f}" for figure in figures), str(outcome.lost_steps)]


def _finished(run: Run, rank: int) -> Sequence[LedgerEntry]:
    return [entry for entry in read_ledger(run.ledger(rank)) if entry.is_finished]


if __name__ == "__main__":
    main()
