"""What compiled parts of a step do not go with, checked before any process starts.

layout.compile = "model" makes one graph of the whole forward and its collectives. What stands outside of any graph, or
what only FSDP2's hooks do, is refused here, each with its reason; layout.compile = "blocks" runs all of it. A compiled
optimizer (layout.compile_optimizer) is AdamW with float32 states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.spec.job.sections import Float8Recipe, OptimizerSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Fix, Problem, shown_value

_KEY = "layout.compile"
_BLOCKS: Fix = {_KEY: True}


def model_graph_layout_problems(layout: Layout, *, has_experts: bool) -> Iterator[Problem]:
    """Yield what of a layout one graph cannot hold."""
    if layout.compile != "model":
        return
    for key, is_ruled_out, default, why in _rules(layout, has_experts=has_experts):
        if is_ruled_out:
            value = shown_value(getattr(layout, key))
            yield Problem(
                f'{_KEY} = "model" makes one graph of forward, {why} (layout.{key} = {value})',
                [_BLOCKS, {f"layout.{key}": default}],
            )


def _rules(layout: Layout, *, has_experts: bool) -> Iterator[tuple[str, bool, Any, str]]:
    """Yield (key, whether its value is ruled out, a value that is not, why)."""
    kept = layout.reshard_after_forward
    yield "pp", layout.pp > 1, 1, "and a pipeline runs its stages one by one"
    yield "ep", layout.ep > 1, 1, "and how many tokens experts of other ranks get is known in a step only"
    yield "tp", has_experts and layout.tp > 1, 1, "and experts under tp are sharded over other ranks than the rest"
    is_ring = layout.cp > 1 and layout.cp_method == "ring"
    yield "cp_method", is_ring, "all-gather", "and ring attention sends and receives outside of graphs"
    yield "activation_offload", layout.activation_offload, False, "and what each block saves is moved between blocks"
    yield "cpu_offload", layout.cpu_offload, False, "and FSDP2's hooks move parameters from and to the host"
    yield "async_tp", layout.async_tp, False, "and was not tried with fused matmuls and collectives"
    has_group = layout.separate_reduce_group
    yield "separate_reduce_group", has_group, False, "whose own order of collectives FSDP2's groups do not change"
    is_group = isinstance(kept, int)
    yield "reshard_after_forward", is_group, "auto", "and the compiler frees gathered parameters or keeps them whole"
    is_saved_twice = kept == "never" and layout.fsdp > 1 and layout.recomputes
    yield "reshard_after_forward", is_saved_twice, "auto", "and recomputation gathers parameters again"
    is_once = layout.gradient_sync == "step" and layout.fsdp > 1
    yield "gradient_sync", is_once, "auto", "whose backward reduces the gradients of each microbatch"


def model_graph_problems(float8: Float8Recipe, optimizer: OptimizerSection, layout: Layout) -> Iterator[Problem]:
    """Yield what of a job, other than its layout, one graph cannot hold."""
    if layout.compile != "model":
        return
    gradients = (
        "returns all gradients when its backward has finished, so optimizer.in_backward = true would free none of them "
        "early"
    )
    yield from one_graph_problems(f'{_KEY} = "model"', "gathers", gradients, _BLOCKS, float8, optimizer)


def one_graph_problems(
    given: str, takes: str, gradients: str, instead: Fix, float8: Float8Recipe, optimizer: OptimizerSection
) -> Iterator[Problem]:
    """Yield what reads or updates parameters in the midst of a step that is one graph, because of what is `given`."""
    if float8 != "none":
        yield Problem(
            f'{given} {takes} parameters in precision.compute, and precision.float8 = "{float8}" reads them from FSDP2',
            [instead, {"precision.float8": "none"}],
        )
    if optimizer.in_backward:
        yield Problem(f"{given} {gradients}", [instead, {"optimizer.in_backward": False}])


def compiled_optimizer_problems(optimizer: OptimizerSection, layout: Layout) -> Iterator[Problem]:
    """Yield what of [optimizer] a compiled update does not do."""
    if not layout.compile_optimizer:
        return
    key = "layout.compile_optimizer"
    for name, is_ruled_out, default, why in (
        ("name", optimizer.name != "adamw", "adamw", "AdamW's update alone"),
        ("state_dtype", optimizer.state_dtype != "float32", "float32", "the update of float32 states alone"),
        ("in_backward", optimizer.in_backward, False, "one update after backward, not one for each parameter in it"),
    ):
        if is_ruled_out:
            value = shown_value(getattr(optimizer, name))
            yield Problem(
                f"{key} = true compiles {why} (optimizer.{name} = {value})",
                [{key: False}, {f"optimizer.{name}": default}],
            )
