"""A plan's page: its plots hold every layout that the tables list, and what lies beyond the axes is at their end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.pages.figures.plan_figures import memory_ranks_figure, pareto_figure, shown_layouts, step_figure
from meshwright.pages.html.plan_html import write_plan_html
from meshwright.planner.plan import make_plan
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Plan
from meshwright.units import GiB, format_duration
from questions import SMALL_PLAN, ask


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(ask(num_devices=16))


def points(plan: Plan) -> dict[str, list[tuple[float, float]]]:
    """Return free memory, GiB, and step, as drawn, of the points of each role."""
    traces = pareto_figure(plan).data
    return {one.name: list(zip(one.x, one.y, strict=True)) for one in traces if one.mode != "lines"}


@pytest.mark.slow
def test_each_layout_is_one_point_where_its_figures_are(plan: Plan) -> None:
    shown, drawn = shown_layouts(plan), points(plan)
    assert sum(map(len, drawn.values())) == len(shown)
    [pick] = drawn["pick"]
    scale = pick[1] / plan.pick.estimate.step.total_s
    assert pick[0] == pytest.approx(plan.pick.free_bytes / GiB)
    for role in ("leaves more memory", "best of another parallel layout"):
        expected = [(one.candidate.free_bytes / GiB, one.candidate.estimate.step.total_s * scale) for one in shown]
        own = [at for at, one in zip(expected, shown, strict=True) if one.role == role]
        assert np.array(drawn.get(role, [])) == pytest.approx(np.array(own))


def test_every_runner_up_is_numbered_once_and_labels_do_not_overlap(plan: Plan) -> None:
    [numbered] = [one for one in pareto_figure(plan).data if one.name == "best of another parallel layout"]
    labels = [one for text in numbered.text if text for one in text.split(" (")[0].split(", ")]
    assert sorted(labels) == sorted(one.label for one in shown_layouts(plan) if one.role == numbered.name)
    at = [(x, y) for x, y, text in zip(numbered.x, numbered.y, numbered.text, strict=True) if text]
    ends = pareto_figure(plan).layout
    spans = [high - low for low, high in (ends.xaxis.range, ends.yaxis.range)]
    for a, b in combinations(at, 2):
        assert abs(a[0] - b[0]) > 0.03 * spans[0] or abs(a[1] - b[1]) > 0.03 * spans[1]


def test_the_line_is_the_pareto_front(plan: Plan) -> None:
    [line] = [one for one in pareto_figure(plan).data if one.mode == "lines"]
    assert list(line.x) == sorted(set(line.x))
    assert list(line.y) == sorted(line.y)


def test_what_is_far_off_is_at_the_end_of_the_axes_with_its_figures(plan: Plan) -> None:
    far = plan.pick.replace(
        layout=Layout(dp_shard=16, tp=1, microbatch_size=7),
        free_bytes=-900 * GiB,
        estimate=plan.pick.estimate.replace(step=plan.pick.estimate.step.replace(model_flops_at_peak_s=1e4)),
    )
    figure = pareto_figure(plan.replace(fsdp_alone=far))
    [plain] = [one for one in figure.data if one.name == "FSDP alone"]
    assert (plain.x[0], plain.y[0]) == (figure.layout.xaxis.range[0], figure.layout.yaxis.range[1])
    assert "900 GiB missing" in plain.text[0]


def test_one_slow_layout_of_the_front_does_not_squeeze_the_others(plan: Plan) -> None:
    roomy, step = plan.pareto_front[-1], plan.pick.estimate.step
    slow = roomy.replace(
        layout=roomy.layout.replace(microbatch_size=7),
        free_bytes=roomy.free_bytes + GiB,
        estimate=roomy.estimate.replace(step=step.replace(model_flops_at_peak_s=2 * step.total_s)),
    )
    before = pareto_figure(plan).layout.yaxis.range
    figure = pareto_figure(plan.replace(pareto_front=(*plan.pareto_front, slow)))
    assert figure.layout.yaxis.range == before
    [front] = [one for one in figure.data if one.name == "leaves more memory"]
    assert (front.y[-1], front.text[-1][:2]) == (before[1], " (")


@pytest.mark.slow
def test_bars_of_memory_add_up_to_what_each_pipeline_rank_reserves() -> None:
    plan = make_plan(ask("llama3.2-1b", 4, batch=16, pp=4), min_scored=0)
    figure = memory_ranks_figure(plan)
    totals = [sum(values) for values in zip(*(one.x for one in figure.data), strict=True)]
    assert totals == pytest.approx([rank.reserved_bytes / GiB for rank in plan.memory_by_pipeline_rank])
    assert list(figure.data[0].y) == [f"pp rank {rank}" for rank in range(4)]


def test_the_waterfall_ends_at_the_step(plan: Plan) -> None:
    [bars] = step_figure(plan).data
    scale = bars.x[0] / plan.pick.estimate.step.model_flops_at_peak_s
    assert bars.base[-1] + bars.x[-1] == pytest.approx(plan.pick.estimate.step.total_s * scale, rel=1e-2)


def test_the_page_has_the_tables_three_plots_and_no_link(plan: Plan, tmp_path: Path) -> None:
    write_plan_html(plan, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    for title in ("Where the step goes", "Step time against memory", "Memory", "Other layouts, and other hardware"):
        assert f"<h2>{title}</h2>" in text
    assert len(re.findall(r'class="plotly-graph-div"', text)) == 3
    for row in (
        "best of each parallel layout",
        "sensitivities: with hardware",
        "unsharded parameters",
        "GEMM inefficiency",
    ):
        assert row in text
    assert "[bold]" not in text.partition("<body>")[2]
    assert "http://" not in text.partition("<body>")[2]


@pytest.mark.slow
def test_the_command_writes_the_page_with_days_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    options = ("--html", str(file), "--tokens", "1T", "--frontier", "--json")
    assert run([*SMALL_PLAN, *options]) == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out)["frontier"]) > 1
    text = file.read_text(encoding="utf-8")
    assert "<h2>Time and cost of the run</h2>" in text
    assert "1T tokens: " in text
    assert run([*SMALL_PLAN, "--html", str(tmp_path / "none" / "plan.html")]) == ExitCode.BAD_INPUT
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_layout_that_a_job_sets_is_on_the_page(tmp_path: Path) -> None:
    given = Layout(dp_shard=8, tp=2)
    plan = make_plan(replace(ask(num_devices=16), given=given), min_scored=0)
    write_plan_html(plan, tmp_path / "plan.html")
    section = (tmp_path / "plan.html").read_text().partition("The layout that the job sets")[2].partition("<h2")[0]
    assert "given: dp_shard=8, tp=2" in section
    assert plan.given is not None
    assert format_duration(plan.given.step_s) in section
    assert format_duration(plan.pick.step_s) in section
