"""Changes of one key that free the memory that a simulation misses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.candidate import judge
from meshwright.planner.explain.verdict import memory_fixes, verdict
from meshwright.planner.recompute_choice import with_recompute
from meshwright.planner.search.price import memory_of_ranks
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.units import GiB, format_bytes
from questions import ask

LAYOUT = Layout(dp_shard=16, microbatch_size=2)


@pytest.mark.parametrize("missing", [1 * GiB, 8 * GiB])
def test_each_fix_frees_what_is_missing_and_the_cheapest_comes_first(missing: int) -> None:
    question = ask()
    own = judge(LAYOUT, question).estimate.memory.reserved_bytes
    fixes = memory_fixes(LAYOUT, question, missing)
    assert fixes
    assert [fix.step_s for fix in fixes] == sorted(fix.step_s for fix in fixes)
    for fix in fixes:
        if fix.change.startswith("memory."):
            continue
        change = fix.change.replace("layout.", "")
        changed = parse_layout(change)
        keys = {part.split("=")[0].strip() for part in change.split(",")}
        layout = LAYOUT.replace(**{key: getattr(changed, key) for key in keys})
        if layout.num_ranks == LAYOUT.num_ranks:
            assert own - judge(layout, question).estimate.memory.reserved_bytes >= missing


def test_what_no_change_frees_has_no_fix() -> None:
    assert memory_fixes(LAYOUT, ask(), 1000 * GiB) == ()


def test_a_schedule_that_takes_turns_is_named_where_all_forwards_come_first() -> None:
    question = ask("llama3-8b", 16, batch=32)
    layout = Layout(pp=4, dp_shard=4, schedule="LoopedBFS", virtual_stages=2, activation_checkpoint="full")
    assert "layout.schedule=Interleaved1F1B" in {fix.change for fix in memory_fixes(layout, question, 4 * GiB)}


def test_a_smaller_loss_is_named_where_logits_are_what_does_not_fit() -> None:
    question = ask("llama3-8b", 8, seq_len=8192, batch=32)
    layout = Layout(dp_shard=8, compile=True)
    changes = [fix.change for fix in memory_fixes(layout, question, 1 * GiB)]
    assert "layout.compile_loss=true" in changes
    assert "layout.loss_chunks=4" in changes
    keys = [tuple(part.partition("=")[0] for part in change.split(", ")) for change in changes]
    assert len(keys) == len(set(keys)), "the fastest value of the same keys"


def test_one_value_for_all_blocks_is_named_where_what_each_saves_does_not_fit() -> None:
    question = ask("llama3-8b", 8, seq_len=8192, batch=64)
    layout = Layout(dp_shard=8, microbatch_size=2, activation_checkpoint_blocks=("full", "none") * 16)
    found = {fix.change: fix.step_s for fix in memory_fixes(layout, question, 8 * GiB)}
    change = "layout.activation_checkpoint=full, layout.activation_checkpoint_blocks left out"
    assert change in found
    alike = layout.replace(activation_checkpoint="full", activation_checkpoint_blocks=None)
    own, other = judge(layout, question), judge(alike, question)
    assert own.estimate.memory.reserved_bytes - other.estimate.memory.reserved_bytes >= 8 * GiB
    assert found[change] == pytest.approx(other.step_s, rel=1e-6)


def test_what_each_block_saves_is_kept_where_another_key_changes() -> None:
    question = ask("llama3-8b", 8, seq_len=8192, batch=64)
    layout = Layout(dp_shard=8, microbatch_size=2, activation_checkpoint_blocks=("none",) * 32)
    changes = [fix.change for fix in memory_fixes(layout, question, 8 * GiB)]
    assert "layout.activation_checkpoint=selective, layout.activation_checkpoint_blocks left out" in changes
    assert not [change for change in changes if "blocks" in change and "activation_checkpoint=" not in change]


def test_a_processor_is_not_told_to_compile_its_loss() -> None:
    question = ask("llama-1m", 2, seq_len=256, batch=16, cluster="cpu-local")
    assert "compile_loss" not in str(memory_fixes(Layout(dp_shard=2), question, 1))


def test_what_auto_chooses_is_tight_and_not_called_a_misfit() -> None:
    question = ask("llama3-8b", 8, seq_len=8192, batch=32)
    auto = Layout(dp_shard=8, microbatch_size=4, compile=True, activation_checkpoint="auto")
    chosen = with_recompute(replace(question, given=auto), None)
    found = verdict(chosen)
    assert found.candidate.free_bytes < 0
    assert found.problem() is None
    assert found.candidate.is_tight
    assert found.candidate.fits
    assert found.tight.startswith("predicted reserved memory ")
    assert "The step fits because the allocator frees cached blocks at the limit" in found.tight
    assert f"to avoid it, set {found.fixes[0].change}" in found.tight


def test_what_has_more_tensors_than_a_device_has_memory_is_a_misfit() -> None:
    question = ask("llama3-8b", 8, seq_len=8192, batch=32)
    found = verdict(replace(question, given=Layout(dp_shard=8, microbatch_size=4, compile=True)))
    assert found.candidate.estimate.memory.allocated_bytes > found.usable_bytes
    assert not found.candidate.is_tight
    assert found.problem() is not None
    assert found.tight == ""


def test_fixed_segments_give_no_pages_back() -> None:
    question = ask("llama3-8b", 8, seq_len=8192, batch=32)
    chosen = with_recompute(
        replace(question, given=Layout(dp_shard=8, microbatch_size=4, compile=True, activation_checkpoint="auto")), None
    )
    fixed = chosen.with_setup(stack=chosen.setup.stack.replace(expandable_segments=False))
    assert chosen.given is not None
    assert judge(chosen.given, chosen).is_tight
    assert not judge(chosen.given, fixed).fits


def test_a_full_host_is_named_and_not_its_devices() -> None:
    question = ask("llama3-70b", 8, seq_len=4096, batch=16, cluster="b300-ib800")
    offloaded = Layout(dp_shard=8, microbatch_size=2, cpu_offload=True, activation_checkpoint="full")
    found = verdict(replace(question, given=offloaded))
    assert found.problem() is None
    assert found.candidate.free_bytes == pytest.approx(found.usable_bytes - found.reserved_bytes, abs=1)
    assert found.reserved_bytes < 40 * GiB, "state on the host takes nothing of the device"
    assert found.host is not None
    assert found.host.needed_bytes == pytest.approx(16 * question.setup.model.num_parameters / 8)
    full = verdict(replace(ask("llama3-405b", 8, batch=16, cluster="b300-ib800"), given=offloaded))
    assert full.host is not None
    assert full.host.needed_bytes > full.host.usable_bytes
    problem = str(full.problem())
    assert f"{format_bytes(full.host.needed_bytes)} of the host's memory for state (layout.cpu_offload)" in problem
    assert f"its share of that is {format_bytes(full.host.usable_bytes)}" in problem
    assert "of a device" not in problem


def test_cached_blocks_are_reserved_not_free_and_no_reason_for_a_misfit() -> None:
    question = ask("llama3-8b", 8, seq_len=2048, batch=64)
    layout = Layout(dp_shard=8, microbatch_size=1, compile=True, activation_checkpoint="full")
    found = verdict(replace(question, given=layout))
    memory = found.candidate.estimate.memory
    assert memory.cached_bytes > 0
    assert found.reserved_bytes == found.needed_bytes + memory.cached_bytes
    assert found.candidate.free_bytes == pytest.approx(found.usable_bytes - found.reserved_bytes, abs=1)
    assert memory_of_ranks(layout, question)[0] == memory


def test_no_more_is_cached_than_a_device_has_room_for() -> None:
    question = ask("llama3-8b", 8, seq_len=2048, batch=64)
    layout = Layout(dp_shard=8, microbatch_size=1, compile=True, activation_checkpoint="full")
    needed_bytes = judge(layout, question).estimate.memory.needed_bytes
    device = question.cluster.device
    less = device.memory_bytes.value - device.usable_memory_bytes + needed_bytes + 1
    memory_bytes = device.memory_bytes.model_copy(update={"value": less})
    cluster = question.cluster.replace(device=device.replace(memory_bytes=memory_bytes))
    candidate = judge(layout, question.with_setup(cluster=cluster))
    assert candidate.fits
    assert candidate.free_bytes >= 0
    assert candidate.estimate.memory.reserved_bytes <= cluster.device.usable_memory_bytes + 1
