"""The head and the loss in chunks of tokens: by the formulas, and in the traced step."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.step.estimate import COMPONENTS
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.programs.trace_ranks import trace
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP
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
@pytest.mark.timeout(300)
def test_formula_and_simulation_of_a_loss_in_chunks_agree(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    resolved = load_job(file, ())
    question = plan_request(resolved, Options("h100-ib400:1"))
    estimate = judge(layout_of(resolved.job, 1), question).estimate
    timeline = simulate(trace_job(TRAINER_STEP, resolved, 1, how=TraceOptions(use_cache=False)), question.cluster)
    assert timeline.step_s == pytest.approx(estimate.step.total_s, rel=MOST_OFF)
    expected, step = estimate.step.summed(), decompose(timeline)
    off = {part: (getattr(expected, part) - getattr(step, part)) / timeline.step_s for part in COMPONENTS}
    assert {part: share for part, share in off.items() if abs(share) > MOST_OFF} == {}
    allocated = max(float(curve.allocated_bytes.max()) for curve in timeline.memory)
    assert allocated == pytest.approx(estimate.memory.allocated_bytes, rel=MOST_OFF)
