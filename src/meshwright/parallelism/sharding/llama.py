"""Llama's table."""

from meshwright.parallelism.sharding.role import Table

ATTENTION: Table = {
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "kv",
    "blocks.*.attention.value": "kv",
    "blocks.*.attention.output": "row",
}

FEED_FORWARD: Table = {
    "blocks.*.ffn": "gather",
    "blocks.*.ffn.gate": "column",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
}

ENDS: Table = {
    "embedding": "vocabulary",
    # The head may be the embedding used again, and then no module of its own that could gather.
    "norm": "gather_output",
    "head": "column",
}

LLAMA: Table = {**ENDS, **ATTENTION, **FEED_FORWARD}
