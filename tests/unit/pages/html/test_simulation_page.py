"""A simulation's page tells everything that was found, in a terminal and as one HTML file that needs no network."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.errors import UnsupportedError
from meshwright.pages.html import html_page as html
from meshwright.pages.html.simulation_html import write_html
from meshwright.pages.tables.simulation_memory import short_op
from meshwright.pages.tables.simulation_table import simulation_page
from meshwright.spec.step.estimate import Estimate, MemoryUse, StepDecomposition
from meshwright.spec.step.simulation_report import SimulationReport, Stragglers, Straggling
from meshwright.spec.trace.timeline import Timeline
from meshwright.units import GiB, format_duration
from simulated_steps import simulated_step
from simulation_reports import simulation_report_of

PLOTLY_BYTES = 4.9e6


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulated_step()


def terminal(run: SimulationReport, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in simulation_page(run):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_tells_time_memory_communication_ranks_and_padding(timeline: Timeline) -> None:
    text = terminal(simulation_report_of(timeline))
    for part in (
        "llama3-8b on 8 x h100-sxm (h100-ib400)",
        "131k tokens a step",
        "pp=4, dp_shard=2",
        "where the step goes",
        "  matmul",
        "+11.1 %",
        "MFU 41.0 %",
        "causal attention halved",
        "layers.3.attention",
        "rank 0 at its peak",
        "layers.*.attention.query",
        "recompute and offload candidates",
        "layers.*.ffn",
        "250 ms",
        "allgather_base",
        "blocks.attention.key",
        "1.5 x",
        "layout.prefetch = 2",
    ):
        assert part in text
    assert "out of memory" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_predicted_stragglers_have_a_row_of_their_own_and_are_not_compared(timeline: Timeline) -> None:
    run = simulation_report_of(timeline)
    assert run.outcome is not None
    jitter_s = 0.1 * timeline.step_s
    estimate = Estimate(step=StepDecomposition(stragglers_s=jitter_s), memory=MemoryUse(), relative_error=0.1)
    outcome = run.outcome.replace(predicted=estimate, predicted_parts=StepDecomposition(other_communication_s=jitter_s))
    text = terminal(run.replace(outcome=outcome))
    row = next(line for line in text.splitlines() if "stragglers" in line)
    assert row.split() == ["stragglers", "-", "-", *format_duration(jitter_s).split(), "-"]
    assert "other communication" not in text
    assert "stragglers" not in terminal(run)


@pytest.mark.parametrize(("share", "shown"), [(0.5, "+100.0 %"), (0.02, "+49 ms"), (0.0, "+50 ms")])
def test_per_cent_of_next_to_nothing_is_a_difference(timeline: Timeline, share: float, shown: str) -> None:
    run = simulation_report_of(timeline)
    assert run.outcome is not None
    outcome = run.outcome.replace(
        parts=StepDecomposition(cpu_bound_s=0.05),
        predicted_parts=StepDecomposition(cpu_bound_s=share * 0.05),
        fixed_cpu_bound_s=0.0,
    )
    row = next(line for line in terminal(run.replace(outcome=outcome)).splitlines() if "CPU-bound" in line)
    assert row.rstrip().endswith(shown)


def test_formulas_next_to_a_slowed_step_say_that_they_slow_none(timeline: Timeline) -> None:
    run = simulation_report_of(timeline)
    assert run.outcome is not None
    # What is left of a sum in another order is nothing.
    one = Straggling(rank=0, num_ranks=2, compute_s=1.0, added_compute_s=2.44e-15, added_wait_s=-1e-12)
    slowed = run.outcome.replace(
        stragglers=Stragglers(usual_step_s=timeline.step_s, ranks=(one,)),
        predicted_parts=StepDecomposition(compute_s=timeline.step_s),
    )
    text = terminal(run.replace(outcome=slowed))
    assert "predicted (no slow rank)" in text
    assert re.search(r"^ *0 +2 +1 s +0 s +0 s ", text, re.MULTILINE)
    usual = terminal(run.replace(outcome=slowed.replace(stragglers=None)))
    assert "vs predicted" in usual
    assert "none slowed" not in usual


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_is_cut_on_a_narrow_terminal(timeline: Timeline, width: int) -> None:
    run = simulation_report_of(timeline)
    text, wide = terminal(run, width), terminal(run, 200)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    numbers = re.findall(r"\d[\d.,]*", wide)
    assert len(numbers) > 80
    assert sorted(re.findall(r"\d[\d.,]*", text)) == sorted(numbers)


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_is_broken_on_a_narrow_terminal(timeline: Timeline, width: int) -> None:
    run = simulation_report_of(timeline)
    assert run.outcome is not None
    rank, scope = run.outcome.memory[0], "FSDP::post_backward_reshard (layers.*)"
    roles = {"optimizer_state": 7 * GiB, "gradient": 5 * GiB}
    fused = "inductor.fused(embedding, convert_element_type, _unsafe_masked_index_put_accumulate)"
    largest = tuple(one.replace(op=fused, scope=scope) for one in rank.largest)
    fullest = rank.replace(phase="backward", scope=scope, by_role=roles, largest=largest)
    saved = tuple(
        one.replace(op="inductor.fused(add, convert_element_type)", scope=scope) for one in run.outcome.savings
    )
    exposed = tuple(one.replace(op="c10d._reduce_scatter_base_.default", scope=scope) for one in run.outcome.exposed)
    outcome = run.outcome.replace(memory=(fullest,), savings=saved, exposed=exposed)
    text, wide = (terminal(run.replace(outcome=outcome), columns) for columns in (width, 300))
    assert max(map(len, text.splitlines())) <= width
    whole = {word.rstrip(":,") for word in wide.split()}
    assert {word.rstrip(":,") for word in text.split() if len(word) < width // 2} <= whole


def test_ranks_that_do_not_fit_come_first_with_what_would_make_them(timeline: Timeline) -> None:
    text = terminal(simulation_report_of(timeline, usable_bytes=20 * GiB))
    assert text.index("out of memory") < text.index("where the step goes")
    assert "rank 0 (and 1 identical rank) needs 29.1 GiB: 9.1" in text
    assert "layout.activation_checkpoint=selective" in text
    assert "layout.layout." not in text
    assert 'layout.activation_checkpoint = "auto"' in text


def test_a_step_that_would_not_end_has_no_times_and_says_why() -> None:
    text = terminal(simulation_report_of(None))
    assert "ranks wait in a circle: rank 1 for rank 2" in text
    assert "where the step goes" not in text


def test_reports_travel_as_json(timeline: Timeline) -> None:
    run = simulation_report_of(timeline)
    assert SimulationReport.from_json(run.to_json()) == run


class Links(HTMLParser):
    """Collects what a page would load, and checks that its elements close."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["script"]:
            self.text += data


