"""What examining checkpoints finds: damage, differences, tensors and their statistics, removals."""

from typing import Any

from meshwright.spec.frozen import Frozen


class Damage(Frozen):
    """One difference between a checkpoint's files and what was saved."""

    what: str
    """What differs."""
    file: str
    """Name of the file."""
    rank: int | None = None
    """The rank that wrote the file; None for the index."""
    tensor: str | None = None
    """The tensor that is affected, with the offsets of its shard; None for a whole file."""
    start: int | None = None
    """First damaged byte in the file; None where it is no range of bytes."""
    num_bytes: int | None = None
    """Size of the range."""


class CheckpointVerification(Frozen):
    """A checkpoint, every byte of which was read."""

    folder: str
    step: int | None
    num_bytes: int
    """Bytes of tensors that were read."""
    num_tensors: int
    num_shards: int
    num_ranks: int
    """Ranks that wrote files."""
    duration_s: float
    damages: list[Damage]
    """Empty for an intact checkpoint."""


class VerificationReport(Frozen):
    """Checkpoints that were verified."""

    checkpoints: list[CheckpointVerification]

    @property
    def is_intact(self) -> bool:
        """Return whether none of them is damaged."""
        return not any(one.damages for one in self.checkpoints)


class TensorChange(Frozen):
    """A tensor whose bits differ between two checkpoints."""

    name: str
    """Section and fully qualified name."""
    what: str
    """The change of dtype or shape; "values" where they are equal."""
    num_changed: int | None = None
    """Elements whose bits differ; None where dtype or shape differ."""
    num_elements: int | None = None
    max_difference: float | None = None
    """Largest absolute difference of finite elements; None where dtype or shape differ."""
    mean_difference: float | None = None
    """Mean absolute difference over all elements, without those whose difference is not finite."""


class MetadataChange(Frozen):
    """A value of the metadata that differs, by its dotted path."""

    key: str
    left: Any
    right: Any


class CheckpointDifference(Frozen):
    """How two checkpoints differ."""

    left: str
    right: str
    metadata: list[MetadataChange]
    added: list[str]
    """Tensors that only the right one has."""
    removed: list[str]
    """Tensors that only the left one has."""
    changed: list[TensorChange]
    num_equal: int
    """Tensors that are bitwise equal."""

    @property
    def is_bitwise_equal(self) -> bool:
        """Return whether both hold the same tensors with the same bits; metadata may differ."""
        return not (self.added or self.removed or self.changed)


class StoredTensorSummary(Frozen):
    """A tensor in a checkpoint."""

    name: str
    dtype: str
    shape: list[int]
    num_bytes: int
    num_shards: int


class StoredShardPlace(Frozen):
    """Where a shard of a tensor is stored."""

    rank: int
    offsets: list[int]
    """Index of its first element in the tensor, by dim."""
    shape: list[int]
    start: int
    """First byte in the rank's data file."""
    num_bytes: int


class TensorStatistics(Frozen):
    """Values of a tensor."""

    minimum: float | None
    """Smallest finite element; None where there is none."""
    maximum: float | None
    mean: float | None
    """Mean of the finite elements."""
    num_nan: int
    num_infinite: int
    num_zero: int
    num_elements: int


class CheckpointSummary(Frozen):
    """What a checkpoint holds."""

    folder: str
    format_version: int
    save_id: str
    versions: dict[str, str]
    """Versions of the software that saved it."""
    metadata: dict[str, Any]
    num_ranks: int
    """Ranks that wrote files."""
    num_bytes: int
    bytes_by_section: dict[str, int]
    bytes_by_dtype: dict[str, int]
    tensors: list[StoredTensorSummary]
    """By name."""


class TensorDetail(Frozen):
    """One tensor of a checkpoint."""

    folder: str
    tensor: StoredTensorSummary
    shards: list[StoredShardPlace]
    statistics: TensorStatistics


class Removal(Frozen):
    """A folder that garbage collection removes."""

    name: str
    reason: str
    num_bytes: int


class GarbageCollection(Frozen):
    """What garbage collection of a run removed, or would remove."""

    folder: str
    is_dry_run: bool
    removals: list[Removal]
    spared: list[Removal]
    """What was not removed, and why."""


class ReshardedCheckpoint(Frozen):
    """A checkpoint that was rewritten into files of another number of ranks."""

    source: str
    destination: str
    num_ranks_before: int
    num_ranks: int
    num_bytes: int
    num_shards: int
    duration_s: float
