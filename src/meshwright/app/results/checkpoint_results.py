"""What `mw.checkpoints` returns: data types of examined checkpoints with their views."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from meshwright.app.results.result import Result
from meshwright.pages.tables.checkpoint_table import (
    detail_page,
    difference_page,
    garbage_page,
    listing_page,
    summary_page,
    verification_page,
)
from meshwright.spec.run.checkpoint_findings import (
    CheckpointDifference,
    CheckpointSummary,
    Damage,
    GarbageCollection,
    ReshardedCheckpoint,
    TensorDetail,
    VerificationReport,
)
from meshwright.spec.run.checkpoint_record import CheckpointListing
from meshwright.units import counted, format_bytes, format_duration


class CheckpointListingResult(Result, CheckpointListing):
    """The checkpoints of a run. Data frame: a row for each."""

    _page = listing_page

    def _summary(self) -> str:
        steps = [str(one.step) for one in self.checkpoints if one.state == "complete"]
        return f"Checkpoints {self.folder}: complete after {', '.join(steps) or 'no step'}"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.checkpoints]


class VerificationResult(Result, VerificationReport):
    """Checkpoints that were verified. Data frame: a row for each damage, and one for each intact checkpoint."""

    _page = verification_page

    def _summary(self) -> str:
        damaged = [str(one.step) for one in self.checkpoints if one.damages]
        state = f"damaged: {', '.join(damaged)}" if damaged else "intact"
        return f"Verification of {counted(len(self.checkpoints), 'checkpoint')}: {state}"

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for one in self.checkpoints:
            found = one.to_dict()
            damages = [damage.to_dict() for damage in one.damages] or [dict.fromkeys(Damage.model_fields)]
            # The size of a damaged range has the name of the checkpoint's.
            read = {"is_intact": not one.damages, "num_bytes_read": found.pop("num_bytes")}
            del found["damages"]
            rows += [{**found, **read, **damage} for damage in damages]
        return rows


class CheckpointSummaryResult(Result, CheckpointSummary):
    """What a checkpoint holds. Data frame: a row for each tensor."""

    _page = summary_page

    def _summary(self) -> str:
        size = format_bytes(self.num_bytes)
        return f"Checkpoint {self.folder}: {counted(len(self.tensors), 'tensor')}, {size}"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.tensors]


class TensorDetailResult(Result, TensorDetail):
    """One tensor of a checkpoint. Data frame: a row for each shard."""

    _page = detail_page

    def _summary(self) -> str:
        return f"Tensor {self.tensor.name}: {self.tensor.dtype} {self.tensor.shape}, {self.statistics.num_nan} NaN"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.shards]


class CheckpointDifferenceResult(Result, CheckpointDifference):
    """How two checkpoints differ. Data frame: a row for each changed tensor."""

    _page = difference_page

    def _summary(self) -> str:
        state = "bitwise equal" if self.is_bitwise_equal else f"{counted(len(self.changed), 'tensor')} changed"
        return f"Difference of {self.left} and {self.right}: {state}"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.changed]


class GarbageCollectionResult(Result, GarbageCollection):
    """What garbage collection removed. Data frame: a row for each folder."""

    _page = garbage_page

    def _summary(self) -> str:
        verb = "would remove" if self.is_dry_run else "removed"
        return f"Garbage of {self.folder}: {verb} {counted(len(self.removals), 'folder')}"

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.removals]


class ReshardedCheckpointResult(Result, ReshardedCheckpoint):
    """A checkpoint that was rewritten. Data frame: one row."""

    def _summary(self) -> str:
        return (
            f"Checkpoint {self.destination}: {counted(self.num_ranks_before, 'rank')} to "
            f"{counted(self.num_ranks, 'rank')}, {format_bytes(self.num_bytes)}"
        )

    def _page(self) -> Iterator[RenderableType]:
        yield escape(
            f"{self.source} -> {self.destination}: {counted(self.num_ranks_before, 'rank')} to "
            f"{counted(self.num_ranks, 'rank')}, {format_bytes(self.num_bytes)} in "
            f"{counted(self.num_shards, 'shard')}, {format_duration(self.duration_s)}; verified"
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [self.to_dict()]
