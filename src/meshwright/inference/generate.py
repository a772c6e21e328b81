"""generate: continues a sequence of tokens, one at a time, with a KV cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from meshwright.errors import ConfigError
from meshwright.inference.sampling import Sampling
from meshwright.models.attention import KVCache
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama


def generate(
    model: Llama | GPT2,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    stop: Collection[int] = (),
    num_tokens: int | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, each as soon as it is known; a stop id ends them and is not yielded.

    The prompt goes through the model once, each new token alone after it. Only the first `num_tokens` ids can be
    drawn: a model may have more rows than its tokenizer has tokens. Raises ConfigError for an empty or foreign prompt,
    and for more positions than the window of the model, or than its position embedding has rows.
    """
    vocab_size = model.architecture.vocab_size
    if not prompt:
        raise ConfigError("the prompt has no token: give at least one")
    if not all(0 <= token < vocab_size for token in prompt):
        raise ConfigError(
            f"the prompt has token {max(prompt)}, the model only {vocab_size} tokens: use the model's own tokenizer"
        )
    window, num_positions = model.architecture.sliding_window, len(prompt) + sampling.max_new_tokens
    if window is not None and num_positions > window:
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {sampling.max_new_tokens} new ones are more than the model's "
            f"sliding_window = {window}, and attention within a window is not computed yet: lower --max-new-tokens"
        )
    if isinstance(model, GPT2) and num_positions > model.architecture.max_seq_len:
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {sampling.max_new_tokens} new ones are more than the model's "
            f"max_seq_len = {model.architecture.max_seq_len}, the rows of its position embedding: "
            "lower --max-new-tokens"
        )
    return _tokens(model, prompt, sampling, frozenset(stop), num_tokens or vocab_size)


@torch.inference_mode()
def _tokens(
    model: Llama | GPT2, prompt: Sequence[int], sampling: Sampling, stop: frozenset[int], num_tokens: int
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
