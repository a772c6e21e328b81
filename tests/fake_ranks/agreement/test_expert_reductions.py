"""The gradients of one block's experts are reduced while the backward of the next block computes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of

JOB = str(ROOT / "examples" / "tiny-moe.toml")
_EXPERTS = re.compile(r"blocks\.(\d+)\..*experts")


def block_of(found: Trace, record: int) -> int | None:
    """Return the block in whose experts a record is."""
    scope = found.records.scope[record]
    match = _EXPERTS.search(found.scopes[scope]) if scope >= 0 else None
    return int(match[1]) if match else None


@pytest.mark.long
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="before torch 2.13 a unit's backward always waits for the reduction of the one before",
)
def test_the_next_blocks_experts_do_not_wait() -> None:
    found = trace(BUILD, 0, 8, arguments_of(JOB, "layout.dp_shard=8", "layout.ep=2", "precision.compute=bfloat16"))
    records = found.records
    backward, is_default = records.phase == found.phases.index("backward"), records.stream == 0
    is_reduction = np.array(
        [
            kind == RecordKind.COLLECTIVE
            and "reduce_scatter" in found.signatures[signature].op
            and found.group_names[group] == "expert_dp_shard"
            for kind, signature, group in zip(records.kind, records.signature, records.group, strict=True)
        ]
    )
    reductions = np.flatnonzero(is_reduction).tolist()
    assert len(reductions) > 1
    for reduction in reductions:
        block = block_of(found, reduction)
        assert block is not None
        events = records.event[reduction:][records.kind[reduction:] == RecordKind.RECORD_EVENT]
        waits = np.flatnonzero(is_default & (records.kind == RecordKind.WAIT_EVENT) & (records.event == events[0]))
        computed = {
            block_of(found, record) for record in np.flatnonzero(backward & is_default).tolist() if record < waits[0]
        }
        assert block == 0 or block - 1 in computed
