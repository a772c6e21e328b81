"""Text generation, one token at a time, with a KV cache: sampling, and text without partial characters."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ConfigError
from meshwright.models.attention.causal_attention import KVCache
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama

_UNFINISHED = "\ufffd"
# UTF-8 characters have at most four bytes, so four tokens without a character are invalid.
_MAX_PENDING = 4


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; equal parameters and seeds give equal tokens."""

    max_new_tokens: int = 128
    """Maximum number of new tokens."""
    temperature: float = 0.8
    """Divisor of the logits; 0 for greedy decoding."""
    top_k: int | None = None
    """Sample from this many most likely tokens; None for all."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this cumulative probability; 1 for all."""
    seed: int = 0
    """Seed."""

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "must be 1 or more"),
            (
                "temperature",
                0 <= self.temperature < math.inf,
                "must be 0 (always the most likely token) or more, and finite",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "must be 1 or more; leave it out to draw from all tokens"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1 (all tokens)"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} {rule}")

    def generator(self) -> torch.Generator:
        """Return the random generator, on the CPU, so that samples do not depend on the device."""
        return torch.Generator().manual_seed(self.seed)

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return the id of the next token."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = self.probabilities(logits_V)
        return int(torch.multinomial(probabilities_V, 1, generator=generator))

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the distribution of `draw` at a temperature above 0, on the CPU in float32."""
        logits_V = logits_V.float().cpu() / self.temperature
        if self.top_k is not None and self.top_k < logits_V.numel():
            kept = logits_V.topk(self.top_k).indices
            logits_V = torch.full_like(logits_V, -torch.inf).scatter(0, kept, logits_V[kept])
        probabilities_V = logits_V.softmax(0)
        if self.top_p < 1:
            sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
            # A token is kept if those before it have less than top_p in total; the first always is.
            is_out_V = sorted_V.cumsum(0) - sorted_V >= self.top_p
            probabilities_V = probabilities_V.scatter(0, order_V[is_out_V], 0.0)
        return probabilities_V / probabilities_V.sum()


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
    ConfigError for an empty or invalid prompt, and for more positions than the model's position embedding.
    """
    vocab_size = model.architecture.vocab_size
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one token")
    if not all(0 <= token < vocab_size for token in prompt):
        raise ConfigError(
            f"the prompt has token {max(prompt)}, but the model has {vocab_size} tokens: use the model's own tokenizer"
        )
    num_positions = len(prompt) + sampling.max_new_tokens
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
        try:
            logits_BSV = model(new_BS, cache=cache)
        except MemoryError as error:
            raise ConfigError(f"{error}: lower --max-new-tokens") from None
        token = sampling.draw(logits_BSV[0, -1, :num_tokens], generator)
        if token in stop:
            return
        yield token
        new_BS = torch.tensor([[token]], device=device)


class TextStream:
    """Decoder of ids that follow a prompt into pieces of text, whose concatenation is the whole text after it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = list(prompt)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text completed by this token; "" while a character is incomplete."""
        self._pending.append(token)
        text = self._text_of_pending()
        if text.endswith(_UNFINISHED) and len(self._pending) < _MAX_PENDING:
            return ""
        return self._show(text)

    def end(self) -> str:
        """Return the remaining text."""
        return self._show(self._text_of_pending())

    def _text_of_pending(self) -> str:
        # Decoded after the previous tokens: at the start of a text a leading space may be dropped.
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._pending])[len(before) :]

    def _show(self, text: str) -> str:
        self._shown, self._pending = self._pending or self._shown, []
        return text
