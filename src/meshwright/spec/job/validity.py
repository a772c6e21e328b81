"""What makes a concrete layout invalid for a job: told before any process starts, each with the field to change.

Only what follows from numbers: whether a class of the user's own can be split, and what devices there are, is known
when training starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.spec.job.size_rules import (
    both,
    divisors,
    either,
    expert_problems,
    head_exchange_problems,
    length_problems,
    nearest_of,
    tensor_problems,
)
from meshwright.spec.layout.layout import Layout, nearest_multiples
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems, stage_problems
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job


def layout_problems(job: Job, layout: Layout) -> list[str]:
    """Return why `layout` cannot run `job`, one sentence each; empty when it can."""
    return [
        *_batch_problems(job, layout),
        *split_problems(layout, _architecture(job), job.train.seq_len),
        *schedule_problems(layout, _num_microbatches(job, layout)),
    ]


def split_problems(layout: Layout, architecture: LlamaArchitecture | None, seq_len: int) -> list[str]:
    """Return why `layout` cannot split a model (None: not known before it is built), whatever the batch is."""
    tensor = [] if architecture is None else [*tensor_problems(layout, architecture, seq_len)]
    # A tp that is wrong anyhow is no reason to change the sequences.
    problems = [*_sequence_problems(layout.replace(tp=1) if tensor else layout, seq_len), *tensor]
    if architecture is not None:
        problems += head_exchange_problems(layout, architecture)
    num_layers = None if architecture is None else architecture.num_layers
    problems += [*expert_problems(layout, architecture), *_stage_problems(layout, num_layers)]
    problems += _checkpoint_problems(layout, num_layers)
    problems += [] if architecture is None else length_problems(architecture, seq_len)
    return [*problems, *_reshard_problems(layout), *_option_problems(layout)]


def _architecture(job: Job) -> LlamaArchitecture | None:
    """Return the sizes of the job's model; None for a class of the user's own, and where [model] itself is wrong."""
    try:
        return resolve_architecture(job.model)
    except MeshwrightError:
        return None


def _batch_problems(job: Job, layout: Layout) -> Iterator[str]:
    if job.batch_problems():
        return  # the batch is not what was meant
    try:
        job.num_microbatches(layout)
    except ConfigError as error:
        yield str(error)


def _num_microbatches(job: Job, layout: Layout) -> int:
    """Return the microbatches of a step; where the batch is not right, a number that any schedule runs."""
    if job.batch_problems() or [*_batch_problems(job, layout)]:
        return layout.num_stages
    return job.num_microbatches(layout)


def _sequence_problems(layout: Layout, seq_len: int) -> Iterator[str]:
    is_zigzag = layout.cp > 1 and layout.cp_method != "ulysses"
    divisor = math.lcm(2 * layout.cp if is_zigzag else 1, layout.cp * layout.tp)
    if seq_len % divisor:
        chunks = f' (two chunks a rank for cp_method = "{layout.cp_method}")' if is_zigzag else ""
        axes = [f"layout.cp = {layout.cp}{chunks}"] if layout.cp > 1 else []
        axes += [f"layout.tp = {layout.tp} (which splits the sequence between matmuls)"] if layout.tp > 1 else []
        yield (
            f"train.seq_len = {seq_len} does not divide by {divisor}, as it must for {both(axes)}: "
            f"set train.seq_len to {either(nearest_multiples(seq_len, divisor))}"
        )


def _stage_problems(layout: Layout, num_layers: int | None) -> Iterator[str]:
    """Yield what keeps a model of `num_layers` (None: not known yet) from being cut into the layout's stages."""
    boundaries = layout.stage_boundaries
    if layout.pp == 1:
        if boundaries:
            # As many ranks as the boundaries cut stages for, if that makes them right.
            deeper = _with_stages_of_schedule(layout.replace(pp=2))
            deeper = layout.replace(pp=max(2, (len(boundaries) + 1) // deeper.stages_per_rank))
            other = "" if [*_stage_problems(deeper, num_layers)] else f", or set layout.pp to {deeper.pp}"
            yield f"layout.stage_boundaries = {_shown(boundaries)} cut up a pipeline: leave it out{other}"
        return
    layout = _with_stages_of_schedule(layout)
    wanted = layout.num_stages - 1
    # The first stage can do with the embedding alone, the last one with the head; those between need a block.
    if num_layers is not None and wanted > num_layers + 1:
        yield (
            f"layout.pp = {layout.pp} x {layout.stages_per_rank} stages a rank are more than the model's num_layers = "
            f"{num_layers} fill: {_fewer_stages(layout, num_layers + 2)}"
        )
        return
    if boundaries is None:
        return
    is_ascending = all(first < second for first, second in pairwise(boundaries))
    is_within = num_layers is None or max(boundaries, default=0) <= num_layers
    if len(boundaries) == wanted and is_ascending and is_within:
        return
    most = "" if num_layers is None else f" and {num_layers} at most"
    example = "" if num_layers is None else f"set it to {_shown(_even(layout.num_stages, num_layers))}, or "
    yield (
        f"layout.stage_boundaries = {_shown(boundaries)} must be {wanted} block number{'s' if wanted > 1 else ''}, "
        f"ascending{most}, for layout.pp = {layout.pp} x {layout.stages_per_rank} stages a rank: {example}leave it out"
    )


def _with_stages_of_schedule(layout: Layout) -> Layout:
    """Return `layout` without a virtual_stages that its schedule does not take: that is no reason to change pp."""
    return layout.replace(virtual_stages=None) if [*stage_problems(layout)] else layout


def _fewer_stages(layout: Layout, most: int) -> str:
    """Return what to set so that there are `most` stages or fewer: those of a rank, if they are set, or the ranks."""
    values = {"virtual_stages": max(1, most // layout.pp), "pp": max(1, most // layout.stages_per_rank)}
    if layout.virtual_stages is None:
        del values["virtual_stages"]
    changed = {key: layout.replace(**{key: value}) for key, value in values.items()}
    ways = [
        f"layout.{key} to {values[key]}"
        for key, other in changed.items()
        if other.num_stages <= most and not [*stage_problems(other)]
    ]
    return f"set {', or '.join(ways) or 'layout.pp to 1 and layout.virtual_stages to 1'}"


def _even(num_stages: int, num_layers: int) -> tuple[int, ...]:
    """Return boundaries between stages of nearly equal numbers of blocks, none but the outer ones empty."""
    inner = tuple(number * num_layers // num_stages for number in range(1, num_stages))
    # With fewer blocks than stages, the first stage and perhaps the last go without.
    return inner if num_layers >= num_stages else tuple(range(num_stages - 1))


def _reshard_problems(layout: Layout) -> Iterator[str]:
    kept = layout.reshard_after_forward
    if layout.may_split_backward and kept not in ("auto", "never"):
        # The backward to the weights comes after other forwards, which would have freed what it reads.
        yield (
            f"layout.reshard_after_forward = {_shown(kept)} frees parameters that the split backward of "
            f'layout.schedule = "{layout.schedule}" still reads: set layout.reshard_after_forward to "never" or "auto"'
        )
    elif isinstance(kept, int) and layout.pp * layout.tp > 1:
        # FSDP2 makes the meshes of the groups from one rank's own group alone, and refuses parameters that tp has cut.
        others = both([f"layout.{axis} = {degree}" for axis in ("pp", "tp") if (degree := getattr(layout, axis)) > 1])
        yield (
            f"layout.reshard_after_forward = {kept} keeps parameters on groups of ranks, which torch cannot do with "
            f'{others}: set layout.reshard_after_forward to "always" or "auto"'
        )
    elif isinstance(kept, int) and (layout.fsdp % kept or not 1 < kept < layout.fsdp):
        groups = nearest_of(kept, (n for n in divisors(layout.fsdp) if 1 < n < layout.fsdp))
        yield (
            f"layout.reshard_after_forward = {kept} must divide layout.dp_shard x cp = {layout.fsdp} into groups of "
            f"several ranks: set layout.reshard_after_forward to {either([*groups, _shown('always')])}"
        )


def _checkpoint_problems(layout: Layout, num_layers: int | None) -> Iterator[str]:
    """Yield what is contradictory in what the blocks of a model of `num_layers` (None: not known yet) save."""
    kind, every, blocks = (
        layout.activation_checkpoint,
        layout.activation_checkpoint_every,
        layout.activation_checkpoint_blocks,
    )
    if blocks is not None and (kind, every) != ("none", 1):
        yield (
            f"layout.activation_checkpoint_blocks says what each block saves, but layout.activation_checkpoint = "
            f'"{kind}" and layout.activation_checkpoint_every = {every} say it, too: leave out the two, or '
            "layout.activation_checkpoint_blocks"
        )
    elif blocks is not None and num_layers is not None and len(blocks) != num_layers:
        yield (
            f"layout.activation_checkpoint_blocks names {len(blocks)} blocks of a model with num_layers = "
            f"{num_layers}: name {num_layers}, or leave it out"
        )
    elif every > 1 and kind in ("none", "auto"):
        yield (
            f"layout.activation_checkpoint_every = {every} has nothing to apply with "
            f'layout.activation_checkpoint = "{kind}": set layout.activation_checkpoint to "full" or "selective", or '
            "layout.activation_checkpoint_every to 1"
        )


def _option_problems(layout: Layout) -> Iterator[str]:
    if layout.async_tp:
        changes = [] if layout.tp > 1 else ["layout.tp to 2"]
        changes += [] if layout.compile else ["layout.compile to true"]
        changes += [] if layout.compile_backend == "inductor" else ['layout.compile_backend to "inductor"']
        if changes:
            yield (
                "layout.async_tp = true needs matmuls that are split and compiled, but layout.tp = "
                f"{layout.tp}, layout.compile = {_shown(layout.compile)} and layout.compile_backend = "
                f"{_shown(layout.compile_backend)}: set {both(changes)}, or layout.async_tp to false"
            )


def _shown(value: object) -> str:
    """Return a value as a job file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)
