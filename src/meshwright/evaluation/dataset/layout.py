"""layout_of: the layout of a measured run, and what has to be assumed of it."""

from __future__ import annotations

import re
from typing import Literal

from meshwright.errors import UnsupportedError
from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.step.stack import Stack

_FULL: Literal["full"] = "full"
_MIN_HYBRID_DEVICES = 512
"""MaxText's published runs shard over 128 devices and replicate from here on; below, over 256 at most."""


def layout_of(row: RunRow, model: ModelSpec, stack: Stack, batch: int, assumed: list[str]) -> Layout:
    """Return the row's layout; raises UnsupportedError where its degrees do not make its devices."""
    tp, cp, pp = (row.count(axis) or 1 for axis in ("tp", "cp", "pp"))
    devices = row.required("n_gpus")
    if devices % (tp * cp * pp):
        raise UnsupportedError(f"tp={tp} x cp={cp} x pp={pp} do not divide n_gpus={devices}")
    dp = devices // (tp * cp * pp)
    shard = _shard_degree(row, stack, dp, cp)
    size = _microbatch_size(row, batch, dp, assumed)
    stages = _stages_per_rank(row, model, pp, assumed) if pp > 1 else 1
    # The first stage can do with the embedding alone, the last one with the head.
    if pp * stages > row.required("n_layers") + 2:
        raise UnsupportedError(f"pp={pp} x vpp={stages} are more stages than n_layers={row.required('n_layers')} fill")
    checkpoint, every = _activation_checkpoint(row, stack, assumed)
    is_mixture = (row.count("moe_experts") or 0) > 0
    ep = (row.count("ep") or 1) if is_mixture else 1
    return Layout(
        pp=pp,
        dp_replicate=dp // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        ep=ep,
        etp=tp if is_mixture and "ETP" in row.notes else 1,
        microbatch_size=size,
        schedule="Interleaved1F1B" if stages > 1 else "1F1B",
        virtual_stages=stages,
        activation_checkpoint=checkpoint,
        activation_checkpoint_every=every,
        reshard_after_forward="never" if row.text("fsdp_zero_stage") == "2" else "auto",
        async_tp=row.text("async_tp") == "yes" and tp > 1,
        compile=stack.kernels == "compiled",
    )


def _shard_degree(row: RunRow, stack: Stack, dp: int, cp: int) -> int:
    """Return the data-parallel ranks that share one copy of what the stack shards."""
    if stack.sharding == "none":
        return 1
    group = re.search(r"FSDP group (\d+)", row.notes)
    if group:
        wanted = max(1, int(group.group(1)) // cp)
    elif row.text("fsdp_zero_stage") == "hsdp":
        wanted = max(1, (row.count("gpus_per_node") or 8) // cp)
    elif row.stack.startswith("maxtext"):
        wanted = 128 if dp >= _MIN_HYBRID_DEVICES else min(dp, 256)
    else:
        wanted = dp
    return wanted if dp % wanted == 0 else dp


def _microbatch_size(row: RunRow, batch: int, dp: int, assumed: list[str]) -> int:
    stated = row.count("micro_batch")
    accumulation = row.count("grad_accum")
    if stated is None and accumulation is not None and batch % (dp * accumulation) == 0:
        stated = batch // (dp * accumulation)
    size = stated
    if size is None:
        size = _default_microbatch_size(row, batch, dp)
        assumed.append(f"micro_batch={size}")
    if batch % (dp * size):
        if batch % dp:
            raise UnsupportedError(f"global_batch={batch} does not divide by dp={dp}")
        if stated is not None:
            raise UnsupportedError(f"global_batch={batch} does not divide by dp={dp} x micro_batch={size}")
        size = 1
    return size


def _default_microbatch_size(row: RunRow, batch: int, dp: int) -> int:
    """Return the size where a row is silent: facts of the families' scripts, or else 1."""
    if row.stack == "megatron-2020":
        return max(1, batch // dp)
    if row.stack == "megatron-2021" and row.count("n_layers") == 30:
        return 8
    if row.stack.startswith("torchtitan") and "nterleaved" in row.notes:
        return max(1, batch // dp // (row.count("pp") or 1))
    return 1


def _stages_per_rank(row: RunRow, model: ModelSpec, pp: int, assumed: list[str]) -> int:
    stated = row.count("vpp")
    if stated is not None:
        return stated
    layers = row.required("n_layers")
    family, stack = row.text("model_family").lower(), row.stack
    is_mixture = (row.count("moe_experts") or 0) > 0
    wanted = 1
    if stack.startswith("mlperf"):
        wanted = 8 if layers == 126 or pp == 6 else 6
    elif stack.startswith("nemo") and family.startswith("gpt3"):
        wanted = 6
    elif stack.startswith("megatron-bridge"):
        wanted = (4 if family.startswith("qwen3-235") else 1) if is_mixture else max(1, round(layers / pp / 4))
    elif stack == "megatron-core-2024" and layers % (2 * pp) == 0:
        wanted = 2
    elif stack == "megatron-2021" and layers < 128:
        wanted = next((v for v in (2, 3) if layers % (pp * v) == 0), 1)
    elif "nterleaved" in row.notes:
        wanted = 2
    assumed.append(f"vpp={wanted}")
    return wanted


def _activation_checkpoint(row: RunRow, stack: Stack, assumed: list[str]) -> tuple[ActivationCheckpoint, int]:
    stated = row.text("activation_ckpt")
    if not stated:
        stated = _FULL if stack.attention == "unfused" else "none"
        if stack.name.startswith("amd") and row.required("hidden") >= 8192:
            stated = _FULL
        assumed.append(f"activation_ckpt={stated}")
    if stated == "selective-layer" or (stated == "selective" and stack.name.startswith("fms")):
        return _FULL, 2
    if stated.startswith("selective"):
        return "selective", 1
    if stated not in ("none", _FULL):
        raise UnsupportedError(f"activation_ckpt = {stated!r} is none of none, selective, full")
    return (_FULL if stated == _FULL else "none"), 1
