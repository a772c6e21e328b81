"""Role: what a module does under tensor parallelism, by name.

x is [batch, sequence, width]. Between the parts of a block each rank holds its share of the sequence; within them, all
of the sequence and a share of the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Role = Literal[
    "gather", "gather_output", "gather_sum", "column", "kv", "row", "row_part", "vocabulary", "head", "elsewhere"
]
"""
gather          no parameters of its own: its first input is gathered along the sequence
gather_output   its parameters are whole; its output is gathered along the sequence
gather_sum      gather, and the ranks' outputs are summed, and cut along the sequence
column          a linear layer cut along its outputs
kv              the same, for key and value heads: ranks that share a head gather it
row             a linear layer cut along its inputs: the ranks' outputs are summed, and cut along the sequence
row_part        the same, but the sum is left to a module around it, which is gather_sum
vocabulary      an embedding cut along its rows: looked up where the row is, summed, and cut along the sequence
head            gather and column: the model's output, cut along the vocabulary
elsewhere       left alone with all that is in it: another parallelism places it
"""

Table = Mapping[str, Role]
"""Role of each module whose name matches a pattern, as in fnmatch. Parameters of all others are whole on each rank."""
