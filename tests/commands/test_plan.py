"""`meshwright plan`: a page for people, JSON for programs, clear errors, and no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.spec.run.layout_plan import Plan
from questions import SMALL_JOB as JOB
from questions import SMALL_PLAN as SMALL
from questions import planned_once
from repository import ROOT


@pytest.fixture(autouse=True)
def plans_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most pages here are of one question."""
    monkeypatch.setattr("meshwright.app.plan.make_plan", planned_once)


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_the_page_tells_pick_waterfall_memory_alternatives_and_doubts(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(page(capsys).split())
    for part in (
        "llama3-8b, 8.03B parameters, on 8 x h100-sxm (h100-ib400)",
        "16 sequences x 2048 tokens = 32.8k tokens a step, bfloat16; stack: meshwright",
        "layouts scored",
        "80 % interval",
        "where the step goes",
        "model FLOPs at peak",
        "MFU: model FLOPs (forward and backward once, causal attention halved) over the dense peak of bfloat16.",
        "HFU: model FLOPs and recomputed FLOPs over the dense peak.",
        "memory by class, GiB",
        "reserved",
        "free of 77.65",
        "best of each parallel layout",
        "alternatives: best layout with",
        "sensitivities: with hardware",
        "precision.float8=tensorwise",
        "Largest potential speedup: precision.float8=tensorwise (changes numerics)",
    ):
        assert part in text


def test_what_our_trainer_cannot_do_is_listed_and_not_advised(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL[:4], "b200:8", "--seq-len", "2048", "--global-batch-size", "16"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--precision nvfp4" in text
    assert "Largest potential speedup: --precision nvfp4" not in text


def test_a_row_names_what_it_needs_and_no_key_that_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    rows = page(capsys).partition("alternatives: best layout")[2].partition("if the hardware")[0].splitlines()
    with_method = [row for row in rows if row.startswith("cp")]
    assert with_method
    assert all("cp=" in row for row in with_method)
    text = page(capsys, "layout.cp_method=ring", "layout.cp=1")
    assert "kept as set: cp_method=ring, cp=1" in text or "kept as set: cp=1, cp_method=ring" in text
    assert "cp_method" not in text.replace("kept as set: cp_method", "").replace("cp=1, cp_method", "")


@pytest.mark.long
def test_what_does_not_fit_is_rejected_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama3-70b", "--cluster", "h100:64", "--seq-len", "4096", "--global-batch-tokens", "1M"]
    assert run(["plan", *arguments]) == 0
    assert "rejections: pick with" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("option", ["--price-per-gpu-hour", "--failures-per-gpu-day", "--restart-minutes"])
@pytest.mark.parametrize("number", ["inf", "nan", "1e308", "-1"])
def test_a_rate_that_no_calculation_can_use_is_refused(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SMALL, "--tokens", "1T", option, number]) == ExitCode.BAD_INPUT
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


def test_a_device_that_fails_once_in_longer_than_a_float_holds_never_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert "one failure in" not in page(capsys, "--tokens", "1T", "--failures-per-gpu-day", "1e-320")


LONG_STEPS = [
    pytest.param("llama3-70b", "h100:8", "131072", marks=pytest.mark.long),
    pytest.param("llama3-8b", "rtx-4090:8", "8192", marks=pytest.mark.long),
    ("llama3-8b", "h100:1", "8192"),
]


@pytest.mark.parametrize(("model", "cluster", "seq_len"), LONG_STEPS)
def test_steps_of_minutes_and_hours_are_not_cut_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, cluster: str, seq_len: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--cluster", cluster, "--seq-len", seq_len, "--global-batch-tokens", "64M"]
    assert run(["plan", "--model", model, *arguments]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    pick = next(line for line in text.splitlines() if line.startswith("pick"))
    assert re.fullmatch(r"pick +[\d.]+ \w+ +[\d.]+ to [\d.]+ \w+ +[\d,]+ .* %  +[\d.]+ GiB", pick)


def test_one_sequence_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL[:4], "h100-ib400:1", "--global-batch-size", "1", "--seq-len", "2048"]) == 0
    assert "\n1 sequence x 2048 tokens" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 100])
