"""What `meshwright check` says of checkpoint.memory_dir on this machine; needs no torch."""

from collections.abc import Iterator

from meshwright.checkpoint.memory.memory_folder import memory_parent
from meshwright.hardware.machine import file_system_of, free_disk_bytes, nearest_existing
from meshwright.units import format_bytes


def memory_dir_notes(memory_dir: str, state_bytes: int) -> Iterator[str]:
    """Yield what speaks against copies of a state of so many bytes (0: not known) in this folder."""
    parent = nearest_existing(memory_parent(memory_dir))
    given = f"checkpoint.memory_dir = {memory_dir!r}"
    if (kind := file_system_of(parent)) not in ("tmpfs", "ramfs", None):
        yield f"{given} is on a file system of type {kind}, where copies are slower than in memory, as /dev/shm is"
    # The copy before a new one is kept until that is complete.
    needed, free = 2 * state_bytes, free_disk_bytes(parent)
    if free < needed:
        yield (
            f"{given} has {format_bytes(free)} free, and two copies of the state take {format_bytes(needed)}: "
            "without memory for them checkpoints are on disk only"
        )
