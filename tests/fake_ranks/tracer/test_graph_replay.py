"""A step whose compiled graphs are replayed is, record by record, the step in which each of their calls runs."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from meshwright.spec.trace.trace import Trace
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks
from repository import ROOT
from trained_step import arguments_of

JOB = str(ROOT / "examples" / "tiny.toml")
COMMON = ("layout.compile=true", "precision.compute=bfloat16", "train.seq_len=64")
PIPELINE = ("layout.pp=2", "layout.schedule=Interleaved1F1B", "layout.virtual_stages=2", "layout.microbatch_size=2")
LAYOUTS = {
    "tp, recomputed": (4, ("layout.dp_shard=2", "layout.tp=2", "layout.activation_checkpoint=full")),
    "tp, selective": (4, ("layout.dp_shard=2", "layout.tp=2", "layout.activation_checkpoint=selective")),
    "pp, every second block": (
        4,
        (
            "layout.tp=2",
            "model.options.num_layers=8",
            "layout.activation_checkpoint=selective",
            "layout.activation_checkpoint_every=2",
            *PIPELINE,
        ),
    ),
    "accumulated": (
        2,
        (
            "model.options.num_layers=2",
            "layout.dp_shard=2",
            "layout.microbatch_size=4",
            "layout.gradient_sync=step",
        ),
    ),
    "interleaved": (4, ("layout.dp_shard=2", "model.options.num_layers=4", *PIPELINE)),
    "ring": (4, ("layout.dp_shard=2", "layout.cp=2", "layout.cp_method=ring")),
    "split backward": (
        4,
        ("layout.dp_shard=2", "layout.pp=2", "layout.schedule=ZBVZeroBubble", "layout.microbatch_size=2"),
    ),
    "experts": (4, ("model.source=moe-4m", "layout.dp_shard=4", "layout.ep=2", "layout.microbatch_size=1")),
}


def traced(build: str, num_ranks: int, overrides: tuple[str, ...]) -> Trace:
    rank = num_ranks - 1
    return trace_ranks(Program(f"compiled_steps:{build}", num_ranks, arguments_of(JOB, *COMMON, *overrides)), [rank])[
        rank
    ]


def assert_equal(one: Trace, other: Trace) -> None:
    for table in ("records", "storages", "uses"):
        ours, theirs = getattr(one, table), getattr(other, table)
        for field in fields(ours):
            assert np.array_equal(getattr(ours, field.name), getattr(theirs, field.name)), (table, field.name)
    for name in ("signatures", "scopes", "phases", "actions", "groups", "group_names"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.long
def test_a_replayed_step_is_the_one_that_runs() -> None:
    layout = LAYOUTS["accumulated"]
    assert_equal(traced("build_replayed", *layout), traced("build_run", *layout))


@pytest.mark.long
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "accumulated"])
def test_so_it_is_in_other_layouts(layout: str) -> None:
    assert_equal(traced("build_replayed", *LAYOUTS[layout]), traced("build_run", *LAYOUTS[layout]))
