"""ModelSpec's counts against published totals, a formula by hand and its own data."""

from dataclasses import replace

import pytest

from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.model_spec import ModelSpec, model_spec, transformer_config, transformer_spec
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.op import CoreAttention, Elementwise, GroupedMatmul, Matmul, Norm, Op, Rope
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.model.transformer_config import MoEConfig
from model_counts import num_active_matmul_parameters

PUBLISHED = {
    # Parameters of the published checkpoints: the shapes in their safetensors files, summed.
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # arXiv:2508.10925, table 1, rounds them to 20.91 and 116.83 billion.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # Without the 14,848 numbers of the routers' biases, which are no parameters here, and the 62nd layer.
    "deepseek-v3": 671_026_404_352,
}
ACTIVE = {
    # Parameters that a token uses, in billions, as the publishers round them.
    "mixtral-8x7b": 12.9,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v3": 37,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert model_spec(PRESETS[name]).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_published(name: str) -> None:
    spec = model_spec(PRESETS[name])
    embedding = PRESETS[name].vocab_size * PRESETS[name].dim
    assert (num_active_matmul_parameters(spec) + embedding) / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize(
    ("name", "experts", "attention", "active"),
    [("gpt-oss-20b", 19.12, 0.64, 3.61), ("gpt-oss-120b", 114.71, 0.96, 5.13)],
)
def test_the_parts_of_gpt_oss_are_those_published(name: str, experts: float, attention: float, active: float) -> None:
    # arXiv:2508.10925, table 1, in billions; its active parameters include the head and not the embedding.
    spec = model_spec(PRESETS[name])
    of_part: dict[str, int] = {}
    for group in spec.groups:
        for op in group.ops:
            of_part[op.part] = of_part.get(op.part, 0) + group.count * op.num_parameters
    assert (of_part["experts"] + of_part["router"]) / 1e9 == pytest.approx(experts, abs=0.005)
    assert of_part["attention"] / 1e9 == pytest.approx(attention, abs=0.005)
    assert num_active_matmul_parameters(spec) / 1e9 == pytest.approx(active, abs=0.005)


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    spec = model_spec(PRESETS[name])
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("name", [name for name in PRESETS if not isinstance(PRESETS[name], MoEArchitecture)])
@pytest.mark.parametrize("seq_len", [1, 255, 8192])
def test_flops_are_those_of_the_formula(name: str, seq_len: int) -> None:
    a = PRESETS[name]
    projections = a.dim * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    matmul_parameters = a.num_layers * (projections + 3 * a.dim * a.ffn_dim) + a.dim * a.vocab_size
    attention_flops = 6 * a.num_layers * a.num_heads * a.head_dim * seq_len
    spec = model_spec(a)
    assert num_active_matmul_parameters(spec) == matmul_parameters
    assert spec.flops_per_token(seq_len) == 6 * matmul_parameters + attention_flops


@pytest.mark.parametrize("name", [name for name in PRESETS if isinstance(PRESETS[name], MoEArchitecture)])
def test_flops_of_mixtures_are_those_of_the_formula(name: str) -> None:
    a, seq_len = PRESETS[name], 4096
    assert isinstance(a, MoEArchitecture)
    value_width = a.head_dim if a.latent is None else a.latent.value_head_dim
    if a.latent is None:
        attention = a.dim * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    else:
        assert a.latent.query_rank is not None
        attention = a.latent.query_rank * (a.dim + a.num_heads * a.head_dim)
        attention += a.dim * (a.latent.kv_rank + a.latent.rope_head_dim)
        attention += a.latent.kv_rank * a.num_heads * (a.latent.plain_head_dim + value_width)
        attention += a.num_heads * value_width * a.dim
    experts = 3 * a.dim * (a.experts_per_token + a.num_shared_experts) * a.expert_ffn_dim + a.dim * a.num_experts
    num_mixtures = a.num_layers - a.num_dense_layers
    matmul_parameters = a.num_layers * attention + a.num_dense_layers * 3 * a.dim * a.ffn_dim + num_mixtures * experts
    matmul_parameters += a.dim * a.vocab_size
    # A window of w is full for all but the first w queries.
    windows = [a.window_of(layer) or seq_len for layer in range(a.num_layers)]
    keys = sum(2 * w - w * w / seq_len for w in windows)
    attention_flops = 3 * a.num_heads * (a.head_dim + value_width) * keys
    assert model_spec(a).flops_per_token(seq_len) == 6 * matmul_parameters + attention_flops


def test_layers_with_a_window_are_where_the_model_has_them() -> None:
    spec = model_spec(PRESETS["gpt-oss-20b"].replace(num_layers=5))
    windows = [op.window for group in spec.groups for op in group.ops if isinstance(op, CoreAttention)]
    assert windows == [128, None, 128, None, 128]
    assert [(group.name, group.count) for group in spec.distinct_groups] == [
        *[("", 1), ("blocks", 3), ("blocks", 2), ("", 1)]
    ]


def test_dense_layers_come_first() -> None:
    groups = model_spec(PRESETS["deepseek-v3"]).groups
    assert [(group.name, group.count) for group in groups] == [("", 1), ("blocks", 3), ("blocks", 58), ("", 1)]
    assert [any(isinstance(op, GroupedMatmul) for op in group.ops) for group in groups] == [False, False, True, False]


def test_tied_head_is_computed_but_not_owned() -> None:
    untied = PRESETS["llama-1m"]
    one, other = model_spec(untied), model_spec(untied.replace(tie_embeddings=True))
    assert one.num_parameters - other.num_parameters == untied.vocab_size * untied.dim
    assert one.flops_per_token(256) == other.flops_per_token(256)


def test_attention_without_a_mask_is_twice_as_much() -> None:
    causal = CoreAttention(name="attention", num_heads=4, num_kv_heads=2, head_dim=32, value_head_dim=32, causal=True)
    assert causal.replace(causal=False).forward_flops_per_token(100) == 2 * causal.forward_flops_per_token(100)


GPT2 = GPT2Architecture(
    vocab_size=512, dim=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, ffn_dim=256, max_seq_len=128
)


def _ops(spec: ModelSpec) -> list[Op]:
    return [op for group in spec.groups for op in group.ops]


def test_gpt2_has_biases_learned_positions_and_no_gate() -> None:
    spec = model_spec(GPT2)
    ops = _ops(spec)
    # 12 dim^2 weights and 13 dim biases and norm weights of a block, as in every description of GPT-2.
    blocks = GPT2.num_layers * (12 * GPT2.dim**2 + 13 * GPT2.dim)
    embeddings = (2 * GPT2.vocab_size + GPT2.max_seq_len) * GPT2.dim
    assert spec.num_parameters == blocks + embeddings + 2 * GPT2.dim
    assert not any(isinstance(op, Rope) for op in ops)
    assert {op.role for op in ops if isinstance(op, Elementwise)} == {"residual", "activation"}


def test_a_sliding_window_reduces_the_flops_of_attention_only() -> None:
    config = transformer_config(PRESETS["llama-1m"])
    blocks = config.blocks[0]
    windowed = replace(config, blocks=(replace(blocks, attention=replace(blocks.attention, window=64)),))
    full, less = transformer_spec(config), transformer_spec(windowed)
    assert num_active_matmul_parameters(less) == num_active_matmul_parameters(full)
    assert less.flops_per_token(64) == full.flops_per_token(64)
    assert less.flops_per_token(4096) < full.flops_per_token(4096)


def test_each_op_of_a_mixture_has_its_part_and_role() -> None:
    ops = model_spec(PRESETS["deepseek-v3"]).groups[2].ops
    routed = [op.role for op in ops if isinstance(op, Elementwise) and op.part == "experts"]
    assert routed == ["permute", "gated_activation", "unpermute", "combine"]
    splits = [op.tensor_split for op in ops if isinstance(op, GroupedMatmul)]
    assert splits == ["columns", "columns", "rows"]
    assert [op.out_features for op in ops if isinstance(op, Matmul) and op.part == "router"] == [256]
    assert [op.input for op in ops if isinstance(op, Norm)] == ["stream", "latent", "latent", "stream"]
    assert sum(op.part == "shared_experts" for op in ops) == 4


def test_norms_of_queries_and_keys_are_of_heads() -> None:
    norms = [op for op in model_spec(PRESETS["qwen3-8b"]).groups[1].ops if isinstance(op, Norm)]
    assert [op.input for op in norms] == ["stream", "heads", "heads", "stream"]


def test_biases_of_experts_are_ops_of_their_own() -> None:
    config = transformer_config(PRESETS["mixtral-8x7b"])
    blocks = config.blocks[-1]
    assert isinstance(blocks.ffn, MoEConfig)
    spec = transformer_spec(replace(config, blocks=(replace(blocks, ffn=replace(blocks.ffn, num_bias_passes=3)),)))
    biases = [op for op in _ops(spec) if isinstance(op, Elementwise) and op.role == "bias"]
    assert [op.reads_per_token for op in biases] == [3 * 2 * 14_336]
    assert not any(op.keeps_inputs for op in biases)
