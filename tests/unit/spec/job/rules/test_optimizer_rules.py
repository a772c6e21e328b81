"""Keys of [optimizer] that exclude each other or a layout: each refusal names the field and a change that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.models.build import build_architecture
from meshwright.spec.job.job import Job
from meshwright.spec.job.rules.optimizer_rules import group_problems
from meshwright.spec.job.sections import OptimizerSection
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.model.weight_shapes import bias_names, weight_shapes

ONCE = {"in_backward": True, "max_grad_norm": 0.0}
AT_ONCE = {"microbatch_size": 8}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"state_dtype": "int8"}, {"tp": 2}, "layout.tp = 2 cuts in matrices of 128 columns", '"bfloat16"'),
    ({"momentum": 0.9}, {}, "optimizer.momentum = 0.9", "optimizer.name"),
    ({"name": "muon", "state_dtype": "int8"}, {}, "optimizer.state_dtype", '"bfloat16"'),
    ({"in_backward": True}, AT_ONCE, "optimizer.in_backward", "optimizer.max_grad_norm to 0.0"),
    ({**ONCE, "name": "muon"}, AT_ONCE, "optimizer.in_backward", 'optimizer.name to "adamw"'),
    ({**ONCE, "state_dtype": "int8"}, AT_ONCE, "optimizer.in_backward", '"bfloat16"'),
    (ONCE, {}, "8 microbatches", "layout.microbatch_size to 8"),
    (ONCE, {"microbatch_size": 8, "cpu_offload": True}, "layout.cpu_offload = true", "optimizer.in_backward to false"),
    (ONCE, {"microbatch_size": 8, "pp": 2}, "layout.pp = 2", "optimizer.in_backward to false"),
    ({"name": "muon"}, {"cpu_offload": True}, 'optimizer.name = "muon"', "layout.cpu_offload to false"),
    ({"state_dtype": "bfloat16"}, {"cpu_offload": True}, 'optimizer.state_dtype = "bfloat16"', '"float32"'),
]


def job_of(optimizer: dict[str, Any], layout: dict[str, Any]) -> Job:
    return Job.from_dict({"optimizer": optimizer, "layout": layout, "train": {"global_batch_size": 8}})


@pytest.mark.parametrize(("optimizer", "layout", "given", "fix"), REFUSED)
def test_what_cannot_be_is_refused_with_a_fix(
    optimizer: dict[str, Any], layout: dict[str, Any], given: str, fix: str
) -> None:
    found = [problem for problem in job_of(optimizer, layout).problems() if given in problem]
    assert len(found) == 1
    assert fix in found[0]
    assert found[0].fixes


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ({"name": "muon", "state_dtype": "bfloat16", "momentum": 0.9}, {"dp_shard": 2, "tp": 2}),
        (ONCE, AT_ONCE),
        (ONCE, {"dp_shard": 2, "microbatch_size": 4, "tp": 2}),
        ({"state_dtype": "int8"}, {}),
    ],
)
def test_what_can_be_is_not_refused(optimizer: dict[str, Any], layout: dict[str, Any]) -> None:
    assert job_of(optimizer, layout).problems() == []


def test_patterns_take_parameters_and_the_first_counts() -> None:
    names = ["embedding.weight", "blocks.0.attention.query.weight", "blocks.0.attention_norm.weight"]

    def problems(*patterns: str) -> list[str]:
        groups = [{"match": pattern} for pattern in patterns]
        return [str(one) for one in group_problems(OptimizerSection.from_dict({"groups": groups}), names)]

    assert problems("*norm.weight", "*.weight") == []
    (unknown,) = problems("blocks.0.attention.query.bias")
    assert "did you mean blocks.0.attention.query.weight?" in unknown
    (hidden,) = problems("*.weight", "embedding.*")
    assert "group 2" in hidden
    assert "move it up" in hidden


@pytest.mark.parametrize("preset", ["llama-1m", "moe-4m", "mla-moe-4m"])
@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [
        ("blocks.*.attn*", ": did you mean blocks.*.attention.*?"),
        ("blok*", ": did you mean blocks.*?"),
        ("block.*.attention_norm.weight", ": did you mean blocks.*.attention_norm.weight?"),
        ("zzz*", ": names are such as embedding.weight, blocks.0."),
    ],
)
def test_the_nearest_pattern_that_takes_parameters_is_suggested(preset: str, pattern: str, suggestion: str) -> None:
    names = [*weight_shapes(PRESETS[preset]), *bias_names(PRESETS[preset])]
    (problem,) = group_problems(OptimizerSection.from_dict({"groups": [{"match": pattern}]}), names)
    assert suggestion in problem


@pytest.mark.parametrize("preset", ["llama-1m", "moe-4m", "mla-moe-4m", "gpt-oss-4m", "qwen3-0.6b"])
def test_every_parameter_has_a_name_before_the_model_is_built(preset: str) -> None:
    known = [*weight_shapes(PRESETS[preset]), *bias_names(PRESETS[preset])]
    with torch.device("meta"):
        model = build_architecture(PRESETS[preset])
    assert sorted(name for name, _ in model.named_parameters()) == sorted(known)
