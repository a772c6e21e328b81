"""Float8 recipes that a job or a layout cannot run are refused by name, and what is suggested runs."""

from typing import Any

import pytest

from fixed_jobs import problems_left
from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout_text import parse_layout

JOB = Job.from_dict(
    {
        "model": {"source": "llama-1m"},
        "train": {"seq_len": 64, "global_batch_size": 16},
        "precision": {"compute": "bfloat16", "float8": "tensorwise"},
    }
)


@pytest.mark.parametrize(
    ("precision", "layout", "said"),
    [
        ({"compute": "float64"}, "dp_shard=2", 'precision.compute = "float64"'),
        ({"float8": "none", "float8_skip": ["blocks.0.*"]}, "dp_shard=2", "precision.float8_skip"),
        ({}, "tp=2,async_tp=true,compile=true", "layout.async_tp = true never holds"),
        ({}, "dp_shard=4,reshard_after_forward=2", "layout.reshard_after_forward = 2"),
        ({}, "dp_shard=2,cpu_offload=true", "layout.cpu_offload = true"),
        ({}, "cp=8,cp_method=ulysses", "a multiple of 16 tokens in a microbatch on each rank, which has 8"),
    ],
)
def test_what_cannot_run_is_refused_and_a_fix_runs(precision: dict[str, Any], layout: str, said: str) -> None:
    job = JOB.replace(precision=JOB.precision.replace(**precision))
    found = [one for one in layout_problems(job, parse_layout(layout)) if said in one]
    assert len(found) == 1
    for fix in found[0].fixes:
        assert not [one for one in problems_left(job, parse_layout(layout), fix) if said in one]


@pytest.mark.parametrize(
    "layout", ["dp_shard=4", "tp=2,cp=2", "pp=2,schedule=ZBVZeroBubble", "dp_shard=2,compile=true"]
)
def test_other_layouts_are_valid(layout: str) -> None:
    assert not [one for one in layout_problems(JOB, parse_layout(layout)) if "float8" in one]


def test_rowwise_needs_no_gather_in_float8() -> None:
    job = JOB.replace(precision=JOB.precision.replace(float8="rowwise"))
    assert not layout_problems(job, parse_layout("dp_shard=4,reshard_after_forward=2"))
    assert not layout_problems(job, parse_layout("dp_shard=2,cpu_offload=true"))


def test_the_workload_has_the_format_of_its_matmuls() -> None:
    assert JOB.workload.precision == "float8-tensorwise"
    assert JOB.workload.activation_dtype == "bfloat16"
    wide = JOB.replace(precision=JOB.precision.replace(compute="float32", float8="rowwise_with_gw_hp"))
    assert wide.workload.precision == "float8-rowwise-with-gw-hp"
    assert wide.workload.activation_dtype == "float32"
