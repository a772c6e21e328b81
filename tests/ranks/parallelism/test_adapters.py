"""Adapters on every layout: loss, gradients and updates of one process, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.prover.differences import TOLERANCES, Record, assemble, compare
from meshwright.prover.record import record
from meshwright.spec.job.job import Job
from run_ranks import run_ranks
from training_runs import tiny_job

pytestmark = DYNAMO_WARNINGS

LORA = {"kind": "lora", "rank": 4}
DORA = {"kind": "dora", "rank": 3, "alpha": 5.0}
MIXTURE = {"source": "moe-4m", "options": {"dim": 32, "num_layers": 2, "head_dim": 8, "ffn_dim": 48}}
LATENT = {"source": "mla-moe-4m", "options": {"num_layers": 2}}
DENSE: list[dict[str, Any]] = [
    {"dp_shard": 4},
    {"dp_shard": 2, "dp_replicate": 2, "activation_checkpoint": "selective"},
    {"dp_replicate": 4, "gradient_sync": "step"},
    {"dp_shard": 2, "tp": 2, "activation_checkpoint": "full"},
    {"tp": 4},
    {"tp": 2, "dp_shard": 2, "activation_checkpoint": "selective", "loss_chunks": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
    {"pp": 2, "dp_shard": 2, "schedule": "InterleavedZeroBubble", "virtual_stages": 2, "activation_checkpoint": "full"},
    {"cp": 2, "tp": 2},
    {"cp": 2, "dp_shard": 2, "cp_method": "ring", "activation_offload": True},
    {"dp_shard": 4, "cpu_offload": True, "separate_reduce_group": True},
    {"dp_shard": 2, "cp": 2, "cp_method": "ulysses", "reshard_after_forward": "never", "loss_chunks": 4},
]


def record_all(jobs: list[dict[str, Any]]) -> list[Record]:
    """Return this rank's record of each job, one after the other."""
    return [record(Job.from_dict(job), "cpu", None, False)[0] for job in jobs]


def job_of(folder: Path, adapter: Mapping[str, Any], layout: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "adapter": dict(adapter),
        "train": {"steps": 2, "global_batch_size": 8},
        "precision": {"compute": "float64"},
        # A large step: B is zero at first, and so are the gradients of A.
        "optimizer": {"warmup_steps": 0, "schedule": "constant", "learning_rate": 0.05, "eps": 1e-3},
        "checkpoint": {"interval": 0},
    }
    options: dict[str, Any] = {**sections.pop("model", {})}
    job = tiny_job(folder, **{**common, **sections})
    if options:
        job["model"] = options
    job["layout"] = {"dp_shard": 1, "microbatch_size": 1, **layout}
    return job


def require_equal(folder: Path, cases: list[tuple[dict[str, Any], dict[str, Any]]], **sections: Any) -> None:
    """Compare each (adapter, layout) on four ranks with one process."""
    adapters = list({str(adapter): adapter for adapter, _ in cases}.values())
    (alone,) = run_ranks(record_all, 1, [job_of(folder, adapter, {}, **sections) for adapter in adapters])
    ones = {str(adapter): assemble([one]) for adapter, one in zip(adapters, alone, strict=True)}
    ranks = run_ranks(record_all, 4, [job_of(folder, *case, **sections) for case in cases])
    for number, (adapter, layout) in enumerate(cases):
        whole = assemble([records[number] for records in ranks])
        assert not whole.unequal_copies, (layout, whole.unequal_copies)
        differences = compare(whole, ones[str(adapter)], TOLERANCES["float64"])
        assert all(one.share <= 1 for one in differences), (layout, adapter, differences)
    one = ones[str(adapters[0])]
    trained = {name for name, weight in one.weights.items() if (weight != one.initial_weights[name]).any()}
    assert trained == set(one.gradients[0])
    assert all(name.endswith(("lora_a", "lora_b", "magnitude")) for name in trained)
    assert all((one.gradients[-1][name] != 0).any() for name in trained)


