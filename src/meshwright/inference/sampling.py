"""Sampling of the next token from the model's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import ConfigError


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
            ("temperature", self.temperature >= 0, "must be 0 (always the most likely token) or more"),
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
