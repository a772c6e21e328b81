"""Programs are traced as people write them, and what cannot be is refused in one message with the line."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import foreign_programs
from meshwright.simulator.checks.hazards import hazards
from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks
from traced_programs import WORLD_SIZE, ops, trace_of, trace_programs

FLOAT_BYTES = 4
PROGRAMS = (
    "moved/to",
    "moved/to_dtype",
    "moved/cuda",
    "moved/index",
    "moved/to_empty",
    "scalars",
    "mixed_precision",
    "streams",
    "by_torchrun",
    "images/0",
    "images/2",
    "characters",
    "evaluated",
    "sharded/default",
    "sharded/hybrid",
    "adapted",
    "bucketed/",
    "bucketed/2",
    "flat",
    "optimizer_shards",
    "decided_by_a_number",
    "scaled",
    "guessing",
    "gathered",
    "strided",
    "guessing_wrong",
    "buffered",
    "hooked/fp16",
    "hooked/bf16",
    "coalesced",
    "by_address",
    "grouped_in_full",
    "saved",
    "lazy",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what became of each program."""
    return trace_programs(tmp_path_factory.mktemp("traced"), foreign_programs.__name__, *PROGRAMS)


def collectives(found: Trace, op: str) -> list[int]:
    """Return the bytes of each collective of one kind, in order."""
    is_one = [position >= 0 and found.signatures[position].op == op for position in found.records.signature]
    return found.records.num_bytes[is_one].tolist()


@pytest.mark.parametrize("how", ["to", "to_dtype", "cuda", "index", "to_empty"])
def test_a_model_is_moved_in_place(folder: Path, how: str) -> None:
    found = trace_of(folder, f"moved/{how}")
    # The optimizer that was made before holds the one parameter that embedding and head share.
    weight = foreign_programs.VOCAB * foreign_programs.WIDTH * (2 if how in ("to_dtype", "cuda") else FLOAT_BYTES)
    kept = found.storages.num_bytes[found.storages.allocated_at == -1].tolist()
    assert kept.count(weight) == 1
    assert "optimizer" in found.phases


def test_tensors_of_no_and_one_number(folder: Path) -> None:
    assert ops(trace_of(folder, "scalars"))["aten.cat.default"] == 1


def test_autocast_casts_as_on_cuda_and_a_scaler_steps(folder: Path) -> None:
    found = trace_of(folder, "mixed_precision")
    products = {one.inputs[-1].dtype for one in found.signatures if one.op.startswith("aten.addmm")}
    assert products == {"float16"}
    # Two weights and two biases, once though the first layer runs twice, and the norm's input and scale.
    assert ops(found)["aten._fused_adamw_.default"] == 1


def test_streams_wait_for_each_other(folder: Path) -> None:
    found = trace_of(folder, "streams")
    assert {0, 1} <= set(found.records.stream.tolist())
    assert RecordKind.WAIT_EVENT in found.records.kind


def test_a_script_for_nvidia_gpus_is_traced(folder: Path) -> None:
    found = trace_of(folder, "by_torchrun")
    assert len(collectives(found, "c10d.allreduce_.default")) == 2
    # A whole number and a fraction are read, and the device is waited for.
    assert found.records.kind.tolist().count(RecordKind.HOST_SYNC) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_reads_batches_and_statistics_are_reduced(folder: Path, num_workers: int) -> None:
    found = ops(trace_of(folder, f"images/{num_workers}"))
    assert found["aten.batch_norm_stats.default"] == found["aten.batch_norm_backward_reduce.default"] == 1
    assert found["c10d._allgather_base_.default"] == 1


def test_windows_are_cut_at_numbers_of_the_host(folder: Path) -> None:
    found = trace_of(folder, "characters")
    weight = foreign_programs.VOCAB * foreign_programs.WIDTH * FLOAT_BYTES
    assert collectives(found, "c10d.allreduce_.default") == [weight]
    assert ops(found)["aten.embedding.default"] == 3


def test_sharding_without_a_mesh_is_over_all_ranks(folder: Path) -> None:
    assert trace_of(folder, "sharded/default").groups == (tuple(range(WORLD_SIZE)),)


