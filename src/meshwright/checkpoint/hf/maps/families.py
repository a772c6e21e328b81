"""Name map of each supported architecture family; needs no torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.checkpoint.hf.maps.gpt2 import GPT2
from meshwright.checkpoint.hf.maps.llama import LLAMA, phi3_map
from meshwright.checkpoint.hf.maps.moe import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_MOE
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import hf_model_type
from meshwright.spec.model.hf.name_map import Drop, NameMap

_OUR_HEAD, _EMBEDDING = "head.weight", "embedding.weight"
_COPY = "a copy of the embedding, checked to be equal before it is dropped"
_MAPS: dict[str, NameMap] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
}
_MAPS_BY_SIZES = {"phi3": phi3_map}
"""Families whose fused tensors are divided by the sizes of the model."""


def name_map(architecture: LlamaArchitecture, model_type: str | None = None) -> NameMap:
    """Return the name map of `architecture` in folders of `model_type`, without the head if it is tied.

    None, or a type that no map is of, means the type that an export has.
    """
    if model_type in _MAPS_BY_SIZES:
        names = _MAPS_BY_SIZES[model_type](architecture)
    else:
        names = _MAPS[hf_model_type(architecture)]
    return with_tied_head(names) if architecture.tie_embeddings else names


def family_map(architecture: LlamaArchitecture, config: Mapping[str, Any] | None) -> NameMap:
    """Return the name map of a folder with `config`; layers that predict further tokens are dropped by name."""
    if config is None:
        return name_map(architecture)
    table, num_further = name_map(architecture, str(config.get("model_type"))), config.get("num_nextn_predict_layers")
    if not num_further or config.get("num_hidden_layers") != architecture.num_layers:
        return table
    layers = range(architecture.num_layers, architecture.num_layers + num_further)
    reason = "of the layers that predict further tokens, which are not trained here"
    return replace(table, drops=(*table.drops, *(Drop(f"model.layers.{layer}.{{rest}}", reason) for layer in layers)))


def with_tied_head(table: NameMap) -> NameMap:
    """Return `table` with the head, where it has one, dropped as a copy of the embedding."""
    heads = [rename.theirs for rename in table.renames if rename.ours == _OUR_HEAD]
    return replace(
        table,
        renames=tuple(rename for rename in table.renames if rename.ours != _OUR_HEAD),
        drops=(*table.drops, *(Drop(head, _COPY, copy_of=_EMBEDDING) for head in heads)),
    )
