"""A step by cause and the same step by component are two sums of the same seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.step.estimate import COMPONENTS, StepDecomposition

FIELDS = list(StepDecomposition.model_fields)


@given(st.lists(st.floats(0, 1e3), min_size=len(FIELDS), max_size=len(FIELDS)))
def test_components_sum_to_what_causes_sum_to(seconds: list[float]) -> None:
    step = StepDecomposition(**dict(zip(FIELDS, seconds, strict=True)))
    parts = step.summed()
    assert parts.distinguished == tuple(sorted(COMPONENTS, key=step.distinguished.index))
    assert parts.total_s == pytest.approx(step.total_s)
    assert parts.compute_s == pytest.approx(
        step.model_flops_at_peak_s
        + step.gemm_inefficiency_s
        + step.tile_and_wave_quantization_s
        + step.attention_inefficiency_s
        + step.memory_bound_ops_s
        + step.repeated_backward_s
        + step.compute_s
    )
    assert parts.dp_communication_s == step.dp_communication_s
    assert parts.summed() == parts


def test_json_holds_what_the_source_distinguishes() -> None:
    step = StepDecomposition(model_flops_at_peak_s=1.0, tp_communication_s=0.5)
    assert step.to_dict() == {"model_flops_at_peak_s": 1.0, "tp_communication_s": 0.5}
    assert StepDecomposition.from_json(step.to_json()).distinguished == ("model_flops_at_peak_s", "tp_communication_s")
    assert step.replace(pipeline_p2p_s=0.25).to_dict() == {
        "model_flops_at_peak_s": 1.0,
        "tp_communication_s": 0.5,
        "pipeline_p2p_s": 0.25,
    }
    assert {*step.summed().to_dict()} == {*COMPONENTS}


def test_a_difference_names_every_component_of_either_step() -> None:
    difference = StepDecomposition(model_flops_at_peak_s=1.0, tp_communication_s=0.5).minus(
        StepDecomposition(model_flops_at_peak_s=0.25, cp_communication_s=2.0)
    )
    assert difference == {"model_flops_at_peak_s": 0.75, "tp_communication_s": 0.5, "cp_communication_s": -2.0}
