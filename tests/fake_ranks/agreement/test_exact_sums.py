"""What exact sums cost: the planner's formulas compared with the simulated step of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both

MOST_TIME_OFF, MOST_MEMORY_OFF = 0.05, 0.04
JOB = """
model = { source = "llama3-8b", options = { num_layers = 8 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 4096, global_batch_size = 32, exact_elastic = true }
precision = { compute = "bfloat16" }
layout = { activation_checkpoint = "selective", compile = true }
"""
QUICK = "layout.dp_shard=8"
OTHERS = (
    "layout.dp_shard=8 layout.gradient_sync=step",
    "layout.dp_replicate=2 layout.dp_shard=4",
    "layout.dp_shard=4 layout.pp=2",
    "layout.dp_shard=4 layout.tp=2",
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_cost_of_exact_sums_agrees(tmp_path: Path) -> None:
    _compare(tmp_path, QUICK)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", OTHERS)
def test_the_cost_of_exact_sums_agrees_in_other_layouts(tmp_path: Path, overrides: str) -> None:
    _compare(tmp_path, overrides)


def _compare(folder: Path, overrides: str) -> None:
    both = predict_both(folder, JOB, overrides)
    both.require_equal_steps(MOST_TIME_OFF)
    assert both.estimate.memory is not None
    assert both.allocated_bytes == pytest.approx(both.estimate.memory.allocated_bytes, rel=MOST_MEMORY_OFF)
