"""python -m validation.one_truth: docs/one_truth.md, plans compared with simulations of the same programs.

A plan is priced by formulas (cost/). A simulation traces the train step itself on every kind of rank and runs it in
events (simulator/). Neither reads the other, so that where both agree a mistake in one of them is unlikely.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from meshwright.config.load import load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Candidate
from meshwright.spec.step.estimate import COMPONENT_NAMES, COMPONENTS, StepDecomposition
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import Timeline
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP
from meshwright.units import GiB
from validation.questions import Asked, ask, read_questions, simulate_within

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "one_truth.md"
BEFORE = Path(__file__).with_name("questions_before.csv")
_BEFORE_COMMIT = "ccf82c7"
_EXAMPLE = "examples/llama3-405b-16k.toml"
_SCHEDULED = "examples/llama3-8b.toml"
_SCHEDULES = (
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
)
"""With the stages that each rank holds."""
_SCHEDULED_KEYS = (
    "layout.pp=4",
    "layout.dp_shard=2",
    "layout.tp=1",
    "layout.activation_checkpoint=full",
    "train.global_batch_tokens=262144",
    "layout.microbatch_size=1",
    "cluster.num_devices=8",
)
_LEAST_S = 5e-4
"""Parts of a step that are less in both halves are left out."""

_HEAD = """\
# One truth: plans compared with simulations

Generated on {date} by `python -m validation.one_truth`. For each layout it compares two answers that share no code but
the price of a single operation:

- **planned**: closed formulas (`src/meshwright/cost/`), which `meshwright plan` searches with.
- **simulated**: the train step itself, traced on every kind of rank without a device, and executed event by event
  (`src/meshwright/simulator/`), as `meshwright simulate` does.

Neither is a measurement: `docs/accuracy.md` compares plans with published runs.
"""
_QUESTIONS = """\
## Picks of the planner

The pick for each question of `validation/questions.csv`. Where a cell is empty, the pick takes more than {limit_s:.0f}
s to trace on two cores; `python -m validation.questions --simulate --only NAME` simulates it. *Before* is commit
`{before}`, simulated over planned, for the picks of that time.

| question | pick | planned | simulated | ratio | memory planned | simulated | ratio | before: step | memory |
|--|--|--|--|--|--|--|--|--|--|"""


@click.command()
@click.option("--limit", "limit_s", default=90.0, show_default=True, help="Seconds to simulate one pick.")
@click.option("--only", multiple=True, help="Name of a question to simulate; default: all.")
def main(limit_s: float, only: tuple[str, ...]) -> None:
    """Write the page; each line is printed as soon as it is known, since the whole takes half an hour."""
    lines = []
    for section in (_head(), _example(), _schedules(), _questions(limit_s, only)):
        for line in itertools.chain(section, [""]):
            click.echo(line)
            lines.append(line)
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def _head() -> Iterator[str]:
    yield _HEAD.format(date=datetime.now(UTC).date())


def _example() -> Iterator[str]:
    """Yield Llama 3's own layout, component by component."""
    planned, timeline = _both(_EXAMPLE, ())
    yield "## Llama 3 405B on 16,384 H100, component by component\n"
    yield (
        f"`{_EXAMPLE}`: the layout that it was trained with (arXiv:2407.21783, table 4: 41 % MFU, a step of 6.4 s). "
        f"Simulated: {timeline.step_s:.3g} s. Ranks that wait for the slowest of 16,384 are planned as other "
        "communication; `simulate --jitter` shows them.\n"
    )
    yield from _components(planned.estimate.step.summed(), decompose(timeline))


def _components(planned: StepDecomposition, simulated: StepDecomposition) -> Iterator[str]:
    yield "| component | planned | simulated | apart, of the step |"
    yield "|--|--|--|--|"
    for name in COMPONENTS:
        one, other = getattr(planned, name), getattr(simulated, name)
        if max(one, other) >= _LEAST_S:
            apart = (other - one) / simulated.total_s
            yield f"| {COMPONENT_NAMES[name]} | {_seconds(one)} | {_seconds(other)} | {apart:+.1%} |"
    apart = simulated.total_s / planned.total_s - 1
    yield f"| **step** | {_seconds(planned.total_s)} | {_seconds(simulated.total_s)} | {apart:+.1%} |"


