"""MoEArchitecture: the sizes of a transformer whose feed-forward networks are mixtures of experts.

Mixtral, Qwen3-MoE and DeepSeek-V3 are settings of it; the last one has latent attention too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshwright.spec.frozen import Frozen
from meshwright.spec.model.architecture import LlamaArchitecture

RouterScore = Literal["softmax", "sigmoid"]


class Router(Frozen):
    """How each token chooses its experts."""

    score: RouterScore = "softmax"
    """How a logit becomes a score: over all experts (softmax), or each by itself (sigmoid)."""
    normalize_weights: bool = True
    """Whether the chosen experts' scores are divided by their sum."""
    weight_scale: PositiveFloat = 1.0
    """Factor on the chosen experts' weights, after they are normalised."""
    num_groups: PositiveInt = 1
    """Groups that the experts are divided into, in order."""
    groups_per_token: PositiveInt = 1
    """Groups among which a token chooses: those with the highest sum of their two best scores."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Step of the bias that balances the load without a loss (DeepSeek-V3); 0 has no bias."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of the loss that balances the load within each sequence."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean square of the logits' log-sum-exp."""


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values are made from narrow latents."""

    query_rank: PositiveInt | None = None
    """Width of the latent that queries are made from; none makes them from the residual stream."""
    kv_rank: PositiveInt
    """Width of the latent that keys and values are made from."""
    plain_head_dim: PositiveInt
    """Width of that part of a query or key head that RoPE leaves alone."""
    rope_head_dim: PositiveInt
    """Width of the part that RoPE turns; its key is one for all heads."""
    value_head_dim: PositiveInt
    """Width of a value head."""


class YarnScaling(Frozen):
    """How DeepSeek stretches rotary wavelengths (YaRN, arXiv:2309.00071)."""

    factor: float = Field(ge=1)
    """How many times longer the longest wavelengths become."""
    beta_fast: PositiveFloat = 32.0
    """Wavelengths that turn more often than this in the original length stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """Wavelengths that turn less often than this are stretched in full; those between are blended."""
    mscale: NonNegativeFloat = 1.0
    """Weight of the length-dependent factor on cosines and sines."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """Weight of the length-dependent factor on the attention scores, applied twice."""
    original_max_seq_len: PositiveInt = 4096
    """Tokens in the longest sequence before the stretch."""
    truncate: bool = True
    """Whether the blended range begins and ends at whole pairs of dimensions, as DeepSeek's does, GPT-OSS's not."""


class MoEArchitecture(LlamaArchitecture):
    """A LlamaArchitecture whose blocks, from num_dense_layers on, hold a mixture of experts for ffn."""

    num_experts: PositiveInt
    """Routed experts of one layer."""
    experts_per_token: PositiveInt
    """Routed experts that each token goes to."""
    expert_ffn_dim: PositiveInt
    """Width inside one routed expert."""
    num_shared_experts: NonNegativeInt = 0
    """Experts that every token goes to, held as one of num_shared_experts x expert_ffn_dim."""
    num_dense_layers: NonNegativeInt = 0
    """First layers whose ffn is a plain one of ffn_dim."""
    router: Router = Router()
    """How tokens choose experts."""
    latent: LatentAttention | None = None
    """Latent attention instead of grouped-query attention; then head_dim is that of a query head."""
    yarn: YarnScaling | None = None
    """DeepSeek's stretch of the rotary wavelengths; excludes rope_scaling."""
    rope_interleaved: bool = False
    """Whether RoPE turns neighbouring dimensions (2i, 2i + 1), as DeepSeek does, and not i and i + H/2."""

    @property
    def rope_dim(self) -> int:
        """Return the width of the part of a head that RoPE turns."""
        return self.head_dim if self.latent is None else self.latent.rope_head_dim

    @property
    def shared_ffn_dim(self) -> int:
        """Return the width inside the shared experts together; 0 where there are none."""
        return self.num_shared_experts * self.expert_ffn_dim

    @model_validator(mode="after")
    def _routes(self) -> MoEArchitecture:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than num_experts = {self.num_experts}: "
                f"set it to {self.num_experts} or less"
            )
        groups, per_token = self.router.num_groups, self.router.groups_per_token
        if self.num_experts % groups or per_token > groups:
            raise ValueError(
                f"router.num_groups = {groups} with groups_per_token = {per_token} does not fit num_experts = "
                f"{self.num_experts}: the groups divide the experts, and a token chooses among {groups} of them at most"
            )
        if per_token * (self.num_experts // groups) < self.experts_per_token:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than router.groups_per_token = {per_token} "
                f"groups of {self.num_experts // groups} experts hold: raise groups_per_token"
            )
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers = {self.num_dense_layers} is more than num_layers = {self.num_layers}: "
                f"set it to {self.num_layers} or less"
            )
        if self.latent is not None:
            width = self.latent.plain_head_dim + self.latent.rope_head_dim
            if self.head_dim != width:
                raise ValueError(
                    f"head_dim = {self.head_dim} does not fit latent attention: set it to plain_head_dim + "
                    f"rope_head_dim = {width}"
                )
            if self.num_kv_heads != self.num_heads:
                raise ValueError(
                    f"num_kv_heads = {self.num_kv_heads} does not fit latent attention, in which each head has a key "
                    f"of its own: set it to num_heads = {self.num_heads}"
                )
        return self

    @model_validator(mode="after")
    def _turns(self) -> MoEArchitecture:
        if self.yarn is not None and self.rope_scaling is not None:
            raise ValueError("yarn and rope_scaling are both given: keep one of them")
        if self.latent is not None and self.qk_norm:
            raise ValueError("qk_norm = true is not of latent attention, which normalises its latents: leave one out")
        if self.latent is None and self.rope_interleaved:
            raise ValueError("rope_interleaved = true is of latent attention only: leave it out, or give latent")
        if self.latent is None and self.yarn is not None and self.yarn.mscale_all_dim:
            raise ValueError(
                f"yarn.mscale_all_dim = {self.yarn.mscale_all_dim} is of latent attention only: set it to 0, or give "
                "latent"
            )
        if self.rope_dim % 2:
            raise ValueError(
                f"latent.rope_head_dim = {self.rope_dim} is odd, but RoPE turns pairs: set it to {self.rope_dim + 1}"
            )
        return self
