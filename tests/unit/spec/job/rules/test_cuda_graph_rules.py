"""What a CUDA graph or a compiled update cannot hold is refused by name, and what is suggested runs."""

from typing import Any

import pytest

from fixed_jobs import problems_left
from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout_text import parse_layout

DENSE: dict[str, Any] = {"model": {"source": "llama-1m"}}
MIXTURE: dict[str, Any] = {"model": {"source": "moe-4m"}}
FLOAT8: dict[str, Any] = {"precision": {"compute": "bfloat16", "float8": "rowwise"}}


@pytest.mark.parametrize(
    ("sections", "layout", "why"),
    [
        (DENSE, "dp_shard=2,cuda_graphs=true", "captures a step of one rank, and the layout has 2"),
        (MIXTURE, "cuda_graphs=true", "a mixture of experts counts its tokens on the host"),
        (DENSE, "cuda_graphs=true,cpu_offload=true", "wait on the host (layout.cpu_offload = true)"),
        (DENSE, "cuda_graphs=true,activation_offload=true", "wait on the host (layout.activation_offload = true)"),
        (DENSE, "cuda_graphs=true,activation_checkpoint=full", '(layout.activation_checkpoint = "full")'),
        (DENSE, "cuda_graphs=true,attention_backend=varlen", '(layout.attention_backend = "varlen")'),
        ({**DENSE, **FLOAT8}, "cuda_graphs=true", 'precision.float8 = "rowwise" reads them from FSDP2'),
        (
            {**DENSE, "optimizer": {"in_backward": True, "max_grad_norm": 0.0}, "train": {"global_batch_size": 1}},
            "cuda_graphs=true",
            "optimizer.in_backward = true would free none of them",
        ),
        (
            {**DENSE, "optimizer": {"name": "muon"}},
            "compile_optimizer=true",
            'compiles AdamW\'s update alone (optimizer.name = "muon")',
        ),
        (
            {**DENSE, "optimizer": {"state_dtype": "bfloat16"}},
            "compile_optimizer=true",
            'compiles the update of float32 states alone (optimizer.state_dtype = "bfloat16")',
        ),
    ],
)
def test_what_does_not_compose_has_a_reason(sections: dict[str, Any], layout: str, why: str) -> None:
    job = Job.from_dict({"train": {"seq_len": 64, "global_batch_size": 16}, **sections})
    found = [problem for problem in layout_problems(job, parse_layout(layout)) if why in problem]
    assert len(found) == 1, layout_problems(job, parse_layout(layout))
    for fix in found[0].fixes:
        assert not [problem for problem in problems_left(job, parse_layout(layout), fix) if why in problem]


@pytest.mark.parametrize("layout", ["cuda_graphs=true,compile=model", "cuda_graphs=true,compile=true,loss_chunks=4"])
def test_one_rank_of_a_dense_model_is_captured(layout: str) -> None:
    job = Job.from_dict({**DENSE, "train": {"seq_len": 64, "global_batch_size": 16}})
    assert layout_problems(job, parse_layout(layout)) == []
