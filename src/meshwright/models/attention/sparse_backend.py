"""SparseAttention: CausalAttention by a backend that skips the scores which documents or a window hide."""

from torch import Tensor

from meshwright.errors import UnsupportedError
from meshwright.models.attention.causal_attention import CausalAttention
from meshwright.spec.layout.attention_backend import AttentionBackend


class SparseAttention(CausalAttention):
    """CausalAttention of a whole sequence by a subclass; without attention sinks."""

    backend: AttentionBackend
    is_eager = True
    """Whether it runs outside of compiled blocks."""
    document_tokens: float | None = None
    """Mean tokens of a document, for what traces the step without data; None where it is unknown."""

    def forward(
        self,
        query_BSNH: Tensor,
        key_BTKH: Tensor,
        value_BTKW: Tensor,
        documents_BS: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return attended_BSNW."""
        if sinks_N is not None:
            raise UnsupportedError(
                f'attention with sinks is not computed by layout.attention_backend = "{self.backend}"'
            )
        heads = (query_BSNH, key_BTKH, value_BTKW)
        if query_BSNH.shape[1] != key_BTKH.shape[1]:  # a step of generation
            return super().forward(*heads, documents_BS)
        return self._attend_whole(heads, documents_BS)

    def _attend_whole(self, heads: tuple[Tensor, Tensor, Tensor], documents_BS: Tensor | None) -> Tensor:
        """Return attended_BSNW of queries and keys of the same S positions."""
        raise NotImplementedError
