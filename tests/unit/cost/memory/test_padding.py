"""What padded shards cost, from shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.memory.footprint_states import padding_of
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import ModelSpec, model_spec
from meshwright.spec.model.presets import PRESETS


def model(name: str) -> ModelSpec:
    return model_spec(PRESETS[name])


def test_shards_that_divide_all_rows_waste_nothing() -> None:
    assert padding_of(model("llama3-8b"), Layout(dp_shard=64), 2) is None


def test_more_shards_than_rows_are_gathered_for_nothing() -> None:
    padding = padding_of(model("llama3-8b"), Layout(dp_shard=16384), 2)
    assert padding is not None
    factors = {one.name: one.wire_factor for one in padding.parameters}
    # 1,024 rows of keys, and 4,096 of queries, each become 16,384.
    assert factors["blocks.attention.key"] == 16
    assert factors["blocks.attention.query"] == 4
    assert "head" not in factors
    # One block's parameters are 416 MiB in 16 bits, and 1,216 MiB are gathered.
    blocks = [one for one in padding.parameters if one.name.startswith("blocks")]
    assert sum(one.wasted_bytes for one in blocks) / 32 == pytest.approx(800 * 2**20, rel=0.01)


@given(shards=st.integers(1, 4096), tp=st.sampled_from([1, 2, 8]))
def test_the_whole_is_gathered_no_less_than_it_is_and_no_parameter_twice_beyond_its_shards(
    shards: int, tp: int
) -> None:
    padding = padding_of(model("llama3-8b"), Layout(dp_shard=shards, tp=tp), 2)
    if padding is None:
        return
    assert padding.wire_factor > 1
    for one in padding.parameters:
        assert one.wire_factor < 1 + shards / one.rows
        assert one.wasted_bytes > 0
