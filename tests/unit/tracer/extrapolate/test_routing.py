"""Tokens go where a law says, as many as there are, and none twice to one expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.tracer.extrapolate.routing import shared_out


@given(
    num_ranks=st.sampled_from([1, 2, 4, 8, 64]),
    local=st.integers(1, 8),
    per_token=st.integers(1, 8),
    tokens=st.integers(0, 5000),
    exponent=st.sampled_from([0.0, 0.5, 1.2, 8.0, float("inf")]),
)
def test_all_copies_go_somewhere_and_no_token_twice_to_an_expert(
    num_ranks: int, local: int, per_token: int, tokens: int, exponent: float
) -> None:
    per_token = min(per_token, num_ranks * local)
    most = tokens * min(per_token, local)
    shares = shared_out(tokens * per_token, num_ranks, exponent, most)
    assert sum(shares) == tokens * per_token
    assert list(shares) == sorted(shares, reverse=True)
    assert max(shares) <= most
    if exponent == 0:
        assert max(shares) - min(shares) <= 1
    if exponent == float("inf"):
        num_loaded = -(-per_token // min(per_token, local))
        assert sum(share > 0 for share in shares) == (min(num_loaded, num_ranks) if tokens else 0)


def test_what_is_too_many_for_one_rank_goes_to_the_next() -> None:
    # Two copies of each of 100 tokens, one expert on each rank.
    assert shared_out(200, 4, float("inf"), 100) == (100, 100, 0, 0)
    assert shared_out(200, 4, float("inf"), 200) == (200, 0, 0, 0)
    first, *others = shared_out(200, 4, 2.0, 100)
    assert first == 100
    assert others == pytest.approx([100 * x / (1 / 4 + 1 / 9 + 1 / 16) for x in (1 / 4, 1 / 9, 1 / 16)], abs=1)