def test_no_figure_is_cut_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["plan", "--model", "mixtral-8x7b", "--cluster", "h100:64", "--global-batch-tokens", "4M"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert len(re.findall(r" [+-]\d+\.\d %  +\d[\d.]* GiB$", text, re.MULTILINE)) > 12, "step against memory, splits"


def test_a_bare_device_stands_for_its_commonest_network_which_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "llama3-8b", "--cluster", "h100:8", "--global-batch-size", "8", "layout.pp=1"]) == 0
    assert "on 8 x h100-sxm (h100-" in capsys.readouterr().out


def test_json_carries_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    plan = Plan.from_dict(record)
    assert plan.layouts_scored == record["layouts_scored"] > 1000
    assert plan.pick.layout.num_ranks == plan.num_devices == 8


def test_keys_on_the_command_line_are_kept_and_top_limits_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--json", "--top", "3", "layout.tp=2", "layout.schedule=1F1B"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert {candidate.layout.tp for candidate in (plan.pick, *plan.runners_up)} == {2}
    assert len(plan.runners_up) <= 2
    assert plan.kept == ("tp=2", "schedule=1F1B")
    assert "kept as set: tp=2" in page(capsys, "layout.tp=2")


def test_days_money_and_the_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--tokens", "1T", "--price-per-gpu-hour", "2", "--deadline", "60d", "--frontier")
    assert "1T tokens: " in text
    assert "device hours" in text
    assert "goodput" in text
    assert "60d are not enough: they are on 32 devices of h100-ib400 (below)" in text


@pytest.mark.long
def test_a_deadline_that_no_size_meets_and_one_without_a_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    late = page(capsys, "--tokens", "1T", "--deadline", "10d", "--frontier")
    assert "10d are not enough: nor are they on any cluster below" in late
    assert "60d are not enough: see --frontier" in page(capsys, "--tokens", "1T", "--deadline", "60d")


@pytest.mark.long
def test_several_clusters_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--json", "--tokens", "1T", "--cluster", "a100:8"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["budget"]["num_devices"] == 8
    assert {point["cluster"] for point in record["frontier"]} == {"h100-ib400", "dgx-a100-hdr"}


def test_a_run_that_fails_sooner_than_it_restarts_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = page(capsys, "--tokens", "1T", "--frontier", "--failures-per-gpu-day", "1e6")
    assert "1T tokens: no end in sight" in hopeless
    assert not re.search(r"\d{10}|e\+", hopeless)


def test_a_jobs_own_layout_is_compared_and_the_pick_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "\n[layout]\ndp_shard = 8  # all\nactivation_checkpoint = 'full'\n")
    assert run(["plan", str(path), "--write", "--json"]) == 0
    captured = capsys.readouterr()
    plan = Plan.from_dict(json.loads(captured.out))
    assert plan.given is not None
    assert plan.given.layout.activation_checkpoint == "full"
    assert captured.err == f"the layout is now in {path}\n"
    text = path.read_text()
    assert text.startswith("# A small job.")
    assert "# Meta's" in text
    assert "# all" in text
    assert run(["plan", str(path), "--json"]) == 0
    again = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert again.given is not None
    assert again.given.layout == plan.pick.layout


