"""Name map and tensor shapes of each supported architecture family."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.checkpoint.hf.maps.gpt2 import GPT2
from meshwright.checkpoint.hf.maps.llama import HEAD, LLAMA
from meshwright.checkpoint.hf.maps.moe import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_MOE
from meshwright.checkpoint.hf.maps.name_map import Drop, NameMap
from meshwright.checkpoint.hf.maps.phi3 import phi3_map
from meshwright.models.build import build_architecture
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import hf_model_type

BUFFER = "buffer."
"""Prefix of a buffer's name in a checkpoint; parameters have none."""

COPY = "a copy of the embedding, checked to be equal before it is dropped"
"""Why the head of a model that ties it is dropped."""

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
    if not architecture.tie_embeddings:
        return names
    return replace(
        names,
        renames=tuple(rename for rename in names.renames if rename.theirs != HEAD),
        drops=(*names.drops, Drop(HEAD, COPY)),
    )


def stored_shapes(architecture: LlamaArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name in a checkpoint, in the model's order: buffers last."""
    with torch.device("meta"):
        model = build_architecture(architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters()}
    buffers = {f"{BUFFER}{name}": shapes[name] for name in shapes if name not in parameters}
    return {**{name: shapes[name] for name in shapes if name in parameters}, **buffers}


def num_parameters(architecture: LlamaArchitecture) -> int:
    """Return the exact number of parameters, tied ones once, without buffers."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_architecture(architecture).parameters())
