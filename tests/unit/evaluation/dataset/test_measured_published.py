"""The published runs that the project ships: nearly all of them are configs, and their steps are sums of causes."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import numpy as np
import pytest

from meshwright.cost.layout_table import layout_table
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from published import runs

pytestmark = pytest.mark.slow
"""The published runs are read and predicted first."""


@cache
def steps() -> StepTerms:
    """Return the steps of the runs that can be priced, together."""
    setups = tuple(run.setup for run in runs() if run.setup is not None)
    layouts = layout_table([run.layout for run in runs() if run.layout is not None])
    return step_times(Configurations(setups, np.arange(len(setups)), layouts))


def test_few_rows_cannot_be_priced_and_each_says_why() -> None:
    reasons = [run.unsupported_reason for run in runs() if not run.is_supported]
    assert len(reasons) <= 0.03 * len(runs())
    assert all(len(reason) > 10 for reason in reasons)


def test_degrees_multiply_to_the_devices() -> None:
    for run in runs():
        if run.layout is not None and run.setup is not None:
            assert run.layout.num_ranks == run.row.count("n_gpus") == run.setup.cluster.num_devices
            sequences = run.layout.dp * run.layout.microbatch_size
            assert run.setup.workload.global_batch_size % sequences == 0, run.row.id


def test_what_a_row_tells_is_not_overruled() -> None:
    for run in runs():
        if run.layout is None:
            continue
        for column in ("tp", "cp", "pp"):
            assert getattr(run.layout, column) == (run.row.count(column) or 1), run.row.id
        if run.row.count("micro_batch"):
            assert run.layout.microbatch_size == run.row.count("micro_batch"), run.row.id


def test_every_step_is_a_sum_of_causes_none_below_zero() -> None:
    total_s = steps().total_s
    assert np.isfinite(total_s).all()
    for field in fields(StepTerms):
        assert (getattr(steps(), field.name) >= -1e-9 * total_s).all(), field.name


def test_no_prediction_is_beyond_the_peak() -> None:
    share = steps().model_flops_at_peak_s / steps().total_s
    assert (share > 0.005).all()
    assert (share < 0.85).all()
