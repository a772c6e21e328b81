"""Classes of ranks that do the same, of which one rank each is traced.

The ranks of one pipeline rank run the same program. Differences among them:

    shards      FSDP2 shards dim 0 of each parameter into runs of ceil(rows / shards): the last ones can be smaller or
                empty. The parameters and shards follow from the first rank's trace. Replicas (HSDP) do not differ, nor
                do tensor-parallel ranks, whose shards are equal by rule.
    cp          all-gather and ring give each rank attention of the same size in pieces of other shapes.
    ep          ranks differ if some receive more tokens than others; the first receives the most. Sizes are affine in
                the received rows (routing.py), so the busiest and the last class of a pipeline rank are
                traced and the others interpolated.

"largest" traces the first rank of each pipeline rank, which has the largest shards, to represent all: ranks with less
wait in the next collective, which is padded to equal length, and memory peaks where shards are largest. Only
ranks with different numbers of tokens have a representative of their own. "all" traces one rank of each class.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import Ints, Trace

Classes = Literal["largest", "all"]

CUT = "fsdp.chunk_cat"
"""The operator by which FSDP2 splits unsharded gradients: its last input is the result, one row a shard."""


def class_labels(trace: Trace, layout: Layout, routing: str) -> Ints:
    """Return a number for each rank of a pipeline rank, equal where they do the same [ranks / pp].

    `trace` is that of the first of them, whose number is 0.
    """
    coordinates = _coordinates(layout)
    columns = [np.zeros(layout.num_ranks // layout.pp, np.int64)]
    for rows, shards in _cuts(trace):
        share = -(-rows // shards)
        sizes = (rows - share * np.arange(shards)).clip(0, share)
        columns += [sizes[coordinates[axis]] for axis in ("fsdp", "expert_dp_shard") if getattr(layout, axis) == shards]
    if layout.cp > 1 and layout.cp_method != "ulysses":
        columns.append(coordinates["cp"])
    if layout.ep > 1 and routing != "balanced":
        columns.append(coordinates["ep"])
    _, first, labels = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[labels.ravel()], np.int64)


def token_labels(layout: Layout, rows: Sequence[int] | None) -> Ints:
    """Return a number for each rank of a pipeline rank, equal where one represents the others [ranks / pp].

    `rows` are the tokens that each position along ep receives, most at the first; None if unknown, and each position
    is then a class. Else positions with fewer rows than the last class start a new one at 1, 2, 4, 8 and so on, and
    at the first without any. The first of a class, its busiest, represents it: the others wait for it.
    """
    places = _coordinates(layout)["ep"]
    if rows is None:
        return places
    labels, start = [0], 0
    for at in range(1, layout.ep):
        is_edge = at & (at - 1) == 0 or (rows[at] == 0 < rows[at - 1])
        start = at if is_edge and rows[at] < rows[start] else start
        labels.append(labels[-1] + (start == at))
    return np.array(labels)[places]


def _coordinates(layout: Layout) -> dict[str, Ints]:
    """Return the position of each rank of a pipeline rank along the axes by which ranks can differ."""
    index = np.arange(layout.num_ranks // layout.pp)
    return {
        "fsdp": index // layout.tp % layout.fsdp,
        "cp": index // layout.tp % layout.cp,
        "expert_dp_shard": index // (layout.ep * layout.etp) % layout.expert_dp_shard,
        "ep": index // layout.etp % layout.ep,
    }


def _cuts(trace: Trace) -> set[tuple[int, int]]:
    """Return the rows of every sharded parameter, and its number of shards."""
    return {
        (whole.dims[0], signature.inputs[-1].dims[0])
        for signature in trace.signatures
        if signature.op.startswith(CUT)
        for whole in signature.inputs[:-1]
        if whole.dims
    }
