"""trace(): the real program of one rank, run on fake tensors in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from meshwright.errors import UnsupportedError
from meshwright.spec.trace import Trace

_TIMEOUT_S = 1800.0

DeviceType = Literal["simgpu", "cpu"]
"""What a step is traced on: an accelerator with streams, or a processor, where the host itself computes."""


def trace(
    build: str, rank: int, world_size: int, arguments: Sequence[str] = (), device: DeviceType = "simgpu"
) -> Trace:
    """Return the second step of rank `rank` of `world_size`.

    `build` names a builder, as module:function, that takes (device, rank, world_size, *arguments) and returns a step,
    which takes nothing. Raises UnsupportedError with what the program said where it cannot be traced.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace.npz"
        order = {
            "build": build,
            "rank": rank,
            "world_size": world_size,
            "arguments": [*arguments],
            "device": device,
            "out": str(out),
        }
        command = [sys.executable, "-m", "meshwright.tracer.rank_process", json.dumps(order)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise UnsupportedError(f"rank {rank} of {world_size} of {build} cannot be traced:\n{done.stderr[-3000:]}")
        return Trace.load(out)
