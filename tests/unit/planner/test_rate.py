"""The peak of a precision on a device, and what to do where it is unknown."""

from __future__ import annotations

from meshwright.hardware.catalogue import load_device
from meshwright.planner.request import dense_peak, rate_problem
from meshwright.spec.machine.device import MatmulRates

A100 = load_device("a100-sxm-80gb")


def test_both_16_bit_formats_have_one_rate() -> None:
    rates = A100.dense_flops_per_s
    assert rates.bfloat16 is not None
    without = A100.replace(dense_flops_per_s=rates.replace(float16=None))
    assert dense_peak(without, "float16") == rates.bfloat16.value
    assert rate_problem(without, "float16") is None
    assert dense_peak(A100, "float64") is None


def test_a_job_gets_a_key_as_advice_and_a_command_line_an_option() -> None:
    of_job, of_option = (rate_problem(A100, "float8-rowwise", is_option=is_option) for is_option in (False, True))
    assert of_job is not None
    assert of_option is not None
    assert 'precision.compute = "float8-rowwise" needs: set precision.compute to "float32"' in of_job
    assert "give --precision float32 or bfloat16" in of_option


def test_a_device_without_any_rate_asks_for_a_calibration() -> None:
    bare = A100.replace(dense_flops_per_s=MatmulRates(), measured_matmul_flops_per_s=MatmulRates())
    assert "`meshwright calibrate`" in str(rate_problem(bare, "bfloat16"))