def test_an_evaluation_gathers_once_more(folder: Path) -> None:
    found = trace_of(folder, "evaluated")
    num_blocks = len(collectives(found, "c10d._reduce_scatter_base_.default"))
    assert num_blocks > 1
    # In forward, in backward and in the evaluation; what the last of them had gathered ahead is not gathered again.
    assert len(collectives(found, "c10d._allgather_base_.default")) >= 3 * num_blocks - 1


def test_sharding_with_replicas(folder: Path) -> None:
    found = trace_of(folder, "sharded/hybrid")
    assert {(0, 1), (1, 3)} <= set(found.groups)
    assert len(collectives(found, "c10d.allreduce_.default")) > 0


def test_parameters_that_are_not_found(folder: Path) -> None:
    # Of three that train one is not used, and all three are reduced, as is the map of those that are used.
    parameter = foreign_programs.WIDTH**2 * FLOAT_BYTES
    assert sorted(collectives(trace_of(folder, "adapted"), "c10d.allreduce_.default")) == [
        3 * FLOAT_BYTES,
        3 * parameter,
    ]


def test_parameters_are_sent_by_the_rank_whose_optimizer_has_them(folder: Path) -> None:
    found = trace_of(folder, "optimizer_shards")
    sent = sum(collectives(found, "c10d.broadcast_.default"))
    assert sent == 2 * (foreign_programs.WIDTH + 1) * foreign_programs.WIDTH * FLOAT_BYTES


@pytest.mark.parametrize("cap_mb", ["", "2"])
def test_buckets_are_those_of_a_real_reducer_after_its_first_step(folder: Path, cap_mb: str) -> None:
    found = trace_of(folder, f"bucketed/{cap_mb}")
    width, mebibyte = foreign_programs.BUCKET_WIDTH, 2**20
    limits, wanted, size = ([2 * mebibyte] if cap_mb else [mebibyte, 25 * mebibyte]), list[int](), 0
    # Gradients of a layer's bias come before its weight's, the last layer first; a bucket is full once it is too large.
    for numel in [width, width**2] * foreign_programs.BUCKET_DEPTH:
        size += numel * FLOAT_BYTES
        if size >= limits[min(len(wanted), len(limits) - 1)]:
            wanted.append(size)
            size = 0
    wanted += [size] if size else []
    assert len(wanted) > 1
    assert collectives(found, "c10d.allreduce_.default") == wanted
    # They are marked as DDP's, as are the waits for them: their group has no name.
    is_marked = found.records.scope == found.scopes.index("DDP::all_reduce")
    kinds = Counter(found.records.kind[is_marked].tolist())
    assert kinds[RecordKind.COLLECTIVE] == kinds[RecordKind.WAIT] == len(wanted)
    assert not np.isin(found.records.kind[~is_marked], (RecordKind.COLLECTIVE, RecordKind.WAIT)).any()
    assert math.isclose(sum(wanted), foreign_programs.BUCKET_DEPTH * (width + 1) * width * FLOAT_BYTES)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("flat", "FSDP1, whose flat parameters cannot be traced: use torch.distributed.fsdp.fully_shard"),
        ("decided_by_a_number", "foreign_programs.py:"),
        ("guessing_wrong", "too far from the mean; before, foreign_programs.py:"),
        ("saved", "do not save in the traced program"),
        ("lazy", "use a module with sizes, such as nn.Linear(in_features, out_features)"),
    ],
)
def test_what_is_refused_says_so_in_one_message(folder: Path, program: str, said: str) -> None:
    message = (folder / program).with_suffix(".txt").read_text(encoding="utf-8")
    assert said in message
    assert "site-packages" not in message


def test_a_healthy_step_is_read(folder: Path) -> None:
    found = trace_of(folder, "scaled")
    # What only tests for numbers that are not finite is no guess; the optimizer, which the scaler guards, runs.
    assert found.guesses == ()
    assert ops(found)["aten._foreach_addcdiv_.ScalarList"] == 1


def test_what_decides_by_a_guess_is_named(folder: Path) -> None:
    guesses = trace_of(folder, "guessing").guesses
    assert [one.value for one in guesses] == ["0.25", "True"]
    assert all(one.line.startswith("foreign_programs.py:") for one in guesses)
    assert "here it reads as 0.25: make sure" in str(guesses[0])


