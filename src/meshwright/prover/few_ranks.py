"""Reduction of a layout to few ranks: the same axes and options, with small degrees."""

from __future__ import annotations

from meshwright.spec.layout.layout import Layout

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_MOST_RANKS = 8


def on_few_ranks(layout: Layout) -> Layout:
    """Return `layout` with degrees of at most 2, and data parallelism of 1 if more than 8 ranks would remain.

    Compilation, offload and asynchronous tensor parallelism are disabled.
    """
    degrees = {axis: min(getattr(layout, axis), 2) for axis in _AXES}
    stages = min(layout.stages_per_rank, 2)
    small = layout.replace(
        **degrees,
        etp=min(layout.etp, degrees["tp"]),
        microbatch_size=1,
        virtual_stages=stages if layout.virtual_stages is not None else None,
        stage_boundaries=None,
        activation_checkpoint_blocks=None,
        async_tp=False,
        compile=False,
        cpu_offload=False,
    )
    for axis in ("dp_replicate", "dp_shard"):
        if small.num_ranks > _MOST_RANKS and (axis != "dp_shard" or small.ep == 1):
            small = small.replace(**{axis: 1})
    return small
