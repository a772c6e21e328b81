"""generate: continues a sequence of tokens, one at a time, with a KV cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from meshwright.errors import ConfigError
from meshwright.inference.sampling import Sampling
from meshwright.models.attention import KVCache
from meshwright.models.llama import Llama


def generate(
    model: Llama,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    stop: Collection[int] = (),
    num_tokens: int | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, each as soon as it is known; a stop id ends them and is not yielded.

    The prompt goes through the model once, each new token alone after it. Only the first `num_tokens` ids can be
    drawn: a model may have more rows than its tokenizer has tokens. Raises ConfigError for an empty or foreign prompt.
    """
    vocab_size = model.architecture.vocab_size
    if not prompt:
        raise ConfigError("the prompt has no token: give at least one")
    if not all(0 <= token < vocab_size for token in prompt):
        raise ConfigError(
            f"the prompt has token {max(prompt)}, the model only {vocab_size} tokens: use the model's own tokenizer"
        )
    return _tokens(model, prompt, sampling, frozenset(stop), num_tokens or vocab_size)


@torch.inference_mode()
def _tokens(
    model: Llama, prompt: Sequence[int], sampling: Sampling, stop: frozenset[int], num_tokens: int
) -> Iterator[int]:
    device = model.embedding.weight.device
    cache = KVCache(model.architecture.num_layers, len(prompt) + sampling.max_new_tokens)
    generator = sampling.generator()
    new_BS = torch.tensor([list(prompt)], device=device)
    for _ in range(sampling.max_new_tokens):
        logits_BSV = model(new_BS, cache=cache)
        token = sampling.draw(logits_BSV[0, -1, :num_tokens], generator)
        if token in stop:
            return
        yield token
        new_BS = torch.tensor([[token]], device=device)
