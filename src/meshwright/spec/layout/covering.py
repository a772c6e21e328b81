"""A covering set of layouts: small enough to run on a laptop, with every pair of axes in at least one layout.

Beyond the pairs, each way to share a sequence, each schedule, each policy of recomputation and each choice of FSDP2
stands alone once, so that a failure has one suspect, and then among others.
"""

from __future__ import annotations

from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture

COVERED_AXES = (*AXES, "ep")
"""The axes; every pair of them occurs in a layout."""

_BATCH = 16
"""Sequences of a step for which microbatch sizes are chosen: few microbatches, but enough to fill each pipeline."""

_WORDS = """
dp_replicate=2
dp_shard=2,reshard_after_forward=always
dp_shard=2,cpu_offload=true
dp_shard=2,gradient_sync=step
dp_shard=2,activation_checkpoint=selective,compile=true,compile_backend=aot_eager
dp_shard=4,reshard_after_forward=2,prefetch=2
cp=2
cp=2,cp_method=ring,activation_checkpoint=full
cp=2,cp_method=ulysses,compile=true,compile_backend=aot_eager
cp=3,cp_method=ring
cp=4
cp=4,cp_method=ring
tp=2
tp=2,activation_checkpoint=full,compile=true,compile_backend=aot_eager
tp=4,activation_checkpoint=selective
pp=2,schedule=GPipe
pp=2,activation_checkpoint=full,activation_checkpoint_every=2
pp=2,schedule=Interleaved1F1B,activation_checkpoint=selective
pp=2,schedule=LoopedBFS,stage_boundaries=1;2;3
pp=2,schedule=InterleavedZeroBubble
pp=2,schedule=ZBVZeroBubble,reshard_after_forward=never,compile=true,compile_backend=aot_eager
pp=2,schedule=DualPipeV,activation_checkpoint=full
pp=4,gradient_sync=microbatch
dp_shard=2,ep=2,gradient_sync=step
dp_shard=2,ep=2,activation_checkpoint=full,compile=true,compile_backend=aot_eager
dp_shard=4,ep=2,reshard_after_forward=always
tp=2,etp=2
tp=2,ep=2,activation_checkpoint=selective
cp=2,ep=2,cp_method=ring,reshard_after_forward=never

dp_replicate=2,dp_shard=2,reshard_after_forward=never,compile=true,compile_backend=aot_eager,gradient_sync=step
dp_replicate=2,cp=2,cp_method=ulysses,activation_checkpoint=selective
dp_replicate=2,tp=2,activation_checkpoint=full,gradient_sync=microbatch
dp_replicate=2,pp=2,schedule=ZBVZeroBubble,activation_checkpoint=full,gradient_sync=microbatch
dp_replicate=2,pp=2,schedule=LoopedBFS,cpu_offload=true,gradient_sync=microbatch
dp_replicate=2,pp=2,schedule=InterleavedZeroBubble,activation_checkpoint=selective
dp_replicate=2,dp_shard=2,ep=2,activation_checkpoint=full
dp_shard=2,cp=2,cp_method=ring,prefetch=0,gradient_sync=step
dp_shard=2,cp=2,reshard_after_forward=2
dp_shard=2,tp=2,reshard_after_forward=never,gradient_sync=step
dp_shard=2,pp=2,ep=2,schedule=LoopedBFS,reshard_after_forward=always,gradient_sync=microbatch
dp_shard=2,pp=2,ep=2,schedule=InterleavedZeroBubble,gradient_sync=microbatch
cp=2,tp=2,cp_method=ulysses
cp=2,tp=2,ep=2,cpu_offload=true,gradient_sync=step
cp=2,tp=2,cp_method=ring,activation_checkpoint=full
cp=2,pp=2,cp_method=ring,schedule=GPipe,gradient_sync=microbatch
cp=2,pp=2,ep=2,cp_method=ulysses,schedule=DualPipeV,activation_checkpoint=selective
tp=2,pp=2,schedule=InterleavedZeroBubble,activation_checkpoint=selective
tp=2,pp=2,ep=2,schedule=ZBVZeroBubble,compile=true,compile_backend=aot_eager
dp_shard=2,tp=2,ep=4,reshard_after_forward=always
dp_shard=2,tp=2,ep=2,etp=2,gradient_sync=step

dp_replicate=2,dp_shard=2,tp=2,activation_checkpoint=selective,gradient_sync=step
dp_replicate=2,cp=2,tp=2,ep=2
dp_replicate=2,dp_shard=4,ep=2,reshard_after_forward=2
dp_replicate=2,dp_shard=2,pp=2,ep=2,reshard_after_forward=always,gradient_sync=microbatch
dp_replicate=2,tp=2,pp=2,etp=2,schedule=DualPipeV,gradient_sync=microbatch
dp_replicate=2,cp=2,pp=2,cp_method=ring,schedule=Interleaved1F1B,gradient_sync=microbatch
dp_shard=2,cp=2,tp=2,cp_method=ulysses,ep=4,reshard_after_forward=always
dp_shard=2,cp=2,pp=2,cp_method=ring,schedule=InterleavedZeroBubble,activation_checkpoint=full
dp_shard=2,tp=2,pp=2,ep=2,etp=2,schedule=DualPipeV
cp=2,tp=2,pp=2,schedule=LoopedBFS,activation_checkpoint=selective

dp_shard=2,cp=2,tp=2,pp=2,activation_checkpoint=full,gradient_sync=microbatch
dp_shard=2,cp=2,tp=2,pp=2,ep=4,cp_method=ring,schedule=ZBVZeroBubble,gradient_sync=microbatch
dp_shard=2,cp=2,tp=2,pp=2,ep=4,etp=2,cp_method=ulysses,schedule=Interleaved1F1B,activation_checkpoint=selective
dp_replicate=2,dp_shard=2,tp=2,pp=2,ep=4,schedule=GPipe
"""


def covering_layouts(architecture: LlamaArchitecture | None, max_ranks: int = 16) -> list[Layout]:
    """Return layouts of at most `max_ranks` ranks that a model can take, fewest ranks first.

    A model without experts gets the same, less what is said of experts. Of a class of the user's own (None) only its
    author knows which axes it takes: it gets those of data parallelism, which any model takes.
    """
    found = dict.fromkeys(_for_model(parse_layout(word), architecture) for word in _WORDS.split())
    fitting = [layout for layout in found if layout.num_ranks <= max_ranks and _can_take(architecture, layout)]
    return sorted(fitting, key=lambda layout: layout.num_ranks)


def _for_model(layout: Layout, architecture: LlamaArchitecture | None) -> Layout:
    experts = {} if isinstance(architecture, MoEArchitecture) else {"ep": 1, "etp": 1}
    num_microbatches = layout.pp * max(2, layout.stages_per_rank)
    size = 1 if architecture is None else max(1, _BATCH // (layout.dp * num_microbatches))
    return layout.replace(microbatch_size=size, **experts)


def _can_take(architecture: LlamaArchitecture | None, layout: Layout) -> bool:
    if architecture is None:
        return layout.num_ranks == layout.dp
    # A sequence of so many tokens can be split by any of these degrees.
    return not split_problems(layout, architecture, 2 * layout.cp * layout.tp)
