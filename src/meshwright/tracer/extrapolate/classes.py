"""Classes: which ranks do the same, and which of them are traced.

The ranks of one pipeline rank run the same program. What can differ among them:

    shards      FSDP2 cuts dim 0 of each parameter into runs of ceil(rows / shards): the last ones can be smaller or
                empty. What it cuts, over how many ranks, the first rank's own trace tells. Replicas (HSDP) do not
                differ, nor do tensor-parallel ranks, whose shares are equal by rule.
    cp          all-gather and ring give each rank attention of the same size in pieces of other shapes.
    ep          ranks differ if some of them get more tokens than others; the first one gets the most.
                Sizes are affine in the rows that arrive (token_load.py), so that the busiest and the last class of a
                pipeline rank are traced, and the others computed from them.

"largest" traces the first rank of each pipeline rank, which has the largest shards, and lets it stand for all: a rank
with less waits for those with more in the next collective, whose padding makes it equally long, and memory is short
where most is held. Only ranks that get other numbers of tokens, which are no few rows, have one of their own. "all"
traces one rank of each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import Ints, Trace

Classes = Literal["largest", "all"]

CUT = "fsdp.chunk_cat"
"""What FSDP2 calls to cut whole gradients into shards: the last tensor that it takes is the result, a row a shard."""


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
    """Return a number for each rank of a pipeline rank, equal where one stands for the others [ranks / pp].

    `rows` of tokens arrive at each place along ep, the most at the first; None where that is unknown, and each place
    then differs. Else places with fewer rows than the last class start a new one at 1, 2, 4, 8 and so on, and at the
    first without any. A class is represented by its first, the busiest: others of it have less to do and wait for it.
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
    """Return the place of each rank of a pipeline rank along the axes by which ranks can differ."""
    index = np.arange(layout.num_ranks // layout.pp)
    return {
        "fsdp": index // layout.tp % layout.fsdp,
        "cp": index // layout.tp % layout.cp,
        "expert_dp_shard": index // (layout.ep * layout.etp) % layout.expert_dp_shard,
        "ep": index // layout.etp % layout.ep,
    }


def _cuts(trace: Trace) -> set[tuple[int, int]]:
    """Return the rows of every parameter that is cut into shards, and the number of these."""
    return {
        (whole.dims[0], signature.inputs[-1].dims[0])
        for signature in trace.signatures
        if signature.op.startswith(CUT)
        for whole in signature.inputs[:-1]
        if whole.dims
    }
