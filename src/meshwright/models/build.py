"""build_model: from [model] of a job to an nn.Module, ours or the user's."""

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.llama import Llama
from meshwright.spec.model_source import resolve_architecture
from meshwright.spec.sections import ModelSection
from meshwright.spec.user_object import make_object


def build_model(section: ModelSection) -> nn.Module:
    """Return the model of `section`, built on torch's current default device; raises ConfigError if it cannot be.

    A Llama's weights are not set yet; a user's model is as its constructor leaves it.
    """
    architecture = resolve_architecture(section)
    if architecture is not None:
        return Llama(architecture)
    model = make_object("model", section.source, section.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.source = {section.source!r} made a {type(model).__name__}, but an nn.Module is needed: "
            "derive the class from torch.nn.Module"
        )
    return model
