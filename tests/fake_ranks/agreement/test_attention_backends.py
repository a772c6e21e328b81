"""Attention by each backend on a GPU: the operator that is traced, and formulas next to the simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.config.load import load_job
from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import layout_table
from meshwright.cost.step import StepPricer
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.spec.model.op import op_kind
from meshwright.spec.trace.trace import RecordKind
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

JOB = """
model = { source = "llama3.2-1b", options = { num_layers = 2 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 8192, global_batch_size = 1 }
precision = { compute = "bfloat16" }
"""
DOCUMENTS = "data.mask_documents=true data.document_tokens=600"
CASES = {
    # Operator, and what the job says of it.
    "cudnn": ("aten._scaled_dot_product_cudnn_attention", ""),
    "flex": ("meshwright.flex_attention", f"layout.attention_backend=flex {DOCUMENTS}"),
    "flash": ("aten._scaled_dot_product_flash_attention", "layout.attention_backend=flash"),
    "efficient": ("aten._scaled_dot_product_efficient_attention", "layout.attention_backend=efficient"),
    "varlen": (
        "meshwright.varlen_attention",
        "layout.attention_backend=varlen model.options.sliding_window=1000",
    ),
    "flex, compiled": ("meshwright.flex_attention", f"layout.attention_backend=flex layout.compile=true {DOCUMENTS}"),
    "masked": ("aten._scaled_dot_product_cudnn_attention", "data.mask_documents=true"),
}
QUICK = ("flex",)


@pytest.mark.parametrize("case", [pytest.param(one, marks=() if one in QUICK else pytest.mark.long) for one in CASES])
@pytest.mark.timeout(300)
def test_formulas_price_attention_as_the_simulation_does(tmp_path: Path, case: str) -> None:
    operator, said = CASES[case]
    (tmp_path / "job.toml").write_text(JOB)
    resolved = load_job(tmp_path / "job.toml", tuple(said.split()))
    request = plan_request(resolved, Options("h100:1"))
    layout = layout_of(resolved.job, 1)
    estimate = judge(layout, request).estimate
    trace = trace_job(TRAINER_STEP, resolved, 1, how=TraceOptions(use_cache=False)).traces[0]
    attention = [at for at, one in enumerate(trace.signatures) if op_kind(one.op) == "attention"]
    assert {trace.signatures[at].op.removesuffix(".default").removesuffix("_backward") for at in attention} == {
        operator
    }
    seconds = op_seconds(trace.signatures, request.cluster.device)
    is_op = trace.records.kind == RecordKind.OP
    counts = np.bincount(trace.records.signature[is_op], minlength=len(seconds))
    found = float(sum(seconds[at] * counts[at] for at in attention))
    blocks, _, _ = StepPricer(request.configs(layout_table([layout]))).passes(fitted_constants())
    assert found == pytest.approx(float(blocks.attention[0]), rel=0.01)
    assert float(trace.live_bytes().max()) == pytest.approx(estimate.memory.allocated_bytes, rel=0.03)
