"""Sampling: how the next token is drawn from the model's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """The settings of one generation; equal settings and seeds give equal tokens."""

    max_new_tokens: int = 128
    """Tokens after which to stop, if the end of the text does not come before."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from this many most likely tokens; None from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability; 1 from all."""
    seed: int = 0
    """Seed of the draws."""

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
        """Return the source of the draws; on the CPU, so that the device does not change them."""
        return torch.Generator().manual_seed(self.seed)

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return the id of the next token."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = self.probabilities(logits_V)
        return int(torch.multinomial(probabilities_V, 1, generator=generator))

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the distribution that `draw` draws from at a temperature above 0, on the CPU in float32."""
        logits_V = logits_V.float().cpu() / self.temperature
        if self.top_k is not None and self.top_k < logits_V.numel():
            kept = logits_V.topk(self.top_k).indices
            logits_V = torch.full_like(logits_V, -torch.inf).scatter(0, kept, logits_V[kept])
        probabilities_V = logits_V.softmax(0)
        if self.top_p < 1:
            sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
            # A token stays if those before it have not reached top_p: the first always does.
            is_out_V = sorted_V.cumsum(0) - sorted_V >= self.top_p
            probabilities_V = probabilities_V.scatter(0, order_V[is_out_V], 0.0)
        return probabilities_V / probabilities_V.sum()
