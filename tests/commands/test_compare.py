"""`meshwright compare`: what it refuses, and what two timelines by hand come to."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.spec.step.comparison import module_list, short_name
from meshwright.spec.trace.timeline import SpanKind, Spans, Timeline, TimelineSource
from written_runs import STEPS, write_run


def timeline_with(num_matmuls: int, wait_s: float) -> Timeline:
    """One rank: matmuls of a second each, then a wait for an all-reduce."""
    count = num_matmuls + 1
    columns = {field.name: np.zeros(count, np.int64) for field in fields(Spans)}
    columns |= {name: np.full(count, -1) for name in ("axis", "action", "record")}
    columns["kind"][-1], columns["axis"][-1], columns["name"][-1] = SpanKind.WAIT, 0, 1
    start_s = np.arange(count, dtype=float)
    end_s = start_s + 1
    end_s[-1] = num_matmuls + wait_s
    return Timeline(
        source=TimelineSource(kind="simulated", name="by hand", world_size=1),
        step_s=num_matmuls + wait_s,
        ranks=(0,),
        multiplicity=(1,),
        names=("aten.mm.default", "c10d.allreduce_.default"),
        scopes=("blocks.3.attention",),
        phases=("forward",),
        actions=(),
        axes=("tp",),
        spans=Spans(**columns | {"start_s": start_s, "end_s": end_s}),  # type: ignore[arg-type]
    )


def test_the_difference_is_told_by_component_and_by_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    timeline_with(2, 0.5).save(files[0])
    timeline_with(3, 1.5).save(files[1])
    assert run(["compare", *map(str, files), "--json"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["a"]["parts"]["compute_s"], found["b"]["parts"]["compute_s"]) == (2.0, 3.0)
    assert (found["a"]["parts"]["tp_communication_s"], found["b"]["parts"]["tp_communication_s"]) == (0.5, 1.5)
    [matmul] = [one for one in found["operations"] if one["kind"] == "compute"]
    assert (matmul["name"], matmul["scope"], matmul["a"], matmul["b"]) == (
        "aten.mm",
        "blocks.*",
        {"total_s": 2.0, "count": 2.0},
        {"total_s": 3.0, "count": 3.0},
    )
    assert run(["compare", *map(str, files), "--html", str(tmp_path / "compare.html")]) == ExitCode.DONE
    assert "<h2>Where the steps go</h2>" in (tmp_path / "compare.html").read_text(encoding="utf-8")
    page = capsys.readouterr().out
    assert "+1 s" in page
    assert "50 %" in page
    assert "what runs more often" in page


def test_ranks_are_told_one_by_one_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = timeline_with(2, 0.5)
    both = {field.name: np.concatenate([getattr(one.spans, field.name)] * 2) for field in fields(Spans)}
    both["rank"] = np.array([0, 0, 0, 1, 1, 1])
    alike = replace(one, ranks=(0, 1), multiplicity=(1, 1), spans=Spans(**both))
    both["kind"] = np.where(both["rank"] == 1, int(SpanKind.HOST), both["kind"])
    unlike = replace(alike, spans=Spans(**both))
    alike.save(tmp_path / "alike.npz")
    unlike.save(tmp_path / "unlike.npz")
    assert run(["compare", str(tmp_path / "alike.npz"), str(tmp_path / "alike.npz")]) == ExitCode.DONE
    assert "compute A" not in capsys.readouterr().out
    assert run(["compare", str(tmp_path / "alike.npz"), str(tmp_path / "unlike.npz")]) == ExitCode.DONE
    assert "compute A" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.json", "{}", "cannot be read as a trace of torch.profiler"),
        ("a.json", '{"traceEvents": []}', "the trace holds no events"),
        ("a.json.gz", "no gzip", "cannot be read as a trace of torch.profiler"),
        ("a.npz", "no zip", "is no timeline"),
    ],
)
def test_what_is_no_step_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, error: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert run(["compare", str(tmp_path / name), str(tmp_path / name)]) == ExitCode.BAD_INPUT
    assert error in capsys.readouterr().err


def test_a_run_without_a_profile_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, simulated = write_run(tmp_path / "plain", STEPS), tmp_path / "a.npz"
    timeline_with(2, 0.5).save(simulated)
    assert run(["compare", str(plain), str(simulated)]) == ExitCode.BAD_INPUT
    error = capsys.readouterr().err
    assert f"{plain} has no profile" in error
    assert "run.profile_start" in error


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", ["empty", "without a manifest", "cut off"])
def test_the_folder_that_is_no_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, is_first: bool
) -> None:
    good, bad = write_run(tmp_path / "good", STEPS), tmp_path / "bad"
    if kind == "empty":
        bad.mkdir()
    else:
        manifest = write_run(bad, STEPS) / "manifest.json"
        manifest.unlink()
        if kind == "cut off":
            manifest.write_text("{", encoding="utf-8")
    assert run(["compare", *map(str, (bad, good) if is_first else (good, bad))]) == ExitCode.BAD_INPUT
    error = capsys.readouterr().err
    assert str(good) not in error
    assert run(["report", str(bad)]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == error


def test_names_are_those_that_both_kinds_of_timeline_know() -> None:
    assert short_name("aten.mm.default") == short_name("aten.mm") == "aten.mm"
    assert module_list("blocks.3.attention.query") == module_list("FSDP::all_gather (blocks.3)") == "blocks.*"
    assert module_list("output") == module_list("") == ""
