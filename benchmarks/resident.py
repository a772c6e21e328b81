"""Resident memory of processes, from /proc."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(field: str = "VmRSS", process: int | str = "self") -> int:
    """Return a field of /proc/PROCESS/status: VmRSS, the resident memory, or VmHWM, its peak."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Peak:
    """The peak of this process's resident memory above what it is now."""

    def __init__(self) -> None:
        # Starts the peak again (see proc(5)); ru_maxrss would hold that of the parent process.
        Path("/proc/self/clear_refs").write_text("5")
        self._before_bytes = resident_bytes()

    def above_start(self) -> int:
        """Return the bytes."""
        return resident_bytes("VmHWM") - self._before_bytes
