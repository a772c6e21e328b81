"""Async tensor parallelism is traced as it runs: matmuls next to the parts of their inputs or outputs that are sent."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.tracer.programs.trace_ranks import trace
from meshwright.tracer.torch_patches.torch_names import JOINS_ALIKE
from repository import ROOT
from trained_step import BUILD, arguments_of

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(JOINS_ALIKE), reason=f"other releases than {JOINS_ALIKE} join other operations"
)
JOB = str(ROOT / "examples" / "tiny.toml")
BLOCK, TP, JOINT = "blocks.1", "tp", "tp (symmetric memory)"


def traced(*overrides: str) -> Trace:
    keys = (
        "model.options.num_layers=2",
        "layout.tp=2",
        "layout.compile=true",
        "layout.activation_checkpoint=none",
        *overrides,
    )
    return trace(BUILD, 1, 2, arguments_of(JOB, "precision.compute=bfloat16", "train.global_batch_size=2", *keys))


@pytest.fixture(scope="module")
def plain() -> Trace:
    return traced()


@pytest.fixture(scope="module")
def joined() -> Trace:
    return traced("layout.async_tp=true")


def rows_of(found: Trace) -> list[int]:
    return [row for row, scope in enumerate(found.records.scope) if found.scopes[scope].startswith(BLOCK)]


def collectives(found: Trace) -> Counter[tuple[str, str, str]]:
    """Return how often a block has each collective, by axis, operator and phase."""
    columns = found.records
    return Counter(
        (
            found.group_names[columns.group[row]],
            found.signatures[columns.signature[row]].op.split(".")[1],
            found.phases[columns.phase[row]],
        )
        for row in rows_of(found)
        if columns.kind[row] == RecordKind.COLLECTIVE
    )


def flops(found: Trace) -> int:
    positions = (found.records.signature[row] for row in rows_of(found))
    return sum(found.signatures[position].flops for position in positions if position != NONE)


@pytest.mark.long
def test_what_the_compiler_joins_needs_no_stream_of_the_others(plain: Trace, joined: Trace) -> None:
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    found, counts = collectives(joined), collectives(plain)
    once = found[JOINT, scatter, "forward"] // 2
    # Two column-parallel and two row-parallel layers; what flows back into the former is summed over several matmuls.
    assert found == {
        (JOINT, gather, "forward"): 2 * once,
        (JOINT, scatter, "forward"): 2 * once,
        (JOINT, gather, "backward"): 2 * once,
        (TP, scatter, "backward"): 2 * once,
        (TP, gather, "recompute"): 2 * once,
    }
    assert {axis for axis, _, _ in counts} == {TP}
    assert counts.total() == found.total()


@pytest.mark.long
def test_parts_of_matmuls_are_whole_matmuls(plain: Trace, joined: Trace) -> None:
    assert flops(joined) == flops(plain) > 0


@pytest.mark.long
def test_gradients_of_weights_run_while_those_of_inputs_are_summed(plain: Trace) -> None:
    columns, under_way, hidden = plain.records, dict[int, int](), Counter[bool]()
    for row in rows_of(plain):
        signature = columns.signature[row]
        op = "" if signature == NONE else plain.signatures[signature].op
        is_backward = plain.phases[columns.phase[row]] == "backward"
        if columns.kind[row] == RecordKind.COLLECTIVE and "reduce_scatter" in op and is_backward:
            under_way[int(columns.work[row])] = 0
        elif columns.kind[row] == RecordKind.WAIT and columns.work[row] in under_way:
            hidden[under_way.pop(int(columns.work[row])) > 0] += 1
        elif op.startswith("aten.mm."):
            under_way = {work: count + 1 for work, count in under_way.items()}
    assert hidden[True] > 0
    assert hidden[False] == 0
