"""A real run's profile becomes a timeline whose parts are its step, on every axis."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from meshwright.app.reports.report import report
from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.pages.tables.waterfall_lines import short_lines
from meshwright.profiler.profiled_timeline import profile_of_run
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import SpanKind, Timeline
from training_runs import FinishedRun, tiny_job, train_on_ranks

STEP = 5


def profiled(folder: Path, num_ranks: int, **layout: int | str) -> FinishedRun:
    window = {"profile_start": STEP - 1, "profile_steps": 2}
    return train_on_ranks(tiny_job(folder, layout=layout, run=window), folder / "run", num_ranks)


def counts(timeline: Timeline, kind: SpanKind) -> Counter[tuple[str, str]]:
    """Return how often each operation runs, by (name, axis)."""
    spans = timeline.spans.take(timeline.spans.kind == kind)
    axes = (*timeline.axes, "")
    return Counter((timeline.names[name], axes[axis]) for name, axis in zip(spans.name, spans.axis, strict=True))


def require_whole(timeline: Timeline, finished: FinishedRun) -> None:
    """Every rank's parts are its step, nobody computes twice at once, and the step is the one that was timed."""
    assert timeline.ranks == tuple(range(timeline.source.world_size))
    for rank in timeline.ranks:
        parts = decompose(timeline, rank)
        assert parts.total_s == pytest.approx(timeline.step_s, rel=1e-6)
        assert parts.compute_s > 0
        assert parts.optimizer_s > 0
        assert parts.data_loading_s > 0
        spans = timeline.of_rank(rank)
        own = spans.take(spans.stream == 0)
        assert (own.start_s[1:] >= own.end_s[:-1] - 1e-9).all()
    timed_s = next(row["step_ms"] for row in finished.rows if row["step"] == STEP) / 1000
    assert timeline.step_s > 0.7 * timed_s


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return profiled(tmp_path_factory.mktemp("profiled"), 2, pp=2, dp_shard=1, activation_checkpoint="full")


def test_a_pipelines_profile_is_its_step(pipelined: FinishedRun) -> None:
    timeline = profile_of_run(pipelined.run.folder)
    require_whole(timeline, pipelined)
    sent = counts(timeline, SpanKind.COMMUNICATION)
    # Four microbatches: a message forward and one back for each, which both ranks take part in.
    assert sent["c10d.send", "pp"] == sent["c10d.recv_", "pp"] == 2 * 4
    assert set(timeline.actions) >= {"0F0", "0B3", "1F0", "1B3"}
    assert set(timeline.phases) == {"forward", "backward", "recompute", "optimizer"}
    parts = decompose(timeline)
    assert parts.pipeline_bubble_s > 0
    assert parts.recomputation_s > 0
    assert (
        parts.dp_communication_s
        == parts.tp_communication_s
        == parts.cp_communication_s
        == parts.ep_communication_s
        == 0
    )


def test_a_step_compared_with_itself_does_not_differ(
    pipelined: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(pipelined.run.folder)
    assert run(["compare", folder, folder]) == ExitCode.DONE
    page = capsys.readouterr().out
    assert "pipeline bubble" in page
    assert "what runs more often" not in page
    assert run(["compare", folder, folder, "--step", "77"]) == ExitCode.BAD_INPUT
    assert "which share: 4, 5" in capsys.readouterr().err


def test_the_waterfall_is_of_one_stage(pipelined: FinishedRun) -> None:
    result = report(pipelined.run.folder)
    found, mean = result.waterfall, result.parts["measured"]
    assert (found.source, found.num_steps, found.step in (STEP - 1, STEP)) == ("profile", 2, True)
    assert found.rank is not None
    assert found.rank == found.pipeline_rank
    # The causes of one rank sum to the step, as the components of the mean rank do.
    assert found.measured.total_s == pytest.approx(mean.total_s, rel=1e-9)
    assert found.measured.pipeline_bubble_s > 0
    assert found.measured.recomputation_s > 0
    assert found.measured.model_flops_at_peak_s > 0
    assert found.predicted is not None
    first = next(short_lines(found, ""))
    assert first.startswith(f"where the step goes (profiled, rank {found.rank}): model FLOPs at peak ")


def test_one_rank_against_all(pipelined: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = pipelined.run.timelines.glob("*rank-1.json.gz")
    assert run(["compare", str(file), str(pipelined.run.folder)]) == ExitCode.DONE
    assert "what runs more often" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "part", "axis", "collective"),
    [
        ({"tp": 2, "dp_shard": 1}, "tp_communication_s", "tp", "_c10d_functional.all_gather_into_tensor"),
        ({"dp_shard": 2}, "dp_communication_s", "fsdp", "c10d._allgather_base_"),
        ({"cp": 2, "dp_shard": 1, "cp_method": "ring"}, "cp_communication_s", "cp", "c10d.recv_"),
    ],
)
def test_communication_is_along_its_axis(
    tmp_path: Path, layout: dict[str, int | str], part: str, axis: str, collective: str
) -> None:
    finished = profiled(tmp_path, 2, **layout)
    timeline = profile_of_run(finished.run.folder)
    require_whole(timeline, finished)
    assert counts(timeline, SpanKind.COMMUNICATION)[collective, axis] > 0
    assert getattr(decompose(timeline), part) > 0


@pytest.mark.long
def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    finished = profiled(tmp_path, 1, dp_shard=1)
    timeline = profile_of_run(finished.run.folder)
    require_whole(timeline, finished)
    assert decompose(timeline).pipeline_bubble_s == 0
