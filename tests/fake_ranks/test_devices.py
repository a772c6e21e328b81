"""A step on the simulated accelerator is the same step as on a processor, but for what this table lists.

tests/ranks/test_traced_steps.py holds the fake processor against a real one, record by record and byte by byte; this
holds the accelerator against the fake processor: all records that are not listed come in the same order, with the same
shapes, modules and phases; listed ones are as many as the table says; each storage that only one device has, or has for
longer, is made or kept by a listed record; and with those the peaks are the same.

| what | on a processor | on the accelerator | bytes |
|---|---|---|---|
| streams | there are none | events are recorded and waited for | none |
| the batch | lies where the step reads it | one copy of each tensor; cp indexes on the host | the batch's |
| numbers that the host reads | are read | are copied first, with a wait | none on the device |
| weights of gradients' norms | are there | are copied | the same, one record earlier |
| RMSNorm | 6 operators, backward 14; in 16 bits 5 casts | 1 kernel, backward 1 | (1) |
| the same where a schedule splits the backward | each part does its own | 1 kernel more, to the weights | none |
| attention in 16 bits | flash for processors | flash | 24 of random state a call |
| the same with a mask, as cp has | flash for processors | cuDNN's | 16 of random state a call |
| the same, in a ring | makes the gradient contiguous | an empty random state | 16 while backward runs |
| grouped heads in float32 (torch < 2.14) | flash for processors | matmuls, heads repeated, in another order | (2) |
| experts' matmuls in 16 bits | rows as they come | rows of each expert filled up to 8 | 7 rows an expert at most |

(1) For backward a processor keeps the normalized input in float32 and, in 16 bits, the input in float32; the kernel the
input as it came, which outlives the block's addition by that.
(2) Matmuls keep a score for each pair of query and key; flash attention a number for each query.

Not seen on either: what kernels ask for themselves (workspaces, such as one for the gradients of grouped heads).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from device_differences import (
    Difference,
    Memory,
    is_listed,
    memory_of,
    miscounted,
    rows_of,
    unexplained,
    unmatched_bytes,
)
from meshwright.spec.trace import Trace
from meshwright.tracer.trace import DeviceType, trace

BUILD = "meshwright.trainer.build_step:build_step"
EXAMPLES = Path(__file__).parents[2] / "examples"
SEQ_LEN, MICROBATCH, DIM, NUM_LAYERS = 64, 2, 128, 4
KEYS = (f"train.seq_len={SEQ_LEN}", "train.global_batch_size=4", f"layout.microbatch_size={MICROBATCH}")
DENSE = (str(EXAMPLES / "tiny.toml"), *KEYS, "layout.dp_shard=1")
EXPERTS = (str(EXAMPLES / "tiny-moe.toml"), *KEYS, "layout.dp_shard=1")
HALF = "precision.compute=bfloat16"
QUICK = {
    "fsdp, tp, recomputed, bfloat16": (
        4,
        *DENSE,
        "layout.dp_shard=2",
        "layout.tp=2",
        HALF,
        "layout.activation_checkpoint=full",
    ),
    "pp, float32": (2, *DENSE, "layout.pp=2"),
    "ep, bfloat16": (2, *EXPERTS, "layout.dp_shard=2", "layout.ep=2", HALF),
}
LONG = {
    "one device": (1, *DENSE),
    "one device, bfloat16": (1, *DENSE, HALF),
    "fsdp": (2, *DENSE, "layout.dp_shard=2"),
    "fsdp, bfloat16": (2, *DENSE, "layout.dp_shard=2", HALF),
    "fsdp, gathered once": (2, *DENSE, "layout.dp_shard=2", "layout.reshard_after_forward=never", HALF),
    "fsdp, not clipped": (2, *DENSE, "layout.dp_shard=2", "optimizer.max_grad_norm=0", HALF),
    "fsdp, recomputed selectively": (2, *DENSE, "layout.dp_shard=2", HALF, "layout.activation_checkpoint=selective"),
    "replicas": (2, *DENSE, "layout.dp_replicate=2", HALF),
    "replicas of shards": (4, *DENSE, "layout.dp_replicate=2", "layout.dp_shard=2", "train.global_batch_size=8", HALF),
    "tp, recomputed": (2, *DENSE, "layout.tp=2", "layout.activation_checkpoint=full"),
    "pp, zero bubble": (2, *DENSE, "layout.pp=2", "layout.schedule=ZBVZeroBubble", HALF),
    "pp, interleaved": (2, *DENSE, "layout.pp=2", "layout.schedule=Interleaved1F1B", HALF),
    "cp": (2, *DENSE, "layout.cp=2", HALF),
    "cp, float32": (2, *DENSE, "layout.cp=2"),
    "cp ring": (2, *DENSE, "layout.cp=2", "layout.cp_method=ring", HALF),
    "cp ulysses": (2, *DENSE, "layout.cp=2", "layout.cp_method=ulysses", HALF),
    "ep, float32": (2, *EXPERTS, "layout.dp_shard=2", "layout.ep=2"),
    "ep, recomputed": (2, *EXPERTS, "layout.dp_shard=2", "layout.ep=2", HALF, "layout.activation_checkpoint=full"),
    "ep over tp": (2, *EXPERTS, "layout.tp=2", "layout.ep=2", HALF),
    "tp, pp and cp": (8, *DENSE, "layout.tp=2", "layout.pp=2", "layout.cp=2", HALF),
}
CASES = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]

FORWARD, BACKWARD, OPTIMIZER = ("forward", "recompute"), ("backward",), ("optimizer",)
NORM, CORE, ATTENTION, FFN = r"(.*\.)?(\w+_)?norm", r".*\.attention\.core", r".*\.attention", r".*\.ffn\.experts"
COPY, CLONE, VIEW = "_to_copy.default", "clone.default", "_unsafe_view.default"
RMS, RMS_BACK = "_fused_rms_norm.default", "_fused_rms_norm_backward.default"
CPU_FLASH, FLASH, CUDNN = (
    f"_scaled_dot_product_{kernel}" for kernel in ("flash_attention_for_cpu", "flash_attention", "cudnn_attention")
)
SOFTMAX, SOFTMAX_BACK = "_safe_softmax.default", "_softmax_backward_data.default"
SCORES = {SOFTMAX: 1, "mul.Scalar": 2, CLONE: 3, VIEW: 3, "bmm.default": 2, "add.Tensor": 1}
SCORES_BACK = {SOFTMAX_BACK: 1, CLONE: 1, VIEW: 1, "bmm.default": 4, "mul.Scalar": 2, "sum.dim_IntList": 2}
TRIANGLE = {"ones.default": 1, "tril.default": 1, "scalar_tensor.default": 2, "where.self": 1}
TABLE = [
    Difference("the batch comes from the host", "", FORWARD, COPY, {}, {COPY: 1}),
    Difference("cp chose its part on the host", "", FORWARD, "index.Tensor", {"index.Tensor": 1}),
    Difference("the host reads", ".*", (*FORWARD, *OPTIMIZER), "HOST_SYNC", {}, {"HOST_SYNC": 1, COPY: 1}),
    Difference("norms' weights come from the host", "", OPTIMIZER, "sqrt.default", {}, {COPY: 1}),
    Difference(
        "one kernel for RMSNorm",
        NORM,
        FORWARD,
        RMS,
        {"pow.Tensor_Scalar": 1, "mean.dim": 1, "add_.Scalar": 1, "rsqrt.default": 1, "mul.Tensor": 2},
        {RMS: 1},
    ),
    Difference("which casts by itself", NORM, FORWARD, RMS, {COPY: 2}, dtype="bfloat16"),
    Difference(
        "and one backward",
        NORM,
        BACKWARD,
        RMS_BACK,
        {"mul.Tensor": 6, "sum.dim_IntList": 2, "pow.Tensor_Scalar": 2, "mul.Scalar": 2, "div.Scalar": 1}
        | {"add.Tensor": 1},
        {RMS_BACK: 1},
        num_dims=3,
    ),
    Difference("which casts by itself", NORM, BACKWARD, RMS_BACK, {COPY: 3}, dtype="bfloat16", num_dims=3),
    Difference("and one more to weights", NORM, BACKWARD, RMS_BACK, {}, {RMS_BACK: 1}, num_dims=1),
    *(
        Difference("another kernel", CORE, phases, name, {f"{CPU_FLASH}{end}": 1}, {name: 1})
        for phases, end in ((FORWARD, ".default"), (BACKWARD, "_backward.default"))
        for name in (f"{FLASH}{end}", f"{CUDNN}{end}")
    ),
    Difference("random state of a ring", CORE, BACKWARD, "empty.memory_format", {CLONE: 1}, {"empty.memory_format": 1}),
    Difference("no kernel groups heads", CORE, FORWARD, SOFTMAX, {f"{CPU_FLASH}.default": 1}, SCORES),
    Difference("which a mask makes causal", CORE, FORWARD, "tril.default", {}, TRIANGLE),
    Difference("no kernel", CORE, BACKWARD, SOFTMAX_BACK, {f"{CPU_FLASH}_backward.default": 1}, SCORES_BACK),
    Difference("heads in another order", ATTENTION, (*FORWARD, *BACKWARD), VIEW, {}, {CLONE: 1, VIEW: 1}),
    Difference(
        "rows are filled up to 8",
        FFN,
        FORWARD,
        "index_copy.default",
        {},
        {"add.Tensor": 2, "sub.Tensor": 5, "floor_divide.default": 1, "mul.Tensor": 1, "cumsum.default": 1}
        | {"arange.default": 1, "repeat_interleave.Tensor": 1, "index_select.default": 2, "sum.default": 1}
        | {"add_.Tensor": 1, "new_zeros.default": 1, "index_copy.default": 1},
        resized=frozenset({"_grouped_mm.default", "silu.default", COPY}),
    ),
    Difference(
        "and backward",
        FFN,
        BACKWARD,
        "index_add.default",
        {},
        {"new_zeros.default": 1, "index_add.default": 1, "index_select.default": 1},
        resized=frozenset({"_grouped_mm.default", "silu_backward.default", "mul.Tensor", "add.Tensor"}),
    ),
]


class Compared(NamedTuple):
    """One step on both devices."""

    cpu: Trace
    accelerator: Trace

    def memories(self) -> tuple[tuple[Memory, Memory], int]:
        """Return the storages of both, and how many common records there are."""
        is_common = [np.array([not is_listed(row, TABLE) for row in rows_of(one)], np.bool_) for one in self]
        memories = [memory_of(one, common) for one, common in zip(self, is_common, strict=True)]
        return (memories[0], memories[1]), int(is_common[0].sum())

    def common_live(self) -> np.ndarray:
        """Return the live bytes on the processor before each common record."""
        is_common = [not is_listed(row, TABLE) for row in rows_of(self.cpu)]
        return self.cpu.live_bytes()[:-1][is_common]


def compared(num_ranks: int, *arguments: str) -> Compared:
    devices: tuple[DeviceType, DeviceType] = ("cpu", "simgpu")
    return Compared(*(trace(BUILD, 0, num_ranks, arguments, device) for device in devices))


@pytest.mark.parametrize("case", CASES)
def test_devices_differ_in_nothing_but_the_table(case: str) -> None:
    num_ranks, *arguments = (QUICK | LONG)[case]
    both = compared(num_ranks, *arguments)
    cpu, accelerator = (rows_of(one) for one in both)
    assert not miscounted(cpu, accelerator, TABLE)
    common = [[row for row in rows if not is_listed(row, TABLE)] for rows in (cpu, accelerator)]
    assert next((pair for pair in zip(*common, strict=False) if pair[0] != pair[1]), None) is None
    assert len(common[0]) == len(common[1])

    (host, device), num_common = both.memories()
    assert not unexplained(host, device, is_host=True)
    assert not unexplained(device, host, is_host=False)
    accounted = (
        both.common_live() - unmatched_bytes(host, device, num_common) + unmatched_bytes(device, host, num_common)
    )
    peak = both.accelerator.live_bytes().max()
    assert abs(accounted.max() - peak) <= 1e-4 * peak
