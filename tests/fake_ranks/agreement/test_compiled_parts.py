"""A compiled loss and a compiled update: by the formulas, and in the traced step."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.step.estimate import COMPONENTS, Estimate
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

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
    file = tmp_path / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    num_ranks = int(override[-1]) if "tp" in override else 1
    resolved = load_job(file, (override,))
    question = plan_request(resolved, Options(f"h100-ib400:{num_ranks}"))
    estimate = judge(layout_of(resolved.job, num_ranks), question).estimate
    assert isinstance(estimate, Estimate)
    traces = trace_job(TRAINER_STEP, resolved, num_ranks, how=TraceOptions(use_cache=False))
    timeline = simulate(traces, question.cluster)
    assert timeline.step_s == pytest.approx(estimate.step.total_s, rel=MOST_OFF)
    expected, step = estimate.step.summed(), decompose(timeline)
    off = {part: (getattr(expected, part) - getattr(step, part)) / timeline.step_s for part in COMPONENTS}
    assert {part: share for part, share in off.items() if abs(share) > MOST_OFF} == {}
    allocated = max(float(curve.allocated_bytes.max()) for curve in timeline.memory)
    assert allocated == pytest.approx(estimate.memory.allocated_bytes, rel=MOST_MEMORY_OFF)
