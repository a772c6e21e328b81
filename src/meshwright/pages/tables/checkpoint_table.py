"""Checkpoints on the terminal: the list of a run, damage, and what a checkpoint holds."""

import json
from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError
from rich.console import RenderableType
from rich.markup import escape

from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.checkpoint_findings import (
    CheckpointDifference,
    CheckpointSummary,
    GarbageCollection,
    TensorDetail,
    VerificationReport,
)
from meshwright.spec.run.checkpoint_record import CheckpointListing
from meshwright.units import counted, format_bytes, format_count, format_duration

_STYLES = {"damaged": "bold red", "set aside": "red", "leftover": "yellow", "being written": "cyan"}
_MOST_DAMAGES = 20
_MOST_TENSORS = 12
_MOST_CHANGES = 20


def listing_page(listing: CheckpointListing) -> Iterator[RenderableType]:
    """Yield the parts of what `checkpoint ls` prints."""
    yield from _memory_lines(listing)
    if not listing.checkpoints:
        yield f"{escape(listing.folder)} has no checkpoint"
        return
    table = PageTable("step#", "state", "size#", "age#", "ranks#", "layout", "kept by")
    for one in listing.checkpoints:
        is_unkept = one.state == "complete" and not one.kept_because
        table.add_row(
            "-" if one.step is None else str(one.step),
            one.state,
            format_bytes(one.num_bytes),
            format_duration(one.age_s),
            "-" if one.num_ranks is None else str(one.num_ranks),
            escape(one.layout or "-"),
            ", ".join(one.kept_because) or ("nothing: gc removes it" if is_unkept else "-"),
            style=_STYLES.get(one.state),
        )
    yield table
    for one in listing.checkpoints:
        if one.problem is not None:
            yield f"- {escape(one.name)}: {escape(one.problem)}"
    yield f"[dim]{_rule_words(listing)}[/]"


def _memory_lines(listing: CheckpointListing) -> Iterator[str]:
    for one in listing.in_memory:
        steps = f"after step {', '.join(map(str, one.steps))}" if one.steps else "none complete"
        size, age = format_bytes(one.num_bytes), format_duration(one.age_s)
        state = "of a run that is gone: gc removes it" if one.state == "orphaned" else one.state
        yield f"copy in this machine's memory {steps}: {size}, {age} old, {state} ({escape(one.folder)})"


def _rule_words(listing: CheckpointListing) -> str:
    rule = listing.rule
    if rule is None:
        return "no run of a job: what stays here is up to the program that saves into it (keep)"
    words = [f"keep = {rule.keep} newest"]
    words += [f"keep_every = {rule.keep_every} steps"] if rule.keep_every else []
    words += [f"keep_best = {rule.keep_best} by validation loss"] if rule.keep_best else []
    return f"retention of the run: {', '.join(words)}; {'a' if listing.is_running else 'no'} process trains into it"


def verification_page(report: VerificationReport) -> Iterator[RenderableType]:
    """Yield the parts of what `checkpoint verify` prints."""
    for one in report.checkpoints:
        state = "[bold red]damaged[/]" if one.damages else "[green]intact[/]"
        amount = (
            f"{format_bytes(one.num_bytes)}, {counted(one.num_tensors, 'tensor')}, {counted(one.num_shards, 'shard')}"
        )
        ranks = counted(one.num_ranks, "rank")
        yield f"{escape(one.folder)}: {state}: {amount} of {ranks} read in {format_duration(one.duration_s)}"
        if not one.damages:
            continue
        table = PageTable("rank#", "file", "offset#", "size#", "tensor", "damage")
        for damage in one.damages[:_MOST_DAMAGES]:
            table.add_row(
                "-" if damage.rank is None else str(damage.rank),
                damage.file,
                "-" if damage.start is None else str(damage.start),
                "-" if damage.num_bytes is None else format_bytes(damage.num_bytes),
                escape(damage.tensor or "-"),
                escape(damage.what),
            )
        yield table
        if len(one.damages) > _MOST_DAMAGES:
            yield f"{len(one.damages) - _MOST_DAMAGES} more: --json has them all"


