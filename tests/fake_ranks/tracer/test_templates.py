"""A step told from four of its microbatches, or from another pipeline rank, is the step that is traced in full."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.load import load_job
from meshwright.errors import MeshwrightError
from meshwright.spec.trace.trace import Trace
from meshwright.spec.trace.trace_order import fingerprint, first_difference
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.extrapolate.trace_cache import TraceCache
from meshwright.tracer.programs.job_steps import job_steps
from meshwright.tracer.programs.trace_ranks import Program
from meshwright.tracer.trace_job import TraceOptions
from meshwright.trainer.step.step_builder import TRAINER_STEP
from repository import ROOT
from trained_step import BUILD, trace_file

JOB = str(ROOT / "examples" / "tiny.toml")
MICROBATCHES = ("layout.microbatch_size=1", "train.global_batch_size=16", "train.seq_len=64")
LAYOUTS = {
    "accumulated": ("layout.dp_shard=2",),
    "accumulated, bfloat16": ("layout.dp_shard=2", "precision.compute=bfloat16"),
    "kept": ("layout.dp_shard=2", "layout.reshard_after_forward=never", "precision.compute=bfloat16"),
    "reduced once": ("layout.dp_shard=2", "layout.dp_replicate=2", "layout.gradient_sync=step"),
    "replicas": ("layout.dp_shard=2", "layout.dp_replicate=2", "precision.compute=bfloat16"),
    "reduced in a pipeline": (
        "layout.dp_shard=2",
        "layout.dp_replicate=2",
        "layout.pp=2",
        "layout.gradient_sync=microbatch",
    ),
    "reduced by several stages": (
        "layout.dp_shard=2",
        "layout.pp=2",
        "layout.schedule=Interleaved1F1B",
        "layout.gradient_sync=microbatch",
    ),
    "1F1B": ("layout.dp_shard=2", "layout.pp=4", "layout.schedule=1F1B", "model.options.num_layers=4"),
    "GPipe": ("layout.dp_shard=2", "layout.pp=2", "layout.schedule=GPipe"),
    "Interleaved1F1B": ("layout.dp_shard=2", "layout.pp=2", "layout.schedule=Interleaved1F1B"),
    "LoopedBFS": ("layout.dp_shard=2", "layout.pp=2", "layout.schedule=LoopedBFS"),
    "InterleavedZeroBubble": ("layout.dp_shard=2", "layout.pp=2", "layout.schedule=InterleavedZeroBubble"),
    "InterleavedZeroBubble, bfloat16": (
        *("layout.dp_shard=2", "layout.pp=2", "layout.schedule=InterleavedZeroBubble"),
        "precision.compute=bfloat16",
    ),
    "ZBVZeroBubble": ("layout.dp_shard=2", "layout.pp=2", "layout.schedule=ZBVZeroBubble"),
    "DualPipeV": ("layout.dp_shard=1", "layout.pp=2", "layout.schedule=DualPipeV"),
    "recomputed": ("layout.dp_shard=2", "layout.pp=2", "layout.activation_checkpoint=full"),
    "experts": ("model.source=moe-4m", "layout.dp_shard=2", "layout.ep=2", "layout.pp=2"),
    "tp and cp": ("layout.dp_shard=1", "layout.tp=2", "layout.cp=2", "layout.pp=2", "layout.cp_method=ring"),
    "freed in a pipeline": ("layout.dp_shard=2", "layout.pp=2", "layout.reshard_after_forward=always"),
}
REDUCED_AFTER_SPLIT = (
    *("layout.dp_shard=2", "layout.pp=2"),
    *("layout.schedule=ZBVZeroBubble", "layout.gradient_sync=microbatch"),
)
UNCACHED = TraceOptions(use_cache=False)


def assert_same(told: Trace, whole: Trace) -> None:
    assert first_difference(told, whole) is None
    assert fingerprint(told) == fingerprint(whole)
    assert told.live_bytes().tolist() == whole.live_bytes().tolist()
    assert (told.traced, told.scopes, told.groups) == (whole.traced, whole.scopes, whole.groups)
    for name in ("scope", "group", "peer"):
        assert (getattr(told.records, name) == getattr(whole.records, name)).all(), name


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_few_microbatches_tell_is_what_all_of_them_do(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    overrides = [*MICROBATCHES, *LAYOUTS[layout]]
    with caplog.at_level(logging.INFO, logger="meshwright"):
        told = trace_file(JOB, overrides, how=UNCACHED)
    assert "all microbatches are traced" not in caplog.text
    whole = trace_file(JOB, overrides, how=replace(UNCACHED, mode="whole"))
    assert told.traces.keys() == whole.traces.keys()
    assert (told.class_of_rank == whole.class_of_rank).all()
    for rank, trace in whole.traces.items():
        assert_same(told.traces[rank], trace)


@pytest.mark.long
def test_where_stages_reduce_in_a_changing_order_all_microbatches_are_traced(caplog: pytest.LogCaptureFixture) -> None:
    overrides = [*MICROBATCHES, *REDUCED_AFTER_SPLIT]
    with caplog.at_level(logging.INFO, logger="meshwright"):
        found = trace_file(JOB, overrides, how=UNCACHED)
    assert "all microbatches are traced" in caplog.text
    whole = trace_file(JOB, overrides, how=replace(UNCACHED, mode="whole"))
    for rank, trace in whole.traces.items():
        assert_same(found.traces[rank], trace)


@pytest.mark.long
def test_so_it_is_on_a_processor() -> None:
    overrides = [*MICROBATCHES, *LAYOUTS["1F1B"]]
    told = trace_file(JOB, overrides, device="cpu", how=UNCACHED)
    whole = trace_file(JOB, overrides, device="cpu", how=replace(UNCACHED, mode="whole"))
    for rank, trace in whole.traces.items():
        assert_same(told.traces[rank], trace)


def test_a_pipeline_rank_in_the_middle_is_told_by_another() -> None:
    steps = job_steps(TRAINER_STEP, load_job(JOB, [*MICROBATCHES, *LAYOUTS["1F1B"]]), None)
    assert steps.alike == {0: [0], 1: [1, 2], 3: [3]}
    assert steps.chosen is not None
    assert steps.chosen.microbatches == (0, 1, 2, 7)
    program = Program(BUILD, steps.layout.num_ranks)
    # Ranks 4 and 5 are of the third pipeline rank; 2, of the second, is traced.
    assert_same(steps.extrapolated([4], program, 1)[4], steps.whole([4], program, 1)[4])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Traces]:
    """A cache, and what was traced into it."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, traced_into(folder)


