"""python -m validation.drawn --seed N: plans of layouts drawn at random, compared with their simulations.

Picks of a planner are alike: what formulas have wrong elsewhere shows only in layouts that no planner would choose. A
seed that was looked at has been tuned for, be it unknowingly: take the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import click

from meshwright.app.simulated.simulated_plan import Steps
from meshwright.config.load import inspect_text
from meshwright.errors import MeshwrightError
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.spec.run.layout_plan import Candidate
from meshwright.units import GiB
from validation.questions import MEMORY_TOLERANCE, STEP_TOLERANCE, simulate_within

MODELS = (
    "llama3-8b model.options.num_layers=10",
    "llama3.2-1b",
    "qwen3-0.6b",
    "qwen3-8b model.options.num_layers=12",
    "mixtral-8x7b model.options.num_layers=8 model.options.dim=2560 model.options.ffn_dim=7168",
)
"""Small enough to be traced in seconds; with heads that are tied and that are not, and experts."""
CLUSTERS = {
    "h100-ib400": 8,
    "h100-tcpx": 8,
    "h200-efa": 8,
    "b200-ib400": 8,
    "gb200-nvl72": 4,
    "a100-80gb-ib100": 8,
    "mi300x-ib400": 8,
    "l40s-eth100": 8,
    "rtx-4090-eth100": 8,
    "rtx-a6000-node": 4,
}
"""With the devices of a node."""
_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
_SCHEDULES = (*_LOOPED, "1F1B", "GPipe", "ZBVZeroBubble", "DualPipeV")
_AXES = {"pp": 0.45, "tp": 0.35, "cp": 0.2, "dp_replicate": 0.2}
"""With how likely each is in a layout."""
_LARGEST_BYTES = 150 * GiB


@dataclass(frozen=True)
class Drawn:
    """A layout of a job, and what the plan says of it."""

    overrides: tuple[str, ...]
    steps: Steps
    planned: Candidate
    usable_bytes: float


def draw(random: Random) -> Drawn | None:
    """Return a layout drawn at random; None where the draw does not hold together or is too large."""
    overrides = (*random.choice(MODELS).split(), *_job(random))
    try:
        inspection = inspect_text(Path("drawn"), "", (f"model.source={overrides[0]}", *overrides[1:]))
        if inspection.problems:
            return None
        question = plan_request(inspection.resolved, Options(takes_example=True))
        planned = None if question.given is None else judge(question.given, question)
    except MeshwrightError:
        return None
    if planned is None or planned.estimate.memory.reserved_bytes > _LARGEST_BYTES:
        return None
    steps = Steps(inspection.resolved, question.cluster)
    return Drawn(overrides, steps, planned, question.cluster.device.usable_memory_bytes)


def _job(random: Random) -> Iterator[str]:
    cluster, per_node = random.choice(list(CLUSTERS.items()))
    num_devices = per_node * (1 if cluster.endswith("node") else random.choice([1, 1, 2, 4]))
    yield from (f"cluster.name={cluster}", f"cluster.num_devices={num_devices}")
    degrees, left = {}, num_devices
    for axis, likely in _AXES.items():
        fitting = [degree for degree in (2, 4, 8) if left % degree == 0]
        if fitting and random.random() < likely:
            degrees[axis] = random.choice(fitting)
            left //= degrees[axis]
    degrees["dp_shard"] = left
    yield from (f"layout.{axis}={degree}" for axis, degree in degrees.items())
    microbatch = random.choice([1, 1, 2, 4])
    num_microbatches = random.choice([1, 2, 4, 8, 16]) * (2 if "pp" in degrees else 1)
    batch = left * degrees.get("dp_replicate", 1) * microbatch * num_microbatches
    yield from (f"layout.microbatch_size={microbatch}", f"train.global_batch_size={batch}")
    yield f"train.seq_len={random.choice([1024, 2048, 4096, 8192])}"
    yield f"precision.compute={random.choice(['bfloat16'] * 4 + ['float32'])}"
    yield from _options(random, degrees)


def _options(random: Random, degrees: dict[str, int]) -> Iterator[str]:
    if "pp" in degrees:
        schedule = random.choice(_SCHEDULES)
        yield f"layout.schedule={schedule}"
        yield f"layout.virtual_stages={random.choice([2, 3]) if schedule in _LOOPED else 'auto'}"
    if "cp" in degrees:
        yield f"layout.cp_method={random.choice(['ring', 'ulysses', 'all-gather'])}"
    yield f"layout.async_tp={str('tp' in degrees and random.random() < 0.4).lower()}"
    yield f"layout.activation_checkpoint={random.choice(['none', 'selective', 'full'])}"
    yield f"layout.compile={str(random.random() < 0.5).lower()}"
    yield f"layout.gradient_sync={random.choice(['auto', 'auto', 'step', 'microbatch'])}"
    yield f"layout.reshard_after_forward={random.choice(['auto', 'auto', 'always', 'never'])}"


@click.command(help=__doc__)
@click.option("--seed", type=int, required=True)
@click.option("--number", type=click.IntRange(min=1), default=30, show_default=True, help="Layouts to draw.")
@click.option("--limit", "limit_s", type=float, default=300.0, show_default=True, help="Seconds for each simulation.")
def main(seed: int, number: int, limit_s: float) -> None:
    """Print each layout's figures, and how many are within the tolerances."""
    random, steps, fitting = Random(seed), [], []
    while number:
        drawn = draw(random)
        if drawn is None:
            continue
        number -= 1
        found = simulate_within(limit_s, drawn.steps, drawn.planned.layout).step
        step_s, memory = drawn.planned.estimate.step.total_s, drawn.planned.estimate.memory.reserved_bytes
        if found.step_s is None or found.fullest_bytes is None:
            click.echo(f"none ({found.problem}): {' '.join(drawn.overrides)}")
            continue
        steps.append(found.step_s / step_s - 1)
        reserved = found.fullest_bytes / memory - 1
        if max(memory, found.fullest_bytes) < drawn.usable_bytes:
            fitting.append(reserved)
        figures = f"step {step_s:.4g} s {steps[-1]:+.1%}, memory {memory / GiB:.1f} GiB {reserved:+.1%}"
        click.echo(f"{figures}: {' '.join(drawn.overrides)}")
    click.echo(_summary("steps", steps, STEP_TOLERANCE))
    click.echo(_summary("memory of those that fit", fitting, MEMORY_TOLERANCE))


def _summary(what: str, apart: list[float], tolerance: float) -> str:
    sizes = [abs(one) for one in apart]
    within = sum(size <= tolerance for size in sizes)
    if not sizes:
        return f"{what}: none"
    return (
        f"{what}: {within} of {len(sizes)} within {tolerance:.0%}; median {median(sizes):.1%}, worst {max(sizes):.1%}"
    )


if __name__ == "__main__":
    main()
