"""Replaces a model's CausalAttention by the backend of layout.attention_backend."""

from torch import nn

from meshwright.errors import UnsupportedError
from meshwright.models.attention.causal_attention import CausalAttention
from meshwright.models.attention.flex_attention import FlexAttention
from meshwright.models.attention.sdpa_attention import SdpaAttention
from meshwright.models.attention.sparse_backend import SparseAttention
from meshwright.models.attention.varlen_attention import VarlenAttention
from meshwright.models.contract import is_stage_without_blocks
from meshwright.spec.layout.attention_backend import AttentionBackend

WHOLE_SEQUENCE = (CausalAttention, SdpaAttention, FlexAttention, VarlenAttention)
"""Modules that attend to a whole sequence, one for each backend."""


def apply_attention_backend(model: nn.Module, backend: AttentionBackend) -> None:
    """Replace each CausalAttention of `model` in place; raises UnsupportedError for a model that has none."""
    if backend == "auto":
        return
    found = {name: module for name, module in model.named_modules() if type(module) is CausalAttention}
    if not found and not is_stage_without_blocks(model):
        raise UnsupportedError(
            f'layout.attention_backend = "{backend}": {type(model).__name__} computes attention by itself; give it '
            "modules of meshwright.models.attention.causal_attention.CausalAttention, or set layout.attention_backend "
            'to "auto"'
        )
    for name, module in found.items():
        model.set_submodule(name, _made(backend, module))


def _made(backend: AttentionBackend, plain: CausalAttention) -> CausalAttention:
    if backend == "flex":
        return FlexAttention(plain.scale, plain.window)
    if backend == "varlen":
        return VarlenAttention(plain.scale, plain.window)
    return SdpaAttention(backend, plain.scale, plain.window)


def state_document_length(model: nn.Module, document_tokens: float | None) -> None:
    """Set the mean tokens of a document where attention skips other documents' scores, for a trace without data."""
    for module in model.modules():
        if isinstance(module, SparseAttention):
            module.document_tokens = document_tokens
