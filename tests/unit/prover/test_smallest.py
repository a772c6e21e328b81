"""smallest() finds the items that are to blame."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshwright.prover.smallest import smallest


@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1))))
def test_what_must_be_there_together_is_found(case: tuple[int, set[int]]) -> None:
    size, guilty = case
    assert set(smallest(range(size), lambda items: guilty <= set(items))) == guilty


@given(st.integers(2, 60), st.integers(1, 7))
def test_no_item_of_the_answer_can_be_left_out(size: int, enough: int) -> None:
    def fails(items: Sequence[int]) -> bool:
        return sum(item % 3 == 0 for item in items) >= min(enough, (size + 2) // 3)

    answer = smallest(range(size), fails)
    assert fails(answer)
    assert not any(fails([item for item in answer if item != left_out]) for left_out in answer)


def test_one_of_many_takes_few_tries() -> None:
    tried: list[int] = []

    def fails(items: Sequence[int]) -> bool:
        tried.append(len(items))
        return 77 in items

    assert smallest(range(200), fails) == [77]
    assert len(tried) < 30
