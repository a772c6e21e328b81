"""layout_of: the layout of a measured run, and what has to be assumed of it."""

from __future__ import annotations

from typing import Literal

from meshwright.errors import UnsupportedError
from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout
from meshwright.spec.step.stack import Stack

_FULL: Literal["full"] = "full"
_USUAL_DEVICES_PER_NODE = 8


def layout_of(row: RunRow, stack: Stack, batch: int, assumed: list[str]) -> Layout:
    """Return the row's layout; raises UnsupportedError where its degrees do not make its devices."""
    tp, cp, pp = (row.count(axis) or 1 for axis in ("tp", "cp", "pp"))
    devices = row.required("n_gpus")
    if devices % (tp * cp * pp):
        raise UnsupportedError(f"tp={tp} x cp={cp} x pp={pp} do not divide n_gpus={devices}")
    dp = devices // (tp * cp * pp)
    shard = _shard_degree(row, stack, dp, cp, assumed)
    size = _microbatch_size(row, batch, dp, assumed)
    stages = row.count_or("vpp", 1, assumed) if pp > 1 else 1
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
        etp=(row.count("etp") or 1) if is_mixture else 1,
        microbatch_size=size,
        schedule="Interleaved1F1B" if stages > 1 else "1F1B",
        virtual_stages=stages,
        activation_checkpoint=checkpoint,
        activation_checkpoint_every=every,
        reshard_after_forward="never" if row.text("fsdp_zero_stage") == "2" else "auto",
        async_tp=row.text("async_tp") == "yes" and tp > 1,
        compile=stack.kernels == "compiled",
    )


def _shard_degree(row: RunRow, stack: Stack, dp: int, cp: int, assumed: list[str]) -> int:
    """Return the data-parallel ranks that share one copy of what the stack shards."""
    if stack.sharding == "none":
        return 1
    group = row.count("fsdp_group")
    if group is None and row.text("fsdp_zero_stage") == "hsdp":
        group = row.count("gpus_per_node") or _USUAL_DEVICES_PER_NODE
    if group is None and "fsdp_group" in row.assume:
        group = row.count_or("fsdp_group", dp * cp, assumed)
    wanted = dp if group is None else max(1, group // cp)
    return wanted if dp % wanted == 0 else dp


def _microbatch_size(row: RunRow, batch: int, dp: int, assumed: list[str]) -> int:
    stated = row.count("micro_batch")
    accumulation = row.count("grad_accum")
    if stated is None and accumulation is not None and batch % (dp * accumulation) == 0:
        stated = batch // (dp * accumulation)
    size = stated
    if size is None:
        size = row.count_or("micro_batch", 1, assumed)
    if batch % (dp * size):
        if batch % dp:
            raise UnsupportedError(f"global_batch={batch} does not divide by dp={dp}")
        if stated is not None:
            raise UnsupportedError(f"global_batch={batch} does not divide by dp={dp} x micro_batch={size}")
        size = 1
    return size


def _activation_checkpoint(row: RunRow, stack: Stack, assumed: list[str]) -> tuple[ActivationCheckpoint, int]:
    # Unfused attention keeps its scores, so that hardly any model fits without recomputation.
    stated = row.text_or("activation_ckpt", _FULL if stack.attention == "unfused" else "none", assumed)
    if stated == "selective-layer":
        return _FULL, 2
    if stated.startswith("selective"):
        return "selective", 1
    if stated not in ("none", _FULL):
        raise UnsupportedError(f"activation_ckpt = {stated!r} is none of none, selective, full")
    return (_FULL if stated == _FULL else "none"), 1
