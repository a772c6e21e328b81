"""A step on the simulated accelerator is the same step as on a processor, but for what this table lists.

tests/ranks/measured/test_traced_steps.py compares the fake processor with a real one, record by record and byte by
byte; this compares the accelerator with the fake processor: all records that are not listed come in the same order,
with the same shapes, modules and phases; listed ones are as many as the table says; each storage that only one device
has, or has for longer, is made or kept by a listed record; and with those the peaks are the same, at a record that both
have, be it on other shapes.

| what | on a processor | on the accelerator | bytes |
|---|---|---|---|
| streams | there are none | events are recorded and waited for | none |
| the batch | lies where the step reads it | one copy of each tensor; cp indexes on the host | the batch's |
| numbers that the host reads | are read | are copied first, with a wait | none on the device |
| weights of gradients' norms | are there | are copied | the same, one record earlier |
| a recomputed block (torch < 2.12) | two empty tensors that no kernel sees | they lie on the host | none |
| RMSNorm | 6 operators, backward 14; in 16 bits 5 casts | 1 kernel, backward 1 | (1) |
| the same where a schedule splits the backward | each part does its own | 1 kernel more, to the weights | none |
| its weights' gradient in 16 bits (torch >= 2.15, no tp) | stays in float32 | in 16 bits, cast to be added to | (2) |
| what a block keeps to be recomputed | goes after its first norm's gradient is added | before | that, meanwhile |
| attention in 16 bits, with a mask or without | flash for processors | cuDNN's | 16 of random state a call |
| the same, in a ring | flash for processors | flash | 24 of random state a call |
| its backward | makes the gradient contiguous | an empty random state | 16 while backward runs |
| attention in float32 (torch >= 2.14) | flash for processors | memory-efficient | 16 of random state a call |
| grouped heads in float32 (torch < 2.14) | flash for processors | matmuls, heads repeated, in another order | (3) |
| the same, recomputed selectively | keeps what flash gave | keeps what both matmuls gave, makes the rest again | (3) |
| values narrower than keys, as latent attention has | matmuls, in float32 | cuDNN's | (3), the other way |
| experts' matmuls in 16 bits | rows as they come | rows of each expert filled up to 8 | 7 rows an expert at most |

(1) For backward a processor keeps the normalized input in float32 and, in 16 bits, the input in float32; the kernel the
input as it came, which outlives the block's addition by that.
(2) Where FSDP alone reduces a gradient, in more bits, it takes it as it comes from 2.15 on. Until then, and under tp,
torch casts what the norm's operators give in float32 to the parameter's 16 bits.
(3) Matmuls keep a score for each pair of query and key; flash attention a number for each query.

Not seen on either: what kernels ask for themselves (workspaces, such as one for the gradients of grouped heads).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from device_differences import (
    Difference,
    Memory,
    is_listed,
    is_on_both,
    memory_of,
    miscounted,
    rows_of,
    unexplained,
    unmatched_bytes,
)
from meshwright.spec.trace.trace import Trace
from meshwright.tracer.programs.trace_ranks import DeviceType, trace
from repository import ROOT
from trained_step import BUILD, arguments_of

EXAMPLES = ROOT / "examples"
SEQ_LEN, MICROBATCH, DIM, NUM_LAYERS = 64, 2, 128, 4
KEYS = (f"train.seq_len={SEQ_LEN}", "train.global_batch_size=4", f"layout.microbatch_size={MICROBATCH}")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
DENSE = (str(EXAMPLES / "tiny.toml"), *KEYS, "layout.dp_shard=1")
EXPERTS = (str(EXAMPLES / "tiny-moe.toml"), *KEYS, "layout.dp_shard=1")
HALF = "precision.compute=bfloat16"
LATENT = "model.source=mla-moe-4m"
QUICK = {
    "fsdp, tp, recomputed, bfloat16": (
        4,
        *DENSE,
        "layout.dp_shard=2",
        "layout.tp=2",
        HALF,
        "layout.activation_checkpoint=full",
    ),
}
LONG = {
    "pp, float32": (2, *DENSE, "layout.pp=2"),
    "one device": (1, *DENSE),
    "one device, bfloat16": (1, *DENSE, HALF),
    "one device, selective, float32": (1, *DENSE, "layout.activation_checkpoint=selective"),
    "one device, latent attention, bfloat16": (1, *DENSE, LATENT, HALF),
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
    "ep, bfloat16": (2, *EXPERTS, "layout.dp_shard=2", "layout.ep=2", HALF),
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
CPU_FLASH, FLASH, CUDNN, EFFICIENT = (
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention_for_cpu", "flash_attention", "cudnn_attention", "efficient_attention")
)
SOFTMAX, SOFTMAX_BACK = "_safe_softmax.default", "_softmax_backward_data.default"
MATMULS = {"bmm.default": 2}
SCORES = {SOFTMAX: 1, "mul.Scalar": 2, CLONE: 3, VIEW: 3, "add.Tensor": 1}
SCORES_BACK = {SOFTMAX_BACK: 1, CLONE: 1, VIEW: 1, "bmm.default": 4, "mul.Scalar": 2}
TRIANGLE = {"ones.default": 1, "tril.default": 1, "scalar_tensor.default": 2, "where.self": 1}
EMPTY_OF_CHECKPOINTS = [
    Difference("only a host sees it", r"blocks\.\d+", FORWARD[:1], "empty.memory_format", {"empty.memory_format": 1})
]
TABLE = [
    *(EMPTY_OF_CHECKPOINTS if TORCH < (2, 12) else ()),
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
    Difference("and one more to weights", NORM, BACKWARD, RMS_BACK, {}, {RMS_BACK: 1}, num_dims=1),
    Difference("what the block kept is no more", r"blocks\.\d+\.attention_norm", BACKWARD, RMS_BACK, frees=True),
    Difference(
        "rows are filled up to 8",
        FFN,
        FORWARD,
        "index_copy_.default",
        {},
        {"add.Tensor": 2, "sub.Tensor": 5, "floor_divide.default": 1, "mul.Tensor": 1, "cumsum.default": 1}
        | {"arange.default": 1, "repeat_interleave.Tensor": 1, "index_select.default": 1, "sum.default": 1}
        | {"add_.Tensor": 1, "new_zeros.default": 1, "index_copy_.default": 1, "index.Tensor": 1},
        resized=frozenset({"_grouped_mm.default", "silu.default", COPY}),
    ),
    Difference(
        "and backward",
        FFN,
        BACKWARD,
        "index_copy_.default",
        {},
        {"new_zeros.default": 1, "index_copy_.default": 1, "index.Tensor": 1},
        resized=frozenset({"_grouped_mm.default", "silu.default", "silu_backward.default", "mul.Tensor", "add.Tensor"}),
    ),
]
NARROW_GRADIENTS = [Difference("and casts", NORM, BACKWARD, RMS_BACK, {COPY: 3}, dtype="bfloat16", num_dims=3)]
WIDE_GRADIENTS = [
    Difference("and casts", NORM, BACKWARD, RMS_BACK, {COPY: 2}, dtype="bfloat16", num_dims=3),
    Difference("what others are added to", NORM, BACKWARD, COPY, {}, {COPY: 1}, dtype="float32", num_dims=1),
]
KERNELS = [
    *(
        Difference("another kernel", CORE, phases, name, {f"{CPU_FLASH}{end}": 1}, {name: 1})
        for phases, end in ((FORWARD, ".default"), (BACKWARD, "_backward.default"))
        for name in (f"{FLASH}{end}", f"{CUDNN}{end}", f"{EFFICIENT}{end}")
    ),
    Difference("random state of a ring", CORE, BACKWARD, "empty.memory_format", {CLONE: 1}, {"empty.memory_format": 1}),
]
NO_KERNEL_GROUPS = [
    Difference("matmuls for flash", CORE, FORWARD[:1], SOFTMAX, {f"{CPU_FLASH}.default": 1}, SCORES | MATMULS),
    Difference("made again around them", CORE, FORWARD[1:], SOFTMAX, {}, SCORES),
    Difference(
        "and they too, unless they are kept",
        CORE,
        FORWARD[1:],
        f"{CPU_FLASH}.default",
        {f"{CPU_FLASH}.default": 1},
        MATMULS,
        dtype="float32",
    ),
    Difference("which a mask makes causal", CORE, FORWARD, "tril.default", {}, TRIANGLE),
    Difference(
        "and backward",
        CORE,
        BACKWARD,
        SOFTMAX_BACK,
        {f"{CPU_FLASH}_backward.default": 1},
        SCORES_BACK | {"sum.dim_IntList": 2},
    ),
    Difference("heads in another order", ATTENTION, (*FORWARD, *BACKWARD), VIEW, {}, {CLONE: 1, VIEW: 1}),
]
NARROW_VALUES = [
    Difference(
        "no kernel of a processor",
        CORE,
        FORWARD,
        f"{CUDNN}.default",
        SCORES | MATMULS | TRIANGLE | {VIEW: 5, COPY: 5},
        {f"{CUDNN}.default": 1},
    ),
    Difference(
        "and backward",
        CORE,
        BACKWARD,
        f"{CUDNN}_backward.default",
        SCORES_BACK | {COPY: 4},
        {f"{CUDNN}_backward.default": 1},
    ),
    Difference("heads in another order", ATTENTION, FORWARD, VIEW, {CLONE: 1, VIEW: 1}),
]


def table_of(arguments: list[str]) -> list[Difference]:
    """Return what is listed for a job, in the torch at hand."""
    is_wide = TORCH >= (2, 15) and not any(one.startswith("layout.tp=") for one in arguments)
    table = [*TABLE, *(WIDE_GRADIENTS if is_wide else NARROW_GRADIENTS)]
    if LATENT in arguments:
        return [*table, *NARROW_VALUES]
    return [*table, *KERNELS, *(NO_KERNEL_GROUPS if TORCH < (2, 14) else ())]


class Compared(NamedTuple):
    """One step on both devices."""

    cpu: Trace
    accelerator: Trace

    def memories(self, table: list[Difference]) -> tuple[tuple[Memory, Memory], int]:
        """Return the storages of both, and how many common records there are."""
        cpu, accelerator = (memory_of(one, table) for one in self)
        return (cpu, accelerator), len(self.common_live(table))

    def common_live(self, table: list[Difference]) -> np.ndarray:
        """Return the live bytes on the processor before each common record."""
        is_common = [is_on_both(row, table) for row in rows_of(self.cpu)]
        return self.cpu.live_bytes()[:-1][is_common]


def compared(num_ranks: int, *arguments: str) -> Compared:
    devices: tuple[DeviceType, DeviceType] = ("cpu", "simgpu")
    return Compared(*(trace(BUILD, 0, num_ranks, arguments_of(*arguments), device) for device in devices))


@pytest.mark.parametrize("case", CASES)
def test_devices_differ_in_nothing_but_the_table(case: str) -> None:
    num_ranks, *arguments = (QUICK | LONG)[case]
    both, table = compared(num_ranks, *arguments), table_of(arguments)
    cpu, accelerator = (rows_of(one) for one in both)
    assert not miscounted(cpu, accelerator, table)
    common = [[row for row in rows if not is_listed(row, table)] for rows in (cpu, accelerator)]
    assert next((pair for pair in zip(*common, strict=False) if pair[0] != pair[1]), None) is None
    assert len(common[0]) == len(common[1])

    (host, device), num_common = both.memories(table)
    assert not unexplained(host, device, is_host=True)
    assert not unexplained(device, host, is_host=False)
    accounted = (
        both.common_live(table) - unmatched_bytes(host, device, num_common) + unmatched_bytes(device, host, num_common)
    )
    peak = both.accelerator.live_bytes().max()
    assert abs(accounted.max() - peak) <= 1e-4 * peak
