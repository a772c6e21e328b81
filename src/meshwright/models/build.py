"""build_model: from [model] of a job to an nn.Module, ours or the user's."""

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.gpt2 import GPT2
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.llama import Block, FeedForward, Llama
from meshwright.models.moe import MixtureOfExperts
from meshwright.models.yarn import latent_attention_scale, yarn_tables
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import make_object
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture


def build_model(section: ModelSection) -> nn.Module:
    """Return the model of `section`, built on torch's current default device; raises ConfigError if it cannot be.

    The weights of a model of ours are not set yet; a user's model is as its constructor leaves it.
    """
    architecture = resolve_architecture(section)
    if architecture is not None:
        return build_architecture(architecture)
    model = make_object("model", section.source, section.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.source = {section.source!r} made a {type(model).__name__}, but an nn.Module is needed: "
            "derive the class from torch.nn.Module"
        )
    return model


def build_architecture(architecture: LlamaArchitecture) -> Llama | GPT2:
    """Return the model of `architecture`, its weights not set: a GPT2, or a Llama, whose blocks may hold other parts.

    Both take the same arguments, hold `architecture` and `embedding`, and generate with a KVCache.
    """
    if isinstance(architecture, GPT2Architecture):
        return GPT2(architecture)
    if not isinstance(architecture, MoEArchitecture):
        return Llama(architecture)
    blocks = [
        Block(architecture, attention=_latent_attention(architecture), ffn=_mixture(architecture, index))
        for index in range(architecture.num_layers)
    ]
    return Llama(architecture, blocks, rope=yarn_tables)


def _latent_attention(architecture: MoEArchitecture) -> LatentAttention | None:
    if architecture.latent is None:
        return None
    return LatentAttention(architecture, latent_attention_scale(architecture))


def _mixture(architecture: MoEArchitecture, layer: int) -> MixtureOfExperts | None:
    if layer < architecture.num_dense_layers:
        return None
    shared_dim = architecture.shared_ffn_dim
    return MixtureOfExperts(architecture, shared=FeedForward(architecture.dim, shared_dim) if shared_dim else None)
