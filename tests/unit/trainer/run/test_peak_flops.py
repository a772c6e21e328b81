"""The log's MFU is a share of the peak that a plan's is of."""

import pytest
import torch

from meshwright.hardware.catalogue import load_device
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.peak_flops import PeakFlops


@pytest.mark.parametrize(("float8", "dtype"), [("none", "bfloat16"), ("tensorwise", "float8"), ("rowwise", "float8")])
def test_the_peak_is_of_the_matmuls_format(float8: str, dtype: str) -> None:
    precision = {"compute": "bfloat16", "float8": float8}
    job = Job.from_dict({"precision": precision, "cluster": {"device": "h100-sxm"}})
    found = PeakFlops.of(job, Ranks(0, 2, torch.device("cpu")))
    peak = load_device("h100-sxm").peak_flops_per_s(dtype)
    assert peak is not None
    assert found.peak_flops_per_s == 2 * peak
    assert found.peak_name is not None
    assert found.peak_name.endswith(f"FLOP/s {dtype}")
