"""A measured step by cause: what is above the floor, who waits for whom, and that the causes sum to the step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_timelines import AXES, of_axis, span, timeline_of
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.step_causes import Floor, causes_of, critical_rank
from meshwright.spec.step.step_waterfall import BestChange, Waterfall, timed_parts
from meshwright.spec.step.timeline_decomposition import decompose, seconds_and_waits, seconds_by_rank
from meshwright.spec.trace.timeline import SpanKind, Timeline

COMPUTE, COMMUNICATION, WAIT, HOST, DATA = SpanKind
NAMES = ("aten.mm", "aten._scaled_dot_product_flash_attention", "aten.mul")
MATMUL, ATTENTION, OTHER = range(3)


def step_of(rows: list[dict[str, float]], step_s: float, num_ranks: int = 1) -> Timeline:
    return replace(timeline_of(rows, step_s, (1,) * num_ranks), names=NAMES)


def two_ranks(axis: str = "fsdp") -> Timeline:
    """Rank 0 waits 3 s for rank 1, which multiplies longer; then both communicate for a second."""
    rows = [
        span(COMPUTE, 0, 2, name=MATMUL),
        span(WAIT, 2, 6, **of_axis(axis)),
        span(COMPUTE, 0, 3, rank=1, name=MATMUL),
        span(COMPUTE, 3, 4, rank=1, name=ATTENTION),
        span(COMPUTE, 4, 5, rank=1, name=OTHER),
        span(WAIT, 5, 6, rank=1, **of_axis(axis)),
    ]
    rows += [span(COMMUNICATION, 5, 6, rank=rank, stream=1, **of_axis(axis)) for rank in (0, 1)]
    return step_of(rows, 7.0, 2)


def test_what_is_above_the_floor_is_split_by_kernel() -> None:
    causes = causes_of(two_ranks(), 1, Floor(1.0, 0.25))
    assert {name: value for name, value in causes.to_dict().items() if value} == {
        "model_flops_at_peak_s": 1.25,
        "gemm_inefficiency_s": 2.0,
        "attention_inefficiency_s": 0.75,
        "memory_bound_ops_s": 1.0,
        "dp_communication_s": 1.0,
        "cpu_bound_s": 1.0,
    }


def test_a_wait_for_a_late_rank_is_no_communication() -> None:
    timeline = two_ranks()
    causes = causes_of(timeline, 0, Floor())
    assert (causes.stragglers_s, causes.dp_communication_s) == (3.0, 1.0)
    # The coarser decomposition counts both as communication along that axis, as it always has.
    assert decompose(timeline, 0).dp_communication_s == 4.0
    assert critical_rank(timeline) == 1


def test_a_wait_for_another_stage_stays_a_bubble() -> None:
    causes = causes_of(two_ranks("pp"), 0, Floor())
    assert (causes.pipeline_bubble_s, causes.pipeline_p2p_s, causes.stragglers_s) == (3.0, 1.0, 0.0)


def test_recomputation_and_the_optimizer_are_causes_of_their_own_whatever_kernels_they_run() -> None:
    rows = [span(COMPUTE, place, place + 1, name=MATMUL, phase=place) for place in range(3)]
    causes = causes_of(step_of(rows, 3.0), 0, Floor(0.5))
    assert (causes.gemm_inefficiency_s, causes.recomputation_s, causes.optimizer_s) == (0.5, 1.0, 1.0)


def test_a_floor_above_what_was_measured_is_lowered() -> None:
    causes = causes_of(two_ranks(), 1, Floor(4.0, 0.5))
    assert (causes.model_flops_at_peak_s, causes.gemm_inefficiency_s) == (3.5, 0.0)
    assert causes.total_s == pytest.approx(7.0)


@given(st.lists(st.tuples(*(st.integers(0, 2**16) for _ in range(6))), min_size=1, max_size=40))
def test_causes_sum_to_the_step_and_waits_are_split_from_communication(numbers: list[tuple[int, ...]]) -> None:
    rows = []
    for kind, start, length, stream, axis, name in numbers:
        start_s = (start % 100) / 10
        rows.append(
            span(
                SpanKind(kind % 5),
                start_s,
                start_s + (length % 30) / 10,
                rank=kind // 5 % 2,
                stream=stream % 3 - 1,
                axis=axis % len(AXES),
                phase=axis // 4 % 3,
                name=name % 3,
            )
        )
    # Operations of the default stream follow one another, and end with the step.
    free_s = [0.0, 0.0]
    for row in sorted(rows, key=lambda row: row["start_s"]):
        if row["stream"] == 0:
            row["start_s"] = max(row["start_s"], free_s[int(row["rank"])])
            row["end_s"] = max(row["end_s"], row["start_s"])
            free_s[int(row["rank"])] = row["end_s"]
        row["start_s"], row["end_s"] = min(row["start_s"], 10.0), min(row["end_s"], 10.0)
    timeline = step_of(rows, 10.0, 2)
    split, waits_s = seconds_and_waits(timeline)
    whole = seconds_by_rank(timeline)
    assert np.all(split <= whole + 1e-9)
    assert split.sum(axis=1) + waits_s == pytest.approx(whole.sum(axis=1))
    for rank in timeline.ranks:
        assert causes_of(timeline, rank, Floor(0.3, 0.1)).total_s == pytest.approx(10.0)


def waterfall(**changes: object) -> Waterfall:
    measured = StepDecomposition(model_flops_at_peak_s=1.0, gemm_inefficiency_s=2.0, stragglers_s=1e-6)
    predicted = StepDecomposition(
        model_flops_at_peak_s=1.0, gemm_inefficiency_s=0.5, tile_and_wave_quantization_s=0.25, repeated_backward_s=0.125
    )
    fields = {"measured": measured, "predicted": predicted, "source": "profile", "measured_s": 2.5, "timed": "step 4"}
    return Waterfall.model_validate(fields | changes)


def test_rows_have_what_all_columns_distinguish_and_no_trifles() -> None:
    rows = {row.words: dict(row.by_column_s) for row in waterfall().rows}
    assert rows == {
        "model FLOPs at peak": {"predicted": 1.0, "measured": 1.0},
        "GEMM inefficiency": {"predicted": 0.875, "measured": 2.0},
    }
    assert waterfall().profiling_s == pytest.approx(0.500001)
    assert Waterfall.from_json(waterfall().to_json()) == waterfall()


def test_without_a_floor_kernels_are_named_whole() -> None:
    found = waterfall(predicted=None, measured=StepDecomposition(model_flops_at_peak_s=0.0, gemm_inefficiency_s=2.0))
    assert [row.words for row in found.rows] == ["matmuls"]


def test_timers_know_the_wait_for_data_alone() -> None:
    assert timed_parts(2.0, 0.5).to_dict() == {"compute_s": 1.5, "data_loading_s": 0.5}
    assert timed_parts(2.0, math.nan).to_dict() == {"compute_s": 2.0}


def test_a_change_counts_only_above_the_error_of_the_formulas() -> None:
    one = BestChange(change="layout.tp=2", step_s=0.9, saved_s=0.1, error_s=0.15)
    assert not one.is_significant
    assert one.replace(error_s=0.05).is_significant
