"""Reduction of a model to a size that can be proven on a laptop, with the same architecture and divisibilities.

Whether a layout works depends on which of its degrees divide which sizes, such as key/value heads by tp and experts by
ep. So each size is replaced by the smallest that the same degrees divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture

_DIM = 32
_HEAD_DIM = 8
_LATENT_DIM = 16
_FFN_DIM = 48
_EXPERT_FFN_DIM = 16
# The byte tokenizer's 257 ids rounded up to a multiple of 32.
_VOCAB_SIZE = 288
_MIN_EXPERTS = 4


def shrink(architecture: LlamaArchitecture, layouts: Sequence[Layout]) -> LlamaArchitecture:
    """Return the architecture with the smallest sizes that `layouts` and its features allow."""
    tp = math.lcm(*(layout.tp for layout in layouts))
    sizes: dict[str, Any] = {
        "vocab_size": _multiple_from(_VOCAB_SIZE, tp),
        "dim": _DIM,
        "num_layers": _num_layers(architecture, layouts),
        "head_dim": _HEAD_DIM,
        "ffn_dim": _multiple_from(_FFN_DIM, tp),
        **_heads(architecture, layouts),
    }
    if isinstance(architecture, MoEArchitecture):
        sizes |= {"num_dense_layers": min(architecture.num_dense_layers, 1), **_experts(architecture, layouts)}
        if architecture.latent is not None:
            sizes |= _latent(architecture.latent)
    return architecture.replace(**sizes)


def _num_layers(architecture: LlamaArchitecture, layouts: Sequence[Layout]) -> int:
    """Return enough blocks for every stage, and for one dense and two mixture layers in a mixture of experts."""
    num_dense = min(architecture.num_dense_layers, 1) if isinstance(architecture, MoEArchitecture) else 0
    last_boundary = max((max(layout.stage_boundaries or (0,)) for layout in layouts), default=0)
    return max(num_dense + 2, last_boundary + 1, *(layout.num_stages for layout in layouts))


def _heads(architecture: LlamaArchitecture, layouts: Sequence[Layout]) -> dict[str, int]:
    """Return head counts that the same degrees divide, with grouped queries if the original has them."""
    degrees = {layout.tp * (layout.cp if layout.cp_method == "ulysses" else 1) for layout in layouts}
    degrees |= {layout.tp for layout in layouts}
    num_kv_heads = _smallest_alike(architecture.num_kv_heads, degrees)
    needed = math.lcm(*(degree for degree in degrees if architecture.num_heads % degree == 0))
    queries_per_key = math.lcm(
        _smallest_factor(architecture.num_heads // architecture.num_kv_heads),
        needed // math.gcd(needed, num_kv_heads),
    )
    return {"num_heads": num_kv_heads * queries_per_key, "num_kv_heads": num_kv_heads}


def _experts(architecture: MoEArchitecture, layouts: Sequence[Layout]) -> dict[str, Any]:
    router = architecture.router
    num_groups = _smallest_factor(router.num_groups)
    groups_per_token = max(1, num_groups * router.groups_per_token // router.num_groups)
    # At least two experts per rank and per group, since one is a special case.
    unit = math.lcm(num_groups, *(layout.ep for layout in layouts if architecture.num_experts % layout.ep == 0))
    return {
        "num_experts": unit * max(2, -(-_MIN_EXPERTS // unit)),
        "experts_per_token": min(architecture.experts_per_token, 2),
        "num_shared_experts": min(architecture.num_shared_experts, 1),
        "expert_ffn_dim": _EXPERT_FFN_DIM * math.lcm(*(layout.tp for layout in layouts)),
        "router": router.replace(num_groups=num_groups, groups_per_token=groups_per_token),
    }


def _latent(latent: LatentAttention) -> dict[str, Any]:
    small = LatentAttention(
        query_rank=None if latent.query_rank is None else _LATENT_DIM,
        kv_rank=_LATENT_DIM,
        plain_head_dim=_HEAD_DIM,
        # Another width than the plain part, so that confusing them fails.
        rope_head_dim=_HEAD_DIM // 2,
        value_head_dim=_HEAD_DIM,
    )
    return {"latent": small, "head_dim": small.plain_head_dim + small.rope_head_dim}


def _smallest_alike(size: int, degrees: set[int]) -> int:
    """Return the smallest divisor of `size` that the same `degrees` divide; above 1 if `size` is."""
    alike = math.lcm(*(degree for degree in degrees if size % degree == 0))
    return alike if alike > 1 else _smallest_factor(size)


def _smallest_factor(size: int) -> int:
    """Return the smallest prime factor of `size`, 1 of 1."""
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def _multiple_from(size: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is at least `size`."""
    return -(-size // divisor) * divisor
