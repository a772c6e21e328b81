"""What attention by rows (parallelism/context/row_attention.py) and its price (cost/compute/row_attention.py) both
know.
"""

SCORES_AT_ONCE = 2**24
"""Scores that it holds of a block of queries: 64 MiB in float32."""
