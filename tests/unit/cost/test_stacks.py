"""Stacks are found by name, carry three numbers that stay near 1, and only where runs were measured."""

from __future__ import annotations

import pytest

from meshwright.cost.stack_factors import GENERIC, OURS, load_stack, stacks
from meshwright.errors import ConfigError

FITTED = ("compute", "communication", "overhead")


@pytest.mark.parametrize("name", sorted(stacks()))
def test_a_stack_has_its_name_and_numbers_near_one(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    for field in FITTED:
        assert 0.5 < getattr(stack, field) < 2.0, field
    # What nobody measured is the generic stack's.
    assert stack.num_runs > 0 or all(getattr(stack, field) == 1 for field in FITTED)
    assert 0.01 < stack.relative_error < 0.5


def test_the_generic_stack_and_ours_are_fitted_on_nothing() -> None:
    for name in (GENERIC, OURS):
        assert load_stack(name).num_runs == 0
        assert not load_stack(name).is_tuned


def test_a_stack_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"stack = 'torchtitan-2023' must be one of .*generic.*did you mean torchtitan-202"
    ):
        load_stack("torchtitan-2023")
    with pytest.raises(ConfigError, match="stack = '' must be one of"):
        load_stack("")
