"""Transfers that share links take as long as processor sharing says, worked out by hand."""

from __future__ import annotations

import pytest

from meshwright.cost.communication.links import Links


def ends(links: Links) -> dict[int, float]:
    """Return when each transfer ends."""
    found = {}
    while (ended := links.next_end()) is not None:
        found[ended[0]] = ended[1]
    return found


def test_a_transfer_alone_takes_its_latency_and_its_bytes() -> None:
    links = Links([0.5, 0.0], [2.0, 0.0], [[(0, 1.0)], []])
    links.start(0, 1.0)
    links.start(1, 3.0)
    assert ends(links) == {0: 3.5, 1: 3.0}


def test_the_second_takes_half_of_a_link_from_when_its_bytes_travel() -> None:
    links = Links([0.0, 1.0], [4.0, 1.0], [[(0, 1.0)], [(0, 1.0)]])
    links.start(0, 0.0)
    links.start(1, 1.0)
    # Latency passes until 2; then the second needs 2 s for its 1, of which the first has 1.
    assert ends(links) == pytest.approx({1: 4.0, 0: 5.0})


def test_links_that_both_need_in_part_slow_nothing_until_they_are_full() -> None:
    for share, load in ((0.5, 1.0), (0.75, 1.5)):
        links = Links([0.0] * 2, [3.0] * 2, [[(0, share)], [(0, share), (1, 1.0)]])
        links.start(0, 0.0)
        links.start(1, 0.0)
        assert ends(links) == pytest.approx({0: 3.0 * load, 1: 3.0 * load})


def test_a_transfer_goes_at_the_pace_of_its_busiest_link() -> None:
    # The last runs over both links, each of which carries one more.
    links = Links([0.0] * 3, [1.0, 2.0, 2.0], [[(0, 1.0)], [(1, 0.25)], [(0, 1.0), (1, 0.25)]])
    for transfer in range(3):
        links.start(transfer, 0.0)
    # At half speed until the first ends at 2, then alone in full.
    assert ends(links) == pytest.approx({0: 2.0, 1: 2.0, 2: 3.0})
