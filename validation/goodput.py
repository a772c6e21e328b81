"""Goodput of trainings under failures at several rates, measured and predicted: `python -m validation.goodput`.

Ranks of real runs are killed (SIGKILL) or frozen (SIGSTOP) from outside, at times of a seeded Poisson process that runs
while they start and train, and stands while a failure is being detected. Runs without failures give the time of a step
and of a checkpoint, runs with a few those of a restart and of detection, one of each before the runs that are to be
predicted and one after, since other programs on a machine change them. They predict the runs at other rates:

- expected: by the closed formula, of the rate alone. Compared with one run it has the sampling error of its failures,
  which is estimated by replays of other draws.
- realised: by a replay of the very failures that the run had, which has not;
- own: the same with the steps, restarts and detections of the run itself, which no change of the machine disturbs.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from meshwright.cost.expected_goodput import FailureModel, expected_time
from meshwright.spec.run.done_steps import read_step_times
from meshwright.spec.run.goodput import Goodput, goodput
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import read_events
from validation.disturbed_run import Happened, disturb
from validation.failure_replay import Failure, drawn, replay, share_of, spread

_ROOT = Path(__file__).parents[1]
# Not compiled: `layout.compile="auto"` looks at train.steps, and runs of other lengths would be other programs.
_KEYS = (
    "layout.compile=false",
    *("model.options.dim=32", "model.options.head_dim=8", "model.options.ffn_dim=48", "model.options.num_layers=2"),
    *("data.max_bytes=200000", "train.seq_len=32", "train.validation_interval=0"),
    *("run.hang_limit_s=2", "run.timeout_s=5", "run.grace_s=5", "run.parameter_hash=false", "run.log_interval=100"),
    *("run.max_restarts=100000", "run.restart_backoff_s=0", "checkpoint.mode=sync"),
)
_HANG_SHARE = 0.25
_NUM_REPLAYS = 300


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    parts: Goodput
    num_steps: int
    num_executed: int
    """Steps, with those that were done again."""
    num_saves: int
    num_attempts: int
    happened: tuple[Happened, ...]

    @property
    def failures(self) -> Iterator[Failure]:
        """Yield what befell it."""
        return (one.failure for one in self.happened)

    @property
    def detections_s(self) -> list[float]:
        """Return the times from each failure by SIGKILL until all ranks had ended."""
        return [one.ended_s - one.began_s for one in self.happened if not one.was_hang]

    @property
    def failed_restarts_s(self) -> float:
        """Return the time of restarts that failed, without the detection of that."""
        pairs = zip(self.happened, self.happened[1:], strict=False)
        return sum(one.began_s - last.ended_s for last, one in pairs if one.was_in_restart)

    @property
    def work_s(self) -> float:
        """Return the time of the steps that count, with their share of what lies between steps."""
        between_s = self.parts.other_s * self.num_steps / self.num_executed
        return self.parts.productive_s + self.parts.data_wait_s + between_s

    @property
    def total_s(self) -> float:
        """Return the time from the first step on."""
        return self.parts.total_s - self.parts.start_up_s

    @property
    def by_cause(self) -> dict[str, float]:
        """Return the seconds of each cause of the formula."""
        parts = self.parts
        again_s = parts.repeated_s + parts.other_s * (1 - self.num_steps / self.num_executed)
        return {
            "productive": self.work_s,
            "repeated": again_s,
            "checkpoint": parts.checkpoint_s,
            "restart": parts.restart_s + parts.stopped_s,
            "hang": parts.hang_s,
        }


def train(folder: Path, name: str, keys: Sequence[str], failures: list[Failure]) -> Measured:
    """Train under failures and return what it took; raises RuntimeError for a run that does not end by itself."""
    run = Run(folder / name)
    command = (sys.executable, "-m", "meshwright", "train", str(_ROOT / "examples" / "tiny.toml"), "--ranks", "2")
    keys = (*_KEYS, *keys, f"run.dir={run.folder}")
    with (
        (folder / f"{name}.log").open("w") as log,
        subprocess.Popen((*command, *keys), stdout=log, stderr=log) as launcher,
    ):
        happened = disturb(launcher, run, failures)
    if launcher.returncode:
        raise RuntimeError(f"the run ended with exit code {launcher.returncode}: see {folder / name}.log")
    steps, events = read_step_times(run), read_events(run)
    # Without what comes after the last checkpoint, such as the end of the processes.
    last_s = max(event.time_s for event in events if event.kind == "checkpoint")
    parts = goodput(steps, [event for event in events if event.time_s <= last_s])
    assert parts is not None
    num_saves = sum(event.kind == "checkpoint" for event in events)
    num_attempts = len({step.attempt for step in steps})
    return Measured(parts, steps[-1].step, len(steps), num_saves, num_attempts, tuple(happened))


def fitted(baselines: Sequence[Measured], few: Sequence[Measured], every: int) -> FailureModel:
    """Return what runs without failures and with a few say of any run of the same job; mtbf_s is left at 1."""
    step_s = sum(one.work_s for one in baselines) / sum(one.num_steps for one in baselines)
    detections_s = [seconds for one in few for seconds in one.detections_s]
    num_hangs = sum(one.was_hang for run in few for one in run.happened)
    restarts_s = sum(one.parts.restart_s + one.parts.stopped_s - one.failed_restarts_s for one in few)
    return FailureModel(
        mtbf_s=1.0,
        interval_s=every * step_s,
        checkpoint_s=sum(one.parts.checkpoint_s for one in baselines) / sum(one.num_saves for one in baselines),
        restart_s=(restarts_s - sum(detections_s)) / max(1, sum(one.num_attempts - 1 for one in few)),
        detection_s=fmean(detections_s) if detections_s else 0.0,
        hang_share=_HANG_SHARE,
        hang_s=sum(one.parts.hang_s for one in few) / num_hangs if num_hangs else 0.0,
    )


def compare(measured: Measured, model: FailureModel, every: int, mtbf_s: float) -> str:
    """Return a run next to what is predicted of it, as lines of a table."""
    model = replace(model, mtbf_s=mtbf_s)
    own = replace(fitted([measured], [measured], every), mtbf_s=mtbf_s)
    expected = expected_time(model)
    realised, by_own = (replay(one, measured.num_steps, every, measured.failures) for one in (model, own))
    num_drawn, shares = 4 * len(measured.happened) + 20, []
    for seed in range(_NUM_REPLAYS):
        other = drawn(num_drawn, mtbf_s, _HANG_SHARE, seed)
        shares.append(share_of(replay(model, measured.num_steps, every, iter(other))))
    found, causes = measured.work_s / measured.total_s, measured.by_cause
    work_s = causes["productive"]
    lines = [
        f"\nmean time between failures {mtbf_s:g} s: {len(measured.happened)} failures, "
        f"{measured.num_attempts} attempts that came to a first step, {measured.total_s:.0f} s",
        f"{'seconds for each of lasting work':34}{'measured':>10}{'expected':>10}{'realised':>10}{'own':>10}",
    ]
    for cause, seconds in causes.items():
        predicted = [getattr(expected, cause), *(one.get(cause, 0.0) / one["productive"] for one in (realised, by_own))]
        lines.append(f"{cause:34}{seconds / work_s:10.3f}" + "".join(f"{seconds:10.3f}" for seconds in predicted))
    goodputs = [expected.share, share_of(realised), share_of(by_own)]
    errors = (100 * (share / found - 1) for share in goodputs)
    lines += [
        f"{'goodput':34}{found:10.3f}" + "".join(f"{share:10.3f}" for share in goodputs),
        f"{'error':34}{'':10}" + "".join(f"{error:+9.1f}%" for error in errors),
        f"sampling error of so few failures: {100 * spread(shares) / expected.share:.1f} %; own: {own}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2400, help="steps of each run")
    parser.add_argument("--every", type=int, default=60, help="steps between two checkpoints")
    parser.add_argument("--fit", type=float, default=30.0, help="mean seconds between failures of the run fitted on")
    parser.add_argument("--held-out", type=float, nargs="+", default=[60.0, 15.0], help="those predicted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*", help="further KEY=VALUE of the job")
    given = parser.parse_args()
    half, every = given.steps // 2, given.every
    keys, of_half = (
        (f"train.steps={steps}", f"checkpoint.interval={every}", *given.keys) for steps in (given.steps, half)
    )
    baselines, few, found = [], [], {}
    with tempfile.TemporaryDirectory(prefix="meshwright-goodput-") as temporary:
        folder = Path(temporary)
        for number in range(2):
            baselines.append(train(folder, f"none-{number}", of_half, []))
            few.append(train(folder, f"few-{number}", of_half, _plenty(given.fit, half, given.seed + number)))
            print(f"fitted on these: {fitted(baselines[number:], few[number:], every)}", flush=True)
            for mtbf_s in given.held_out if number == 0 else ():
                found[mtbf_s] = train(folder, f"{mtbf_s:g}", keys, _plenty(mtbf_s, given.steps, given.seed))
                print(compare(found[mtbf_s], fitted(baselines, few, every), every, mtbf_s), "(so far)", flush=True)
    model = fitted(baselines, few, every)
    print(f"fitted: step {1e3 * model.interval_s / every:.1f} ms, {model}")
    for mtbf_s, measured in found.items():
        print(compare(measured, model, every, mtbf_s))


def _plenty(mtbf_s: float, num_steps: int, seed: int) -> list[Failure]:
    """Return more failures than a run of these steps sees, stratified in blocks of about as many as it does."""
    in_block = max(8, round(0.1 * num_steps / mtbf_s))
    blocks = (drawn(in_block, mtbf_s, _HANG_SHARE, 1000 * seed + round(1e3 * mtbf_s) + block) for block in range(40))
    return [failure for block in blocks for failure in block]


if __name__ == "__main__":
    main()
