"""Layouts that say of each block what it saves are priced as those that say it of all."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.compute.recompute import recomputed_of
from meshwright.cost.layout_table import concatenate, layout_table
from meshwright.cost.memory.footprint import footprint
from meshwright.errors import UnsupportedError
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout

LLAMA = training_setup("llama3-8b", stack="meshwright")
NUM_BLOCKS = 32


def peaks(*layouts: Layout) -> list[float]:
    return footprint(configs(LLAMA, *layouts)).reserved_bytes.tolist()


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_all_alike_is_what_one_word_says(pp: int, kind: ActivationCheckpoint) -> None:
    word = Layout(pp=pp, dp_shard=8, activation_checkpoint=kind)
    each = Layout(pp=pp, dp_shard=8, activation_checkpoint_blocks=(kind,) * NUM_BLOCKS)
    assert peaks(word) == peaks(each)
    first, second = (recomputed_of(configs(LLAMA, layout)) for layout in (word, each))
    assert np.array_equal(first.matmul, second.matmul)
    assert np.array_equal(first.memory, second.memory)


def test_each_block_less_that_recomputes_takes_more_memory_and_less_time() -> None:
    mixed = [Layout(dp_shard=8, activation_checkpoint_blocks=_first_full(count)) for count in (32, 24, 16, 8, 0)]
    assert peaks(*mixed) == sorted(peaks(*mixed))
    assert recomputed_of(configs(LLAMA, *mixed)).attention.tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_only_blocks_of_its_own_cost_a_rank_memory() -> None:
    # The first of two stages holds two microbatches, the last one: there it is that recomputing half gains more.
    first, last = ("full",) * 16 + ("none",) * 16, ("none",) * 16 + ("full",) * 16
    piped = [Layout(pp=2, dp_shard=8, activation_checkpoint_blocks=saves) for saves in (first, last)]
    assert peaks(piped[0])[0] < peaks(piped[1])[0]


def test_a_table_gives_back_what_blocks_save() -> None:
    layout = Layout(dp_shard=8, activation_checkpoint_blocks=_first_full(3))
    table = layout_table([layout, Layout(dp_shard=8)])
    assert table.layout(0).activation_checkpoint_blocks == layout.activation_checkpoint_blocks
    assert concatenate([table, table]).take(np.array([2])).layout(0) == table.layout(0)


def test_what_is_not_chosen_yet_has_no_price() -> None:
    with pytest.raises(UnsupportedError, match=r'layout.activation_checkpoint = "auto" is settled before it is priced'):
        layout_table([Layout(activation_checkpoint="auto")])


def _first_full(count: int) -> tuple[ActivationCheckpoint, ...]:
    return (*("full",) * count, *("none",) * (NUM_BLOCKS - count))
