"""CausalAttention by one kernel of torch's scaled_dot_product_attention: flash, cuDNN, memory-efficient, or matmuls.

torch raises RuntimeError ("No available kernel") for a call that the kernel does not compute, and warns why. What is
known before is refused before (spec/job/rules/attention_rules.py).

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H width of a query or key head, W of a value head.
"""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.models.attention.causal_attention import CausalAttention

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By their names in layout.attention_backend."""


class SdpaAttention(CausalAttention):
    """CausalAttention by one kernel."""

    def __init__(self, kernel: str, scale: float | None = None, window: int | None = None) -> None:
        super().__init__(scale, window)
        self.kernel = KERNELS[kernel]

    def forward(
        self,
        query_BSNH: Tensor,
        key_BTKH: Tensor,
        value_BTKW: Tensor,
        documents_BS: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return attended_BSNW; the S queries are the last S of the T positions, `sinks_N` logits without a value."""
        if self.kernel == SDPBackend.EFFICIENT_ATTENTION:
            # Up to torch 2.13 this kernel supports no grouped queries.
            repeats = query_BSNH.shape[2] // key_BTKH.shape[2]
            key_BTKH, value_BTKW = (x.repeat_interleave(repeats, dim=2) for x in (key_BTKH, value_BTKW))
        with sdpa_kernel(self.kernel):
            return super().forward(query_BSNH, key_BTKH, value_BTKW, documents_BS, sinks_N)
