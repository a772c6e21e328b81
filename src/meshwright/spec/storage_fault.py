"""Kinds of faults of the storage of checkpoints: files that are damaged, and calls that fail or are slow."""

from typing import Final, Literal, get_args

DamageKind = Literal[
    "truncate",
    "flip-bit",
    "zero-page",
    "swap-shards",
    "shard-of-other-step",
    "missing-shard",
    "stale-metadata",
    "extra-file",
]
"""What happens to the newest checkpoint, after which the rank crashes: its data file is cut in half, has one bit
flipped, a page zeroed, is exchanged with the next rank's, replaced by that of the checkpoint before, or removed; the
index is that of the checkpoint before; or there is one file more, which harms nothing."""

DiskFaultKind = Literal["no-space", "io-error", "slow-disk"]
"""What a rank's calls on the files of a checkpoint do while it saves or restores: no-space fails all that need space
(ENOSPC) from the n-th call on until the save ends, io-error fails the n-th call (EIO), slow-disk delays each call."""

DAMAGES: Final[tuple[DamageKind, ...]] = get_args(DamageKind)
DISK_FAULTS: Final[tuple[DiskFaultKind, ...]] = get_args(DiskFaultKind)
HARMLESS_DAMAGES: Final[tuple[DamageKind, ...]] = ("extra-file",)
"""With these, the checkpoint is still whole and is loaded."""
DISK_PHASES: Final = ("checkpoint", "restore")
"""The phases in which a call on the disk can fail."""
