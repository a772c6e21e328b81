"""Which limits on the SMs of communication a device takes (layout.communication_sms)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.device import Device
from meshwright.spec.problem import Problem

_KEY = "layout.communication_sms"


def communication_sms_problems(layout: Layout, device: Device) -> Iterator[Problem]:
    """Yield why the catalogue's `device` cannot limit the SMs of communication as `layout` asks."""
    limit = layout.communication_sms
    if limit is None or device.torch_type == "cpu":  # gloo has no kernels to limit
        return
    if device.vendor != "nvidia":
        yield Problem(
            f"{_KEY} = {limit} limits NCCL's kernels, and {device.name} is a device of {device.vendor}", [{_KEY: None}]
        )
    elif device.num_sms is not None and limit >= device.num_sms.value:
        yield Problem(
            f"{_KEY} = {limit}: must be less than the {device.num_sms.value:.0f} SMs of {device.name}, which compute, "
            "too",
            [{_KEY: None}],
        )
