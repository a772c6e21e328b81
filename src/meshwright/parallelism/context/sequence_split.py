"""Which positions of a sequence each context-parallel rank holds, and how the ranks' parts become the sequence again.

Causal attention costs a query more, the later it stands. So that all ranks have equal work, all-gather and ring cut the
sequence into two chunks for each rank, and rank r holds chunk r and, counted from the end, chunk r (zigzag). Ulysses
gives each rank whole heads of the whole sequence, whose work is equal anyhow: its ranks hold one run of positions each.
"""

import torch
from torch import Tensor

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.layout import ContextMethod, nearest_multiples


def sequence_indices(seq_len: int, cp_rank: int, cp_degree: int, method: ContextMethod) -> Tensor:
    """Return positions_S: the positions of the whole sequence that a context-parallel rank holds, ascending."""
    num_chunks = cp_degree if method == "ulysses" or cp_degree == 1 else 2 * cp_degree
    if seq_len % num_chunks:
        choices = " or ".join(str(value) for value in nearest_multiples(seq_len, num_chunks))
        raise InfeasibleLayout(
            f"train.seq_len = {seq_len} does not divide into {num_chunks} equal chunks, which layout.cp = {cp_degree} "
            f'with layout.cp_method = "{method}" needs: set train.seq_len to {choices}, or change layout.cp'
        )
    chunks = torch.arange(seq_len).chunk(num_chunks)
    if num_chunks == cp_degree:
        return chunks[cp_rank]
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))


def in_true_order(x: Tensor, dim: int, cp_degree: int) -> Tensor:
    """Return the sequence along `dim`, of which `x` has the zigzag ranks' parts one after another."""
    chunks = x.chunk(2 * cp_degree, dim)
    # Every first chunk of a rank is one of the first half, ascending; the second ones come from the end.
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim)
