"""NameMap: both directions from one table, and no key that is not accounted for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_models import architecture
from meshwright.checkpoint.hf.llama import LLAMA, name_map, parameter_shapes
from meshwright.checkpoint.hf.name_map import Drop, NameMap, Rename
from meshwright.errors import CheckpointError

MAP = NameMap(
    renames=(Rename("blocks.{i}.gate", "layers.{i}.g_proj"), Rename("norm", "final_norm")),
    drops=(Drop("layers.{i}.inv_freq", "computed"),),
)
OURS = ["blocks.0.gate", "blocks.1.gate", "norm"]
THEIRS = ["layers.0.g_proj", "layers.1.g_proj", "final_norm"]


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_the_llama_table_is_a_bijection_on_the_models_parameters(tie_embeddings: bool) -> None:
    model = architecture(qk_norm=True, num_layers=11, tie_embeddings=tie_embeddings)
    table = name_map(model)
    names = list(parameter_shapes(model))
    theirs = [table.theirs(name) for name in names]
    assert len(set(theirs)) == len(names)
    assert [table.ours(name) for name in theirs] == names
    assert ("lm_head.weight" in theirs) is not tie_embeddings


@given(st.integers(0, 10**6))
def test_numbers_go_both_ways(number: int) -> None:
    ours = f"blocks.{number}.attention.query.weight"
    assert LLAMA.ours(LLAMA.theirs(ours)) == ours


def test_exactly_the_expected_keys_are_accounted_for() -> None:
    assert MAP.account(THEIRS, OURS, "here") == dict(zip(OURS, THEIRS, strict=True))
    assert MAP.account([*THEIRS, "layers.7.inv_freq"], OURS, "here") == dict(zip(OURS, THEIRS, strict=True))


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
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        MAP.account(present, OURS, "FOLDER")
    assert str(caught.value).startswith("the tensors of FOLDER are not those of its architecture")


def test_a_parameter_that_the_table_lacks_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"the parameter conv\.weight has no Hugging Face name"):
        MAP.theirs("conv.weight")
