"""Construction of models from [model] of a job: built-in architectures or user classes."""

from functools import partial

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.attention.latent_attention import MultiHeadLatentAttention, latent_attention_scale, yarn_tables
from meshwright.models.clamped_swiglu import clamped_swiglu
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama, LlamaAttention, LlamaBlock, LlamaFeedForward
from meshwright.models.moe import MixtureOfExperts
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import make_object
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.gpt_oss_architecture import GptOssArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture


def build_model(section: ModelSection) -> nn.Module:
    """Return the model of `section`, built on torch's current default device; raises ConfigError if it cannot be.

    Weights of a built-in model are uninitialized; a user's model is as its constructor leaves it.
    """
    architecture = resolve_architecture(section)
    if architecture is not None:
        return build_architecture(architecture)
    model = make_object("model", section.source, section.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.source = {section.source!r} returned a {type(model).__name__}, but must return an nn.Module: "
            "derive the class from torch.nn.Module"
        )
    return model


def build_architecture(architecture: LlamaArchitecture) -> Llama | GPT2:
    """Return the model of `architecture`, uninitialized: a GPT2, or a Llama, possibly with other attention and ffn.

    Both have the same forward arguments, `architecture` and `embedding`, and support a KVCache.
    """
    if isinstance(architecture, GPT2Architecture):
        return GPT2(architecture)
    if not isinstance(architecture, MoEArchitecture):
        return Llama(architecture)
    blocks = [
        LlamaBlock(architecture, attention=_attention(architecture, index), ffn=_mixture(architecture, index))
        for index in range(architecture.num_layers)
    ]
    return Llama(architecture, blocks, rope=yarn_tables)


def _attention(architecture: MoEArchitecture, layer: int) -> nn.Module:
    if architecture.latent is not None:
        return MultiHeadLatentAttention(architecture, latent_attention_scale(architecture))
    return LlamaAttention(architecture, architecture.window_of(layer))


def _mixture(architecture: MoEArchitecture, layer: int) -> MixtureOfExperts | None:
    if layer < architecture.num_dense_layers:
        return None
    shared_dim = architecture.shared_ffn_dim
    shared = LlamaFeedForward(architecture.dim, shared_dim) if shared_dim else None
    if isinstance(architecture, GptOssArchitecture):
        activation = partial(clamped_swiglu, limit=architecture.swiglu_limit)
        return MixtureOfExperts(architecture, shared, has_bias=True, activation=activation)
    return MixtureOfExperts(architecture, shared)
