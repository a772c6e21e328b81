"""The trainer's step of any of hundreds of ranks, traced on an accelerator that is not there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import ConfigError
from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of

JOB = str(ROOT / "examples" / "tiny.toml")
NUM_RANKS = 512
FEW_BLOCKS = "model.options.num_layers=2"
HYBRID = ("layout.dp_shard=64", "layout.tp=4", "layout.pp=2", "train.global_batch_size=128", "layout.microbatch_size=1")


def traced(rank: int, *overrides: str) -> Trace:
    return trace(BUILD, rank, NUM_RANKS, arguments_of(JOB, *overrides))


def ops(found: Trace) -> list[str]:
    return [found.signatures[position].op for position in found.records.signature if position != NONE]


@pytest.fixture(scope="module")
def hybrid() -> Trace:
    return traced(300, *HYBRID)


def test_collectives_have_their_exact_ranks(hybrid: Trace) -> None:
    # pp outermost, then 64 shards, then 4 tensor-parallel ranks: rank 300 is the 12th shard of the second stage.
    assert set(hybrid.groups) >= {tuple(range(300, 304)), tuple(range(256, 512, 4))}
    sends = hybrid.records.kind == RecordKind.SEND
    assert set(hybrid.records.peer[sends].tolist()) == {300 - 256}


def test_ranks_that_do_the_same_have_the_same_trace(hybrid: Trace) -> None:
    # The sixth shard, another tensor-parallel rank.
    other = traced(256 + 4 * 5 + 3, *HYBRID)
    for name in ("kind", "stream", "signature", "phase", "num_bytes", "work"):
        assert (getattr(other.records, name) == getattr(hybrid.records, name)).all(), name
    assert other.signatures == hybrid.signatures
    assert other.live_bytes().tolist() == hybrid.live_bytes().tolist()


def test_ranks_whose_shards_are_empty_have_another(hybrid: Trace) -> None:
    # 72 rows of the head over 64 shards: two for each of the first 36, none for the others.
    empty = traced(256 + 4 * 53, *HYBRID)
    assert ops(empty) == ops(hybrid)
    assert empty.signatures != hybrid.signatures
    assert empty.live_bytes()[0] < hybrid.live_bytes()[0]


def test_scopes_are_the_modules_of_the_whole_model(hybrid: Trace) -> None:
    # The second stage has the last half of the blocks, by their numbers in the whole model.
    records = hybrid.records
    matmuls = [at for at, one in enumerate(hybrid.signatures) if one.op.startswith(("aten.mm.", "aten.addmm."))]
    phases: dict[str, list[str]] = {}
    for row in np.flatnonzero(np.isin(records.signature, matmuls)):
        phases.setdefault(hybrid.scopes[records.scope[row]], []).append(hybrid.phases[records.phase[row]])
    attention = [f"attention.{name}" for name in ("query", "key", "value", "output")]
    layers = [*attention, *(f"ffn.{name}" for name in ("gate", "up", "down"))]
    expected = {f"blocks.{block}.{layer}" for block in (2, 3) for layer in layers}
    assert expected <= set(phases)
    for scope in expected:
        # A product forward, and one for the gradient of each factor.
        assert phases[scope].count("backward") == 2 * phases[scope].count("forward") > 0
        assert "optimizer" not in phases[scope]
    clipped = [at for at, one in enumerate(hybrid.signatures) if one.op.startswith("aten._foreach_norm")]
    assert {hybrid.phases[at] for at in records.phase[np.isin(records.signature, clipped)]} == {"optimizer"}


def test_every_wait_is_for_a_collective_before_it(hybrid: Trace) -> None:
    records = hybrid.records
    begun = set()
    for kind, work in zip(records.kind, records.work, strict=True):
        if kind == RecordKind.WAIT:
            assert work in begun
        elif work != NONE:
            begun.add(work)


def test_kernels_are_those_of_an_accelerator() -> None:
    found = traced(0, "layout.dp_shard=512", "precision.compute=bfloat16", "train.global_batch_size=1024")
    assert "aten._scaled_dot_product_cudnn_attention.default" in ops(found)
    assert "aten._fused_rms_norm.default" in ops(found)
    assert "aten.bmm.default" not in ops(found)
    # FSDP2's own streams, which gather while the default one computes.
    gathers = np.array([name == "c10d._allgather_base_.default" for name in ops(found)])
    streams = found.records.stream[found.records.signature != NONE]
    assert set(streams[gathers].tolist()).isdisjoint({0})


def test_experts_get_tokens_though_nobody_routes_them() -> None:
    keys = ("layout.dp_shard=512", "layout.ep=4", "train.global_batch_size=1024")
    found = traced(5, "model.source=moe-4m", FEW_BLOCKS, *keys)
    assert "_c10d_functional.all_to_all_single.default" in ops(found)
    assert tuple(range(4, 8)) in found.groups


@pytest.mark.long
def test_a_step_is_the_same_whatever_its_weights_start_from(tmp_path: Path) -> None:
    """No fake rank reads the folders, which may not be on this machine."""
    named = ("adapter.kind=lora", FEW_BLOCKS, f"model.initial_weights={tmp_path}", f"adapter.initial={tmp_path}")
    first, second = (trace(BUILD, 0, 2, arguments_of(JOB, "layout.dp_shard=2", *keys)) for keys in (named, named[:2]))
    assert ops(first) == ops(second)


def test_a_step_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match=r"layout.tp = 8 does not divide the model's num_heads = 4: set layout.tp to"):
        traced(0, "layout.dp_shard=64", "layout.tp=8")


@pytest.mark.long
def test_the_end_of_a_tracing_process_ends_those_that_it_started(tmp_path: Path) -> None:
    module, mark = tmp_path / "slow_builder.py", tmp_path / "pid"
    module.write_text(
        "import os, pathlib, time\n"
        "def build(device, rank, world_size):\n"
        f"    pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    script += "from meshwright.tracer.programs.trace_ranks import trace; trace('slow_builder:build', 0, 1)"
    process = subprocess.Popen([sys.executable, "-c", script])
    while not (mark.exists() and mark.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    while _is_running(int(mark.read_text())):
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
