"""Shapes of the tensors of a model, by their names in a checkpoint."""

import torch
from torch import nn

from meshwright.models.build import build_architecture
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, persistent_buffers
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import BUFFER


def stored_shapes(architecture: LlamaArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model of `architecture`, as `tensor_shapes` does."""
    with torch.device("meta"):
        return tensor_shapes(build_architecture(architecture))


def tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name in a checkpoint, in the model's order: buffers last."""
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in persistent_buffers(model).items()}
    return {name: tuple(tensor.shape) for name, tensor in {**dict(canonical_parameters(model)), **buffers}.items()}
