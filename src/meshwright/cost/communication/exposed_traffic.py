"""ExposedTraffic: exposed seconds of what a block's ranks of tp, cp and ep send each other in its two passes.

Priced twice: over links that nothing else uses, which gives the passes that FSDP's gathers hide behind, and over what
these gathers leave of the links (contention.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.communication.communication import Communication
from meshwright.cost.communication.contention import contended_fabrics, fsdp_traffic
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.compute.recompute import Repeats
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Floats, Ints, Passes

FabricPairs = Sequence[tuple[Fabric, Fabric]]
"""The links of tp, cp and ep, each forward and backward."""


@dataclass(frozen=True)
class RecomputedTraffic:
    """How often backward sends what forward has sent, one element a configuration."""

    tp: Floats
    cp: Floats
    ep: Floats


@dataclass(frozen=True)
class BlockTraffic:
    """What a block's ranks send, and what hides it, one element a configuration."""

    row: Ints
    matmul_s: Floats
    """Forward."""
    attention_s: Passes
    twice: Repeats
    resent: RecomputedTraffic


@dataclass(frozen=True)
class ExposedTraffic:
    """Exposed seconds of a block by axis, one element a configuration."""

    tp: Passes
    cp: Passes
    ep: Passes

    @property
    def forward(self) -> Floats:
        """Return the seconds that are added to the forward pass."""
        return np.asarray(self.tp[0] + self.cp[0] + self.ep[0])

    @property
    def backward(self) -> Floats:
        """Return the seconds that are added to the backward pass."""
        return np.asarray(self.tp[1] + self.cp[1] + self.ep[1])


class TrafficPricer:
    """Prices what blocks' ranks send."""

    def __init__(self, communication: Communication, parallel: DataParallel) -> None:
        self.communication, self.parallel = communication, parallel
        layouts = communication.layouts
        has_both = (layouts.tp * layouts.cp * layouts.ep > 1) & (layouts.dp * layouts.cp > 1)
        self.contends = has_both & parallel.shards_parameters & parallel.is_own
        """Whether the configuration's FSDP and its other axes may use the same links at once."""

    def sent_alone(self, block: BlockTraffic, fabric: Fabric, c: Constants) -> ExposedTraffic:
        """Return what one block's ranks send while FSDP communicates nothing."""
        return self._sent(block, [(fabric, fabric)] * 3, c)

    def sent_next_to_fsdp(
        self, block: BlockTraffic, fabric: Fabric, c: Constants, whole: Passes, attention: Passes
    ) -> ExposedTraffic:
        """Return the same over the links that FSDP's gathers and reductions leave.

        tp communicates in a `whole` pass, cp in its attention, first forward and last backward, ep in the rest.
        """
        none, others = np.zeros_like(whole[0]), whole[1] - attention[1]
        spans = (
            ((none, whole[0]), (none, whole[1])),
            ((none, attention[0]), (others, whole[1])),
            ((attention[0], whole[0]), (none, others)),
        )
        fsdp = fsdp_traffic(self.parallel, block.row, fabric, self.contends)
        links = [
            contended_fabrics(fsdp, shares, forward, backward, fabric)
            for shares, (forward, backward) in zip(self.communication.shares(fabric), spans, strict=True)
        ]
        return self._sent(block, links, c)

    def _sent(self, block: BlockTraffic, links: FabricPairs, c: Constants) -> ExposedTraffic:
        row, communication, resent = block.row, self.communication, block.resent
        tp = _over(links[0], lambda one: communication.tensor(row, one, c, block.matmul_s))
        cp = _over(links[1], lambda one: communication.context(row, one, c, *block.attention_s))
        ep = _over(links[2], lambda one: communication.expert(row, one, c))
        tp, cp, ep = (
            (forward, (1 + twice) * backward + again * forward)
            for (forward, backward), twice, again in (
                (tp, block.twice.tp, resent.tp),
                (cp, block.twice.cp, resent.cp),
                (ep, block.twice.ep, resent.ep),
            )
        )
        return ExposedTraffic(tp, cp, ep)


def _over(links: tuple[Fabric, Fabric], price: Callable[[Fabric], Passes]) -> Passes:
    """Return the seconds of both passes, each over links of its own."""
    passes = price(links[0])
    return passes if links[0] is links[1] else (passes[0], price(links[1])[1])
