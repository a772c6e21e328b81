"""The kernel that computes the pick's attention, in words, and the backend that would compute it faster."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.achieved_rates import is_blackwell
from meshwright.cost.attention_rates import AttentionKernel, chooses_cudnn, kernel_of
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import ATTENTION_BACKENDS, CONTEXT_METHODS, LayoutTable, concatenate, layout_table
from meshwright.cost.training_setup import TrainingSetup
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.explain.explain import changes, listed
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.price import price
from meshwright.planner.search.rules import is_valid
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import WhatIf

_NAMES: dict[AttentionKernel, str] = {
    "cudnn": "cuDNN's kernels",
    "flash": "FlashAttention 2",
    "varlen": "varlen_attn",
    "flex": "FlexAttention",
    "efficient": "memory-efficient attention",
    "published": "a kernel of torch's SDPA",
}
_LEAST_GAIN = 0.01
"""Share of a step that another backend must save to be named."""
_UNPRICED = ("auto", "math")


def attention_words(layout: Layout, request: PlanRequest) -> str:
    """Return what computes the attention of `layout` and what it skips; "" for other software and on a host."""
    if not request.setup.is_own_on_device:
        return ""
    if layout.cp > 1 and layout.cp_method == "ring":
        return "FlashAttention 2, for each piece of a ring"
    setup = request.configs(layout_table([layout])).setups[0]
    words = _NAMES[kernel_of(setup, fitted_constants())]
    if layout.attention_backend == "auto":
        words += f", as torch chooses on {request.cluster.device.name}"
    if setup.masks_scores:
        return f"{words}; scores between documents are computed and masked"
    length = request.workload.document_tokens
    if not (setup.skips_masked and request.workload.masks_documents):
        return words
    known = f"of {length:.0f} tokens in the mean" if length else "whose length is unknown (data.document_tokens)"
    return f"{words}; scores between documents {known} are skipped"


def faster_backends(finalists: LayoutTable, request: PlanRequest) -> Iterator[WhatIf]:
    """Yield the fastest of `finalists` with another attention backend, if it is faster than the first of them.

    Each layout is compared with itself, too: a gain is the backend's, not that of another layout.
    """
    if not request.setup.is_own_on_device or "attention_backend" in request.fixed:
        return
    own = finalists.attention_backend[0]
    chosen = {*_UNPRICED, ATTENTION_BACKENDS[own], _chosen_by_torch(request.setup)}
    codes = [code for code, name in enumerate(ATTENTION_BACKENDS) if name not in chosen]
    whole = _on_whole_sequences(finalists)
    possible = concatenate([replace(whole, attention_backend=np.full(len(whole), code)) for code in codes])
    possible = possible.take(is_valid(possible, request))
    # The same layouts with their own backend, by which they need not be valid.
    plain = replace(possible, attention_backend=np.full(len(possible), own))
    # At once: a table of a few layouts takes as long as one of a thousand.
    priced = price(concatenate([finalists.take(np.arange(1)), possible, plain]), request, only_fitting=False)
    rows, limit = 1 + np.arange(len(possible)), 1 - _LEAST_GAIN
    is_better = np.zeros(len(priced), np.bool_)
    is_better[rows] = priced.total_s[rows] < limit * np.minimum(priced.total_s[0], priced.total_s[rows + len(possible)])
    fitting = priced.fastest(is_better & (priced.headroom_bytes >= request.margin_bytes))
    if len(fitting):
        best = candidate_at(priced, int(fitting[0]), request)
        backend = best.layout.attention_backend
        others = changes(layout_at(finalists, 0, request), best.layout)
        changed = {"attention_backend": backend, **others}
        change = listed({f"layout.{key}": value for key, value in changed.items()})
        note = f"layout.attention_backend: no run of ours has timed {backend} on {request.cluster.device.name}"
        yield WhatIf(change=change, best=best, note=note)


def _chosen_by_torch(setup: TrainingSetup) -> str:
    """Return the backend that auto is: cuDNN's where torch prefers it and it takes the heads, else flash."""
    prefers = is_blackwell(setup.cluster.device) or chooses_cudnn(setup.cluster.device, fitted_constants())
    return "cudnn" if prefers and setup.takes_cudnn else "flash"


def _on_whole_sequences(layouts: LayoutTable) -> LayoutTable:
    """Return the layouts with ulysses, and with the ranks of cp as data-parallel ranks, each with fewer sequences."""
    swapped = replace(layouts, cp_method=np.full(len(layouts), CONTEXT_METHODS.index("ulysses")))
    apart = replace(
        layouts,
        cp=np.ones_like(layouts.cp),
        dp_shard=layouts.dp_shard * layouts.cp,
        microbatch_size=np.maximum(layouts.microbatch_size // layouts.cp, 1),
    )
    return concatenate([swapped, apart.take(layouts.cp > 1)])
