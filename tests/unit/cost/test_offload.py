"""Offload takes time and the host's memory, in proportion to what a rank keeps."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.case import Cases
from meshwright.cost.host_memory import HOST_BYTES
from meshwright.cost.layout_table import layout_table
from meshwright.cost.offload import copies_s, host_headroom_bytes, host_s
from meshwright.spec.layout import Layout
from questions import ask


def cases(*layouts: Layout) -> Cases:
    return Cases.of_one(ask("llama3-8b", 8, batch=16).setting, layout_table(list(layouts)))


def test_without_offload_nothing_is_added() -> None:
    without = cases(Layout(dp_shard=8))
    assert copies_s(without).tolist() == host_s(without).tolist() == [0.0]
    assert np.isinf(host_headroom_bytes(without)).all()


def test_copies_grow_with_gathers_and_with_what_a_rank_keeps() -> None:
    few, many, kept, whole = copies_s(
        cases(
            *(Layout(dp_shard=8, cpu_offload=True, microbatch_size=size, gradient_sync="step") for size in (2, 1)),
            Layout(dp_shard=8, cpu_offload=True, reshard_after_forward="never", gradient_sync="step"),
            Layout(dp_shard=4, dp_replicate=2, cpu_offload=True, microbatch_size=2, gradient_sync="step"),
        )
    )
    assert kept < few < many
    assert whole == pytest.approx(2 * few)


def test_replicas_copy_gradients_once_a_step_and_a_single_one_as_often_as_it_reduces() -> None:
    layouts = [Layout(dp_shard=8, cpu_offload=True), Layout(dp_shard=4, dp_replicate=2, cpu_offload=True)]
    each, each_of_two, once, once_of_two = copies_s(
        cases(*layouts, *(layout.replace(gradient_sync="step") for layout in layouts))
    )
    assert each > once
    assert each_of_two == once_of_two


def test_the_state_of_all_ranks_of_a_node_must_fit_its_memory() -> None:
    (left,) = host_headroom_bytes(cases(Layout(dp_shard=8, cpu_offload=True)))
    assert left == pytest.approx(HOST_BYTES / 8 - 16 * 8.03e9 / 8, rel=1e-3)


def test_the_host_sums_each_microbatch_that_is_reduced() -> None:
    few, many, once = host_s(
        cases(
            *(Layout(dp_shard=8, cpu_offload=True, microbatch_size=size) for size in (2, 1)),
            Layout(dp_shard=8, cpu_offload=True, gradient_sync="step"),
        )
    )
    # 48 bytes of each parameter for one microbatch, 60 for two, with 8 ranks a node at 614 GB/s.
    assert few == pytest.approx(48 * 8.03e9 / 614e9, rel=1e-3)
    assert many == pytest.approx(60 / 48 * few)
    assert once == few
