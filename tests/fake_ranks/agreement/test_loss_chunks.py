"""The head and the loss in chunks of tokens: by the formulas, and in the traced step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from both_predictions import predict_both
from meshwright.tracer.programs.trace_ranks import trace
from trained_step import BUILD, arguments_of

JOB = """
model = { source = "llama3-8b", options = { num_layers = 2 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 4096, global_batch_size = 2 }
precision = { compute = "bfloat16" }
layout = { activation_checkpoint = "full", compile = true, microbatch_size = 2, loss_chunks = 8 }
"""
MOST_OFF = 0.08


@pytest.mark.long
def test_no_tensor_of_a_step_is_as_large_as_the_logits() -> None:
    sizes = ("train.seq_len=1024", "train.global_batch_size=1", "model.options.vocab_size=4096")
    sizes += ("layout.microbatch_size=1",)
    found = {}
    for chunks in (1, 8):
        arguments = arguments_of("examples/tiny.toml", *sizes, f"layout.loss_chunks={chunks}")
        found[chunks] = int(trace(BUILD, 0, 1, arguments).storages.num_bytes.max())
    logits_bytes = 1024 * 4096 * 4
    assert found[1] == logits_bytes
    # The embedding's gradient.
    assert found[8] < logits_bytes / 3


@pytest.mark.long
def test_logits_of_a_chunk_are_freed_before_those_of_the_next() -> None:
    """Side by side they would leave no gap for what the loss makes of the next ones."""
    sizes = ("train.seq_len=1024", "train.global_batch_size=1", "model.options.vocab_size=4096")
    arguments = arguments_of("examples/tiny.toml", *sizes, "layout.microbatch_size=1", "layout.loss_chunks=4")
    storages = trace(BUILD, 0, 1, arguments).storages
    logits = np.flatnonzero(storages.num_bytes == 1024 // 4 * 4096 * 4)
    assert len(logits) == 4
    assert (storages.freed_at[logits[:-1]] <= storages.allocated_at[logits[1:]]).all()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_formula_and_simulation_of_a_loss_in_chunks_agree(tmp_path: Path) -> None:
    both = predict_both(tmp_path, JOB, "")
    both.require_equal_steps(MOST_OFF)
    assert both.allocated_bytes == pytest.approx(both.estimate.memory.allocated_bytes, rel=MOST_OFF)
