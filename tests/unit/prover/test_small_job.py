"""A shrunk model is small, keeps what its architecture is made of, and the layouts that fit the original fit it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.prover.small_job import shrink, small_job
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, ModelSection, TrainSection
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.adapter import PACKED_BLOCK

DEEPSEEK = PRESETS["deepseek-v3"]
DEGREES = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(
    Layout,
    pp=DEGREES,
    dp_replicate=st.sampled_from([1, 2]),
    dp_shard=DEGREES,
    cp=DEGREES,
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    ep=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]),
    cp_method=st.sampled_from(["all-gather", "ring", "ulysses"]),
    microbatch_size=st.sampled_from([1, 2]),
)


def test_a_dense_model_keeps_its_ratios() -> None:
    small = shrink(PRESETS["llama3-8b"], [Layout(tp=2)])
    assert (small.num_heads, small.num_kv_heads, small.num_layers) == (4, 2, 2)
    assert model_spec(small).num_parameters < 50_000
    assert small.replace(**{name: getattr(PRESETS["llama3-8b"], name) for name in SIZES}) == PRESETS["llama3-8b"]


SIZES = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        ({"tp": 4}, (8, 4)),  # each rank has whole heads, as it would have 2 of the 8
        ({"tp": 16}, (16, 2)),  # more ranks than heads, as there
        ({"tp": 2, "cp": 2, "cp_method": "ulysses"}, (8, 4)),
    ],
    ids=str,
)
def test_key_heads_are_shared_by_ranks_only_where_they_were(layout: dict[str, Any], heads: tuple[int, int]) -> None:
    small = shrink(PRESETS["llama3-8b"], [Layout(**layout)])
    assert (small.num_heads, small.num_kv_heads) == heads


def test_a_mixture_keeps_a_dense_layer_two_others_its_groups_and_its_latents() -> None:
    small = shrink(DEEPSEEK, [Layout(dp_shard=4, ep=4)])
    assert isinstance(small, MoEArchitecture)
    assert (small.num_layers, small.num_dense_layers) == (3, 1)
    assert (small.num_experts, small.experts_per_token, small.num_shared_experts) == (8, 2, 1)
    assert (small.router.num_groups, small.router.groups_per_token, small.router.score) == (2, 1, "sigmoid")
    assert small.latent is not None
    assert small.latent.query_rank is not None
    assert small.head_dim == small.latent.plain_head_dim + small.latent.rope_head_dim


def test_windows_are_shorter_than_the_sequences_and_in_some_layers() -> None:
    small = shrink(PRESETS["gpt-oss-20b"], [Layout()])
    assert [small.window_of(layer) for layer in range(small.num_layers)] == [6, None]
    kinds = ["full_attention"] * 20 + ["sliding_attention"] * 8
    small = shrink(PRESETS["qwen3-0.6b"].replace(sliding_window=4096, layer_types=kinds), [Layout()])
    assert [small.window_of(layer) for layer in range(small.num_layers)] == [None, 6]


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 2, "schedule": "DualPipeV"}, {"pp": 2, "stage_boundaries": [3]}])
def test_there_is_a_layer_for_every_stage(layout: dict[str, Any]) -> None:
    assert shrink(PRESETS["llama3-8b"], [Layout(**layout)]).num_layers == 4


@pytest.mark.slow
@given(st.lists(LAYOUTS, min_size=1, max_size=4), st.sampled_from(["llama3-8b", "llama-1m", "qwen3-8b", "llama3.2-1b"]))
def test_layouts_that_fit_a_model_fit_the_small_one_together(layouts: list[Layout], source: str) -> None:
    job = Job(model=ModelSection(source=source), data=DataSection(mask_documents=True))
    train = TrainSection(seq_len=4096, global_batch_size=4096 * 16)
    layouts = [layout for layout in layouts if not layout_problems(job.replace(train=train), layout)]
    assume(layouts)
    small = small_job(job, layouts, Path("sums.jsonl"), 3, "float32")
    for layout in layouts:
        assert layout_problems(small.with_layout(layout), layout) == [], layout_text(layout)
    architecture = resolve_architecture(small.job.model)
    assert architecture is not None
    assert model_spec(architecture).num_parameters < 2_000_000


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_base_in_few_bits_has_whole_blocks_on_each_rank(tp: int) -> None:
    small = shrink(PRESETS["llama3-8b"], [Layout(tp=tp)], PACKED_BLOCK)
    assert small.dim % PACKED_BLOCK == 0
    assert small.num_heads * small.head_dim % (tp * PACKED_BLOCK) == 0
    assert small.ffn_dim % (tp * PACKED_BLOCK) == 0
