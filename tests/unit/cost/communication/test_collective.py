"""A collective takes more with bytes and ranks, less with bandwidth; many cases at once take what each does alone."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.communication.all_to_all import Routing, all_to_all_s, token_exchange_s
from meshwright.cost.communication.collective import (
    all_gather_s,
    all_reduce_s,
    group_of,
    lacks_link,
    reduce_scatter_s,
    require_links,
)
from meshwright.cost.communication.fabric import Fabric, FabricConstants, fabric_of, stack_fabrics
from meshwright.cost.communication.pipeline_p2p import send_s
from meshwright.cost.layout_table import take_rows
from meshwright.errors import UnsupportedError
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import CollectivePoint, Figure, Source

CONSTANTS = FabricConstants()
FABRICS = [fabric_of(load_cluster(name), CONSTANTS) for name in ("h100-ib400", "gb200-nvl72", "h100-roce400")]
H100, NVL72, PODS = FABRICS
MESH = fabric_of(load_cluster("mi300x-node"), CONSTANTS)
COLLECTIVES = [all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s, send_s]
FASTER = ["intra_bytes_per_s", "intra_bytes_per_s_per_peer", "nvls_bytes_per_s", "inter_bytes_per_s"]

collectives = st.sampled_from(COLLECTIVES)
fabrics = st.sampled_from(FABRICS)
powers = st.integers(0, 12).map(lambda exponent: 2**exponent)
sizes = st.floats(0, 1e11)


@given(collectives, fabrics, powers, st.integers(2, 4096), sizes, sizes)
def test_more_bytes_never_take_less(
    collective: Any, fabric: Fabric, stride: int, num_ranks: int, one: float, other: float
) -> None:
    group = group_of(stride, num_ranks, fabric)
    assert collective(min(one, other), group, fabric) <= collective(max(one, other), group, fabric)


@given(collectives, fabrics, st.booleans(), st.integers(1, 64), st.integers(1, 64), sizes)
def test_more_ranks_on_the_same_links_never_take_less(
    collective: Any, fabric: Fabric, is_inside: bool, one: int, other: int, num_bytes: float
) -> None:
    # In one domain, or one rank in each of many: a second rank in a domain brings a second network card. A switch that
    # adds does it faster for more ranks.
    fabric = replace(fabric, nvls_bytes_per_s=np.asarray(0.0))
    most, stride = (int(fabric.domain_size), 1) if is_inside else (64, 128)
    few, many = (group_of(stride, min(ranks, most), fabric) for ranks in sorted((one, other)))
    assert collective(num_bytes, few, fabric) <= collective(num_bytes, many, fabric) * (1 + 1e-12)


@given(collectives, st.sampled_from([*FABRICS, MESH]), powers, sizes)
def test_a_rank_alone_takes_no_time(collective: Any, fabric: Fabric, stride: int, num_bytes: float) -> None:
    assert collective(num_bytes, group_of(stride, 1, fabric), fabric) == 0


@given(collectives, fabrics, powers, powers, sizes, st.sampled_from(FASTER), st.floats(1, 10))
def test_a_faster_link_never_takes_more(
    collective: Any, fabric: Fabric, stride: int, num_ranks: int, num_bytes: float, link: str, factor: float
) -> None:
    faster = replace(fabric, **{link: getattr(fabric, link) * factor})
    group = group_of(stride, num_ranks, fabric)
    assert collective(num_bytes, group, faster) <= collective(num_bytes, group, fabric) * (1 + 1e-12)


@given(fabrics, powers, st.integers(2, 4096))
def test_a_large_all_reduce_is_a_reduce_scatter_and_an_all_gather(fabric: Fabric, stride: int, num_ranks: int) -> None:
    group, num_bytes = group_of(stride, num_ranks, fabric), 1e11
    halves = reduce_scatter_s(num_bytes, group, fabric) + all_gather_s(num_bytes, group, fabric)
    assert 0.5 * halves <= all_reduce_s(num_bytes, group, fabric) <= halves
    assert all_reduce_s(num_bytes, group, fabric) >= reduce_scatter_s(num_bytes, group, fabric)


@pytest.mark.slow
@given(collectives, st.lists(st.tuples(st.integers(0, 2), powers, powers, sizes), min_size=1, max_size=20))
def test_many_cases_cost_what_each_does_alone(collective: Any, cases: list[tuple[int, int, int, float]]) -> None:
    which, strides, num_ranks, num_bytes = map(np.array, zip(*cases, strict=True))
    stacked = stack_fabrics(FABRICS, which)
    together = collective(num_bytes, group_of(strides, num_ranks, stacked), stacked)
    alone = [collective(b, group_of(s, n, FABRICS[f]), FABRICS[f]) for f, s, n, b in cases]
    np.testing.assert_array_equal(together, alone)
    rows = np.arange(len(cases))[::2]
    some = stacked.take(rows)
    np.testing.assert_array_equal(
        collective(num_bytes[rows], take_rows(group_of(strides, num_ranks, stacked), rows), some), together[rows]
    )


def test_taking_cases_of_one_cluster_keeps_it() -> None:
    assert H100.take(np.arange(3)) is H100


def test_a_small_all_reduce_takes_a_tree_not_a_ring() -> None:
    group = group_of(1, 1024, H100)
    ring_steps_s = 2 * (896 * CONSTANTS.intra_step_s + 127 * CONSTANTS.inter_step_s)
    assert all_reduce_s(0, group, H100) < ring_steps_s / 10


@pytest.mark.parametrize(
    ("stride", "num_ranks", "num_domains"),
    [(1, 8, 1), (1, 16, 2), (2, 8, 2), (4, 2, 1), (8, 4, 4), (64, 3, 3), (1, 4, 1), (4, 1, 1)],
)
def test_a_strided_group_lies_in_more_nodes(stride: int, num_ranks: int, num_domains: int) -> None:
    assert group_of(stride, num_ranks, H100).num_domains == num_domains


def test_a_group_that_fills_no_whole_domains_is_spread_evenly() -> None:
    assert group_of(1, 256, NVL72).ranks_per_domain == 64


def test_a_group_drives_the_network_cards_of_its_members_only() -> None:
    all_members, every_fourth = (all_gather_s(1e11, group_of(stride, 64, H100), H100) for stride in (1, 4))
    assert every_fourth == pytest.approx(all_members * 0.8 * 450e9 / (2 * 0.92 * 50e9), rel=0.01)


def test_a_mesh_without_a_switch_reaches_few_peers_slowly() -> None:
    two, eight = (all_gather_s(1e10, group_of(1, n, MESH), MESH) for n in (2, 8))
    assert two * 2 == pytest.approx(eight * 8 / 7 * 7, rel=0.01)


def test_collectives_at_once_share_the_network_but_not_the_switch() -> None:
    across, inside = group_of(8, 64, H100), group_of(1, 8, H100)
    shared = H100.shared(inter=2)
    assert all_gather_s(1e10, across, shared) == pytest.approx(2 * all_gather_s(1e10, across, H100), rel=0.01)
    assert all_gather_s(1e10, inside, shared) == all_gather_s(1e10, inside, H100)
    assert all_gather_s(1e10, inside, H100.shared(intra=3)) > 2.9 * all_gather_s(1e10, inside, H100)


def test_only_the_outermost_axis_notices_an_oversubscribed_spine() -> None:
    free = replace(PODS, oversubscription=np.asarray(1.0))
    for stride, num_ranks, slowdown in ((1, 16384, 1), (8, 256, 1), (8, 2048, 1), (4096, 4, 7), (1024, 16, 7 / 3)):
        group = group_of(stride, num_ranks, PODS)
        assert send_s(1e11, group, PODS) == pytest.approx(slowdown * send_s(1e11, group, free), rel=1e-3)
    wide = group_of(1, 6144, PODS)
    assert all_to_all_s(1e11, wide, PODS) == pytest.approx(3.5 * all_to_all_s(1e11, wide, free), rel=0.01)


def test_tokens_sent_once_to_a_node_load_the_network_less() -> None:
    group, token_bytes = group_of(1, 64, H100), 1e10
    plain, once, limited = (
        token_exchange_s(token_bytes, routing, group, H100)
        for routing in (Routing(8), Routing(8, is_deduplicated=True), Routing(8, True, max_domains_per_token=4))
    )
    # 8 experts drawn from 8 nodes lie in 5.25 of them.
    assert once == pytest.approx(plain * 5.25 / 8, rel=0.01)
    assert limited == pytest.approx(plain * 4 / 8, rel=0.01)


def test_a_busy_expert_makes_all_wait() -> None:
    group = group_of(1, 64, H100)
    even, skewed = (token_exchange_s(1e10, Routing(8, imbalance=x), group, H100) for x in (1.0, 1.3))
    assert skewed == pytest.approx(1.3 * even, rel=0.01)


@given(fabrics, st.integers(1, 16), powers, sizes)
def test_a_copy_for_each_expert_is_a_plain_all_to_all(
    fabric: Fabric, num_experts: int, num_ranks: int, num_bytes: float
) -> None:
    group = group_of(1, num_ranks, fabric)
    exchange_s = token_exchange_s(num_bytes, Routing(num_experts), group, fabric)
    assert exchange_s == pytest.approx(all_to_all_s(num_bytes * num_experts, group, fabric))


def test_an_unknown_link_is_nan_and_an_error_only_where_it_is_needed() -> None:
    inside, across = group_of(1, 8, MESH), group_of(8, 2, MESH)
    require_links(inside, MESH)
    assert not lacks_link(inside, MESH)
    assert all(np.isnan(collective(1e6, across, MESH)) for collective in COLLECTIVES)
    with pytest.raises(UnsupportedError, match=r"mi300x-node.*inter_node and num_nics_per_node"):
        require_links(across, MESH)


def test_the_cluster_whose_link_is_unknown_is_named_among_many() -> None:
    unlinked = fabric_of(load_cluster("dgx-h100").replace(name="bare", intra_node=None), CONSTANTS)
    stacked = stack_fabrics([H100, unlinked], np.array([0, 1, 0]))
    group = group_of(1, np.array([8, 8, 16]), stacked)
    assert lacks_link(group, stacked).tolist() == [False, True, False]
    with pytest.raises(UnsupportedError, match=r"cluster bare.*set intra_node"):
        require_links(group, stacked)
    assert all_gather_s(1e6, group_of(1, 1, unlinked), unlinked) == 0


def measured_cluster(kind: str) -> Cluster:
    source = Source(title="this test", date="2026", kind="measured")

    def point(num_ranks: int, latency_s: float, bytes_per_s: float) -> CollectivePoint:
        latency, rate = Figure(value=latency_s, source=source), Figure(value=bytes_per_s, source=source)
        return CollectivePoint(kind=kind, num_ranks=num_ranks, latency_s=latency, bytes_per_s=rate)

    cluster = load_cluster("h100-ib400")
    assert cluster.intra_node is not None
    points = (point(8, 4e-3, 1e9), point(2, 2e-3, 2e9))
    return cluster.replace(intra_node=cluster.intra_node.replace(collectives=points))


@pytest.mark.parametrize(
    ("kind", "collective"),
    list(zip(["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"], COLLECTIVES, strict=True)),
)
def test_what_was_measured_stands_in_for_the_formula(kind: str, collective: Any) -> None:
    fabric = fabric_of(measured_cluster(kind), CONSTANTS)
    stacked = stack_fabrics([H100, fabric], np.array([0, 1, 1, 1, 1]))
    num_ranks = np.array([8, 8, 4, 16, 1])
    seconds = collective(1e9, group_of(1, num_ranks, stacked), stacked)
    plain, beyond = (collective(1e9, group_of(1, n, H100), H100) for n in (8, 16))
    np.testing.assert_allclose(seconds, [plain, 4e-3 + 1, 3e-3 + 0.75, beyond, 0])
    assert collective(1e9, group_of(1, 8, fabric), fabric.shared(intra=2)) == pytest.approx(4e-3 + 2)
    other_kind = all_to_all_s if collective is not all_to_all_s else send_s
    assert other_kind(1e9, group_of(1, 8, fabric), fabric) == other_kind(1e9, group_of(1, 8, H100), H100)


def test_fabric_constants_are_priors_for_links_without_a_share_of_their_own() -> None:
    assert {field.name for field in fields(FabricConstants)} >= {"intra_efficiency", "inter_efficiency"}
    cluster = load_cluster("h100-ib400")
    assert cluster.intra_node is not None
    bare = cluster.replace(intra_node=cluster.intra_node.replace(efficiency=None))
    assert fabric_of(bare, FabricConstants(intra_efficiency=0.5)).intra_bytes_per_s == 225e9
    assert cluster.intra_node.efficiency is not None
    assert fabric_of(cluster, CONSTANTS).intra_bytes_per_s == 450e9 * cluster.intra_node.efficiency.value
