"""Rows of a layout table as a Layout, as a job would write it, with its Estimate.

Some features of a layout no measured run backs: none of the 677 published runs (validation/published_runs.csv) has a
split backward, a ring or an exchange of heads among context-parallel ranks. Nine have async_tp, all with torchtitan
(mean error 6 %), none with Meshwright. A feature without a row is like software without a row: the error of its formula
is not known from data. So each adds the 80 % interval of the stacks that were left out of the fit (17.4 %,
docs/accuracy.md), as an independent error:

    relative error = sqrt(stack's ^ 2 + number of features x 0.174 ^ 2 + of a machine that is not calibrated: 2 ^ 2)
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cost.communication.nccl_ctas import idle_limit_note
from meshwright.cost.compute.recompute import drops_attention, nth_share, repeated_share
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.cost.pipeline.stage import recompute_passes
from meshwright.cost.stack_factors import GENERIC, load_stack
from meshwright.cost.training_setup import TrainingSetup
from meshwright.hardware.catalogue import example_of
from meshwright.planner.request import PlanRequest, dense_peak
from meshwright.planner.search.bubble import num_actions, num_microbatches_of, replay_inputs, replayed_step
from meshwright.planner.search.price import Priced, is_tight, price
from meshwright.spec.layout.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.spec.run.layout_plan import Candidate
from meshwright.spec.step.estimate import Estimate
from meshwright.spec.step.workload import FLOAT8_PRECISIONS

_EXAMPLE_ERROR = fixed_constant("example_relative_error")
LEFT_OUT_ERROR = load_stack(GENERIC).relative_error
"""Half width of the interval that holds 80 % of the runs of stacks that were left out of the fit."""
_CARRIED = (
    "stage_boundaries",
    "compile_backend",
    "reshard_after_forward",
    "gradient_sync",
    "virtual_stages",
)
"""Keys that a table has no column for, or says less of than a job may."""


def layout_at(layouts: LayoutTable, row: int, request: PlanRequest) -> Layout:
    """Return the layout at `row`: keys that only repeat a default are left at it, those that are fixed are kept."""
    layout = layouts.layout(row)
    plain: dict[str, Any] = {}
    if layout.replace(virtual_stages=None).stages_per_rank == layout.stages_per_rank:
        plain["virtual_stages"] = None
    if (layout.pp == 1) == (layout.reshard_after_forward == "always"):
        plain["reshard_after_forward"] = "auto"
    if layout.replace(gradient_sync="auto").reduces_each_microbatch == layout.reduces_each_microbatch:
        plain["gradient_sync"] = "auto"
    return layout.replace(**(plain | {key: request.fixed[key] for key in _CARRIED if key in request.fixed}))


def candidate_at(priced: Priced, row: int, request: PlanRequest, max_actions: float = math.inf) -> Candidate:
    """Return the layout at `row` with its estimate, its pipeline replayed if that takes no more than `max_actions`."""
    if row in priced.known:
        return priced.known[row]
    layout = layout_at(priced.layouts, row, request)
    step, is_replayed = priced.step.decomposition(row), num_actions(layout, request) <= max_actions
    if is_replayed and layout.pp > 1:
        prepare_replays(priced, [row], request)
        step = replayed_step(step, layout, request, priced.replay_inputs[row])
    unmeasured = unmeasured_features(layout, request.setup)
    has_peak = dense_peak(request.cluster.device, request.workload.matmul_dtype) is not None
    mfu = step.model_flops_at_peak_s / step.total_s if has_peak else None
    candidate = Candidate(
        layout=layout,
        estimate=Estimate(
            step=step,
            memory=priced.memory_use(row),
            mfu=mfu,
            hfu=None if mfu is None else mfu * (1 + recomputed_share(layout, request)),
            relative_error=math.hypot(
                request.setup.stack.relative_error,
                *[LEFT_OUT_ERROR] * len(unmeasured),
                0.0 if example_of(request.cluster.device) is None else _EXAMPLE_ERROR,
                0.0 if (busy := request.cluster.device.calibration_error) is None else busy.value,
            ),
        ),
        unmeasured=unmeasured,
        free_bytes=round(request.cluster.device.usable_memory_bytes - float(priced.memory.reserved_bytes[row])),
        headroom_bytes=round(float(priced.headroom_bytes[row])),
    )
    if is_replayed:
        priced.known[row] = candidate
    return candidate


def prepare_replays(priced: Priced, rows: Sequence[int], request: PlanRequest) -> None:
    """Compute at once what replays of the pipelines at `rows` need, which takes hardly longer than for one."""
    rows = [row for row in rows if priced.layouts.pp[row] > 1 and row not in priced.known | priced.replay_inputs]
    if rows:
        layouts = [layout_at(priced.layouts, row, request) for row in rows]
        priced.replay_inputs.update(zip(rows, replay_inputs(layouts, request), strict=True))


def judge(layout: Layout, request: PlanRequest) -> Candidate:
    """Return a layout that was set by hand with its estimate, whether it fits or not."""
    candidate = candidate_at(price(layout_table([layout]), request, only_fitting=False), 0, request)
    return candidate.replace(layout=layout, is_tight=candidate.headroom_bytes < 0 and is_tight(layout, request))


def recomputed_share(layout: Layout, request: PlanRequest) -> float:
    """Return the FLOPs that a step recomputes: activation checkpointing, or because a compiled block's backward runs
    in two parts, as a share of the model's FLOPs.
    """
    model, seq_len, stack = request.setup.trained_model, request.workload.seq_len, request.setup.stack
    blocks = [group for group in model.groups if group.name == "blocks"]
    matmuls = sum(2 * group.count * group.num_matmul_parameters for group in blocks)
    attention = sum(group.count * group.forward_flops_per_token(seq_len) for group in blocks) - matmuls
    again = {"none": 0.0, "full": float(matmuls + attention), "selective": 0.0}
    if stack.selective == "half-of-matmul-outputs":
        again["selective"] = matmuls / 2
    elif stack.selective == "core-attention":
        again["selective"] = float(attention)
    if drops_attention(request.setup):
        again["selective"] += float(attention)
    given, table = layout.activation_checkpoint_blocks, layout_table([layout])
    if given is not None:
        flops = sum(again[one] for one in given) / len(given)
    else:
        num_blocks = np.array([sum(group.count for group in model.groups[1:-1])], np.float64)
        flops = again[layout.activation_checkpoint] * float(nth_share(table, num_blocks)[0])
    number = np.array([num_microbatches_of(layout, request)], np.float64)
    flops *= float(recompute_passes(table, number)[0])
    flops += 2 * (matmuls + attention) * float(repeated_share(request.configs(table))[0])
    return flops / model.flops_per_token(seq_len)


def unmeasured_features(layout: Layout, setup: TrainingSetup) -> tuple[str, ...]:
    """Return the features of `layout` that no measured run of this software has, as a job would write them."""
    found = []
    if setup.is_low_precision and setup.is_own:
        is_built = setup.workload.precision in FLOAT8_PRECISIONS.values()
        why = "" if is_built else " (meshwright does not train in it yet)"
        found.append(f"precision={setup.workload.precision}{why}")
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        found.append(f"schedule={layout.schedule} (split backward)")
    if layout.cp > 1 and layout.cp_method != "all-gather":
        found.append(f"cp_method={layout.cp_method}")
    if layout.tp > 1 and layout.async_tp:
        found.append("async_tp=true (measured with torchtitan only)")
    if layout.communication_sms is not None and not idle_limit_note(layout, setup.cluster):
        found.append(f"communication_sms={layout.communication_sms}")
    if layout.activation_offload:
        found.append("activation_offload=true")
    return tuple(found)
