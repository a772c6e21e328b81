"""Rotary position embedding in the rotate-half convention: dimensions i and i + H/2 form a pair.

Hugging Face uses it for Llama and Qwen3, so their weights need no permutation.

Shapes: B batch, S positions, N heads, H head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.model.architecture import LlamaArchitecture, RopeScaling

Rope = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""(architecture, positions) -> (cos, sin), [S, H] of positions_S, [B, S, H] of positions_BS."""


def rope_tables(architecture: LlamaArchitecture, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos_SH, sin_SH) in float32: the rotation of each pair of dimensions at each of `positions_S`."""
    frequencies = rope_frequencies(architecture, positions_S.device)
    if architecture.rope_scaling is not None:
        frequencies = _stretched(frequencies, architecture.rope_scaling)
    return turns(frequencies, positions_S)


def rope_frequencies(architecture: LlamaArchitecture, device: torch.device) -> Tensor:
    """Return the frequency of each of the H / 2 pairs, in radians per position, before scaling."""
    # float32, since published weights were trained with these angles.
    exponents = torch.arange(0, architecture.rope_dim, 2, device=device).float() / architecture.rope_dim
    return 1.0 / architecture.rope_theta**exponents


def turns(frequencies: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos_SH, sin_SH) of the angles at `positions_S`, or those of each sequence at positions_BS."""
    angles_SH = positions_S.float()[..., None] * torch.cat((frequencies, frequencies))
    return angles_SH.cos(), angles_SH.sin()


def rotate(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Return x_BSNH rotated by its positions, in its own dtype; computed in float32 at least.

    All sequences share cos_SH and sin_SH, or each has its own, cos_BSH and sin_BSH.
    """
    cos_S1H, sin_S1H = cos_SH[..., None, :], sin_SH[..., None, :]
    wide_BSNH = at_least_float32(x_BSNH)
    first, second = wide_BSNH.chunk(2, dim=-1)
    turned_BSNH = torch.cat((-second, first), dim=-1)
    return (wide_BSNH * cos_S1H + turned_BSNH * sin_S1H).type_as(x_BSNH)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if wider (float64 proofs)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    # Llama 3.1: long wavelengths are stretched by factor, short ones kept, and between the two bounds the frequency is
    # blended linearly in the number of turns that fit in the original length. Source: rope_type "llama3" of
    # transformers 5.23 (modeling_rope_utils.py).
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
