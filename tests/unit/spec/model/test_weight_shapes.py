"""weight_shapes: what the ops say of a model's weights is what the model has."""

import pytest

from meshwright.checkpoint.hf.maps.shapes import stored_shapes
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.model.weight_shapes import weight_shapes

GPT2 = GPT2Architecture.from_dict(
    {**dict.fromkeys(("vocab_size", "dim"), 16), "num_layers": 2, **dict.fromkeys(("num_heads", "num_kv_heads"), 2)}
    | {"head_dim": 8, "ffn_dim": 64, "max_seq_len": 8}
)


@pytest.mark.parametrize("name", ["llama-1m", "qwen3-0.6b", "moe-4m", "mla-moe-4m", "gpt-oss-4m", "gpt2"])
def test_shapes_are_those_of_the_model(name: str) -> None:
    architecture = PRESETS.get(name, GPT2)
    shapes, stored = weight_shapes(architecture), stored_shapes(architecture)
    assert shapes.items() <= stored.items()
    without = {name for name in stored.keys() - shapes.keys() if "bias" not in name and "sinks" not in name}
    assert not without
