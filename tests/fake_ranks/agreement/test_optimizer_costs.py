"""Time and memory of every optimizer: the planner's formulas compared with the simulated step of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both
from meshwright.config.load import load_job
from meshwright.errors import UnsupportedError
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

JOB = """
model = { source = "llama3-8b", options = { num_layers = 2, vocab_size = 32768 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 2048, global_batch_size = 8 }
precision = { compute = "bfloat16" }
layout = { activation_checkpoint = "selective", dp_shard = 8 }
"""
MOST_OFF = 0.10
"""Of the simulated step."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "overrides",
    [
        "optimizer.name=muon optimizer.state_dtype=bfloat16",
        pytest.param("optimizer.name=muon", marks=pytest.mark.long),
        pytest.param("optimizer.name=muon layout.dp_shard=4 layout.tp=2", marks=pytest.mark.long),
        pytest.param("optimizer.state_dtype=bfloat16", marks=pytest.mark.long),
        pytest.param("optimizer.in_backward=true optimizer.max_grad_norm=0.0", marks=pytest.mark.long),
    ],
)
def test_formulas_and_simulation_agree(tmp_path: Path, overrides: str) -> None:
    predict_both(tmp_path, JOB, overrides).require_equal_components(MOST_OFF)


def test_int8_is_not_simulated(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    resolved = load_job(file, ("optimizer.state_dtype=int8",))
    assert judge(layout_of(resolved.job, 8), plan_request(resolved, Options("h100-ib400:8"))).estimate.step.optimizer_s
    with pytest.raises(UnsupportedError, match="not simulated"):
        trace_job(TRAINER_STEP, resolved, 8)
