"""Text generation, one token at a time, with a KV cache."""

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
    """Yield the ids that follow `prompt` as they are sampled, up to a stop id, which is not yielded.

    Only the first `num_tokens` ids are sampled: a model may have more rows than its tokenizer has tokens. Raises
    ConfigError for an empty or invalid prompt, and for more positions than the model's window or position embedding.
    """
    vocab_size = model.architecture.vocab_size
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one token")
    if not all(0 <= token < vocab_size for token in prompt):
        raise ConfigError(
            f"the prompt has token {max(prompt)}, but the model has {vocab_size} tokens: use the model's own tokenizer"
        )
    window, num_positions = model.architecture.sliding_window, len(prompt) + sampling.max_new_tokens
    if window is not None and num_positions > window:
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {sampling.max_new_tokens} new ones are more than the model's "
            f"sliding_window = {window}, and sliding-window attention is not supported: lower --max-new-tokens"
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
