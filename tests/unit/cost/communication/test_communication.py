"""Parallelism that is not there costs nothing, and what is overlapped or hidden costs less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_configs import MODELS, SEQ_LEN, changed, configs, layouts, training_setup
from meshwright.cost.blocks.block_positions import block_positions
from meshwright.cost.blocks.block_table import BLOCK, FIRST
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.communication import Communication
from meshwright.cost.communication.fabric import FabricConstants, fabric_of
from meshwright.cost.constants import fitted_constants
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS

FUSED = "megatron-core-2024"


def steps(of: TrainingSetup, *several: Layout) -> StepTerms:
    return step_times(configs(of, *several))


@pytest.mark.slow
@given(st.sampled_from(MODELS).flatmap(lambda model: st.tuples(st.just(model), layouts(model))))
def test_an_axis_of_one_rank_costs_exactly_nothing(case: tuple[str, Layout]) -> None:
    model, layout = case
    step = steps(training_setup(model), layout)
    seconds = {
        "tp": step.tp_communication_s[0],
        "cp": step.cp_communication_s[0],
        "ep": step.ep_communication_s[0],
        "pp": step.pipeline_p2p_s[0],
    }
    for axis, value in seconds.items():
        assert (value > 0) == (getattr(layout, axis) > 1), axis
    assert (step.dp_communication_s[0] > 0) == (layout.dp * layout.cp > 1)


def test_one_rank_communicates_nothing() -> None:
    step = steps(training_setup(), Layout())
    of_axes = [getattr(step, f"{axis}_communication_s") for axis in ("tp", "cp", "ep", "dp")]
    assert [float(seconds[0]) for seconds in (*of_axes, step.pipeline_p2p_s)] == [0] * 5
    assert step.pipeline_bubble_s == pytest.approx(0, abs=1e-9)


def test_a_ring_hides_behind_the_attention_of_long_sequences() -> None:
    shares = []
    for seq_len in (4096, 65_536, 524_288):
        of = training_setup(stack=FUSED, seq_len=seq_len, global_batch_size=16)
        step = steps(of, *(Layout(dp_shard=8, cp=8, cp_method=method) for method in ("ring", "all-gather")))
        shares.append(step.cp_communication_s / step.total_s)
    ring, gather = np.array(shares).T
    # Keys grow with the sequence, attention with its square.
    assert ring[0] > ring[1] > ring[2]
    assert ring[2] < 0.3 * gather[2]


def test_swapping_heads_moves_less_than_gathering_all_keys() -> None:
    # As many key heads as query heads: each rank gathers cp x 2 of what it holds, or swaps 4 of it once.
    of = training_setup("deepseek-v3", seq_len=65_536, global_batch_size=64)
    swap, gather = steps(
        of, *(Layout(dp_shard=8, cp=8, cp_method=method) for method in ("ulysses", "all-gather"))
    ).cp_communication_s
    assert 0 < swap < gather


def test_gathering_few_keys_moves_less_than_swapping_all_heads() -> None:
    of = training_setup("llama3-405b", seq_len=8192, global_batch_size=64)
    two_each = (Layout(dp_shard=8, tp=4, cp=2, cp_method=method) for method in ("ulysses", "all-gather"))
    swap, gather = steps(of, *two_each).cp_communication_s
    assert 0 < gather < swap


def test_heads_that_are_swapped_are_as_wide_as_the_model_has_them() -> None:
    # Qwen3's heads are twice as wide in all as its residual stream.
    wide = training_setup("qwen3-0.6b", seq_len=65_536)
    narrow = replace(wide, model=model_spec(PRESETS["qwen3-0.6b"].replace(head_dim=64)))
    layout = Layout(dp_shard=8, cp=8, cp_method="ulysses")
    assert steps(wide, layout).cp_communication_s > 1.7 * steps(narrow, layout).cp_communication_s


def test_recomputed_blocks_communicate_again() -> None:
    layout = Layout(dp_shard=4, tp=4, cp=2, ep=4)
    plain, full = layout, layout.replace(activation_checkpoint="full")
    step = steps(training_setup("mixtral-8x7b"), plain, full)
    for term in ("tp_communication_s", "cp_communication_s", "ep_communication_s"):
        assert getattr(step, term)[1] > 1.2 * getattr(step, term)[0], term


@pytest.mark.parametrize(
    ("field", "term", "layout"),
    [
        ("tp_overlap", "tp_communication_s", Layout(dp_shard=8, tp=8)),
        ("ep_overlap", "ep_communication_s", Layout(dp_shard=64, ep=8)),
    ],
)
def test_what_overlaps_is_exposed_in_part(field: str, term: str, layout: Layout) -> None:
    of = training_setup("mixtral-8x7b")
    plain, overlapped = (
        float(getattr(steps(changed(of, **{field: is_on}), layout), term)[0]) for is_on in (False, True)
    )
    assert 0 < overlapped < plain


def test_async_tp_is_a_layouts_way_to_overlap() -> None:
    layout = Layout(dp_shard=8, tp=8)
    plain, overlapped = steps(training_setup(), layout, layout.replace(async_tp=True)).tp_communication_s
    assert 0 < overlapped < plain
    assert overlapped == steps(changed(training_setup(), tp_overlap=True), layout).tp_communication_s


def test_sends_that_overlap_are_exposed_in_part() -> None:
    layout = Layout(pp=8, dp_shard=8)
    plain, overlapped = (
        steps(changed(training_setup(stack=FUSED), p2p_overlap=is_on), layout).pipeline_p2p_s for is_on in (False, True)
    )
    assert 0 < overlapped < plain


def test_virtual_stages_send_more_often() -> None:
    layouts = (
        Layout(pp=8, dp_shard=8, schedule="Interleaved1F1B", virtual_stages=2),
        Layout(pp=8, dp_shard=8, schedule="Interleaved1F1B", virtual_stages=4),
    )
    two, four = steps(training_setup(), *layouts).pipeline_p2p_s
    assert 1.5 < four / two < 2.1


def test_tensor_parallel_ranks_share_what_is_sent() -> None:
    of = training_setup("llama3-70b", seq_len=32_768)
    alone, shared = steps(of, Layout(pp=8, dp_shard=8), Layout(pp=8, dp_shard=8, tp=8)).pipeline_p2p_s
    assert shared < alone


def test_tp_that_leaves_its_domain_waits_for_the_network() -> None:
    of = training_setup("llama3-405b", "a100-80gb-ib100", global_batch_size=64)
    inside, across = steps(of, Layout(dp_shard=8, tp=8), Layout(dp_shard=8, tp=16)).tp_communication_s
    assert across > 2 * inside


def test_without_sequence_parallelism_tp_reduces_as_much_as_it_gathered_and_scattered() -> None:
    # An all-reduce is a scatter and a gather.
    layout = Layout(dp_shard=8, tp=8)
    with_s, without_s = (steps(changed(training_setup(), sequence_parallel=is_on), layout) for is_on in (True, False))
    assert with_s.tp_communication_s == pytest.approx(without_s.tp_communication_s, rel=1e-3)
    # Norms and residuals are then done by every rank.
    assert without_s.memory_bound_ops_s > with_s.memory_bound_ops_s


def communication(of: TrainingSetup, layout: Layout, axis: str, kind: int = BLOCK) -> tuple[float, float]:
    """Return an axis's seconds of a block, or of what else `kind` says, forward and backward, where nothing hides."""
    case = configs(of, layout)
    work, c = work_of(case), {**fitted_constants(), "cp_exposed": 1.0}
    row = np.array([next(position.row[0] for position in block_positions(work) if position.kind == kind)])
    priced, zero = Communication(case, work), np.zeros(1)
    fabric = fabric_of(of.cluster, FabricConstants())
    arguments = {"context": (zero, zero), "tensor": (zero,)}.get(axis, ())
    forward, backward = getattr(priced, axis)(row, fabric, c, *arguments)
    return float(forward[0]), float(backward[0])


