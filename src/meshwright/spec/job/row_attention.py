"""Scores at once of attention by rows: parallelism/context/row_attention.py and cost/compute/blockwise_attention.py."""

SCORES_AT_ONCE = 2**24
"""Scores that it holds of a block of queries: 64 MiB in float32."""
