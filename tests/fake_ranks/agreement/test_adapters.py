"""Adapters of linear layers on a frozen base: by the formulas, and in the traced step of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both

JOB = """
model = {{ source = "llama3-8b", options = {{ num_layers = 4 }} }}
adapter = {{ kind = "{kind}", base_dtype = "{base_dtype}" }}
data = {{ source = "stdlib", tokenizer = "bytes" }}
train = {{ steps = 10, seq_len = 4096, global_batch_size = 8 }}
precision = {{ compute = "bfloat16" }}
layout = {{ dp_shard = 8, activation_checkpoint = "{recompute}", compile = {compile} }}
"""
ONE_DEVICE = "layout.dp_shard=1 train.global_batch_size=1 train.seq_len=2048"
MOST_OFF_STEP, MOST_OFF_COMPONENT, MOST_OFF_MEMORY = 0.05, 0.10, 0.05


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", ["", ONE_DEVICE], ids=["8 H100", "1 H100"])
@pytest.mark.parametrize(
    ("kind", "base_dtype", "compile", "recompute"),
    [
        ("lora", "compute", "true", "full"),
        ("lora", "compute", "false", "full"),
        ("lora", "bfloat16", "true", "full"),
        ("lora", "int8", "false", "full"),
        ("lora", "nf4", "false", "full"),
        # Recomputation and backward are one graph, which unpacks a weight once.
        ("lora", "nf4", "true", "full"),
        # Between forward and backward a compiled block keeps no unpacked weight: 1.6 GiB of these four blocks.
        ("lora", "int8", "true", "none"),
        ("lora", "nf4", "true", "none"),
        # Norms of rows are several small kernels, and eager code unpacks a weight for them, too.
        ("dora", "compute", "false", "full"),
        ("dora", "nf4", "false", "none"),
        ("dora", "nf4", "true", "full"),
        # The product with DoRA's factor is not kept where backward makes it again.
        ("dora", "nf4", "true", "none"),
    ],
)
def test_formula_and_simulation_of_adapters_agree(
    tmp_path: Path, kind: str, base_dtype: str, compile: str, recompute: str, overrides: str
) -> None:
    job = JOB.format(kind=kind, base_dtype=base_dtype, compile=compile, recompute=recompute)
    both = predict_both(tmp_path, job, overrides)
    assert both.estimate.step.total_s == pytest.approx(both.timeline.step_s, rel=MOST_OFF_STEP)
    both.require_equal_components(MOST_OFF_COMPONENT)
    assert both.estimate.memory.allocated_bytes == pytest.approx(both.allocated_bytes, rel=MOST_OFF_MEMORY)


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["compute", "nf4"])
def test_the_first_all_gather_is_the_peak_where_little_is_trained_and_logits_come_in_chunks(
    tmp_path: Path, base_dtype: str
) -> None:
    job = JOB.format(kind="lora", base_dtype=base_dtype, compile="false", recompute="full")
    both = predict_both(tmp_path, job, "layout.loss_chunks=8")
    assert both.estimate.memory.allocated_bytes == pytest.approx(both.allocated_bytes, rel=0.01)
