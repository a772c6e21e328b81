"""Context parallelism: the cp ranks shard each sequence; only attention communicates."""

from collections.abc import Callable, Mapping

from torch import distributed as dist
from torch import nn

from meshwright.errors import UnsupportedError
from meshwright.models.attention import CausalAttention
from meshwright.models.contract import blocks_of
from meshwright.parallelism.context.all_gather_attention import AllGatherAttention
from meshwright.parallelism.context.ring_attention import RingAttention
from meshwright.parallelism.context.sequence_shards import sequence_indices
from meshwright.parallelism.context.ulysses import UlyssesAttention
from meshwright.parallelism.mesh import Meshes
from meshwright.spec.layout.layout import ContextMethod

_ATTENTION: dict[ContextMethod, Callable[[dist.ProcessGroup, float | None], nn.Module]] = {
    "all-gather": AllGatherAttention,
    "ring": RingAttention,
    "ulysses": UlyssesAttention,
}


def apply_context_parallel(model: nn.Module, meshes: Meshes, seq_len: int) -> None:
    """Replace each CausalAttention of `model` in place by a context-parallel one; raises UnsupportedError."""
    layout = meshes.layout
    if layout.cp == 1:
        return
    # Raises for a sequence that cannot be split, before training.
    sequence_indices(seq_len, meshes.rank("cp"), layout.cp, layout.cp_method)
    attentions = {name: module for name, module in model.named_modules() if type(module) is CausalAttention}
    blocks = blocks_of(model)
    is_stage_without_blocks = len(blocks) > 0 and all(block is None for block in blocks)
    if not is_stage_without_blocks:
        _require_splittable(model, attentions, layout.cp)
    for name, attention in attentions.items():
        model.set_submodule(name, _ATTENTION[layout.cp_method](meshes.group("cp"), attention.scale))


def _require_splittable(model: nn.Module, attentions: Mapping[str, CausalAttention], cp: int) -> None:
    missing = []
    if not getattr(model, "takes_positions", False):
        missing.append("takes_positions = True and forward(inputs, positions, documents)")
    if not attentions:
        missing.append("attention computed by modules of meshwright.models.attention.CausalAttention")
    if missing:
        raise UnsupportedError(
            f"layout.cp = {cp}: {type(model).__name__} does not support sharding of sequences; give it "
            f"{' and '.join(missing)} (see meshwright/models/contract.py), or set layout.cp to 1"
        )
