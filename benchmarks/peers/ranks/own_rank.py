"""One rank of `meshwright train`, with turns: python -m benchmarks.peers.ranks.own_rank FOLDER key=value ..."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from benchmarks.peers.turns import Turns
from meshwright.config.load import load_job
from meshwright.data.loader import Microbatch
from meshwright.fault_tolerance.step_guard import Decision
from meshwright.fault_tolerance.step_ledger import StepLedger
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.launch.worker import train_as_rank
from meshwright.trainer.run import loop
from meshwright.trainer.run.peak_flops import PeakFlops
from meshwright.trainer.run.run_recorder import RunRecorder
from meshwright.trainer.step.train_step import StepResult, TrainStep
from meshwright.trainer.step.training import Training


def main() -> None:
    """Train until no turn is left."""
    folder, *overrides = sys.argv[1:]
    job = load_job(Path(folder) / "job.toml", overrides).job
    turns = Turns.of_environment()
    take_step, step_of = loop.take_step, TrainStep.__call__

    def watched_take_step(
        training: Training,
        step: int,
        speed: PeakFlops,
        recorder: RunRecorder | None,
        ledger: StepLedger | None = None,
    ) -> Decision:
        turns.next()
        return take_step(training, step, speed, recorder, ledger)

    def watched_step(self: TrainStep, step: int, microbatches: Sequence[Microbatch]) -> StepResult:
        result = step_of(self, step, microbatches)
        turns.loss = result.loss
        return result

    run_dir = Path(folder) / "runs" / os.environ["MASTER_PORT"]
    with patch.object(loop, "take_step", watched_take_step), patch.object(TrainStep, "__call__", watched_step):
        train_as_rank(RankConfig(job=job, run_dir=str(run_dir), module_dir=folder))


if __name__ == "__main__":
    main()
