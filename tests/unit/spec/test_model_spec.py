"""ModelSpec's counts against published totals, a formula by hand and its own data."""

import pytest

from meshwright.errors import UnsupportedError
from meshwright.spec.model_spec import ModelSpec, model_spec
from meshwright.spec.op import Attention
from meshwright.spec.presets import PRESETS

PUBLISHED = {
    # Parameters of the published checkpoints: the shapes in their safetensors files, summed.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    assert model_spec(PRESETS[name]).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    spec = model_spec(PRESETS[name])
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seq_len", [1, 255, 8192])
def test_flops_are_those_of_the_formula(name: str, seq_len: int) -> None:
    a = PRESETS[name]
    projections = a.dim * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    matmul_parameters = a.num_layers * (projections + 3 * a.dim * a.ffn_dim) + a.dim * a.vocab_size
    attention_flops = 6 * a.num_layers * a.num_heads * a.head_dim * seq_len
    spec = model_spec(a)
    assert spec.num_active_matmul_parameters == matmul_parameters
    assert spec.flops_per_token(seq_len) == 6 * matmul_parameters + attention_flops


def test_tied_head_is_computed_but_not_owned() -> None:
    untied = PRESETS["llama-1m"]
    one, other = model_spec(untied), model_spec(untied.replace(tie_embeddings=True))
    assert one.num_parameters - other.num_parameters == untied.vocab_size * untied.dim
    assert one.flops_per_token(256) == other.flops_per_token(256)


def test_attention_without_a_mask_is_twice_as_much() -> None:
    causal = Attention(name="attention", num_heads=4, num_kv_heads=2, head_dim=32, causal=True)
    assert causal.replace(causal=False).forward_flops_per_token(100) == 2 * causal.forward_flops_per_token(100)


def test_bytes_by_dtype() -> None:
    spec = model_spec(PRESETS["llama3-8b"])
    assert spec.parameter_bytes("bfloat16") == 2 * 8_030_261_248
    with pytest.raises(UnsupportedError, match="float7"):
        spec.parameter_bytes("float7")
