"""activation_checkpoint = "auto" by formulas: what training is expected to choose, without a trace.

Training and `meshwright simulate` measure each candidate on a traced step (app/job/recompute_budget.py). Here the
memory formula replaces the trace; the search, the budget and the pipeline ranks are the same functions. Where the two
peaks differ by less than what one block saves, the choices differ by one block of a pipeline rank at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.cost.layout_table import layout_table
from meshwright.errors import InfeasibleLayout
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bubble import num_microbatches_of
from meshwright.planner.search.price import memory_of_ranks, time_steps
from meshwright.simulator.memory.choose_checkpoints import Checkpoints, Need, choose_checkpoints
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import checkpoint_words
from meshwright.spec.layout.schedule.action import read_schedule
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.layout.stage_split import blocks_of_stages
from meshwright.spec.machine.device import Device
from meshwright.spec.model.model_spec import ModelSpec

_SHARE_OF_DEVICE = 0.95
"""Of a device's usable memory: the rest is for what the allocator rounds up and cannot use."""
_TRACE_ERROR = 0.05
"""Bound of allocated bytes, formula against trace (tests/fake_ranks/agreement/test_reserved_memory.py)."""


@dataclass(frozen=True)
class RecomputeChoice:
    """What blocks are expected to save where a job says "auto"."""

    layout: Layout
    """With full recomputation where even that is beyond the budget."""
    misfit: InfeasibleLayout | None = None
    """Why no choice fits the budget; None where one does."""

    @property
    def note(self) -> str:
        """Return one sentence for a page."""
        if self.misfit is not None:
            return f'layout.activation_checkpoint = "auto": {self.misfit}'
        blocks = self.layout.activation_checkpoint_blocks
        saves = f"{self.layout.activation_checkpoint} in all blocks" if blocks is None else checkpoint_words(blocks)
        return (
            f'layout.activation_checkpoint = "auto" is priced as {saves}, chosen by formulas; train and simulate '
            "choose by a traced step, where some blocks may differ: `meshwright simulate` shows their choice"
        )


def choose_recompute(layout: Layout, request: PlanRequest, asked_bytes: int | None = None) -> RecomputeChoice:
    """Return the layout with what each block is expected to save, within `asked_bytes` of tensors on a device.

    None is for 95 % of what the device can use. Raises UnsupportedError for what formulas cannot price.
    """
    budget_bytes, model = tensor_budget_bytes(request.cluster.device, asked_bytes), request.setup.model
    number = num_microbatches_of(layout, request)

    def measure(saves: Checkpoints) -> list[Need]:
        tried = with_checkpoints(layout, saves)
        # Only the ratio of selective to full is used, which hardly differs between pipeline ranks.
        again_s = float(time_steps(layout_table([tried]), request).recomputation_s[0])
        # A trace counts tensors; the workspaces of libraries are outside of them.
        peaks = [one.allocated_bytes - one.workspace_bytes for one in memory_of_ranks(tried, request)]
        return [Need(peak, again_s) for peak in peaks]

    blocks = blocks_of_pipeline_ranks(layout, model, request.workload.seq_len, number)

    try:
        return RecomputeChoice(with_checkpoints(layout, choose_checkpoints(blocks, budget_bytes, measure)))
    except InfeasibleLayout as misfit:
        words = (
            f"{misfit}. Formulas say so; train and simulate choose by a trace, which may need up to "
            f"{100 * _TRACE_ERROR:g} % more: allow for that in the budget"
        )
        return RecomputeChoice(layout.replace(activation_checkpoint="full"), InfeasibleLayout(words))


def with_recompute(request: PlanRequest, asked_bytes: int | None) -> PlanRequest:
    """Return the request with what the blocks of its given layout save, where "auto" leaves that open."""
    if request.given is None or request.given.activation_checkpoint != "auto":
        return request
    choice = choose_recompute(request.given, request, asked_bytes)
    return replace(request, given=choice.layout, recompute_note=choice.note, recompute_misfit=choice.misfit)


def tensor_budget_bytes(device: Device, asked_bytes: int | None) -> int:
    """Return the most bytes of tensors on one device: layout.memory_budget_bytes, or 95 % of what it can use."""
    return asked_bytes or int(_SHARE_OF_DEVICE * device.usable_memory_bytes)


def with_checkpoints(layout: Layout, saves: Checkpoints) -> Layout:
    """Return the layout with what each block saves; one policy for all has a shorter name."""
    if len(set(saves)) == 1:
        return layout.replace(activation_checkpoint=saves[0], activation_checkpoint_blocks=None)
    return layout.replace(activation_checkpoint="none", activation_checkpoint_blocks=saves)


def blocks_of_pipeline_ranks(
    layout: Layout, model: ModelSpec, seq_len: int, num_microbatches: int
) -> Sequence[Sequence[int]]:
    """Return the numbers of the blocks that each pipeline rank holds."""
    blocks = blocks_of_stages(layout, model, seq_len)
    schedule = build_schedule(layout, num_microbatches, read_schedule(layout))
    return [[block for stage in schedule.stages_of_rank(rank) for block in blocks[stage]] for rank in range(layout.pp)]
