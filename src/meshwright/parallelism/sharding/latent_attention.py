"""Latent attention's table: heads are cut, and the latents that they are made from are computed by every rank."""

from meshwright.parallelism.sharding.role import Table

LATENT_ATTENTION: Table = {
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.query_up": "column",
    "blocks.*.attention.kv_up": "column",
    "blocks.*.attention.output": "row",
}
