"""A limit on NCCL's CTAs: without it nothing changes; with it links carry less, and matmuls keep more SMs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_configs import configs, training_setup
from meshwright.cost.communication.all_to_all import all_to_all_s
from meshwright.cost.communication.collective import all_gather_s, all_reduce_s, group_of, slowdown_share
from meshwright.cost.communication.fabric import FabricConstants, fabric_of
from meshwright.cost.communication.nccl_ctas import ctas_of, idle_limit_note
from meshwright.cost.communication.pipeline_p2p import send_s
from meshwright.cost.step_times import step_times
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.layout.layout import Layout

H100 = fabric_of(load_cluster("h100-ib400"), FabricConstants())
COLLECTIVES = (all_gather_s, all_reduce_s, all_to_all_s, send_s)
NUM_BYTES = 1e9


@pytest.mark.parametrize(
    ("cluster", "ctas"),
    [
        ("dgx-a100", (24, 24)),
        ("h800-ib400", (16, 16)),
        ("h100-ib400", (24, 16)),
        ("b200-ib400", (16, 16)),
        ("rtx-4090-node", (2, 2)),
        ("mi300x-node", (0, 0)),
        ("cpu-local", (0, 0)),
    ],
)
def test_a_device_has_two_ctas_for_each_link_and_no_more_than_nccl_takes(cluster: str, ctas: tuple[int, int]) -> None:
    assert ctas_of(load_cluster(cluster)) == ctas


def test_without_a_limit_links_are_the_same() -> None:
    assert H100.limited(0) is H100
    mixed = H100.limited([0, 4])
    assert mixed.intra_bytes_per_s[0] == H100.intra_bytes_per_s
    assert mixed.intra_bytes_per_s[1] == H100.intra_bytes_per_s / 4
    for fabric in (H100, mixed):
        assert np.all(slowdown_share(group_of(1, 8, fabric), fabric) == [1, 4 / 24][: np.size(fabric.max_ctas)])


@given(st.sampled_from(COLLECTIVES), st.integers(1, 64), st.integers(1, 64), st.sampled_from((1, 8)))
def test_fewer_ctas_are_never_faster_and_slow_down_no_more(collective: Any, one: int, other: int, stride: int) -> None:
    few, many = (H100.limited(limit) for limit in sorted((one, other)))
    group = group_of(stride, 16, H100)
    assert collective(NUM_BYTES, group, few) >= collective(NUM_BYTES, group, many)
    assert slowdown_share(group, few) <= slowdown_share(group, many) <= 1


@pytest.mark.parametrize(("stride", "ranks", "limit", "share"), [(1, 8, 12, 0.5), (1, 64, 8, 0.5), (8, 8, 1, 0.5)])
def test_what_is_usual_is_that_of_the_links_a_group_uses(stride: int, ranks: int, limit: int, share: float) -> None:
    group = group_of(stride, ranks, H100)
    assert slowdown_share(group, H100.limited(limit)) == share
    assert slowdown_share(group, H100.limited(24)) == 1


def test_a_limit_above_the_usual_number_changes_no_bit() -> None:
    usual, high, none = _steps(Layout(dp_shard=8, tp=2, pp=2, dp_replicate=2), None, 24, 32)
    assert usual == high == none


def test_fewer_sms_help_until_the_links_are_slower() -> None:
    usual, fewer, few = _steps(Layout(dp_shard=8), None, 16, 2)
    assert fewer < usual < few


def test_other_devices_have_no_price_for_it() -> None:
    assert len(set(_steps(Layout(dp_shard=8), None, 4, cluster="mi300x-ib400"))) == 1


def _steps(layout: Layout, *limits: int | None, cluster: str = "h100-ib400") -> list[float]:
    setup = training_setup("llama3-8b", cluster, "meshwright")
    table = [layout.replace(communication_sms=limit) for limit in limits]
    seconds: list[float] = step_times(configs(setup, *table)).total_s.tolist()
    return seconds


@pytest.mark.parametrize(
    ("cluster", "limit", "num_ranks", "note"),
    [
        ("h100-ib400", 8, 8, ""),
        ("h100-ib400", None, 8, ""),
        ("h100-ib400", 24, 8, "has no effect: NCCL takes 24 SMs at most on h100-ib400"),
        ("h100-ib400", 8, 1, "does nothing on one rank"),
    ],
)
def test_a_limit_without_effect_is_noted(cluster: str, limit: int | None, num_ranks: int, note: str) -> None:
    layout = Layout(dp_shard=num_ranks, communication_sms=limit)
    found = idle_limit_note(layout, load_cluster(cluster))
    assert note in found
    assert bool(found) == bool(note)
