"""The same model as functions of plain tensors, with a seam wherever an axis does something of its own.

Shapes: B batch, S positions here, D dim, N heads, H head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.spec.model.architecture import LlamaArchitecture

Weights = Mapping[str, Tensor]
"""By name, those of a block without their "blocks.N."."""


def causal(query_BSNH: Tensor, key_BSNH: Tensor, value_BSNH: Tensor) -> Tensor:
    """Return attended_BSNH."""
    query, key, value = (x.transpose(1, 2) for x in (query_BSNH, key_BSNH, value_BSNH))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def swiglu(x_BSD: Tensor, weights: Weights) -> Tensor:
    """Return what the feed-forward network adds."""
    gated = F.silu(F.linear(x_BSD, weights["ffn.gate.weight"])) * F.linear(x_BSD, weights["ffn.up.weight"])
    return F.linear(gated, weights["ffn.down.weight"])


def look_up(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Return x_BSD."""
    return F.embedding(tokens_BS, weight_VD)


def mean_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Seams:
    """What axes change; as they stand, one process."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal
    feed: Callable[[Tensor, Weights], Tensor] = swiglu
    look_up: Callable[[Tensor, Tensor], Tensor] = look_up
    loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
    enter: Callable[[Tensor], Tensor] = _as_it_is
    """Before matmuls that ranks share."""
    leave: Callable[[Tensor], Tensor] = _as_it_is
    """After them."""


class PlainModel:
    """The forward pass at `positions_S` of a sequence; it holds no weights."""

    def __init__(self, architecture: LlamaArchitecture, positions_S: Tensor, seams: Seams) -> None:
        self._head_dim, self._eps, self._seams = architecture.head_dim, architecture.norm_eps, seams
        exponents = torch.arange(0, self._head_dim, 2).float() / self._head_dim
        angles_SH = torch.outer(positions_S.float(), (1.0 / architecture.rope_theta**exponents).repeat(2))
        self._cos_S1H, self._sin_S1H = angles_SH.cos()[:, None], angles_SH.sin()[:, None]

    def embed(self, tokens_BS: Tensor, weights: Weights) -> Tensor:
        """Return x_BSD."""
        return self._seams.look_up(tokens_BS, weights["embedding.weight"])

    def block(self, x_BSD: Tensor, weights: Weights) -> Tensor:
        """Return x_BSD after a block."""
        seams = self._seams
        normed = seams.enter(self._norm(x_BSD, weights["attention_norm.weight"]))
        query, key, value = (
            F.linear(normed, weights[f"attention.{name}.weight"]).unflatten(-1, (-1, self._head_dim))
            for name in ("query", "key", "value")
        )
        attended = seams.attend(self._turn(query), self._turn(key), value)
        x_BSD = x_BSD + seams.leave(F.linear(attended.flatten(-2), weights["attention.output.weight"]))
        return x_BSD + seams.leave(seams.feed(seams.enter(self._norm(x_BSD, weights["ffn_norm.weight"])), weights))

    def loss(self, x_BSD: Tensor, targets_BS: Tensor, weights: Weights) -> Tensor:
        """Return the mean loss."""
        normed = self._seams.enter(self._norm(x_BSD, weights["norm.weight"]))
        return self._seams.loss(F.linear(normed, weights["head.weight"]), targets_BS)

    def _norm(self, x_BSD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, (x_BSD.shape[-1],), weight_D, self._eps)

    def _turn(self, x_BSNH: Tensor) -> Tensor:
        first, second = x_BSNH.chunk(2, dim=-1)
        return x_BSNH * self._cos_S1H + torch.cat((-second, first), dim=-1) * self._sin_S1H
