"""`meshwright check`: all problems of a job and its surroundings at once, or a summary; never torch."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from meshwright.app.job.initial_weights import tokenizer_note
from meshwright.app.job.job_problems import check_job
from meshwright.app.job.summary import summary
from meshwright.cli.main import run
from meshwright.config.load import load_job
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.run.run import Manifest
from meshwright.units import format_bytes, format_count, format_duration
from repository import ROOT


@pytest.fixture(autouse=True)
def in_a_folder_with_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 500)
    monkeypatch.chdir(tmp_path)


def job_file(text: str = "") -> str:
    Path("job.toml").write_text(text if "[data]" in text else f'{text}\n[data]\nsource = "corpus.txt"\n')
    return "job.toml"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["check", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def summary_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert run(["check", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return dict(line.split(maxsplit=1) for line in shown.out.splitlines())


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.app.job.cpu_training.nvidia_driver", lambda: None)


def test_the_numbers_of_the_page_are_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nsource = "llama-1m"\n[train]\nsteps = 60\nseq_len = 256\nglobal_batch_size = 16\n'
    keys = [job_file(text), "--ranks", "2", "layout.dp_shard=2", "layout.microbatch_size=2"]
    assert run(["check", *keys, "cluster.name=h100-ib400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines, figures = dict(found["lines"]), found["figures"]
    assert lines["batch"].startswith("16 sequences x 256 tokens = 4.1k tokens a step, 4 microbatches of 2 on each")
    counts = ("num_ranks", "num_steps", "global_batch_size", "global_batch_tokens", "num_microbatches")
    assert [figures[name] for name in counts] == [2, 60, 16, 4096, 4]
    assert figures["layout"]["dp_shard"] == 2
    assert figures["layout"]["compile"] is True, "as it is priced"
    assert lines["model"].startswith(f"llama-1m, {format_count(figures['num_parameters'])} parameters")
    assert lines["step"].startswith(format_duration(figures["step_s"]))
    reserved, usable = (format_bytes(figures[name]) for name in ("reserved_bytes", "usable_bytes"))
    assert lines["memory"].startswith(f"{reserved} reserved of {usable} usable")
    assert run(["check", *keys, "--json"]) == 0
    unpriced = json.loads(capsys.readouterr().out)["figures"]
    assert (unpriced["step_s"], unpriced["reserved_bytes"], unpriced["num_microbatches"]) == (None, None, 4)


@pytest.mark.usefixtures("without_gpu")
def test_async_tp_needs_no_key_where_the_device_compiles_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [job_file(), "layout.async_tp=true", "layout.tp=2"]
    layout = summary_of(capsys, *keys, "cluster.name=h100-ib400", "precision.compute=bfloat16")["layout"]
    assert "async_tp" in layout
    # A processor compiles nothing unasked, nor is a ring's selective recomputation compiled.
    assert "layout.compile = true is not set" in refusal(capsys, *keys)
    ring = ["layout.cp=2", "layout.cp_method=ring", "layout.activation_checkpoint=selective"]
    assert "layout.compile = true is not set" in refusal(capsys, *keys, *ring, "cluster.name=h100-ib400")


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_kernel_that_the_cpu_lacks_is_refused_as_train_does(compute: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [job_file(), "layout.attention_backend=varlen", f"precision.compute={compute}"]
    assert refusal(capsys, *arguments) == (
        'error: command line: layout.attention_backend = "varlen" has no kernel on a CPU: set '
        'layout.attention_backend to "flex" or "auto"\n'
    )
    if compute == "bfloat16":
        assert run(["check", *arguments, "cluster.name=h100-ib400"]) == 0, "it is another machine's"
        assert run(["check", *arguments, "cluster.device=h100-sxm"]) == 0


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.skipif(find_spec("torchao") is None, reason="8-bit states take torchao")
def test_moments_that_a_cpu_is_slow_to_quantize_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    int8 = "optimizer.state_dtype=int8"
    assert summary_of(capsys, job_file(), int8)["note"].startswith('optimizer.state_dtype = "int8" is for the memory')
    assert "note" not in summary_of(capsys, job_file(), int8, "cluster.name=h100-ib400", "precision.compute=bfloat16")


def test_golden_summary(capsys: pytest.CaptureFixture[str]) -> None:
    job_file("[layout]\ndp_shard = -1\nmicrobatch_size = 2\n")
    assert run(["check", "job.toml", "--ranks", "2"]) == 0
    assert capsys.readouterr().out == (
        "job     job.toml: configuration valid\n"
        "model   llama-1m, 1.06M parameters, 6.91M FLOPs a token forward and backward, float32\n"
        "batch   8 sequences x 256 tokens = 2.05k tokens a step, 2 microbatches of 2 on each data-parallel rank; "
        "100 steps, 205k tokens in all\n"
        "layout  dp_shard 2 = 2 ranks; activation_checkpoint none\n"
        "data    corpus.txt, tokenizer bytes\n"
        "run     runs/job (new); checkpoint every 50 steps, newest 2 kept, 12.1 MiB each\n"
    )
    assert not Path("runs").exists()


def test_the_summary_says_how_a_model_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[layout]\npp = 2\ntp = 2\ncp = 2\nschedule = 'ZBVZeroBubble'\nactivation_checkpoint = 'full'\n"
    summary = summary_of(capsys, job_file(text + "activation_checkpoint_every = 2\ncompile = true"))
    assert summary["layout"] == (
        "pp 2 x cp 2 x tp 2 = 8 ranks; cp_method all-gather, schedule ZBVZeroBubble, activation_checkpoint full every "
        "2, compile"
    )
    assert summary["stages"] == "4, of 4 x 1 blocks"


def test_the_summary_says_where_compile_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    ring = "[layout]\ncp = 2\ncp_method = 'ring'\ncompile = true\nactivation_checkpoint = "
    assert summary_of(capsys, job_file(ring + "'full'"))["layout"].endswith("full, compile")
    assert (
        "compile without effect on blocks with eager attention"
        in summary_of(capsys, job_file(ring + "'selective'"))["layout"]
    )


def test_many_equal_stages_are_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(ROOT / "examples" / "llama3-405b-16k.toml")]) == 0
    ends = "; the first holds the embedding alone; the last holds the final norm and the head alone"
    assert f"stages  128, of 0, 126 x 1, 0 blocks{ends}\n" in capsys.readouterr().out


def test_ranks_that_fill_no_node_are_those_of_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[cluster]\nname = "h100-ib400"\n[layout]\ndp_shard = 9\n[train]\nglobal_batch_size = 9\n'
    step = summary_of(capsys, job_file(text))["step"]
    assert step.startswith("not estimated: a layout of 9 ranks fills no whole number of h100-ib400 nodes")


@pytest.mark.parametrize("name", sorted(Layout.model_fields))
def test_the_summary_names_every_key_that_differs_from_its_default(name: str) -> None:
    others = {
        "schedule": "GPipe",
        "stage_boundaries": (2, 3, 4),
        "cp_method": "ring",
        "attention_backend": "flash",
        "activation_checkpoint": "full",
        "activation_checkpoint_blocks": ("full",) * 4,
        "reshard_after_forward": "never",
        "gradient_sync": "step",
        "compile_backend": "aot_eager",
    }
    own = getattr(BUSY, name)
    value = others.get(name) or (not own if isinstance(own, bool) else 4)
    assert what_is_said_of(BUSY.replace(**{name: value})) != what_is_said_of(BUSY)


BUSY = LayoutRequest(pp=2, cp=2, tp=2, dp_shard=2, virtual_stages=2, activation_checkpoint="selective", compile=True)


def what_is_said_of(layout: LayoutRequest) -> list[str]:
    resolved = load_job(job_file())
    lines = summary(replace(resolved, job=resolved.job.replace(layout=layout)), None)
    # Whether the layout can run is not asked here.
    return [text for label, text in islice(lines, 4) if label in ("batch", "layout")]


def test_all_that_is_wrong_with_a_layout_is_told_with_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[layout]\ndp_shard = -1\npp = 9\ntp = 3\nreshard_after_forward = 5\nschedule = 'ZBV'\n"
    shown = refusal(capsys, job_file(text), "layout.cp=3", "--ranks", "405")
    assert [line.split(" = ")[0] for line in shown.splitlines()] == [
        "error: job.toml has 5 problems:",
        "  1. command line: train.seq_len",
        "  2. job.toml:4: layout.tp",
        "  3. job.toml:3: layout.pp",
        "  4. job.toml:5: layout.reshard_after_forward",
        "  5. job.toml:6: layout.schedule",
    ]
    # The batch of each rank follows from degrees that are wrong.
    right = "layout.pp=1", "layout.tp=1", "layout.reshard_after_forward=auto", "layout.schedule=1F1B"
    shown = refusal(capsys, "job.toml", *right, "--ranks", "5")
    assert shown.startswith("error: job.toml: train.global_batch_size = 8 does not divide by 5 data-parallel ranks")


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
def test_a_microbatch_that_divides_no_batch_is_one_problem(
    capsys: pytest.CaptureFixture[str], ranks: list[str]
) -> None:
    shown = refusal(capsys, job_file("[layout]\ndp_shard = -1\n"), "layout.microbatch_size=3", *ranks)
    assert "train.global_batch_size = 8 does not divide by layout.microbatch_size = 3: set" in shown
    assert shown.count("does not divide") == 1
    open_layout = refusal(capsys, job_file(), "layout.microbatch_size=3", *ranks)
    assert open_layout.count("does not divide") == 1


def test_the_devices_that_a_wrong_degree_needs_are_not_compared_with_the_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = job_file("[cluster]\nname = 'dgx-h100'\n")
    assert "has 8 devices but the layout needs 12" in refusal(capsys, file, "layout.pp=3", "layout.dp_shard=4")
    shown = refusal(capsys, file, "layout.pp=16")
    assert shown.startswith("error: command line: layout.pp = 16")
    assert len(shown.splitlines()) == 1


def test_a_schedule_is_read_from_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file("[layout]\npp = 2\nschedule = 'mine.csv'\n[train]\nglobal_batch_size = 2\n")
    assert "mine.csv" in refusal(capsys, file)
    Path("mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert "it runs 1 microbatch, but a step has 2" in refusal(capsys, file)
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert "schedule mine.csv" in summary_of(capsys, file)["layout"]


def test_without_ranks_a_rest_is_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    job_file("[layout]\ndp_shard = -1\ndp_replicate = 2\n")
    assert summary_of(capsys, "job.toml")["layout"] == (
        "dp_shard is the number of ranks, divided by 2; the batch is checked when ranks are given"
    )


@pytest.mark.parametrize("name", ["tiny", "llama3-8b", "llama3-70b", "llama3-405b-16k"])
def test_the_example_jobs_are_sound(capsys: pytest.CaptureFixture[str], name: str) -> None:
    summary = summary_of(capsys, str(ROOT / "examples" / f"{name}.toml"))
    assert summary["job"].endswith("configuration valid")
    assert "note" not in summary


def test_problems_of_the_job_and_of_its_surroundings_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    text = """\
[model]
source = "mine:Model"
initial_weights = "weights"
[train]
steps = "ten"
global_batch_size = 6
[layout]
dp_shard = -1
[cluster]
name = "h100-roce40"
device = "h1000-sxm"
[data]
source = "corpse.txt"
[run]
dir = "taken"
"""
    folder = Path.cwd()
    shown = refusal(capsys, job_file(text), "--ranks", "4")
    assert shown.splitlines()[:6] == [
        "error: job.toml has 8 problems:",
        '  1. job.toml:5: train.steps = "ten" must be a whole number, 1 or more: change it, or leave it out for the '
        "default 100",
        "  2. job.toml:6: train.global_batch_size = 6 does not divide by 4 data-parallel ranks x "
        "layout.microbatch_size = 1: set train.global_batch_size to 4 or 8, or layout.tp to 2, or layout.pp to 2",
        f"  3. job.toml:2: model.source = 'mine:Model': there is no module mine in {folder}, the working directory or "
        "the environment: put mine.py there, or change model.source",
        "  4. job.toml:3: model.initial_weights = 'weights' is no Hugging Face folder (it holds no config.json): name "
        "one, or leave it out to start from random weights",
        "  5. job.toml:11: cluster.device: 'h1000-sxm' must be one of the 26 devices of the catalogue: did you mean "
        f"'h100-sxm'? `meshwright list devices` shows them all; your own go to {catalogue('devices')}/NAME.toml",
    ]
    assert (
        "  6. job.toml:10: cluster.name: 'h100-roce40' is no cluster and no device of the catalogue: did you mean"
        in shown
    )
    assert "  7. job.toml:13: data.source = 'corpse.txt'" in shown
    assert "  8. job.toml:15: run.dir = 'taken' is a file: set run.dir to a new folder\n" in shown


def catalogue(kind: str) -> Path:
    from meshwright.hardware.catalogue import user_folder  # noqa: PLC0415

    return user_folder() / kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[cluster]\nname = "dgx-h100"\n[layout]\ndp_shard = 8\ndp_replicate = 2\n[train]\nglobal_batch_size = 16',
         "job.toml:2: cluster.name = 'dgx-h100' has 8 devices but the layout needs 16: set layout.dp_shard to 4, or "
         "layout.dp_replicate to 1"),
        ('[cluster]\nname = "h100-ib400"\nnum_devices = 8\n[layout]\ndp_shard = 16\n[train]\nglobal_batch_size = 16',
         "job.toml:3: cluster.num_devices = 8 but the layout needs 16: set layout.dp_shard to 8, or "
         "cluster.num_devices to 16"),
        ('[cluster]\nname = "h100-ib400"\nnum_devices = 16\n[layout]\ndp_shard = 8\n',
         "job.toml:3: cluster.num_devices = 16 but the layout has 8 ranks: set cluster.num_devices to 8"),
        (
            '[cluster]\nname = "h100-ib400"\nnum_devices = 256\n'
            "[layout]\ndp_shard = -1\n[train]\nglobal_batch_size = 16",
            "job.toml:7: train.global_batch_size = 16 does not divide by 256 data-parallel ranks x "
            "layout.microbatch_size = 1: set train.global_batch_size to 256 or 512",
        ),
        ('[cluster]\nname = "h100-ib400"\nnum_devices = 12\n',
         "job.toml:3: cluster.num_devices = 12 fills no whole number of h100-ib400 nodes (8 devices each): set "
         "cluster.num_devices to 8 or 16"),
    ],
)  # fmt: skip
def test_a_layout_must_fit_its_cluster(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    assert refusal(capsys, job_file(text)) == f"error: {message}\n"


def test_ranks_that_the_layout_cannot_use(capsys: pytest.CaptureFixture[str]) -> None:
    shown = refusal(capsys, job_file("[layout]\ndp_shard = 2"), "--ranks", "3")
    assert "3 ranks cannot run a layout of dp_shard=2: set layout.dp_shard to 3 and train." in shown
    assert shown.endswith(", or start 2 ranks\n")


@pytest.mark.parametrize(
    "text", ["[layout]\ntp = -1\ndp_shard = -1\n", '[layout]\ndp_shard = "2"\n', '[train]\nglobal_batch_tokens = "?"\n']
)
def test_ranks_are_not_compared_with_a_layout_that_was_not_meant(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert len(refusal(capsys, job_file(text), "--ranks", "3", "layout.dp_replicate=-1").splitlines()) == 1


@pytest.mark.parametrize(
    "override", ["layout.tp=two", "layout.tp=0", "layout.dp_shard=1e3", "layout.tpp=3", "cluster.num_devices=few"]
)
def test_what_depends_on_a_value_that_was_refused_is_not_judged(
    capsys: pytest.CaptureFixture[str], override: str
) -> None:
    text = '[cluster]\nname = "h100-ib400"\nnum_devices = 8\n[layout]\ndp_shard = 4\ntp = 2\n'
    shown = refusal(capsys, job_file(text), override)
    assert shown.startswith(f"error: command line: {override.partition('=')[0]} ")
    assert len(shown.splitlines()) == 1


def test_a_precision_that_the_device_has_no_rate_for_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file('[cluster]\nname = "v100-opa400"\n[precision]\ncompute = "bfloat16"\n')
    shown = refusal(capsys, file)
    assert shown.startswith("error: job.toml:4: device v100-sxm-32gb has no bfloat16 matmul rate in the catalogue")
    others = "or price other software with `meshwright plan --precision float16`, or add"
    assert f'set precision.compute to "float32", {others}' in shown
    assert "step" in summary_of(capsys, file, "precision.compute=float32")
    assert run(["plan", file]) == 2
    assert shown.removeprefix("error: job.toml:4: ") in capsys.readouterr().err


def test_a_search_is_refused_as_plan_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file('[cluster]\nname = "h100-ib400"\nnum_devices = 8\n[layout]\nsearch = true\ntp = 3\n')
    shown = refusal(capsys, file)
    assert "layout.tp = 3 does not divide the model's num_heads = 4 and ffn_dim = 512: set layout.tp to 2 or 4" in shown
    assert run(["plan", file]) == 2
    assert capsys.readouterr().err == shown
    assert "chosen by the planner" in summary_of(capsys, file, "layout.tp=2")["layout"]


def test_a_device_stands_for_its_commonest_cluster_in_a_job_too(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summary_of(capsys, job_file('[cluster]\nname = "h100"\nnum_devices = 8\n[layout]\ndp_shard = 8\n'))
    assert summary["step"].endswith("predicted on h100-ib400")


def make_run(folder: str, *steps: int) -> None:
    for step in steps:
        (Path(folder) / "checkpoints" / f"step-{step}").mkdir(parents=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    manifest = Manifest(job=load_job("job.toml").job, seed=0, num_parameters=1)
    (Path(folder) / "manifest.json").write_text(manifest.to_json())


def test_a_run_is_never_overwritten_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file()
    make_run("runs/job", 10, 20)
    assert refusal(capsys, file) == (
        "error: job.toml: run.dir = 'runs/job' already holds a run with a checkpoint after step 20: "
        "continue with --resume, replace it with --overwrite, or set another run.dir\n"
    )
    resumed = summary_of(capsys, file, "--resume")
    assert resumed["run"].startswith("runs/job (exists, newest checkpoint after step 20)")
    assert summary_of(capsys, file, "--overwrite")["job"].endswith("configuration valid")
    assert summary_of(capsys, file, "run.dir=elsewhere")["run"].startswith("elsewhere (new)")
    assert "give one of them" in refusal(capsys, file, "--resume", "--overwrite")
    make_run("early")
    assert "holds a run without a checkpoint" in refusal(capsys, file, "run.dir=early")


def test_a_folder_of_something_else_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    file = job_file('[run]\ndir = "photos"')
    assert summary_of(capsys, file)["run"].startswith("photos (new)")
    (Path("photos") / "cat.jpg").write_text("")
    for flags in ([], ["--resume"], ["--overwrite"]):
        assert refusal(capsys, file, *flags) == (
            "error: job.toml:2: run.dir = 'photos' holds files but no run (no manifest.json): set run.dir to a new "
            "folder\n"
        )


def test_what_a_run_has_left_without_a_manifest_may_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file()
    left = Path("runs/job")
    for name in ("checkpoints", "hangs", "heartbeats", "logs", "replicas"):
        (left / name).mkdir(parents=True)
    (left / "events.jsonl").write_text("")
    for flags in ([], ["--resume"], ["--overwrite"]):  # of a start that failed before its first step
        assert summary_of(capsys, file, *flags)["job"].endswith("configuration valid")
    (left / "checkpoints" / "step-3").mkdir()
    (left / "metrics.jsonl").write_text("")
    for flags in ([], ["--resume"]):
        assert "no manifest.json, which says what it was: put that back, replace" in refusal(capsys, file, *flags)
    assert summary_of(capsys, file, "--overwrite")["job"].endswith("configuration valid")
    (left / "thesis.txt").write_text("")
    assert "holds files but no run" in refusal(capsys, file, "--overwrite")
    Path("jobs").mkdir()
    (Path("jobs") / "job.toml").write_text("")
    assert "holds files but no run" in refusal(capsys, file, "run.dir=jobs", "--overwrite")


def test_a_resume_with_nothing_to_resume_is_a_first_start(capsys: pytest.CaptureFixture[str]) -> None:
    resumed = summary_of(capsys, job_file(), "--resume", "train.steps=200")
    assert resumed["run"].startswith("runs/job (new)")
    assert resumed["note"] == "--resume: runs/job holds no checkpoint, so training would start at step 0"


def test_a_resume_that_training_would_refuse_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file()
    make_run("runs/job", 10)
    assert "optimizer.name was 'adamw', is 'muon': change it back" in refusal(
        capsys, file, "--resume", "optimizer.name=muon"
    )


def test_a_run_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    # /proc takes no new folders, whoever asks.
    if not Path("/proc/self").is_dir():
        pytest.skip("needs a file system that takes no new folders")
    shown = refusal(capsys, job_file(), "run.dir=/proc/runs/x")
    assert shown == (
        "error: command line: run.dir = '/proc/runs/x': /proc takes no new files (No such file or directory): change "
        "that, or set another run.dir\n"
    )


def test_a_model_and_data_of_ones_own_are_looked_for_beside_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("project")
    folder.mkdir()
    (folder / "mine.py").write_text("import torch\nclass Model: ...\nclass Data: ...\n")
    (folder / "job.toml").write_text('[model]\nsource = "mine:Model"\n[data]\nsource = "mine:Data"\n')
    summary = summary_of(capsys, "project/job.toml")
    assert summary["model"] == "mine:Model, your own: its parameters are counted when training starts"
    assert "defines no Date: did you mean mine:Data?" in refusal(capsys, "project/job.toml", "data.source=mine:Date")


def test_a_home_folder_that_nobody_has_is_a_path_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nsource = "~nobody-here/c.json"\n[data]\nsource = "~nobody-here/x"\ntokenizer = "~nobody-here/t"\n'
    shown = refusal(capsys, job_file(text), "model.initial_weights=~nobody-here/w", "run.dir=~nobody-here/r")
    for key in ("model.source", "data.source", "data.tokenizer", "model.initial_weights"):
        assert f"{key}" in shown


def test_a_warmup_longer_than_a_trial_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summary_of(capsys, job_file(), "train.steps=3")
    assert summary["note"] == "the warmup of 10 steps is longer than the run's 3"


def test_a_length_of_documents_that_nothing_masks_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["train.steps=20", "data.document_tokens=900"]
    assert summary_of(capsys, job_file(), *keys)["note"].startswith(
        "data.document_tokens = 900 does nothing without data.mask_documents = true"
    )
    assert "note" not in summary_of(capsys, job_file(), *keys, "data.mask_documents=true")


def test_a_schedule_without_a_pipeline_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [job_file(), "train.steps=20", "train.global_batch_size=8", "layout.schedule=ZBVZeroBubble"]
    note = 'layout.schedule = "ZBVZeroBubble" has no effect with layout.pp = 1: there is no pipeline'
    assert summary_of(capsys, *keys)["note"] == note
    assert "note" not in summary_of(capsys, *keys, "layout.pp=2")


def test_an_attention_backend_that_the_clusters_device_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [job_file(), "cluster.name=h100-ib400", "layout.attention_backend=flash"]
    assert 'layout.attention_backend = "flash" computes in 16 bits on a CUDA device' in refusal(capsys, *keys)
    summary_of(capsys, *keys, "precision.compute=bfloat16")
    # A processor has it in float32.
    summary_of(capsys, *keys, "run.device=cpu")


def test_a_tokenizer_that_comes_with_the_weights_is_mentioned() -> None:
    Path("weights").mkdir()
    Path("weights/config.json").write_text("{}")
    job = job_file("[model]\ninitial_weights = 'weights'\n")
    assert tokenizer_note(load_job(job)) is None
    Path("weights/tokenizer.model").write_bytes(b"")
    note = tokenizer_note(load_job(job))
    assert note is not None
    assert "AutoTokenizer.from_pretrained('weights').save_pretrained('weights')` of transformers writes one" in note
    Path("weights/tokenizer.json").write_text("{}")
    note = tokenizer_note(load_job(job))
    assert note is not None
    assert note.startswith("data is tokenized as bytes, the default of data.tokenizer, while model.initial_weights")
    assert note.endswith("(tokenizer.json): set data.tokenizer to 'weights/tokenizer.json'")
    assert tokenizer_note(load_job(job, ["data.tokenizer=bytes"])) is None


def test_a_full_disk_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    # 405B parameters need terabytes for three checkpoints; whoever has that much free may delete this test.
    summary = summary_of(capsys, job_file('[model]\nsource = "llama3-405b"\n'))
    assert summary["note"].startswith("this machine's disk has ")


def test_what_check_job_returns_is_what_train_refuses() -> None:
    resolved = load_job(job_file("[train]\nglobal_batch_size = 8\n[layout]\ndp_shard = 1"))
    assert check_job(resolved, 1) == []
    assert check_job(resolved, 4) == [
        "job.toml:4: 4 ranks cannot run a layout of one rank: set layout.dp_shard to 4, or start 1 rank"
    ]


def test_check_never_imports_torch() -> None:
    code = (
        "import sys\nfrom meshwright.cli.main import run\n"
        f"assert run(['check', {job_file()!r}, '--ranks', '2', 'layout.dp_shard=-1']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, capture_output=True)


def test_a_schedule_that_is_unknown_is_reported_with_other_problems(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nsauce = "x"\n[layout]\npp = 2\ncp_method = "rings"\nschedule = "1F1"\n'
    shown = refusal(capsys, job_file(text))
    assert all(key in shown for key in ("3 problems", "model.sauce", "layout.cp_method", "layout.schedule = "))


def test_memory_on_a_host_is_told_apart_from_what_train_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nsource = "llama-1m"\n[cluster]\nname = "cpu-local"\nnum_devices = 2\n')
    assert run(["check", str(job)]) == 0
    assert "`mem` of train is the whole process on a CPU" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs meshwright[torchao]")
def test_the_line_of_the_model_has_the_format_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    precision = '[precision]\ncompute = "bfloat16"\nfloat8 = "mxfp8"\n[run]\ndevice = "cpu"\n'
    file = job_file(precision)
    assert summary_of(capsys, file)["model"].endswith(", mxfp8")
    for found, override in (
        ("bfloat16", "precision.float8_filter=slower"),
        ("bfloat16", "precision.float8_skip=['*']"),
        ("bfloat16", "cluster.name=a100"),
        ("float8-rowwise", "cluster.name=h100"),
    ):
        lines = summary_of(capsys, file, override)
        assert lines["model"].endswith(f", {found}")
        assert "precision.float8" in lines["note"]
