"""What depends on the number of ranks is refused by name where train.exact_elastic says that nothing may."""

from typing import Any

import pytest

from meshwright.spec.job.job import Job

JOB: dict[str, Any] = {"train": {"seq_len": 64, "global_batch_size": 60, "exact_elastic": True}}


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("precision.compute", "float64", "keep 40 bits after the point"),
        ("precision.reduce", "bfloat16", "rounded to bfloat16 is not exact"),
        ("precision.float8", "rowwise", "its scales"),
        ("optimizer.name", "muon", "shards of any size"),
        ("optimizer.state_dtype", "bfloat16", "shards of any size"),
        ("optimizer.in_backward", True, "one microbatch on each rank"),
        ("layout.search", True, "the planner's choice"),
        ("layout.compile", "model", "sums gradients itself"),
        ("layout.cuda_graphs", True, "sums gradients itself"),
        ("layout.compile_optimizer", True, "shards of any size"),
        ("layout.ep", 2, "tokens of several data-parallel ranks"),
        ("layout.activation_checkpoint", "auto", "the memory of a rank"),
    ],
)
def test_what_depends_on_the_ranks_has_a_reason(key: str, value: Any, why: str) -> None:
    section, name = key.split(".")
    sections = {**JOB, section: {name: value}}
    if key == "layout.ep":
        sections |= {"model": {"source": "moe-4m"}, "layout": {"ep": 2, "dp_shard": 2}}
    found = [one for one in Job.from_dict(sections).problems() if "train.exact_elastic = true refuses it" in one]
    assert [one.startswith(f"{key} = ") and why in one for one in found] == [True]
    without = {**sections, "train": {**JOB["train"], "exact_elastic": False}}
    assert not [one for one in Job.from_dict(without).problems() if "exact_elastic" in one]


def test_its_sums_are_priced_in_float64() -> None:
    workload = Job.from_dict(JOB).workload
    assert (workload.gradient_dtype, workload.sums_exactly) == ("float64", True)


def test_a_job_without_what_it_refuses_is_valid() -> None:
    assert not Job.from_dict(JOB).problems()