def test_a_stack_that_keeps_its_part_of_what_it_gathered_gathers_again() -> None:
    layout = Layout(dp_shard=2, tp=4, cp=8)
    of = {name: training_setup(stack=name) for name in ("meshwright", "torchtitan-2025", FUSED)}
    ratios = {
        axis: [backward / forward for forward, backward in (communication(one, layout, axis) for one in of.values())]
        for axis in ("tensor", "context")
    }
    assert ratios["tensor"] == pytest.approx([1.25, 1, 1.25])
    assert ratios["context"] == pytest.approx([1, 1, 2])


def test_a_recomputed_block_gathers_once_more_and_not_twice() -> None:
    of = training_setup(stack="meshwright")
    forward, backward = communication(of, Layout(tp=8, activation_checkpoint="full"), "tensor")
    assert backward == forward
    half = Layout(tp=8, activation_checkpoint="full", activation_checkpoint_every=2)
    assert communication(of, half, "tensor") == pytest.approx((forward, 1.125 * forward))


def test_who_gathers_again_keeps_less() -> None:
    # The input of each of a block's two pairs of matmuls: whole, or this rank's eighth.
    ours = training_setup(stack="meshwright")
    whole, part = (
        footprint(configs(one, Layout(dp_shard=8, tp=8, microbatch_size=8)))
        for one in (changed(ours, gathers_input_again=False), ours)
    )
    inputs = 2 * 32 * 8 * SEQ_LEN * 4096 * 2
    assert whole.activations_bytes - part.activations_bytes >= inputs * 7 / 8