def test_a_jobs_own_layout_that_is_faster_than_all_searched_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "\n[layout]\ndp_shard = 8\n")
    assert run(["plan", str(path), "--write"]) == 0
    # A key that no search has.
    kept = path.read_text().replace("[layout]\n", "[layout]\ncompile_optimizer = true\n")
    kept = kept.replace("compile_optimizer = false\n", "")
    path.write_text(kept)
    capsys.readouterr()
    assert run(["plan", str(path), "--write"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{path} keeps its layout, which is predicted to be faster than all that were searched\n"
    assert "faster than the pick: it has keys or values that are not searched" in " ".join(captured.out.split())
    assert path.read_text() == kept


def test_a_job_that_searches_keeps_what_it_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "\n[layout]\nsearch = true\ntp = 4\n")
    assert run(["plan", str(path), "--json"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert (plan.pick.layout.tp, plan.given) == (4, None)


def test_overrides_make_the_layout_of_a_job_that_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert run(["plan", str(path), "layout.tp=2", "--write", "--json"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert (plan.pick.layout.tp, plan.pick.layout.num_ranks, plan.given, plan.kept) == (2, 8, None, ("tp=2",))
    assert "\ntp = 2\n" in path.read_text()


@pytest.mark.parametrize(
    ("overrides", "kept", "is_given"),
    [
        (["layout.loss_chunks=4"], {"loss_chunks": 4}, True),
        (["layout.prefetch=3", "layout.compile=model"], {"prefetch": 3, "compile": "model"}, True),
        (["layout.tp=2"], {"tp": 2}, False),
        (["layout.tp=2", "layout.dp_shard=4"], {"tp": 2, "dp_shard": 4}, True),
    ],
)
def test_overrides_are_kept_around_the_layout_of_a_file(
    overrides: list[str], kept: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_given: bool
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"{JOB}\n[layout]\ndp_shard = 8\nactivation_checkpoint = 'full'\n")
    assert run(["plan", str(path), *overrides, "--json"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert set(plan.kept) == {f"{key}={value}" for key, value in kept.items()}
    layouts = [one.layout for one in (plan.pick, plan.fastest, *plan.runners_up)]
    assert {tuple(getattr(layout, key) for key in kept) for layout in layouts} == {tuple(kept.values())}
    assert plan.pick.layout.activation_checkpoint != "full", "what the file says is free"
    # dp_shard = 8 of the file with tp = 2 is no layout of 8 devices.
    assert (plan.given is not None) == is_given


@pytest.mark.long
def test_a_cluster_that_is_used_whole_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("num_devices = 8\n", "").replace("h100-ib400", "dgx-h100"))
    notice = (
        'all 8 devices of cluster.name = "dgx-h100" are used: limit them with cluster.num_devices or --cluster '
        "dgx-h100:COUNT"
    )
    assert run(["plan", str(path)]) == 0
    assert notice in caplog.text
    for limit in (["--cluster", "dgx-h100:4"], []):
        if not limit:
            path.write_text(f"{path.read_text()}[layout]\ndp_shard = 8\n")
        caplog.clear()
        assert run(["plan", str(path), *limit]) == 0
        assert "are used" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["plan"], "what should be planned is missing: name a job file, or give --model and --cluster"),
        (["plan", "--model", "llama3-8b"], "--model needs --cluster NAME:COUNT"),
        (
            ["plan", "job.toml", "--model", "llama3-8b"],
            "'job.toml' names a job file, which says the model and the batch already: leave out --model",
        ),
        (["plan", "a.toml", "b.toml"], "a.toml and b.toml are 2 job files"),
        (
            ["plan", "--model", "llama3-8b", "--cluster", "h100:8", "--precision", "int8", "layout.tpp=2"],
            "has 3 problems:\n  1. --precision int8 must be one of",
        ),
        ([*SMALL, "--write"], "--write puts the layout into a job file"),
        ([*SMALL, "--frontier"], "--frontier needs --tokens"),
        ([*SMALL, "--cluster", "b200:8"], "several --cluster are compared by days and cost: give --tokens"),
        ([*SMALL, "--tokens", "many"], "--tokens: 'many' is no count"),
        ([*SMALL, "--tokens", "1T", "--deadline", "soon"], "--deadline soon is no duration"),
        ([*SMALL, "--stack", "megatron"], "stack = 'megatron' must be one of"),
        ([*SMALL, "--precision", "fp8"], "--precision fp8 must be one of"),
        ([*SMALL, "--global-batch-tokens", "1M"], "--global-batch-tokens and --global-batch-size are both given"),
        ([*SMALL, "layout.tp=7"], "layout.tp = 7 does not divide the model's num_heads = 32"),
        ([*SMALL, "layout.tpp=7"], "layout.tpp is an unknown key"),
        ([*SMALL, "layout.schedule=1f1b"], 'layout.schedule = "1f1b" is not known (did you mean 1F1B?)'),
        ([*SMALL[:4], "h100:10", *SMALL[5:]], "--cluster h100:10: COUNT = 10 fills no whole number of h100-ib400"),
        ([*SMALL[:4], "l40s-node:10", *SMALL[5:]], "l40s-node is a single node of 8 devices without a network"),
        ([*SMALL[:2], "llama9", *SMALL[3:]], "--model llama9 is no preset"),
        ([*SMALL[:4], "h200x:8", *SMALL[5:]], "'h200x' is no cluster and no device of the catalogue"),
        ([*SMALL[:2], "llama3.1-405b", *SMALL[3:]], "fits in no layout"),
        ([*SMALL[:3], "--cluster", "a100:64,h100:64"], "--cluster a100:64,h100:64: several clusters; must be one"),
        ([*SMALL[:3], "--cluster", "h100:0"], "--cluster h100:0: COUNT = 0; must be NAME:COUNT"),
        (["plan", "missing.toml"], "there is no job file missing.toml"),
    ],
)
def test_bad_input_is_told_in_a_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert error in captured.err


def test_a_layout_for_another_job_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert run(["plan", str(path), "--write", "train.seq_len=4096", "--cluster", "h100:8"]) == 2
    keys = "train.seq_len=4096"
    assert f"does not say: first set {keys} in it" in capsys.readouterr().err
    assert path.read_text() == JOB
    assert run(["plan", str(path), "--write", "--cluster", "h200:16"]) == 2
    assert "first set cluster.name=h200-ib400, cluster.num_devices=16 in it" in capsys.readouterr().err


def test_the_cluster_that_a_job_names_is_no_other_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("h100-ib400", "h100"))
    assert run(["plan", str(path), "--write", "--cluster", "h100:8"]) == 0
    assert "[layout]" in path.read_text()


def test_planning_never_imports_torch() -> None:
    program = (
        "import sys; from meshwright.cli.main import run; "
        f"assert run({[*SMALL, '--json', '--tokens', '1T']!r}) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=600)


@pytest.mark.long
def test_given_runs_calibrate_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(ROOT / "validation" / "published_runs.csv")
    assert run([*SMALL, "--json", "--stack", "torchtitan-2024"]) == ExitCode.DONE
    shipped = json.loads(capsys.readouterr().out)["pick"]["estimate"]
    assert run([*SMALL, "--json", "--stack", "torchtitan-2024", "--given", runs]) == ExitCode.DONE
    given = json.loads(capsys.readouterr().out)["pick"]["estimate"]
    assert given["step"] != shipped["step"]
    assert run([*SMALL, "--given", runs]) == ExitCode.BAD_INPUT
    assert "none of meshwright: name their software with --stack" in capsys.readouterr().err


def test_a_precision_that_the_device_lacks_is_told_in_the_head_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL[:4], "a100:8", *SMALL[5:], "--precision", "float8-rowwise"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    why = "--precision float8-rowwise: a100-sxm-80gb has no float8 units; computed in bfloat16"
    assert f"bfloat16 ({why}); stack: meshwright" in text
    assert text.count(why) == 1


def test_a_host_compiles_the_given_layout_only_where_that_pays(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(ROOT / "examples" / "tiny.toml"), "cluster.num_devices=2"]
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["given"]["layout"]["compile"] is False
    assert run([*arguments, "layout.compile=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["given"]["layout"]["compile"] is True


def test_a_given_layout_beyond_its_budget_is_shown_as_such_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    budget = "layout.activation_checkpoint=auto", "layout.memory_budget_bytes=1000"
    arguments = ["plan", str(ROOT / "examples" / "tiny.toml"), "cluster.num_devices=2", *budget]
    assert run(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "given: does not fit: tensors take " in text
    assert text.count("more than the budget of 1000 B") == 1
    assert "over budget" in text
    assert run([*arguments, "--json"]) == 0
    assert "budget of 1000 B" in json.loads(capsys.readouterr().out)["given_misfit"]
