"""A limit on the SMs of communication changes the planner's step as it changes the simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.engine.conditions import Conditions
from meshwright.simulator.simulate_step import simulate
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

JOB = """
model = { source = "llama3-8b", options = { num_layers = 6, vocab_size = 32768 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 4096, global_batch_size = 16 }
precision = { compute = "bfloat16" }
layout = { activation_checkpoint = "full", dp_shard = 8 }
"""
LIMITS = (16, 12, 8)
"""With fewer a step waits for communication, where formulas and simulation differ by some percent with any key."""
MOST_OFF = 0.005
"""Between the two changes of the step, as a share of it."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "num_ranks", "cluster"),
    [("", 8, "h100-ib400"), ("layout.dp_shard=16", 16, "h100-ib400"), ("layout.dp_shard=16", 16, "b200-ib400")],
)
def test_formulas_and_simulation_change_alike(tmp_path: Path, overrides: str, num_ranks: int, cluster: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    resolved = load_job(file, tuple(overrides.split()))
    request = plan_request(resolved, Options(f"{cluster}:{num_ranks}"))
    layout = layout_of(resolved.job, num_ranks)
    traces = trace_job(TRAINER_STEP, resolved, num_ranks, how=TraceOptions(use_cache=False))
    planned_s, simulated_s = judge(layout, request).step_s, simulate(traces, request.cluster).step_s
    for limit in LIMITS:
        limited = layout.replace(communication_sms=limit)
        planned = judge(limited, request).step_s / planned_s
        simulated = simulate(traces, request.cluster, conditions=Conditions().under(limited)).step_s / simulated_s
        print(f"{limit} SMs: {planned - 1:+.2%} by formulas, {simulated - 1:+.2%} simulated")
        assert planned == pytest.approx(simulated, abs=MOST_OFF)
