"""The covering set meets every pair of axes, every schedule and every choice, in layouts that can run."""

from itertools import combinations
from typing import get_args

import pytest

from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection, TrainSection
from meshwright.spec.job.validity import layout_problems, split_problems
from meshwright.spec.layout.covering import COVERED_AXES, covering_layouts
from meshwright.spec.layout.layout import SCHEDULES, ActivationCheckpoint, ContextMethod, GradientSync, Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture
from meshwright.spec.model.presets import PRESETS

DENSE = PRESETS["llama-1m"]
EXPERTS = MoEArchitecture(**DENSE.to_dict(), num_experts=4, experts_per_token=2, expert_ffn_dim=32)
LATENT = EXPERTS.replace(
    num_kv_heads=4, head_dim=12, latent=LatentAttention(kv_rank=8, plain_head_dim=8, rope_head_dim=4, value_head_dim=8)
)


def meets(layout: Layout, *axes: str) -> bool:
    return all(getattr(layout, axis) > 1 for axis in axes)


@pytest.mark.parametrize("architecture", [EXPERTS, LATENT])
def test_every_pair_of_axes_meets(architecture: MoEArchitecture) -> None:
    layouts = covering_layouts(architecture)
    assert len(layouts) >= 40
    for pair in combinations(COVERED_AXES, 2):
        assert any(meets(layout, *pair) for layout in layouts), pair
    assert any(meets(layout, "dp_shard", "cp", "tp", "pp") and layout.ep == 1 for layout in layouts)
    assert {layout.etp for layout in layouts if meets(layout, "dp_shard", "cp", "tp", "pp", "ep")} == {1, 2}


@pytest.mark.parametrize("axis", COVERED_AXES)
def test_every_axis_meets_every_choice(axis: str) -> None:
    layouts = [layout for layout in covering_layouts(EXPERTS) if meets(layout, axis)]
    assert {layout.cp_method for layout in layouts if layout.cp > 1} == set(get_args(ContextMethod))
    assert {layout.activation_checkpoint for layout in layouts} == set(get_args(ActivationCheckpoint))
    assert {True, False} == {layout.compile for layout in layouts}
    num_schedules = len({layout.schedule for layout in layouts if layout.pp > 1})
    assert num_schedules == len(SCHEDULES) if axis == "pp" else num_schedules >= 3


def test_every_schedule_meets_gradients_that_are_reduced_for_each_microbatch() -> None:
    reduced = [layout for layout in covering_layouts(EXPERTS) if layout.pp > 1 and layout.reduces_each_microbatch]
    assert {layout.schedule for layout in reduced} == set(SCHEDULES)
    assert any(layout.dp_replicate > 1 for layout in reduced)
    assert any(layout.ep > 1 for layout in reduced)
    assert any(layout.reshard_after_forward == "always" for layout in reduced)


def test_every_option_stands_with_one_axis_alone() -> None:
    alone = [layout for layout in covering_layouts(EXPERTS) if sum(meets(layout, axis) for axis in COVERED_AXES) == 1]
    assert {axis for axis in COVERED_AXES for layout in alone if meets(layout, axis)} == {*COVERED_AXES} - {"ep"}
    assert {layout.schedule for layout in alone if layout.pp > 1} == set(SCHEDULES)
    assert {layout.cp_method for layout in alone} == set(get_args(ContextMethod))
    assert {layout.reshard_after_forward for layout in alone} >= {"auto", "always", "never", 2}
    assert {layout.gradient_sync for layout in alone} == set(get_args(GradientSync))
    assert any(layout.cpu_offload for layout in alone)
    assert any(layout.activation_checkpoint_every > 1 for layout in alone)
    assert any(layout.stage_boundaries for layout in alone)
    assert any(layout.etp > 1 for layout in alone)


@pytest.mark.parametrize("architecture", [DENSE, EXPERTS, LATENT])
def test_each_can_run_with_a_small_batch(architecture: LlamaArchitecture) -> None:
    layouts = covering_layouts(architecture)
    assert len(layouts) == len(set(layouts))
    for layout in layouts:
        num_microbatches, left = divmod(16, layout.dp * layout.microbatch_size)
        assert left == 0
        assert num_microbatches >= 2
        assert split_problems(layout, architecture, 96) == []
        assert schedule_problems(layout, num_microbatches) == []


def test_only_what_a_model_can_take_is_proposed() -> None:
    small = Job(model=ModelSection(source="llama-1m"), train=TrainSection(seq_len=96, global_batch_size=48))
    assert all(layout_problems(small, layout) == [] for layout in covering_layouts(DENSE))
    assert all(layout.ep == layout.etp == 1 for layout in covering_layouts(DENSE))
    three_heads = DENSE.replace(num_heads=3, num_kv_heads=3)
    assert all(layout.tp == 1 for layout in covering_layouts(three_heads))
    assert all(layout.num_ranks == layout.dp for layout in covering_layouts(None))


@pytest.mark.parametrize("max_ranks", [1, 2, 4, 8, 16])
def test_no_more_ranks_than_there_are(max_ranks: int) -> None:
    ranks = [layout.num_ranks for layout in covering_layouts(EXPERTS, max_ranks)]
    assert ranks == sorted(ranks)
    assert max(ranks, default=max_ranks) == max_ranks
