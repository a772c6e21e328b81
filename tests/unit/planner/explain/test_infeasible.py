"""Where there is no layout, the error says which rule or which memory stands in the way, and what would do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from meshwright.errors import InfeasibleLayout, UnsupportedError
from meshwright.planner.plan import find, make_plan
from meshwright.planner.request import PlanRequest
from meshwright.spec.job.memory_section import MemorySection
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
            "set layout.tp to 16, or layout.pp to 16, or layout.cp to 16, or the global batch to 16 sequences (65,5",
        ),
        (
            ask("llama3-8b", 8, batch=12, pp=1, cp=1, tp=1),
            "set layout.tp to 2 or 4, or layout.pp to 2 or 4, or layout.cp to 2 or 4, or the global batch to 8 seq",
        ),
        (
            ask("llama3-8b", 8, batch=12, dp_shard=8),
            "leaves (8): set layout.dp_shard to 2 or 4, or the global batch to",
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "memory", "message"),
    [
        (
            ask("llama3-8b", 8, dp_shard=8, compile="model"),
            {"communication": "nccl"},
            'set memory.communication to "device", or layout.compile to true',
        ),
        (
            ask("llama3-8b", 8, cpu_offload=True),
            {"optimizer_state": "uvm"},
            'set memory.optimizer_state to "device", or layout.cpu_offload to false',
        ),
        (ask("llama3-8b", 1, compile="model"), {}, "fits in no layout: the leanest needs"),
        (ask("llama3-8b", 1, cuda_graphs=True), {}, "fits in no layout: the leanest needs"),
        (ask("llama3-8b", 8, cuda_graphs=True), {}, "captures a step of one rank, and the layout has 8"),
        (ask("llama3-8b", 8, compile="model", separate_reduce_group=True), {}, "or layout.separate_reduce_group to"),
    ],
)
def test_what_graphs_and_pools_rule_out_is_said_as_check_says_it(
    question: PlanRequest, memory: dict[str, str], message: str
) -> None:
    with pytest.raises(InfeasibleLayout, match=re.escape(message)):
        find(question.with_setup(memory=MemorySection.from_dict(memory)), min_scored=0)


def test_pools_that_would_make_it_fit_are_named() -> None:
    question = ask("llama3-8b", 1, cluster="h200-ib400", batch=8)
    with pytest.raises(InfeasibleLayout) as raised:
        find(question.with_setup(memory=MemorySection(embedding="uvm")), min_scored=0)
    assert 'set memory.optimizer_state to "uvm", set memory.embedding to "device", take 2 devices' in str(raised.value)
    for memory in (MemorySection(embedding="uvm", optimizer_state="uvm"), MemorySection()):
        assert len(find(question.with_setup(memory=memory), min_scored=0).priced)


@pytest.mark.slow
def test_a_fix_of_another_section_is_tried_on_the_request() -> None:
    question = ask("llama3-8b", 8)
    workload = question.workload.replace(optimizer_state_dtype="int8")
    question = question.with_setup(workload=workload, memory=MemorySection(optimizer_state="uvm"))
    with pytest.raises(InfeasibleLayout, match=re.escape('set memory.optimizer_state to "device", or optimizer.state')):
        find(question, min_scored=0)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            ask("llama3-8b", 8, tp=64),
            "layout.tp = 64 does not divide the model's num_heads = 32: set layout.tp to 4 or 8",
        ),
        (
            ask("llama3-8b", 8, batch=128, microbatch_size=7),
            "layout.microbatch_size = 7: set layout.microbatch_size to 4 or 8, or the global batch to 126",
        ),
        (
            ask("qwen3-30b-a3b", 8, ep=16),
            "layout.ep = 16 does not divide layout.dp_shard x cp x tp = 8: set layout.ep to 4 or 8",
        ),
        (
            ask("llama3-8b", 8, reshard_after_forward=3),
            "layout.reshard_after_forward = 3 must divide layout.dp_shard x cp = ",
        ),
        pytest.param(
            *(ask("llama3-8b", 8, virtual_stages=100), "num_layers = 32 fill 34 at most"), marks=pytest.mark.long
        ),
        (ask("llama3-8b", 8, virtual_stages=100, pp=2), "set layout.virtual_stages to 16;"),
        pytest.param(
            *(ask("llama3-8b", 8, virtual_stages=3, schedule="DualPipeV"), "set layout.virtual_stages to 2;"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_suggested_value_gives_a_layout(question: PlanRequest, message: str) -> None:
    with pytest.raises(InfeasibleLayout, match=re.escape(message)) as raised:
        find(question, min_scored=0)
    suggested = re.search(r": set layout\.(\w+) to (\d+)", str(raised.value))
    assert suggested is not None
    repaired = {**question.fixed, suggested[1]: int(suggested[2])}
    assert len(find(replace(question, fixed=repaired), min_scored=0).priced)


@pytest.mark.parametrize(("model", "count", "seq_len"), [("llama3.1-405b", 8, 8192), ("llama3-8b", 24, 1_000_000)])
def test_the_smallest_power_of_nodes_that_holds_the_model_is_named(model: str, count: int, seq_len: int) -> None:
    whole_loss = {"loss_chunks": 1, "compile_loss": False}
    with pytest.raises(InfeasibleLayout, match="take 32 devices"):
        find(ask(model, count, seq_len=seq_len, batch=1_048_576 // seq_len, **whole_loss), min_scored=0)


@pytest.mark.parametrize("key", ["activation_checkpoint", "activation_checkpoint_blocks"])
def test_what_each_block_saves_is_not_searched(key: str) -> None:
    value = "auto" if key == "activation_checkpoint" else ("full",)
    with pytest.raises(UnsupportedError, match=f"layout.{key} = .* chooses what each block saves.*: leave it out"):
        find(ask(**{key: value}))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({"virtual_stages": 3}, marks=pytest.mark.long),
        pytest.param({"virtual_stages": 9, "pp": 2}, marks=pytest.mark.long),
        pytest.param({"schedule": "ZBVZeroBubble"}, marks=pytest.mark.long),
        {"schedule": "ZBVZeroBubble", "virtual_stages": 1},
    ],
)
def test_stages_that_some_schedule_takes_give_a_plan(fixed: dict[str, Any]) -> None:
    pick = make_plan(ask("llama3-8b", 8, **fixed), num_runners_up=1, min_scored=0).pick.layout
    assert {key: getattr(pick, key) for key in fixed} == fixed


def test_a_full_host_is_named_where_the_state_must_wait_there() -> None:
    question = ask("llama3-405b", 8, batch=16, cluster="b300-ib800", cpu_offload=True)
    with pytest.raises(InfeasibleLayout) as raised:
        find(question)
    message = str(raised.value)
    assert "of the host's memory for state (layout.cpu_offload)" in message
    assert "on a device that can give" not in message
    assert "devices with more memory" not in message, "larger devices have no larger host"
    assert ": take 32 devices; set by you" in message


def test_only_devices_with_a_cluster_are_offered_and_what_does_not_help_comes_last() -> None:
    question = ask("llama3-405b", 2, batch=16, cluster="h100-ib400", dp_shard=1, dp_replicate=1, cp=1, pp=1, ep=1)
    with pytest.raises(InfeasibleLayout) as raised:
        find(question)
    message = str(raised.value)
    assert "tpu" not in message
    assert "would do, " not in message
