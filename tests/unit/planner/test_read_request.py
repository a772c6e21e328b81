"""From jobs and command lines to questions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.planner.read_request import Named, Options, num_sequences, plan_request, resolve_named
from meshwright.spec.layout.layout import Layout

JOB = """
[model]
source = "llama3-8b"
[train]
seq_len = 4096
global_batch_size = 64
[precision]
compute = "bfloat16"
[cluster]
name = "h100-ib400"
num_devices = 16
"""


def named(**changes: object) -> Named:
    values = {"model": "llama3-8b", "cluster": "h100:8", "seq_len": None, "global_batch_tokens": None}
    return Named(**{**values, "global_batch_size": None, **changes})  # type: ignore[arg-type]


def job(tmp_path: Path, text: str = "", *overrides: str) -> object:
    path = tmp_path / "job.toml"
    path.write_text(JOB + text)
    return load_job(path, overrides)


@pytest.mark.parametrize(
    ("tokens", "seq_len", "sequences"),
    [
        (4_000_000, 8192, 512),  # 488.3 sequences: 4M as people mean it
        (4_194_304, 8192, 512),
        (16_000_000, 8192, 2048),
        (1_000_000, 4096, 256),
        (10 * 8192, 8192, 10),  # exact: taken as it is
        (100_000, 8192, 12),
    ],
)
def test_a_number_of_tokens_means_about_so_many_that_many_ranks_can_share(
    tokens: int, seq_len: int, sequences: int
) -> None:
    assert num_sequences(named(global_batch_tokens=tokens), seq_len) == sequences


@pytest.mark.parametrize(
    ("cluster", "sequences"), [("h100:24", 240), ("h100:40", 240), ("h100:96", 240), ("h100:64", 256), ("h100:48", 240)]
)
def test_all_devices_share_the_batch_where_a_number_near_allows_it(cluster: str, sequences: int) -> None:
    assert num_sequences(named(cluster=cluster, global_batch_tokens=2_000_000), 8192) == sequences


def test_tokens_of_a_step_are_those_of_the_length_that_an_override_sets() -> None:
    job = resolve_named(named(global_batch_tokens=1_000_000), ("train.seq_len=4096",)).job
    assert (job.train.seq_len, job.global_batch_size) == (4096, 256)


def test_a_batch_is_needed_and_is_a_sequence_at_least() -> None:
    with pytest.raises(ConfigError, match="the batch is missing: give --global-batch-tokens"):
        num_sequences(named(), 4096)
    with pytest.raises(ConfigError, match="1000 is less than one sequence of 4096 tokens: set it to 4096"):
        num_sequences(named(global_batch_tokens=1000), 4096)


def test_names_leave_the_layout_free_and_keys_on_the_command_line_fix_it() -> None:
    resolved = resolve_named(named(global_batch_size=64), ("layout.tp=4", "layout.pp=-1", "model.options.num_layers=4"))
    question = plan_request(resolved, Options(cluster="h100-ib400:16"))
    assert question.fixed == {"tp": 4}
    assert question.architecture.num_layers == 4
    assert (question.num_devices, question.workload.seq_len, question.workload.precision) == (16, 8192, "bfloat16")
    assert question.given is None


def test_a_job_that_sets_its_layout_has_it_judged(tmp_path: Path) -> None:
    question = plan_request(job(tmp_path, "[layout]\ndp_shard = -1\ntp = 2\n"), Options())  # type: ignore[arg-type]
    assert question.given == Layout(dp_shard=8, tp=2)
    assert question.fixed == {}


def test_a_job_that_searches_keeps_what_it_sets(tmp_path: Path) -> None:
    text = "[layout]\nsearch = true\ntp = 2\ndp_shard = -1\n"
    question = plan_request(job(tmp_path, text, "layout.schedule=GPipe"), Options())  # type: ignore[arg-type]
    assert question.fixed == {"tp": 2, "schedule": "GPipe"}
    assert question.given is None


def test_a_job_without_a_layout_leaves_it_free_on_all_devices(tmp_path: Path) -> None:
    question = plan_request(job(tmp_path), Options())  # type: ignore[arg-type]
    assert (question.given, question.fixed, question.num_devices) == (None, {}, 16)


def test_a_layout_that_is_set_says_how_many_devices_where_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("num_devices = 16\n", "") + "[layout]\ndp_shard = 32\n")
    assert plan_request(load_job(path), Options()).num_devices == 32


def test_a_model_of_ones_own_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"model.source = 'mine:Model' is a class of your own"):
        resolve_named(named(model="mine:Model", global_batch_size=8), ())


@pytest.mark.parametrize(
    ("cluster", "precision", "message"),
    [
        ("h100:8", "fp8", "--precision fp8 must be one of .*: did you mean float8-tensorwise"),
        ("h100:8", "int3", "--precision int3 must be one of [^?]*$"),
        (
            "a100:8",
            "nvfp4",
            "has no float4 matmul rate in the catalogue .* give --precision float32 or bfloat16 or float16",
        ),
        ("h10:8", None, "did you mean 'h100'"),
    ],
)
def test_what_nobody_knows_is_refused(cluster: str, precision: str | None, message: str) -> None:
    resolved = resolve_named(named(global_batch_size=64), ())
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        plan_request(resolved, Options(cluster=cluster, precision=precision))


@pytest.mark.parametrize(
    ("cluster", "precision", "priced", "note"),
    [
        ("b200:8", "mxfp8", "mxfp8", ""),
        ("h100:8", "mxfp8", "float8-rowwise", '--precision mxfp8: h100-sxm has no units .* computed by "rowwise"'),
        ("a100:8", "mxfp8", "bfloat16", "--precision mxfp8: a100-sxm-80gb has no float8 units; computed in bfloat16"),
        ("b200:8", "nvfp4", "nvfp4", "--precision nvfp4: Meshwright cannot train in it"),
    ],
)
def test_a_recipe_of_the_command_line_runs_where_a_jobs_own_would(
    cluster: str, precision: str, priced: str, note: str
) -> None:
    request = plan_request(resolve_named(named(global_batch_size=64), ()), Options(cluster, precision))
    assert request.workload.precision == priced
    assert re.match(note or "$", request.float8_note)
    # The page's head says it.
    assert request.precision_note == request.float8_note
