"""Choices that are seldom made together, where formulas and simulation had disagreed: step, components, memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both

MOST_OFF_STEP, MOST_OFF_COMPONENT, MOST_OFF_MEMORY = 0.05, 0.10, 0.05
JOB = """
model = { source = "llama3-8b" }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 2048, global_batch_size = 8 }
precision = { compute = "bfloat16" }
"""
FOUR = "model.options.num_layers=4 layout.dp_shard=8"
PIPELINE = "train.global_batch_size=16 layout.pp=4 layout.dp_shard=2"
DOCUMENTS = "data.mask_documents=true data.document_tokens=600"
SMALL = "model.source=llama3.2-1b layout.dp_shard=2"
CASES = (
    f"{FOUR} train.seq_len=4096 layout.attention_backend=flex layout.compile=true",
    f"{FOUR} train.seq_len=4096 layout.attention_backend=flex layout.compile=true layout.activation_checkpoint=full",
    f"{FOUR} train.seq_len=4096 layout.attention_backend=varlen layout.compile=true {DOCUMENTS}",
    f"{FOUR} optimizer.name=muon",
    f"{FOUR} optimizer.name=muon optimizer.state_dtype=bfloat16 layout.loss_chunks=8",
    "model.options.num_layers=4 layout.dp_shard=4 layout.tp=2 optimizer.name=muon",
    f"{SMALL} optimizer.name=muon",
    f"{SMALL} precision.float8=tensorwise layout.compile=true",
    f"{SMALL} precision.float8=tensorwise",
    f"{SMALL} precision.float8=tensorwise train.seq_len=512 train.global_batch_size=2",
    f"{SMALL} precision.float8=tensorwise layout.compile=true layout.activation_offload=true",
    f"{FOUR} layout.compile=model layout.activation_checkpoint=full",
    "model.options.num_layers=8 layout.dp_replicate=4 layout.dp_shard=4 layout.tp=8 layout.compile=true "
    "layout.activation_checkpoint=selective train.seq_len=4096 train.global_batch_size=32",
    f"{PIPELINE} model.options.num_layers=16 layout.schedule=ZBVZeroBubble layout.activation_offload=true",
    f"{PIPELINE} model.options.num_layers=16 layout.schedule=ZBVZeroBubble layout.activation_offload=true "
    "layout.compile=true",
    f"{PIPELINE} model.options.num_layers=8 layout.schedule=ZBVZeroBubble layout.cpu_offload=true",
    f"{PIPELINE} model.options.num_layers=8 layout.schedule=1F1B layout.cpu_offload=true",
    "model.options.num_layers=12 layout.pp=2 layout.schedule=DualPipeV layout.activation_offload=true",
    f"{FOUR} optimizer.in_backward=true optimizer.max_grad_norm=0.0",
    "model.options.num_layers=6 layout.pp=2 layout.tp=4 train.global_batch_size=4 optimizer.state_dtype=bfloat16",
)
QUICK = CASES[0]
TIED = "model.source=qwen3-0.6b model.options.num_layers=2 train.seq_len=512 layout.dp_shard=1 layout.compile=true"
"""One device, a head tied to the embedding, and microbatches too short to hide its gradients."""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_block_with_eager_attention_agrees(tmp_path: Path) -> None:
    _compare(tmp_path, QUICK)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("graphs", ["true", "false"])
def test_what_casts_and_adds_up_in_each_microbatch_is_counted(tmp_path: Path, graphs: str) -> None:
    _compare(tmp_path, f"{TIED} layout.cuda_graphs={graphs}")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_graphs_hold_one_gradient_of_an_embedding_that_is_not_tied(tmp_path: Path) -> None:
    _compare(tmp_path, f"{TIED} model.source=llama3-8b layout.cuda_graphs=true")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overrides", [case for case in CASES if case != QUICK], ids=str)
def test_formula_and_simulation_agree(tmp_path: Path, overrides: str) -> None:
    _compare(tmp_path, overrides)


def _compare(folder: Path, overrides: str) -> None:
    both = predict_both(folder, JOB, overrides)
    assert both.estimate.step.total_s == pytest.approx(both.timeline.step_s, rel=MOST_OFF_STEP)
    both.require_equal_components(MOST_OFF_COMPONENT)
    assert both.estimate.memory.allocated_bytes == pytest.approx(both.allocated_bytes, rel=MOST_OFF_MEMORY)
