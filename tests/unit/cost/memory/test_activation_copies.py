"""Copies of activations hide behind the blocks next to them where they are short; the host holds what is moved."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import footprint, host_activation_bytes
from meshwright.cost.memory.host_memory import HOST_BYTES, PCIE_BYTES_PER_S, host_headroom_bytes
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from meshwright.planner.search.price import weigh
from meshwright.spec.layout.layout import Layout
from questions import ask

NUM_LAYERS, TOKENS, WIDTH = 32, 4096, 4096
INPUT_BYTES = 2 * TOKENS * WIDTH
FULL = Layout(dp_shard=8, activation_checkpoint="full")
NONE = Layout(dp_shard=8)


def configured(*layouts: Layout) -> Configurations:
    return Configurations.of_one(ask("llama3-8b", 8, batch=16).setup, layout_table(list(layouts)))


def offloaded(layout: Layout) -> Layout:
    return layout.replace(activation_offload=True)


def test_without_offload_nothing_changes() -> None:
    configs = configured(FULL, NONE)
    assert not step_times(configs).activation_copies_s.any()
    assert not host_activation_bytes(configs).any()
    assert np.isinf(host_headroom_bytes(configs)).all()


def test_copies_of_inputs_hide_and_those_of_all_that_a_block_saves_do_not() -> None:
    full, none = step_times(configured(offloaded(FULL), offloaded(NONE))).activation_copies_s
    assert full == 0
    # Two microbatches, each way; what computation hides is less than all of it.
    moved = host_activation_bytes(configured(offloaded(NONE)))[0]
    assert 0 < none < 2 * 2 * moved / PCIE_BYTES_PER_S


def test_the_more_blocks_recompute_the_less_is_copied() -> None:
    recomputed = NONE.replace(activation_checkpoint="selective")
    layouts = [recomputed.replace(activation_checkpoint_every=every) for every in (1, 2, 4)]
    copies_s = step_times(configured(*map(offloaded, (*layouts, NONE)))).activation_copies_s
    assert copies_s.tolist() == sorted(copies_s.tolist())
    assert copies_s[0] < copies_s[1] < copies_s[2] < copies_s[3]


def test_the_step_is_longer_by_what_is_exposed_alone() -> None:
    plain, moved = (step_times(configured(layout)) for layout in (NONE, offloaded(NONE)))
    assert moved.total_s[0] - plain.total_s[0] == pytest.approx(moved.activation_copies_s[0], rel=0.05)


def test_the_host_holds_the_inputs_of_all_blocks_but_the_last() -> None:
    (held,) = host_activation_bytes(configured(offloaded(FULL)))
    assert held == pytest.approx((NUM_LAYERS - 1) * INPUT_BYTES)
    (left,) = host_headroom_bytes(configured(offloaded(FULL)), held)
    assert left == pytest.approx(HOST_BYTES / 8 - held)


def test_the_device_keeps_what_two_blocks_save() -> None:
    plain, moved = footprint(configured(FULL, offloaded(FULL))).activations_bytes
    # In the backward of a block, what it recomputes is there too.
    assert plain - moved >= (NUM_LAYERS - 2) * INPUT_BYTES * 0.9


def test_each_microbatch_in_flight_waits_on_the_host() -> None:
    layouts = [offloaded(Layout(pp=4, dp_shard=2, schedule=name)) for name in ("1F1B", "GPipe")]
    one, gpipe = host_activation_bytes(configured(*layouts))
    # 16 sequences on two data-parallel ranks: the first of 4 stages, of 8 blocks, holds 4 microbatches; with GPipe a
    # stage of 9 blocks holds all 8.
    assert gpipe == pytest.approx(2 * 9 / 8 * one, rel=0.01)


def test_a_layout_beyond_the_hosts_memory_does_not_fit() -> None:
    request = ask("llama3-8b", 8, seq_len=2**20, batch=8)
    _, headroom = weigh(layout_table([offloaded(NONE)]), request)
    assert headroom[0] < HOST_BYTES / 8 - host_activation_bytes(request.configs(layout_table([offloaded(NONE)])))[0] + 1
