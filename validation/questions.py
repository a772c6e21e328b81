"""python -m validation.questions: figures of plans compared with the simulated steps of their picks.

Each question of questions.csv is planned. Its pick must pass `check` and fit on every pipeline rank; with --simulate it
and the two runners-up are traced and simulated as `meshwright simulate` does, each in a process of its own.
"""

from __future__ import annotations

import csv
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import click

from meshwright.app.job.job_problems import check_job
from meshwright.app.simulated.simulated_plan import Steps, simulate_layout
from meshwright.config.load import ResolvedJob
from meshwright.errors import MeshwrightError
from meshwright.planner.plan import make_plan
from meshwright.planner.read_request import Named, Options, plan_request, resolve_named
from meshwright.planner.request import PlanRequest
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Candidate, Plan, SimulatedStep
from meshwright.units import GiB

FILE = Path(__file__).with_name("questions.csv")
NUM_FINALISTS = 3
CLOSE = 0.05
"""Planned steps that differ by less have no order to be compared."""
STEP_TOLERANCE, MEMORY_TOLERANCE = 0.10, 0.08
_GRACE_S = 20.0
_HEAD = (
    "question",
    "pick",
    "GiB left",
    "step planned",
    "simulated",
    "ratio",
    "GiB planned",
    "simulated",
    "ratio",
    "2nd planned, simulated",
    "3rd planned, simulated",
    "order",
    "CPU s",
    "wrong",
)


@dataclass(frozen=True)
class Question:
    """A row of questions.csv."""

    name: str
    model: str
    cluster: str
    num_devices: int
    seq_len: int
    global_batch_tokens: int


@dataclass(frozen=True)
class Asked:
    """A question, and the plan that answers it."""

    question: Question
    resolved: ResolvedJob
    planner_question: PlanRequest
    plan: Plan

    @property
    def finalists(self) -> list[Candidate]:
        """Return the pick and the best layouts of other splits."""
        return [self.plan.pick, *self.plan.runners_up[: NUM_FINALISTS - 1]]

    @property
    def steps(self) -> Steps:
        """Return what is simulated of each finalist."""
        return Steps(self.resolved, self.planner_question.cluster)


@dataclass(frozen=True)
class Limited:
    """A simulation that ended, or was ended."""

    step: SimulatedStep
    cpu_s: float


def read_questions(file: Path = FILE) -> list[Question]:
    """Return the questions of a CSV file."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Question(
                row["name"],
                row["model"],
                row["cluster"],
                int(row["num_devices"]),
                int(row["seq_len"]),
                int(row["global_batch_tokens"]),
            )
            for row in csv.DictReader(lines)
        ]


def ask(question: Question) -> Asked:
    """Return the plan for a question; raises InfeasibleLayout where nothing fits."""
    cluster = f"{question.cluster}:{question.num_devices}"
    named = Named(question.model, cluster, question.seq_len, question.global_batch_tokens, None)
    overrides = (f"cluster.name={question.cluster}", f"cluster.num_devices={question.num_devices}")
    resolved = resolve_named(named, overrides)
    planner_question = plan_request(resolved, Options(cluster, takes_example=True))
    plan = make_plan(planner_question, num_runners_up=NUM_FINALISTS - 1)
    return Asked(question, resolved, planner_question, plan)


def problems_of(asked: Asked) -> list[str]:
    """Return why the pick cannot run, by `check`, and by the formulas' memory of each of its pipeline ranks."""
    layout, usable = asked.plan.pick.layout, asked.plan.usable_memory_bytes
    job = asked.resolved.job.replace(layout=LayoutRequest(**layout.to_dict()))
    problems = check_job(ResolvedJob(job, asked.resolved.origins, asked.resolved.path), layout.num_ranks)
    for rank, memory in enumerate(asked.plan.memory_by_pipeline_rank):
        if memory.needed_bytes > usable:
            missing = (memory.needed_bytes - usable) / GiB
            problems.append(f"pipeline rank {rank} lacks {missing:.1f} GiB")
    fullest = max(memory.needed_bytes for memory in asked.plan.memory_by_pipeline_rank)
    headline = asked.plan.pick.estimate.memory.needed_bytes
    if abs(fullest - headline) > 1:
        problems.append(f"the headline is {headline / GiB:.1f} GiB, the fullest rank's {fullest / GiB:.1f}")
    return problems


def differences(asked: Asked, pick: SimulatedStep) -> list[str]:
    """Return where the plan of the pick and its simulation are farther apart than they should be."""
    if pick.step_s is None or pick.fullest_bytes is None:
        return [str(pick.problem)]
    estimate, found = asked.plan.pick.estimate, []
    if abs(pick.step_s / estimate.step.total_s - 1) > STEP_TOLERANCE:
        found.append("step")
    if abs(pick.fullest_bytes / estimate.memory.reserved_bytes - 1) > MEMORY_TOLERANCE:
        found.append("memory")
    if pick.fullest_bytes > asked.plan.usable_memory_bytes:
        found.append("does not fit when simulated")
    return found


