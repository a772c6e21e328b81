"""A plan says which keys it did not search, and its largest speedup is the largest that it has priced."""

from __future__ import annotations

import pytest

from meshwright.pages.tables.plan_speedup import largest_speedup, unsearched_words
from meshwright.pages.tables.plan_table import request_words
from meshwright.planner.plan import make_plan
from meshwright.spec.run.layout_plan import Fix, Plan, Rejection
from questions import ask


@pytest.fixture(scope="module")
def short_of_memory() -> Plan:
    """A plan whose state barely fits: FSDP alone would be faster and does not."""
    return make_plan(ask("llama3-8b", 8, cluster="rtx-4090-eth100", batch=128, seq_len=8192), min_scored=0)


def test_keys_that_only_save_memory_are_named_where_they_were_not_searched(short_of_memory: Plan) -> None:
    keys = ("loss_chunks", "activation_offload", "cpu_offload", "memory.optimizer_state")
    assert short_of_memory.not_searched == keys
    searched, faster = unsearched_words(short_of_memory)
    assert ", ".join(keys) in searched
    assert "memory.optimizer_state=uvm: predicted 27.0 % faster than the pick" in faster


def test_a_plan_that_offloads_has_searched_the_key() -> None:
    plan = make_plan(ask("llama3-8b", 1, cluster="h200-ib400", batch=8), min_scored=0)
    assert plan.pick.layout.cpu_offload
    assert not {"cpu_offload", "loss_chunks", "activation_offload"} & {*plan.not_searched}


def test_the_largest_speedup_counts_what_fits_with_another_key_and_what_needs_memory(short_of_memory: Plan) -> None:
    alone = short_of_memory.fsdp_alone
    assert alone is not None
    text = largest_speedup(short_of_memory)
    assert "memory for FSDP alone" in text
    assert f"saves {100 * (1 - alone.step_s / short_of_memory.pick.step_s):.1f} % of the step. Without more" in text
    assert "Without more memory: memory.optimizer_state=uvm" in text
    half_s = short_of_memory.pick.step_s / 2
    fixes = (Fix(change="cpu_offload=true", step_s=half_s),)
    fixed = short_of_memory.replace(rejections=(Rejection(change="cp=1", reason="memory", fixes=fixes),))
    assert largest_speedup(fixed) == "Largest potential speedup: cp=1, cpu_offload=true: saves 50.0 % of the step."
    assert "cp=1, cpu_offload=true: predicted 50.0 % faster" in [*unsearched_words(fixed)][1]


def test_the_head_says_why_another_precision_is_planned(short_of_memory: Plan) -> None:
    why = "--precision mxfp8: a100 has no float8 units; computed in bfloat16"
    first = next(request_words(short_of_memory.replace(precision_note=why)))
    assert f"a step, bfloat16 ({why}); stack" in first
