"""A profile of a CUDA device, in the format that torch documents and written by hand: no device made these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiler.profiled_timeline import timeline_of
from meshwright.spec.step.timeline_decomposition import decompose
from meshwright.spec.trace.timeline import SpanKind

HOST, BACKWARD_THREAD = 100, 101


def event(category: str, name: str, start_us: float, dur_us: float, thread: int = HOST, **args: Any) -> dict[str, Any]:
    row = {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": dur_us, "pid": 1, "tid": thread}
    return row | {"args": args}


def launched(number: int, at_us: float, thread: int, kernel: dict[str, Any]) -> list[dict[str, Any]]:
    kernel["args"]["correlation"] = number
    launch = event("cuda_runtime", "cudaLaunchKernel", at_us, 2, thread, correlation=number)
    return [launch, kernel]


def trace_of_rank(folder: Path, rank: int, arrives_us: float) -> Path:
    """One step of 1000 us: a matmul, an all-reduce along tp that the ranks enter apart, a backward, the optimizer."""
    group = {"Process Group Description": "mesh_tp", "Process Group Ranks": "[0, 1]", "dtype": "BFloat16"}
    nccl = event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", arrives_us, 400 - arrives_us, 20, stream=20)
    nccl["args"] |= group | {"In msg nelems": 8, "Out msg nelems": 8}
    rows = [
        event("user_annotation", "ProfilerStep#7", 0, 1000),
        event("user_annotation", "data", 0, 50),
        event("user_annotation", "action 0F0", 60, 140),
        event("user_annotation", "FSDP::pre_forward (blocks.0)", 60, 5),
        event("cpu_op", "aten::linear", 70, 20),
        event("cpu_op", "aten::mm", 72, 15),
        *launched(1, 75, HOST, event("kernel", "gemm_kernel", 100, 100, 7, stream=7)),
        event("cpu_op", "_c10d_functional::all_reduce", 100, 30),
        *launched(2, 110, HOST, nccl),
        event("user_annotation", "action 0B0", 300, 300),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 310, 50, BACKWARD_THREAD),
        event("cpu_op", "aten::mm", 320, 20, BACKWARD_THREAD),
        *launched(3, 325, BACKWARD_THREAD, event("kernel", "gemm_kernel", 400, 200, 7, stream=7)),
        event("cpu_op", "aten::_fused_adamw_", 700, 20),
        *launched(4, 705, HOST, event("kernel", "multi_tensor_apply", 720, 80, 7, stream=7)),
        *launched(5, 800, HOST, event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 810, 10, 7, stream=7)),
        event("kernel", "of_another_step", 900, 50, 7, stream=7, correlation=99),
    ]
    told = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": []}
    file = folder / f"rank-{rank}.json"
    file.write_text(json.dumps({"traceEvents": rows, "distributedInfo": told, "host_name": "h"}), encoding="utf-8")
    return file


def test_kernels_are_told_by_the_operators_that_launched_them(tmp_path: Path) -> None:
    timeline = timeline_of([trace_of_rank(tmp_path, 0, 200)], "by hand")
    spans = timeline.spans.take(timeline.spans.kind == SpanKind.COMPUTE)
    told = [
        (timeline.names[name], timeline.phases[phase], timeline.scopes[scope], int(stream))
        for name, phase, scope, stream in zip(spans.name, spans.phase, spans.scope, spans.stream, strict=True)
    ]
    assert told == [
        ("aten.mm", "forward", "blocks.0", 0),
        ("aten.mm", "backward", "blocks.0", 0),
        ("aten._fused_adamw_", "optimizer", "blocks.0", 0),
        ("Memcpy DtoH (Device -> Pinned)", "optimizer", "blocks.0", 0),
    ]


def test_a_rank_waits_in_a_collective_until_the_last_one_is_there(tmp_path: Path) -> None:
    files = [trace_of_rank(tmp_path, 0, 200), trace_of_rank(tmp_path, 1, 350)]
    timeline = timeline_of(files, "by hand")
    communication = timeline.spans.take(timeline.spans.kind == SpanKind.COMMUNICATION)
    assert communication.start_s.tolist() == pytest.approx([350e-6, 350e-6])
    assert communication.num_bytes.tolist() == [16, 16]
    assert [timeline.axes[axis] for axis in communication.axis] == ["tp", "tp"]
    early, late = decompose(timeline, 0), decompose(timeline, 1)
    assert (early.tp_communication_s, late.tp_communication_s) == pytest.approx((200e-6, 50e-6))
    assert (early.compute_s, early.optimizer_s, early.data_loading_s) == pytest.approx((300e-6, 90e-6, 50e-6))
    assert early.total_s == pytest.approx(1e-3)