def traced_into(folder: Path, *overrides: str, verify: int = 0) -> Traces:
    arguments = [
        *MICROBATCHES,
        "layout.dp_shard=2",
        "model.options.num_layers=2",
        f"data.cache_dir={folder}",
        *overrides,
    ]
    return trace_file(JOB, arguments, how=TraceOptions(verify=verify))


def test_a_job_that_was_traced_is_not_traced_again(kept: tuple[Path, Traces]) -> None:
    folder, traces = kept
    (made,) = folder.iterdir()
    times = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    # Where a run writes to does not change its step.
    again = traced_into(folder, "run.dir=elsewhere")
    assert_same(again.traces[0], traces.traces[0])
    assert {file: file.stat().st_mtime_ns for file in made.iterdir()} == times


@pytest.mark.long
def test_ranks_that_should_do_the_same_and_do_not_are_named(kept: tuple[Path, Traces], tmp_path: Path) -> None:
    folder = shutil.copytree(kept[0], tmp_path / "cache")
    (made,) = folder.iterdir()
    (file,) = made.iterdir()
    trace = Trace.load(file)
    trace.records.num_bytes[np.flatnonzero(trace.records.num_bytes)[0]] += 1
    trace.save(file)
    with pytest.raises(MeshwrightError, match=r"ranks 0 and 1 should do the same step, but record \d+ is c10d"):
        traced_into(folder, verify=1)


def test_traces_that_are_damaged_are_not_read(
    kept: tuple[Path, Traces], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, trace = TraceCache(tmp_path / "traces"), kept[1].traces[0]
    assert cache.load("whole", [0]) == {}
    cache.save("whole", {0: trace, 1: trace})
    read = cache.load("whole", [0, 2])
    assert list(read) == [0]
    assert_same(read[0], trace)
    assert cache.load("part", [0]) == {}
    (cache.folder / "whole-rank0.npz").write_bytes(b"half of a")
    assert list(cache.load("whole", [0, 1])) == [1]
    assert "damaged" in caplog.text
    cache.save("whole", {0: trace})
    assert list(cache.load("whole", [0, 1])) == [0, 1]
    assert sorted(file.name for file in cache.folder.iterdir()) == ["whole-rank0.npz", "whole-rank1.npz"]
