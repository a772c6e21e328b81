"""Watched steps: every operator has its sample, and samples that lie on a line become that line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.calibrator.op_lines import exchange_line, fitted_lines
from meshwright.calibrator.profiled_step import OpSample, ProfiledStep, profiled_step
from meshwright.calibrator.step_jobs import step_jobs, whole_jobs, without_hooks
from meshwright.spec.trace.trace import Signature, TensorShape

SIZES = (2**14, 2**17, 2**20)


def added(num_elements: int, seconds: float, op: str = "aten.add.Tensor") -> OpSample:
    shape, num_bytes = TensorShape(dtype="float32", dims=(num_elements,)), 4 * num_elements
    signature = Signature(op=op, inputs=(shape, shape), outputs=(shape,), read_bytes=2 * num_bytes)
    return OpSample(signature.replace(written_bytes=num_bytes), 10, seconds)


@pytest.mark.slow
@given(st.floats(1e-5, 1e-3), st.floats(1e-11, 1e-9))
def test_samples_on_a_line_become_it(start_s: float, s_per_byte: float) -> None:
    samples = [added(size, start_s + s_per_byte * 12 * size) for size in SIZES]
    line = fitted_lines(samples)["aten.add.Tensor", "float32"]
    assert line == pytest.approx((start_s, s_per_byte, 0.0), rel=1e-3)


@given(st.lists(st.floats(1e-7, 1e-2), min_size=3, max_size=3))
def test_no_line_ever_falls(seconds: list[float]) -> None:
    samples = [added(size, took_s) for size, took_s in zip(SIZES, seconds, strict=True)]
    line = fitted_lines(samples)["aten.add.Tensor", "float32"]
    assert line[0] > 0
    assert line[1] >= 0


def test_what_was_met_in_small_tensors_only_takes_the_usual_rate() -> None:
    large = [added(size, 1e-5 + 1e-10 * 12 * size) for size in SIZES]
    small = added(4, 3e-5, "aten.div.Tensor")
    lines = fitted_lines([*large, small])
    assert lines["aten.div.Tensor", "float32"] == pytest.approx((3e-5, 1e-10, 0.0), rel=1e-3)


@given(st.floats(1e-5, 1e-2), st.floats(1e-11, 1e-8))
def test_exchanges_on_a_line_become_it(one_s: float, s_per_byte: float) -> None:
    steps = [
        ProfiledStep([], n, size, n * one_s + size * s_per_byte) for n, size in ((10, 10**5), (40, 10**8), (9, 10**7))
    ]
    assert exchange_line(steps) == pytest.approx((one_s, s_per_byte), rel=1e-3)


def test_a_watched_step_has_a_sample_of_every_operator() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def step() -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    samples = {sample.signature.op: sample for sample in profiled_step(step, 2).ops}
    assert {"aten.addmm.default", "aten.mm.default", "aten.sum.default"} <= samples.keys()
    # Views ask nothing of anybody.
    assert not {"aten.t.default", "aten.expand.default"} & samples.keys()
    addmm = samples["aten.addmm.default"]
    assert (addmm.count, addmm.signature.read_bytes, addmm.signature.written_bytes) == (1, 4 * (8 + 32 + 64), 128)
    assert all(sample.mean_s > 0 for sample in samples.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_job_that_is_watched_is_valid(num_ranks: int) -> None:
    jobs = list(step_jobs(num_ranks))
    for job in (*jobs, *whole_jobs(jobs, num_ranks)):
        assert job.problems() == []
        assert job.num_microbatches(job.layout.resolve(num_ranks)) == 2


def test_what_hooks_take_before_operators_counts_with_the_collectives() -> None:
    of_fsdp, shared = added(8, 5e-5, "fsdp.chunk_cat.default"), added(16, 3e-5)
    sharded = ProfiledStep([shared, of_fsdp], 4, 100, 1e-3)
    whole = ProfiledStep([added(16, 1e-5), added(32, 2e-5)], 1, 8, 0.0)
    apart = without_hooks(sharded, whole)
    seconds = {sample.signature: sample.mean_s for sample in apart.ops}
    assert seconds[shared.signature] == 1e-5
    assert seconds[of_fsdp.signature] == 5e-5
    assert seconds[added(32, 0.0).signature] == 2e-5
    # Ten calls of the operator both have.
    assert apart.exchanges_s == pytest.approx(1e-3 + 10 * 2e-5)
    assert (apart.num_exchanges, apart.exchanged_bytes) == (4, 100)
