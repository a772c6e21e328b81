"""hf_model: from [model] of a job to what a Hugging Face folder holds of the model."""

import torch
from torch import nn

from meshwright.checkpoint.hf.hf_model import BuiltInModel, HfModel
from meshwright.checkpoint.hf.own_model import OwnModel
from meshwright.errors import ConfigError
from meshwright.models.build import build_model
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.model.model_source import resolve_architecture


def hf_model(section: ModelSection) -> HfModel:
    """Return the model of `section`.

    Raises ConfigError for a class that cannot be built or whose table does not fit it, UnsupportedError for one that
    has no table.
    """
    architecture = resolve_architecture(section)
    return OwnModel(section.source, own_module(section)) if architecture is None else BuiltInModel(architecture)


def own_module(section: ModelSection) -> nn.Module:
    """Return a user's model on the meta device, or on the CPU where its constructor reads values."""
    try:
        with torch.device("meta"):
            return build_model(section)
    except ConfigError:
        return build_model(section)
