"""Communication: what tensor, context and expert parallelism add to a block, in exposed seconds.

    tp   gathers and scatters of the residual stream: 2 of each forward and backward, one more where the embedding
         ends and the head begins; without sequence parallelism all-reduces in their place
    cp   keys and values from the other ranks: gathered (exposed), or round a ring (what attention does not hide), or
         two all-to-alls (ulysses); backward their gradients come back, round a ring in float32 and one step further
    ep   tokens to their experts and back, both ways forward and backward

Stacks that keep a part of what they gathered (Stack.gathers_again) gather keys again in backward, and the residual
stream before each of a block's two gradients of weights; half of this hides behind other gradients, so that it counts
as one. Their rings pass gradients on in the activations' format. Ours gather only the residual stream again
(Stack.gathers_input_again), in blocks that are not recomputed as a whole: recomputation gathers it in the others.

What float8 layers of ours exchange besides is in amax_reductions.py.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198) for tp with sequence parallelism, Llama 3 (arXiv:2407.21783, 3.3.2)
for gathered keys, Jacobs et al. 2023 (arXiv:2309.14509) for ulysses. Where a stack overlaps, a fitted share stays
exposed. What is lost to FSDP on the same links is in contention.py. Ignored: contention between other axes; what is
a few bytes a token or less (sums of a loss over the vocabulary, how many tokens go where).
"""

import numpy as np

from meshwright.cost.blocks.block_table import BLOCK, FIRST
from meshwright.cost.blocks.work import Work
from meshwright.cost.communication.all_to_all import Routing, all_to_all_s, token_exchange_s
from meshwright.cost.communication.amax_reductions import AmaxReductions
from meshwright.cost.communication.collective import (
    RankGroup,
    all_gather_s,
    group_of,
    neighbour_shares,
    reduce_scatter_s,
    slowdown_share,
    spread_shares,
)
from meshwright.cost.communication.contention import LinkShares
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.pipeline_p2p import send_s
from meshwright.cost.compute.recompute import share_of_blocks
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import CONTEXT_METHODS, Bools, Floats, Ints, Passes
from meshwright.cost.pipeline.stage import split_share
from meshwright.cost.training_setup import Configurations

_FLOAT32_BYTES = 4.0
_LOW_SHARE = (0.5 + 1.0) / 2
"""Bytes of a pair of collectives whose all-gather is of 8 bits and whose reduce-scatter is of 16, over 16 for both."""