def summary_page(summary: CheckpointSummary) -> Iterator[RenderableType]:
    """Yield the parts of what `checkpoint inspect PATH` prints."""
    ranks = counted(summary.num_ranks, "rank")
    yield f"[bold]{escape(summary.folder)}[/]: {format_bytes(summary.num_bytes)} by {ranks}"
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    yield f"format {summary.format_version}, save {summary.save_id}{f', {versions}' if versions else ''}"
    yield ""
    metadata = PageTable("metadata", "value")
    for key, value in summary.metadata.items():
        metadata.add_row(escape(key), escape(_value_words(key, value)))
    yield metadata
    yield ""
    totals = PageTable("section or dtype", "size#")
    for name, num_bytes in (*summary.bytes_by_section.items(), *summary.bytes_by_dtype.items()):
        totals.add_row(escape(name), format_bytes(num_bytes))
    yield totals
    yield ""
    table = PageTable("largest tensors", "dtype", "shape", "size#", "shards#")
    largest = sorted(summary.tensors, key=lambda one: (-one.num_bytes, one.name))[:_MOST_TENSORS]
    for one in largest:
        shape = escape(str(one.shape))
        table.add_row(escape(one.name), one.dtype, shape, format_bytes(one.num_bytes), str(one.num_shards))
    yield table
    if len(summary.tensors) > len(largest):
        yield f"[dim]{len(summary.tensors) - len(largest)} more tensors: --json has them all[/]"


def _value_words(key: str, value: object) -> str:
    """Return a value of the metadata, a layout as commands take it."""
    if key == "layout" and isinstance(value, dict):
        with suppress(ValidationError):
            return layout_text(Layout.from_dict(value))
    return value if isinstance(value, str) else json.dumps(value)


def detail_page(detail: TensorDetail) -> Iterator[RenderableType]:
    """Yield the parts of what `checkpoint inspect PATH TENSOR` prints."""
    tensor, found = detail.tensor, detail.statistics
    yield (
        f"[bold]{escape(tensor.name)}[/]: {tensor.dtype} {escape(str(tensor.shape))}, "
        f"{format_count(found.num_elements)} elements, {format_bytes(tensor.num_bytes)}"
    )
    values = {"min": found.minimum, "max": found.maximum, "mean": found.mean}
    yield ", ".join(f"{name} {'-' if value is None else f'{value:.6g}'}" for name, value in values.items())
    yield f"{found.num_nan} NaN, {found.num_infinite} infinite, {found.num_zero} zero"
    yield ""
    table = PageTable("rank#", "offsets", "shape", "first byte#", "size#")
    for place in detail.shards:
        offsets, shape = escape(str(place.offsets)), escape(str(place.shape))
        table.add_row(str(place.rank), offsets, shape, str(place.start), format_bytes(place.num_bytes))
    yield table


def difference_page(found: CheckpointDifference) -> Iterator[RenderableType]:
    """Yield the parts of what `checkpoint diff` prints."""
    words = "[green]bitwise equal[/]" if found.is_bitwise_equal else "[bold]different[/]"
    yield f"{escape(found.left)} and {escape(found.right)}: {words}: {found.num_equal} tensors equal, " + (
        f"{len(found.changed)} changed, {len(found.added)} added, {len(found.removed)} removed"
    )
    if found.metadata:
        table = PageTable("metadata", "left", "right")
        for value in found.metadata:
            table.add_row(escape(value.key), escape(json.dumps(value.left)), escape(json.dumps(value.right)))
        yield table
    for name, kind in (*((name, "added") for name in found.added), *((name, "removed") for name in found.removed)):
        yield f"- {kind}: {escape(name)}"
    if not found.changed:
        return
    table = PageTable("tensor", "changed", "max difference#", "mean#")
    largest = sorted(
        found.changed, key=lambda one: float("-inf") if one.max_difference is None else -one.max_difference
    )
    for one in largest[:_MOST_CHANGES]:
        share = one.what if one.num_changed is None else f"{one.num_changed} of {one.num_elements}"
        values = ["-" if value is None else f"{value:.3g}" for value in (one.max_difference, one.mean_difference)]
        table.add_row(escape(one.name), escape(share), *values)
    yield table
    if len(found.changed) > _MOST_CHANGES:
        yield f"[dim]{len(found.changed) - _MOST_CHANGES} more changed tensors: --json has them all[/]"


def garbage_page(found: GarbageCollection) -> Iterator[RenderableType]:
    """Yield the parts of what `checkpoint gc` prints."""
    verb = "would remove" if found.is_dry_run else "removed"
    total = format_bytes(sum(one.num_bytes for one in found.removals))
    yield f"{escape(found.folder)}: {verb} {counted(len(found.removals), 'folder')}, {total}"
    for title, entries in (("to remove" if found.is_dry_run else "removed", found.removals), ("kept", found.spared)):
        if entries:
            table = PageTable(title, "size#", "reason")
            for one in entries:
                table.add_row(escape(one.name), format_bytes(one.num_bytes), escape(one.reason))
            yield table
