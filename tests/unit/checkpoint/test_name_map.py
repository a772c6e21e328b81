"""NameMap: both directions from one table, and no key that is not accounted for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_models import architecture, moe_architecture
from meshwright.checkpoint.hf.maps.families import name_map
from meshwright.checkpoint.hf.maps.moe import MIXTRAL
from meshwright.checkpoint.hf.maps.shapes import stored_shapes
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.model.hf.hf_config import hf_model_type
from meshwright.spec.model.hf.name_map import Drop, NameMap, Rename
from meshwright.spec.model.presets import PRESETS

MAP = NameMap(
    renames=(Rename("blocks.{i}.gate", "layers.{i}.g_proj"), Rename("norm", "final_norm")),
    drops=(Drop("layers.{i}.inv_freq", "computed"),),
)
OURS = {"blocks.0.gate": (2, 3), "blocks.1.gate": (2, 3), "norm": (3,)}
THEIRS = ["layers.0.g_proj", "layers.1.g_proj", "final_norm"]


MODELS = {
    "llama": architecture(num_layers=11),
    "qwen3": architecture(num_layers=11, qk_norm=True),
    "mixtral": moe_architecture(num_layers=11),
    "qwen3_moe": moe_architecture(num_layers=11, num_dense_layers=2, qk_norm=True),
    "deepseek_v3": PRESETS["mla-moe-4m"].replace(num_layers=11),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_each_table_is_a_bijection_on_the_models_tensors(kind: str, tie_embeddings: bool) -> None:
    model = MODELS[kind].replace(tie_embeddings=tie_embeddings)
    assert hf_model_type(model) == kind
    table, shapes = name_map(model), stored_shapes(model)
    theirs = [(name, part) for name, shape in shapes.items() for part in table.theirs(name, shape)]
    assert len({part for _, part in theirs}) == len(theirs)
    assert any(part == "lm_head.weight" for _, part in theirs) is not tie_embeddings
    is_one_tensor = kind == "gpt_oss"
    num_experts = sum(shape[0] - 1 for name, shape in shapes.items() if ".experts." in name and not is_one_tensor)
    assert len(theirs) == len(shapes) + num_experts


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 300))
def test_experts_are_stacked(number: int, num_experts: int) -> None:
    ours = f"blocks.{number}.ffn.experts.down"
    theirs = MIXTRAL.theirs(ours, (num_experts, 3, 4))
    assert theirs[-1] == f"model.layers.{number}.block_sparse_moe.experts.{num_experts - 1}.w2.weight"
    assert MIXTRAL.rows_of(ours)[0].is_stacked
    assert not MIXTRAL.rows_of(f"blocks.{number}.ffn.router.weight")[0].is_stacked


def test_exactly_the_expected_keys_are_accounted_for() -> None:
    expected = {ours: [theirs] for ours, theirs in zip(OURS, THEIRS, strict=True)}
    assert MAP.account(THEIRS, OURS, "here") == expected
    assert MAP.account([*THEIRS, "layers.7.inv_freq"], OURS, "here") == expected


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ([*THEIRS, "layers.0.bias"], "(1 unknown: layers.0.bias)"),
        ([*THEIRS, "layers.x.inv_freq"], "(1 unknown: layers.x.inv_freq)"),
        ([*THEIRS, "layers.01.g_proj"], "(1 unknown: layers.01.g_proj)"),
        (THEIRS[1:], "(1 missing: layers.0.g_proj)"),
        ([*THEIRS[:2], "norm"], "(1 unknown: norm; 1 missing: final_norm)"),
        ([*THEIRS, *(f"a{i}" for i in range(9))], "(9 unknown: a0, a1, a2, a3, a4, a5 and 3 more)"),
        ([*THEIRS, "layers.2.g_proj"], "(1 unknown: layers.2.g_proj)"),
    ],
)
def test_every_other_key_is_named(present: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        MAP.account(present, OURS, "FOLDER")
    assert str(caught.value).startswith("the tensors of FOLDER are not those of its architecture")


def test_a_parameter_that_the_table_lacks_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"the parameter conv\.weight has no Hugging Face name"):
        MAP.theirs("conv.weight")
