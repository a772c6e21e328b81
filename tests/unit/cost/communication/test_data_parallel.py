"""What sharding costs: nothing on one rank, never less than nothing, and what the network is spared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_configs import MODELS, changed, configs, layouts, training_setup
from meshwright.cost.blocks.block_table import LAST
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fsdp_copies import fsdp_copies_s
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.layout import Layout

SHARDINGS = ("parameters", "optimizer", "none")


def dp_s(of: TrainingSetup, *several: Layout) -> list[float]:
    return [float(seconds) for seconds in step_times(configs(of, *several)).dp_communication_s]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_data_parallel_rank_exchanges_nothing(sharding: str) -> None:
    of = changed(training_setup(), sharding=sharding)
    assert dp_s(of, Layout(), Layout(tp=8), Layout(pp=4, tp=2)) == [0, 0, 0]


@pytest.mark.slow
@given(
    st.sampled_from(MODELS).flatmap(lambda model: st.tuples(st.just(model), layouts(model))),
    st.sampled_from(SHARDINGS),
    st.booleans(),
)
def test_no_exchange_takes_less_than_nothing(case: tuple[str, Layout], sharding: str, is_overlapped: bool) -> None:
    model, layout = case
    (seconds,) = dp_s(changed(training_setup(model), sharding=sharding, dp_overlap=is_overlapped), layout)
    assert np.isfinite(seconds)
    assert seconds >= 0


def test_replicas_of_shards_within_nodes_spare_the_network() -> None:
    # A ring over all ranks has a step for each node, and gathers cross the network for every microbatch.
    many = training_setup("llama3-8b", seq_len=512, global_batch_size=2048)
    often = training_setup("llama3-70b", "a100-80gb-ib100", seq_len=512, global_batch_size=1024)
    for of, fsdp, hsdp in (
        (many, Layout(dp_shard=2048), Layout(dp_replicate=256, dp_shard=8)),
        (often, Layout(dp_shard=64), Layout(dp_replicate=8, dp_shard=8)),
    ):
        fsdp_s, hsdp_s = dp_s(of, fsdp, hsdp)
        assert 0 < hsdp_s < 0.5 * fsdp_s


def test_groups_that_keep_a_copy_gather_again_within_their_node() -> None:
    slow = training_setup("llama3-8b", "a100-80gb-ib100", seq_len=1024, global_batch_size=64)
    sharded = Layout(dp_shard=16)
    kept = [sharded.replace(reshard_after_forward=size) for size in (2, 8)]
    never, pair, node, always = dp_s(slow, sharded.replace(reshard_after_forward="never"), *kept, sharded)
    assert never < pair <= node < 0.8 * always


def test_a_group_that_spans_nodes_spares_little() -> None:
    slow = training_setup("llama3-8b", "a100-80gb-ib100", seq_len=1024, global_batch_size=64)
    kept = [Layout(dp_shard=32, reshard_after_forward=size) for size in (8, 16)]
    inside, across, all_ranks = dp_s(slow, *kept, Layout(dp_shard=32))
    assert inside < 0.8 * across
    assert across == pytest.approx(all_ranks, rel=0.1)


def test_without_prefetch_nothing_hides_what_backward_exchanges() -> None:
    long = training_setup(seq_len=8192, global_batch_size=64)
    ahead, further = Layout(dp_shard=64), Layout(dp_shard=64, prefetch=2)
    alone = ahead.replace(prefetch=0)
    usual, same, longest = dp_s(long, ahead, further, alone)
    assert longest > 2 * usual
    assert same == usual
    # What is kept after forward, or by a group, does not wait for the reduction before it.
    for kept in ("never", 8):
        layouts = [layout.replace(reshard_after_forward=kept) for layout in (ahead, alone)]
        assert dp_s(long, *layouts[:1]) == dp_s(long, *layouts[1:])


def test_gathering_hides_behind_long_blocks_only() -> None:
    short, long = (training_setup(seq_len=seq_len, global_batch_size=64) for seq_len in (512, 8192))
    shares = [
        float(step.dp_communication_s[0] / step.total_s[0])
        for step in (step_times(configs(of, Layout(dp_shard=64))) for of in (short, long))
    ]
    assert shares[0] > 0.3
    assert shares[1] < 0.15


def test_freed_parameters_are_gathered_again() -> None:
    of = training_setup("llama3-70b", seq_len=512, global_batch_size=64)
    layout = Layout(dp_shard=64)
    freed, kept = dp_s(of, layout, layout.replace(reshard_after_forward="never"))
    assert freed > kept > 0


def test_a_pipeline_that_frees_parameters_gathers_them_for_every_microbatch() -> None:
    once, of = (training_setup("llama3-70b", seq_len=512, global_batch_size=16 * number) for number in (1, 32))
    layout = Layout(pp=4, dp_shard=16)
    freed, kept = dp_s(of, layout.replace(reshard_after_forward="always"), layout)
    # 32 microbatches, each with a gather forward and one backward, instead of one gather for all.
    assert freed - kept > 12 * dp_s(once, layout)[0]


SYNCED = [Layout(dp_shard=64, gradient_sync=name) for name in ("step", "microbatch")]


def test_gradients_that_add_up_are_reduced_once_a_step() -> None:
    once, each = dp_s(training_setup("llama3-70b", seq_len=512, global_batch_size=64 * 16), *SYNCED)
    assert once < 0.8 * each
    once, each = dp_s(training_setup("llama3-70b", seq_len=512, global_batch_size=64), *SYNCED)
    assert once == each


def test_a_backward_longer_than_its_reductions_hides_them() -> None:
    (once_short, each_short), (once, each) = (
        dp_s(training_setup("llama3-70b", seq_len=seq_len, global_batch_size=64 * 16), *SYNCED)
        for seq_len in (512, 8192)
    )
    assert 0 < each - once < 0.25 * (each_short - once_short)


def test_adding_to_whole_gradients_takes_longer_than_copying_into_reductions() -> None:
    plain = training_setup("llama3-70b", seq_len=8192, global_batch_size=64 * 16)
    by_hand = step_times(configs(changed(plain, fuses_gradient_sum=False), *SYNCED)).memory_bound_ops_s
    fused = step_times(configs(plain, *SYNCED)).memory_bound_ops_s
    assert by_hand[0] - fused[0] > by_hand[1] - fused[1] > 0


def test_what_fsdp_computes_on_one_data_parallel_rank_is_no_communication() -> None:
    plain = training_setup("llama3-8b", seq_len=8192, global_batch_size=16)
    sharded, unsharded = (
        step_times(configs(changed(plain, sharding=name), Layout(tp=8))) for name in ("parameters", "none")
    )
    assert sharded.dp_communication_s.tolist() == [0.0]
    assert sharded.memory_bound_ops_s[0] > unsharded.memory_bound_ops_s[0]


def test_replicas_are_summed_once_a_step() -> None:
    of = training_setup("llama3-70b", "h100-tcpx", seq_len=512, global_batch_size=64 * 16)
    (shared, replicated), (shared_once, replicated_once) = (
        dp_s(
            of,
            *(
                layout.replace(gradient_sync=name)
                for layout in (Layout(dp_shard=64), Layout(dp_replicate=8, dp_shard=8))
            ),
        )
        for name in ("microbatch", "step")
    )
    assert replicated - replicated_once < 0.3 * (shared - shared_once)


def test_nothing_hides_reductions_after_a_backward_in_two_parts() -> None:
    of = training_setup("llama3-70b", seq_len=8192, global_batch_size=16 * 32)
    layout = Layout(pp=4, dp_shard=16, schedule="ZBVZeroBubble")
    once, each = dp_s(of, layout, layout.replace(gradient_sync="microbatch"))
    inside = dp_s(of, *(Layout(pp=4, dp_shard=16, gradient_sync=name) for name in ("step", "microbatch")))
    assert each - once > 3 * (inside[1] - inside[0])


def test_after_a_backward_in_two_parts_the_last_block_of_a_stage_is_reduced_behind_the_next_computation() -> None:
    # 80 blocks on 8 stages, and on 80: as many reductions of as many bytes, of which a tenth and all are the last.
    of = training_setup("llama3-70b", seq_len=8192, global_batch_size=16 * 32)
    few, many = (
        Layout(pp=4, dp_shard=16, schedule="InterleavedZeroBubble", virtual_stages=stages) for stages in (2, 20)
    )
    extra = [
        each - once for once, each in (dp_s(of, one, one.replace(gradient_sync="microbatch")) for one in (few, many))
    ]
    assert 0 < extra[1] < 0.5 * extra[0]


def test_gradients_in_float32_take_longer() -> None:
    of = training_setup("llama3-70b", seq_len=512, global_batch_size=64)
    narrow = training_setup("llama3-70b", seq_len=512, global_batch_size=64, gradient_dtype="bfloat16")
    for sharding in SHARDINGS:
        wide_s, narrow_s = (dp_s(changed(one, sharding=sharding), Layout(dp_shard=64))[0] for one in (of, narrow))
        assert wide_s > narrow_s


@pytest.mark.parametrize("sharding", ["optimizer", "none"])
def test_gradients_that_wait_for_the_backward_are_exposed_in_full(sharding: str) -> None:
    of = changed(training_setup(), sharding=sharding)
    hidden, exposed = (dp_s(changed(of, dp_overlap=is_on), Layout(dp_shard=64))[0] for is_on in (True, False))
    assert 0 < hidden < exposed


def test_an_optimizer_whose_state_is_shared_updates_less() -> None:
    update_s = [
        step_times(configs(changed(training_setup(), sharding=name), Layout(dp_shard=64))).optimizer_s
        for name in SHARDINGS
    ]
    assert update_s[0] == update_s[1]
    assert update_s[2] == pytest.approx(64 * update_s[1])


def test_a_slower_network_shows_between_nodes_only() -> None:
    fast, slow = (
        training_setup("llama3-70b", name, seq_len=512, global_batch_size=64) for name in ("h100-ib400", "h100-tcpx")
    )
    across, within = Layout(dp_shard=64), Layout(dp_shard=8)
    (fast_across, fast_within), (slow_across, slow_within) = (dp_s(of, across, within) for of in (fast, slow))
    assert slow_across > 1.3 * fast_across
    assert slow_within == pytest.approx(fast_within, rel=0.05)


@pytest.mark.parametrize(("stack", "is_own"), [("meshwright", True), ("generic", False)])
def test_the_last_stage_of_our_pipelines_has_a_copy_of_a_tied_head(stack: str, is_own: bool) -> None:
    of = training_setup("qwen3-0.6b", stack=stack, global_batch_size=64)
    layouts_of = configs(of, Layout(dp_shard=4), Layout(dp_shard=4, pp=2))
    work = work_of(layouts_of)
    head = np.full(2, np.flatnonzero(work.blocks.kind == LAST)[0])
    parallel = DataParallel(layouts_of, work)
    alone, in_pipeline = fsdp_copies_s(parallel, head, np.array(1e12), is_block=False)[1]
    assert (in_pipeline > 100 * alone) == is_own
    assert (parallel.dense_parameters[1] > 0.55 * parallel.dense_parameters[0]) == is_own
