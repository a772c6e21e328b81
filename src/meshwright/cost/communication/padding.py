"""What FSDP2's padding costs: it splits dim 0 of every parameter, and gives each rank as many rows as the first.

    rows gathered = shards x ceil(rows / shards)

so that with more ranks than rows most of what travels is nothing. tp divides dim 0 first. Source: FSDP2's own shards
(torch.distributed.fsdp), which a traced step shows to be so. Ignored: experts,
which are cut in a dim that divides evenly.
"""

from __future__ import annotations

import math

from meshwright.cost.memory.footprint_states import weight_shape
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.model.op import GroupedMatmul, Matmul, Op
from meshwright.spec.step.dry_run_report import PaddedParameter, Padding

_STATE_BYTES = 16
"""Of one parameter's element between steps: float32 parameter, gradient and two moments."""
_LEAST_FACTOR = 1 + 0.1
"""Parameters that padding lengthens by less than a tenth are not listed."""


def padding_of(model: ModelSpec, layout: Layout, gathered_bytes: int) -> Padding | None:
    """Return what padding costs where an element of `gathered_bytes` is gathered; None where nothing is padded."""
    gathered = needed = state = 0
    parameters = []
    for group in model.groups:
        for op in group.ops:
            if isinstance(op, GroupedMatmul) or not op.num_parameters:
                continue
            rows, width = _part(op, layout)
            padded = math.ceil(rows / layout.fsdp) * layout.fsdp
            gathered += group.count * padded * width
            needed += group.count * rows * width
            state += group.count * (padded - rows) * width * _STATE_BYTES // layout.fsdp
            wasted = group.count * (padded - rows) * width * gathered_bytes
            name = ".".join(part for part in (group.name, op.name) if part)
            parameters.append(PaddedParameter(name=name, rows=rows, wire_factor=padded / rows, wasted_bytes=wasted))
    if gathered == needed:
        return None
    parameters.sort(key=lambda one: -one.wasted_bytes)
    return Padding(
        num_shards=layout.fsdp,
        wire_factor=gathered / needed,
        wasted_state_bytes=state,
        parameters=tuple(one for one in parameters if one.wire_factor >= _LEAST_FACTOR),
    )


def _part(op: Op, layout: Layout) -> tuple[int, int]:
    """Return dim 0 of what tensor parallelism leaves of an op's weight, and the elements of each of its rows."""
    rows, width, is_split = weight_shape(op)
    if not is_split:
        return rows, width
    is_cut_across = isinstance(op, Matmul) and op.tensor_split == "rows"
    return (rows, math.ceil(width / layout.tp)) if is_cut_across else (math.ceil(rows / layout.tp), width)