def test_what_a_collective_brings_is_followed_and_a_message_is_a_guess(folder: Path) -> None:
    (guess,) = trace_of(folder, "gathered").guesses
    assert guess.value == "1"


def test_views_are_read_in_their_own_order(folder: Path) -> None:
    assert trace_of(folder, "strided").guesses == ()


def test_buffers_are_waited_for(folder: Path) -> None:
    found = trace_of(folder, "buffered")
    # Statistics, and how many batches they are of.
    assert len(collectives(found, "c10d.broadcast_.default")) >= 2
    assert not hazards(Traces(WORLD_SIZE, {1: found}, np.ones(WORLD_SIZE, np.int64)))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_gradients_are_reduced_by_the_programs_own_hook(folder: Path, name: str) -> None:
    found = trace_of(folder, f"hooked/{name}")
    num_bytes = sum(collectives(found, "c10d.allreduce_.default"))
    assert num_bytes == 2 * (foreign_programs.WIDTH + 1) * foreign_programs.WIDTH * 2
    # What came is decompressed on a stream of its own, for which the others wait.
    assert len(set(found.records.stream.tolist())) == 2
    assert not hazards(Traces(WORLD_SIZE, {1: found}, np.ones(WORLD_SIZE, np.int64)))


def test_coalesced_collectives_are_one(folder: Path) -> None:
    found = trace_of(folder, "coalesced")
    num_bytes = 3 * foreign_programs.WIDTH**2 * FLOAT_BYTES
    assert collectives(found, "c10d.allreduce_coalesced_.default") == [num_bytes]
    assert collectives(found, "c10d.reduce_scatter_tensor_coalesced_.default") == [num_bytes]
    assert not hazards(Traces(WORLD_SIZE, {1: found}, np.ones(WORLD_SIZE, np.int64)))


def test_matmuls_of_float32_may_be_rounded(folder: Path) -> None:
    products = [one for one in trace_of(folder, "coalesced").signatures if one.op == "aten.mm.default"]
    assert [one.is_tf32 for one in products] == [True]
    assert not any(one.is_tf32 for one in trace_of(folder, "streams").signatures)


def test_tensors_have_addresses(folder: Path) -> None:
    assert "optimizer" in trace_of(folder, "by_address").phases


def test_groups_without_a_kernel_are_multiplied_one_by_one(folder: Path) -> None:
    found = trace_of(folder, "grouped_in_full")
    # In forward, and for the gradients of both factors.
    assert ops(found)["aten.mm.out"] == 3 * 2
    assert RecordKind.HOST_SYNC in found.records.kind


@pytest.mark.parametrize(
    ("schedule", "num_sent"),
    [("ScheduleGPipe", 1), pytest.param("ScheduleInterleaved1F1B", 3, marks=pytest.mark.long)],
)
def test_stages_of_torchs_own_pipeline_are_sent_their_shapes(schedule: str, num_sent: int) -> None:
    program = Program("foreign_programs:pipelined", WORLD_SIZE, (schedule,))
    # The ranks between them are traced for what they send only.
    for found in trace_ranks(program, [0, WORLD_SIZE - 1]).values():
        kinds = Counter(found.records.kind.tolist())
        # First and last send activations, or gradients, of one stage less than they have, twice if they have two.
        assert kinds[RecordKind.SEND] == kinds[RecordKind.RECEIVE] == num_sent * foreign_programs.NUM_MICROBATCHES
        sent = found.records.num_bytes[found.records.kind == RecordKind.SEND]
        assert set(sent.tolist()) == {2 * foreign_programs.SEQ * foreign_programs.WIDTH * FLOAT_BYTES}
        # Between a backward and the next forward the schedule exchanges messages: the optimizer comes after it.
        is_message = np.isin(found.records.kind, (RecordKind.SEND, RecordKind.RECEIVE))
        assert {found.phases[one] for one in found.records.phase[is_message]} == {"forward", "backward"}


@pytest.mark.long
@pytest.mark.parametrize("program", ["compiled", "compiled_dropout", "compiled_whole", "compiled_and_reduced"])
def test_a_compiled_model_records_its_kernels(tmp_path: Path, program: str) -> None:
    found = ops(trace_of(trace_programs(tmp_path, foreign_programs.__name__, program), program))
    assert any(op.startswith("inductor.fused") for op in found)
