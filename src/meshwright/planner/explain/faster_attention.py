"""The kernel that computes the pick's attention, in words, and the backend that would compute it faster."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.attention_rates import AttentionKernel, kernel_of
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import ATTENTION_BACKENDS, CONTEXT_METHODS, LayoutTable, concatenate, layout_table
from meshwright.planner.candidate import candidate_at
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
    if not request.setup.is_own or request.cluster.device.is_host:
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
    """Yield the fastest of `finalists` with another attention backend, if it is faster than the first of them."""
    if not request.setup.is_own or request.cluster.device.is_host or "attention_backend" in request.fixed:
        return
    own = finalists.attention_backend[0]
    codes = [code for code, name in enumerate(ATTENTION_BACKENDS) if name not in _UNPRICED and code != own]
    whole = _on_whole_sequences(finalists)
    tables = [replace(whole, attention_backend=np.full(len(whole), code)) for code in codes]
    possible = concatenate(tables)
    possible = possible.take(is_valid(possible, request))
    # At once: a table of a few layouts takes as long as one of a thousand.
    priced = price(concatenate([finalists.take(np.arange(1)), possible]), request, only_fitting=False)
    is_better = priced.total_s < priced.total_s[0] * (1 - _LEAST_GAIN)
    fitting = priced.fastest(is_better & (priced.free_bytes >= request.margin_bytes))
    if len(fitting):
        best = candidate_at(priced, int(fitting[0]), request)
        backend = best.layout.attention_backend
        note = f"layout.attention_backend: no run of ours has timed {backend} on {request.cluster.device.name}"
        yield WhatIf(change=f"attention_backend {backend}", best=best, note=note)


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
