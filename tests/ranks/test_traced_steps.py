"""What a step does on fake tensors is what it does on real ones: the same operators and the same bytes, on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.spec.trace import RecordKind, Storages, Trace
from meshwright.tracer.rank_process import record_step
from meshwright.tracer.recorder import Recorder
from meshwright.tracer.recording_mode import RecordingMode
from meshwright.tracer.trace import trace
from run_ranks import run_ranks

BUILD = "meshwright.trainer.build_step:build_step"
JOB = str(Path(__file__).parents[2] / "examples" / "tiny.toml")
SMALL = ("train.seq_len=64", "train.global_batch_size=4")
LAYOUTS = {
    "fsdp": ("layout.dp_shard=2",),
    "fsdp, recomputed": ("layout.dp_shard=2", "layout.activation_checkpoint=full"),
    "replicas": ("layout.dp_shard=1", "layout.dp_replicate=2"),
    "tp": ("layout.dp_shard=1", "layout.tp=2"),
    "pp": ("layout.dp_shard=1", "layout.pp=2"),
    "zero bubble": ("layout.dp_shard=1", "layout.pp=2", "layout.schedule=ZBVZeroBubble"),
    "cp": ("layout.dp_shard=1", "layout.cp=2"),
    "cp ring": ("layout.dp_shard=1", "layout.cp=2", "layout.cp_method=ring"),
}
GLOO_COPIES = ("aten.copy_.default",)
"""gloo's collectives copy into what they were given; a fake group leaves it as it is."""


def real_trace(arguments: list[str]) -> Trace:
    """Return what this rank's step really did."""
    return record_step(RecordingMode(Recorder(), "cpu"), BUILD, arguments)


def fake_trace(arguments: list[str]) -> Trace:
    return trace(BUILD, 0, 2, arguments, device="cpu")


def names(trace: Trace) -> Iterator[Any]:
    """Yield what each record is, and the shapes of its results."""
    for kind, position in zip(trace.records.kind, trace.records.signature, strict=True):
        signature = trace.signatures[position] if position >= 0 else None
        yield RecordKind(kind).name if signature is None else (signature.op, signature.outputs)


def live_without(trace: Trace, copies: list[int]) -> Any:
    """Return the live bytes before each record, but for what the records `copies` made for themselves."""
    made = np.isin(trace.storages.allocated_at, copies) & (trace.storages.freed_at == trace.storages.allocated_at + 1)
    storages = {name: column[~made] for name, column in vars(trace.storages).items()}
    return replace(trace, storages=Storages(**storages)).live_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fake_step_is_the_real_one_to_the_byte(layout: str) -> None:
    arguments = [JOB, *SMALL, *LAYOUTS[layout]]
    real, *_ = run_ranks(real_trace, 2, arguments, timeout_s=100)
    fake = fake_trace(arguments)
    ours, theirs = list(names(fake)), list(names(real))
    copies: list[int] = []
    for change, start, end, first, last in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if change != "equal":
            assert (change, last - first) == ("delete", 0), (theirs[start:end], ours[first:last])
            assert all(name[0] in GLOO_COPIES for name in theirs[start:end]), theirs[start:end]
            copies += range(start, end)
    expected = live_without(real, copies)
    assert fake.live_bytes().max() == expected.max()
    assert fake.live_bytes()[[0, -1]].tolist() == expected[[0, -1]].tolist()
