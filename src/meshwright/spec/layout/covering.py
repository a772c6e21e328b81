"""A covering set of layouts: small enough to run on a laptop, with every pair of axes in at least one layout.

Beyond the pairs, each way to share a sequence, each schedule, each policy of recomputation and each choice of FSDP2
stands alone once, so that a failure has one suspect, and then among others.
"""

from pathlib import Path

from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture

COVERED_AXES = (*AXES, "ep")
"""The axes; every pair of them occurs in a layout."""

_BATCH = 16
"""Sequences of a step for which microbatch sizes are chosen: few microbatches, but enough to fill each pipeline."""

_WORDS = Path(__file__).with_name("covering_layouts.txt")
"""One layout a line."""


def covering_layouts(architecture: LlamaArchitecture | None, max_ranks: int = 16) -> list[Layout]:
    """Return layouts of at most `max_ranks` ranks that a model can take, fewest ranks first.

    A model without experts gets the same, less what is said of experts. Of a class of the user's own (None) only its
    author knows which axes it takes: it gets those of data parallelism, which any model takes.
    """
    found = dict.fromkeys(
        _for_model(parse_layout(word), architecture) for word in _WORDS.read_text(encoding="utf-8").split()
    )
    fitting = [layout for layout in found if layout.num_ranks <= max_ranks and _can_take(architecture, layout)]
    return sorted(fitting, key=lambda layout: layout.num_ranks)


def _for_model(layout: Layout, architecture: LlamaArchitecture | None) -> Layout:
    experts = {} if isinstance(architecture, MoEArchitecture) else {"ep": 1, "etp": 1}
    num_microbatches = layout.pp * max(2, layout.stages_per_rank)
    size = 1 if architecture is None else max(1, _BATCH // (layout.dp * num_microbatches))
    return layout.replace(microbatch_size=size, **experts)


def _can_take(architecture: LlamaArchitecture | None, layout: Layout) -> bool:
    if architecture is None:
        return layout.num_ranks == layout.dp
    # A sequence of so many tokens can be split by any of these degrees.
    return not split_problems(layout, architecture, 2 * layout.cp * layout.tp)
