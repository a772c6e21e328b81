"""What exact sums (train.exact_elastic) do not go with, checked before any process starts.

They make the bits of a step independent of how many data-parallel ranks share its microbatches, if nothing else depends
on that. What does, or has not been shown not to, is refused here, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Fix, Problem, shown_value

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_KEY = "train.exact_elastic"
_OFF: Fix = {_KEY: False}
_Rules = Iterator[tuple[str, Any, bool, Any, str]]
"""Of (key, its value, whether that is ruled out, a value that is not, why)."""


def exact_problems(job: Job) -> Iterator[Problem]:
    """Yield what of a job, whatever its layout is, keeps sums from being exact."""
    if job.train.exact_elastic:
        yield from _problems(_job_rules(job))


def exact_layout_problems(layout: Layout, *, sums_exactly: bool) -> Iterator[Problem]:
    """Yield what of a layout keeps sums from being exact where they are to be."""
    if sums_exactly:
        yield from _problems(_layout_rules(layout))


def _problems(rules: _Rules) -> Iterator[Problem]:
    for key, value, is_ruled_out, default, why in rules:
        if is_ruled_out:
            yield Problem(f"{key} = {shown_value(value)}: {why}, so {_KEY} = true refuses it", [{key: default}, _OFF])


def _job_rules(job: Job) -> _Rules:
    compute, reduce, float8 = job.precision.compute, job.precision.reduce, job.precision.float8
    digits = "exact sums keep 40 bits after the point, fewer than float64"
    yield "precision.compute", compute, compute == "float64", "float32", digits
    rounded = "a sum that is rounded to bfloat16 is not exact"
    yield "precision.reduce", reduce, reduce == "bfloat16", "float32", rounded
    scales = "its scales have not been shown to be the same on any number of ranks"
    yield "precision.float8", float8, float8 != "none", "none", scales
    name, state, in_backward = job.optimizer.name, job.optimizer.state_dtype, job.optimizer.in_backward
    update = "its update has not been shown to be the same for shards of any size"
    yield "optimizer.name", name, name != "adamw", "adamw", update
    yield "optimizer.state_dtype", state, state != "float32", "float32", update
    one = "it needs one microbatch on each rank, which fixes the number of ranks"
    yield "optimizer.in_backward", in_backward, in_backward, False, one
    chosen = "the planner's choice depends on the number of ranks"
    yield "layout.search", job.layout.search, job.layout.search, False, chosen


def _layout_rules(layout: Layout) -> _Rules:
    own = "its graph sums gradients itself, in the format of parameters"
    yield "layout.compile", layout.compile, layout.compile == "model", True, own
    yield "layout.cuda_graphs", layout.cuda_graphs, layout.cuda_graphs, False, own
    compiled = "the compiled update has not been shown to be the same for shards of any size"
    yield "layout.compile_optimizer", layout.compile_optimizer, layout.compile_optimizer, False, compiled
    rows = "an expert's matmul sums over the tokens of several data-parallel ranks"
    yield "layout.ep", layout.ep, layout.ep > 1, 1, rows
    kind = layout.activation_checkpoint
    memory = "what is recomputed then depends on the memory of a rank, and so on the number of ranks"
    yield "layout.activation_checkpoint", kind, kind == "auto", "none", memory
