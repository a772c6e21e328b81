"""Where there is no layout, the error says which rule or which memory stands in the way, and what would do."""

from __future__ import annotations

import re

import pytest

from meshwright.errors import InfeasibleLayout
from meshwright.planner.plan import find, make_plan
from meshwright.planner.request import PlanRequest
from questions import ask


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            ask("llama3-8b", 6, tp=4),
            "6 devices do not divide by layout.tp = 4: change a degree, or take 4 or 8 devices",
        ),
        (ask("llama3-8b", 24, tp=3), "layout.tp = 3 does not divide the model's num_heads = 32"),
        (
            ask("llama3-8b", 64, pp=64),
            "layout.pp = 64 x 1 stages a rank are 64 stages, but the model's num_layers = 32",
        ),
        (
            ask("llama3-8b", 16, schedule="1F1B", virtual_stages=2, pp=2),
            'layout.schedule = "1F1B" has one stage on each pipeline rank',
        ),
        (
            ask("llama3-8b", 16, batch=7, pp=1, cp=1, tp=1),
            "a global batch of 7 sequences divides among no number of data-parallel ranks that the model leaves (16): "
            "set the global batch to 16 (65536 tokens)",
        ),
        (
            ask("llama3-8b", 16, pp=2, schedule="ZBVZeroBubble", reshard_after_forward="always"),
            'layout.reshard_after_forward = "always" frees parameters that the split backward',
        ),
        (ask("llama3-8b", 16, async_tp=True, compile=False, tp=2), "layout.async_tp = true needs matmuls"),
    ],
)
def test_a_rule_that_is_broken_is_named(question: PlanRequest, message: str) -> None:
    with pytest.raises(InfeasibleLayout, match=re.escape(message)):
        make_plan(question)


def test_what_is_too_large_names_the_memory_and_what_would_do() -> None:
    question = ask("llama3.1-405b", 8, batch=128)
    with pytest.raises(InfeasibleLayout) as raised:
        make_plan(question)
    text = str(raised.value)
    assert re.search(r"fits in no layout: the leanest needs .* on a device that can give .*, most of it \w+ \(", text)
    assert "nor does the host's memory hold its state" in text
    count = re.search(r"take (\d+) devices", text)
    assert count is not None
    enough = question.cluster.with_num_devices(int(count[1]))
    assert len(find(question.with_setup(cluster=enough), min_scored=0).priced)


def test_a_single_node_without_a_network_cannot_grow() -> None:
    with pytest.raises(
        InfeasibleLayout, match=r"on 1 device of l40s-node .* take a cluster whose nodes a network joins"
    ):
        make_plan(ask("llama3.1-405b", 1, cluster="l40s-node", batch=8, seq_len=65_536))


def test_what_is_set_may_be_what_does_not_fit() -> None:
    question = ask("llama3-70b", 16, dp_replicate=16, batch=16, cpu_offload=False)
    with pytest.raises(InfeasibleLayout, match=r"leave out what is set in \[layout\].*set by you: layout.dp_replicate"):
        make_plan(question)
