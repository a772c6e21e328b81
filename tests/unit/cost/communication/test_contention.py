"""What is sent next to FSDP's gathers takes longer where both use the same links, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.communication.collective import group_of
from meshwright.cost.communication.contention import FsdpTraffic, LinkShares, contended_fabrics
from meshwright.cost.stack_factors import OURS
from meshwright.cost.step import StepPricer, StepTerms
from meshwright.cost.step_times import step_times
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.layout.layout import Layout


def steps(cluster: str, *layouts: Layout, stack: str = OURS) -> StepTerms:
    found = load_cluster(cluster)
    return step_times(
        configs(training_setup("llama3-8b", found.with_num_devices(layouts[0].num_ranks), stack), *layouts)
    )


def sharded_and_not(cluster: str, layout: Layout, stack: str = OURS) -> list[float]:
    """Return the seconds of tp, cp and ep where data-parallel ranks share parameters, and where all hold them."""
    whole = layout.replace(dp_shard=1, dp_replicate=layout.dp_shard)
    step = steps(cluster, layout, whole, stack=stack)
    return (step.tp_communication_s + step.cp_communication_s + step.ep_communication_s).tolist()


def test_tp_takes_longer_on_links_that_fsdp_uses_but_not_twice_as_long() -> None:
    sharded, whole = sharded_and_not("l40s-node", Layout(dp_shard=4, tp=2))
    assert 1.02 * whole < sharded < 2 * whole
    # What compiled blocks hide is longer, too, and less of it is hidden.
    compiled = sharded_and_not("l40s-node", Layout(dp_shard=4, tp=2, compile=True))
    assert compiled[0] - compiled[1] > 0.02 * whole


@pytest.mark.parametrize(
    ("forward", "span", "longer"),
    [
        # Next to half of the axis' time, at half speed: half of that time more.
        ((0.0, 1.0), (0.0, 2.0), 0.5),
        ((0.0, 1.0), (0.5, 1.5), 0.5),
        ((0.0, 3.0), (0.0, 2.0), 1.0),
        # FSDP's latency takes nothing of a link.
        ((0.25, 0.75), (0.0, 2.0), 0.5 * 0.75),
        ((0.0, 1.0), (1.0, 2.0), 0.0),
    ],
)
def test_an_axis_takes_longer_by_what_it_shares_with_fsdp(
    forward: tuple[float, float], span: tuple[float, float], longer: float
) -> None:
    fabric = StepPricer(configs(training_setup("llama3-8b", load_cluster("h100-ib400"), OURS), Layout(tp=2))).fabric
    tp, fsdp = group_of(1, np.array([2]), fabric), group_of(2, np.array([4]), fabric)
    in_forward, in_last = np.array(forward)[:, None], np.array([0.0, 1.0])[:, None]
    # A gather in half of the forwards, and in one backward of four a reduction.
    traffic = FsdpTraffic(
        (fsdp,), (in_forward,), (0 * in_last,), (in_last,), gathered=np.array([0.5]), last=np.array([0.25])
    )
    times = np.array([span[0]]), np.array([span[1]])
    found = contended_fabrics(
        traffic, LinkShares(tp, np.ones(1), np.zeros(1)), times, (np.zeros(1), np.full(1, 4.0)), fabric
    )
    slower = [float((fabric.intra_bytes_per_s / one.intra_bytes_per_s)[0]) for one in found]
    assert slower == pytest.approx([1 + 0.5 * longer, 1 + 0.25 * 0.25])


def test_it_does_not_where_every_pair_of_devices_has_its_own_link() -> None:
    layout = Layout(dp_shard=2, tp=4)
    sharded, whole = sharded_and_not("mi300x-node", layout)
    assert sharded == pytest.approx(whole, rel=1e-3)
    sharded, whole = sharded_and_not("h100-ib400", layout)
    assert sharded > 1.001 * whole


def test_it_does_not_where_fsdp_uses_the_network_alone() -> None:
    sharded, whole = sharded_and_not("h100-ib400", Layout(dp_shard=8, tp=8))
    assert sharded == pytest.approx(whole, rel=1e-3)


def test_a_ring_shares_its_links_with_the_fsdp_that_spans_it() -> None:
    ring = Layout(dp_shard=2, cp=4, cp_method="ring")
    kept = ring.replace(reshard_after_forward="never")
    again, once = steps("mi300x-node", ring, kept).cp_communication_s.tolist()
    assert again > 1.02 * once


def test_ulysses_sends_to_every_rank_of_its_group() -> None:
    """Of 16 ranks in two nodes 7 peers are inside and 8 are outside."""
    of = training_setup("llama3-8b", load_cluster("h100-ib400").with_num_devices(16), OURS)
    pricer = StepPricer(configs(of, *(Layout(cp=16, cp_method=name) for name in ("ulysses", "all-gather"))))
    _, shares, _ = pricer.communication.shares(pricer.fabric)
    inside, network = (rate[0] for rate in (pricer.fabric.intra_bytes_per_s, pricer.fabric.inter_bytes_per_s))
    spread, ring = (shares.inside / shares.network).tolist()
    assert spread == pytest.approx(7 / 8 * network / inside)
    # A ring passes all bytes inside, and over the network an eighth on each of the node's cards.
    assert ring == pytest.approx(8 * network / inside)


def test_other_software_was_fitted_without() -> None:
    sharded, whole = sharded_and_not("l40s-node", Layout(dp_shard=4, tp=2), stack="generic")
    assert sharded == pytest.approx(whole, rel=1e-3)
