"""Parameters, gradients and optimizer state that wait on the host: the trainer's step as CUDA would run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.config.load import load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.step.estimate import COMPONENTS, Estimate
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP
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
    estimate, timeline = _both(tmp_path, "model.options.num_layers=4 train.seq_len=1024 train.global_batch_size=2")
    _require_equal_steps(estimate, timeline)
    allocated = max(float(curve.allocated_bytes.max()) for curve in timeline.memory)
    assert allocated == pytest.approx(estimate.memory.allocated_bytes, rel=MOST_OFF_MEMORY)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_formula_and_simulation_of_the_planner_s_pick_agree(tmp_path: Path) -> None:
    estimate, timeline = _both(tmp_path, "layout.compile=true")
    _require_equal_steps(estimate, timeline)
    # Of four blocks alone, fragmentation is another share.
    reserved = max(float(curve.reserved_bytes.max()) for curve in timeline.memory)
    assert reserved == pytest.approx(estimate.memory.reserved_bytes, rel=MOST_OFF_MEMORY)


def _both(folder: Path, overrides: str) -> tuple[Estimate, Timeline]:
    """Return the formula's estimate of the job, and its simulated step."""
    file, given = folder / "job.toml", tuple(overrides.split())
    file.write_text(JOB, encoding="utf-8")
    resolved = load_job(file, given)
    question = plan_request(resolved, Options("rtx-4090-node:1"))
    estimate = judge(layout_of(resolved.job, 1), question).estimate
    return estimate, simulate(trace_job(TRAINER_STEP, resolved, 1, how=TraceOptions(use_cache=False)), question.cluster)


def _require_equal_steps(estimate: Estimate, timeline: Timeline) -> None:
    expected, found = estimate.step.summed(), decompose(timeline)
    assert timeline.step_s == pytest.approx(estimate.step.total_s, rel=MOST_OFF_STEP)
    off = {part: (getattr(expected, part) - getattr(found, part)) / timeline.step_s for part in COMPONENTS}
    assert {part: share for part, share in off.items() if abs(share) > MOST_OFF_STEP} == {}


def _bytes_of(trace: Trace, place: str) -> int:
    records = trace.records.signature[trace.records.kind == RecordKind.OP]
    return sum(trace.signatures[one].read_bytes for one in records.tolist() if trace.signatures[one].place == place)
