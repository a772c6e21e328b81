"""A model as one graph is refused by name where it cannot be one, and what is suggested runs."""

from typing import Any

import pytest

from fixed_jobs import problems_left
from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout_text import parse_layout

JOB = Job.from_dict({"model": {"source": "moe-4m"}, "train": {"seq_len": 64, "global_batch_size": 16}})
DENSE: dict[str, Any] = {"model": {"source": "llama-1m"}}


@pytest.mark.parametrize(
    ("sections", "layout", "why"),
    [
        (DENSE, "pp=2", "a pipeline runs its stages one by one (layout.pp = 2)"),
        ({}, "dp_shard=2,ep=2", "how many tokens experts of other ranks get is known in a step only (layout.ep = 2)"),
        ({}, "tp=2", "experts under tp are sharded over other ranks than the rest (layout.tp = 2)"),
        (
            DENSE,
            "cp=2,cp_method=ring",
            'ring attention sends and receives outside of graphs (layout.cp_method = "ring")',
        ),
        (DENSE, "dp_shard=2,cpu_offload=true", "FSDP2's hooks move parameters from and to the host"),
        (DENSE, "tp=2,async_tp=true", "was not tried with fused matmuls and collectives (layout.async_tp = true)"),
        (DENSE, "dp_shard=4,reshard_after_forward=2", "keeps them whole (layout.reshard_after_forward = 2)"),
        (
            DENSE,
            "dp_shard=2,reshard_after_forward=never,activation_checkpoint=full",
            'recomputation gathers parameters again (layout.reshard_after_forward = "never")',
        ),
        (
            DENSE,
            "dp_shard=2,gradient_sync=step",
            'reduces the gradients of each microbatch (layout.gradient_sync = "step")',
        ),
        (DENSE, "dp_shard=2,separate_reduce_group=true", "FSDP2's groups do not change"),
        (
            {**DENSE, "precision": {"compute": "bfloat16", "float8": "rowwise"}},
            "dp_shard=2",
            'precision.float8 = "rowwise" reads them from FSDP2',
        ),
        (
            {**DENSE, "optimizer": {"in_backward": True, "max_grad_norm": 0}},
            "dp_replicate=2,microbatch_size=8",
            "optimizer.in_backward = true would free none of them early",
        ),
    ],
)
def test_what_no_graph_can_hold_is_refused_and_a_fix_runs(sections: dict[str, Any], layout: str, why: str) -> None:
    job = Job.from_dict({**JOB.to_dict(), **sections})
    asked = parse_layout(layout).replace(compile="model")
    assert not [one for one in layout_problems(job, asked.replace(compile=True)) if "one graph" in one]
    found = [one for one in layout_problems(job, asked) if why in one]
    assert len(found) == 1, layout_problems(job, asked)
    assert {"layout.compile": True} in found[0].fixes
    for fix in found[0].fixes:
        assert not [one for one in problems_left(job, asked, fix) if why in one]


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=4",
        "dp_replicate=2,dp_shard=2",
        "dp_shard=2,tp=2,activation_checkpoint=selective",
        "cp=2",
        "dp_shard=2,loss_chunks=4",
        "dp_shard=2,reshard_after_forward=never",
    ],
)
def test_other_layouts_are_valid(layout: str) -> None:
    dense = Job.from_dict({**JOB.to_dict(), **DENSE})
    assert not layout_problems(dense, parse_layout(layout).replace(compile="model"))