SMALL = {"dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "qkv_bias": True}


def test_adapters_train_on_layouts_as_on_one_process(tmp_path: Path) -> None:
    some = list(zip(cycle((DORA, LORA)), DENSE, strict=False))[3::5]
    require_equal(tmp_path, some, model={"source": "llama-1m", "options": SMALL})


@pytest.mark.long
@pytest.mark.parametrize("kinds", [(DORA, LORA), (LORA, DORA)], ids=["DoRA first", "LoRA first"])
def test_and_on_every_layout(tmp_path: Path, kinds: tuple[dict[str, Any], ...]) -> None:
    require_equal(
        tmp_path, list(zip(cycle(kinds), DENSE, strict=False)), model={"source": "llama-1m", "options": SMALL}
    )


@pytest.mark.long
def test_what_lies_below_the_adapted_layers_trains_nothing(tmp_path: Path) -> None:
    """No gradient flows into the first stages, nor into most blocks."""
    upper = {**DORA, "targets": ["blocks.3.attention.*", "blocks.3.ffn.down"]}
    layouts: list[dict[str, Any]] = [
        {"dp_shard": 4, "activation_checkpoint": "full"},
        {"tp": 2, "dp_shard": 2},
        {"pp": 4},
        {"pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
    ]
    require_equal(tmp_path, [(upper, layout) for layout in layouts], model={"source": "llama-1m", "options": SMALL})


@pytest.mark.long
def test_adapters_of_mixtures_train_as_on_one_process(tmp_path: Path) -> None:
    """Experts and routers stay as they are, and so do the biases that balance them."""
    layouts: list[dict[str, Any]] = [
        {"dp_shard": 4, "ep": 2},
        {"tp": 2, "dp_shard": 2, "etp": 2, "activation_checkpoint": "selective"},
        {"pp": 2, "dp_shard": 2, "ep": 2, "activation_checkpoint": "full"},
    ]
    require_equal(tmp_path, [(DORA, layout) for layout in layouts], model=MIXTURE)


@pytest.mark.long
def test_adapters_of_latent_attention_train_as_on_one_process(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tp": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}]
    require_equal(tmp_path, [(DORA, layout) for layout in layouts], model=LATENT)


@pytest.mark.long
def test_compiled_blocks_train_adapters_as_eager_ones(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"dp_shard": 4, "compile": True},
        {"tp": 2, "dp_shard": 2, "compile": True, "activation_checkpoint": "full"},
        {"pp": 2, "cp": 2, "compile": True, "activation_checkpoint": "selective", "compile_loss": True},
    ]
    require_equal(tmp_path, [(DORA, layout) for layout in layouts], model={"source": "llama-1m", "options": SMALL})


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["bfloat16", "int8", "nf4"])
def test_a_base_in_few_bits_is_the_same_on_every_layout(tmp_path: Path, base_dtype: str) -> None:
    """Numbers of blocks are those of the whole weight, whatever is sharded."""
    wide = {**SMALL, "dim": 128, "head_dim": 32, "ffn_dim": 256, "num_layers": 2}
    adapters = [{**DORA, "base_dtype": base_dtype}, {**LORA, "base_dtype": base_dtype}]
    layouts: list[dict[str, Any]] = [
        {"dp_shard": 4, "activation_checkpoint": "full"},
        {"tp": 2, "dp_shard": 2, "activation_checkpoint": "selective"},
        {"pp": 2, "tp": 2},
        {"cp": 2, "dp_shard": 2},
    ]
    cases = list(zip(cycle(adapters), layouts, strict=False))
    require_equal(tmp_path, cases, model={"source": "llama-1m", "options": wide})


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_compiled_blocks_read_a_base_in_few_bits_as_eager_ones(tmp_path: Path, base_dtype: str) -> None:
    wide = {**SMALL, "dim": 128, "head_dim": 32, "ffn_dim": 256, "num_layers": 2}
    adapters = [{**DORA, "base_dtype": base_dtype}, {**LORA, "base_dtype": base_dtype}]
    layouts: list[dict[str, Any]] = [
        {"dp_shard": 4, "compile": True},
        {"tp": 2, "dp_shard": 2, "compile": True, "activation_checkpoint": "selective"},
        {"pp": 2, "cp": 2, "compile": True, "activation_checkpoint": "full"},
    ]
    cases = list(zip(cycle(adapters), layouts, strict=False))
    require_equal(tmp_path, cases, model={"source": "llama-1m", "options": wide})
