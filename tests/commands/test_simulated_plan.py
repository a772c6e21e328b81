"""`meshwright plan --simulate`: finalists are ranked by their simulated steps, and those that do not fit drop out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from meshwright import hardware
from meshwright.app.simulated import simulated_plan
from meshwright.app.simulated.simulated_plan import Steps
from meshwright.cli.main import run
from meshwright.config.load import load_job
from meshwright.hardware.catalogue import CATALOGUE_VARIABLE
from meshwright.pages.tables.simulated_table import fastest_words
from meshwright.planner.read_request import Options, plan_request
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Plan, SimulatedStep
from meshwright.units import GiB
from questions import SMALL_JOB, planned_once
from questions import SMALL_PLAN as SMALL

JOB = (
    SMALL_JOB
    + """
[layout]
search = true

[planner]
simulate = 2
"""
)
SLOW, FAST = (SimulatedStep(step_s=seconds, reserved_bytes=(40 * GiB,)) for seconds in (2.0, 1.0))
TOO_LARGE = SimulatedStep(step_s=0.5, reserved_bytes=(40 * GiB, 800 * GiB))
UNTRACEABLE = SimulatedStep(problem="aten.nonzero.default in blocks.0 cannot be traced")


@pytest.fixture(autouse=True)
def formulas_answer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_plan, "make_plan", planned_once)


@pytest.fixture
def steps_are(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Layout]]:
    """Return what sets the steps that are found for the finalists, and returns the finalists once they were asked."""

    def set_steps(*found: SimulatedStep) -> list[Layout]:
        asked: list[Layout] = []

        def instead(
            _: Steps, layouts: Sequence[Layout], tell: Callable[[int, SimulatedStep], None]
        ) -> list[SimulatedStep]:
            asked.extend(layouts)
            for position, step in enumerate(found[: len(layouts)]):
                tell(position, step)
            return list(found[: len(layouts)])

        monkeypatch.setattr(simulated_plan, "simulate_layouts", instead)
        return asked

    return set_steps


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Plan, str]:
    assert run([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    return Plan.from_dict(json.loads(captured.out)), captured.err


def test_the_fastest_simulated_step_is_picked(
    steps_are: Callable[..., list[Layout]], capsys: pytest.CaptureFixture[str]
) -> None:
    by_formula, _ = plan_of(capsys, *SMALL)
    asked = steps_are(SLOW, FAST, SLOW)
    plan, progress = plan_of(capsys, *SMALL, "--simulate", "3")
    assert asked == [by_formula.pick.layout, *(runner.layout for runner in by_formula.runners_up[:2])]
    assert plan.pick.layout == asked[1]
    assert plan.pick.simulated == FAST
    assert [runner.simulated for runner in plan.runners_up[:2]] == [SLOW, SLOW]
    assert all(runner.simulated is None for runner in plan.runners_up[2:])
    assert len(plan.memory_by_pipeline_rank) == asked[1].pp
    assert "[2/3]" in progress
    assert "1 s simulated, 40 GiB reserved" in progress


def test_a_simpler_layout_wins_within_the_error_of_ranking(
    steps_are: Callable[..., list[Layout]], capsys: pytest.CaptureFixture[str]
) -> None:
    close = SimulatedStep(step_s=1.01, reserved_bytes=(40 * GiB,))
    asked = steps_are(close, FAST)
    plan, _ = plan_of(capsys, *SMALL, "--simulate", "2")
    assert plan.pick.layout == asked[0]
    assert [runner.layout for runner in plan.runners_up[:1]] == [asked[1]]


def test_the_layout_called_fastest_is_judged_by_what_picked(
    steps_are: Callable[..., list[Layout]], capsys: pytest.CaptureFixture[str]
) -> None:
    steps_are(FAST, SLOW, SLOW)
    plan, _ = plan_of(capsys, *SMALL, "--simulate", "3")
    [other, *_] = plan.runners_up
    quicker = other.estimate.step.replace(cpu_bound_s=0.0, model_flops_at_peak_s=0.0)
    fastest = other.replace(estimate=other.estimate.replace(step=quicker))
    assert "it is +100.0 % against the pick" in fastest_words(plan.replace(fastest=fastest))
    unseen = fastest.replace(layout=Layout(dp_replicate=8))
    assert "it was not simulated" in fastest_words(plan.replace(fastest=unseen))
    formulas = plan.replace(fastest=fastest, pick=plan.pick.replace(simulated=None))
    simpler, leaner = (fastest_words(formulas.replace(is_simpler=is_simpler)) for is_simpler in (True, False))
    assert simpler.endswith("the pick is the simplest layout within the error of ranking")
    assert leaner.endswith("the pick is as simple and leaves more memory")


@pytest.mark.long
def test_no_value_of_a_simulated_layout_is_broken_over_two_lines(
    steps_are: Callable[..., list[Layout]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = steps_are(SLOW, FAST, SLOW)
    assert run([*SMALL, "--simulate", "3"]) == 0
    part = capsys.readouterr().out.partition("simulated finalists")[2].partition("where the step goes")[0]
    assert max(map(len, part.splitlines())) <= 80
    for layout in asked:
        for value in layout_text(layout).split(","):
            assert value in part


def test_what_cannot_be_picked_drops_out_with_its_reason(
    steps_are: Callable[..., list[Layout]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = steps_are(TOO_LARGE, UNTRACEABLE, SLOW)
    plan, _ = plan_of(capsys, *SMALL, "--simulate", "3")
    assert plan.pick.layout == asked[2]
    assert [one.layout for one in plan.dropped] == asked[:2]
    assert run([*SMALL, "--simulate", "3"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "simulated finalists" in page
    assert "pipeline rank 1 needs 800 GiB" in page
    assert "cannot be traced" in page


def test_if_none_fits_all_reasons_are_said(
    steps_are: Callable[..., list[Layout]], capsys: pytest.CaptureFixture[str]
) -> None:
    steps_are(TOO_LARGE, UNTRACEABLE)
    assert run([*SMALL, "--simulate", "2"]) == 2
    said = capsys.readouterr().err
    assert "none of the 2 best layouts runs when simulated" in said
    assert "pipeline rank 1 needs 800 GiB" in said
    assert "aten.nonzero.default" in said


def test_a_job_asks_for_it_and_gets_it_written(
    steps_are: Callable[..., list[Layout]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    asked = steps_are(SLOW, FAST)
    question = plan_request(load_job(path), Options())
    assert simulated_plan.by_simulation(load_job(path), question).layout == asked[1]
    asked = steps_are(SLOW, FAST)
    assert run(["plan", str(path), "--write"]) == 0
    capsys.readouterr()
    assert load_job(path).job.layout.resolve(8) == asked[1]
    plan, progress = plan_of(capsys, "plan", str(path), "--simulate", "0")
    assert plan.pick.simulated is None
    assert progress == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--stack", "generic"), "--simulate runs Meshwright's own step, and the plan is for generic"),
        (("--precision", "float8-rowwise"), "and the plan is for float8-rowwise"),
    ],
)
def test_only_our_own_step_is_simulated(
    arguments: tuple[str, str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SMALL, *arguments, "--simulate", "2"]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.long
def test_a_finalist_that_cannot_be_priced_drops_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Path(hardware.__file__).parent
    for kind, name, other in (("devices", "l40s", "odd"), ("clusters", "l40s-node", "odd-node")):
        lines = (ours / kind / f"{name}.toml").read_text().replace('device = "l40s"', 'device = "odd"').splitlines()
        (tmp_path / kind).mkdir()
        kept = [line for line in lines if not line.startswith(("float32 =", "tf32 ="))]
        (tmp_path / kind / f"{other}.toml").write_text("\n".join(kept))
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(tmp_path))
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nsource = "moe-4m"\n[train]\nglobal_batch_size = 16\n[precision]\ncompute = "bfloat16"\n'
        '[cluster]\nname = "odd-node"\nnum_devices = 2\n'
    )
    assert run(["plan", str(job), "--simulate", "2"]) == 2
    said = capsys.readouterr().err
    # The router of a mixture multiplies in float32, whatever the job computes in.
    assert said.count("device odd has no dense_flops_per_s.float32: add it to its catalogue entry; planned") == 2
    assert "none of the 2 best layouts runs when simulated" in said
    assert "memory_margin" not in said
