"""calibrate_given: stacks calibrated by a user's own past runs: rows of a CSV file, or a Meshwright run folder."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.evaluation.backtest.predict_runs import load_runs
from meshwright.evaluation.dataset.own_run import read_own_run
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.fitting.given import Calibration, calibrate
from meshwright.evaluation.fitting.timed_runs import is_timed
from meshwright.spec.step.stack import Stack


def given_runs(path: Path) -> list[MeasuredRun]:
    """Return the runs of a CSV file that can be compared, or the one of a run folder; raises ConfigError for none."""
    if path.is_dir():
        return [read_own_run(path)]
    runs = load_runs(path)
    timed = [run for run in runs if is_timed(run)]
    if not timed:
        reasons = [run.unsupported_reason for run in runs if run.unsupported_reason]
        because = reasons[0] if reasons else "step_time_s is empty in all of them, and so is tokens_per_s_per_gpu"
        raise ConfigError(f"{path}: none of its {len(runs)} rows can be compared with a prediction: {because}")
    return timed


def calibrate_given(paths: Sequence[Path]) -> dict[str, Calibration]:
    """Return what follows from the runs at `paths` about each of their stacks, by its name in them."""
    by_stack: dict[str, list[MeasuredRun]] = {}
    for path in paths:
        for run in given_runs(path):
            by_stack.setdefault(run.row.stack, []).append(run)
    return {stack: calibrate(runs) for stack, runs in by_stack.items()}


def calibrated_stack(stack: Stack, paths: Sequence[Path]) -> Stack:
    """Return `stack` as the runs at `paths` calibrate it; raises ConfigError where none of them is of it."""
    found = calibrate_given(paths)
    if stack.name not in found:
        others = ", ".join(sorted(found))
        raise ConfigError(f"--given holds runs of {others} and none of {stack.name}: name their software with --stack")
    return found[stack.name].applied(stack)
