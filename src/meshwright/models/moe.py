"""Dropless mixture of experts. Read `MixtureOfExperts.forward` first.

Experts have no capacity limit, and nothing here syncs the host with the device.

Shapes: B batch, S positions, T tokens (B x S), D dim, E experts, K experts per token, R rows (T x K: one per token and
choice), F width inside an expert, G groups of experts. E and F are inferred from tensors, so that a rank with a shard
of them runs the same code.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.expert_rows import add_expert_bias, collect, reorder, spread, swiglu, token_rows
from meshwright.models.grouped_matmul import grouped_matmul, required_alignment
from meshwright.spec.model.moe_architecture import MoEArchitecture

Activation = Callable[[Tensor, Tensor], Tensor]
"""(gate_RF, up_RF) -> their product_RF."""
GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]


class RouterOutput(NamedTuple):
    """Assignment of tokens to experts."""

    expert_TK: Tensor
    """Chosen experts (int64)."""
    weight_TK: Tensor
    """Their weights in the sum, float32 at least; its gradient includes the router's losses."""
    counts_E: Tensor
    """Rows of each expert (int64)."""


class MixtureOfExperts(nn.Module):
    """The weighted sum of each token's chosen experts, plus shared experts, if any."""

    def __init__(
        self,
        architecture: MoEArchitecture,
        shared: nn.Module | None = None,
        *,
        has_bias: bool = False,
        activation: Activation = swiglu,
    ) -> None:
        """`has_bias` is of the router's logits and the experts (GPT-OSS)."""
        super().__init__()
        self.router = TopKRouter(architecture, has_bias)
        sizes = (architecture.num_experts, architecture.dim, architecture.expert_ffn_dim)
        self.experts = Experts(*sizes, has_bias=has_bias, activation=activation)
        self.shared = shared
        self.dispatch = LocalDispatch()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return x_BSD, the residual update."""
        routing: RouterOutput = self.router(x_BSD)
        # Stable: tokens of one expert keep their order, so that sums are equal under all layouts.
        order_R = routing.expert_TK.flatten().argsort(stable=True)
        place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        rows_RD = token_rows(x_BSD.flatten(0, 1), order_R, place_R)
        rows_RD = self.dispatch(self.experts, rows_RD, routing.counts_E)
        chosen_TKD = reorder(rows_RD, place_R, order_R).view(*routing.expert_TK.shape, -1)
        mixed_TD = (chosen_TKD * routing.weight_TK.type_as(chosen_TKD)[..., None]).sum(1)
        mixed_BSD = mixed_TD.view_as(x_BSD)
        return mixed_BSD if self.shared is None else mixed_BSD + self.shared(x_BSD)

    @property
    def padded_rows(self) -> Tensor:
        """Return the number of padding rows since the last reset."""
        return self.experts.padded_rows

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Return the tensors that forward accumulates in place: loads, padded rows and the router's losses."""
        router = self.router
        return (router.load_E, router.balance_loss, router.z_loss, router.num_forwards, self.padded_rows)

    def reset_statistics(self) -> None:
        """Reset all statistics."""
        for statistic in self.statistics:
            statistic.zero_()


def most_experts(model: nn.Module) -> int:
    """Return the largest number of experts of a layer of `model`; 0 without any."""
    mixtures = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    return max((len(mixture.router.load_E) for mixture in mixtures), default=0)


