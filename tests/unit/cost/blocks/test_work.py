"""What a rank does: all FLOPs and parameters of the model, once, and those that torch counts in the real module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_configs import MODELS, SEQ_LEN, changed, configs, layouts, training_setup
from meshwright.cost.blocks.block_table import BLOCK, FIRST, LAST
from meshwright.cost.blocks.work import Work, work_of
from meshwright.cost.training_setup import Configurations
from meshwright.models.build import build_architecture
from meshwright.models.initial import initialize
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.presets import PRESETS
from torch_flops import counted_flops

STACKS = ("generic", "megatron-core-2024")  # Matmuls one by one, and joined.


def matmul_flops(work: Work, *, of_experts: bool | None = None) -> float:
    """Return the forward FLOPs of all matmuls of the first key."""
    lines = work.matmuls
    flops = 2 * lines.groups * lines.m * lines.n * lines.k * work.blocks.count[lines.block]
    wanted = slice(None) if of_experts is None else lines.is_expert == of_experts
    return float(flops[wanted].sum())


def attention_flops(work: Work) -> float:
    return float((work.blocks.attention_flops * work.blocks.count).sum())


def parameters(work: Work) -> float:
    blocks = work.blocks
    return float(((blocks.dense_parameters + blocks.expert_parameters) * blocks.count).sum())


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", [*MODELS, "llama3.2-1b", "mla-moe-4m"])
def test_one_rank_does_the_whole_model(model: str, stack: str) -> None:
    of = training_setup(model, stack=stack)
    work = work_of(configs(of, Layout(microbatch_size=2)))
    assert 3 * (matmul_flops(work) + attention_flops(work)) == of.model.flops_per_token(SEQ_LEN) * SEQ_LEN * 2
    assert parameters(work) == of.model.num_parameters


@settings(max_examples=40)
@given(
    st.sampled_from(MODELS).flatmap(lambda model: st.tuples(st.just(model), layouts(model))), st.sampled_from(STACKS)
)
def test_ranks_share_the_work_evenly(case: tuple[str, Layout], stack: str) -> None:
    model, layout = case
    of = training_setup(model, stack=stack)
    whole, part = (work_of(configs(of, one)) for one in (Layout(microbatch_size=layout.microbatch_size), layout))
    sharing = layout.tp * layout.cp
    assert attention_flops(part) == pytest.approx(attention_flops(whole) / sharing)
    assert matmul_flops(part, of_experts=False) == pytest.approx(matmul_flops(whole, of_experts=False) / sharing)
    # Each rank sends its tokens' copies away and gets as many: ep changes whose experts they go to, not how many.
    assert matmul_flops(part, of_experts=True) == pytest.approx(matmul_flops(whole, of_experts=True) / sharing)
    experts = [float((work.blocks.expert_parameters * work.blocks.count).sum()) for work in (whole, part)]
    assert experts[1] == experts[0] / layout.ep


def test_experts_are_fewer_and_busier_with_ep() -> None:
    of = training_setup("mixtral-8x7b")
    lines = [work_of(configs(of, layout)).matmuls for layout in (Layout(dp_shard=8), Layout(dp_shard=8, ep=8))]
    alone, shared = ((each.groups[each.is_expert], each.m[each.is_expert]) for each in lines)
    assert set(alone[0]) == {8}
    assert set(shared[0]) == {1}
    assert (shared[1] == 8 * alone[1]).all()


def test_experts_that_tp_splits_see_all_tokens_and_a_part_of_their_width() -> None:
    of = training_setup("mixtral-8x7b")
    whole, split = (work_of(configs(of, Layout(tp=4, dp_shard=2, ep=2, etp=etp))) for etp in (1, 4))
    assert matmul_flops(split) == pytest.approx(matmul_flops(whole))
    assert (split.matmuls.m[split.matmuls.is_expert] == 4 * whole.matmuls.m[whole.matmuls.is_expert]).all()
    assert (split.blocks.num_tp_collectives.max() > whole.blocks.num_tp_collectives.max()).all()


@pytest.mark.parametrize("model", MODELS)
def test_fused_matmuls_are_fewer_and_as_much(model: str) -> None:
    of = training_setup(model)
    apart, joined = (work_of(configs(changed(of, kernels=kernels), Layout())) for kernels in ("compiled", "fused"))
    assert len(joined.matmuls.m) < len(apart.matmuls.m)
    assert matmul_flops(joined) == matmul_flops(apart)
    # Query, key and value of the first block are one.
    of_block = joined.matmuls.block == int(np.flatnonzero(joined.blocks.kind == BLOCK)[0])
    assert of_block.sum() < (apart.matmuls.block == int(np.flatnonzero(apart.blocks.kind == BLOCK)[0])).sum()


def test_a_tensor_is_cast_once_for_all_that_read_it() -> None:
    of = training_setup("llama3-8b", precision="float8-tensorwise")
    lines = work_of(configs(changed(of, kernels="compiled", low_precision_gather=False), Layout())).matmuls
    read, cast = ((lines.m * lines.k)[lines.is_low], lines.cast_inputs[lines.is_low])
    # Of query, key, value, output, gate, up and down: query, output, gate and down.
    assert (cast > 0).tolist() == [True, False, False, True, True, False, True]
    assert (cast[cast > 0] == read[cast > 0]).all()
    assert (lines.cast_outputs == lines.m * lines.n)[lines.is_low].all()


def test_what_is_gathered_in_low_precision_is_cast_before() -> None:
    of = training_setup("llama3-8b", precision="float8-tensorwise")
    after, before = (
        work_of(configs(changed(of, kernels="compiled", low_precision_gather=gathers), Layout(tp=8))).matmuls
        for gathers in (False, True)
    )
    assert (before.cast_weights == 0).all()
    # Columns gather their input, rows the gradient of their output.
    rows = np.array([3, 6])
    columns = np.array([0, 4])
    assert (before.cast_inputs[columns] * 8 == after.cast_inputs[columns]).all()
    assert (before.cast_inputs[rows] == after.cast_inputs[rows]).all()
    assert (before.cast_outputs[rows] * 8 == after.cast_outputs[rows]).all()
    assert (before.cast_outputs[columns] == after.cast_outputs[columns]).all()


def test_each_part_of_a_model_is_of_its_kind() -> None:
    blocks = work_of(configs(training_setup("deepseek-v3"), Layout())).blocks
    assert blocks.kind.tolist() == [FIRST, BLOCK, BLOCK, LAST]
    assert blocks.count.tolist() == [1, 3, 58, 1]
    assert blocks.routed_copies.tolist() == [0, 0, 8, 0]


def test_equal_keys_are_priced_once() -> None:
    of = training_setup()
    work = work_of(configs(of, Layout(dp_shard=8), Layout(tp=2), Layout(dp_replicate=4), Layout(tp=2, pp=4)))
    assert work.key_of_config.tolist() == [0, 1, 0, 1]
    assert len(work.setup_index) == 2


def test_keys_of_several_setups_stay_apart() -> None:
    first, second = training_setup("llama3-8b"), training_setup("mixtral-8x7b")
    table = configs(first, Layout(), Layout(), Layout(tp=2)).layouts
    work = work_of(Configurations((first, second), np.array([1, 0, 1]), table))
    totals = np.zeros(len(work.setup_index))
    blocks = work.blocks
    np.add.at(totals, blocks.key, (blocks.dense_parameters + blocks.expert_parameters) * blocks.count)
    assert totals[work.key_of_config[0]] == second.model.num_parameters
    assert totals[work.key_of_config[1]] == first.model.num_parameters


@pytest.mark.parametrize("model", ["llama-1m", "moe-4m", "mla-moe-4m"])
def test_flops_are_those_that_torch_counts(model: str) -> None:
    batch_size, seq_len = 2, 32
    architecture = PRESETS[model]
    module = build_architecture(architecture)
    initialize(module, seed=0)
    tokens_BS = torch.randint(architecture.vocab_size, (batch_size, seq_len))
    counted, of_attention = counted_flops(module, tokens_BS)
    of = training_setup(model, seq_len=seq_len, global_batch_size=batch_size)
    work = work_of(configs(of, Layout(microbatch_size=batch_size)))
    # torch counts the whole square of pairs, the convention the half that the mask leaves.
    assert of_attention == 2 * 3 * attention_flops(work)
    assert counted == 3 * matmul_flops(work)


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v3"])
def test_parameters_are_those_of_the_module(model: str) -> None:
    architecture = PRESETS[model].replace(num_layers=4)
    with torch.device("meta"):
        module = build_architecture(architecture)
    whole = sum(parameter.numel() for parameter in module.parameters())
    # All layers but four are like the last of these.
    per_block = sum(parameter.numel() for parameter in module.blocks[-1].parameters())
    assert (
        parameters(work_of(configs(training_setup(model), Layout())))
        == whole + (PRESETS[model].num_layers - 4) * per_block
    )
