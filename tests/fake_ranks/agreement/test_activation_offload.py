"""Activations that wait on the host: the trainer's traced step on CUDA, simulated, and the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both
from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import footprint_of_rank, host_activation_bytes
from meshwright.spec.trace.trace import RecordKind, Trace

JOB = """
model = { source = "llama3-8b" }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 2048 }
precision = { compute = "bfloat16" }
layout = { activation_offload = true }
"""
MOST_OFF_STEP, MOST_OFF_MEMORY, MOST_OFF_BYTES = 0.10, 0.08, 0.03
QUICK = ("num_layers=4 global_batch_size=1",)
LONG = (
    "num_layers=6 global_batch_size=2 activation_checkpoint=full",
    "num_layers=6 global_batch_size=2 activation_checkpoint=selective compile=true",
    "num_layers=6 global_batch_size=4 dp_shard=4",
    "num_layers=6 global_batch_size=2 tp=2",
    "num_layers=8 global_batch_size=16 pp=4 dp_shard=2",
    "num_layers=16 global_batch_size=16 pp=4 dp_shard=2 activation_checkpoint=full",
    "num_layers=16 global_batch_size=16 pp=4 dp_shard=2 schedule=ZBVZeroBubble activation_checkpoint=full",
    "num_layers=16 global_batch_size=16 pp=4 dp_shard=2 schedule=Interleaved1F1B virtual_stages=2",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", QUICK)
def test_formula_and_simulation_agree(tmp_path: Path, case: str) -> None:
    _compare(tmp_path, case)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", LONG)
def test_formula_and_simulation_of_other_layouts_agree(tmp_path: Path, case: str) -> None:
    _compare(tmp_path, case)


def _compare(folder: Path, case: str) -> None:
    """Compare the step by component, each pipeline rank's allocated bytes, and the bytes that one microbatch moves."""
    both = predict_both(folder, JOB, " ".join(map(_override, case.split())))
    both.require_equal_steps(MOST_OFF_STEP)
    layout, configs = both.layout, both.request.configs(layout_table([both.layout]))
    for curve in both.timeline.memory:
        stage = curve.rank * layout.pp // layout.num_ranks
        formula = footprint_of_rank(configs, stage).allocated_bytes[0]
        found_bytes = float(curve.allocated_bytes.max())
        assert found_bytes <= (1 + MOST_OFF_MEMORY) * formula, stage
        assert found_bytes >= (1 - MOST_OFF_MEMORY) * formula, stage
    if layout.pp == 1:
        expected_bytes = float(host_activation_bytes(configs)[0]) * both.resolved.job.num_microbatches(layout)
        _require_moved(both.traces.of_rank(0), expected_bytes)


def _require_moved(trace: Trace, num_bytes: float) -> None:
    """Compare what is copied each way in a step with the formula's bytes."""
    signatures = trace.records.signature[trace.records.kind == RecordKind.OP]
    for place in ("to_host", "to_device"):
        moved = sum(
            min(one.read_bytes, one.written_bytes)
            for one in (trace.signatures[number] for number in signatures.tolist())
            if one.place == place
        )
        assert moved == pytest.approx(num_bytes, rel=MOST_OFF_BYTES)


def _override(word: str) -> str:
    key = word.partition("=")[0]
    section = {"num_layers": "model.options", "global_batch_size": "train"}.get(key, "layout")
    return f"{section}.{word}"
