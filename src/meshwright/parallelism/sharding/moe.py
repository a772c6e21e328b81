"""The table of a model whose blocks hold mixtures of experts; experts themselves are placed by experts.py.

With etp = 1 each rank routes the tokens of its own share of the sequence, which is not gathered but for the shared
experts. With etp = tp the whole mixture computes on the gathered sequence, and all of its outputs are parts of one sum.
"""

from meshwright.parallelism.sharding.latent_attention import LATENT_ATTENTION
from meshwright.parallelism.sharding.llama import ATTENTION, ENDS, FEED_FORWARD
from meshwright.parallelism.sharding.role import Table
from meshwright.spec.model.moe_architecture import MoEArchitecture

_TOKENS_APART: Table = {
    "blocks.*.ffn.shared": "gather",
    "blocks.*.ffn.shared.gate": "column",
    "blocks.*.ffn.shared.up": "column",
    "blocks.*.ffn.shared.down": "row",
    "blocks.*.ffn.experts": "elsewhere",
}
_TOKENS_GATHERED: Table = {
    "blocks.*.ffn.shared.gate": "column",
    "blocks.*.ffn.shared.up": "column",
    "blocks.*.ffn.shared.down": "row_part",
    "blocks.*.ffn.experts": "elsewhere",
}


def moe_table(architecture: MoEArchitecture, etp: int) -> Table:
    """Return the table of `architecture` for tp > 1 and `etp`, which is 1 or tp."""
    dense: Table = {f"blocks.{index}.ffn": "gather" for index in range(architecture.num_dense_layers)}
    of_dense_ffn: Table = {pattern: role for pattern, role in FEED_FORWARD.items() if pattern != "blocks.*.ffn"}
    mixtures: Table = _TOKENS_APART if etp == 1 else {**_TOKENS_GATHERED, "blocks.*.ffn": "gather_sum"}
    attention = ATTENTION if architecture.latent is None else LATENT_ATTENTION
    # The first pattern that matches counts.
    return {**dense, **of_dense_ffn, **mixtures, **attention, **ENDS}
