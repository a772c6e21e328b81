"""What an attention backend does not compute is refused by name, and what is suggested runs."""

from typing import Any

import pytest

from fixed_jobs import problems_left
from meshwright.spec.job.job import Job
from meshwright.spec.job.rules.attention_rules import device_problem
from meshwright.spec.job.validity import attention_device_problem, layout_problems
from meshwright.spec.layout.attention_backend import CUDA_BACKENDS
from meshwright.spec.layout.layout_text import parse_layout

BASE: dict[str, dict[str, Any]] = {
    "model": {"source": "llama-1m"},
    "train": {"seq_len": 64, "global_batch_size": 16},
    "precision": {"compute": "bfloat16"},
}


def job_with(**sections: dict[str, Any]) -> Job:
    return Job.from_dict({name: BASE.get(name, {}) | sections.get(name, {}) for name in {**BASE, **sections}})


@pytest.mark.parametrize(
    ("sections", "layout", "said"),
    [
        ({}, "cp=2,attention_backend=flex", 'with layout.cp_method = "all-gather" leaves each rank parts'),
        ({}, "cp=2,cp_method=ring,attention_backend=varlen", 'layout.cp_method = "ring" leaves each rank parts'),
        ({"data": {"mask_documents": True}}, "attention_backend=flash", "data.mask_documents = true needs"),
        ({"model": {"options": {"sliding_window": 9}}}, "attention_backend=flash", "sliding_window = 9 needs"),
        ({"model": {"source": "mla-moe-4m"}}, "attention_backend=varlen", "needs values as wide as keys"),
        ({"model": {"source": "gpt-oss-4m"}}, "attention_backend=flex", "computes no attention sinks"),
        ({"model": {"options": {"head_dim": 136}}}, "attention_backend=cudnn", "multiples of 8 up to 128"),
        ({"precision": {"compute": "float32"}}, "attention_backend=cudnn", "computes in 16 bits"),
        ({"precision": {"compute": "float64"}}, "attention_backend=efficient", "has no float64"),
        ({"run": {"deterministic": True}}, "attention_backend=cudnn", "has no deterministic backward"),
        ({}, "attention_backend=flex,activation_checkpoint=selective", 'activation_checkpoint = "selective") can save'),
        ({}, "pp=2,schedule=ZBVZeroBubble,attention_backend=flex", "a backward in two parts"),
    ],
)
def test_what_cannot_run_is_refused_and_a_fix_runs(sections: dict[str, Any], layout: str, said: str) -> None:
    job, wanted = job_with(**sections), parse_layout(layout)
    found = [one for one in layout_problems(job, wanted) if said in one]
    assert len(found) == 1
    assert found[0].fixes
    for fix in found[0].fixes:
        assert not [one for one in problems_left(job, wanted, fix) if said in one]


@pytest.mark.parametrize(
    "layout",
    [
        "tp=2,attention_backend=flex",
        "cp=2,cp_method=ulysses,attention_backend=varlen",
        "pp=2,schedule=ZBVZeroBubble,attention_backend=varlen",
        "attention_backend=cudnn,activation_checkpoint=selective",
        "attention_backend=flex,activation_checkpoint=full,compile=true",
    ],
)
def test_other_layouts_are_valid(layout: str) -> None:
    job = job_with(data={"mask_documents": "flash" not in layout})
    assert not [one for one in layout_problems(job, parse_layout(layout)) if "attention_backend" in one]


@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("compute", ["float32", "float64", "bfloat16"])
def test_a_cpu_is_the_first_reason_and_what_is_suggested_runs_on_it(backend: str, compute: str) -> None:
    job = job_with(precision={"compute": compute}, run={"device": "cpu", "deterministic": True})
    wanted = parse_layout(f"attention_backend={backend},activation_checkpoint=selective")
    [found] = [one for one in layout_problems(job, wanted) if "attention_backend" in one]
    assert found == attention_device_problem(job_with(precision={"compute": compute}), wanted, "cpu")
    assert f'attention_backend = "{backend}" has no kernel on a CPU' in found
    # FlexAttention saves nothing for selective recomputation.
    assert found.fixes == ({"layout.attention_backend": "auto"},)


def test_what_a_device_lacks() -> None:
    for backend in CUDA_BACKENDS:
        assert "has no kernel on a CPU" in str(device_problem(backend, "bfloat16", "cpu"))
        assert device_problem(backend, "bfloat16", "cuda") is None
    assert device_problem("flash", "float32", "cpu") is None
    assert "16 bits on a CUDA device" in str(device_problem("flash", "float32", "cuda"))
    assert device_problem("flex", "float64", "cpu") is None
    assert "no float64 on a CUDA device" in str(device_problem("flex", "float64", "cuda"))
    assert device_problem("auto", "float64", "cpu") is None
