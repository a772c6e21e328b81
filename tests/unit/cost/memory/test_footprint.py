"""The memory of a rank: exact where it can be counted, and in the order that physics asks for where it cannot."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.cost.memory.footprint import Footprint, fits, footprint, footprint_of_rank, memory_use, model_memory
from meshwright.cost.memory.footprint_constants import SMI_BYTES, WORKSPACE_BYTES
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.models.build import build_architecture
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.estimate import MemoryUse
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import Workload

OURS = Stack(name="ours", title="ours", kernels="eager")
MEGATRON = Stack(name="megatron", title="megatron", kernels="fused", sharding="optimizer", selective="core-attention")
CLUSTER = load_cluster("h100-ib400")
GIB = 2**30


def _setup(model: str, stack: Stack = OURS, **workload: Any) -> TrainingSetup:
    sizes = {"seq_len": 4096, "global_batch_size": 1024} | workload
    return TrainingSetup(model_spec(PRESETS[model]), Workload(**sizes), CLUSTER, stack)


def _footprint(setup: TrainingSetup, *layouts: Layout) -> Footprint:
    return footprint(Configurations.of_one(setup, layout_table(layouts)))


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-0.6b", "deepseek-v3"])
def test_one_rank_holds_every_parameter_once(model: str) -> None:
    setup = _setup(model)
    num_parameters = setup.model.num_parameters
    memory = _footprint(setup, Layout())
    assert memory.parameters_bytes[0] == 4 * num_parameters
    assert memory.optimizer_state_bytes[0] == 8 * num_parameters


@pytest.mark.parametrize("model", ["llama-1m", "moe-4m", "mla-moe-4m"])
def test_states_are_those_of_the_module(model: str) -> None:
    architecture = PRESETS[model]
    module = build_architecture(architecture)
    setup = TrainingSetup(model_spec(architecture), Workload(seq_len=128, global_batch_size=8), CLUSTER, OURS)
    assert _footprint(setup, Layout()).parameters_bytes[0] == 4 * sum(p.numel() for p in module.parameters())


def test_shards_are_padded_along_dim_0() -> None:
    setup = _setup("llama3-8b")
    even, odd = _footprint(setup, Layout(dp_shard=64), Layout(dp_shard=63)).parameters_bytes
    num_bytes = 4 * setup.model.num_parameters
    assert even == num_bytes / 64
    assert num_bytes / 63 < odd < num_bytes / 63 * 1.02


def test_megatron_keeps_18_bytes_of_a_parameter_and_shares_12() -> None:
    setup = _setup("llama3-8b", MEGATRON)
    memory, number = _footprint(setup, Layout(), Layout(dp_shard=8)), setup.model.num_parameters
    assert memory.parameters_bytes.tolist() == [2 * number] * 2
    assert memory.gradients_bytes.tolist() == [4 * number] * 2
    assert memory.optimizer_state_bytes.tolist() == [12 * number, 12 * number / 8]


def test_gradients_that_are_not_added_directly_stand_beside_their_sum() -> None:
    setup = _setup("llama3-8b", MEGATRON.replace(fuses_gradient_sum=False))
    assert _footprint(setup, Layout()).gradients_bytes[0] == 6 * setup.model.num_parameters
    half = _setup("llama3-8b", MEGATRON.replace(fuses_gradient_sum=False), precision="float16")
    assert _footprint(half, Layout()).gradients_bytes[0] == 2 * half.model.num_parameters


def test_experts_are_shared_by_ep_and_what_it_leaves() -> None:
    setup = _setup("deepseek-v3")
    spread, alone = _footprint(setup, Layout(dp_shard=64, ep=64), Layout(dp_shard=64)).parameters_bytes
    assert spread == pytest.approx(alone, rel=0.01)
    per_rank = _footprint(_setup("deepseek-v3", MEGATRON), Layout(dp_shard=64, ep=64), Layout(dp_shard=64))
    assert per_rank.parameters_bytes[0] < per_rank.parameters_bytes[1] / 15
    assert per_rank.optimizer_state_bytes[0] == pytest.approx(per_rank.optimizer_state_bytes[1])


def test_pipeline_ranks_hold_the_model_together() -> None:
    setup = _setup("llama3-8b", MEGATRON)
    configs = Configurations.of_one(setup, layout_table([Layout(pp=4)]))
    parameters = sum(footprint_of_rank(configs, rank).parameters_bytes[0] for rank in range(4))
    assert parameters == 2 * setup.model.num_parameters


PIPELINES = [
    Layout(pp=pp, schedule=schedule, virtual_stages=1 if schedule == "1F1B" else 2, microbatch_size=size, tp=tp)
    for pp in (2, 4, 6, 8, 16)
    for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    for size, tp in ((1, 1), (4, 8))
]
# With little kept for backward, what waits for the backward to the weights weighs more than what is in flight.
PIPELINES += [layout.replace(activation_checkpoint="full") for layout in PIPELINES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stack"),
    [
        ("llama3-8b", "megatron"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("deepseek-v3", "ours"),
                ("llama3-8b", "ours"),
                ("deepseek-v3", "megatron"),
                *product(("qwen3-30b-a3b", "llama3.1-405b"), ("megatron", "ours")),
            ]
        ),
    ],
)
def test_the_fullest_of_all_pipeline_ranks_is_weighed(model: str, stack: str) -> None:
    setup = _setup(model, MEGATRON if stack == "megatron" else load_stack("meshwright"))
    configs = Configurations.of_one(setup, layout_table(PIPELINES))
    fullest = footprint(configs).device_bytes
    for row, layout in enumerate(PIPELINES):
        one = configs.take(np.array([row]))
        ranks = [footprint_of_rank(one, rank).device_bytes[0] for rank in range(layout.pp)]
        assert fullest[row] == max(ranks), layout


def test_stages_that_a_layout_cuts_itself_are_weighed_as_it_cuts_them() -> None:
    setup = _setup("llama3-8b", load_stack("meshwright"))
    even = Layout(pp=4, dp_shard=2)
    heavy = even.replace(stage_boundaries=(2, 4, 28))
    configs = Configurations.of_one(setup, layout_table([even, heavy]))
    own, third = footprint(configs), footprint_of_rank(configs, 2)
    assert own.device_bytes[1] == third.device_bytes[1] > 2 * third.device_bytes[0]
    assert configs.layouts.layout(1).stage_boundaries == (2, 4, 28)
    assert configs.layouts.layout(0).stage_boundaries is None


def test_a_tied_head_is_a_copy_on_the_last_stage() -> None:
    setup = _setup("qwen3-0.6b", MEGATRON)
    configs = Configurations.of_one(setup, layout_table([Layout(pp=2)]))
    parameters = sum(footprint_of_rank(configs, rank).parameters_bytes[0] for rank in range(2))
    embedding = PRESETS["qwen3-0.6b"].vocab_size * PRESETS["qwen3-0.6b"].dim
    assert parameters == 2 * (setup.model.num_parameters + embedding)


def test_whole_gradients_add_up_unless_each_microbatch_is_reduced() -> None:
    layout = Layout(dp_shard=64, microbatch_size=4)
    memory = _footprint(_setup("llama3-8b"), layout.replace(gradient_sync="step"), layout)
    number = _setup("llama3-8b").model.num_parameters
    assert memory.gradients_bytes.tolist() == [4 * number, 4 * number / 64]
    assert memory.unsharded_parameters_bytes[0] == memory.unsharded_parameters_bytes[1]


def test_offloaded_shards_of_gradients_leave_the_device_unless_replicas_are_to_be_summed() -> None:
    alone = Layout(dp_shard=64, cpu_offload=True, activation_checkpoint="full")
    memory = _footprint(_setup("llama3-8b"), alone, alone.replace(dp_replicate=2, dp_shard=32))
    number = _setup("llama3-8b").model.num_parameters
    assert memory.gradients_bytes.tolist() == [0, 4 * number / 32]


def test_a_stage_that_reduces_each_microbatch_holds_no_whole_gradients() -> None:
    layout = Layout(pp=4, dp_shard=8)
    each = layout.replace(gradient_sync="microbatch", schedule="Interleaved1F1B")
    table = layout_table([layout, each, each.replace(schedule="InterleavedZeroBubble")])
    memory = footprint_of_rank(Configurations.of_one(_setup("llama3-8b"), table), 1)
    assert memory.gradients_bytes[0] > 6 * memory.gradients_bytes[1]
    # A backward in two parts leaves all of a stage's gradients to one reduction.
    assert memory.unsharded_parameters_bytes[2] > memory.unsharded_parameters_bytes[1]


def test_one_microbatch_has_shards_of_gradients_when_its_activations_are_gone() -> None:
    setup = _setup("llama3-8b", seq_len=128, global_batch_size=1)
    memory = _footprint(setup, Layout())
    assert memory.gradients_bytes[0] == 4 * setup.model.num_parameters
    assert memory.logits_bytes[0] == 0


def test_a_pipeline_that_reduces_last_holds_activations_or_a_reduction_never_both() -> None:
    last = OURS.replace(reduces_after_pipeline=True)
    layout = Layout(pp=4, dp_shard=8)
    each, after = (_footprint(_setup("llama3-8b", stack), layout) for stack in (OURS, last))
    block = 4 * _setup("llama3-8b").model.groups[1].num_parameters
    assert each.communication_buffers_bytes - after.communication_buffers_bytes == block
    # What the block has kept that is reduced is freed by then: less than the reduction reads.
    freed = float(after.activations_bytes[0] - each.activations_bytes[0])
    assert 0 < freed < block
    # With next to nothing kept, the reduction of whole gradients is the fullest moment of a rank without ends, with the
    # shards of the one block that is reduced.
    configs = Configurations.of_one(_setup("llama3-8b", last, seq_len=16), layout_table([layout]))
    short = footprint_of_rank(configs, 1)
    assert short.communication_buffers_bytes == block
    assert short.activations_bytes == 0
    assert short.gradients_bytes == 8 * block + block / 8
    alone = [_footprint(_setup("llama3-8b", stack), Layout(dp_shard=8)) for stack in (OURS, last)]
    assert alone[0].device_bytes == alone[1].device_bytes


def test_what_a_stage_has_sent_is_freed_unless_its_backward_is_split() -> None:
    of = _setup("llama3-8b", load_stack("meshwright"))
    holds = replace(of, stack=of.stack.replace(frees_sent=False))
    one = 4096 * 4096 * 2
    for schedule, freed in (("GPipe", 128 - 4), ("ZBVZeroBubble", -6)):
        layout = Layout(pp=4, dp_shard=8, schedule=schedule)
        held, kept = (float(_footprint(setup, layout).activations_bytes[0]) for setup in (holds, of))
        assert held - kept == freed * one


def test_logits_that_are_freed_are_not_there_beside_their_gradient() -> None:
    freed = OURS.replace(keeps_logits=False)
    layouts = Layout(dp_shard=8, activation_checkpoint="full"), Layout(dp_shard=8, tp=8, activation_checkpoint="full")
    setup = _setup("llama3-8b", freed, global_batch_size=8, seq_len=65_536)
    logits = 65_536 * PRESETS["llama3-8b"].vocab_size
    assert _footprint(setup, *layouts).logits_bytes.tolist() == [12 * logits, 10 * logits / 8]
    # In float32 the loss makes no copy of the logits to compute in, and what it frees is as large as what it makes.
    wide = _setup("llama3-8b", freed, global_batch_size=8, seq_len=65_536, precision="float32")
    assert _footprint(wide, *layouts).logits_bytes.tolist() == [12 * logits, 8 * logits / 8]


def test_compiled_blocks_recompute_what_tp_gathers_again_and_async_tp_joins() -> None:
    setup = _setup("llama3-8b", load_stack("meshwright"), seq_len=32_768, global_batch_size=8)
    layouts = [Layout(dp_shard=2, tp=4, compile=on) for on in (False, True)]
    eager, compiled, joined = _footprint(setup, *layouts, layouts[1].replace(async_tp=True)).activations_bytes
    shard = 32_768 / 4 * 2
    # The largest moment has all blocks; of each one the input of the last matmul, next to gate and up.
    assert compiled - joined == 32 * shard * 14_336
    two = [layout.replace(tp=4, microbatch_size=2) for layout in (layouts[1], layouts[1].replace(async_tp=True))]
    compiled_of_two, joined_of_two = _footprint(setup, *two).activations_bytes
    assert compiled_of_two == joined_of_two
    # What norms make; the eager product's activation(gate).
    assert eager - compiled == pytest.approx(32 * shard * (2 * 4096 + 14_336), rel=0.05)


def test_what_one_rank_holds_whole_is_not_freed_after_forward() -> None:
    layout = Layout(dp_replicate=8, microbatch_size=8)
    freed, kept = (layout.replace(reshard_after_forward=choice) for choice in ("always", "never"))
    memory = _footprint(_setup("llama3-8b", load_stack("meshwright"), global_batch_size=64), freed, kept)
    assert memory.device_bytes[0] == memory.device_bytes[1]


def test_offloaded_replicas_reduce_all_gradients_on_the_device() -> None:
    number = _setup("llama3-8b").model.num_parameters
    memory = _footprint(_setup("llama3-8b"), Layout(dp_replicate=8), Layout(dp_replicate=8, cpu_offload=True))
    assert (memory.fragmentation_bytes > 4 * number).all()


def test_kept_blocks_are_gathered_whole() -> None:
    freed, kept = Layout(dp_shard=8, reshard_after_forward="always"), Layout(dp_shard=8, reshard_after_forward="never")
    setup = _setup("llama3-8b", global_batch_size=8)
    memory = _footprint(setup, freed, kept)
    blocks = setup.model.groups[1].count * setup.model.groups[1].num_parameters
    assert memory.unsharded_parameters_bytes[1] - memory.unsharded_parameters_bytes[0] == pytest.approx(
        2 * blocks, rel=0.07
    )


def test_offload_leaves_no_state_on_the_device() -> None:
    memory = _footprint(_setup("llama3-8b"), Layout(dp_shard=8, cpu_offload=True))
    assert memory.parameters_bytes[0] == memory.gradients_bytes[0] == memory.optimizer_state_bytes[0] == 0
    assert memory.unsharded_parameters_bytes[0] > 0


def test_a_joined_loss_has_no_float32_logits() -> None:
    layout = Layout(dp_shard=8, activation_checkpoint="full")
    eager = _footprint(_setup("llama3-8b"), layout)
    joined = _footprint(_setup("llama3-8b", OURS.replace(joins_loss=True)), layout)
    logits = 4096 * PRESETS["llama3-8b"].vocab_size
    assert eager.logits_bytes[0] == 14 * logits
    assert joined.logits_bytes[0] in (0, 4 * logits)
    assert joined.device_bytes[0] < eager.device_bytes[0]


def test_gathered_keys_of_other_ranks_are_kept_where_a_ring_keeps_its_own() -> None:
    gathered, ring = (Layout(cp=4, microbatch_size=64, cp_method=method) for method in ("all-gather", "ring"))
    setup = _setup("llama3-8b", global_batch_size=64)
    memory = _footprint(setup, gathered, ring)
    tokens, blocks = 64 * 4096 / 4, setup.model.groups[1].count
    keys, mask = 3 * 2 * 8 * 128 * 2, 4096 / 64
    assert memory.activations_bytes[0] - memory.activations_bytes[1] == blocks * tokens * (keys + mask)
    fused = _footprint(_setup("llama3-8b", MEGATRON), gathered, ring)
    assert fused.device_bytes[0] == fused.device_bytes[1]


def test_low_precision_parameters_are_gathered_in_a_byte() -> None:
    stacks = (OURS, OURS.replace(low_precision_gather=True))
    layout = Layout(dp_shard=8, activation_checkpoint="full", reshard_after_forward="never")
    plain, low = (
        _footprint(_setup("llama3-8b", stack, precision="float8-rowwise"), layout).unsharded_parameters_bytes[0]
        for stack in stacks
    )
    blocks = _setup("llama3-8b").model.groups[1]
    assert plain - low == blocks.count * blocks.num_parameters


def test_a_compiled_block_keeps_its_networks_weights_transposed_where_they_arrive_in_float8() -> None:
    policies = ("none", "selective", "full")
    layouts = layout_table([Layout(compile=True), Layout(compile=False)])
    plain, by_row = (
        model_memory(_setup("llama3-8b", load_stack("meshwright"), precision=f"float8-{recipe}"), layouts).blocks[0]
        for recipe in ("tensorwise", "rowwise")
    )
    more = dict(zip(policies, (plain.kept_bytes - by_row.kept_bytes).tolist(), strict=True))
    assert more == {"none": [3 * 4096 * 14336, 0], "selective": [0, 0], "full": [0, 0]}


def test_parts_add_up_to_the_noun() -> None:
    memory = _footprint(_setup("llama3-8b"), Layout(dp_shard=8), Layout(tp=8))
    use = memory_use(memory, 1)
    assert isinstance(use, MemoryUse)
    assert use.device_bytes == pytest.approx(memory.device_bytes[1], abs=10)
    assert use.reserved_bytes == pytest.approx(memory.reserved_bytes[1], abs=10)
    assert use.allocated_bytes == pytest.approx(memory.allocated_bytes[1], abs=10)
    assert memory.smi_bytes[1] == memory.device_bytes[1] + SMI_BYTES
    assert len(memory.take(np.array([True, False]))) == 1


def test_what_other_streams_hold_is_reserved_besides() -> None:
    """The gathers of FSDP2 have a stream of their own, and so have its reductions: neither serves the loss."""
    setup = _setup("llama3-8b")
    sharded = Layout(dp_shard=8, activation_checkpoint="full", gradient_sync="step")
    memory, alone = _footprint(setup, sharded), _footprint(setup, sharded.replace(tp=8, dp_shard=1))
    first, block, last = setup.model.groups
    gathered = 2 * (first.num_parameters + block.num_parameters + last.num_parameters)
    # The block that is gathered ahead is allocated at the peak already.
    beside = gathered - 2 * block.num_parameters + memory.parameters_bytes
    assert beside < memory.fragmentation_bytes < beside + 0.1 * memory.allocated_bytes
    # One rank has nothing to gather, and divides the gradients of embedding and head into another tensor.
    divided = 4 * (first.num_parameters + last.num_parameters) / 8
    assert alone.fragmentation_bytes < alone.parameters_bytes + divided + 0.1 * alone.allocated_bytes


def test_fixed_segments_leave_wider_gaps() -> None:
    grows, is_fixed = (
        _footprint(_setup("llama3-8b", OURS.replace(expandable_segments=flag)), Layout(dp_shard=8))
        for flag in (True, False)
    )
    assert grows.allocated_bytes == is_fixed.allocated_bytes
    assert grows.reserved_bytes < is_fixed.reserved_bytes


def test_ends_that_are_units_of_their_own_are_gathered_for_their_turn_only() -> None:
    stack = OURS.replace(shards_ends_apart=True)
    layout = Layout(dp_shard=8, activation_checkpoint="full")
    joined, apart = (_footprint(_setup("llama3-8b", one), layout) for one in (OURS, stack))
    first = _setup("llama3-8b").model.groups[0]
    assert joined.unsharded_parameters_bytes - apart.unsharded_parameters_bytes == pytest.approx(
        2 * first.num_parameters
    )
    assert joined.fragmentation_bytes - apart.fragmentation_bytes > 2 * first.num_parameters


def test_setups_are_priced_each_with_its_own_model() -> None:
    small, large = _setup("llama3-8b"), _setup("llama3-70b", MEGATRON)
    table = layout_table([Layout(dp_shard=8)] * 3)
    together = footprint(Configurations((small, large), np.array([0, 1, 0]), table))
    alone = [footprint(Configurations.of_one(setup, table.take(np.array([0])))) for setup in (small, large)]
    expected = [alone[index].device_bytes[0] for index in (0, 1, 0)]
    assert together.device_bytes.tolist() == expected


@pytest.mark.parametrize(("layout", "expected"), [(Layout(dp_shard=8), True), (Layout(), False)])
def test_fits_when_context_and_communication_have_room(layout: Layout, expected: bool) -> None:
    setup = _setup("llama3-8b", OURS, global_batch_size=8)
    configs = Configurations.of_one(setup, layout_table([layout]))
    assert fits(footprint(configs), configs).tolist() == [expected]


def test_twice_a_microbatch_that_fills_the_device_does_not_fit() -> None:
    setup = _setup("llama3-8b", OURS.replace(joins_loss=True), global_batch_size=64)
    layouts = [Layout(dp_shard=64, microbatch_size=size, compile=True) for size in (1, 2, 4)]
    configs = Configurations.of_one(setup, layout_table(layouts))
    assert fits(footprint(configs), configs).tolist() == [True, True, False]


_LAYOUTS = st.builds(
    Layout,
    pp=st.sampled_from([1, 2, 4, 8]),
    dp_shard=st.sampled_from([1, 8, 64]),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    microbatch_size=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]),
    activation_checkpoint=st.sampled_from(["none", "selective", "full"]),
    activation_checkpoint_every=st.sampled_from([1, 2]),
    reshard_after_forward=st.sampled_from(["auto", "always", "never"]),
    compile=st.booleans(),
)
_SETTINGS = st.sampled_from(
    [
        _setup("llama3-8b"),
        _setup("llama3-70b", MEGATRON),
        _setup("deepseek-v3"),
        _setup("deepseek-v3", MEGATRON),
    ]
)
_OURS = st.sampled_from([_setup(name, load_stack("meshwright")) for name in ("llama3-8b", "deepseek-v3")])


@pytest.mark.slow
@given(_SETTINGS, _LAYOUTS)
def test_everything_is_finite_and_not_negative(setup: TrainingSetup, layout: Layout) -> None:
    memory = _footprint(setup, layout)
    values = np.array([getattr(memory, name) for name in MemoryUse.model_fields])
    assert np.isfinite(values).all()
    assert (values >= 0).all()


@pytest.mark.slow
@given(_SETTINGS, _LAYOUTS)
def test_a_larger_microbatch_needs_no_less(setup: TrainingSetup, layout: Layout) -> None:
    # As many of them, so that as many are in flight.
    larger = setup.workload.replace(global_batch_size=2 * setup.workload.global_batch_size)
    once = _footprint(setup, layout)
    twice = _footprint(
        TrainingSetup(setup.model, larger, setup.cluster, setup.stack),
        layout.replace(microbatch_size=2 * layout.microbatch_size),
    )
    # Recomputation of short sequences peaks where whole gradients are reduced, which no microbatch changes.
    assert twice.device_bytes[0] >= once.device_bytes[0]


@given(_SETTINGS, _LAYOUTS)
def test_more_tensor_parallelism_needs_less(setup: TrainingSetup, layout: Layout) -> None:
    one, four = _footprint(setup, layout.replace(tp=1), layout.replace(tp=4)).device_bytes
    assert four < one


@pytest.mark.slow
@given(_SETTINGS | _OURS, _LAYOUTS)
def test_more_recomputation_never_needs_more(setup: TrainingSetup, layout: Layout) -> None:
    layouts = [layout.replace(activation_checkpoint=policy) for policy in ("none", "selective", "full")]
    none, selective, full = _footprint(setup, *layouts).device_bytes
    assert full <= selective * (1 + 1e-9)
    assert selective <= none * (1 + 1e-9)


def test_equal_stages_recompute_equally_many_blocks() -> None:
    """16 stages of two blocks, of which 1F1B holds the activations of one microbatch less on each later rank."""
    layouts = [
        Layout(pp=16, activation_checkpoint="full", activation_checkpoint_every=every, compile=True)
        for every in (1, 2, 4)
    ]
    configs = Configurations.of_one(_setup("llama3-8b"), layout_table(layouts))
    kept = [footprint_of_rank(configs, rank).activations_bytes for rank in (3, 4, 5)]
    assert kept[0][1] == kept[0][2] > kept[0][0]
    assert kept[0] - kept[1] == pytest.approx(kept[1] - kept[2])


@pytest.mark.slow
@given(_SETTINGS, _LAYOUTS)
def test_fewer_blocks_under_recomputation_need_more(setup: TrainingSetup, layout: Layout) -> None:
    each, some = (layout.replace(activation_checkpoint="full", activation_checkpoint_every=every) for every in (1, 4))
    one, other = _footprint(setup, each, some).device_bytes
    assert one <= other * (1 + 1e-9)


def test_a_table_is_priced_row_by_row_alike() -> None:
    layouts = [
        Layout(pp=pp, tp=tp, dp_shard=8, microbatch_size=size, activation_checkpoint=policy)
        for pp in (1, 4)
        for tp in (1, 2)
        for size in (1, 2)
        for policy in ("none", "selective", "full")
    ]
    setup = _setup("llama3-8b")
    table: LayoutTable = layout_table(layouts)
    together = footprint(Configurations.of_one(setup, table)).device_bytes
    alone = [_footprint(setup, layout).device_bytes[0] for layout in layouts]
    assert together.tolist() == alone


def test_a_host_has_no_workspace_and_nothing_reserved_besides() -> None:
    layout = layout_table([Layout(dp_shard=2, microbatch_size=2)])
    use = memory_use(footprint(Configurations.of_one(_setup("llama-1m"), layout)), 0)
    of_host = _setup("llama-1m")
    of_host = replace(of_host, cluster=of_host.cluster.replace(device=of_host.cluster.device.replace(is_host=True)))
    host = memory_use(footprint(Configurations.of_one(of_host, layout)), 0)
    assert host.fragmentation_bytes == 0 < use.fragmentation_bytes
    assert use.workspace_bytes - host.workspace_bytes == 2 * WORKSPACE_BYTES


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS"])
@pytest.mark.parametrize("tp", [1, 2])
def test_losses_of_all_microbatches_wait_where_all_forwards_come_first(schedule: str, tp: int) -> None:
    """Of each more of them a float32 number for each logit stays, next to what the stage keeps."""
    stages = 2 if schedule == "LoopedBFS" else 1
    layout = Layout(pp=4, tp=tp, schedule=schedule, virtual_stages=stages, activation_checkpoint="full")
    few, many = (_setup("llama3-8b", load_stack("meshwright"), global_batch_size=number) for number in (8, 16))
    held = [_last_rank(setup, layout).allocated_bytes[0] for setup in (few, many)]
    logits = 4096 * PRESETS["llama3-8b"].vocab_size / tp
    more = (held[1] - held[0]) / 8
    kept = 4096 * 4096 * 2 * (32 / 4 + 2)
    assert 4 * logits < more < 4 * logits + kept
    takes_turns = [_last_rank(setup, layout.replace(schedule="1F1B", virtual_stages=1)) for setup in (few, many)]
    assert takes_turns[0].allocated_bytes[0] == takes_turns[1].allocated_bytes[0]


def test_shards_that_the_host_keeps_pass_through_the_device() -> None:
    """They are copied, cast and gathered on one stream, and shards of gradients are made on another."""
    setup = _setup("llama3-8b", load_stack("meshwright"), global_batch_size=16)
    memory = _footprint(setup, Layout(dp_shard=8, cpu_offload=True, activation_checkpoint="full"))
    preset = PRESETS["llama3-8b"]
    ends = 2 * preset.vocab_size * 4096
    gathered, copied, reduced = 2 * ends, (4 + 2) * ends / 8, 4 * ends / 8
    logits = 2 * 4096 * preset.vocab_size
    least = gathered + copied + reduced + logits
    assert least < memory.fragmentation_bytes[0] < least + 0.05 * memory.allocated_bytes[0]


def _last_rank(setup: TrainingSetup, layout: Layout) -> Footprint:
    return footprint_of_rank(Configurations.of_one(setup, layout_table([layout])), layout.pp - 1)


def test_gaps_that_are_given_back_are_no_need_and_at_most_the_room_of_the_device() -> None:
    own = load_stack("meshwright").replace(kernels="compiled", joins_loss=True)
    layout = Layout(dp_shard=64, microbatch_size=8, activation_offload=True, compile=True, compile_loss=True)
    setup = _setup("llama3-8b", own)
    memory = _footprint(setup, layout, layout.replace(activation_offload=False))
    # The block before the last, whose activations are on the host by then, leaves them, and the parameters of one.
    assert memory.cached_bytes[0] > 2 * setup.model.groups[1].num_parameters
    assert memory.cached_bytes[1] == 0
    assert memory.needed_bytes + memory.cached_bytes == pytest.approx(memory.reserved_bytes)
    device = CLUSTER.device
    small = device.memory_bytes.replace(value=memory.device_bytes[0] + 2**20)
    tight = replace(setup, cluster=CLUSTER.replace(device=device.replace(memory_bytes=small)))
    assert _footprint(tight, layout).cached_bytes[0] == pytest.approx(2**20)
    fixed = _footprint(replace(setup, stack=own.replace(expandable_segments=False)), layout)
    assert fixed.cached_bytes[0] == 0
