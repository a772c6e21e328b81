"""Ranks whose shards are equal are of one class, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.load import load_job
from meshwright.simulator.checks.check_traces import check
from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import Records, Signature, Storages, TensorShape, Trace, Traced, Uses
from meshwright.spec.trace.trace_order import fingerprint, first_difference, in_order
from meshwright.tracer.extrapolate.rank_labels import class_labels, token_labels
from meshwright.tracer.programs.job_steps import job_steps
from meshwright.tracer.programs.trace_ranks import Program
from meshwright.tracer.trace_job import TraceOptions
from meshwright.trainer.step.step_builder import TRAINER_STEP
from repository import ROOT
from trained_step import BUILD, trace_file

JOB = str(ROOT / "examples" / "tiny.toml")
MIXTURE = str(ROOT / "examples" / "tiny-moe.toml")
NONE = np.zeros(0, np.int64)


def trace_that_cuts(rows: list[int], shards: int) -> Trace:
    """Return a trace whose gradients of `rows` rows are cut into shards, and of nothing else."""
    shapes = tuple(TensorShape(dtype="float32", dims=(number, 4)) for number in rows)
    result = TensorShape(dtype="float32", dims=(shards, 100))
    return Trace(
        traced=Traced(build="module:function", rank=0, world_size=shards, torch_version="2.13.0"),
        signatures=(Signature(op="fsdp.chunk_cat.default", inputs=(*shapes, result), outputs=()),),
        scopes=(),
        phases=(),
        actions=(),
        groups=(),
        group_names=(),
        records=Records(**dict.fromkeys(Records.__dataclass_fields__, NONE)),
        storages=Storages(**dict.fromkeys(Storages.__dataclass_fields__, NONE)),
        uses=Uses(**dict.fromkeys(Uses.__dataclass_fields__, NONE)),
    )


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_a_class_is_of_ranks_with_the_same_rows_of_everything(rows: list[int], shards: int, tp: int) -> None:
    layout = Layout(dp_shard=shards, tp=tp, dp_replicate=2)
    labels = class_labels(trace_that_cuts(rows, shards), layout, "balanced")
    # As torch.chunk cuts them.
    chunks = [[min(-(-n // shards), max(n - at * -(-n // shards), 0)) for n in rows] for at in range(shards)]
    held = [tuple(chunks[rank // tp % shards]) for rank in range(layout.num_ranks)]
    assert labels[0] == 0
    assert len(set(zip(labels.tolist(), held, strict=True))) == len(set(held)) == len(set(labels.tolist()))


@pytest.mark.parametrize(
    ("layout", "routing", "count"),
    [
        (Layout(dp_shard=4, cp=2), "balanced", 2),
        (Layout(dp_shard=4, cp=2, cp_method="ulysses"), "balanced", 1),
        (Layout(dp_shard=8, ep=4), "balanced", 1),
        (Layout(dp_shard=8, ep=4), "worst", 4),
    ],
)
def test_what_else_makes_ranks_differ(layout: Layout, routing: str, count: int) -> None:
    assert len(set(class_labels(trace_that_cuts([64], 8), layout, routing).tolist())) == count


def test_ranks_with_loads_of_one_order_are_one_class() -> None:
    layout = Layout(dp_shard=16, ep=8, tp=2)
    even, zipf, worst, unknown = (
        token_labels(layout, rows).tolist()[:8]
        for rows in ((1,) * 8, (880, 384, 240, 168, 128, 104, 80, 64), (512, 512, 512, 0, 0, 0, 0, 0), None)
    )
    assert even == [0] * 8
    assert zipf == [0, 1, 2, 2, 3, 3, 3, 3]
    assert worst == [0, 0, 0, 1, 1, 1, 1, 1]
    assert unknown == list(range(8))


LOADED = ["train.global_batch_size=16", "train.seq_len=64", "layout.dp_shard=8", "layout.ep=8"]


@pytest.mark.long
def test_a_step_with_another_load_is_the_one_that_is_traced_with_it() -> None:
    how = TraceOptions(use_cache=False, routing="zipf:1.2")
    traces = trace_file(MIXTURE, LOADED, how=how)
    assert sorted(traces.traces) == [0, 1, 2, 4]
    steps = job_steps(TRAINER_STEP, load_job(MIXTURE, LOADED), None)
    traced = steps.whole([1, 2], Program(BUILD, 8, routing="zipf:1.2"), 2)
    for rank, trace in traced.items():
        # Ranks 0 and 4 were traced; every size of the two between them is computed.
        assert first_difference(traces.traces[rank], trace) is None
        assert fingerprint(traces.traces[rank]) == fingerprint(trace)
        assert traces.traces[rank].live_bytes().tolist() == trace.live_bytes().tolist()
        assert sum_flops(traces.traces[rank]) == sum_flops(trace)
        assert traces.traces[rank].groups == in_order(trace).groups


@pytest.mark.long
def test_ranks_of_every_load_receive_what_the_others_send() -> None:
    layout = ["model.options={num_layers=1}", "layout.dp_shard=16", "layout.ep=4"]
    overrides = [*layout, "train.global_batch_size=32", "train.seq_len=64"]
    traces = trace_file(MIXTURE, overrides, how=TraceOptions(use_cache=False, routing="zipf:1.2"))
    # Rank 1 is computed from ranks 0 and 2.
    assert sorted(traces.traces) == [0, 1, 2]
    assert check(traces) == ()


def sum_flops(trace: Trace) -> int:
    signatures = trace.records.signature[trace.records.signature >= 0]
    return sum(trace.signatures[position].flops for position in signatures.tolist())


@pytest.mark.long
def test_a_loaded_rank_and_one_without_tokens_are_traced() -> None:
    traces = trace_file(MIXTURE, LOADED, how=TraceOptions(use_cache=False, routing="worst"))
    # One expert on each of eight ranks, two for each token.
    assert traces.class_of_rank.tolist() == [0, 0, 2, 2, 2, 2, 2, 2]
    first, none = (int(traces.of_rank(rank).live_bytes().max()) for rank in (0, 7))
    assert first > none


@pytest.mark.long
def test_one_rank_of_each_class_is_traced_and_stands_for_the_others() -> None:
    how = TraceOptions(use_cache=False, classes="all", verify=3)
    overrides = ["layout.dp_shard=64", "train.global_batch_size=128", "layout.microbatch_size=1"]
    traces = trace_file(JOB, overrides, how=how)
    # 128 and 512 rows are cut evenly. Of 288 rows of embedding and head 57 shards have five, the next three.
    assert sorted(traces.traces) == [0, 57, 58]
    live = [int(traces.of_rank(rank).live_bytes()[0]) for rank in (56, 57, 63)]
    assert live[0] > live[1] > live[2]
    largest = trace_file(JOB, overrides, how=TraceOptions(use_cache=False))
    assert sorted(largest.traces) == [0]
