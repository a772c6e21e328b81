"""Partition: what one rank has of a setup's tokens, by the degrees of its layout."""

from __future__ import annotations

from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.training_setup import TrainingSetup


class Partition:
    """Tokens and degrees of one setup, one element a key; and what its stack does with them."""

    def __init__(self, setup: TrainingSetup, keys: LayoutTable) -> None:
        self.seq_len = setup.workload.seq_len
        self.tp, self.ep, self.etp = keys.tp, keys.ep, keys.etp
        self.tokens = keys.microbatch_size * self.seq_len / keys.cp
        self.cp = keys.cp
        self.tokens_between = self.tokens / keys.tp if setup.stack.sequence_parallel else self.tokens
        self.fuses = setup.stack.kernels == "fused"
        self.gathers_low = setup.gathers_low
        self.routes_in_float32 = setup.is_own
        has_own_ranks = (keys.ep > 1) | (keys.tp > 1)
        self.has_eager_experts = setup.is_own & ((setup.stack.kernels == "eager") | has_own_ranks)
        self.is_own = setup.is_own
        self.compiles_blocks = setup.stack.kernels != "eager"
        self.gathers_routed_tokens = setup.stack.gathers_routed_tokens
