"""CollectiveOrder: a later step's collectives get their modules from an earlier one, up to where they depart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.fault_tolerance.hangs.step_record import CollectiveOrder
from meshwright.spec.run.rank_records import Collective


def collective(size: int, module: str | None = None, sequence: int = 1) -> Collective:
    return Collective(group="0", sequence=sequence, op="all_reduce", sizes=[[size]], module=module)


ORDERS = st.lists(st.integers(1, 3), min_size=1, max_size=8)


@given(ORDERS, st.data())
def test_a_prefix_of_the_order_is_placed_and_what_follows_is_told(sizes: list[int], data: st.DataObject) -> None:
    known = [collective(size, f"blocks.{place}") for place, size in enumerate(sizes)]
    length = data.draw(st.integers(0, len(sizes)))
    step = [collective(size, sequence=100 + place) for place, size in enumerate(sizes[:length])]

    placed, departure = CollectiveOrder(known).placed(step)

    assert departure is None
    assert [one.module for one in placed] == [one.module for one in known[:length]]
    assert [one.sequence for one in placed] == [one.sequence for one in step]
    after = CollectiveOrder(known).after(step)
    assert (after is None) == (length == len(sizes))
    assert after is None or after.module == f"blocks.{length}"


@given(ORDERS, st.data())
def test_a_skipped_collective_is_a_departure(sizes: list[int], data: st.DataObject) -> None:
    known = [collective(size, f"blocks.{place}") for place, size in enumerate(sizes)]
    skipped = data.draw(st.integers(0, len(sizes) - 1))
    # What comes after the step makes even the last one missed.
    step = [collective(size) for size in [*sizes[:skipped], *sizes[skipped + 1 :], 9]]

    placed, departure = CollectiveOrder(known).placed(step)

    assert departure is not None
    assert departure.known is not None
    place = next(place for place, one in enumerate(step) if one.sizes != known[place].sizes)
    assert skipped <= place
    assert departure.known == known[place]
    assert departure.found == step[place]
    assert [one.module for one in placed] == [*(one.module for one in known[:place]), *[None] * (len(step) - place)]


def test_a_skipped_collective_is_distinguished_from_an_extra_one() -> None:
    order = CollectiveOrder([collective(1), collective(2), collective(3)])
    _, skip = order.placed([collective(1), collective(3)])
    _, extra = order.placed([collective(1), collective(4)])
    assert skip is not None
    assert extra is not None
    assert (skip.is_skip, extra.is_skip) == (True, False)


def test_one_more_than_ever_is_a_departure_from_nothing() -> None:
    _, departure = CollectiveOrder([collective(1)]).placed([collective(1), collective(2)])
    assert departure is not None
    assert departure.known is None
