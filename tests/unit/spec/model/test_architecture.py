"""LlamaArchitecture refuses sizes that do not fit and survives JSON."""

import pytest
from pydantic import ValidationError

from meshwright.spec.model.architecture import LlamaArchitecture, RopeScaling
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.presets import PRESETS

TINY = PRESETS["llama-1m"]


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    kind = type(PRESETS[name])
    assert kind.from_json(PRESETS[name].to_json()) == PRESETS[name]
    assert kind.from_dict(PRESETS[name].to_dict()) == PRESETS[name]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads to 2 or 4"),
        ({"head_dim": 31}, "set it to 30 or 32"),
        ({"dim": 0}, "greater than 0"),
        ({"num_layers": "4"}, "valid integer"),
        ({"num_layer": 4}, "num_layer"),
        ({"norm_eps": float("nan")}, "finite"),
    ],
)
def test_bad_sizes_are_refused_by_name(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        LlamaArchitecture.from_dict(TINY.to_dict() | changes)


def test_head_dim_is_independent_of_dim() -> None:
    architecture = TINY.replace(head_dim=48)
    assert (architecture.attention_dim, architecture.kv_dim) == (192, 96)


def test_rope_scaling_wants_a_band() -> None:
    with pytest.raises(ValidationError, match="must be below high_freq_factor"):
        RopeScaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)


def test_small_presets_split_over_two_and_four_ranks() -> None:
    for name in ("llama-1m", "llama-15m", "llama-100m", "moe-4m", "mla-moe-4m", "gpt-oss-4m"):
        small = PRESETS[name]
        assert small.num_kv_heads % 2 == 0
        if isinstance(small, MoEArchitecture):
            assert small.num_experts % 4 == small.expert_ffn_dim % 4 == small.shared_ffn_dim % 4 == 0
        assert all(size % 4 == 0 for size in (small.vocab_size, small.dim, small.ffn_dim, small.num_heads))
        assert not small.tie_embeddings
