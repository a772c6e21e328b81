"""What adapters do not go with is refused by name, with a change that works; check knows the layers' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.app.job.adapter_job_problems import adapter_job_problems, adapter_parameters
from meshwright.models.adapted_linear import adapter_names, add_adapter
from meshwright.models.build import build_model
from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import with_fix
from meshwright.spec.step.adapter import Adapter

LORA: dict[str, Any] = {"kind": "lora", "rank": 4}


def job_of(adapter: dict[str, Any], **sections: Any) -> Job:
    return Job.from_dict({"adapter": adapter, **sections})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"precision": {"float8": "tensorwise", "compute": "bfloat16"}}, "precision.float8"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name"),
        ({"optimizer": {"in_backward": True, "max_grad_norm": 0.0}}, "optimizer.in_backward"),
        ({"train": {"exact_elastic": True}}, "train.exact_elastic"),
        ({"layout": {"compile": "model"}}, "layout.compile"),
        ({"layout": {"cuda_graphs": True}}, "layout.cuda_graphs"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_with_a_change_that_works(sections: dict[str, Any], key: str) -> None:
    job = job_of(LORA, **sections)
    found = [problem for problem in job.problems() if problem.subject == key and 'adapter.kind = "lora"' in problem]
    assert len(found) == 1
    assert found[0].fixes
    for fix in found[0].fixes:
        assert not [problem for problem in with_fix(job, fix).problems() if "adapter.kind" in problem.what]


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_dropout_that_ranks_would_draw_alike_is_refused(axis: str) -> None:
    job = job_of({**LORA, "dropout": 0.1}, layout={axis: 2})
    assert [problem.subject for problem in job.problems()] == [f"layout.{axis}"]
    assert not job_of({**LORA, "dropout": 0.1}).problems()


def test_a_key_without_a_kind_is_no_silent_training_of_all_parameters() -> None:
    (problem,) = job_of({"rank": 8}).problems()
    assert "adapter.rank = 8 has nothing to apply to" in problem
    assert {"adapter.kind": "lora"} in problem.fixes


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["blocks.*.atention.*"], "matches no linear layer of a block: did you mean blocks.*.attention.*?"),
        (["head"], "matches head: only linear layers of blocks are adapted"),
        (["embedding"], "matches embedding: only linear layers"),
        (["blocks.*.ffn.router"], "matches blocks.0.ffn.router: only linear layers"),
        (["blocks.*.ffn.experts.*"], "matches blocks.0.ffn.experts.gate: only linear layers"),
    ],
    ids=str,
)
def test_patterns_of_layers_that_are_not_adapted_are_named(targets: list[str], message: str) -> None:
    job = job_of({**LORA, "targets": targets}, model={"source": "moe-4m"})
    (problem,) = adapter_job_problems(job)
    assert message in problem


@pytest.mark.parametrize("source", ["llama-1m", "moe-4m", "mla-moe-4m"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_check_counts_what_is_trained(source: str, kind: str) -> None:
    job = job_of({**LORA, "kind": kind}, model={"source": source})
    model = build_model(job.model)
    add_adapter(model, job.adapter, seed=0)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert set(adapter_names(model)) == set(trained)
    found = adapter_parameters(job)
    assert found is not None
    assert found[1] == sum(parameter.numel() for parameter in trained.values())
    assert found[0] * len(job.adapter.parts) == len(trained)


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_a_degree_that_cuts_blocks_of_few_bits_is_refused_by_its_sizes(base_dtype: str) -> None:
    job = job_of({**LORA, "base_dtype": base_dtype}, model={"source": "llama-1m"}, layout={"tp": 4})
    (problem,) = job.problems()
    assert f'"{base_dtype}" has blocks of 64 inputs, which layout.tp = 4 cuts in attention.output of 128' in problem
    assert len(problem.fixes) == 3
    assert not [text for fix in problem.fixes for text in with_fix(job, fix).problems()]
    # Of the layers that are adapted alone.
    of_ffn = {**LORA, "base_dtype": base_dtype, "targets": ["blocks.*.ffn.*"]}
    assert not job_of(of_ffn, model={"source": "llama-1m"}, layout={"tp": 4}).problems()


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    (problem,) = adapter_job_problems(job_of({**LORA, "initial": str(tmp_path)}))
    assert "holds no adapter_config.json" in problem


def test_an_adapter_of_kind_none_adapts_nothing() -> None:
    assert Adapter().adapted(["blocks.0.attention.query"]) == []
