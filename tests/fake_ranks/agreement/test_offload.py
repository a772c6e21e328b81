"""Parameters, gradients and optimizer state that wait on the host: the trainer's step as CUDA would run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from both_predictions import predict_both
from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks
from trained_step import BUILD, arguments_of

JOB = """
model = { source = "qwen3-0.6b" }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 4096, global_batch_size = 4 }
precision = { compute = "bfloat16" }
layout = { cpu_offload = true, reshard_after_forward = "never" }
"""
MOST_OFF_STEP, MOST_OFF_MEMORY = 0.10, 0.08


@pytest.fixture(scope="module")
def trace() -> Trace:
    keys = ("layout.dp_shard=2", "layout.cpu_offload=true", "model.options.dim=512")
    arguments = arguments_of("examples/tiny.toml", *keys)
    return trace_ranks(Program(BUILD, 2, arguments), [0])[0]


def test_each_parameter_is_copied_to_the_device_and_its_gradient_to_the_host(trace: Trace) -> None:
    copied = {place: _bytes_of(trace, place) for place in ("to_device", "to_host")}
    # Whole shards, but for a few numbers and tokens.
    assert copied["to_host"] > 1 << 20
    assert copied["to_device"] / copied["to_host"] == pytest.approx(2, rel=0.1)


def test_the_host_waits_for_its_gradients_before_it_updates(trace: Trace) -> None:
    places = np.array([one.place for one in trace.signatures])[trace.records.signature]
    is_op = trace.records.kind == RecordKind.OP
    (update,) = [
        row
        for row in np.flatnonzero(is_op & (places == "host"))
        if trace.signatures[trace.records.signature[row]].op == "aten._fused_adamw_.default"
    ][:1]
    last_copy = np.flatnonzero(is_op & (places == "to_host") & (np.arange(len(is_op)) < update))[-1]
    waits = trace.records.kind[last_copy:update] == RecordKind.HOST_SYNC
    assert waits.any()


def test_no_state_of_the_optimizer_is_on_the_device(trace: Trace) -> None:
    there = trace.storages.num_bytes[trace.storages.allocated_at < 0]
    assert there.sum() < _bytes_of(trace, "to_host") / 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_formula_and_simulation_of_a_small_model_agree(tmp_path: Path) -> None:
    sizes = "model.options.num_layers=4 train.seq_len=1024 train.global_batch_size=2"
    both = predict_both(tmp_path, JOB, sizes, "rtx-4090-node")
    both.require_equal_steps(MOST_OFF_STEP)
    assert both.allocated_bytes == pytest.approx(both.estimate.memory.allocated_bytes, rel=MOST_OFF_MEMORY)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_formula_and_simulation_of_the_planner_s_pick_agree(tmp_path: Path) -> None:
    both = predict_both(tmp_path, JOB, "layout.compile=true", "rtx-4090-node")
    both.require_equal_steps(MOST_OFF_STEP)
    # Of four blocks alone, fragmentation is another share.
    reserved = max(float(curve.reserved_bytes.max()) for curve in both.timeline.memory)
    assert reserved == pytest.approx(both.estimate.memory.reserved_bytes, rel=MOST_OFF_MEMORY)


def _bytes_of(trace: Trace, place: str) -> int:
    records = trace.records.signature[trace.records.kind == RecordKind.OP]
    return sum(trace.signatures[one].read_bytes for one in records.tolist() if trace.signatures[one].place == place)