def test_gradients_go_round_a_ring_in_float32_and_come_home() -> None:
    layout = Layout(dp_shard=8, cp=8, cp_method="ring")
    of = training_setup("llama3-405b", seq_len=2**20, stack="meshwright")
    forward, backward = communication(of, layout, "context")
    # 7 times on for keys, 8 times, and twice the bytes, for their gradients.
    assert backward / forward == pytest.approx(1 + 2 * 8 / 7, rel=0.02)
    assert communication(changed(of, kernels="fused"), layout, "context") == pytest.approx((forward, 2 * forward))


def test_ulysses_repeats_heads_until_ranks_get_equally_many() -> None:
    # 8 heads of keys over 64 ranks are sent as 64.
    of = training_setup("llama3-405b", seq_len=131_072, stack="meshwright")
    few, many = (communication(of, Layout(cp=cp, cp_method="ulysses"), "context")[0] for cp in (8, 64))
    queries, keys = 2 * 128, 2 * 8
    assert few / many < (queries + keys) / 8 / ((queries + 64) / 64)


def test_an_embedding_scatters_and_gathers_once() -> None:
    layout = Layout(dp_shard=2, tp=4)
    for stack in ("meshwright", FUSED):
        of = changed(training_setup(stack=stack), tp_overlap=False)
        forward, backward = communication(of, layout, "tensor", FIRST)
        assert forward == backward == pytest.approx(communication(of, layout, "tensor")[0] / 4)
        assert communication(changed(of, tp_overlap=True), layout, "tensor", FIRST) == (forward, backward)


def test_split_experts_get_tokens_before_routing_or_their_copies_after() -> None:
    layout = Layout(dp_shard=4, tp=4, ep=4, etp=4)
    stacks = [changed(training_setup("mixtral-8x7b", stack=name), tp_overlap=False) for name in ("meshwright", FUSED)]
    ours, theirs = (communication(of, layout, "expert")[0] for of in stacks)
    assert ours > 2 * theirs
    ours, theirs = (communication(of, layout, "tensor")[0] for of in stacks)
    # A pair for attention and one for the mixture, or one for each of two copies.
    assert theirs / ours == pytest.approx(3 / 2)


def test_tokens_sent_once_for_each_node_take_less_time_than_for_each_expert() -> None:
    layout, of = Layout(dp_shard=64, ep=64), training_setup("deepseek-v3")
    each, once = (steps(changed(of, dispatcher=name), layout).ep_communication_s for name in ("alltoall", "fused"))
    assert 0 < once < each


def test_more_experts_a_token_more_to_exchange() -> None:
    layout = Layout(dp_shard=64, ep=8)
    two, eight = (steps(training_setup(model), layout) for model in ("mixtral-8x7b", "qwen3-30b-a3b"))
    per_byte = [
        float(step.ep_communication_s[0]) / (blocks * dim) for step, blocks, dim in ((two, 32, 4096), (eight, 48, 2048))
    ]
    assert per_byte[1] > 2 * per_byte[0]


def test_compiled_blocks_of_ours_hide_what_their_matmuls_can() -> None:
    of = training_setup("llama3-405b", stack="meshwright")
    plain, compiled, joined = (
        steps(of, Layout(dp_shard=8, tp=8, compile=is_compiled, async_tp=is_joined)).tp_communication_s[0]
        for is_compiled, is_joined in ((False, False), (True, False), (True, True))
    )
    # Of ten collectives of a block without async tp the four of forward stay exposed, and the first of backward.
    assert 0.4 < compiled / plain < 0.7
    # With it matmuls of this size hide nearly all, and are slowed down.
    assert 0.1 < joined / plain < 0.25
