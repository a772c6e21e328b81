"""A step by component: the planner's formulas compared with the simulated step of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both
from calibrated_device import calibrated
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.machine.cluster import Cluster

MOST_OFF = 0.10
"""Of the simulated step."""
JOB = """
model = { source = "llama3-8b", options = { num_layers = 8 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 4096, global_batch_size = 8 }
precision = { compute = "bfloat16" }
layout = { activation_checkpoint = "selective", compile = true }
"""
CASES = (
    "layout.dp_shard=8",
    "layout.dp_shard=8 layout.compile=false",
    "layout.dp_shard=8 layout.activation_checkpoint=none",
    "layout.dp_shard=4 layout.tp=2",
    "layout.dp_shard=8 layout.loss_chunks=16",
    "layout.dp_shard=4 layout.pp=2 layout.loss_chunks=16 train.global_batch_size=32",
    "layout.dp_shard=4 layout.tp=2 layout.loss_chunks=16",
    "layout.dp_shard=4 layout.pp=2 train.global_batch_size=32",
    "layout.dp_shard=2 layout.pp=4 train.global_batch_size=32",
    "layout.dp_shard=4 layout.pp=2 layout.schedule=Interleaved1F1B train.global_batch_size=32",
    "layout.dp_replicate=2 layout.dp_shard=4",
    "layout.dp_replicate=8 layout.dp_shard=1 model.options.num_layers=2",
    "layout.dp_shard=4 layout.tp=2 layout.async_tp=true",
    "layout.dp_shard=4 layout.pp=2 layout.schedule=ZBVZeroBubble train.global_batch_size=32",
    "layout.dp_shard=4 layout.pp=2 layout.schedule=InterleavedZeroBubble train.global_batch_size=32 "
    "layout.compile=false layout.activation_checkpoint=none",
    "layout.dp_shard=2 layout.pp=4 layout.schedule=InterleavedZeroBubble train.global_batch_size=32",
    "layout.dp_shard=2 layout.pp=4 layout.schedule=InterleavedZeroBubble train.global_batch_size=32 "
    "layout.compile=false layout.activation_checkpoint=full",
    "layout.dp_shard=2 layout.cp=4 layout.cp_method=all-gather train.seq_len=16384",
    "layout.dp_shard=2 layout.cp=4 layout.cp_method=ring train.seq_len=16384",
    "layout.cp=8 layout.cp_method=ring train.seq_len=32768",
    "layout.cp=2 layout.dp_shard=4 layout.cp_method=all-gather train.seq_len=32768",
    "layout.dp_shard=1 layout.tp=8 train.seq_len=16384",
    "layout.dp_shard=8 layout.ep=8 model.source=qwen3-30b-a3b model.options.num_layers=4",
    "layout.dp_shard=4 layout.tp=2 layout.ep=4 layout.compile=false model.source=qwen3-30b-a3b "
    "model.options.num_layers=4",
    "layout.dp_shard=4 layout.pp=2 layout.ep=4 layout.schedule=ZBVZeroBubble layout.compile=false "
    "model.source=qwen3-30b-a3b model.options.num_layers=6 train.global_batch_size=32",
)
"""Overrides of the job."""
QUICK = "layout.dp_shard=8"


@pytest.mark.timeout(300)
def test_every_component_of_a_small_step_agrees(tmp_path: Path) -> None:
    _compare(tmp_path, QUICK)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overrides", [case for case in CASES if case != QUICK], ids=str)
def test_every_component_of_a_step_agrees(tmp_path: Path, overrides: str) -> None:
    _compare(tmp_path, overrides)


MEASURED_CASES = (
    "layout.dp_shard=8",
    "layout.dp_shard=8 layout.compile=false",
    "layout.dp_shard=8 layout.ep=8 model.source=qwen3-30b-a3b model.options.num_layers=4",
)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overrides", MEASURED_CASES)
def test_every_component_agrees_on_a_calibrated_accelerator(tmp_path: Path, overrides: str) -> None:
    cluster = load_cluster("h100-ib400").with_num_devices(8)
    _compare(tmp_path, overrides, cluster.replace(device=calibrated(cluster.device)))


def _compare(folder: Path, overrides: str, measured: Cluster | None = None) -> None:
    predict_both(folder, JOB, overrides, measured=measured).require_equal_components(MOST_OFF)
