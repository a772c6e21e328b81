"""Every noun is frozen, strict, described, and survives JSON."""

import pytest
from pydantic import ValidationError

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.field_docs import field_docs
from meshwright.spec.job.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    PlannerSection,
    PrecisionSection,
    RunSection,
    TrainSection,
)
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.step.estimate import Estimate, MemoryUse, StepDecomposition

NOUNS: list[type[Frozen]] = [
    CheckpointSection, ClusterSection, DataSection, ModelSection, OptimizerSection, PlannerSection, PrecisionSection,
    RunSection,
    TrainSection, Layout, LayoutRequest, MemoryUse, StepDecomposition,
]  # fmt: skip


@pytest.mark.parametrize("noun", NOUNS)
def test_a_noun_is_frozen_strict_and_described(noun: type[Frozen]) -> None:
    record = noun()
    name = next(iter(noun.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record, name, getattr(record, name))
    with pytest.raises(ValidationError, match="Extra inputs"):
        noun.from_dict({"no_such_field": 1})
    assert list(field_docs(noun)) == list(noun.model_fields)
    assert noun.from_json(record.to_json()) == noun.from_dict(record.to_dict()) == record


def test_replace_validates_what_it_changes() -> None:
    assert TrainSection().replace(steps=3).steps == 3
    with pytest.raises(ValidationError):
        TrainSection().replace(steps="3")


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0, True, "1e-3"])
def test_what_is_no_learning_rate(rate: object) -> None:
    with pytest.raises(ValidationError):
        OptimizerSection.from_dict({"learning_rate": rate})


@pytest.mark.parametrize("value", [None, float("nan"), [None], {"deep": {1: 2}}, (1,), b"bytes"])
def test_options_hold_only_what_both_formats_hold(value: object) -> None:
    with pytest.raises(ValidationError, match=r"options\.x = "):
        ModelSection(options={"x": value})


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, "0.95"], 0.9])
def test_what_are_no_betas(betas: object) -> None:
    with pytest.raises(ValidationError):
        OptimizerSection.from_dict({"betas": betas})


def test_an_estimate_adds_its_parts() -> None:
    step = StepDecomposition(model_flops_at_peak_s=1.0, recomputation_s=0.25, pipeline_bubble_s=0.5, cpu_bound_s=0.125)
    assert step.total_s == 1.875
    memory = MemoryUse(parameters_bytes=4, activations_bytes=3, fragmentation_bytes=2, context_bytes=1)
    assert (memory.allocated_bytes, memory.reserved_bytes, memory.device_bytes) == (7, 9, 10)
    estimate = Estimate(step=step, memory=memory, mfu=None, relative_error=0.1)
    assert Estimate.from_json(estimate.to_json()) == estimate
    with pytest.raises(ValidationError):
        Estimate(step=step, memory=memory, mfu=-0.1, relative_error=0.1)