class Communication:
    """Communication of tp, cp and ep, to be priced with a fabric and constants; one element a configuration."""

    def __init__(self, configs: Configurations, work: Work) -> None:
        def is_set(name: str) -> Bools:
            return configs.has(lambda s: getattr(s.stack, name))

        self.layouts, self.work = configs.layouts, work
        full, selective = share_of_blocks(configs, "full"), share_of_blocks(configs, "selective")
        # With selective recomputation each part of a split backward does so, without any only that of the weights.
        split = split_share(configs.layouts, configs.num_microbatches)
        self.element_bytes = configs.each(lambda s: s.workload.activation_element_bytes)
        self.has_sequence_parallel = is_set("sequence_parallel")
        self.orders_collectives = is_set("gathers_input_again")
        """Whether compiled blocks run matmuls next to collectives that these do not need, as only ours do."""
        self.gathers_input_again = self.orders_collectives * (1 - full - selective)
        """Share of the blocks whose backward gathers the inputs of column-parallel matmuls again, as only ours do."""
        self.recomputes_gathers = self.orders_collectives * selective * (1 + split)
        """How often, in the mean over blocks, a selective recomputation does so."""
        self.overlaps_tp = is_set("tp_overlap") | configs.layouts.async_tp
        self.overlaps_ep = is_set("ep_overlap")
        self.gathers_again = is_set("gathers_again")
        self.gathers_routed_tokens = is_set("gathers_routed_tokens")
        self.gathers_low = configs.has(lambda s: s.gathers_low)
        """Whether activations are gathered in 8 bits; what is scattered stays in 16."""
        self.amax = AmaxReductions(configs, work.blocks)
        self.is_deduplicated = configs.has(lambda s: s.stack.dispatcher == "fused")

    def shares(self, fabric: Fabric) -> tuple[LinkShares, LinkShares, LinkShares]:
        """Return the shares of its links that a rank takes for tp, cp and ep."""
        layouts = self.layouts
        tp, cp, ep = group_of(1, layouts.tp, fabric), group_of(layouts.tp, layouts.cp, fabric), self._experts(fabric)
        is_ring, is_ulysses = (layouts.cp_method == CONTEXT_METHODS.index(name) for name in ("ring", "ulysses"))
        # Of a ring's hops the slowest set the pace.
        crosses = cp.num_domains > 1
        by_method = zip((~crosses, crosses), spread_shares(cp, fabric), neighbour_shares(cp, fabric), strict=True)
        context = (np.select([is_ring, is_ulysses], [hop, spread], gathered) for hop, spread, gathered in by_method)
        return (
            LinkShares(tp, *neighbour_shares(tp, fabric)),
            LinkShares(cp, *context),
            LinkShares(ep, *spread_shares(ep, fabric)),
        )

    def tensor(self, row: Ints, fabric: Fabric, c: Constants, matmul_s: Floats) -> Passes:
        """Return tp's exposed seconds of one block, or of what stands before or after them, forward and backward.

        `matmul_s` are the seconds of its matmuls, forward.
        """
        blocks = self.work.blocks
        # No matmul comes before the embedding's.
        has_matmuls = blocks.kind[row] != FIRST
        group = group_of(1, self.layouts.tp, fabric)
        element_bytes = self.element_bytes * np.where(self.gathers_low, _LOW_SHARE, 1.0)
        num_bytes = blocks.tokens[row] * blocks.width[row] * element_bytes
        # As many gathers as scatters, which take as long unless they were timed.
        pair = all_gather_s(num_bytes, group, fabric) + reduce_scatter_s(num_bytes, group, fabric)
        one = 0.5 * pair
        exposed = one * np.where(self.overlaps_tp & has_matmuls, c["tp_exposed"], 1.0)
        count = blocks.num_tp_collectives[row]
        gathers_all = self.has_sequence_parallel & self.gathers_again & has_matmuls
        ours = blocks.num_tp_inputs[row] * self.gathers_input_again
        num_again = np.where(gathers_all, count / 2, ours)
        recomputed = blocks.num_tp_inputs[row] * self.recomputes_gathers
        # What is recomputed has no other gradients to hide behind.
        num_exposed = num_again * c["tp_again_exposed"] + recomputed
        usual = exposed * count, exposed * (count + num_exposed)
        whole = one * count, one * (count + num_again + recomputed)
        slowdown = c["overlap_slowdown"] * slowdown_share(group, fabric)
        compiled = tuple(
            left + slowdown * (all_of - left)
            for all_of, left in zip(whole, self._compiled(row, one, num_again + recomputed, matmul_s), strict=True)
        )
        is_compiled = self.orders_collectives & self.layouts.compiles_blocks & (blocks.kind[row] == BLOCK)
        amax = self.amax.over_tp(row, group, fabric)
        forward, backward = (
            np.where(is_compiled, *both) + reduced
            for both, reduced in zip(zip(compiled, usual, strict=True), amax, strict=True)
        )
        return forward, backward

    def _compiled(self, row: Ints, one: Floats, num_again: Floats, matmul_s: Floats) -> Passes:
        """Return the same of our compiled blocks; `one` is a collective alone, `num_again` those that gather again.

        Async tp joins all but the reduce-scatters of backward with a matmul, which can start on one of tp parts only
        after the collective has ended. What is not joined hides in backward behind matmuls that need nothing of it,
        but for the first all-gather of a block: all wait for it.
        """
        blocks, layouts = self.work.blocks, self.layouts
        row_shares = blocks.last_matmul_share[row], blocks.early_terms_share[row]
        column_share = 1 - row_shares[0] - row_shares[1]
        pairs, hides = blocks.num_tp_collectives[row] / 2, 1 - 1 / layouts.tp

        def left(collectives_s: Floats, matmuls_s: Floats) -> Floats:
            return np.asarray(np.maximum(collectives_s - matmuls_s, 0.0))

        rows = sum(left(pairs / 2 * one, hides * share * matmul_s) for share in row_shares)
        columns = left(pairs * one, hides * column_share * matmul_s)
        forward = np.where(layouts.async_tp, rows + columns, 2 * pairs * one)
        # Gradients of weights and of inputs each take as long as the forward.
        behind_joined = left((pairs + num_again) * one, (1 + column_share) * matmul_s)
        first = np.minimum(pairs, 1) * one
        behind_all = first + left((2 * pairs + num_again) * one - first, 2 * matmul_s)
        return forward, np.where(layouts.async_tp, rows + behind_joined, behind_all)

    def context(self, row: Ints, fabric: Fabric, c: Constants, attention_f: Floats, attention_b: Floats) -> Passes:
        """Return cp's exposed seconds of one block, forward and backward."""
        blocks, layouts = self.work.blocks, self.layouts
        cp = layouts.cp
        group = group_of(layouts.tp, cp, fabric)
        local = blocks.kv_elements[row] * self.element_bytes
        gathered = all_gather_s(local * cp, group, fabric)
        one = send_s(local, group, fabric)
        wide = send_s(blocks.kv_elements[row] * _FLOAT32_BYTES, group, fabric)
        ring = (cp - 1) * one
        ring_back = ring + np.where(self.gathers_again, ring, cp * wide)
        # Heads x their width, which is not the residual stream's in every model.
        queries = blocks.attention_flops[row] / (4 * blocks.context[row])
        swapped = all_to_all_s((2 * queries + blocks.swapped_kv_elements[row]) * self.element_bytes, group, fabric)
        is_ring = layouts.cp_method == CONTEXT_METHODS.index("ring")
        is_swap = layouts.cp_method == CONTEXT_METHODS.index("ulysses")
        ring_f, ring_b = (
            np.maximum(c["cp_exposed"] * whole, whole - c["cp_hiding"] * attention)
            for whole, attention in ((ring, attention_f), (ring_back, attention_b))
        )
        forward = np.where(is_ring, ring_f, np.where(is_swap, swapped, gathered))
        back = np.where(self.gathers_again, 2.0, 1.0) * gathered
        backward = np.where(is_ring, ring_b, np.where(is_swap, swapped, back))
        has_attention = blocks.attention_flops[row] > 0
        amax_f, amax_b = self.amax.over_cp(row, group, fabric)
        return forward * has_attention + amax_f, backward * has_attention + amax_b

    def expert(self, row: Ints, fabric: Fabric, c: Constants) -> Passes:
        """Return ep's exposed seconds of one block, forward and backward."""
        blocks, layouts = self.work.blocks, self.layouts
        copies = blocks.routed_copies[row]
        group = self._experts(fabric)
        senders = np.where(self.gathers_routed_tokens, layouts.tp, layouts.tp / layouts.etp)
        num_bytes = blocks.tokens[row] / senders * blocks.width[row] * self.element_bytes
        routing = Routing(np.maximum(copies, 1), self.is_deduplicated)
        one = token_exchange_s(num_bytes, routing, group, fabric)
        one = one * np.where(copies > 0, 1.0, 0.0) * np.where(self.overlaps_ep, c["ep_exposed"], 1.0)
        return 2 * one, 2 * one

    def _experts(self, fabric: Fabric) -> RankGroup:
        """Return the groups of ranks that exchange tokens."""
        return group_of(np.where(self.layouts.etp > 1, self.layouts.tp, 1), self.layouts.ep, fabric)
