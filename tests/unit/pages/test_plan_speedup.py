"""A plan says which keys it did not search, and its largest speedup is the largest that it has priced."""

from __future__ import annotations

import pytest

from meshwright.cost.stack_factors import load_stack
from meshwright.pages.tables.page_table import percent
from meshwright.pages.tables.plan_speedup import largest_speedup, unsearched_words
from meshwright.pages.tables.plan_table import request_words
from meshwright.planner.plan import make_plan
from meshwright.spec.run.layout_plan import Fix, Plan, Rejection
from questions import ask


@pytest.fixture(scope="module")
def short_of_memory() -> Plan:
    """A plan whose state barely fits: FSDP alone would be faster and does not."""
    on_device = {"cpu_offload": False, "activation_offload": False, "loss_chunks": 1, "compile_loss": False}
    return make_plan(ask("llama3-8b", 8, cluster="rtx-4090-eth100", batch=128, seq_len=8192, **on_device), min_scored=0)


def test_the_key_of_the_job_alone_is_named_where_it_would_be_faster(short_of_memory: Plan) -> None:
    assert short_of_memory.not_searched == ("memory.optimizer_state",)
    searched, faster = unsearched_words(short_of_memory)
    assert searched.endswith(": memory.optimizer_state")
    change = "memory.optimizer_state=uvm"
    managed_s = next(one.best.step_s for one in short_of_memory.what_ifs if one.change == change)
    gain = 1 - managed_s / short_of_memory.pick.step_s
    assert gain > 0.2
    assert f"{change}: predicted {percent(gain)} faster than the pick" in faster


def test_for_other_software_memory_keys_are_not_searched_where_something_fits() -> None:
    question = ask("llama3-8b", 8, cluster="rtx-4090-eth100", batch=128, seq_len=8192)
    other = make_plan(question.with_setup(stack=load_stack("torchtitan-2025")), min_scored=0)
    assert other.not_searched == ("loss_chunks", "activation_offload", "cpu_offload")
    own = make_plan(ask("llama3-8b", 1, cluster="h200-ib400", batch=8), min_scored=0)
    assert own.pick.layout.cpu_offload
    assert own.not_searched == ("memory.optimizer_state",)


def test_the_largest_speedup_counts_what_fits_with_another_key_and_what_needs_memory(short_of_memory: Plan) -> None:
    alone = short_of_memory.fsdp_alone
    assert alone is not None
    text = largest_speedup(short_of_memory)
    assert "memory for FSDP alone" in text
    assert f"saves {100 * (1 - alone.step_s / short_of_memory.pick.step_s):.1f} % of the step. Without more" in text
    assert "Without more memory: memory.optimizer_state=uvm" in text
    half_s = short_of_memory.pick.step_s / 2
    fixes = (Fix(change="cpu_offload=true", step_s=half_s),)
    rejection = Rejection(change="cp=1", reason="memory", fixes=fixes)
    fixed = short_of_memory.replace(rejections=(rejection,), not_searched=("cpu_offload",))
    assert largest_speedup(fixed) == "Largest potential speedup: cp=1, cpu_offload=true: saves 50.0 % of the step."
    assert "cp=1, cpu_offload=true: predicted 50.0 % faster" in [*unsearched_words(fixed)][1]


def test_the_head_says_why_another_precision_is_planned(short_of_memory: Plan) -> None:
    why = "--precision mxfp8: a100 has no float8 units; computed in bfloat16"
    first = next(request_words(short_of_memory.replace(precision_note=why)))
    assert f"a step, bfloat16 ({why}); stack" in first
