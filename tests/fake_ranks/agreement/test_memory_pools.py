"""Time and memory of managed memory: the planner's formulas compared with the simulated step of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.step.estimate import COMPONENTS, Estimate
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import Timeline
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

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


def _both(folder: Path, num_ranks: int, overrides: str) -> tuple[Estimate, Timeline]:
    """Return the formula's estimate of the job, and its simulated step."""
    file = folder / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    resolved = load_job(file, tuple(overrides.split()))
    request = plan_request(resolved, Options(f"h100-ib400:{num_ranks}"))
    estimate = judge(layout_of(resolved.job, num_ranks), request).estimate
    traces = trace_job(TRAINER_STEP, resolved, num_ranks, how=TraceOptions(use_cache=False))
    return estimate, simulate(traces, request.cluster)


def _allocated(timeline: Timeline) -> float:
    return max(float(curve.allocated_bytes.max()) for curve in timeline.memory)


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
    estimate, timeline = _both(tmp_path, 8, overrides)
    expected, found = estimate.step.summed(), decompose(timeline)
    off = {name: (getattr(expected, name) - getattr(found, name)) / timeline.step_s for name in COMPONENTS}
    assert {name: share for name, share in off.items() if abs(share) > MOST_OFF} == {}
    assert timeline.step_s == pytest.approx(estimate.step.total_s, rel=MOST_OFF)
    assert _allocated(timeline) == pytest.approx(estimate.memory.allocated_bytes, rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_take_the_same_bytes_off_the_device(tmp_path: Path) -> None:
    sizes = "model.options.vocab_size=8192 model.options.dim=512 model.options.num_heads=8 model.options.num_kv_heads=8"
    small = f"{FSDP} {sizes} model.options.head_dim=64 model.options.ffn_dim=1536"
    (moved, traced), (plain, other) = (
        _both(tmp_path, 8, f"{small} memory.embedding={pool} memory.optimizer_state={pool}")
        for pool in ("uvm", "device")
    )
    saved = plain.memory.allocated_bytes - moved.memory.allocated_bytes
    assert _allocated(other) - _allocated(traced) == pytest.approx(saved, rel=0.01)
