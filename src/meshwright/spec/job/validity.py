"""Rules that a layout must satisfy for a job, checked before any process starts; violations name the field to change.

Only what follows from numbers: whether a class of the user's own can be split, and what devices there are, is known
when training starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from meshwright.errors import MeshwrightError
from meshwright.spec.job.even_layouts import even_layouts
from meshwright.spec.job.guards_section import replica_problems
from meshwright.spec.job.rules.adapter_rules import adapter_layout_problems, packed_block_problems
from meshwright.spec.job.rules.attention_rules import attention_problems
from meshwright.spec.job.rules.compile_rules import (
    compiled_optimizer_problems,
    model_graph_layout_problems,
    model_graph_problems,
)
from meshwright.spec.job.rules.cuda_graph_rules import cuda_graph_layout_problems, cuda_graph_problems
from meshwright.spec.job.rules.dpo_rules import dpo_layout_problems
from meshwright.spec.job.rules.exact_rules import exact_layout_problems
from meshwright.spec.job.rules.float8_rules import float8_problems
from meshwright.spec.job.rules.memory_rules import memory_problems
from meshwright.spec.job.rules.optimizer_rules import block_problems, update_problems
from meshwright.spec.job.rules.size_rules import (
    both,
    divisors,
    expert_problems,
    head_exchange_problems,
    length_problems,
    ring_problems,
    tensor_problems,
)
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems, stage_problems
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.problem import Fix, Problem, multiples_near, nearest_first, shown_value, with_working_fixes

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job


_LAYOUT = "layout."
_DEGREES = frozenset(f"{_LAYOUT}{axis}" for axis in AXES)
_MAX_TRIED = 64
"""Numbers of stages that are tried, from the largest down."""
_BOUNDARIES, _BLOCKS = "layout.stage_boundaries", "layout.activation_checkpoint_blocks"


def layout_problems(job: Job, layout: Layout) -> list[Problem]:
    """Return why `layout` cannot run `job`, one sentence each; empty when it can. What is suggested works."""

    def left(fix: Fix) -> list[Problem]:
        changed = with_fix(job, {key: value for key, value in fix.items() if not key.startswith(_LAYOUT)})
        keys = {key.removeprefix(_LAYOUT): value for key, value in fix.items() if key.startswith(_LAYOUT)}
        return broken_rules(changed, layout.replace(**keys))

    return with_working_fixes(broken_rules(job, layout), left)


def attention_device_problem(job: Job, layout: Layout, device_type: str) -> Problem | None:
    """Return why `layout` cannot compute the attention of `job` on "cpu", or on CUDA; None if it can.

    Any other type of torch is taken for CUDA: a traced rank has an accelerator of its own.
    """
    on_device = job.replace(run=job.run.replace(device="cpu" if device_type == "cpu" else "cuda"))
    found = layout_problems(on_device, layout)
    return next((problem for problem in found if problem.subject == "layout.attention_backend"), None)


def broken_rules(job: Job, layout: Layout) -> list[Problem]:
    """Return why `layout` cannot run `job`, with all changes that could follow each rule, none of them tried."""
    batch = [*_batch_problems(job, layout)]
    split = split_problems(layout, _architecture(job), job.train.seq_len)
    # Where the batch or the stages are wrong, so is the number of microbatches that each has: one that always runs.
    is_counted = not (job.batch_problems() or batch or any(problem.subject == "layout.pp" for problem in split))
    num_microbatches = job.num_microbatches(layout) if is_counted else layout.num_stages
    of_optimizer = [*update_problems(job.optimizer, layout, num_microbatches if is_counted else 1)]
    if (architecture := _architecture(job)) is not None:
        of_optimizer += block_problems(job.optimizer, layout, architecture)
        of_optimizer += packed_block_problems(job.adapter, layout, architecture)
    schedule = schedule_problems(layout, num_microbatches, job.batch_key)
    float8 = job.precision.float8
    of_model = [
        *attention_problems(job, layout, _architecture(job)),
        *model_graph_problems(float8, job.optimizer, layout),
    ]
    of_model += [
        *compiled_optimizer_problems(job.optimizer, layout),
        *cuda_graph_problems(float8, job.optimizer, layout),
    ]
    of_model += [*memory_problems(job.memory, job.optimizer, layout), *_own_model_problems(job.model, layout)]
    of_model += exact_layout_problems(layout, sums_exactly=job.train.exact_elastic)
    of_model += [*replica_problems(job.guards, layout), *adapter_layout_problems(job.adapter, layout)]
    of_model += dpo_layout_problems(job, layout)
    return [*batch, *split, *schedule, *float8_problems(job, layout), *of_optimizer, *of_model]


def has_wrong_degree(problems: Iterable[str]) -> bool:
    """Return whether a degree does not suit the model: then the ranks and the batch of each rank are not known."""
    return any(isinstance(one, Problem) and one.subject in _DEGREES for one in problems)


def with_fix(job: Job, fix: Fix) -> Job:
    """Return `job` with the keys of `fix` set; raises ValidationError for a value that its key does not take."""
    for key, value in fix.items():
        section, name = key.split(".")
        part = getattr(job, section)
        given = {name: getattr(part, name) for name in part.model_fields_set} | {name: value}
        changed = {name: one for name, one in given.items() if one is not None}
        job = job.replace(**{section: type(part).model_validate(changed)})
    return job


def split_problems(layout: Layout, architecture: LlamaArchitecture | None, seq_len: int) -> list[Problem]:
    """Return why `layout` cannot split a model (None: not known before it is built), whatever the batch is."""
    tensor = [] if architecture is None else [*tensor_problems(layout, architecture, seq_len)]
    # A tp that is wrong anyhow is no reason to change the sequences.
    problems = [*_sequence_problems(layout.replace(tp=1) if tensor else layout, seq_len), *tensor]
    if architecture is not None:
        problems += [*head_exchange_problems(layout, architecture), *ring_problems(layout, architecture)]
    num_layers = None if architecture is None else architecture.num_layers
    problems += [*expert_problems(layout, architecture, knows_tp=not tensor), *_stage_problems(layout, num_layers)]
    problems += _checkpoint_problems(layout, num_layers)
    problems += [] if architecture is None else length_problems(architecture, seq_len)
    has_experts = isinstance(architecture, MoEArchitecture)
    problems += model_graph_layout_problems(layout, has_experts=has_experts)
    problems += cuda_graph_layout_problems(layout, has_experts=has_experts)
    return [*problems, *_reshard_problems(layout), *_option_problems(layout), *_loss_problems(layout, seq_len)]


def _architecture(job: Job) -> LlamaArchitecture | None:
    """Return the sizes of the job's model; None for a class of the user's own, and where [model] itself is wrong."""
    try:
        return resolve_architecture(job.model)
    except MeshwrightError:
        return None


def _batch_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    if job.batch_problems():
        return  # the batch is not what was meant
    if (problem := job.uneven_batch(layout)) is not None:
        yield Problem(problem.what, [*problem.fixes, *even_layouts(job.layout, layout, job.global_batch_size)])


def _sequence_problems(layout: Layout, seq_len: int) -> Iterator[Problem]:
    is_zigzag = layout.cp > 1 and layout.cp_method != "ulysses"
    divisor = math.lcm(2 * layout.cp if is_zigzag else 1, layout.cp * layout.tp)
    if seq_len % divisor:
        chunks = f' (two chunks a rank for cp_method = "{layout.cp_method}")' if is_zigzag else ""
        axes = [f"layout.cp = {layout.cp}{chunks}"] if layout.cp > 1 else []
        axes += [f"layout.tp = {layout.tp} (which splits the sequence between matmuls)"] if layout.tp > 1 else []
        yield Problem(
            f"train.seq_len = {seq_len} does not divide by {divisor}, as it must for {both(axes)}",
            [{"train.seq_len": multiple} for multiple in multiples_near(seq_len, divisor)],
            otherwise="change train.seq_len or the degrees",
        )


def _stage_problems(layout: Layout, num_layers: int | None) -> Iterator[Problem]:
    """Yield what keeps a model of `num_layers` (None: not known yet) from being cut into the layout's stages."""
    boundaries = layout.stage_boundaries
    if layout.pp == 1:
        if boundaries:
            # As many ranks as the boundaries cut stages for, if that makes them right.
            deeper = _with_stages_of_schedule(layout.replace(pp=2))
            deeper = layout.replace(pp=max(2, (len(boundaries) + 1) // deeper.stages_per_rank))
            fixes: list[Fix] = [{_BOUNDARIES: None}]
            fixes += [] if [*_stage_problems(deeper, num_layers)] else [{"layout.pp": deeper.pp}]
            yield Problem(f"layout.stage_boundaries = {shown_value(boundaries)} cut up a pipeline", fixes)
        return
    layout = _with_stages_of_schedule(layout)
    wanted = layout.num_stages - 1
    # The first stage can do with the embedding alone, the last one with the head; those between need a block.
    if num_layers is not None and wanted > num_layers + 1:
        yield Problem(
            f"layout.pp = {layout.pp} x {layout.stages_per_rank} stages a rank are {layout.num_stages} stages, but the "
            f"model's num_layers = {num_layers} fill {num_layers + 2} at most, with the embedding and the head alone "
            "in the first and the last",
            islice(_fewer_stages(layout, num_layers), _MAX_TRIED),
            most=1,
        )
        return
    if boundaries is None:
        return
    is_ascending = all(first < second for first, second in pairwise(boundaries))
    is_within = num_layers is None or max(boundaries, default=0) <= num_layers
    if len(boundaries) == wanted and is_ascending and is_within:
        return
    most = "" if num_layers is None else f" and {num_layers} at most"
    fixes = [] if num_layers is None else [{_BOUNDARIES: _even(layout.num_stages, num_layers)}]
    yield Problem(
        f"layout.stage_boundaries = {shown_value(boundaries)} must be {wanted} block number{'s' * (wanted > 1)}, "
        f"ascending{most}, for layout.pp = {layout.pp} x {layout.stages_per_rank} stages a rank",
        [*fixes, {_BOUNDARIES: None}],
    )


def _with_stages_of_schedule(layout: Layout) -> Layout:
    """Return `layout` without a virtual_stages that its schedule does not take: that is no reason to change pp."""
    return layout.replace(virtual_stages=None) if [*stage_problems(layout)] else layout


def _fewer_stages(layout: Layout, num_layers: int) -> Iterator[Fix]:
    """Yield what to set so that no stage is without a block: the stages of a rank, if they are set, or the ranks."""
    if layout.virtual_stages is not None:
        yield from ({"layout.virtual_stages": number} for number in range(max(1, num_layers // layout.pp), 0, -1))
    most = max(1, num_layers // layout.stages_per_rank)
    # Parts of the given degree first: the same number of ranks divides by them.
    degrees = [number for number in reversed(divisors(layout.pp)) if number <= most]
    yield from (
        {"layout.pp": number} for number in dict.fromkeys([*degrees, *range(most, max(0, most - _MAX_TRIED), -1)])
    )
    if layout.virtual_stages is not None and layout.pp > num_layers:
        yield {"layout.pp": 1, "layout.virtual_stages": 1}


def _even(num_stages: int, num_layers: int) -> tuple[int, ...]:
    """Return boundaries between stages of nearly equal numbers of blocks, none but the outer ones empty."""
    inner = tuple(number * num_layers // num_stages for number in range(1, num_stages))
    # With fewer blocks than stages, the first stage and perhaps the last go without.
    return inner if num_layers >= num_stages else tuple(range(num_stages - 1))


def _reshard_problems(layout: Layout) -> Iterator[Problem]:
    key, kept = "layout.reshard_after_forward", layout.reshard_after_forward
    if layout.may_split_backward and kept not in ("auto", "never"):
        # The backward to the weights comes after other forwards, which would have freed what it reads.
        yield Problem(
            f"{key} = {shown_value(kept)} frees parameters that the split backward of "
            f'layout.schedule = "{layout.schedule}" still reads',
            [{key: "never"}, {key: "auto"}],
        )
    elif isinstance(kept, int) and layout.pp * layout.tp > 1:
        # FSDP2 makes the meshes of the groups from one rank's own group alone, and refuses parameters that tp has cut.
        others = both([f"layout.{axis} = {degree}" for axis in ("pp", "tp") if (degree := getattr(layout, axis)) > 1])
        yield Problem(
            f"{key} = {kept} keeps parameters on groups of ranks, which torch cannot do with {others}",
            [{key: "always"}, {key: "auto"}],
        )
    elif isinstance(kept, int) and (layout.fsdp % kept or not 1 < kept < layout.fsdp):
        groups = nearest_first(kept, (n for n in divisors(layout.fsdp) if 1 < n < layout.fsdp))
        yield Problem(
            f"{key} = {kept} must divide layout.dp_shard x cp = {layout.fsdp} into groups of several ranks",
            [{key: choice} for choice in (*islice(groups, 2), "always")],
            most=3,
        )


def _checkpoint_problems(layout: Layout, num_layers: int | None) -> Iterator[Problem]:
    """Yield what is contradictory in what the blocks of a model of `num_layers` (None: not known yet) save."""
    kind, every, blocks = (
        layout.activation_checkpoint,
        layout.activation_checkpoint_every,
        layout.activation_checkpoint_blocks,
    )
    if blocks is not None and (kind, every) != ("none", 1):
        yield Problem(
            f"{_BLOCKS} says what each block saves, but layout.activation_checkpoint = "
            f'"{kind}" and layout.activation_checkpoint_every = {every} say it, too',
            [{_BLOCKS: None}, {"layout.activation_checkpoint": "none", "layout.activation_checkpoint_every": 1}],
        )
    elif blocks is not None and num_layers is not None and len(blocks) != num_layers:
        yield Problem(
            f"{_BLOCKS} names {len(blocks)} blocks of a model with num_layers = {num_layers}",
            [{_BLOCKS: None}],
            after=f", or name {num_layers}",
        )
    elif every > 1 and kind in ("none", "auto"):
        yield Problem(
            f"layout.activation_checkpoint_every = {every} has nothing to apply with layout.activation_checkpoint = "
            f'"{kind}"',
            [
                {"layout.activation_checkpoint": "full"},
                {"layout.activation_checkpoint": "selective"},
                {"layout.activation_checkpoint_every": 1},
            ],
        )
    elif kind == "auto" and layout.activation_offload:
        yield Problem(
            'layout.activation_checkpoint = "auto" recomputes what the device alone cannot hold, but '
            "layout.activation_offload = true moves it to the host",
            [
                {"layout.activation_checkpoint": "full"},
                {"layout.activation_checkpoint": "none"},
                {"layout.activation_offload": False},
            ],
        )


def _own_model_problems(section: ModelSection, layout: Layout) -> Iterator[Problem]:
    """Yield what of `layout` is chosen before a class of the user's own is built, whose blocks are unknown then."""
    key = "layout.activation_checkpoint"
    if layout.activation_checkpoint == "auto" and is_object_source(section.source):
        yield Problem(
            f'{key} = "auto" needs to know how many blocks a model has, and model.source = "{section.source}" is your '
            "own",
            [{key: "none"}, {key: "selective"}, {key: "full"}],
            after=f", or say of each block what it saves in {_BLOCKS}",
            most=3,
        )


def _loss_problems(layout: Layout, seq_len: int) -> Iterator[Problem]:
    num_tokens = layout.microbatch_size * seq_len // layout.cp
    if layout.loss_chunks > max(1, num_tokens):
        yield Problem(
            f"layout.loss_chunks = {layout.loss_chunks} are more chunks than the {num_tokens} tokens that a rank has "
            "of a microbatch",
            [{"layout.loss_chunks": max(1, num_tokens)}, {"layout.loss_chunks": 1}],
        )


def _option_problems(layout: Layout) -> Iterator[Problem]:
    if not layout.async_tp:
        return
    changes: Fix = {} if layout.tp > 1 else {"layout.tp": 2}
    changes |= {} if layout.compile else {"layout.compile": True}
    changes |= {} if layout.compile_backend == "inductor" else {"layout.compile_backend": "inductor"}
    if changes:
        # layout.compile may be left to the device, which is not known here.
        missing = {
            "layout.tp": "layout.tp = 1",
            "layout.compile": "layout.compile = true is not set",
            "layout.compile_backend": f"layout.compile_backend = {shown_value(layout.compile_backend)}",
        }
        yield Problem(
            "layout.async_tp = true needs matmuls that are split and compiled by inductor, but "
            f"{both([missing[key] for key in changes])}",
            [changes, {"layout.async_tp": False}],
        )
