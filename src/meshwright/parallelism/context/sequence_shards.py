"""Positions of a sequence that each context-parallel rank holds, and how shards are put back in order.

Under a causal mask later queries cost more. For equal work per rank, all-gather and ring cut the sequence into two
chunks per rank: rank r holds chunk r from the start and chunk r from the end (zigzag). Ulysses gives each rank whole
heads of the whole sequence, so its ranks hold contiguous shards.
"""

import torch
from torch import Tensor

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.layout import ContextMethod, nearest_multiples


def sequence_indices(seq_len: int, cp_rank: int, cp_degree: int, method: ContextMethod) -> Tensor:
    """Return positions_S that a context-parallel rank holds, ascending; raises InfeasibleLayout for uneven shards."""
    num_chunks = cp_degree if method == "ulysses" or cp_degree == 1 else 2 * cp_degree
    if seq_len % num_chunks:
        choices = " or ".join(str(value) for value in nearest_multiples(seq_len, num_chunks))
        raise InfeasibleLayout(
            f"train.seq_len = {seq_len}: must be a multiple of {num_chunks} for layout.cp = {cp_degree} with "
            f'layout.cp_method = "{method}"; set train.seq_len to {choices}, or change layout.cp'
        )
    chunks = torch.arange(seq_len).chunk(num_chunks)
    if num_chunks == cp_degree:
        return chunks[cp_rank]
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))


def in_true_order(x: Tensor, dim: int, cp_degree: int) -> Tensor:
    """Return the sequence along `dim`, given the concatenated zigzag shards `x`."""
    chunks = x.chunk(2 * cp_degree, dim)
    # The ranks' first chunks are the first half in order; their second chunks are the second half reversed.
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim)
