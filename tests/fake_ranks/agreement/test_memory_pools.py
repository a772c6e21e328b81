"""Time and memory of managed memory: the planner's formulas compared with the simulated step of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both

JOB = """
[model]
source = "llama3-8b"
options = { num_layers = 2 }
[data]
source = "stdlib"
[train]
steps = 10
seq_len = 2048
global_batch_size = 16
[precision]
compute = "bfloat16"
[memory]
embedding = "uvm"
optimizer_state = "uvm"
"""
MOST_OFF = 0.10
"""Of the simulated step."""
FSDP = "layout.dp_shard=8 layout.activation_checkpoint=selective"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "overrides",
    [
        FSDP,
        f"{FSDP} memory.optimizer_state=device",
        f"{FSDP} optimizer.state_dtype=bfloat16 layout.microbatch_size=2",
        "optimizer.name=muon optimizer.state_dtype=bfloat16 layout.tp=2 layout.dp_shard=4",
        "model.source=qwen3-0.6b model.options.num_layers=4 layout.pp=2 layout.dp_shard=4 layout.microbatch_size=2",
    ],
)
def test_formulas_and_simulation_agree(tmp_path: Path, overrides: str) -> None:
    both = predict_both(tmp_path, JOB, overrides)
    both.require_equal_steps(MOST_OFF)
    assert both.allocated_bytes == pytest.approx(both.estimate.memory.allocated_bytes, rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_take_the_same_bytes_off_the_device(tmp_path: Path) -> None:
    sizes = "model.options.vocab_size=8192 model.options.dim=512 model.options.num_heads=8 model.options.num_kv_heads=8"
    small = f"{FSDP} {sizes} model.options.head_dim=64 model.options.ffn_dim=1536"
    moved, plain = (
        predict_both(tmp_path, JOB, f"{small} memory.embedding={pool} memory.optimizer_state={pool}")
        for pool in ("uvm", "device")
    )
    saved = plain.estimate.memory.allocated_bytes - moved.estimate.memory.allocated_bytes
    assert plain.allocated_bytes - moved.allocated_bytes == pytest.approx(saved, rel=0.01)
