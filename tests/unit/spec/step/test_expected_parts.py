"""The planner's terms and the components of a step are two sums of the same seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.step.estimate import StepTime
from meshwright.spec.step.expected_parts import expected_parts


@given(st.lists(st.floats(0, 1e3), min_size=len(StepTime.model_fields), max_size=len(StepTime.model_fields)))
def test_nothing_is_lost(seconds: list[float]) -> None:
    step = StepTime(**dict(zip(StepTime.model_fields, seconds, strict=True)))
    parts = expected_parts(step)
    assert parts.total_s == pytest.approx(step.total_s)
    assert parts.compute_s == pytest.approx(
        step.floor_s + step.matmul_s + step.tile_s + step.attention_s + step.memory_s + step.repeat_s
    )
    assert parts.dp_s == step.dp_s
