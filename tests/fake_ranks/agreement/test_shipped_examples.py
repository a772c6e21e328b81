"""Shipped examples on named clusters: they fit by plan and by simulation, and the two agree in step and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_job
from meshwright.planner.explain.verdict import verdict
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.simulate_step import simulate
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP
from repository import ROOT

EXAMPLES = ROOT / "examples"
NAMES = ("llama3-8b", "llama3-70b")
"""Left out: deepseek-v3 and llama3-405b-16k, of which simulating takes longer than a test may."""
MOST_OFF_STEP, MOST_OFF_MEMORY = 0.10, 0.08


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_fits_and_does_what_was_planned(name: str) -> None:
    file = EXAMPLES / f"{name}.toml"
    resolved = load_job(file)
    cluster = resolved.job.cluster
    assert cluster.num_devices is not None
    question = plan_request(resolved, Options())
    question = replace(question, given=resolved.job.layout.resolve(cluster.num_devices))
    planned = verdict(question)
    assert planned.problem() is None

    timeline = simulate(
        trace_job(TRAINER_STEP, resolved, cluster.num_devices, how=TraceOptions(use_cache=False)), question.cluster
    )
    reserved = max(float(curve.reserved_bytes.max()) for curve in timeline.memory)
    assert reserved <= planned.usable_bytes
    assert abs(planned.needed_bytes / reserved - 1) <= MOST_OFF_MEMORY
    assert abs(planned.candidate.estimate.step.total_s / timeline.step_s - 1) <= MOST_OFF_STEP