def read(file: Path) -> Links:
    links = Links()
    links.feed(file.read_text(encoding="utf-8"))
    assert links.open == []
    return links


def test_html_is_one_file_with_every_section(timeline: Timeline, tmp_path: Path) -> None:
    write_html(simulation_report_of(timeline), timeline, tmp_path / "report.html")
    page = read(tmp_path / "report.html")
    assert page.loaded == []
    for title in (
        "Where the step goes",
        "Ranks",
        "Streams of a rank",
        "Memory",
        "Recompute and offload candidates",
        "Exposed communication",
        "Padding",
    ):
        assert title in page.text
    assert "examples/<job>.toml" in page.text
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(r'class="plotly-graph-div"', text)) == 5
    # plotly itself is inlined once.
    assert len(text) < PLOTLY_BYTES + 3e5


def test_html_of_a_step_that_would_not_end_says_why(tmp_path: Path) -> None:
    write_html(simulation_report_of(None), None, tmp_path / "report.html")
    assert "ranks wait in a circle" in read(tmp_path / "report.html").text


def test_html_without_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(module: str, purpose: str) -> None:
        raise UnsupportedError(f"{purpose} needs {module}")

    monkeypatch.setattr(html, "import_extra", absent)
    with pytest.raises(UnsupportedError, match=r"a report as a page needs plotly\.offline"):
        write_html(simulation_report_of(None), None, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.long
def test_html_of_many_ranks_and_spans_stays_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    timeline = simulated_step(num_ranks=16, num_microbatches=64, num_ops=100)
    assert len(timeline.spans) >= 16 * 38_000
    write_html(simulation_report_of(timeline), timeline, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8e6
    assert "are not drawn" in read(tmp_path / "report.html").text


def test_a_step_that_fits_only_because_memory_is_given_back_is_called_tight(timeline: Timeline) -> None:
    run = simulation_report_of(timeline, usable_bytes=40 * GiB)
    assert run.outcome is not None
    assert "tight" not in terminal(run)
    memory = MemoryUse(activations_bytes=39 * GiB, fragmentation_bytes=4 * GiB)
    estimate = Estimate(
        step=StepDecomposition(model_flops_at_peak_s=timeline.step_s), memory=memory, relative_error=0.1
    )
    tight = run.replace(outcome=run.outcome.replace(predicted=estimate))
    assert "tight: predicted reserved memory 43 GiB, usable 40 GiB" in terminal(tight)


def test_no_table_names_a_kernel_that_other_devices_lack() -> None:
    assert short_op("aten._scaled_dot_product_cudnn_attention.default") == "scaled_dot_product_attention"
    assert short_op("aten._scaled_dot_product_flash_attention.default") == "scaled_dot_product_flash_attention"
