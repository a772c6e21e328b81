"""Preference optimisation: the step by the formulas and in the trace, and the reference's forward next to a step's."""

from __future__ import annotations

from pathlib import Path

import pytest

from both_predictions import predict_both
from meshwright.planner.candidate import judge
from meshwright.planner.reference_scoring import scoring_s
from repository import ROOT

JOB = f"""
model = {{ source = "llama3-8b", options = {{ num_layers = 4 }} }}
train = {{ task = "dpo", steps = 10, seq_len = 4096, global_batch_size = 32 }}
precision = {{ compute = "bfloat16" }}
layout = {{ dp_shard = 8, activation_checkpoint = "full", compile = true }}
[data]
source = "{ROOT / "examples" / "preferences.jsonl"}"
packing = "whole"
mask_documents = true
document_tokens = 1000
"""
CONVERSATIONS = f"train.task=sft data.source={ROOT / 'examples' / 'conversations.jsonl'}"
MOST_OFF = 0.05
MOST_OFF_ACCURACY = 0.02
"""Without the token accuracy steps of these sizes were up to 2.5 % apart."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", ["", "layout.loss_chunks=8"], ids=["whole", "chunks"])
def test_the_token_accuracy_is_counted(tmp_path: Path, overrides: str) -> None:
    few = "model.options.num_layers=2 train.global_batch_size=8"
    predict_both(tmp_path, JOB, f"{CONVERSATIONS} {few} {overrides}").require_equal_steps(MOST_OFF_ACCURACY)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "overrides",
    ["", "layout.loss_chunks=8", "adapter.kind=lora", "layout.dp_shard=4 layout.tp=2", "layout.dp_shard=4 layout.pp=2"],
    ids=lambda text: text or "dp_shard=8",
)
def test_formula_and_simulation_of_preferences_agree(tmp_path: Path, overrides: str) -> None:
    both = predict_both(tmp_path, JOB, overrides)
    both.require_equal_steps(MOST_OFF)
    if both.layout.pp > 1:
        return  # a step's microbatches overlap other than those of the scoring
    if both.layout.loss_chunks > 1:
        return  # the head's gradients have no place in a forward alone
    spans, timeline = both.timeline.spans, both.timeline
    forward = timeline.phases.index("forward")
    is_forward = (spans.rank == timeline.ranks[0]) & (spans.stream == 0) & (spans.phase == forward)
    found = float((spans.end_s - spans.start_s)[is_forward].sum())
    request = both.request
    scored = scoring_s(judge(both.layout, request), request, request.workload.global_batch_size)
    assert scored == pytest.approx(found, rel=0.1)
