"""GPT-2's table: positions are looked up and cut along the sequence like tokens, so that the two can be added."""

from meshwright.parallelism.sharding.llama import ATTENTION, ENDS
from meshwright.parallelism.sharding.role import Table

GPT2_TABLE: Table = {
    **ENDS,
    "positions": "vocabulary",
    **ATTENTION,
    "blocks.*.ffn": "gather",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
}
