"""Which pipeline ranks do the same: those whose stages hold alike blocks, so that one of them is traced for all."""

from __future__ import annotations

from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import Schedule
from meshwright.spec.layout.stage_split import stage_boundaries
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import ModelSpec, model_spec

Blocks = dict[int, range]
"""The blocks of each stage."""


def blocks_of_stages(job: Job, layout: Layout) -> Blocks | None:
    """Return the blocks of each stage of the pipeline; None where nobody but the model itself knows them."""
    architecture = resolve_architecture(job.model)
    if architecture is None:
        return None
    spec = model_spec(architecture)
    num_blocks = len(_kinds(spec))
    edges = [0, *stage_boundaries(layout, spec, job.train.seq_len), num_blocks]
    return {stage: range(edges[stage], edges[stage + 1]) for stage in range(layout.num_stages)}


def alike_pipeline_ranks(job: Job, layout: Layout, schedule: Schedule) -> dict[int, list[int]]:
    """Return by pipeline rank which others do the same and need no trace; it stands in its own list."""
    blocks = blocks_of_stages(job, layout)
    architecture = resolve_architecture(job.model)
    if blocks is None or architecture is None or layout.pp == 1:
        return {rank: [rank] for rank in range(layout.pp)}
    kinds = _kinds(model_spec(architecture))
    found: dict[object, list[int]] = {}
    for rank in range(layout.pp):
        contents = tuple(
            (
                tuple((kinds[block], layout.checkpoint_of(block, blocks[stage].start)) for block in blocks[stage]),
                [_where(stage + step, rank, schedule) for step in (-1, 1)],
            )
            for stage in schedule.stages_of_rank(rank)
        )
        found.setdefault(repr(contents), []).append(rank)
    return {ranks[0]: ranks for ranks in found.values()}


def _kinds(spec: ModelSpec) -> list[int]:
    """Return the kind of each block: the position of its group, which all blocks of the same operations share."""
    first, *groups, last = spec.groups
    assert first.count == last.count == 1
    operations = [group.ops for group in groups]
    return [operations.index(group.ops) for group in groups for _ in range(group.count)]


def _where(stage: int, rank: int, schedule: Schedule) -> str:
    """Return where a neighbouring stage is, as far as it changes what a rank does: a stage there is none, none."""
    if not 0 <= stage < schedule.num_stages:
        return "nowhere"
    return "here" if schedule.rank_of_stage(stage) == rank else "elsewhere"
