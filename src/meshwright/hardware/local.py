"""The cluster "local": this machine as the operating system describes it, for runs on its processors over gloo."""

from __future__ import annotations

from datetime import UTC, datetime

from meshwright.hardware.machine import num_usable_cores, usable_memory_bytes
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import Device
from meshwright.spec.machine.figure import Figure, Source

LOCAL = "local"
UNMEASURED = "cpu"
"""The device of "local" without a calibration."""
CALIBRATED = "cpu-local"
"""What `meshwright calibrate` calls this machine's processor; what ships under that name is an example of one."""


def local_cluster() -> Cluster:
    """Return this machine as a cluster of one device per usable core, all sharing its memory.

    Its rates and links are None: the system does not report them, and this machine is not calibrated.
    """
    source = Source(
        title="the operating system of this machine",
        date=datetime.now(UTC).date().isoformat(),
        kind="measured",
    )
    num_cores = num_usable_cores()
    device = Device(
        name=UNMEASURED,
        title="one process of this machine's processor",
        vendor="any",
        memory_bytes=Figure(
            value=float(usable_memory_bytes()), source=source, note="the whole machine's, shared by all of its ranks"
        ),
    )
    return Cluster(
        name=LOCAL,
        title="this machine, one rank per core over gloo",
        device=device,
        num_devices=num_cores,
        devices_per_node=num_cores,
        source=source,
    )
