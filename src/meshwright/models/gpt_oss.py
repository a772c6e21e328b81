"""GPT-OSS: attention with sinks, and a mixture of experts with biases and clamped SwiGLU.

Shapes: N query heads, E experts, D dim, R rows, F width inside an expert.
"""

import torch
from torch import Tensor, nn

from meshwright.models.clamped_swiglu import clamped_swiglu
from meshwright.models.expert_rows import add_expert_bias
from meshwright.models.grouped_matmul import grouped_matmul
from meshwright.models.llama import LlamaAttention
from meshwright.models.moe import Experts, MixtureOfExperts
from meshwright.spec.model.gpt_oss_architecture import GptOssArchitecture


class GptOssAttention(LlamaAttention):
    """Causal grouped-query attention with a sink for each query head, and a bias in all projections."""

    def __init__(self, architecture: GptOssArchitecture, window: int | None) -> None:
        super().__init__(architecture, window)
        self.output = nn.Linear(architecture.attention_dim, architecture.dim)
        self.sinks = AttentionSinks(architecture.num_heads)


class AttentionSinks(nn.Module):
    """A learned logit in the softmax's denominator of each query head; a module of its own, to be sharded by head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return sinks_N."""
        return self.weight


class GptOssMixture(MixtureOfExperts):
    """Mixture of experts whose router's logits and whose experts have biases."""

    def __init__(self, architecture: GptOssArchitecture, shared: nn.Module | None = None) -> None:
        super().__init__(architecture, shared)
        self.router.logit_bias = nn.Parameter(torch.empty(architecture.num_experts))
        self.experts = GptOssExperts(architecture)


class GptOssExperts(Experts):
    """Experts that compute down((up + 1) x gate x sigmoid(1.702 gate)), with biases, and gate and up clamped."""

    def __init__(self, architecture: GptOssArchitecture) -> None:
        num_experts, dim, ffn_dim = architecture.num_experts, architecture.dim, architecture.expert_ffn_dim
        super().__init__(num_experts, dim, ffn_dim)
        self.limit = architecture.swiglu_limit
        self.gate_bias = nn.Parameter(torch.empty(num_experts, ffn_dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, ffn_dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))

    def compute(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return rows_RD after their experts, whose rows are aligned as the kernel requires."""
        gate_RF = add_expert_bias(grouped_matmul(rows_RD, self.gate, counts_E), self.gate_bias, counts_E)
        up_RF = add_expert_bias(grouped_matmul(rows_RD, self.up, counts_E), self.up_bias, counts_E)
        product_RF = clamped_swiglu(gate_RF, up_RF, self.limit)
        return add_expert_bias(grouped_matmul(product_RF, self.down, counts_E), self.down_bias, counts_E)
