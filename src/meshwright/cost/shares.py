"""Shares: what one rank has of a setting's tokens, by the degrees of its layout."""

from __future__ import annotations

from meshwright.cost.case import Setting
from meshwright.cost.layout_table import LayoutTable


class Shares:
    """One setting's tokens and degrees, one element a key."""

    def __init__(self, setting: Setting, keys: LayoutTable) -> None:
        self.seq_len = setting.workload.seq_len
        self.tp, self.ep, self.etp = keys.tp, keys.ep, keys.etp
        self.tokens = keys.microbatch_size * self.seq_len / keys.cp
        self.cp = keys.cp
        self.tokens_between = self.tokens / keys.tp if setting.stack.sequence_parallel else self.tokens
        self.fuses = setting.stack.kernels == "fused"
        self.gathers_low = setting.gathers_low
        self.routes_in_float32 = setting.is_own
        has_own_ranks = (keys.ep > 1) | (keys.tp > 1)
        self.has_eager_experts = setting.is_own & ((setting.stack.kernels == "eager") | has_own_ranks)
        self.is_own = setting.is_own
        self.compiles_blocks = setting.stack.kernels != "eager"
        self.gathers_routed_tokens = setting.stack.gathers_routed_tokens