class TopKRouter(nn.Module):
    """Router: scores in float32 at least, and the top experts of each token."""

    bias: Tensor | None
    load_E: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    num_forwards: Tensor

    def __init__(self, architecture: MoEArchitecture, has_logit_bias: bool = False) -> None:
        super().__init__()
        num_experts = architecture.num_experts
        self.rules = architecture.router
        self.experts_per_token = architecture.experts_per_token
        self.weight = nn.Parameter(torch.empty(num_experts, architecture.dim))
        self.logit_bias = nn.Parameter(torch.empty(num_experts)) if has_logit_bias else None
        # Added to the scores for the choice only; updated by `update_bias`, not by gradients.
        self.register_buffer("bias", torch.zeros(num_experts) if self.rules.bias_update_rate else None)
        # Since the last reset: rows of each expert, unweighted losses summed over forward passes, and their number.
        # Only ratios are meaningful: a pass may cover a shard of the tokens.
        self.register_buffer("load_E", torch.zeros(num_experts), persistent=False)
        for name in ("balance_loss", "z_loss", "num_forwards"):
            # 1-D: the compiler treats a 0-D float64 as a constant, and loses in-place additions (2.13).
            self.register_buffer(name, torch.zeros(1), persistent=False)
        self.share_counts: Callable[[Tensor], Tensor] = _unchanged
        """Sums counts_BE over the ranks that hold other shards of the same sequences; set from outside."""
        self.loss_scale = 1.0
        """Factor on the gradient of the losses: 1 / n if n ranks sum theirs; set from outside."""

    def forward(self, x_BSD: Tensor) -> RouterOutput:
        """Return the assignment of tokens; in training the weights' gradient includes the router's losses."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.logit_bias is None else self.logit_bias.to(wide)
        logits_BSE = F.linear(x_BSD.to(wide), self.weight.to(wide), bias)
        scores_BSE = logits_BSE.softmax(-1) if self.rules.score == "softmax" else logits_BSE.sigmoid()
        expert_BSK = self._choose(scores_BSE.detach())
        weight_BSK = scores_BSE.gather(-1, expert_BSK)
        if self.rules.normalize_weights:
            # Sigmoids can all underflow to 0.
            weight_BSK = weight_BSK / (weight_BSK.sum(-1, keepdim=True) + 1e-20)
        weight_BSK = weight_BSK * self.rules.weight_scale
        counts_BE = _counts(expert_BSK, self.weight.shape[0])
        if self.training:
            with torch.no_grad():
                self.load_E.add_(counts_BE.sum(0))
            weight_BSK = self._with_losses(weight_BSK, logits_BSE, scores_BSE, counts_BE)
        return RouterOutput(expert_BSK.flatten(0, 1), weight_BSK.flatten(0, 1), counts_BE.sum(0))

    def update_bias(self, load_E: Tensor) -> None:
        """Raise the bias of experts below the mean of `load_E`, the rows of all ranks, and lower that of others."""
        assert self.bias is not None, "a router without bias_update_rate has no bias"
        load_E = load_E.to(self.bias.dtype)
        self.bias += self.rules.bias_update_rate * (load_E.mean() - load_E).sign()

    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """Return expert_BSK: the top scores plus bias, within the top groups."""
        if self.bias is not None:
            scores_BSE = scores_BSE + self.bias
        if self.rules.groups_per_token < self.rules.num_groups:
            scores_BSGE = scores_BSE.unflatten(-1, (self.rules.num_groups, -1))
            best_two = scores_BSGE.topk(min(2, scores_BSGE.shape[-1]), dim=-1).values
            group_BSG = best_two.sum(-1).topk(self.rules.groups_per_token, dim=-1).indices
            is_out_BSG = torch.ones_like(best_two[..., 0], dtype=torch.bool).scatter(-1, group_BSG, False)
            scores_BSE = scores_BSGE.masked_fill(is_out_BSG[..., None], -torch.inf).flatten(-2)
        return scores_BSE.topk(self.experts_per_token, dim=-1).indices

    def _with_losses(self, weight_BSK: Tensor, logits_BSE: Tensor, scores_BSE: Tensor, counts_BE: Tensor) -> Tensor:
        """Return weight_BSK with the losses attached to its gradient, and accumulate their values.

        Ranks that share sequences average over their own tokens with frequencies over all tokens, so that the mean
        of their losses and gradients is that of whole sequences.
        """
        loss = weight_BSK.new_zeros(())
        if self.rules.balance_loss:
            balance = _balance(scores_BSE, self.share_counts(counts_BE.type_as(scores_BSE)))
            self.balance_loss.add_(balance.detach())
            loss = loss + self.rules.balance_loss * balance
        if self.rules.z_loss:
            z_loss = logits_BSE.logsumexp(-1).square().mean()
            self.z_loss.add_(z_loss.detach())
            loss = loss + self.rules.z_loss * z_loss
        self.num_forwards.add_(1)
        if not loss.requires_grad:
            return weight_BSK
        with_loss_BSK: Tensor = _AttachLoss.apply(weight_BSK, loss, self.loss_scale)  # type: ignore[no-untyped-call]
        return with_loss_BSK


class Experts(nn.Module):
    """Gated experts: down(activation(gate(x), up(x))), with matrices of each expert's own, and biases if it has any."""

    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    padded_rows: Tensor
    alignment = 1
    """Multiple to which each expert's rows are zero-padded, besides what the kernel requires."""

    def __init__(
        self, num_experts: int, dim: int, ffn_dim: int, *, has_bias: bool = False, activation: Activation = swiglu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.grouped_matmul: GroupedMatmul = grouped_matmul
        """(rows_RI, weight_EOI, counts_E) -> rows_RO; set from outside."""
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        for name, width in (("gate_bias", ffn_dim), ("up_bias", ffn_dim), ("down_bias", dim)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, width)) if has_bias else None)
        self.register_buffer("padded_rows", torch.zeros(1), persistent=False)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return rows_RD after their experts: the first counts_E[0] rows are the first expert's, and so on."""
        alignment = math.lcm(self.alignment, required_alignment(rows_RD))
        if alignment == 1:
            return self._compute(rows_RD, counts_E)
        num_rows, num_experts = rows_RD.shape[0], self.gate.shape[0]
        padded_E = (counts_E + alignment - 1) // alignment * alignment
        shift_E = (padded_E - counts_E).cumsum(0) - (padded_E - counts_E)
        place_R = torch.arange(num_rows, device=rows_RD.device)
        place_R = place_R + shift_E.repeat_interleave(counts_E, output_size=num_rows)
        if self.training:
            self.padded_rows.add_((padded_E - counts_E).sum())
        # The maximum number of rows: the actual number is on the device.
        most_rows = num_rows + num_experts * (alignment - 1)
        padded_PD = spread(rows_RD, place_R, most_rows)
        return collect(self._compute(padded_PD, padded_E), place_R)

    def _compute(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        gate_RF = self._linear(rows_RD, self.gate, self.gate_bias, counts_E)
        up_RF = self._linear(rows_RD, self.up, self.up_bias, counts_E)
        return self._linear(self.activation(gate_RF, up_RF), self.down, self.down_bias, counts_E)

    def _linear(self, rows_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, counts_E: Tensor) -> Tensor:
        product_RO = self.grouped_matmul(rows_RI, weight_EOI, counts_E)
        return product_RO if bias_EO is None else add_expert_bias(product_RO, bias_EO, counts_E)


class LocalDispatch(nn.Module):
    """Dispatch to local experts; expert parallelism replaces it by an all-to-all."""

    def forward(self, experts: nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return rows_RD after their experts, in order; rows are sorted by expert, counts_E of each."""
        computed_RD: Tensor = experts(rows_RD, counts_E)
        return computed_RD


def _counts(expert_BSK: Tensor, num_experts: int) -> Tensor:
    """Return counts_BE (int64): rows of each sequence for each expert."""
    chosen_BR = expert_BSK.flatten(1)
    return chosen_BR.new_zeros(chosen_BR.shape[0], num_experts).scatter_add_(1, chosen_BR, torch.ones_like(chosen_BR))


def _balance(scores_BSE: Tensor, counts_BE: Tensor) -> Tensor:
    """Return the mean balance loss of sequences: 1 if all experts are chosen equally, E / K at most.

    DeepSeek-V3 (arXiv:2412.19437), equations 17 to 20: frequency x mean share of the scores, summed over experts.
    """
    frequency_BE = counts_BE * (counts_BE.shape[1] / counts_BE.sum(1, keepdim=True))
    share_BE = (scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)).mean(1)
    return (frequency_BE * share_BE).sum(1).mean()


def _unchanged(counts_BE: Tensor) -> Tensor:
    return counts_BE


class _AttachLoss(torch.autograd.Function):
    # Only the last pipeline stage returns a loss, so the router's losses enter as gradients in backward.
    @staticmethod
    def forward(ctx: Any, weight: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.new_full((), ctx.scale), None