def _schedules() -> Iterator[str]:
    """Yield one job under five schedules of its pipeline."""
    yield "## Five schedules of one job\n"
    yield f"`{_SCHEDULED}` with {', '.join(f'`{key}`' for key in _SCHEDULED_KEYS)}, blocks compiled and eager.\n"
    heads = ("schedule", "blocks", "planned", "simulated", "ratio", "bubble: planned", "simulated", "memory: planned")
    yield f"| {' | '.join((*heads, 'simulated'))} |"
    yield "|--|--|--|--|--|--|--|--|--|"
    for schedule, stages in _SCHEDULES:
        for is_compiled in (True, False):
            keys = (
                f"layout.schedule={schedule}",
                f"layout.virtual_stages={stages}",
                f"layout.compile={str(is_compiled).lower()}",
            )
            planned, timeline = _both(_SCHEDULED, (*_SCHEDULED_KEYS, *keys))
            yield _schedule_row(schedule, is_compiled, planned, timeline)


def _schedule_row(schedule: str, is_compiled: bool, planned: Candidate, timeline: Timeline) -> str:
    step, parts = planned.estimate.step, decompose(timeline)
    reserved = max(int(curve.reserved_bytes.max()) for curve in timeline.memory)
    cells = (
        schedule,
        "compiled" if is_compiled else "eager",
        _seconds(step.total_s),
        _seconds(timeline.step_s),
        f"{timeline.step_s / step.total_s:.3f}",
        _seconds(step.pipeline_bubble_s),
        _seconds(parts.pipeline_bubble_s),
        f"{planned.estimate.memory.reserved_bytes / GiB:.1f} GiB",
        f"{reserved / GiB:.1f} GiB",
    )
    return f"| {' | '.join(cells)} |"


def _both(file: str, overrides: tuple[str, ...]) -> tuple[Candidate, Timeline]:
    """Return a job's layout as the planner prices it, and its simulated step."""
    resolved = load_job(ROOT / file, overrides)
    job = resolved.job
    question = plan_request(resolved, Options(f"{job.cluster.name}:{job.cluster.num_devices}"))
    num_ranks = question.cluster.num_devices
    planned = judge(layout_of(job, num_ranks), question)
    traces = trace_job(TRAINER_STEP, resolved, num_ranks)
    return planned, simulate(traces, question.cluster)


def _questions(limit_s: float, only: Sequence[str]) -> Iterator[str]:
    yield _QUESTIONS.format(limit_s=limit_s, before=_BEFORE_COMMIT)
    with BEFORE.open(encoding="utf-8", newline="") as lines:
        before = {row["name"]: row for row in csv.DictReader(lines)}
    for question in read_questions():
        asked = ask(question)
        is_simulated = not only or question.name in only
        cells = [question.name, f"`{layout_text(asked.plan.pick.layout)}`", *_figures(asked, limit_s, is_simulated)]
        row = before.get(question.name)
        pairs = (("planned_s", "simulated_s"), ("planned_gib", "simulated_gib"))
        cells += [f"{float(row[b]) / float(row[a]):.2f}" if row else "" for a, b in pairs]
        yield f"| {' | '.join(cells)} |"


def _figures(asked: Asked, limit_s: float, is_simulated: bool) -> list[str]:
    """Return step and memory of a pick: planned, simulated, and the one over the other."""
    pick = asked.plan.pick
    planned_s, planned_bytes = pick.estimate.step.total_s, pick.estimate.memory.reserved_bytes
    step = simulate_within(limit_s, asked.steps, pick.layout).step if is_simulated else None
    if step is None or step.step_s is None or step.fullest_bytes is None:
        return [_seconds(planned_s), "", "", f"{planned_bytes / GiB:.1f} GiB", "", ""]
    return [
        _seconds(planned_s),
        _seconds(step.step_s),
        f"{step.step_s / planned_s:.3f}",
        f"{planned_bytes / GiB:.1f} GiB",
        f"{step.fullest_bytes / GiB:.1f} GiB",
        f"{step.fullest_bytes / planned_bytes:.3f}",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


if __name__ == "__main__":
    main()