def is_same_order(finalists: Sequence[Candidate], steps: Sequence[SimulatedStep]) -> bool:
    """Return whether layouts that the plan sees more than 5 % apart stand in the same order when simulated."""
    both = zip(finalists, steps, strict=True)
    pairs = [(one.estimate.step.total_s, step.step_s) for one, step in both if step.step_s is not None]
    return all(faster[1] < slower[1] for faster in pairs for slower in pairs if faster[0] * (1 + CLOSE) < slower[0])


def simulate_within(limit_s: float, steps: Steps, layout: Layout) -> Limited:
    """Return the step of a layout, simulated in a process of its own that is ended after `limit_s`."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_simulate_into, args=(sender, steps, layout))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            found: Limited = receiver.recv()
            return found
    except EOFError:
        return Limited(SimulatedStep(problem="the simulation failed, as said above"), 0.0)
    finally:
        _end(process.pid, process.join)
    return Limited(SimulatedStep(problem=f"more than {limit_s:.0f} s"), limit_s)


def _end(pid: int | None, join: object) -> None:
    """Interrupt a process, which then ends the tracers that it started, and wait for it."""
    assert pid is not None
    assert callable(join)
    join(1.0)
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        join(_GRACE_S)


def _simulate_into(sender: Connection, steps: Steps, layout: Layout) -> None:
    try:
        found = simulate_layout(steps, layout)
    except MeshwrightError as error:
        found = SimulatedStep(problem=str(error))
    except KeyboardInterrupt:
        return
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    sender.send(Limited(found, sum(one.ru_utime + one.ru_stime for one in usage)))


def row_of(asked: Asked, simulated: Sequence[Limited]) -> list[str]:
    """Return the cells of a question's row."""
    pick, plan = asked.plan.pick, asked.plan
    wrong = problems_of(asked)
    cells = [asked.question.name, layout_text(pick.layout), f"{_least_left(plan) / GiB:.1f}"]
    planned_s, planned_bytes = pick.estimate.step.total_s, pick.estimate.memory.reserved_bytes
    if not simulated:
        return [*cells, f"{planned_s:.4g}", "", "", f"{planned_bytes / GiB:.1f}", *[""] * 6, "; ".join(wrong)]
    steps = [one.step for one in simulated]
    wrong += differences(asked, steps[0])
    cells += _beside(planned_s, steps[0].step_s, 1.0) + _beside(planned_bytes, steps[0].fullest_bytes, GiB)
    finalists = asked.finalists[: len(steps)]
    others = [
        f"{one.estimate.step.total_s:.4g}, {step.step_s or 0:.4g}"
        for one, step in zip(finalists[1:], steps[1:], strict=True)
    ]
    is_same = is_same_order(finalists, steps)
    cells += [*others, *[""] * (NUM_FINALISTS - 1 - len(others)), "same" if is_same else "DIFFERS"]
    return [*cells, ", ".join(f"{one.cpu_s:.0f}" for one in simulated), "; ".join(wrong)]


def _least_left(plan: Plan) -> int:
    return plan.usable_memory_bytes - max(memory.reserved_bytes for memory in plan.memory_by_pipeline_rank)


def _beside(planned: float, simulated: float | None, unit: float) -> list[str]:
    if simulated is None:
        return [f"{planned / unit:.4g}", "-", "-"]
    return [f"{planned / unit:.4g}", f"{simulated / unit:.4g}", f"{simulated / planned:.3f}"]


def rows(questions: Sequence[Question], is_simulated: bool, num_finalists: int, limit_s: float) -> Iterator[list[str]]:
    """Yield the row of each question as soon as it is known."""
    for question in questions:
        try:
            asked = ask(question)
        except MeshwrightError as error:
            yield [question.name, *[""] * (len(_HEAD) - 2), str(error)]
            continue
        wanted = asked.finalists[:num_finalists] if is_simulated else []
        yield row_of(asked, [simulate_within(limit_s, asked.steps, one.layout) for one in wanted])


@click.command()
@click.option("--simulate", "is_simulated", is_flag=True, help="Trace and simulate the finalists: minutes each.")
@click.option("--only", multiple=True, help="Name of a question; default: all.")
@click.option("--finalists", type=click.IntRange(1, NUM_FINALISTS), default=NUM_FINALISTS, help="Layouts to simulate.")
@click.option("--limit", "limit_s", default=600.0, show_default=True, help="Seconds for one layout.")
def main(is_simulated: bool, only: tuple[str, ...], finalists: int, limit_s: float) -> None:
    """Print a row for each question."""
    questions = [one for one in read_questions() if not only or one.name in only]
    click.echo(f"| {' | '.join(_HEAD)} |")
    click.echo("|" + "--|" * len(_HEAD))
    for row in rows(questions, is_simulated, finalists, limit_s):
        click.echo(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")


if __name__ == "__main__":
    main()
