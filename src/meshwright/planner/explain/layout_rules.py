"""The rules that one layout breaks for a request, in the words of a job's check, and the request with keys changed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from meshwright.planner.request import PlanRequest
from meshwright.spec.job.rules.adapter_rules import packed_block_problems
from meshwright.spec.job.rules.attention_rules import (
    attention_layout_problems,
    attention_model_problems,
    device_problem,
    no_documents,
)
from meshwright.spec.job.rules.compile_rules import compiled_optimizer_problems, model_graph_problems
from meshwright.spec.job.rules.cuda_graph_rules import cuda_graph_problems
from meshwright.spec.job.rules.exact_rules import exact_layout_problems
from meshwright.spec.job.rules.float8_rules import float8_layout_problems
from meshwright.spec.job.rules.memory_rules import memory_problems
from meshwright.spec.job.rules.optimizer_rules import block_problems, update_problems
from meshwright.spec.job.sections import Float8Recipe, OptimizerSection
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.device_rules import layout_device_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.problem import Fix, Problem
from meshwright.spec.step.workload import FLOAT8_PRECISIONS
from meshwright.units import counted

_WORKLOAD_KEYS = {
    "train.seq_len": "seq_len",
    "optimizer.name": "optimizer",
    "optimizer.state_dtype": "optimizer_state_dtype",
    "optimizer.in_backward": "updates_in_backward",
}
"""Fields of Workload by the keys of a job that they are made of."""


def invalid_reason(layout: Layout, request: PlanRequest) -> str:
    """Return the first rule that a layout breaks; empty if it is valid."""
    return next(iter(rules_broken_by(layout, request)), "")


def rules_broken_by(layout: Layout, request: PlanRequest) -> list[Problem]:
    """Return why the request cannot run in `layout`, with all changes that could follow each rule, none tried."""
    problems = split_problems(layout, request.architecture, request.workload.seq_len)
    batch, per_pass = request.workload.global_batch_size, layout.dp * layout.microbatch_size
    if layout.num_ranks != request.num_devices:
        ranks, devices = counted(layout.num_ranks, "rank"), counted(request.num_devices, "device")
        problems.insert(0, Problem(f"{ranks} on {devices}", otherwise="change a degree"))
    if batch % per_pass:
        return [
            *problems,
            Problem(
                f"a global batch of {batch} sequences does not divide by {layout.dp} data-parallel ranks x "
                f"layout.microbatch_size = {layout.microbatch_size}"
            ),
        ]
    number = batch // per_pass
    return [
        *problems,
        *schedule_problems(layout, number),
        *_optimizer_problems(layout, request, number),
        *float8_layout_problems(_recipe(request), layout, request.workload.seq_len),
        *_attention_problems(layout, request),
        *exact_layout_problems(layout, sums_exactly=request.workload.sums_exactly),
    ]


def with_keys(request: PlanRequest, fix: Fix) -> PlanRequest | None:
    """Return the request with the keys of a job that `fix` sets; None where one of them is in no request."""
    fixed, workload, memory = dict(request.fixed), request.workload, request.setup.memory
    for key, value in fix.items():
        section, name = key.split(".")
        if section == "layout":
            fixed[name] = value
        elif section == "memory":
            memory = memory.replace(**{name: value})
        elif key == "precision.float8":
            workload = workload.replace(precision=FLOAT8_PRECISIONS.get(value, workload.wide_dtype))
        elif key == "precision.compute":
            changed = "wide_dtype" if workload.precision in FLOAT8_PRECISIONS.values() else "precision"
            workload = workload.replace(**{changed: value})
        elif key in _WORKLOAD_KEYS:
            workload = workload.replace(**{_WORKLOAD_KEYS[key]: value})
        else:
            return None
    left = {name: value for name, value in fixed.items() if value is not None}
    return replace(request, fixed=left).with_setup(workload=workload, memory=memory)


def _optimizer_problems(layout: Layout, request: PlanRequest, num_microbatches: int) -> Iterator[Problem]:
    """Yield what the optimizer, its states' memory and what is compiled or captured do not go with."""
    workload, float8 = request.workload, _recipe(request)
    optimizer = OptimizerSection(
        name=workload.optimizer, state_dtype=workload.optimizer_state_dtype, in_backward=workload.updates_in_backward
    )
    yield from block_problems(optimizer, layout, request.architecture)
    yield from packed_block_problems(workload.adapter, layout, request.architecture)
    yield from update_problems(optimizer, layout, num_microbatches)
    yield from model_graph_problems(float8, optimizer, layout)
    yield from compiled_optimizer_problems(optimizer, layout)
    yield from cuda_graph_problems(float8, optimizer, layout)
    yield from memory_problems(request.setup.memory, optimizer, layout)


def _attention_problems(layout: Layout, request: PlanRequest) -> Iterator[Problem]:
    backend, workload, device = layout.attention_backend, request.workload, request.cluster.device
    if backend == "flash" and workload.masks_documents:
        yield no_documents()
    dtype = workload.activation_dtype
    yield from attention_model_problems(backend, request.architecture, dtype, workload.seq_len)
    if (missing := device_problem(backend, dtype, device.torch_type)) is not None:
        yield missing
    if request.setup.is_own:
        yield from layout_device_problems(layout, device)
    yield from attention_layout_problems(layout)


def _recipe(request: PlanRequest) -> Float8Recipe:
    """Return precision.float8 of our own trainer; "none" where the software or the precision is another."""
    of_precision: dict[Any, str] = {precision: recipe for recipe, precision in FLOAT8_PRECISIONS.items()}
    return cast(Float8Recipe, of_precision.get(request.setup.own_float8, "none"))
