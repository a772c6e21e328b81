"""A compiled loss and a compiled update: by the formulas, and in the traced step."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both

JOB = """
model = { source = "llama3-8b", options = { num_layers = 2 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 4096, global_batch_size = 2 }
precision = { compute = "bfloat16" }
layout = { compile = true, microbatch_size = 2, compile_loss = true, compile_optimizer = true }
"""
MOST_OFF, MOST_MEMORY_OFF = 0.08, 0.03


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("override", ["layout.loss_chunks=1", "layout.loss_chunks=8", "layout.tp=2", "layout.tp=4"])
def test_formula_and_simulation_agree(tmp_path: Path, override: str) -> None:
    both = predict_both(tmp_path, JOB, override)
    both.require_equal_steps(MOST_OFF)
    assert both.allocated_bytes == pytest.approx(both.estimate.memory.allocated_bytes, rel=MOST_MEMORY_OFF)
