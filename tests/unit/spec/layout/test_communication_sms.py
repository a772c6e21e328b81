"""A limit on the SMs of communication is a number that the device can spare."""

import pytest

from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import load_device
from meshwright.spec.layout.communication_sms import communication_sms_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout


@pytest.mark.parametrize(
    ("limit", "device", "said"),
    [
        (131, "h100-sxm", ""),
        (132, "h100-sxm", "layout.communication_sms = 132: must be less than the 132 SMs of h100-sxm"),
        (16, "mi300x", "layout.communication_sms = 16 limits NCCL's kernels, and mi300x is a device of amd"),
        (999, "cpu-local", ""),
        (None, "mi300x", ""),
    ],
)
def test_what_a_device_cannot_spare_is_said_with_a_way_out(limit: int | None, device: str, said: str) -> None:
    found = list(communication_sms_problems(Layout(communication_sms=limit), load_device(device)))
    assert len(found) == bool(said)
    assert all(str(one).startswith(said) and one.fixes == ({"layout.communication_sms": None},) for one in found)


@pytest.mark.parametrize("limit", [0, -4])
def test_no_sms_are_no_limit(limit: int) -> None:
    with pytest.raises(ConfigError, match="communication_sms"):
        parse_layout(f"communication_sms={limit}")
