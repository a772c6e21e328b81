"""Retention: which checkpoints are kept, for any run and any rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.spec.run.retention import RetentionRule, kept_because

LOSSES = st.dictionaries(
    st.integers(0, 200), st.none() | st.floats(0, 5) | st.sampled_from([float("nan"), float("inf")]), min_size=1
)
RULES = st.builds(RetentionRule, keep=st.integers(1, 5), keep_every=st.integers(0, 20), keep_best=st.integers(0, 5))


@given(LOSSES, RULES)
def test_the_newest_is_always_kept(losses: dict[int, float | None], rule: RetentionRule) -> None:
    assert "keep" in kept_because(losses, rule)[max(losses)]


@given(LOSSES, RULES)
def test_each_rule_names_what_its_definition_says(losses: dict[int, float | None], rule: RetentionRule) -> None:
    reasons = kept_because(losses, rule)
    by_rule = {name: {step for step, why in reasons.items() if name in why} for name in RetentionRule.model_fields}
    assert by_rule["keep"] == set(sorted(losses)[-rule.keep :])
    assert by_rule["keep_every"] == {step for step in losses if rule.keep_every and step % rule.keep_every == 0}
    measured = {step: loss for step, loss in losses.items() if loss is not None and abs(loss) < float("inf")}
    assert len(by_rule["keep_best"]) == min(rule.keep_best, len(measured))
    best = [measured[step] for step in by_rule["keep_best"]]
    assert all(max(best, default=0.0) <= loss for step, loss in measured.items() if step not in by_rule["keep_best"])
    assert all(reasons.values())


@given(LOSSES, RULES)
def test_what_is_kept_is_kept_again(losses: dict[int, float | None], rule: RetentionRule) -> None:
    """Removal is idempotent: a second pass over what was kept removes nothing."""
    kept = kept_because(losses, rule)
    assert kept_because({step: losses[step] for step in kept}, rule) == kept


@given(LOSSES, RULES, st.integers(1, 3))
def test_a_larger_rule_keeps_more(losses: dict[int, float | None], rule: RetentionRule, more: int) -> None:
    larger = rule.replace(keep=rule.keep + more, keep_best=rule.keep_best + more)
    assert kept_because(losses, rule).keys() <= kept_because(losses, larger).keys()


def test_of_equal_losses_the_newer_is_kept() -> None:
    losses = {10: 1.0, 20: 1.0, 30: 2.0, 40: None}
    assert kept_because(losses, RetentionRule(keep=1, keep_best=1)) == {20: ["keep_best"], 40: ["keep"]}


def test_the_rule_keeps_at_least_one() -> None:
    with pytest.raises(ValidationError):
        RetentionRule(keep=0)
