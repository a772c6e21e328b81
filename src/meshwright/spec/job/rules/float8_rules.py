"""What float8 matmuls (precision.float8) do not go with, checked before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.spec.job.sections import Float8Recipe, PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.op import float8_alignment
from meshwright.spec.problem import Problem, multiples_near, shown_value

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_KEY = "precision.float8"


def float8_problems(job: Job, layout: Layout) -> list[Problem]:
    """Return why `layout` cannot run the float8 recipe of `job`."""
    of_layout = float8_layout_problems(job.precision.float8, layout, job.train.seq_len)
    return [*_precision_problems(job.precision), *of_layout]


def _precision_problems(precision: PrecisionSection) -> Iterator[Problem]:
    idle = PrecisionSection()
    for name in ("float8_skip", "float8_filter", "float8_experts"):
        if precision.float8 == "none" and (value := getattr(precision, name)) != getattr(idle, name):
            yield Problem(
                f'precision.{name} = {shown_value(value)} has nothing to apply to with {_KEY} = "none"',
                [{f"precision.{name}": None}, {_KEY: "tensorwise"}],
            )
    if precision.float8 != "none" and precision.compute == "float64":
        yield Problem(
            f'{_KEY} = "{precision.float8}" computes the other operators in bfloat16 or float32, but '
            'precision.compute = "float64"',
            [{"precision.compute": "bfloat16"}, {_KEY: "none"}],
        )


def float8_layout_problems(recipe: Float8Recipe, layout: Layout, seq_len: int) -> Iterator[Problem]:
    """Yield why `layout` cannot run `recipe` on sequences of `seq_len`."""
    if recipe == "none":
        return
    asked = f'{_KEY} = "{recipe}"'
    tokens = layout.microbatch_size * seq_len // layout.cp
    alignment = float8_alignment(recipe)
    if tokens % alignment:
        step = alignment * layout.cp * layout.tp
        yield Problem(
            f"{asked} needs a multiple of {alignment} tokens in a microbatch on each rank, which has {tokens} "
            f"(layout.microbatch_size = {layout.microbatch_size} x train.seq_len = {seq_len} / layout.cp = "
            f"{layout.cp})",
            [*({"train.seq_len": length} for length in multiples_near(seq_len, step)), {_KEY: "none"}],
        )
    if layout.async_tp:
        yield Problem(
            f"{asked} rounds the whole gathered input of a matmul, which layout.async_tp = true never holds",
            [{"layout.async_tp": False}, {_KEY: "none"}],
        )
    if recipe == "tensorwise":
        yield from _gather_problems(asked, layout)


def _gather_problems(asked: str, layout: Layout) -> Iterator[Problem]:
    """Yield what FSDP2's all-gather of float8 weights does not support (torch 2.13)."""
    kept = layout.reshard_after_forward
    if isinstance(kept, int):
        yield Problem(
            f"{asked} gathers weights in float8, and torch keeps none of those on groups of ranks "
            f"(layout.reshard_after_forward = {kept})",
            [{"layout.reshard_after_forward": "always"}, {"layout.reshard_after_forward": "auto"}, {_KEY: "rowwise"}],
            most=3,
        )
    if layout.cpu_offload:
        yield Problem(
            f"{asked} gathers weights in float8, and torch gathers none of those from the host's memory "
            "(layout.cpu_offload = true)",
            [{"layout.cpu_offload": False}, {_KEY: "rowwise"}],
        )
