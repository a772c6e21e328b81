"""Rotary angles with YaRN scaling (arXiv:2309.00071), as in DeepSeek's code.

Fast pairs of dimensions are unchanged, slow ones rotate `factor` times slower, and between the two the frequency is
interpolated linearly in the index of the pair. Attention scores are scaled up, since longer sequences flatten
attention.
"""

import math

import torch
from torch import Tensor

from meshwright.models.rope import rope_frequencies, rope_tables, turns
from meshwright.spec.model.moe_architecture import MoEArchitecture, YarnScaling


def yarn_tables(architecture: MoEArchitecture, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos_SH, sin_SH) in float32 at each of `positions_S`; rope_tables without yarn."""
    yarn = architecture.yarn
    if yarn is None:
        return rope_tables(architecture, positions_S)
    frequencies = rope_frequencies(architecture, positions_S.device)
    pairs = torch.arange(len(frequencies), device=positions_S.device).float()
    first, last = _blended_pairs(architecture, yarn)
    stretch = ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    cos_SH, sin_SH = turns(frequencies * (1.0 - stretch) + frequencies / yarn.factor * stretch, positions_S)
    gain = _gain(yarn.factor, yarn.mscale) / _gain(yarn.factor, yarn.mscale_all_dim)
    return cos_SH * gain, sin_SH * gain


def latent_attention_scale(architecture: MoEArchitecture) -> float | None:
    """Return the factor on attention scores; None for the default, 1 / sqrt(head_dim)."""
    yarn = architecture.yarn
    if yarn is None:
        return None
    gain = _gain(yarn.factor, yarn.mscale_all_dim)
    return gain * gain / math.sqrt(architecture.head_dim)


def _blended_pairs(architecture: MoEArchitecture, yarn: YarnScaling) -> tuple[float, float]:
    """Return the last unscaled pair and the first fully scaled pair."""
    width, theta = architecture.rope_dim, architecture.rope_theta

    def pair_with(num_turns: float) -> float:
        # The pair with this many rotations in the original length: length x theta^(-2i / width) = 2 pi rotations.
        return width * math.log(yarn.original_max_seq_len / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_with(yarn.beta_slow)), width - 1)
    return first, last if last != first else first + 0.001


def _gain(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
