"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv:2405.04434), and their rotary angles with YaRN scaling.

A query or key head has a part without RoPE and a part with RoPE; the rotated part of the key is shared by all heads.
The cache holds heads, not latents: simple, but large.

YaRN (arXiv:2309.00071), as in DeepSeek's code: fast pairs of dimensions are unchanged, slow ones rotate `factor` times
slower, and between the two the frequency is interpolated linearly in the index of the pair. Attention scores are scaled
up, since longer sequences flatten attention.

Shapes: B batch, S positions in, T positions attended to, D dim, N heads, P part of a query or key head without RoPE, R
part with RoPE, H both (P + R), W value head, L latent of keys and values. N is inferred from tensors, so that a rank
with a shard of the heads runs the same code.
"""

import math

import torch
from torch import Tensor, nn

from meshwright.models.attention.causal_attention import CausalAttention, LayerCache
from meshwright.models.rope import rope_frequencies, rope_tables, rotate, turns
from meshwright.spec.model.moe_architecture import MoEArchitecture, YarnScaling

_LATENT_NORM_EPS = 1e-6
"""As in DeepSeek's code and transformers, independent of the model's norm_eps."""


class MultiHeadLatentAttention(nn.Module):
    """Causal multi-head latent attention; replaces LlamaAttention in a block."""

    def __init__(self, architecture: MoEArchitecture, scale: float | None = None) -> None:
        super().__init__()
        latent, dim, num_heads = architecture.latent, architecture.dim, architecture.num_heads
        assert latent is not None
        self.head_parts = [latent.plain_head_dim, latent.rope_head_dim]
        self.key_and_value = [latent.plain_head_dim, latent.value_head_dim]
        self.latent_and_key = [latent.kv_rank, latent.rope_head_dim]
        self.interleaved = architecture.rope_interleaved
        queries = num_heads * architecture.head_dim
        if latent.query_rank is None:
            self.query = _linear(dim, queries)
        else:
            self.query_down = _linear(dim, latent.query_rank)
            self.query_norm = nn.RMSNorm(latent.query_rank, eps=_LATENT_NORM_EPS)
            self.query_up = _linear(latent.query_rank, queries)
        self.has_query_latent = latent.query_rank is not None
        self.kv_down = _linear(dim, sum(self.latent_and_key))
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=_LATENT_NORM_EPS)
        self.kv_up = _linear(latent.kv_rank, num_heads * sum(self.key_and_value))
        self.output = _linear(num_heads * latent.value_head_dim, dim)
        self.core = CausalAttention(scale)

    def forward(
        self,
        x_BSD: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        documents_BS: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return x_BSD, the residual update of attention."""
        plain_BSNP, rotated_BSNR = self._queries(x_BSD).split(self.head_parts, dim=-1)
        query_BSNH = torch.cat((plain_BSNP, self._rotate(rotated_BSNR, cos_SR, sin_SR)), dim=-1)
        latent_BSL, shared_BSR = self.kv_down(x_BSD).split(self.latent_and_key, dim=-1)
        heads_BSN = self.kv_up(self.kv_norm(latent_BSL)).unflatten(-1, (-1, sum(self.key_and_value)))
        plain_BSNP, value_BTNW = heads_BSN.split(self.key_and_value, dim=-1)
        shared_BS1R = self._rotate(shared_BSR[:, :, None], cos_SR, sin_SR)
        key_BTNH = torch.cat((plain_BSNP, shared_BS1R.expand(-1, -1, plain_BSNP.shape[2], -1)), dim=-1)
        if cache is not None:
            key_BTNH, value_BTNW = cache.append(key_BTNH, value_BTNW)
        attended_BSNW = self.core(query_BSNH, key_BTNH, value_BTNW, documents_BS)
        output_BSD: Tensor = self.output(attended_BSNW.flatten(-2))
        return output_BSD

    def _queries(self, x_BSD: Tensor) -> Tensor:
        """Return query_BSNH, before RoPE."""
        if self.has_query_latent:
            heads_BSQ = self.query_up(self.query_norm(self.query_down(x_BSD)))
        else:
            heads_BSQ = self.query(x_BSD)
        query_BSNH: Tensor = heads_BSQ.unflatten(-1, (-1, sum(self.head_parts)))
        return query_BSNH

    def _rotate(self, x_BSNR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        if self.interleaved:
            # `rotate` rotates pairs (i, i + R/2): permute pairs (2i, 2i + 1). Queries and keys are permuted equally,
            # which leaves their products unchanged.
            x_BSNR = x_BSNR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_BSNR, cos_SR, sin_SR)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


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

    first, last = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last != first else first + 0.001


def _gain(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
